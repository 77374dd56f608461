"""Performs a plan, never decides: commits what the plan says, then calls the outside, then commits what was seen.

Called by the loop once per tick. All decisions of a tick are one transaction (`carry_out`); calls to providers and the
bucket run in the background and are repeated by later plans until the store shows their effect. Every verb checks
again what the plan assumed, so a stale plan does nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count, zip_longest
from typing import Final

import msgspec

from penstock.controller import attempts, jobs, slices
from penstock.controller.calls import Calls, Pace
from penstock.controller.verbs import Outdated, verb
from penstock.controller.witness import Evidence
from penstock.domain import limits
from penstock.domain.custody import fence_path
from penstock.domain.ids import IdMaker
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Slice
from penstock.planner import actions
from penstock.planner.actions import Action, Plan
from penstock.ports.capacity import (
    Capacity,
    CapacityError,
    NameTaken,
    PermissionDenied,
    QuotaExceeded,
    RateLimited,
    Seen,
    Stockout,
    Unsent,
)
from penstock.ports.clock import Clock
from penstock.ports.objects import Objects, ObjectsError
from penstock.ports.store import QuotaFull, Reader, Store, Transaction

#: How long a zone rests when the project may not have more there: asking sooner cannot help.
REFUSED_WAIT_S: Mapping[type[CapacityError], float | None] = {
    Stockout: None,
    QuotaExceeded: 300.0,
    PermissionDenied: 600.0,
}


#: Creates that one zone may leave unanswered.
CREATES_IN_LANE: Final = limits.CALLS_AT_ONCE // 2


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's intent with the names its slices shall have: (name, zone) of each."""

    pool: str
    team: str
    wanted: tuple[tuple[str, str], ...]
    race: str | None
    number: int | None = None
    beside: str | None = None


Step = (
    attempts.Placement
    | Wish
    | actions.Release
    | actions.Drain
    | actions.Bury
    | actions.Stop
    | actions.Close
    | actions.Finish
)


@verb
def carry_out(tx: Transaction, steps: Sequence[Step]) -> list[str]:
    """All decisions of one tick in one commit; answers which were left because things had changed."""
    left = []
    for step in steps:
        try:
            _carry_out_one(tx, step)
        except (Outdated, QuotaFull) as error:
            left.append(f"{type(step).__name__}: {error}")
    return left


def _carry_out_one(tx: Transaction, step: Step) -> None:
    match step:
        case attempts.Placement():
            attempts.place_one(tx, step)
        case Wish():
            slices.intend(tx, step.pool, step.team, step.wanted, step.race, step.number, step.beside)
        case actions.Release():
            slices.release(tx, step.slice, step.why, step.useless, step.vanished)
        case actions.Drain():
            slices.drain(tx, step.slice, step.why)
        case actions.Bury():
            slices.bury(tx, step.slice, step.evidence)
        case actions.Stop():
            attempts.stop(tx, step.attempt, step.why)
        case actions.Close():
            attempts.close(tx, step.attempt, step.cause, step.evidence, step.clean)
        case actions.Finish():
            jobs.finish(tx, step.job, step.cancelled, step.reason)


