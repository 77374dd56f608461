"""What people are told of slices whose agents or zones do not answer, and of attempts that were given up for it.

`tpu slices`, `tpu why`, `tpu show` and `tpu fleet status` show it. An agent that hangs, or died for good, on a machine
that its provider calls READY is seen by nothing but this silence. The planner decides what is done about it
(`planner.recovery`, `planner.scaling`): this must not.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.domain import limits
from penstock.domain.endings import said_of_stop
from penstock.domain.lifecycle import AttemptState, Cause, SliceState
from penstock.domain.nouns import Attempt, Job, Slice
from penstock.planner.zones import muteness
from penstock.server.service import Service
from penstock.server.views import goes_on

_KNOWN_BY_ITS_AGENTS = (SliceState.READY, SliceState.DRAINING)
_COMING = (SliceState.INTENDED, SliceState.CREATING)
#: Ends that say something of where an attempt ran, not of what it ran.
_OF_THE_PLACE = (Cause.LOST, Cause.INFRA, Cause.PREEMPTED)


def silence(service: Service, slice: Slice) -> str:
    """In one line, since when no word came from a slice that should speak, or from its zone; empty when they do."""
    unseen = _unseen(service, slice)
    if unseen:
        return unseen
    age_s = service.controller.snapshot.witness.silent.get(slice.id, 0.0)
    if slice.state not in _KNOWN_BY_ITS_AGENTS or age_s < limits.SILENCE_S:  # one that leaves has nothing to say
        return ""
    who = "its agent has" if slice.hosts == 1 else "one of its agents, or more, have"
    return f"{who} not called for {age_s:.0f} s; the provider says {slice.provider_state or 'nothing'}"


def _unseen(service: Service, slice: Slice) -> str:
    """What cannot be known of a slice on its way in or out while its zone cannot be listed."""
    mute = service.controller.snapshot.witness.mute.get((slice.provider, slice.zone))
    if mute is None or slice.state in _KNOWN_BY_ITS_AGENTS:
        return ""
    then = "it is asked for again" if slice.state in _COMING else "it may exist until then, and is deleted"
    return f"{muteness(slice.zone, mute)}; {then} when that answers"


def troubles(service: Service, job: Job, attempts: Sequence[Attempt]) -> tuple[str, ...]:
    """What is wrong where a job runs now, and why it no longer runs where it ran last."""
    snapshot = service.controller.snapshot
    lines = []
    for attempt in snapshot.attempts_of.get(job.id, {}).values():
        said = said_of_stop(attempt)
        if said:
            lines.append("; ".join((f"attempt {attempt.fence} stops: {said[0]}", *_then(job, attempt, attempts))))
        for bound in attempt.slices:
            slice = snapshot.slices.get(bound.slice)
            told = silence(service, slice) if slice is not None else ""
            if told:
                lines.append(f"slice {bound.slice}: {told}; the job goes on elsewhere when that lasts")
    ended = [each for each in attempts if each.state is AttemptState.CLOSED]
    if ended and ended[-1].cause in _OF_THE_PLACE:
        story = "; ".join((*ended[-1].evidence, *_then(job, ended[-1], attempts)))
        lines.append(f"attempt {ended[-1].fence} was {_word(ended[-1])}: {story}")
    return tuple(lines)


def _then(job: Job, attempt: Attempt, attempts: Sequence[Attempt]) -> tuple[str, ...]:
    then = goes_on(job, attempt, attempts)
    return (then,) if then else ()


def _word(attempt: Attempt) -> str:
    return "ended by its surroundings" if attempt.cause is Cause.INFRA else str(attempt.cause)
