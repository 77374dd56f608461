"""Safety of jobs and attempts: S0, S3, S4, S5, S6, S8, S15 and S16.

Called through `rules`. States are replayed from events with the same tables the controller uses; fences, processes and
objects come from the world. What the controller's rows say is never looked at.
"""

from __future__ import annotations

from collections import defaultdict
from enum import StrEnum
from math import inf

from penstock.domain import limits
from penstock.domain.custody import staging_path
from penstock.domain.invariants.facts import FAILURES, LOSSES, AttemptFacts, Process, number, text, texts, whole
from penstock.domain.invariants.finding import Finding
from penstock.domain.invariants.history import Record
from penstock.domain.invariants.indexed import Indexed
from penstock.domain.lifecycle import TABLES, Cause
from penstock.domain.nouns import Event

#: What may still be said of a job that has ended.
_AFTER_THE_END = frozenset({"job.edited", "job.purged"})


def s0_projection(history: Indexed) -> Finding:
    """What the controller keeps from the event log equals what a rebuild from the store gives."""
    finding = Finding(rule="S0")
    for record in history.witnessed("projection"):
        finding.premises += 1
        if not record.body.get("equal"):
            finding.broken("controller", record.subject, record.seq, "its projection differs from a rebuild")
    return finding


def s3_legal_transitions(history: Indexed) -> Finding:
    """Each event follows from the state before it, and versions of one entity are 1, 2, 3, …"""
    finding = Finding(rule="S3", premises=len(history.events))
    for entity, ids in history.of.items():
        table = TABLES.get(entity)
        for id, events in ids.items():
            version = 0
            state: StrEnum | None = None
            for event in events:
                version += 1
                if event.version != version:
                    finding.broken(entity, id, event.seq, f"version {event.version} where {version} was due")
                    version = event.version
                if table is None:
                    continue
                target = table.get((state, event.kind))
                if target is None:
                    finding.broken(entity, id, event.seq, f"{event.kind} in state {state or 'nothing'}")
                else:
                    state = target
    return finding


def s4_terminal_absorbs(history: Indexed) -> Finding:
    """After a job has ended its state does not change, no attempt is made, no output committed."""
    finding = Finding(rule="S4")
    for id, job in history.jobs.items():
        if job.terminal is None:
            continue
        finding.premises += 1
        end = job.terminal.seq
        for event in history.of["job"][id]:
            if event.seq > end and event.kind not in _AFTER_THE_END:
                finding.broken("job", id, event.seq, f"{event.kind} after {job.terminal.kind}")
        for attempt in history.attempts_of.get(id, ()):
            if attempt.created.seq > end:
                finding.broken("job", id, attempt.created.seq, f"attempt {attempt.id} after {job.terminal.kind}")
    return finding


def s5_one_live_attempt(history: Indexed) -> Finding:
    """Attempts of one replica never overlap, in commits and in the process table; fences of a job only rise."""
    finding = Finding(rule="S5")
    for job, attempts in history.attempts_of.items():
        issued = history.fences.get(job, [])
        last: dict[int, AttemptFacts] = {}
        highest, place = 0, 0
        for attempt in attempts:
            while place < len(issued) and issued[place][0] < attempt.created.seq:
                highest = max(highest, issued[place][1])
                place += 1
            if attempt.fence <= highest:
                finding.broken(
                    "job",
                    job,
                    attempt.created.seq,
                    f"{attempt.id} has fence {attempt.fence}, not above {highest}",
                )
            before = last.get(attempt.replica)
            if before is not None:
                finding.premises += 1
                if before.live_at(attempt.created.seq):
                    finding.broken("job", job, attempt.created.seq, f"{attempt.id} made while {before.id} lives")
            last[attempt.replica] = attempt
    _check_zombies(finding, history)
    return finding


def _check_zombies(finding: Finding, history: Indexed) -> None:
    """A successor's process starts only when those of its predecessors have ended.

    The server waits until a silent agent must have read the higher fence, so overlap means that somebody launched too
    early. The one excuse is a host that could not read it: frozen (P3), without its agent (P1), or cut off from the
    bucket (N1, N2). Then
    fences still keep the outputs apart (S6).
    """
    blind: dict[str, list[Record]] = defaultdict(list)
    for record in history.witnessed("fault"):
        if record.subject == "P3" or (record.subject in ("N1", "N2", "P1") and record.body.get("bucket")):
            blind[text(record.body, "slice")].append(record)
    running: dict[tuple[str, int], list[Process]] = defaultdict(list)
    for process in history.processes:
        peers = running[process.job, process.replica]
        start = process.started.order
        peers[:] = [peer for peer in peers if peer.exited is None or peer.exited.order > start]
        for older in peers:
            if older.attempt == process.attempt or any(
                _blinds(fault, process.started) for fault in blind.get(older.slice, ())
            ):
                continue
            finding.broken(
                "job",
                process.job,
                process.started.seq,
                f"zombie overlap: {process.attempt} started while a process of {older.attempt} still runs",
            )
        peers.append(process)


def _blinds(fault: Record, moment: Record) -> bool:
    """Whether a host under this fault could not have read a fence written shortly before that moment."""
    seconds = number(fault.body, "seconds")
    lasts = inf if seconds is None else seconds + limits.FENCE_WAIT_S + limits.FENCE_POLL_S
    return fault.order < moment.order and moment.t <= fault.t + lasts


