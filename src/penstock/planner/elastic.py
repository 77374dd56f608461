"""How many replicas of a job should run, which index comes next, and which replica goes first when there are too many.

`planner.admission` places the first `min` replicas like any other job and the rest when all heads had their turn;
`planner.reclaim` takes the newest extras first. Pure arithmetic over one job: it knows neither slices nor quotas.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.domain.lifecycle import Cause, JobState
from penstock.domain.nouns import Attempt, Job
from penstock.planner.snapshot import Snapshot


def wanted(job: Job) -> int:
    """Replicas that should run now: one per open unit of work, at most so many as the job may have.

    One at least, with no unit open too: somebody has to seal what was done, and to end well.
    """
    most = job.spec.replicas.max
    return most if job.open_units is None else max(1, min(most, job.open_units))


def least(job: Job) -> int:
    """The job's minimum, or what there is work for, if that is less."""
    return min(job.spec.replicas.min, wanted(job))


def vacant(job: Job, now: float) -> Iterator[int]:
    """Replica indexes that may be placed, smallest first. None once a replica is done: the work is all given out."""
    if job.cancel_at is not None or any(chain.done for chain in job.chains):
        return
    chains = {chain.replica: chain for chain in job.chains}
    for index in range(job.spec.replicas.max):
        chain = chains.get(index)
        if chain is None or (not chain.live and chain.not_before <= now):
            yield index


def lacking(job: Job) -> int:
    """How many replicas of the job's minimum are not live, as far as there is work for them."""
    return max(0, least(job) - len(job.live_chains))


def room_for_extras(job: Job) -> int:
    """How many replicas may be added beyond what is live, its minimum being met."""
    live = len(job.live_chains)
    return wanted(job) - live if live >= least(job) and job.state is not JobState.QUEUED else 0


def surplus(snapshot: Snapshot, leaving: set[str]) -> Iterator[Attempt]:
    """Replicas to stop because there is less work than workers: the newest first, and none that has a unit in hand.

    That one says so when it is done, and is looked at again: what it computes would only have to be computed anew. When
    nothing is open, what it has in hand was committed by another, and it may be one that hangs: then it goes first.
    """
    for id in sorted(snapshot.elastic):
        job = snapshot.elastic[id]
        if job.cancel_at is not None or job.open_units is None:
            continue
        live = [one for one in snapshot.attempts_of.get(id, {}).values() if one.id not in leaving]
        over = len(live) - wanted(job)
        if over > 0:
            chosen = live if not job.open_units else [one for one in live if not one.holding]
            chosen.sort(key=lambda one: (not one.holding, -one.created_at, -one.replica))
            yield from chosen[:over]


def bounced(job: Job) -> float | None:
    """When a gang that lost its slices may start again, if that is later than now's business; None otherwise."""
    chain = job.chain(0)
    infrastructure = chain.last_cause in {Cause.PREEMPTED, Cause.INFRA, Cause.LOST}
    return chain.not_before if infrastructure and job.spec.resources.slices > 1 else None
