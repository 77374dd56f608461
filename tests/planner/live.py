"""Small live worlds for tests of recovery and scaling: one pool, its slices, and attempts on them.

Tests call these builders and then change what they are about; nothing here asserts anything.
"""

from __future__ import annotations

import msgspec

from penstock.domain.lifecycle import JobState, SliceState
from penstock.domain.nouns import (
    Attempt,
    Bound,
    Chain,
    Job,
    JobSpec,
    Pool,
    Queue,
    Replicas,
    Resources,
    Slice,
    Team,
    Zone,
)
from penstock.planner.actions import (
    Action,
    Ask,
    Bury,
    Close,
    Create,
    Delete,
    Drain,
    Fence,
    Finish,
    Intend,
    Place,
    Release,
    Stop,
    Want,
)
from penstock.planner.snapshot import Snapshot

NOW = 100_000.0
POOL = Pool(name="p", team="t", provider="fake", accelerator="v4-8", chips=4, hosts=1, zones=("a", "b", "c"), max=100)

INTENDED: dict[str, object] = {
    "state": SliceState.INTENDED,
    "provider_id": None,
    "provider_state": None,
    "ready_at": None,
    "idle_since": None,
}
CREATING: dict[str, object] = {**INTENDED, "state": SliceState.CREATING, "provider_id": "vm"}


def pool_with(**changes: object) -> Pool:
    return msgspec.structs.replace(POOL, **changes)


def world(pool: Pool = POOL) -> Snapshot:
    snapshot = Snapshot()
    snapshot.put_team(Team(name="t"))
    snapshot.put_queue(Queue(name="q", team="t"))
    snapshot.put_pool(pool)
    return snapshot


def a_slice(id: str, **changes: object) -> Slice:
    """A ready slice that has been idle for a second."""
    slice = Slice(
        id=id,
        team="t",
        pool="p",
        provider="fake",
        zone="a",
        accelerator="v4-8",
        chips=4,
        hosts=1,
        intended_at=NOW - 100.0,
        state=SliceState.READY,
        provider_id=f"vm-{id}",
        provider_state="READY",
        ready_at=NOW - 50.0,
        idle_since=NOW - 1.0,
    )
    return msgspec.structs.replace(slice, **changes)


def add_slice(snapshot: Snapshot, id: str, **changes: object) -> Slice:
    slice = a_slice(id, **changes)
    snapshot.put_slice(slice)
    return slice


def change_slice(snapshot: Snapshot, id: str, **changes: object) -> None:
    snapshot.put_slice(msgspec.structs.replace(snapshot.slices[id], **changes))


def change_attempt(snapshot: Snapshot, id: str, **changes: object) -> None:
    snapshot.put_attempt(msgspec.structs.replace(snapshot.attempts[id], **changes))


def add_running(snapshot: Snapshot, attempt: str, slices: tuple[str, ...], **changes: object) -> Attempt:
    """An attempt on slices that are made for it, of a job named after it."""
    for id in slices:
        add_slice(snapshot, id, attempt=attempt, idle_since=None)
    running = Attempt(
        id=attempt,
        job=f"job-{attempt}",
        replica=0,
        fence=1,
        team="t",
        queue="q",
        chips=4 * len(slices),
        slices=tuple(Bound(id, f"vm-{id}") for id in slices),
        hosts=len(slices),
        created_at=NOW - 40.0,
        timeout_s=3600.0,
    )
    running = msgspec.structs.replace(running, **changes)
    snapshot.put_attempt(running)
    return running


def a_job(id: str, **changes: object) -> Job:
    job = Job(
        id=id,
        spec=JobSpec(team="t", queue="q", resources=Resources(accelerators=("v4-8",), chips=4), replicas=Replicas()),
        state=JobState.RUNNING,
        created_at=NOW - 60.0,
        chains=(Chain(replica=0, fence=1, live=True),),
    )
    return msgspec.structs.replace(job, **changes)


def subject(action: Action) -> tuple[str, str] | None:
    """The entity an action is about; a new intent is about none."""
    match action:
        case Create() | Ask() | Release() | Drain() | Delete() | Bury():
            return "slice", action.slice
        case Stop() | Fence() | Close():
            return "attempt", action.attempt
        case Finish() | Place():
            return "job", action.job
        case Intend():
            return None


def back_off(snapshot: Snapshot, zone: str, seconds: float, why: str = "") -> None:
    until = NOW + seconds
    snapshot.put_zone(
        Zone(provider="fake", zone=zone, accelerator="v4-8", spot=False, tries=1, backoff_until=until, why=why)
    )


def want(job: str = "j", slices: int = 1, **changes: object) -> Want:
    wanted = Want(job=job, team="t", pools=("p",), slices=slices)
    return msgspec.structs.replace(wanted, **changes)
