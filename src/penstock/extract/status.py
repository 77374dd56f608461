"""How a run goes, from the bucket alone: who works on what, who was lost, how fast it is, when it will be done.

`tpu extract status`, `watch` and `stats` show it. Times are the store's own stamps. It reads; what it says about a
worker is what leases, clocks and commits show. A worker renews a lease or its clock several times in a lease's length,
so one without a sign for that long is lost, unless it has taken its clock away: then it has ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from penstock.domain import ledger
from penstock.domain.ledger import Lease
from penstock.extract.calls import Calls
from penstock.extract.claims import Sign, clocks_of_run, leases_of_run
from penstock.extract.layout import UnitCommit
from penstock.extract.plan import RunPlan
from penstock.extract.seal import READS_AT_ONCE, RunFacts, find_manifest, read_some_records, summary
from penstock.ports.objects import Kept

T = TypeVar("T")

#: The rate is told over this long, so that one slow unit does not make it jump.
RECENT_S: Final = 600.0


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that has left a trace. `state` is one of

    working (it has a lease, and gave a sign within its length), idle (it gave a sign, and has none), recovering (it
    gave none, and the unit it held waits to be taken over), lost (it gave none, and holds up nothing), ended.
    """

    worker: str
    state: str
    unit: str
    seen_s: float  #: since its last sign
    units: int  #: committed
    shards: int  #: objects that these commits name
    documents: int
    tokens: int


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    sealed: bool
    units: int
    committed: int
    rows: int
    facts: RunFacts
    workers: tuple[WorkerView, ...]
    healthy: int
    working: int
    recovering: int
    lost: int
    tokens_per_s: float  #: 0 when nobody is alive
    left_s: float | None  #: None: not known, or nobody works
    damaged: tuple[str, ...] = ()  #: commits that cannot be read, and what to do


class Done(msgspec.Struct, frozen=True):
    """A commit and when it was made, by the store's clock."""

    commit: UnitCommit
    at: float


class _Held(msgspec.Struct, frozen=True):
    """A lease on a unit that is open."""

    unit: str
    lease_s: float  #: 0: not known
    at: float
    newest: bool  #: of its unit: others have not taken over


class _Trace(msgspec.Struct):
    """What a worker has left in the bucket."""

    commits: list[Done] = []
    held: list[_Held] = []
    clock_at: float | None = None  #: None: it has taken its clock away, so it has ended; or it holds a lease
    lease_s: float = 0.0  #: as its clock says; 0: not known

    def last_sign(self) -> float:
        at = [each.at for each in self.commits] + [each.at for each in self.held]
        return max([*at, self.clock_at] if self.clock_at is not None else at)

    def length(self, usual: float) -> float:
        return self.lease_s or max((each.lease_s for each in self.held), default=0.0) or usual


