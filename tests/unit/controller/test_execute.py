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
from penstock.planner.actions import Action, Ask, Create, Delete, Intend, Plan, Release
from penstock.ports.capacity import (
    CREATING,
    PermissionDenied,
    QuotaExceeded,
    RateLimited,
    Seen,
    Stockout,
    Transient,
    Unsent,
)
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

    async def get(self, name: str, zone: str) -> Seen | None:
        await self._called("get", name, zone)
        return None

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


def test_a_provider_that_is_asked_by_name_too_often_is_left_alone_and_deletes_go_on(stage: Stage) -> None:
    rig = Rig(stage)
    doubtful = [stage.ready() for _ in range(3)]
    unseen, leaving = stage.intend()[0], stage.ready()
    for id in (unseen, leaving):
        stage.do(slices.release, id, "test")

    async def refuse(verb: str, zone: str) -> None:
        if verb == "get":
            raise RateLimited("too often", retry_after_s=60.0)

    async def story() -> None:
        rig.provider.answer = refuse
        for _ in range(6):
            await rig.perform(*(Ask(id, "silent") for id in doubtful), Delete(unseen), Delete(leaving))
            stage.clock.advance(9.0)
        calls = Counter(rig.provider.calls)
        assert sum(count for (verb, _), count in calls.items() if verb == "get") == 1
        assert calls["delete", leaving] == 6
        assert calls["delete", unseen] == 0, "nobody has confirmed that it is ours"
        rig.provider.answer = None
        stage.clock.advance(6.0)
        await rig.perform(Ask(doubtful[0], "silent"), Delete(unseen))
        assert rig.provider.calls[-2:] == [("get", doubtful[0]), ("get", unseen)]

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


# --- what was surely never made ---
def intends(rig: Rig, *answers: Exception | None) -> str:
    """The slice that a plan asks for, after its first creates were answered so; unanswered ones are asked again."""
    left = list(answers)

    async def answer(verb: str, zone: str) -> None:
        error = left.pop(0) if left else None
        if error is not None:
            raise error

    async def story() -> str:
        rig.provider.answer = answer
        await rig.perform(Intend(pool="small", team="lab", zones=("z1",)))
        (id,) = [slice.id for slice in await rig.stage.store.read(lambda reader: reader.live_slices())]
        while left:
            rig.stage.clock.advance(60.0)
            await rig.perform(Create(id))
        return id

    return rig.stage.wait(story())


REFUSALS = (PermissionDenied("no"), Stockout("none"), QuotaExceeded("full"))


@pytest.mark.parametrize("answers", [*((refusal,) for refusal in REFUSALS), (RateLimited("too often"), REFUSALS[0]),
                                     (Unsent("no connection"), REFUSALS[0])])  # fmt: skip
def test_a_create_that_was_only_ever_refused_made_nothing(stage: Stage, answers: tuple[Exception, ...]) -> None:
    rig = Rig(stage)
    id = intends(rig, *answers)
    assert stage.slice(id).state is SliceState.DELETING
    assert rig.evidence.unmade == {id}


@pytest.mark.parametrize(
    "answers", [(None,), (TimeoutError(),), (TimeoutError(), REFUSALS[0]), (Transient("503"), REFUSALS[0])]
)
def test_after_a_create_that_may_have_had_an_effect_nothing_is_certain(
    stage: Stage, answers: tuple[Exception | None, ...]
) -> None:
    rig = Rig(stage)
    intends(rig, *answers)
    assert rig.evidence.unmade == set()


def test_of_what_an_earlier_lead_intended_nothing_is_certain(stage: Stage) -> None:
    """Another leader may have asked for it meanwhile, and so may calls of ours that are still on their way."""
    rig = Rig(stage)
    id = intends(rig, RateLimited("too often"))
    assert rig.evidence.unmade == {id}
    rig.evidence.listen()
    assert rig.evidence.unmade == set()

    async def refuse(verb: str, zone: str) -> None:
        raise REFUSALS[0]

    async def story() -> None:
        rig.provider.answer = refuse
        stage.clock.advance(60.0)
        await rig.perform(Create(id))

    stage.wait(story())
    assert stage.slice(id).state is SliceState.DELETING
    assert rig.evidence.unmade == set()


def test_what_was_never_made_is_not_deleted_at_the_provider(stage: Stage) -> None:
    rig = Rig(stage, at_once=1)

    async def story() -> None:
        await rig.perform(*(Intend(pool="small", team="lab", zones=("z1",)) for _ in range(2)))
        ((_, made),) = rig.provider.calls
        slices = await stage.store.read(lambda reader: reader.live_slices())
        (waiting,) = [slice.id for slice in slices if slice.id != made]
        await rig.perform(Release(made, "test"), Release(waiting, "test"))
        assert rig.provider.calls[1:] == [("delete", made)]
        assert rig.evidence.unmade == {waiting}

    stage.wait(story())
