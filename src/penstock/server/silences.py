"""What people are told of slices whose agents do not call, and of attempts that were given up for it.

`tpu slices`, `tpu why` and `tpu show` show it. An agent that hangs, or died for good, on a machine that its provider
calls READY is seen by nothing but this silence. The planner decides what is done about it (`planner.recovery`): this
must not.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.domain import limits
from penstock.domain.lifecycle import AttemptState, Cause
from penstock.domain.nouns import Attempt, Job, Slice
from penstock.server.service import Service

#: Ends that say something of where an attempt ran, not of what it ran.
_OF_THE_PLACE = (Cause.LOST, Cause.INFRA, Cause.PREEMPTED)


def silence(service: Service, slice: Slice) -> str:
    """In one line, since when no word came from a slice that should speak; empty when it does."""
    age_s = service.controller.snapshot.witness.silent.get(slice.id, 0.0)
    if slice.ready_at is None or age_s < limits.SILENCE_S:
        return ""
    who = "its agent has" if slice.hosts == 1 else "one of its agents, or more, have"
    return f"{who} not called for {age_s:.0f} s; the provider says {slice.provider_state or 'nothing'}"


def troubles(service: Service, job: Job, attempts: Sequence[Attempt]) -> tuple[str, ...]:
    """What is wrong where a job runs now, and why it no longer runs where it ran last."""
    snapshot = service.controller.snapshot
    lines = []
    for attempt in snapshot.attempts_of.get(job.id, {}).values():
        for bound in attempt.slices:
            slice = snapshot.slices.get(bound.slice)
            told = silence(service, slice) if slice is not None else ""
            if told:
                lines.append(f"slice {bound.slice}: {told}; the job goes on elsewhere when that lasts")
    ended = [each for each in attempts if each.state is AttemptState.CLOSED]
    if ended and ended[-1].cause in _OF_THE_PLACE:
        lines.append(f"attempt {ended[-1].fence} was {_word(ended[-1])}: {'; '.join(ended[-1].evidence)}")
    return tuple(lines)


def _word(attempt: Attempt) -> str:
    return "ended by its surroundings" if attempt.cause is Cause.INFRA else str(attempt.cause)
