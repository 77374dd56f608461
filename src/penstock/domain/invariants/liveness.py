"""Liveness of attempts, jobs and the loop itself: L2, L3, L7, L8, L9, L11 and L12.

Called through `rules`. Clocks start when the faults have stopped (`heal`) and a leader has settled; a deadline that
lies beyond the end of the history is no premise. Times are the recorder's, see `Indexed.time`. Free capacity is the
matter of `liveness_capacity`, sharing that of `liveness_fairness`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from penstock.domain import limits
from penstock.domain.invariants.facts import FAILURES, LOSSES, AttemptFacts, number, text, whole
from penstock.domain.invariants.finding import Finding
from penstock.domain.invariants.history import Record
from penstock.domain.invariants.indexed import Indexed, happened
from penstock.domain.invariants.safety_capacity import EXECUTED

#: For calls, syncs and commits that take a moment even when all is well.
MARGIN_S = limits.TICK_S
#: A slice that the provider shows as lost: silence, one tick, and the time to ask.
LOST_CLOSES_S = limits.SILENCE_S + limits.TICK_S + 2 * MARGIN_S
#: A host that nobody hears but the provider shows as well: silence, the fence and its polls, two ticks, asking.
SILENT_CLOSES_S = limits.SILENCE_S + limits.FENCE_WAIT_S + 2 * limits.TICK_S + 2 * MARGIN_S
KILLED_S = limits.GRACE_S + limits.TICK_S + MARGIN_S
CANCELLED_S = 60.0
QUIET_TICKS = 100
_WITHIN_BUDGET_S = 2 * limits.TICK_S + MARGIN_S
_REASON_AGE_S = 3 * limits.TICK_S
_FROZEN_S = 60.0  #: longer than the injector ever freezes a controller
_GIB = 1 << 30


def l2_silence_closes(history: Indexed) -> Finding:
    """An attempt whose machine is lost or whose host is silent closes in time."""
    finding = Finding(rule="L2")
    for slice, record, back, within in _losses(history):
        start = max(record.t, history.settled_t)
        deadline = start + within
        if deadline > history.end_t or (back is not None and back.t <= deadline):
            continue
        seen = max(record, history.heal, key=lambda each: each.order if each is not None else 0)
        assert seen is not None
        for attempt in history.attempts_on.get(slice, ()):
            if not attempt.live_at(seen.seq):
                continue
            finding.premises += 1
            if attempt.closed is None or history.time(attempt.closed) > deadline:
                finding.broken(
                    "attempt",
                    attempt.id,
                    seen.seq,
                    f"not closed {within:.0f} s after {record.kind} of {slice}",
                )
    return finding


def _losses(history: Indexed) -> Iterator[tuple[str, Record, Record | None, float]]:
    """(slice, what happened, when it was undone, seconds until its attempt must be closed)."""
    for name, machines in history.machines.items():
        for machine in machines:
            if machine.preempted is not None:
                yield name, machine.preempted, None, LOST_CLOSES_S
            elif machine.deleted is not None:
                # One answer "not found" is not yet proof, so the fence has to do.
                yield name, machine.deleted, None, SILENT_CLOSES_S
    for slice, silences in history.silences.items():
        for silent, heard in silences:
            yield slice, silent, heard, SILENT_CLOSES_S


def l3_cancel_in_time(history: Indexed) -> Finding:
    """After an acknowledged cancel the processes end within the grace, and the job within a minute."""
    finding = Finding(rule="L3")
    for call in history.calls:
        if call.verb != "cancel" or call.outcome != "ok":
            continue
        job = history.jobs.get(text(call.body, "job"))
        if job is None or text(call.body, "answer") == "already finished":
            continue
        start = max(call.answer.t, history.settled_t)
        if start + CANCELLED_S > history.end_t:
            continue
        finding.premises += 1
        if job.terminal is None or history.time(job.terminal) > start + CANCELLED_S:
            finding.broken("job", job.id, call.answer.seq, f"not ended {CANCELLED_S:.0f} s after its cancel")
        for attempt in history.attempts_of.get(job.id, ()):
            _check_killed(finding, history, attempt, start + KILLED_S, call.answer.seq)
    return finding


def _check_killed(finding: Finding, history: Indexed, attempt: AttemptFacts, deadline: float, seq: int) -> None:
    for process in history.processes_of.get(attempt.id, ()):
        ended = process.exited.t if process.exited is not None else inf
        unreachable = any(
            silent.t < deadline and (heard is None or heard.t > deadline - KILLED_S)
            for silent, heard in history.silences.get(process.slice, ())
        )
        # A host that cannot be reached stops by its fence or its custody, which have clocks of their own.
        if process.started.t <= deadline < ended and not unreachable:
            finding.broken(
                "job",
                attempt.job,
                seq,
                f"a process of {attempt.id} outlives its cancel by more than {KILLED_S:.0f} s",
            )


def l7_hopeless_ends(history: Indexed) -> Finding:
    """A job over its budget, or one that no pool can ever hold, ends soon."""
    finding = Finding(rule="L7")
    if history.heal is None:
        return finding
    for id, job in history.jobs.items():
        if not job.single or job.created is None:
            continue
        left = {"failure": whole(job.body, "failure_budget"), "infra": whole(job.body, "infra_budget")}
        for attempt in history.attempts_of.get(id, ()):
            which = "failure" if attempt.cause in FAILURES else "infra" if attempt.cause in LOSSES else ""
            if not which or attempt.closed is None:
                continue
            left[which] -= 1
            if left[which] >= 0:
                continue
            deadline = max(history.time(attempt.closed), history.settled_t) + _WITHIN_BUDGET_S
            ended = history.time(job.terminal) if job.terminal is not None else inf
            if deadline > history.end_t and ended == inf:
                continue
            finding.premises += 1
            if ended > deadline:
                finding.broken("job", id, attempt.closed.seq, f"goes on after its {which} budget was spent")
    _check_infeasible(finding, history)
    return finding


def _check_infeasible(finding: Finding, history: Indexed) -> None:
    """Infeasible is what the reasons say from some moment on, without a word to the contrary."""
    since: dict[str, Record] = {}
    for record in history.witnessed("why"):
        if text(record.body, "code").startswith("infeasible"):
            since.setdefault(record.subject, record)
        else:
            since.pop(record.subject, None)
    for id, first in since.items():
        job = history.jobs.get(id)
        if job is None or job.created is None:
            continue
        # The controller counts from the time it stored, which a bent clock may have set ahead.
        start = max(first.t, job.created.at, history.settled_t)
        deadline = start + limits.INFEASIBLE_S + _WITHIN_BUDGET_S
        ended = history.time(job.terminal) if job.terminal is not None else inf
        if ended == inf and deadline > history.end_t:
            continue
        finding.premises += 1
        if ended > deadline:
            finding.broken("job", id, first.seq, f"infeasible and not ended after {limits.INFEASIBLE_S:.0f} s")


#: What the controller must react to: after the last of these it has no reason to act but its own timers.
_INPUTS = (
    "heal", "fault", "vm.ready", "vm.preempted", "agent.silent", "agent.heard", "proc.exited",
    "store.up", "controller.started",
)  # fmt: skip


def _last_input(history: Indexed) -> int:
    """Where the last input is recorded. That an agent falls silent when we delete its machine is no news."""
    leaving = {event.id: event for event in reversed(history.committed("slice.deleting"))}
    inputs = [
        record.order
        for record in history.witnessed(*_INPUTS)
        if record.kind != "agent.silent" or not happened(leaving.get(record.subject), record)
    ]
    inputs += [record.order for record in history.clients if record.kind in ("submit.invoke", "cancel.invoke")]
    return max(inputs)


def l8_quiescence(history: Indexed) -> Finding:
    """With no new input three ticks in a row do nothing, within 100 ticks, and nothing is created after them."""
    finding = Finding(rule="L8")
    if history.heal is None:
        return finding
    last_input = _last_input(history)
    epoch = max((whole(tick.body, "epoch") for tick in history.witnessed("tick")), default=0)
    ticks = [
        tick for tick in history.witnessed("tick") if tick.order > last_input and whole(tick.body, "epoch") == epoch
    ]
    idle = 0
    for tick in ticks[:QUIET_TICKS]:
        idle = idle + 1 if whole(tick.body, "actions") == 0 else 0
        if idle == 3:
            finding.premises += 1
            _check_still(finding, history, tick)
            return finding
    if len(ticks) >= QUIET_TICKS:
        finding.premises += 1
        busy = ticks[QUIET_TICKS - 1]
        finding.broken("controller", busy.subject, busy.seq, f"still acting {QUIET_TICKS} ticks after the last input")
    return finding


def _check_still(finding: Finding, history: Indexed, quiet: Record) -> None:
    """Timers may still let idle slices go; a create, or a delete of what is gone already, is flapping."""
    gone = {event.id: event for event in history.committed("slice.gone")}
    for call in history.witnessed("provider.call"):
        if call.order < quiet.order or text(call.body, "outcome") not in EXECUTED:
            continue
        verb = text(call.body, "verb")
        stands = any(
            machine.created.order < call.order and (machine.deleted is None or machine.deleted.order > call.order)
            for machine in history.machines.get(call.subject, ())
        )
        if verb == "create" or (verb == "delete" and not stands and happened(gone.get(call.subject), call)):
            finding.broken("slice", call.subject, call.seq, f"{verb} was called after the plan had become empty")


def l9_store_outage(history: Indexed) -> Finding:
    """While the store is down calls are answered `unavailable`; when it is back the loop resumes by itself."""
    finding = Finding(rule="L9")
    down: Record | None = None
    for record in history.witnessed("store.down", "store.up"):
        if record.kind == "store.down":
            down = down or record
        elif down is not None:
            _check_refusals(finding, history, down, record)
            _check_resumes(finding, history, down, record)
            down = None
    return finding


def _check_refusals(finding: Finding, history: Indexed, down: Record, up: Record) -> None:
    for call in history.calls:
        if not (down.order < call.invoked.order and call.answer.order < up.order):
            continue
        finding.premises += 1
        said = text(call.answer.body, "error")
        if call.outcome == "ok" or (call.outcome == "fail" and said != "unavailable"):
            finding.broken(
                "client",
                call.client,
                call.answer.seq,
                f"{call.verb} answered {said or call.outcome!r} without a store",
            )


def _check_resumes(finding: Finding, history: Indexed, down: Record, up: Record) -> None:
    """Before the heal other faults slow the first tick; another outage or a crashed or frozen controller excuses it."""
    faulty = history.heal is None or up.order < history.heal.order
    deadline = up.t + limits.TICK_S + (limits.CALL_TIMEOUT_S if faulty else MARGIN_S)
    if any(down.seq < event.seq and history.time(event) <= deadline for event in history.committed("leader.elected")):
        deadline += limits.LEADER_TTL_S + limits.LEADER_RENEW_S
    if deadline > history.end_t:
        return
    for other in history.witnessed("store.down", "controller.crashed"):
        if other.order > down.order and other is not down and other.t <= deadline:
            return
    for fault in history.witnessed("fault"):
        frozen = fault.subject == "P3" and "slice" not in fault.body
        if frozen and down.t - _FROZEN_S <= fault.t <= deadline:
            return
    finding.premises += 1
    if not any(tick.order > up.order and tick.t <= deadline for tick in history.witnessed("tick")):
        finding.broken("controller", "", up.seq, f"no tick {deadline - up.t:.0f} s after the store was back")


def l11_scale(history: Indexed) -> Finding:
    """With a million jobs queued a tick takes ≤ 1 s, a submit's p99 ≤ 200 ms, and memory stays ≤ 1 GiB."""
    finding = Finding(rule="L11")
    for record in history.witnessed("bench"):
        if whole(record.body, "queued") < 1_000_000:
            continue
        finding.premises += 1
        for name, limit in (("tick_s", 1.0), ("submit_p99_s", 0.2), ("memory_bytes", float(_GIB))):
            measured = number(record.body, name)
            if measured is not None and measured > limit:
                finding.broken("bench", record.subject, record.seq, f"{name} is {measured:g}, limit {limit:g}")
    return finding


def l12_reasons_are_fresh(history: Indexed) -> Finding:
    """Every unfinished job has a reason code that was looked at within three ticks."""
    finding = Finding(rule="L12")
    for record in history.witnessed("why"):
        job = history.jobs.get(record.subject)
        if record.t < history.settled_t + _REASON_AGE_S or job is None or job.created is None:
            continue
        if happened(job.terminal, record) or record.t - history.time(job.created) <= _REASON_AGE_S:
            continue
        finding.premises += 1
        as_of = number(record.body, "as_of")
        if not text(record.body, "code"):
            finding.broken("job", record.subject, record.seq, "waits without a reason")
        elif as_of is None or record.t - as_of > _REASON_AGE_S + 1.0:
            finding.broken("job", record.subject, record.seq, f"its reason is of {as_of}, now is {record.t}")
    return finding
