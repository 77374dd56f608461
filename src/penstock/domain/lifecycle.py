"""The life cycles of jobs, attempts and slices, as tables of (state, what happened) -> state.

This file decides which changes are legal; it is the only place that does. The controller's verbs go through
`step`, the database repeats the state pairs in its triggers, and the checker replays every event against the
same tables. It must not know why something happened, only whether it may.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Cause(StrEnum):
    """Why an attempt closed."""

    SUCCEEDED = "succeeded"
    USER_ERROR = "user_error"
    OOM = "oom"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    INFRA = "infra"
    LOST = "lost"
    CANCELLED = "cancelled"


#: Causes that are the platform's doing: they spend the infrastructure budget, never the failure budget.
INFRASTRUCTURE_CAUSES = frozenset({Cause.PREEMPTED, Cause.INFRA, Cause.LOST})
#: Causes that are the job's own doing: they spend the failure budget only.
FAILURE_CAUSES = frozenset({Cause.USER_ERROR, Cause.OOM, Cause.TIMEOUT})


class JobState(StrEnum):
    QUEUED = "queued"
    PROVISIONING = "provisioning"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AttemptState(StrEnum):
    ASSIGNED = "assigned"
    LAUNCHING = "launching"
    RUNNING = "running"
    CLOSED = "closed"


class SliceState(StrEnum):
    INTENDED = "intended"
    CREATING = "creating"
    READY = "ready"
    DRAINING = "draining"
    PREEMPTED = "preempted"
    FAILED = "failed"
    DELETING = "deleting"
    GONE = "gone"


TERMINAL_JOB_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
LIVE_JOB_STATES = frozenset({JobState.QUEUED, JobState.PROVISIONING, JobState.RUNNING})
LIVE_ATTEMPT_STATES = frozenset({AttemptState.ASSIGNED, AttemptState.LAUNCHING, AttemptState.RUNNING})
#: Slices that count against a team's and a pool's limit (S12): seen broken or leaving, they stop counting at once.
COUNTED_SLICE_STATES = frozenset({SliceState.INTENDED, SliceState.CREATING, SliceState.READY, SliceState.DRAINING})
#: Slices the provider may still be billing: everything until its absence is proven.
BILLED_SLICE_STATES = frozenset(set(SliceState) - {SliceState.GONE})
#: On the way out for a reason that is not ours: these must be deleted, they hold quota.
BROKEN_SLICE_STATES = frozenset({SliceState.PREEMPTED, SliceState.FAILED})

Table = Mapping[tuple[StrEnum | None, str], StrEnum]

_LIVE_JOB = (JobState.QUEUED, JobState.PROVISIONING, JobState.RUNNING)
_LIVE_ATTEMPT = (AttemptState.ASSIGNED, AttemptState.LAUNCHING, AttemptState.RUNNING)
_HELD_SLICE = (SliceState.INTENDED, SliceState.CREATING, SliceState.READY, SliceState.DRAINING)


def _same(states: tuple[StrEnum, ...], *kinds: str) -> dict[tuple[StrEnum | None, str], StrEnum]:
    """Rows for things that happen without changing the state."""
    return {(state, kind): state for state in states for kind in kinds}


def _to(states: tuple[StrEnum, ...], kind: str, target: StrEnum) -> dict[tuple[StrEnum | None, str], StrEnum]:
    return {(state, kind): target for state in states}


JOB_TABLE: Table = {
    (None, "job.created"): JobState.QUEUED,
    **_to((JobState.QUEUED, JobState.PROVISIONING), "job.placed", JobState.PROVISIONING),
    (JobState.RUNNING, "job.placed"): JobState.RUNNING,  # another replica of a running job
    **_to((JobState.PROVISIONING, JobState.RUNNING), "job.started", JobState.RUNNING),
    **_to((JobState.PROVISIONING, JobState.RUNNING), "job.requeued", JobState.QUEUED),
    **_same((JobState.PROVISIONING, JobState.RUNNING), "job.replica_closed"),
    **_same((JobState.RUNNING,), "job.output_committed"),
    (JobState.RUNNING, "job.succeeded"): JobState.SUCCEEDED,
    **_to(_LIVE_JOB, "job.failed", JobState.FAILED),
    **_to(_LIVE_JOB, "job.cancelled", JobState.CANCELLED),
    **_same(_LIVE_JOB, "job.cancel_requested", "job.fence_raised", "job.progressed", "job.unblocked"),
    (JobState.QUEUED, "job.released"): JobState.QUEUED,
    **_same(tuple(JobState), "job.edited"),
    **_same(tuple(TERMINAL_JOB_STATES), "job.purged"),
}

ATTEMPT_TABLE: Table = {
    (None, "attempt.created"): AttemptState.ASSIGNED,
    **_to((AttemptState.ASSIGNED, AttemptState.LAUNCHING), "attempt.launched", AttemptState.LAUNCHING),
    (AttemptState.LAUNCHING, "attempt.started"): AttemptState.RUNNING,
    **_same(_LIVE_ATTEMPT, "attempt.reported", "attempt.stopping", "attempt.fencing", "attempt.fenced"),
    **_same(_LIVE_ATTEMPT, "attempt.progressed", "attempt.saved", "attempt.copying", "attempt.copied"),
    **_to(_LIVE_ATTEMPT, "attempt.closed", AttemptState.CLOSED),
    **_same(tuple(AttemptState), "attempt.report_rejected"),
}

SLICE_TABLE: Table = {
    (None, "slice.intended"): SliceState.INTENDED,
    (SliceState.INTENDED, "slice.creating"): SliceState.CREATING,
    **_same((SliceState.INTENDED, SliceState.CREATING, SliceState.READY), "slice.joined"),
    **_same((SliceState.INTENDED, SliceState.CREATING), "slice.raced"),
    (SliceState.CREATING, "slice.ready"): SliceState.READY,
    **_same((SliceState.READY,), "slice.bound"),
    **_same(tuple(SliceState), "slice.released", "slice.observed", "slice.swept"),
    **_same(_HELD_SLICE, "slice.reserved", "slice.unreserved"),
    (SliceState.READY, "slice.draining"): SliceState.DRAINING,
    **_same((SliceState.READY, SliceState.DRAINING, SliceState.DELETING), "slice.lost"),
    **_to(_HELD_SLICE, "slice.preempted", SliceState.PREEMPTED),
    **_to(_HELD_SLICE, "slice.failed", SliceState.FAILED),
    **_to((*_HELD_SLICE, SliceState.PREEMPTED, SliceState.FAILED), "slice.deleting", SliceState.DELETING),
    (SliceState.DELETING, "slice.gone"): SliceState.GONE,
}

TABLES: Mapping[str, Table] = {"job": JOB_TABLE, "attempt": ATTEMPT_TABLE, "slice": SLICE_TABLE}


class IllegalTransition(ValueError):
    """Something was asked of an entity that its state does not allow."""

    def __init__(self, state: StrEnum | None, kind: str) -> None:
        super().__init__(f"{kind} is not allowed from state {state.value if state else 'nothing'}")
        self.state = state
        self.kind = kind


def step(kind: str, state: StrEnum | None) -> StrEnum:
    """The state after `kind` happened in `state`; raises `IllegalTransition` when the table has no such row."""
    target = TABLES[kind.partition(".")[0]].get((state, kind))
    if target is None:
        raise IllegalTransition(state, kind)
    return target


def state_pairs(entity: str) -> frozenset[tuple[str, str]]:
    """The (from, to) pairs of one entity's table: what the database's triggers allow."""
    return frozenset((a.value, b.value) for (a, _), b in TABLES[entity].items() if a is not None)
