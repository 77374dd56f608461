"""What to do about attempts in trouble: broken or silent slices, exits, stop orders, cancelled jobs.

`planner.plan` calls `recover` in every tick. It looks only at what is troubled, silent, overdue or being
cancelled, never at all attempts, and each attempt, slice and job gets at most one action. It must not let go of a
slice that a live attempt holds: it closes the attempt, and `planner.scaling` releases the slice in a later plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.domain import limits
from penstock.domain.endings import cause_of, cause_of_stop, end_of
from penstock.domain.lifecycle import Cause, SliceState
from penstock.domain.nouns import Attempt
from penstock.planner.actions import Action, Ask, Close, Fence, Finish, Release, Stop
from penstock.planner.slices import IDLE_SILENCE_S, in_use, may_ask, unlisted
from penstock.planner.snapshot import SERVING_SLICE_STATES, Snapshot
from penstock.ports import capacity

#: After this its agent is taken for dead. Two minutes outlast a reboot of the host.
AGENT_DEAD_S: Final = 8 * limits.SILENCE_S
#: A silent agent has stopped by itself by then: agent and server may differ about when they last met.
CUSTODY_OVER_S: Final = limits.CUSTODY_S + 2 * limits.SYNC_S


def recover(snapshot: Snapshot, now: float) -> list[Action]:
    """Actions for everything in trouble, by id: attempts first, then slices, then jobs."""
    actions: list[Action] = []
    closing: set[str] = set()
    for id in sorted(_doubtful(snapshot)):
        action = _mend(snapshot, snapshot.attempts[id], now)
        if action is not None:
            actions.append(action)
            if isinstance(action, Close):
                closing.add(id)
    actions.extend(_doubts(snapshot, closing))
    actions.extend(
        Finish(job=job, cancelled=True, reason="cancelled")
        for job in sorted(snapshot.cancelling)
        if job not in snapshot.attempts_of
    )
    return actions


# --- attempts ---
def _doubtful(snapshot: Snapshot) -> set[str]:
    """Ids of live attempts that some rule may concern."""
    witness, holders = snapshot.witness, snapshot.holders
    ids = {*snapshot.bereft, *snapshot.troubled}
    ids.update(id for id in witness.overdue if id in snapshot.attempts)
    ids.update(holders[slice] for slice in _silent_slices(snapshot) if slice in holders)
    ids.update(holders[slice] for slice in witness.denied if slice in holders)
    for job in snapshot.cancelling:
        ids.update(attempt.id for attempt in snapshot.attempts_of.get(job, {}).values())
    return ids


def _silent_slices(snapshot: Snapshot) -> list[str]:
    return [slice for slice, age in snapshot.witness.silent.items() if age >= limits.SILENCE_S]


def _mend(snapshot: Snapshot, attempt: Attempt, now: float) -> Action | None:
    """The one thing to do about an attempt, the most certain knowledge first."""
    cancelled = attempt.job in snapshot.cancelling
    broken = _broken(snapshot, attempt)
    if broken is not None:
        cause, evidence = broken
        if cancelled or _over(snapshot, attempt):
            cause = Cause.CANCELLED if cancelled else cause
            return Close(attempt=attempt.id, cause=cause, evidence=evidence, clean=False)
        return _fence(snapshot, attempt, None, cancelled, broken)
    if len({ended.host for ended in attempt.exits}) >= attempt.hosts:
        cause, evidence = end_of(attempt, cancelled)
        return Close(attempt=attempt.id, cause=cause, evidence=evidence, clean=True)
    if cancelled and (attempt.stop is None or attempt.stop.why != "cancelled"):
        return Stop(attempt.id, "cancelled")
    silence = _silence_s(snapshot, attempt)
    closed = _overstayed(snapshot, attempt, now, heard=silence is None)
    if closed is not None:
        return closed
    if silence is not None or attempt.fencing_at is not None:
        action = _fence(snapshot, attempt, silence, cancelled)
        if action is not None:
            return action
    if attempt.stop is None and any(not ended.well for ended in attempt.exits):
        return Stop(attempt.id, "gang")
    if attempt.stop is None and attempt.id in snapshot.witness.overdue:
        return Stop(attempt.id, "timeout")
    return None


def _broken(snapshot: Snapshot, attempt: Attempt) -> tuple[Cause, tuple[str, ...]] | None:
    """Why an attempt cannot go on because of its slices: broken, leaving, replaced or not there; None when it can."""
    denied = [bound.slice for bound in attempt.slices if _vanished(snapshot, bound.slice)]
    if attempt.id not in snapshot.bereft and not denied:
        return None
    cause = Cause.INFRA
    evidence: list[str] = []
    for bound in attempt.slices:
        slice = snapshot.slices.get(bound.slice)
        if slice is None:
            evidence.append(f"slice {bound.slice} is gone")
        elif slice.state not in SERVING_SLICE_STATES:
            evidence.append(f"slice {slice.id} is {slice.state.value}: {slice.why or 'no reason given'}")
            if slice.state is SliceState.PREEMPTED or slice.provider_state == capacity.PREEMPTED:
                cause = Cause.PREEMPTED
        elif slice.provider_id != bound.provider_id:
            evidence.append(
                f"slice {slice.id} was replaced: {bound.provider_id} is now {slice.provider_id or 'unknown'}"
            )
        elif slice.id in denied:
            evidence.append(f"slice {slice.id} vanished: the provider knows nothing of it")
            if slice.spot:  # nobody but the provider takes a spot slice away without a word
                cause = Cause.PREEMPTED
    return cause, tuple(evidence)


def _over(snapshot: Snapshot, attempt: Attempt) -> bool:
    """Whether no process of an attempt can be left: each slice is off or absent, or all its hosts reported an end.

    A provider that says FAILED, or is deleting, says nothing about the machine; neither does one broken slice of a
    gang about the others. What may still run is fenced before a successor can start.
    """
    ended = {each.host for each in attempt.exits}
    hosts = attempt.hosts // len(attempt.slices)
    for index, bound in enumerate(attempt.slices):
        slice = snapshot.slices.get(bound.slice)
        off = slice is None or slice.state is SliceState.PREEMPTED or slice.provider_state == capacity.PREEMPTED
        if off or _vanished(snapshot, bound.slice):
            continue
        if not ended.issuperset(range(index * hosts, (index + 1) * hosts)):
            return False
    return True


def _vanished(snapshot: Snapshot, slice: str) -> bool:
    """Whether the provider says that a slice does not exist, and something else says so too.

    Silence is enough beside one direct get to close an attempt; only listings let the slice itself be given up.
    """
    witness = snapshot.witness
    if witness.silent.get(slice, 0.0) >= limits.SILENCE_S and slice in witness.missing:
        return True
    return slice in witness.denied and unlisted(snapshot, slice)


def _silence_s(snapshot: Snapshot, attempt: Attempt) -> float | None:
    """For how long all the silent slices of an attempt have been silent; None when all of them are heard."""
    silent = snapshot.witness.silent
    ages = [silent.get(bound.slice, 0.0) for bound in attempt.slices]
    return min((age for age in ages if age >= limits.SILENCE_S), default=None)


def _overstayed(snapshot: Snapshot, attempt: Attempt, now: float, *, heard: bool) -> Close | None:
    """Close an attempt that was told to stop long enough ago.

    While one of its hosts is silent, only a cancelled one: nothing follows it, but a successor of any other must
    not start before the silent host is fenced.
    """
    if attempt.stop is None:
        return None
    why = attempt.stop.why
    stopping_s = snapshot.witness.stopping.get(attempt.id, 0.0)
    if why == "cancelled":
        # Across restarts the job must still end in time; a clock that jumped can do no harm here.
        stopping_s = max(stopping_s, now - attempt.stop.at)
    elif not heard:
        return None
    deadline_s = _stop_deadline_s(why)
    if stopping_s < deadline_s:
        return None
    said = f"told to stop ({why}) more than {deadline_s:.0f} s ago, and not all hosts reported an end"
    cause, evidence = cause_of(attempt)
    return Close(attempt=attempt.id, cause=cause, evidence=(said, *evidence), clean=False)


def _stop_deadline_s(why: str) -> float:
    """How long after a stop order an attempt is closed without the reports of all its hosts."""
    if why == "cancelled":
        return limits.CANCEL_DEADLINE_S
    return limits.GRACE_S + (limits.TICK_S if why == "gang" else 2 * limits.TICK_S)


def _fence(
    snapshot: Snapshot,
    attempt: Attempt,
    silence: float | None,
    cancelled: bool,
    broken: tuple[Cause, tuple[str, ...]] | None = None,
) -> Close | Fence | None:
    """Fence an attempt that may still run somewhere, and close it once no zombie of it can believe in itself.

    An attempt that is heard again after its fence was passed is closed all the same: it cannot commit.
    """
    witness = snapshot.witness
    fenced_s = witness.fenced.get(attempt.id)
    if fenced_s is not None and fenced_s >= limits.FENCE_WAIT_S:
        said = f"a higher fence was written {limits.FENCE_WAIT_S:.0f} s ago"
    elif fenced_s is None and witness.objects_down and silence is not None and silence >= CUSTODY_OVER_S:
        said = f"silent for {CUSTODY_OVER_S:.0f} s while the bucket could not be written"
    elif fenced_s is None:
        return Fence(attempt.id)
    else:
        return None
    if broken is not None:
        cause, evidence = broken
    else:
        # Failures that others of the gang reported are no cause here: a host that dies takes its peers down.
        cause, evidence = cause_of_stop(attempt) or Cause.LOST, _silences(snapshot, attempt)
    return Close(
        attempt=attempt.id,
        cause=Cause.CANCELLED if cancelled else cause,
        evidence=(*evidence, said),
        clean=False,
    )


def _silences(snapshot: Snapshot, attempt: Attempt) -> tuple[str, ...]:
    """Whose silence closes an attempt, and what their providers said of them meanwhile."""
    said = []
    for bound in attempt.slices:
        age, slice = snapshot.witness.silent.get(bound.slice, 0.0), snapshot.slices.get(bound.slice)
        if age >= limits.SILENCE_S and slice is not None:
            said.append(f"slice {slice.id} was silent for {age:.0f} s while its provider said {slice.provider_state}")
    return tuple(said) or ("silent until its fence was passed",)


# --- slices ---
def _doubts(snapshot: Snapshot, closing: set[str]) -> Iterator[Action]:
    """Questions about silent or unlisted slices that an attempt holds, and the end of slices whose agents died."""
    silent = snapshot.witness.silent
    held = {id for id in snapshot.witness.absent if id in snapshot.holders and unlisted(snapshot, id)}
    for id in sorted(held.union(_silent_slices(snapshot))):
        slice = snapshot.slices.get(id)
        if slice is None or slice.state not in SERVING_SLICE_STATES:
            continue
        if in_use(snapshot, slice):
            if snapshot.holders.get(id) not in closing and may_ask(snapshot, id):
                why = f"silent for {silent[id]:.0f} s" if id in silent else "absent from listings"
                yield Ask(id, why)
        elif slice.usable and silent[id] > IDLE_SILENCE_S and id in snapshot.witness.missing:
            yield Release(id, "silent, and the provider knows nothing of it", vanished=True)
        elif slice.usable and silent[id] > AGENT_DEAD_S:
            yield Release(id, f"its agents have been silent for {silent[id]:.0f} s")
        elif slice.usable and silent[id] > IDLE_SILENCE_S and may_ask(snapshot, id):
            yield Ask(id, f"silent for {silent[id]:.0f} s")
