"""What happens after an attempt closed: the presets per cause, the budgets, the back-off and the poison breaker.

The controller's `close` verb calls `decide`; `tpu rules` prints the presets. Pure: the jitter comes from the attempt's
own fence and id, so that a replay decides the same. It must not look at log text: causes are classified before.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from penstock.domain import limits
from penstock.domain.lifecycle import FAILURE_CAUSES, INFRASTRUCTURE_CAUSES, Cause
from penstock.domain.nouns import Chain, Rule


class Go(StrEnum):
    """How a job goes on."""

    RESUME = "resume"  #: same snapshot, same checkpoints, stage + 1
    RERUN = "rerun"  #: from nothing, stage 0
    STOP = "stop"


class Preset(msgspec.Struct, frozen=True):
    """Per cause how to go on. A cause that is not named stops the job."""

    summary: str
    on: Mapping[Cause, Go]


def _preset(summary: str, *, preempted: Go, infra: Go, failure: Go) -> Preset:
    """`failure` is what a retry does when the user gave a failure budget; with none (the default) it never happens."""
    return Preset(
        summary,
        {
            Cause.PREEMPTED: preempted,
            Cause.LOST: infra,
            Cause.INFRA: infra,
            **dict.fromkeys(sorted(FAILURE_CAUSES), failure),
        },
    )


#: The names of the older `tpu` tool. There "reapply" asked for a new slice and resumed there; here every retry may get
#: a new slice, so what remains of each preset is how the job goes on. "grpc" of old is `infra` and `lost`.
PRESETS: Mapping[str, Preset] = {
    "pre": _preset(
        "resume after preemption and after infrastructure errors",
        preempted=Go.RESUME,
        infra=Go.RESUME,
        failure=Go.RESUME,
    ),
    "pass": _preset("never go on by itself", preempted=Go.STOP, infra=Go.STOP, failure=Go.STOP),
    "reapply": _preset(
        "resume on a new slice after preemption and after infrastructure errors",
        preempted=Go.RESUME,
        infra=Go.RESUME,
        failure=Go.RESUME,
    ),
    "rerun": _preset(
        "resume after preemption, start from nothing after infrastructure errors",
        preempted=Go.RESUME,
        infra=Go.RERUN,
        failure=Go.RERUN,
    ),
    "resume": _preset(
        "stop at preemption, resume after infrastructure errors",
        preempted=Go.STOP,
        infra=Go.RESUME,
        failure=Go.RESUME,
    ),
}

#: Presets that never reuse the slice an infrastructure error happened on.
FRESH_SLICE_PRESETS = frozenset({"reapply", "rerun"})


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """How one replica goes on, and its chain with what was spent."""

    go: Go
    chain: Chain
    reason: str


def backoff_s(streak: int, salt: str) -> float:
    """Exponential with jitter between half and all of it; the salt makes jobs differ, never replays."""
    full = min(limits.BACKOFF_MAX_S, limits.BACKOFF_FIRST_S * 2.0 ** min(streak, 30))
    return full * (0.5 + (zlib.crc32(salt.encode()) & 0xFFFF) / 0x1FFFE)


def decide(rule: Rule, chain: Chain, cause: Cause, ran_s: float | None, now: float, salt: str) -> Decision:
    """What follows when an attempt of `chain` closed with `cause` after `ran_s` seconds (None: it never ran)."""
    chain = msgspec.structs.replace(chain, live=False, last_cause=cause)
    if cause is Cause.SUCCEEDED:
        return Decision(go=Go.STOP, chain=msgspec.structs.replace(chain, done=True), reason="succeeded")
    if cause is Cause.CANCELLED:
        return Decision(go=Go.STOP, chain=chain, reason="cancelled")
    if cause in INFRASTRUCTURE_CAUSES:
        quick = chain.quick_losses
        if cause is not Cause.PREEMPTED:  # what the provider takes back says nothing about the job
            quick = quick + 1 if (ran_s or 0.0) < limits.POISON_RUN_S else 0
        chain = msgspec.structs.replace(chain, losses=chain.losses + 1, quick_losses=quick)
        if chain.losses > rule.infra_budget:
            return _stop(chain, f"infrastructure budget of {rule.infra_budget} spent")
        if quick >= limits.POISON_LOSSES:
            return _stop(chain, f"{quick} losses in a row within a minute: the job breaks its slices")
        streak = quick
    else:
        chain = msgspec.structs.replace(chain, failures=chain.failures + 1, quick_losses=0)
        if chain.failures > rule.failure_budget:
            return _stop(chain, f"{cause.value}: failure budget of {rule.failure_budget} spent")
        streak = chain.failures
    go = PRESETS[rule.preset].on.get(cause, Go.STOP)
    if go is Go.STOP:
        return _stop(chain, f"rule {rule.preset} stops after {cause.value}")
    wait = 0.0 if cause is Cause.PREEMPTED else backoff_s(streak, salt)
    # What never ran cannot be resumed: the next attempt is still the first of its stage.
    stage = chain.stage + (ran_s is not None) if go is Go.RESUME else 0
    chain = msgspec.structs.replace(chain, stage=stage, not_before=now + wait)
    return Decision(go=go, chain=chain, reason=f"{go.value} after {cause.value}")


def _stop(chain: Chain, reason: str) -> Decision:
    return Decision(go=Go.STOP, chain=chain, reason=reason)
