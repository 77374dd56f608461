"""Answers agents' syncs: cheaply from memory when nothing is new, by one transaction when something is.

The server hands every sync here; so does the simulator's network. A steady host costs one look-up and no event. An
order to start something is never given from memory: only a committed row may start a process.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.controller.reports import hear, orders, rank_of, unwelcome
from penstock.controller.witness import Evidence
from penstock.domain.custody import Held, Phase, SyncReply, SyncRequest
from penstock.domain.nouns import Attempt, Slice
from penstock.planner.snapshot import Snapshot
from penstock.ports.store import Store


class NotLeading(Exception):
    """This process does not lead; the agent should ask another one."""


class Agents:
    """The server's side of custody."""

    def __init__(self, store: Store, evidence: Evidence, snapshot: Callable[[], Snapshot | None]) -> None:
        self._store = store
        self._evidence = evidence
        self._snapshot = snapshot

    async def sync(self, request: SyncRequest) -> SyncReply:
        snapshot = self._snapshot()
        if snapshot is None:
            raise NotLeading("another controller leads")
        slice = snapshot.slices.get(request.slice)
        if slice is not None and nothing_new(snapshot, slice, request):
            self._evidence.heard(request.slice, request.host)
            attempts = {held.attempt: snapshot.attempts.get(held.attempt) for held in request.held}
            return orders(slice, attempts, request, None)
        reply = await self._store.transact(hear, request)
        if reply.welcome:
            self._evidence.heard(request.slice, request.host)
        return reply


def nothing_new(snapshot: Snapshot, slice: Slice, request: SyncRequest) -> bool:
    """Whether a sync repeats only what is known, and asks for nothing that must come from a committed row."""
    if unwelcome(slice, request) or not slice.joined or slice.joined[request.host] != request.incarnation:
        return False
    if request.notice and slice.ready_at is not None and slice.lost_at is None:
        return False
    held = {each.attempt for each in request.held}
    if slice.attempt is not None and slice.attempt not in held:
        return False
    return all(_known(snapshot, slice, request.host, each) for each in request.held)


def _known(snapshot: Snapshot, slice: Slice, host: int, held: Held) -> bool:
    attempt: Attempt | None = snapshot.attempts.get(held.attempt)
    if attempt is None or attempt.id != slice.attempt or held.phase is Phase.EXITED:
        return False
    rank = rank_of(attempt, slice.id, host)
    if held.phase is Phase.RUNNING and rank not in attempt.started:
        return False
    if held.open_units is not None:
        job = snapshot.jobs.get(attempt.job)
        if job is None or job.open_units is None or held.open_units < job.open_units:
            return False
    if held.holding is not None and held.holding != (rank in attempt.holding):
        return False
    return rank in attempt.launched