class Watcher:
    """Looks at one run again and again; commits never change, so each is read once."""

    def __init__(self, calls: Calls, plan: RunPlan, lease_s: float) -> None:
        """`lease_s` is that of workers which do not say their own."""
        self._calls = calls
        self._plan = plan
        self._lease_s = lease_s
        self._commits: dict[str, UnitCommit] = {}  #: by path
        self._committed: frozenset[str] = frozenset()  #: units, those whose commit cannot be read among them
        self._signs: dict[str, float] = {}  #: by path: lengths of leases, which a worker never changes
        self._broken: dict[str, str] = {}

    async def look(self, now: float) -> RunView:
        """`now` is by the store's clock, or a clock about as right."""
        done = await self.done()
        # As workers judge it: a commit that cannot be read leaves its unit committed, and a manifest sound.
        whole = not ledger.open_units(self._plan, self._committed)
        sealed = whole and await find_manifest(self._calls, self._plan.run) is not None
        workers = _workers(await self._traces(done), now, self._lease_s, sealed=sealed)
        counts = Counter(worker.state for worker in workers)
        facts = summary(self._plan, {each.commit.unit: each.commit for each in done})
        # Of those who are gone the last minutes tell nothing about the next.
        rate = tokens_per_s(done, now) if counts["working"] + counts["idle"] else 0.0
        left = self._plan.rows - facts.documents
        per_document = facts.tokens / facts.documents if facts.documents else 0.0
        known = counts["working"] and rate and per_document
        return RunView(
            run=self._plan.run,
            sealed=sealed,
            units=len(self._plan.units),
            committed=len(done),
            rows=self._plan.rows,
            facts=facts,
            workers=workers,
            healthy=counts["working"] + counts["idle"],
            working=counts["working"],
            recovering=counts["recovering"],
            lost=counts["lost"],
            tokens_per_s=rate,
            left_s=0.0 if sealed or not left else left * per_document / rate if known else None,
            damaged=tuple(self._broken[unit] for unit in sorted(self._broken)),
        )

    async def done(self) -> list[Done]:
        """All commits that count and can be read, oldest first."""
        run = self._plan.run
        stamps = {kept.path: kept.written_at for kept in await self._calls.survey(ledger.commits_prefix(run))}
        editions = ledger.editions(run, stamps)
        self._committed = editions.committed
        counting = {ledger.commit_path(run, unit, editions.of(unit)): unit for unit in editions.committed}
        self._commits = {path: commit for path, commit in self._commits.items() if path in counting}
        new = [(unit, editions.of(unit)) for path, unit in counting.items() if path not in self._commits]
        records = await read_some_records(self._calls, run, new)
        self._broken = records.broken
        for unit, commit in records.commits.items():
            self._commits[ledger.commit_path(run, unit, editions.of(unit))] = commit
        return sorted((Done(commit, stamps[path]) for path, commit in self._commits.items()), key=lambda each: each.at)

    async def _traces(self, done: Sequence[Done]) -> dict[str, _Trace]:
        """By worker."""
        traces: defaultdict[str, _Trace] = defaultdict(_Trace)
        for each in done:
            traces[each.commit.facts.worker].commits.append(each)
        run, committed = self._plan.run, {each.commit.unit for each in done}
        leases = [
            kept for kept in await self._calls.survey(leases_of_run(run)) if kept.path.split("/")[-2] not in committed
        ]
        newest = {kept.path.split("/")[-2]: kept.path for kept in leases}  # they come in the order of their names
        # Each time: a lease that was given back leaves its name to the next holder.
        for kept, lease in zip(leases, await self._read(leases, Lease), strict=True):
            if lease is not None:
                unit = kept.path.split("/")[-2]
                held = _Held(unit, lease.lease_s, kept.written_at, newest[unit] == kept.path)
                traces[lease.attempt.rpartition("-")[0]].held.append(held)
        clocks = await self._calls.survey(clocks_of_run(run))
        new = [kept for kept in clocks if kept.path not in self._signs]
        for kept, sign in zip(new, await self._read(new, Sign), strict=True):
            self._signs[kept.path] = 0.0 if sign is None else sign.lease_s
        for kept in clocks:
            trace = traces[kept.path.removeprefix(clocks_of_run(run))]
            trace.clock_at, trace.lease_s = kept.written_at, self._signs[kept.path]
        return traces

    async def _read(self, wanted: Sequence[Kept], kind: type[T]) -> list[T | None]:
        """Records of a kind; None: it has just gone, a power cut has damaged it, or an older worker wrote it."""
        places = asyncio.Semaphore(READS_AT_ONCE)

        async def one(path: str) -> T | None:
            async with places:
                stored = await self._calls.read(path)
            try:
                return None if stored is None else msgspec.json.decode(stored.data, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return None

        return list(await asyncio.gather(*(one(kept.path) for kept in wanted)))


def tokens_per_s(done: Sequence[Done], now: float) -> float:
    """Over the last minutes, or since the first unit was begun."""
    recent = [each for each in done if each.at > now - RECENT_S]
    if not recent:
        return 0.0
    first = min(each.at - each.commit.facts.seconds for each in recent)
    return sum(each.commit.facts.tokens for each in recent) / max(now - max(first, now - RECENT_S), 1e-3)


def _workers(traces: dict[str, _Trace], now: float, lease_s: float, *, sealed: bool) -> tuple[WorkerView, ...]:
    views = []
    for worker, trace in sorted(traces.items()):
        at = trace.last_sign()
        state, unit = _state(trace, alive=now - at < trace.length(lease_s), sealed=sealed)
        own = [each.commit for each in trace.commits]
        views.append(
            WorkerView(
                worker=worker,
                state=state,
                unit=unit,
                seen_s=max(0.0, now - at),
                units=len(own),
                shards=sum(len(commit.objects) for commit in own),
                documents=sum(commit.facts.documents for commit in own),
                tokens=sum(commit.facts.tokens for commit in own),
            )
        )
    return tuple(views)


def _state(trace: _Trace, *, alive: bool, sealed: bool) -> tuple[str, str]:
    """And the unit, if it has one."""
    units = [each.unit for each in trace.held if each.newest]
    if sealed or (trace.clock_at is None and not trace.held):
        return "ended", ""
    if alive:
        return ("working", (units or [trace.held[-1].unit])[-1]) if trace.held else ("idle", "")
    return ("recovering", units[-1]) if units else ("lost", "")
