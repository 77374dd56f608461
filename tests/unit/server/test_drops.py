"""A broken connection makes its zone be looked at, at once and a few times, and never more often than that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.domain.nouns import Slice
from penstock.server.drops import AFTER_S, APART_S, Drops


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.time = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self.time

    def steady(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.time + seconds, waiting))
        await waiting

    async def until(self, moment: float) -> None:
        """Wake whoever is due by then, one after another."""
        while True:
            await asyncio.sleep(0)
            due = sorted((each for each in self._sleepers if each[0] <= moment), key=lambda each: each[0])
            if not due:
                self.time = moment
                return
            self._sleepers.remove(due[0])
            self.time = max(self.time, due[0][0])
            due[0][1].set_result(None)


def a_slice(id: str, zone: str) -> Slice:
    return Slice(
        id=id,
        team="t",
        pool="p",
        provider="cloud",
        zone=zone,
        accelerator="v3-8",
        chips=4,
        hosts=1,
        intended_at=0.0,
    )


def play(story: Callable[[Drops, Clock, list[tuple[float, str]]], object]) -> None:
    async def whole() -> None:
        clock = Clock()
        looks: list[tuple[float, str]] = []
        slices = {each.id: each for each in (a_slice("s1", "a"), a_slice("s2", "a"), a_slice("s3", "b"))}
        drops = Drops(clock, lambda provider, zone: looks.append((clock.time, f"{provider}/{zone}")), lambda: slices)
        await story(drops, clock, looks)  # type: ignore[misc]

    asyncio.run(whole())


def test_a_zone_is_looked_at_at_once_and_again_because_clouds_are_slow() -> None:
    async def story(drops: Drops, clock: Clock, looks: list[tuple[float, str]]) -> None:
        drops.dropped("s1")
        drops.dropped("unknown")
        await clock.until(0.0)
        assert looks == [(0.0, "cloud/a")]
        await clock.until(100.0)
        assert looks == [(moment, "cloud/a") for moment in AFTER_S]

    play(story)


def test_the_next_break_is_not_kept_waiting_by_the_last() -> None:
    async def story(drops: Drops, clock: Clock, looks: list[tuple[float, str]]) -> None:
        drops.dropped("s1")
        await clock.until(3.0)
        drops.dropped("s2")
        await clock.until(3.0)
        assert looks[-1] == (3.0, "cloud/a")
        await clock.until(3.1)
        drops.dropped("s1")
        await clock.until(100.0)
        assert (3.0 + APART_S, "cloud/a") in looks, "what broke after the last look is looked after"
        assert looks[-1][0] >= 3.1 + AFTER_S[-1] - APART_S

    play(story)


def test_many_breaks_of_one_zone_cost_it_a_bounded_number_of_looks() -> None:
    async def story(drops: Drops, clock: Clock, looks: list[tuple[float, str]]) -> None:
        flapping_s = 60.0
        for tenth in range(int(flapping_s * 10)):
            drops.dropped("s1")
            drops.dropped("s2")
            await clock.until(tenth / 10)
        await clock.until(flapping_s + 2 * AFTER_S[-1])
        assert flapping_s <= len(looks) <= (flapping_s + AFTER_S[-1]) / APART_S + 2
        assert looks[-1][0] >= flapping_s, "the last break is looked after too"

    play(story)


def test_zones_are_apart() -> None:
    async def story(drops: Drops, clock: Clock, looks: list[tuple[float, str]]) -> None:
        drops.dropped("s1")
        drops.dropped("s3")
        await clock.until(0.0)
        assert looks == [(0.0, "cloud/a"), (0.0, "cloud/b")]

    play(story)