def s6_fenced_outputs(history: Indexed) -> Finding:
    """An output is committed only under the replica's newest fence, and lies in that fence's staging prefix."""
    finding = Finding(rule="S6")
    objects: dict[str, list[Record]] = defaultdict(list)
    for record in history.witnessed("object.put", "object.deleted"):
        objects[record.subject].append(record)
    for event in history.committed("job.output_committed"):
        finding.premises += 1
        name, id = text(event.body, "name"), text(event.body, "attempt")
        attempt = history.attempts.get(id)
        if attempt is None or attempt.job != event.id:
            finding.broken("job", event.id, event.seq, f"output {name!r} of unknown attempt {id!r}")
            continue
        highest = history.highest_fence(event.id, attempt.replica, event.seq)
        if event.fence != highest:
            finding.broken(
                "job",
                event.id,
                event.seq,
                f"output {name!r} committed with fence {event.fence}, newest is {highest}",
            )
        path = staging_path(event.id, event.fence, name)
        earlier = [record for record in objects.get(path, ()) if record.seq < event.seq]
        if not earlier or earlier[-1].kind == "object.deleted":
            finding.broken("job", event.id, event.seq, f"output {name!r} committed but {path} does not exist")
    for record in history.witnessed("object.put"):
        writer = history.attempts.get(text(record.body, "writer"))
        parts = record.subject.split("/", 4)
        if writer is None or len(parts) < 4 or parts[0] != "jobs" or parts[2] != "staging":
            continue
        if parts[1] != writer.job or parts[3] != str(writer.fence):
            finding.broken("attempt", writer.id, record.seq, f"wrote {record.subject}, outside its own prefix")
    return finding


def s8_success_has_outputs(history: Indexed) -> Finding:
    """A job that succeeded has committed all declared outputs, each under the newest fence of its replica."""
    finding = Finding(rule="S8")
    for id, job in history.jobs.items():
        if job.terminal is None or job.terminal.kind != "job.succeeded":
            continue
        declared = texts(job.body, "outputs")
        if not declared:
            continue
        finding.premises += 1
        end = job.terminal.seq
        committed = {
            text(event.body, "name")
            for event in history.of["job"][id]
            if event.kind == "job.output_committed" and event.seq < end and _current(history, event, end)
        }
        for name in declared:
            if name not in committed:
                finding.broken("job", id, end, f"succeeded without output {name!r} of its winning attempt")
    return finding


def _current(history: Indexed, output: Event, seq: int) -> bool:
    attempt = history.attempts.get(text(output.body, "attempt"))
    return attempt is not None and output.fence == history.highest_fence(output.id, attempt.replica, seq)


def s15_budgets_apart(history: Indexed) -> Finding:
    """User failures spend one budget, losses of infrastructure the other, and nothing goes on beyond either."""
    finding = Finding(rule="S15")
    for id, attempts in history.attempts_of.items():
        job = history.jobs.get(id)
        if job is None or job.created is None:
            continue
        budgets = (whole(job.body, "failure_budget"), whole(job.body, "infra_budget"))
        chains: dict[int, list[AttemptFacts]] = defaultdict(list)
        for attempt in attempts:
            chains[attempt.replica].append(attempt)
        for replica, chain in chains.items():
            _check_budgets(finding, history, replica, chain, budgets)
    return finding


def _check_budgets(
    finding: Finding, history: Indexed, replica: int, chain: list[AttemptFacts], budgets: tuple[int, int]
) -> None:
    job = chain[0].job
    spent = [0, 0]
    over: Event | None = None
    tries = len(chain)
    for attempt in chain:
        if over is not None and attempt.created.seq > over.seq:
            finding.broken(
                "job",
                job,
                attempt.created.seq,
                f"replica {replica} went on after {spent} of {budgets} was spent",
            )
        if attempt.closed is None:
            continue
        if attempt.cause not in FAILURES | LOSSES:
            tries -= 1  # stopped by its user or done: neither budget pays for such a try
            continue
        finding.premises += 1
        which = 0 if attempt.cause in FAILURES else 1
        spent[which] += 1
        if over is None and spent[which] > budgets[which]:
            over = attempt.closed
        _check_cause(finding, history, attempt)
    if tries > 1 + sum(budgets):
        finding.broken(
            "job",
            job,
            chain[-1].created.seq,
            f"replica {replica}: {tries} attempts, budgets {budgets} allow fewer",
        )
    if over is None:
        return
    for event in history.of["job"][job]:
        if event.kind == "job.requeued" and event.seq > over.seq and whole(event.body, "replica") == replica:
            finding.broken("job", job, event.seq, f"replica {replica} requeued after {spent} of {budgets}")


def _check_cause(finding: Finding, history: Indexed, attempt: AttemptFacts) -> None:
    """A failure needs a process that failed: one whose machines were taken away never spends the failure budget."""
    assert attempt.closed is not None
    if attempt.cause not in (Cause.USER_ERROR, Cause.OOM):
        return
    ends = [
        process.exited
        for process in history.processes_of.get(attempt.id, ())
        if process.exited is not None and process.exited.seq < attempt.closed.seq
    ]
    if ends and all(end.kind != "proc.exited" or end.body.get("how") == "vm_gone" for end in ends):
        finding.broken(
            "attempt",
            attempt.id,
            attempt.closed.seq,
            f"closed as {attempt.cause}, but only its machines went away",
        )


def s16_one_effective_leader(history: Indexed) -> Finding:
    """Epochs of committed effects never go back, and each election makes a new one."""
    finding = Finding(rule="S16")
    epoch = 0
    for event in history.events:
        if event.epoch <= 0:
            continue
        if event.epoch < epoch:
            finding.broken(event.entity, event.id, event.seq, f"{event.kind} of epoch {event.epoch} after {epoch}")
        elif event.epoch > epoch:
            finding.premises += epoch > 0
            epoch = event.epoch
        elif event.kind == "leader.elected":
            finding.broken("leader", event.id, event.seq, f"epoch {epoch} was given out twice")
    return finding
