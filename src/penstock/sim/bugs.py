"""The planted bugs: the twelve of reliability.md and more, each as small as a slip of the hand would be.

`sim.check` switches one on for the time of a seed. None of them raises by itself: what fails is the rule, or the
checker is blind. Where the database itself would refuse what a bug does, its constraint is taken out as well. Every one
names the rules that should catch it; `tests/sim` demands that one of them does within 200 seeds.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from penstock.controller import attempts, execute, jobs, observe, reports, verbs, witness
from penstock.controller.verbs import save_job
from penstock.domain import endings, ledger
from penstock.domain.custody import Launch
from penstock.domain.lifecycle import BILLED_SLICE_STATES, AttemptState, Cause, JobState, SliceState
from penstock.domain.nouns import Attempt, Exit, Job, Slice, StopOrder
from penstock.objects.memory import MemoryObjects
from penstock.planner import actions, backfill, snapshot
from penstock.ports.capacity import CapacityError, Listing, NameTaken, Seen
from penstock.ports.store import Transaction
from penstock.sim.planted import REGISTRY, Bug, Undo, bug, swap
from penstock.store import rows, sqlite, turns, writing


def _without(*drops: str) -> Undo:
    """Open simulated stores without these constraints: the database would refuse the bug otherwise."""
    right = sqlite.SqliteStore.inline

    def wrong(clock: Any, path: str = ":memory:") -> Any:
        store = right(clock, path)
        for drop in drops:
            store._core.link.script(drop)
        return store

    sqlite.SqliteStore.inline = staticmethod(wrong)  # type: ignore[method-assign, assignment]

    def undo() -> None:
        sqlite.SqliteStore.inline = right  # type: ignore[method-assign]

    return undo


# --- the twelve of reliability.md ---


@bug("commit-without-fence", "a success counts although its fence was passed", "S6", "S5", "S8")
def _commit_without_fence() -> list[Undo]:
    right = endings.end_of

    def wrong(attempt: Attempt, cancelled: bool, outputs: tuple[str, ...]) -> Any:
        return right(msgspec.structs.replace(attempt, fencing_at=None), cancelled, outputs)

    return [swap(reports, "end_of", wrong), swap(reports, "fence_passed", lambda *_: False)]


@bug("one-listing", "a slice missing from one listing is taken for gone", "S14", "S5", "S10")
def _one_listing() -> list[Undo]:
    right = witness.Evidence.take

    def wrong(self: Any, *args: Any) -> Any:
        taken = right(self, *args)
        for id in taken.absent:
            taken.absent[id] = 999.0
            taken.denied.add(id)
            taken.missing.add(id)
        return taken

    return [swap(witness.Evidence, "take", wrong)]


@bug("three-listings", "three listings without it, and nobody asks for it by name", "S14", "S5", "S10")
def _three_listings() -> list[Undo]:
    right_absent, right_take = witness.Evidence.absent, witness.Evidence.take
    misses: dict[int, dict[str, int]] = {}

    def absent(self: Any, slice: str) -> None:
        counts = misses.setdefault(id(self), {})
        counts[slice] = counts.get(slice, 0) + 1
        right_absent(self, slice)

    def take(self: Any, *args: Any) -> Any:
        taken = right_take(self, *args)
        for slice, times in misses.get(id(self), {}).items():
            if times >= 3 and slice in taken.absent:
                taken.absent[slice] = 999.0
                taken.denied.add(slice)
        return taken

    return [swap(witness.Evidence, "absent", absent), swap(witness.Evidence, "take", take)]


@bug("no-tombstone", "a name is forgotten once it is gone: late creates are nobody's", "L4")
def _no_tombstone() -> list[Undo]:
    async def wrong(self: Any, *args: Any) -> None:
        return None

    return [swap(observe.Observer, "_sweep", wrong)]


@bug("cancel-ignored-by-placement", "a job that waits to go on is placed although it was cancelled", "S13", "S6")
def _cancel_ignored() -> list[Undo]:
    right_end, right_put, right_check = jobs.end_job, snapshot.Snapshot.put_job, attempts.may_start

    def end_job(tx: Transaction, job: Job, state: JobState, cause: Any, reason: str) -> Job:
        if state is JobState.CANCELLED and job.state is JobState.QUEUED and job.chains and not job.spec.after:
            return job
        return right_end(tx, job, state, cause, reason)

    def put_job(self: Any, job: Job) -> None:
        blind = msgspec.structs.replace(job, cancel_at=None) if job.state is JobState.QUEUED else job
        right_put(self, blind)

    def may_start(job: Job) -> bool:
        return right_check(msgspec.structs.replace(job, cancel_at=None))

    return [
        swap(jobs, "end_job", end_job),
        swap(snapshot.Snapshot, "put_job", put_job),
        swap(attempts, "may_start", may_start),
        swap(reports, "_launch", _launch_blindly(reports._launch)),
    ]


def _launch_blindly(right: Any) -> Any:
    def wrong(attempt: Attempt, job: Job, slice: Slice, host: int) -> Launch | None:
        launch: Launch | None = right(attempt, msgspec.structs.replace(job, cancel_at=None), slice, host)
        return launch

    return wrong


@bug("fence-not-raised", "a retry keeps the fence of the attempt before", "S5", "S6")
def _fence_not_raised() -> list[Undo]:
    return [
        _without("drop index attempts_one_per_fence"),
        swap(attempts, "next_fence", lambda job: max(1, job.fence)),
    ]


def _allow(*states: str) -> Undo:
    """Let jobs in these states succeed."""
    steps = rows.JOBS.steps
    assert steps is not None
    right = dict(steps)
    steps.update({(state, "job.succeeded"): "succeeded" for state in states})

    def undo() -> None:
        steps.clear()
        steps.update(right)

    return undo


@bug("late-report-revives", "a good report of a closed attempt is taken as if it were live", "S4", "S3", "S8", "S13")
def _late_report() -> list[Undo]:
    right = reports._merge

    def wrong(tx: Transaction, slice: Slice, request: Any, held: Any) -> None:
        attempt = tx.attempt(held.attempt)
        if attempt is not None and attempt.state is AttemptState.CLOSED and held.exit is not None and held.exit.well:
            job = tx.jobs((attempt.job,))[0]
            if job.state in (JobState.FAILED, JobState.CANCELLED):
                tx.save(msgspec.structs.replace(job, state=JobState.SUCCEEDED), "job.succeeded", body={})
            return
        right(tx, slice, request, held)

    return [_without("drop trigger jobs_step"), swap(reports, "_merge", wrong), _allow("failed", "cancelled")]


@bug("create-before-intent", "the provider is called before the intent is committed", "S9")
def _create_before_intent() -> list[Undo]:
    right = execute.Executor.perform

    async def wrong(self: Any, plan: Any) -> None:
        for action in plan.actions:
            if isinstance(action, actions.Intend):
                early = Slice(
                    id=self._ids.make("slice", self._clock.now()), team=action.team, pool=action.pool, provider="fake",
                    zone=action.zones[0], accelerator="v5e-8", chips=8, hosts=1, intended_at=0.0,
                )  # fmt: skip
                with contextlib.suppress(CapacityError):
                    await self._capacities["fake"].create(early)
        await right(self, plan)

    return [swap(execute.Executor, "perform", wrong)]


@bug("cancel-keeps-fence", "a cancel does not raise the fence, and a success is judged by its fence alone", "S13", "S6")
def _cancel_keeps_fence() -> list[Undo]:
    right, right_go_on = endings.end_of, attempts._go_on

    def go_on(tx: Transaction, job: Job, attempt: Attempt, cause: Cause) -> None:
        blind = msgspec.structs.replace(job, cancel_at=None) if cause is Cause.SUCCEEDED else job
        right_go_on(tx, blind, attempt, cause)

    def request(tx: Transaction, job: Job) -> Job:
        wanted = msgspec.structs.replace(job, cancel_at=tx.at, updated_at=tx.at)
        return save_job(tx, job, wanted, "job.cancel_requested", fence=job.fence)

    return [
        swap(jobs, "_request_cancel", request),
        swap(attempts, "_go_on", go_on),
        swap(reports, "end_of", lambda attempt, cancelled, outputs: right(attempt, False, outputs)),
    ]


@bug("retry-without-closing", "a lost attempt is retried at once and closed only when somebody looks again", "S5")
def _retry_without_closing() -> list[Undo]:
    right = attempts.close_attempt

    def wrong(tx: Transaction, attempt: Attempt, cause: Cause, evidence: tuple[str, ...], *, clean: bool) -> None:
        job = tx.jobs((attempt.job,))[0]
        chain = job.chain(attempt.replica)
        if job.finished_at is not None:
            closed = msgspec.structs.replace(attempt, state=AttemptState.CLOSED, cause=cause, closed_at=tx.at)
            body = {"job": job.id, "replica": attempt.replica, "cause": cause.value, "clean": clean}
            tx.save(closed, "attempt.closed", fence=attempt.fence, body=body)
        elif (
            cause not in (Cause.LOST, Cause.INFRA, Cause.PREEMPTED) or len(job.chains) > 1 or job.cancel_at is not None
        ):
            right(tx, attempt, cause, evidence, clean=clean)
        elif chain.live and attempt.stop is None and job.state is not JobState.QUEUED:
            again = msgspec.structs.replace(chain, live=False)
            queued = msgspec.structs.replace(job, chains=attempts.with_chain(job, again), state=JobState.QUEUED)
            save_job(tx, job, queued, "job.requeued", {"replica": attempt.replica, "cause": cause.value, "reason": ""})
            tx.save(msgspec.structs.replace(attempt, stop=StopOrder("gang", tx.at)), "attempt.stopping", body={})
        elif job.state is not JobState.QUEUED and chain.attempts == 1:
            right(tx, attempt, cause, evidence, clean=clean)

    return [
        _without("drop index attempts_one_live"),
        swap(attempts, "close_attempt", wrong),
        swap(reports, "close_attempt", wrong),
    ]


@bug("second-commit", "a shard's commit record may be written again", "S7")
def _second_commit() -> list[Undo]:
    right = MemoryObjects.put_new

    async def wrong(self: Any, path: str, data: bytes) -> int:
        if "/commits/" in path or "/leases/" in path:
            return int(await self.put(path, data))
        return await right(self, path, data)

    def next_lease(seen: Any, now: float, lease_s: float) -> int:
        return max((lease.number for lease in seen), default=0) + 1  # nobody waits, so that two meet on a unit

    return [swap(MemoryObjects, "put_new", wrong), swap(ledger, "next_lease", next_lease)]


@bug("quota-unchecked", "the limits of team and provider are looked at by nobody when chips are reserved", "S12")
def _quota_unchecked() -> list[Undo]:
    right, right_free = writing.RowTransaction.reserve, snapshot.Snapshot.free_chips

    def reserve(self: Any, scope: str, name: str, chips: int) -> None:
        right(self, scope, name, 0)
        limit, used = self._counters[scope, name]
        if scope in ("team", "provider"):
            self._counters[scope, name] = (None, used)
        right(self, scope, name, chips)
        _, used = self._counters[scope, name]
        self._counters[scope, name] = (limit, used)

    def free_chips(self: Any, scope: str, name: str) -> int | None:
        return right_free(self, scope, name) if scope == "pool" else None

    return [swap(writing.RowTransaction, "reserve", reserve), swap(snapshot.Snapshot, "free_chips", free_chips)]


# --- six more ---


@bug("old-epoch", "an effect of a replaced leader is committed", "S16")
def _old_epoch() -> list[Undo]:
    right = turns.Turns.run

    def wrong(self: Any, actor: str, epoch: int, *args: Any) -> Any:
        leads = self._epoch
        if epoch:
            self._epoch = epoch
        try:
            return right(self, actor, epoch, *args)
        finally:
            if epoch and self._epoch == epoch:
                self._epoch = max(leads, epoch)

    return [swap(turns.Turns, "run", wrong)]


@bug("half-gang", "the hosts of a gang's second slice are told of a smaller world", "S11")
def _half_gang() -> list[Undo]:
    right = reports._launch

    def wrong(attempt: Attempt, job: Job, slice: Slice, host: int) -> Launch | None:
        launch = right(attempt, job, slice, host)
        if launch is not None and len(attempt.slices) > 1 and attempt.slices[0].slice != slice.id:
            return msgspec.structs.replace(launch, world_size=launch.world_size // 2)
        return launch

    return [swap(reports, "_launch", wrong)]


@bug("chips-freed-early", "the provider's chips are freed when the delete is asked for, not when it is done", "S12")
def _chips_freed_early() -> list[Undo]:
    early = frozenset(BILLED_SLICE_STATES - {SliceState.DELETING, SliceState.PREEMPTED, SliceState.FAILED})
    return [swap(verbs, "BILLED_SLICE_STATES", early), swap(snapshot, "BILLED_SLICE_STATES", early)]


@bug("report-lost", "a host's end is acknowledged and thrown away", "L2", "L8")
def _report_lost() -> list[Undo]:
    right_merge, right_orders = reports._merge_exit, reports.orders

    def merge(tx: Transaction, attempt: Attempt, exit: Exit, outputs: tuple[str, ...]) -> None:
        if attempt.fence % 2 == 0:
            right_merge(tx, attempt, exit, outputs)

    def orders(slice: Slice, attempts_: Any, request: Any, launch: Any) -> Any:
        reply = right_orders(slice, attempts_, request, launch)
        ended = tuple(held.attempt for held in request.held if held.exit is not None)
        return msgspec.structs.replace(reply, forget=ended)

    return [swap(reports, "_merge_exit", merge), swap(reports, "orders", orders)]


@bug("backfill-delays-head", "jobs pass a waiting gang however long they run", "L6")
def _backfill_delays_head() -> list[Undo]:
    def never(self: Any, pool: str, zones: tuple[str, ...], count: int) -> float:
        return math.inf if count > 0 else float(self._now)

    return [
        swap(backfill.Endings, "slices_free_at", never),
        swap(backfill.Endings, "team_chips_free_at", lambda self, team, chips: math.inf),
    ]


@bug("array-overrun", "jobs of an array come into their queue however many of it are under way", "S12")
def _array_overrun() -> list[Undo]:
    return [swap(jobs, "_has_place", lambda *_: True)]


@bug("unreachable-is-empty", "a zone that cannot be listed or asked is read as an empty one", "S14", "S5", "S10")
def _unreachable_is_empty() -> list[Undo]:
    async def fetch(self: Any, provider: str, zone: str) -> Listing:
        try:
            found = await self._capacities[provider].list(zone)
        except (CapacityError, TimeoutError):
            return Listing(zone=zone, slices=())
        return Listing(zone=zone, slices=found.slices)

    async def ask(self: Any, id: str) -> None:
        slice = await self._slice(id)
        if slice is None:
            return
        try:
            seen = await self._capacities[slice.provider].get(id, slice.zone)
        except (CapacityError, TimeoutError):
            seen = None
        self._evidence.asked(id, exists=seen is not None)

    return [swap(observe.Observer, "_fetch", fetch), swap(execute.Executor, "_ask", ask)]


@bug("asked-is-unmade", "a slice that was asked for is still believed never to have been made", "S14", "L4")
def _asked_is_unmade() -> list[Undo]:
    async def ask_for(self: Any, slice: Slice) -> Seen | None:
        try:
            made: Seen | None = await self._capacities[slice.provider].create(slice)
        except NameTaken:
            made = await self._capacities[slice.provider].get(slice.id, slice.zone)
        return made

    return [swap(execute.Executor, "_ask_for", ask_for)]


BUGS: Mapping[str, Bug] = REGISTRY


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """With this bug in the code (none: as it is)."""
    if name is not None and name not in BUGS:
        raise KeyError(f"bug: {name!r} is not one of {', '.join(sorted(BUGS))}")
    undos = BUGS[name].plant() if name is not None else []
    try:
        yield
    finally:
        for undo in reversed(undos):
            undo()