class Executor:
    """Performs plans for one controller while it leads."""

    def __init__(
        self,
        store: Store,
        capacities: Mapping[str, Capacity],
        objects: Objects,
        clock: Clock,
        ids: IdMaker,
        evidence: Evidence,
        calls: Calls,
        paces: Mapping[str, Pace],
        label: str,
    ) -> None:
        self._store = store
        self._capacities = capacities
        self._objects = objects
        self._clock = clock
        self._ids = ids
        self._evidence = evidence
        self._calls = calls
        self._label = label
        self._paces = paces
        self._unmade = evidence.unmade
        self._turns = count(1)
        self._served: dict[tuple[str, str], int] = {}  #: zone -> turn of its last create

    async def perform(self, plan: Plan) -> None:
        """Commit the plan's decisions, then start the calls that follow from them."""
        steps = [step for action in plan.actions if (step := self._step(action)) is not None]
        if steps:
            await self._store.transact(carry_out, steps)
        creates: list[str] = []
        for step in steps:
            if isinstance(step, Wish):
                creates += (name for name, _ in step.wanted)
                self._unmade.update(name for name, _ in step.wanted)
            elif isinstance(step, actions.Release):
                if step.slice not in self._unmade:
                    self._start("delete", step.slice, self._delete)
            elif isinstance(step, actions.Bury):
                self._evidence.forget_slice(step.slice)
        for action in plan.actions:
            match action:
                case actions.Create():
                    creates.append(action.slice)
                case actions.Delete():
                    self._start("delete", action.slice, self._delete)
                case actions.Ask():
                    self._start("ask", action.slice, self._ask)
                case actions.Fence():
                    self._calls.start(f"fence {action.attempt}", partial(self._fence, action.attempt))
                case _:
                    pass
        await self._start_creates(creates)

    async def _start_creates(self, ids: Sequence[str]) -> None:
        """Start as many as their providers' pace allows, zone after zone in turn; a later plan asks for the others.

        Whoever waits for longest is first: a pace of one a second must not serve the first zones only. A zone that
        does not answer gets half of its lane at most: it neither eats up the pace nor delays deletes.
        """
        if not ids or not any(pace.open for pace in self._paces.values()):
            return
        unanswered = {id for id in self._evidence.busy if self._calls.running(f"create {id}")}
        lines: dict[tuple[str, str], list[str]] = {}
        taken: Counter[tuple[str, str]] = Counter()
        for slice in await self._store.read(_read_slices, [*ids, *unanswered]):
            zone = (slice.provider, slice.zone)
            if slice.id in unanswered:
                taken[zone] += 1
            elif slice.state is SliceState.INTENDED and slice.id not in self._evidence.busy:
                lines.setdefault(zone, []).append(slice.id)
        order = sorted(lines, key=lambda zone: (self._served.get(zone, 0), zone))
        chosen = ([(zone, id) for id in sorted(lines[zone])[: max(0, CREATES_IN_LANE - taken[zone])]] for zone in order)
        for turn in zip_longest(*chosen):
            for zone, id in (each for each in turn if each is not None):
                pace = self._paces.get(zone[0])
                if pace is not None and pace.take():
                    self._served[zone] = next(self._turns)
                    self._start("create", id, self._create)

    def _step(self, action: Action) -> Step | None:
        """The part of an action that is a commit, with the ids it needs."""
        now = self._clock.now()
        match action:
            case actions.Place():
                return attempts.Placement(
                    attempt=self._ids.make("attempt", now),
                    job=action.job,
                    replica=action.replica,
                    slices=action.slices,
                    chips=action.chips,
                    band=action.band,
                    borrowed=action.borrowed,
                    backfilled=action.backfilled,
                )
            case actions.Intend():
                raced = len(action.zones) > 1 or action.beside is not None
                return Wish(
                    pool=action.pool,
                    team=action.team,
                    wanted=tuple((self._ids.make("slice", now), zone) for zone in action.zones),
                    race=self._ids.make("race", now) if raced else None,
                    number=action.number,
                    beside=action.beside,
                )
            case actions.Create() | actions.Delete() | actions.Ask() | actions.Fence():
                return None
            case _:
                return action

    def _start(self, what: str, slice: str, call: Callable[[str], Awaitable[None]]) -> None:
        """One provider call per slice at a time: a delete never overtakes its create."""
        if slice not in self._evidence.busy and self._calls.start(
            f"{what} {slice}", partial(self._freeing, slice, call)
        ):
            self._evidence.busy.add(slice)

    async def _freeing(self, slice: str, call: Callable[[str], Awaitable[None]]) -> None:
        try:
            await call(slice)
        finally:
            self._evidence.busy.discard(slice)

    def _lane(self, slice: Slice) -> asyncio.Semaphore:
        return self._calls.lane(f"{slice.provider} {slice.zone}")

    async def _slice(self, id: str) -> Slice | None:
        return await self._store.read(_read_slice, id)

    async def _create(self, id: str) -> None:
        slice = await self._slice(id)
        if slice is None:
            return
        pace = self._paces[slice.provider]
        try:
            async with self._lane(slice):
                # The wait for the lane may have been long: what was let go meanwhile must not be made.
                wanted = await self._slice(id)
                if wanted is None or wanted.state is not SliceState.INTENDED or pace.held("create"):
                    return
                seen = await self._ask_for(wanted)
        except RateLimited as error:
            pace.hold("create", error.retry_after_s)
            return
        except (Stockout, QuotaExceeded, PermissionDenied) as error:
            full = isinstance(error, QuotaExceeded)
            await self._store.transact(slices.refuse, id, str(error), REFUSED_WAIT_S[type(error)], full)
            return
        except (CapacityError, TimeoutError):
            self._evidence.tried(id)
            return  # whether it took effect is unknown: the next plan asks again, by name
        if seen is None:
            return
        if seen.label != self._label:
            await self._store.transact(slices.disown, id, "the name belongs to somebody else")
            return
        await self._store.transact(slices.observe, [seen])

    def _capacity(self, slice: Slice) -> Capacity:
        """The store may know slices of a provider that this server was not given: nobody can reach those now."""
        capacity = self._capacities.get(slice.provider)
        if capacity is None:
            raise CapacityError(f"{slice.provider}: this server was not given the provider of slice {slice.id}")
        return capacity

    async def _ask_for(self, slice: Slice) -> Seen | None:
        capacity = self._capacity(slice)
        unmade = slice.id in self._unmade
        # From here on something may bear its name, until a plain no says that nothing does.
        self._unmade.discard(slice.id)
        async with asyncio.timeout(limits.CALL_TIMEOUT_S):
            try:
                return await capacity.create(slice)
            except NameTaken:
                return await self._get(slice)
            except (Stockout, QuotaExceeded, PermissionDenied, RateLimited, Unsent):
                if unmade:
                    self._unmade.add(slice.id)
                raise

    async def _delete(self, id: str) -> None:
        slice = await self._slice(id)
        if slice is None or slice.state is not SliceState.DELETING:
            return
        pace = self._paces.get(slice.provider)
        try:
            async with self._lane(slice), asyncio.timeout(limits.CALL_TIMEOUT_S):
                if pace is not None and pace.held("delete"):
                    return
                self._evidence.deleted(id)
                # Nobody may ever have confirmed that what bears this name is ours.
                if slice.provider_id is None and not await self._is_ours(slice):
                    return
                await self._capacity(slice).delete(id, slice.zone)
        except RateLimited as error:
            self._paces[slice.provider].hold("delete", error.retry_after_s)
        except (CapacityError, TimeoutError):
            return  # repeated after `DELETE_RETRY_S` until a get says that it does not exist

    async def _ask(self, id: str) -> None:
        slice = await self._slice(id)
        if slice is None:
            return
        try:
            async with self._lane(slice), asyncio.timeout(limits.CALL_TIMEOUT_S):
                seen = await self._get(slice)
        except (CapacityError, TimeoutError):
            self._evidence.doubted(id)
            return
        ours = seen is not None and seen.label == self._label
        self._evidence.asked(id, exists=ours)
        if seen is not None and ours:
            await self._store.transact(slices.observe, [seen])

    async def _get(self, slice: Slice) -> Seen | None:
        """Ask by name, unless the provider wants to be left alone with such questions."""
        capacity, pace = self._capacity(slice), self._paces[slice.provider]
        if pace.held("get"):
            raise RateLimited(f"{slice.provider} asked not to be asked by name for now", pace.left_s("get"))
        try:
            return await capacity.get(slice.id, slice.zone)
        except RateLimited as error:
            pace.hold("get", error.retry_after_s)
            raise

    async def _is_ours(self, slice: Slice) -> bool:
        """Whether something of ours bears the name; false also while nobody can tell."""
        try:
            seen = await self._get(slice)
        except RateLimited:
            return False  # deletes are not what it is tired of: this one is repeated as any other
        return seen is not None and seen.label == self._label

    async def _fence(self, attempt: str) -> None:
        """Pass the fence in the store, then in the bucket; only then does the wait for a successor begin."""
        try:
            wanted = await self._store.transact(attempts.raise_fence, attempt)
        except Outdated:
            return
        path = fence_path(wanted.job, wanted.replica)
        try:
            async with self._calls.lane("objects"), asyncio.timeout(limits.CALL_TIMEOUT_S):
                await self._objects.put(path, str(wanted.fence).encode())
        except (ObjectsError, TimeoutError):
            self._evidence.objects_down = True
            return
        self._evidence.objects_down = False
        self._evidence.fenced(attempt)
        try:
            await self._store.transact(attempts.fenced, attempt)
        except Outdated:
            return


def _read_slice(reader: Reader, id: str) -> Slice | None:
    return reader.slice(id)


def _read_slices(reader: Reader, ids: Sequence[str]) -> list[Slice]:
    return reader.slices(ids)
