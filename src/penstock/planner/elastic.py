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
    """Replicas that should run now: one per open unit of work, between the job's minimum and maximum."""
    replicas = job.spec.replicas
    open_units = replicas.max if job.open_units is None else job.open_units
    return max(replicas.min, min(replicas.max, open_units))


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
    """How many replicas of the job's minimum are not live."""
    return max(0, job.spec.replicas.min - len(job.live_chains))


def room_for_extras(job: Job) -> int:
    """How many replicas may be added beyond what is live, its minimum being met."""
    live = len(job.live_chains)
    return wanted(job) - live if live >= job.spec.replicas.min and job.state is not JobState.QUEUED else 0


def surplus(snapshot: Snapshot, leaving: set[str]) -> Iterator[Attempt]:
    """Replicas to stop because there is less work than workers: the newest first."""
    for id in sorted(snapshot.elastic):
        job = snapshot.elastic[id]
        if job.cancel_at is not None or job.open_units is None:
            continue
        live = [one for one in snapshot.attempts_of.get(id, {}).values() if one.id not in leaving]
        over = len(live) - wanted(job)
        if over > 0:
            live.sort(key=lambda one: (-one.created_at, -one.replica))
            yield from live[:over]


def bounced(job: Job) -> float | None:
    """When a gang that lost its slices may start again, if that is later than now's business; None otherwise."""
    chain = job.chain(0)
    infrastructure = chain.last_cause in {Cause.PREEMPTED, Cause.INFRA, Cause.LOST}
    return chain.not_before if infrastructure and job.spec.resources.slices > 1 else None
