"""The shape all transaction functions share: a registry of their names, and the two writers of jobs and slices.

A verb runs in one transaction and decides again from what it reads there; the planner's view may be seconds old.
`save_job` and `save_slice` are the only ways to change a job or a slice, so that the queue's window, the chips counted
against limits, and the events about them cannot drift apart. The registry lets the simulator crash before and after
every commit by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from penstock.domain.lifecycle import BILLED_SLICE_STATES, COUNTED_SLICE_STATES
from penstock.domain.nouns import Job, Slice
from penstock.ports.store import QuotaFull, Transaction

P = ParamSpec("P")
T = TypeVar("T")

#: Every verb by name: the commit points of the controller.
VERBS: dict[str, Callable[..., object]] = {}


class Outdated(Exception):
    """What the plan assumed is no longer so; the next tick decides anew."""


def verb(function: Callable[Concatenate[Transaction, P], T]) -> Callable[Concatenate[Transaction, P], T]:
    VERBS[function.__name__] = function
    return function


def save_job(
    tx: Transaction,
    before: Job | None,
    after: Job,
    kind: str,
    facts: Mapping[str, object] | None = None,
    *,
    fence: int = 0,
) -> Job:
    """Write a job (new when there is no `before`); the event says when it enters or leaves its queue's heads."""
    body = dict(facts or ())
    delta = int(after.waiting) - int(before is not None and before.waiting)
    if delta:
        body["waiting"] = delta
    if delta or kind == "job.edited":
        body["queue"] = after.spec.queue
        body["priority"] = after.priority
    if before is None:
        return tx.add(after, kind, fence=fence, body=body)
    return tx.save(after, kind, fence=fence, body=body)


def save_slice(tx: Transaction, before: Slice | None, after: Slice, kind: str, **body: object) -> Slice:
    """Write a slice and move the chips it counts for: team and pool while it is of use, the provider until gone."""
    counted = int(after.state in COUNTED_SLICE_STATES) - int(
        before is not None and before.state in COUNTED_SLICE_STATES
    )
    billed = int(after.state in BILLED_SLICE_STATES) - int(before is not None and before.state in BILLED_SLICE_STATES)
    moves: list[tuple[str, str, int]] = []
    if counted and _alone_in_race(tx, after):
        moves += [("team", after.team, counted * after.chips), ("pool", after.pool, counted * after.chips)]
    if billed:
        moves.append(("provider", after.provider, billed * after.chips))
    reserve_all(tx, moves)
    if before is None:
        return tx.add(after, kind, body=body)
    return tx.save(after, kind, body=body)


def reserve_all(tx: Transaction, moves: Sequence[tuple[str, str, int]]) -> None:
    """Move several counters, (scope, name, chips) each, or none: a caller may catch `QuotaFull` and go on."""
    for done, (scope, name, chips) in enumerate(moves):
        try:
            tx.reserve(scope, name, chips)
        except QuotaFull:
            for undone_scope, undone_name, undone_chips in moves[:done]:
                tx.reserve(undone_scope, undone_name, -undone_chips)
            raise


def _alone_in_race(tx: Transaction, slice: Slice) -> bool:
    """A racing set counts once for team and pool (S12): only the first to come and the last to go move the count."""
    if slice.race is None:
        return True
    return not any(other.id != slice.id and other.state in COUNTED_SLICE_STATES for other in tx.race(slice.race))
