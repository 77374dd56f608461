"""Provider calls as the executor makes them: shared out among zones, not made for what was let go, held when told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from penstock.controller import slices
from penstock.controller.calls import Calls, Pace
from penstock.controller.execute import CREATES_IN_LANE, Executor
from penstock.controller.witness import Evidence
from penstock.domain import limits
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Slice
from penstock.planner.actions import Action, Create, Delete, Plan
from penstock.ports.capacity import CREATING, RateLimited, Seen
from tests.unit.controller.stage import Stage, seen


class Provider:
    """Notes each call as (verb, slice); `answer` may wait or raise before it goes well."""

    name = "fake"

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.answer: Callable[[str, str], Awaitable[None]] | None = None

    async def create(self, wanted: Slice) -> Seen:
        await self._called("create", wanted.id, wanted.zone)
        return seen(wanted.id, CREATING, wanted.zone, f"vm-{wanted.id}")

    async def delete(self, name: str, zone: str) -> None:
        await self._called("delete", name, zone)

    async def _called(self, verb: str, name: str, zone: str) -> None:
        self.calls.append((verb, name))
        if self.answer is not None:
            await self.answer(verb, zone)


class Rig:
    """An executor on a stage, with a pace that only a test's own numbers narrow."""

    def __init__(self, stage: Stage, *, lane: int = limits.CALLS_AT_ONCE, at_once: int = 1000) -> None:
        self.stage = stage
        self.provider = Provider()
        self.calls = Calls(lane)
        self.evidence = Evidence(stage.clock)
        self.pace = Pace(stage.clock, at_once + 60, at_once)
        self.executor = Executor(
            stage.store,
            {"fake": cast("Any", self.provider)},
            cast("Any", None),
            stage.clock,
            stage.ids,
            self.evidence,
            self.calls,
            {"fake": self.pace},
            "ours",
        )

    async def perform(self, *actions: Action) -> None:
        await self.executor.perform(Plan(actions=actions, reasons={}))
        await settled()

    async def create_idle(self, ids: list[str]) -> None:
        """As a plan does: it asks for no slice that a call is in flight for."""
        await self.perform(*(Create(id) for id in ids if id not in self.evidence.busy))


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_zone_that_does_not_answer_gets_half_of_its_lane(stage: Stage) -> None:
    rig = Rig(stage)
    dead = [stage.intend(zones=("z1",))[0] for _ in range(3 * CREATES_IN_LANE)]
    alive = [stage.intend(zones=("z2",))[0] for _ in range(3 * CREATES_IN_LANE)]

    async def hang(verb: str, zone: str) -> None:
        if zone == "z1":
            await asyncio.Event().wait()

    async def story() -> None:
        rig.provider.answer = hang
        for _ in range(4):
            await rig.create_idle([*dead, *alive])
        made = Counter(id in dead for _, id in rig.provider.calls)
        assert made == {True: CREATES_IN_LANE, False: len(alive)}
        await rig.calls.stop()

    stage.wait(story())


def test_zones_take_turns_from_one_tick_to_the_next(stage: Stage) -> None:
    rig = Rig(stage, at_once=1)
    zone_of = {stage.intend(zones=(zone,))[0]: zone for zone in ("z1", "z2", "z3") * 2}

    async def story() -> None:
        for _ in zone_of:
            await rig.create_idle([id for id in zone_of if ("create", id) not in rig.provider.calls])
            stage.clock.advance(1.0)

    stage.wait(story())
    assert [zone_of[id] for _, id in rig.provider.calls] == ["z1", "z2", "z3"] * 2


@pytest.mark.parametrize("meanwhile", ["nothing", "let go", "held"])
def test_what_changed_during_the_wait_for_the_lane_counts(stage: Stage, meanwhile: str) -> None:
    rig = Rig(stage, lane=1)
    (id,) = stage.intend()

    async def story() -> None:
        async with rig.calls.lane("fake z1"):
            await rig.perform(Create(id))
            assert rig.provider.calls == []
            if meanwhile == "let go":
                await stage.store.transact(slices.release, id, "its pool is deleted")
            elif meanwhile == "held":
                rig.pace.hold("create", 60.0)
        await settled()

    stage.wait(story())
    assert rig.provider.calls == ([("create", id)] if meanwhile == "nothing" else [])
    assert not rig.evidence.busy


def test_deletes_that_wait_for_their_lane_obey_a_hold(stage: Stage) -> None:
    rig = Rig(stage, lane=1)
    leaving = [stage.ready() for _ in range(3)]
    for id in leaving:
        stage.do(slices.release, id, "test")

    queued = asyncio.Event()

    async def refuse(verb: str, zone: str) -> None:
        await queued.wait()
        raise RateLimited("too often", retry_after_s=60.0)

    async def story() -> None:
        rig.provider.answer = refuse
        await rig.perform(*map(Delete, leaving))
        queued.set()
        await settled()
        assert rig.provider.calls == [("delete", leaving[0])]
        rig.provider.answer = None
        stage.clock.advance(60.0)
        await rig.perform(*map(Delete, leaving[1:]))
        assert rig.provider.calls[1:] == [("delete", id) for id in leaving[1:]]

    stage.wait(story())


@pytest.mark.parametrize("error", [TimeoutError(), RateLimited("too often")])
def test_a_create_without_an_answer_is_noted_and_one_refused_for_the_rate_is_none(
    stage: Stage, error: Exception
) -> None:
    rig = Rig(stage)
    (id,) = stage.intend()

    async def fail(verb: str, zone: str) -> None:
        raise error

    async def story() -> None:
        rig.provider.answer = fail
        await rig.perform(Create(id))
        await stage.projection.catch_up()

    stage.wait(story())
    stage.clock.advance(5.0)
    tried = rig.evidence.take(stage.projection.snapshot, stage.clock.now()).tried
    assert tried == ({id: 5.0} if isinstance(error, TimeoutError) else {})
    assert stage.slice(id).state is SliceState.INTENDED
