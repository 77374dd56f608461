"""Safety as clients see it: S1, S2, S13 and S20.

Called through `rules`. These compare what callers were told with what was committed. Only the order of commits and of
records counts here: a call must respect what was answered before it was made, not what happened while it ran.
"""

from __future__ import annotations

from collections import defaultdict

from penstock.domain import limits
from penstock.domain.invariants.facts import Call, JobFacts, text, whole
from penstock.domain.invariants.finding import Finding
from penstock.domain.invariants.history import Record
from penstock.domain.invariants.indexed import Indexed, happened
from penstock.domain.lifecycle import TERMINAL_JOB_STATES
from penstock.domain.nouns import Event


def s1_durable_submit(history: Indexed) -> Finding:
    """An acknowledged job is there, and every later read finds it until it is purged after its retention."""
    finding = Finding(rule="S1")
    acknowledged: dict[str, Record] = {}
    for call in history.calls:
        job = text(call.body, "job")
        if call.outcome != "ok":
            continue
        if call.verb == "submit":
            _check_acknowledged(finding, history.jobs.get(job), job, call.answer)
            acknowledged.setdefault(job, call.answer)
        elif call.verb == "read" and job in acknowledged and call.saw(acknowledged[job]):
            finding.premises += 1
            facts = history.jobs.get(job)
            purged = facts is not None and happened(facts.purged, call.answer)
            if not call.body.get("found") and not purged:
                finding.broken("job", job, call.answer.seq, f"{call.client} read it and did not find it")
    for event in history.committed("job.purged"):
        ended = history.jobs[event.id].terminal
        if ended is not None and history.time(event) - history.time(ended) < limits.RETENTION_S:
            finding.broken("job", event.id, event.seq, "purged before its retention was over")
    return finding


def _check_acknowledged(finding: Finding, facts: JobFacts | None, job: str, answer: Record) -> None:
    if facts is None or not happened(facts.created, answer):
        finding.broken("job", job, answer.seq, "submit was acknowledged but nothing had been committed")


def s2_idempotent_submit(history: Indexed) -> Finding:
    """One job per (team, key); the same key with another body is refused."""
    finding = Finding(rule="S2")
    created: dict[tuple[str, str], Event] = {}
    for event in history.committed("job.created"):
        key = text(event.body, "key")
        if not key:
            continue
        first = created.setdefault((text(event.body, "team"), key), event)
        if first is not event:
            finding.broken("job", event.id, event.seq, f"key {key!r} had made job {first.id} already")
    sent: set[tuple[str, str]] = set()
    for call in history.calls:
        key = text(call.body, "key")
        if call.verb != "submit" or not key:
            continue
        pair = (text(call.body, "team"), key)
        # A repeated key or a lost answer is what puts the rule to the test; a plain first submit is not.
        finding.premises += pair in sent or call.outcome == "unknown"
        sent.add(pair)
        if call.outcome == "ok":
            _check_same_job(finding, call, created.get(pair))
    return finding


def _check_same_job(finding: Finding, call: Call, created: Event | None) -> None:
    job = text(call.body, "job")
    if created is None:
        finding.broken("job", job, call.answer.seq, f"no job was created for key {text(call.body, 'key')!r}")
    elif created.id != job:
        finding.broken("job", job, call.answer.seq, f"the same key was answered {created.id} at its creation")
    elif text(created.body, "body_hash") != text(call.body, "body_hash"):
        finding.broken("job", job, call.answer.seq, "the same key with another body was accepted")


def s13_cancel_wins(history: Indexed) -> Finding:
    """After a committed cancel nothing starts or succeeds, and the job ends cancelled; answers tell the truth."""
    finding = Finding(rule="S13")
    for job in history.jobs.values():
        if job.cancel is None:
            continue
        finding.premises += 1
        after = job.cancel.seq
        if job.terminal is not None and job.terminal.seq < after:
            finding.broken("job", job.id, after, "a cancel was committed after the job had finished")
        elif job.terminal is not None and job.terminal.kind != "job.cancelled":
            finding.broken("job", job.id, job.terminal.seq, f"{job.terminal.kind} although it was cancelled")
        for attempt in history.attempts_of.get(job.id, ()):
            if attempt.created.seq > after:
                finding.broken("job", job.id, attempt.created.seq, f"attempt {attempt.id} made after the cancel")
    for call in history.calls:
        if call.verb == "cancel" and call.outcome == "ok":
            _check_cancel_answer(finding, history.jobs.get(text(call.body, "job")), call)
    return finding


def _check_cancel_answer(finding: Finding, job: JobFacts | None, call: Call) -> None:
    id, answer = text(call.body, "job"), text(call.body, "answer")
    if job is None:
        finding.broken("job", id, call.answer.seq, "a cancel of an unknown job was acknowledged")
    elif answer == "already finished":
        if not happened(job.terminal, call.answer):
            finding.broken("job", id, call.answer.seq, "answered 'already finished' while the job was open")
    elif not happened(job.cancel, call.answer) and not (
        job.terminal is not None and job.terminal.kind == "job.cancelled" and happened(job.terminal, call.answer)
    ):
        finding.broken("job", id, call.answer.seq, "a cancel was acknowledged but none had been committed")


def s20_read_your_writes(history: Indexed) -> Finding:
    """Versions seen by one client never go back, and its own acknowledged writes show in what it reads later."""
    finding = Finding(rule="S20")
    newest: dict[tuple[str, str], tuple[int, Record]] = {}
    written: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in history.calls:
        if call.outcome != "ok":
            continue
        pair = (call.client, text(call.body, "job"))
        if call.verb in ("submit", "cancel"):
            written[pair].append(call)
        elif call.verb == "read":
            _check_read(finding, history, call, newest.get(pair), written.get(pair, []))
            version = whole(call.body, "version")
            if pair not in newest or version > newest[pair][0]:
                newest[pair] = (version, call.answer)
    return finding


def _check_read(
    finding: Finding, history: Indexed, read: Call, newest: tuple[int, Record] | None, written: list[Call]
) -> None:
    id, version = text(read.body, "job"), whole(read.body, "version")
    facts = history.jobs.get(id)
    if facts is not None and happened(facts.purged, read.answer):
        return
    if newest is not None and read.saw(newest[1]):
        finding.premises += 1
        if version < newest[0]:
            finding.broken("job", id, read.answer.seq, f"{read.client} read version {version} after {newest[0]}")
    for write in written:
        if not read.saw(write.answer):
            continue
        finding.premises += 1
        if not read.body.get("found"):
            finding.broken("job", id, read.answer.seq, f"{read.client} does not see its own {write.verb}")
        elif write.verb == "cancel" and not _shows_cancel(facts, read):
            finding.broken("job", id, read.answer.seq, f"{read.client} does not see its own cancel")


def _shows_cancel(facts: JobFacts | None, read: Call) -> bool:
    if text(read.body, "state") in TERMINAL_JOB_STATES:
        return True
    cancel = facts.cancel if facts is not None else None
    return cancel is not None and whole(read.body, "version") >= cancel.version
