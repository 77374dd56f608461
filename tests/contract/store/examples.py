"""Small nouns for the store's tests: valid, distinct by one number, and otherwise plain."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from penstock.domain.lifecycle import AttemptState, JobState, SliceState
from penstock.domain.nouns import (
    Attempt,
    Bound,
    Chain,
    Command,
    Job,
    JobSpec,
    Pool,
    Queue,
    Resources,
    Slice,
    Snippet,
    Team,
    Zone,
)
from penstock.ports.store import Transaction

PAYLOAD = Snippet("print(1)", {"lr": 0.1, "layers": [1, 2]})


def a_job(number: int, *, team: str = "red", queue: str = "main", after: tuple[str, ...] = (), **changes: Any) -> Job:
    spec = JobSpec(
        team=team,
        queue=queue,
        resources=Resources(accelerators=("v5litepod-8",), chips=8),
        payload=PAYLOAD,
        name=f"job {number}",
        after=after,
    )
    return replace(Job(id=f"j{number:04}", spec=spec, state=JobState.QUEUED, created_at=100.0 + number), **changes)


def light(job: Job) -> Job:
    """What a light read answers."""
    return replace(job, spec=replace(job.spec, payload=Command(())))


def an_attempt(number: int, *, job: str = "j0001", fence: int = 1, replica: int = 0, **changes: Any) -> Attempt:
    return replace(
        Attempt(
            id=f"a{number:04}",
            job=job,
            replica=replica,
            fence=fence,
            team="red",
            queue="main",
            chips=8,
            slices=(Bound(f"s{number:04}", f"p{number}"),),
            hosts=2,
            created_at=5.0,
            timeout_s=60.0,
        ),
        **changes,
    )


def a_slice(number: int, **changes: Any) -> Slice:
    return replace(
        Slice(
            id=f"s{number:04}",
            team="red",
            pool="pool",
            provider="fake",
            zone="zone-a",
            accelerator="v5litepod-8",
            chips=8,
            hosts=2,
            intended_at=3.0,
        ),
        **changes,
    )


def a_pool(name: str = "pool") -> Pool:
    return Pool(
        name=name, team="red", provider="fake", accelerator="v5litepod-8", chips=8, hosts=2, zones=("zone-a", "zone-b")
    )


def a_queue(name: str = "main") -> Queue:
    return Queue(name=name, team="red", weight=2.5)


def a_team(name: str = "red") -> Team:
    return Team(name=name, chip_limit=64)


def a_zone(zone: str = "zone-a") -> Zone:
    return Zone(provider="fake", zone=zone, accelerator="v5litepod-8", spot=True, grants=1.5)


def submit(tx: Transaction, *jobs: Job) -> list[Job]:
    return [tx.add(job, "job.created") for job in jobs]


def submit_one(tx: Transaction, job: Job) -> Job:
    return tx.add(job, "job.created")


def place(tx: Transaction, job: Job, attempt: Attempt) -> tuple[Job, Attempt]:
    """A job's first attempt: provisioning, with one live chain."""
    chain = Chain(replica=attempt.replica, fence=attempt.fence, attempts=1, live=True)
    placed = replace(job, state=JobState.PROVISIONING, chains=(*job.chains, chain), fence=attempt.fence)
    return tx.save(placed, "job.placed"), tx.add(attempt, "attempt.created")


def close(tx: Transaction, attempt: Attempt) -> Attempt:
    return tx.save(replace(attempt, state=AttemptState.CLOSED, closed_at=tx.at), "attempt.closed")


def fail(tx: Transaction, job: Job) -> Job:
    return tx.save(replace(job, state=JobState.FAILED, finished_at=tx.at), "job.failed")


def walk_slice(tx: Transaction, one: Slice, *states: SliceState, **changes: Any) -> Slice:
    for state in states:
        one = tx.save(replace(one, state=state, **changes), f"slice.{state.value}")
    return one
