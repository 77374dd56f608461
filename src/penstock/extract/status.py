"""How a run goes, from the bucket alone: who works on what, who was lost, how fast it is, when it will be done.

`tpu extract status`, `watch` and `stats` show it. Times are the store's own stamps. It reads; what it says about a
worker is what leases and commits show, so one that computes without a lease is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.domain import ledger
from penstock.extract.calls import Calls
from penstock.extract.claims import leases_of_run
from penstock.extract.layout import UnitCommit
from penstock.extract.plan import RunPlan
from penstock.extract.seal import RunFacts, read_some_commits, summary

#: The rate is told over this long, so that one slow unit does not make it jump.
RECENT_S: Final = 600.0


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """`state`: working (its lease is fresh), recovering (it is old, and others may take over), idle (it holds none)."""

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
    tokens_per_s: float
    left_s: float | None  #: None: not known


class Done(msgspec.Struct, frozen=True):
    """A commit and when it was made, by the store's clock."""

    commit: UnitCommit
    at: float


class Watcher:
    """Looks at one run again and again; commits never change, so each is read once."""

    def __init__(self, calls: Calls, plan: RunPlan, lease_s: float) -> None:
        self._calls = calls
        self._plan = plan
        self._lease_s = lease_s
        self._commits: dict[str, UnitCommit] = {}
        self._leases: dict[str, str] = {}

    async def look(self, now: float) -> RunView:
        """`now` is by the store's clock, or a clock about as right."""
        done = await self.done()
        held: dict[str, tuple[str, float]] = {}
        committed = {each.commit.unit for each in done}
        for kept in await self._calls.survey(leases_of_run(self._plan.run)):
            unit = kept.path.split("/")[-2]
            if unit not in committed and (worker := await self._holder(kept.path)):
                held[unit] = (worker, kept.written_at)  # in the order of names: the newest lease is the last
        workers = _workers(done, held, now, self._lease_s)
        facts = summary(self._plan, {each.commit.unit: each.commit for each in done})
        rate = tokens_per_s(done, now)
        left = self._plan.rows - facts.documents
        per_document = facts.tokens / facts.documents if facts.documents else 0.0
        return RunView(
            run=self._plan.run,
            sealed=bool(await self._calls.list(ledger.manifest_prefix(self._plan.run))),
            units=len(self._plan.units),
            committed=len(done),
            rows=self._plan.rows,
            facts=facts,
            workers=workers,
            healthy=sum(worker.state != "recovering" for worker in workers),
            working=sum(worker.state == "working" for worker in workers),
            recovering=sum(worker.state == "recovering" for worker in workers),
            tokens_per_s=rate,
            left_s=0.0 if not left else left * per_document / rate if rate and per_document else None,
        )

    async def done(self) -> list[Done]:
        """All commits, oldest first."""
        prefix = ledger.commits_prefix(self._plan.run)
        stamps = {kept.path.removeprefix(prefix): kept.written_at for kept in await self._calls.survey(prefix)}
        self._commits = {unit: commit for unit, commit in self._commits.items() if unit in stamps}
        new = [unit for unit in stamps if unit not in self._commits]
        self._commits |= await read_some_commits(self._calls, self._plan.run, new)
        return sorted((Done(commit, stamps[unit]) for unit, commit in self._commits.items()), key=lambda each: each.at)

    async def _holder(self, path: str) -> str:
        """The worker of a lease; "" when the lease has just gone."""
        if path not in self._leases:
            stored = await self._calls.read(path)
            if stored is None:
                return ""
            self._leases[path] = ledger.decode_lease(stored.data).attempt.rpartition("-")[0]
        return self._leases[path]


def tokens_per_s(done: Sequence[Done], now: float) -> float:
    """Over the last minutes, or since the first unit was begun."""
    recent = [each for each in done if each.at > now - RECENT_S]
    if not recent:
        return 0.0
    first = min(each.at - each.commit.facts.seconds for each in recent)
    return sum(each.commit.facts.tokens for each in recent) / max(now - max(first, now - RECENT_S), 1e-3)


def _workers(
    done: Sequence[Done], held: dict[str, tuple[str, float]], now: float, lease_s: float
) -> tuple[WorkerView, ...]:
    signs: dict[str, tuple[float, str, str]] = {}
    for each in done:
        signs[each.commit.facts.worker] = (each.at, "idle", "")
    for unit, (worker, at) in held.items():
        if at >= signs.get(worker, (at, "", ""))[0]:
            signs[worker] = (at, "working" if now - at < lease_s else "recovering", unit)
    views = []
    for worker, (at, state, unit) in sorted(signs.items()):
        commits = [each.commit for each in done if each.commit.facts.worker == worker]
        own = [commit.facts for commit in commits]
        views.append(
            WorkerView(
                worker=worker,
                state=state,
                unit=unit,
                seen_s=max(0.0, now - at),
                units=len(own),
                shards=sum(len(commit.objects) for commit in commits),
                documents=sum(facts.documents for facts in own),
                tokens=sum(facts.tokens for facts in own),
            )
        )
    return tuple(views)
