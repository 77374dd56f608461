"""Why an attempt ended, from what its hosts reported and what we ordered.

`planner.recovery` asks when it closes an attempt without all reports, `controller.reports` when the last host has
reported. An order of ours explains what followed from it; otherwise the first failure of the gang does, never an echo
of it. It must not decide how the job goes on: that is `domain.policies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from penstock.domain.classify import Signals, Verdict, classify, first_failure
from penstock.domain.lifecycle import Cause
from penstock.domain.nouns import Attempt, Exit

#: The agent's word for a process it ended because it was told to: a consequence, never a cause.
STOPPED: Final = "stopped"


def end_of(attempt: Attempt, cancelled: bool, outputs: tuple[str, ...] = ()) -> tuple[Cause, tuple[str, ...]]:
    """Why an attempt ended all of whose hosts have reported, and the evidence. `outputs` are what the job declared."""
    if cancelled:
        return Cause.CANCELLED, ("the job was cancelled",)
    if all(ended.well for ended in attempt.exits):
        if attempt.fencing_at is not None:
            return Cause.LOST, ("it ended well, but its fence had been passed",)
        stopped = cause_of_stop(attempt)
        if stopped is not None and not (outputs and set(outputs) <= set(attempt.outputs)):
            # Many programs save and exit with 0 when told to stop: only complete outputs tell that from the end.
            return stopped, (*said_of_stop(attempt), "it ended well, but only after it was told to stop")
        hosts = f"all {attempt.hosts} hosts" if attempt.hosts > 1 else "its host"
        return Cause.SUCCEEDED, (f"{hosts} ended with exit code 0",)
    return cause_of(attempt)


def cause_of(attempt: Attempt) -> tuple[Cause, tuple[str, ...]]:
    """The cause that our own stop order gives, else that of the first failure; with its evidence."""
    stopped = cause_of_stop(attempt)
    if stopped is not None:
        return stopped, said_of_stop(attempt) or ("we stopped it",)
    exits = tuple(ended for ended in attempt.exits if not _killed_by_fence(attempt, ended))
    verdict = _first_failure(exits)
    if verdict is None and attempt.fencing_at is not None:
        return Cause.LOST, ("killed because its fence had been passed",)
    if verdict is None:  # its agents stopped it by themselves, because they had lost us
        return Cause.LOST, ("its agents stopped it without an order",)
    return verdict.cause, verdict.evidence


def _killed_by_fence(attempt: Attempt, ended: Exit) -> bool:
    """A host heard again after its fence was passed kills what it holds: that SIGKILL is ours, not the job's."""
    return attempt.fencing_at is not None and ended.signal == 9 and ended.agent is None and not ended.oom_killed


def cause_of_stop(attempt: Attempt) -> Cause | None:
    """What an attempt closes as because we stopped it; a gang is stopped because of something else."""
    if attempt.stop is None or attempt.stop.why == "gang":
        return None
    own = {"cancelled": Cause.CANCELLED, "timeout": Cause.TIMEOUT}
    return own.get(attempt.stop.why, Cause.PREEMPTED)


def said_of_stop(attempt: Attempt) -> tuple[str, ...]:
    """Why it was told to stop, where the order says more than that it was: then that is the evidence."""
    if attempt.stop is None or not attempt.stop.said:
        return ()
    at = datetime.fromtimestamp(attempt.stop.at, UTC)
    return (f"{attempt.stop.said} at {at:%Y-%m-%d %H:%M:%S} UTC",)


def explained(exits: tuple[Exit, ...]) -> tuple[Exit, ...]:
    """The exits of a gang, the one that explains the others first: who reported first need not be who failed first."""
    failed = _failures(exits)
    if len(failed) < 2:
        return exits
    verdicts = _verdicts(failed)
    why = _explaining(verdicts)
    first = next((ended for ended, verdict in zip(failed, verdicts, strict=True) if verdict is why), None)
    return exits if first is None else (first, *(ended for ended in exits if ended is not first))


def first_exit(exits: Sequence[Exit]) -> Exit | None:
    """The first that was a failure of its own; of a closed attempt it explains the others."""
    return next(iter(_failures(exits)), None)


def _first_failure(exits: Sequence[Exit]) -> Verdict | None:
    return _explaining(_verdicts(_failures(exits)))


def _explaining(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The verdict that explains a gang's end. Only if all of them are echoes, the first echo has to do."""
    failed = [verdict for verdict in verdicts if verdict.cause is not Cause.SUCCEEDED]
    return first_failure(failed) or (failed[0] if failed else None)


def _failures(exits: Sequence[Exit]) -> list[Exit]:
    return [ended for ended in exits if not ended.well and ended.agent != STOPPED]


def _verdicts(failed: Sequence[Exit]) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for ended in failed:
        signals = Signals(
            exit_code=ended.code,
            signal=ended.signal,
            oom_killed=ended.oom_killed,
            slice_state=ended.slice_state,
            notice=ended.notice,
            agent=ended.agent,
            siblings=tuple(verdicts),
            log_tail=ended.log_tail,
        )
        verdicts.append(classify(signals))
    return verdicts
