"""Rules that only real processes can put to the test: S17–S19, S21, S22 and L10.

Called through `rules`. The tests of `tests/process` record what they sent, wrote, planted and read themselves, in the
words of docs/reference/rules.md; nothing here comes from the server's own account except committed events, which are
what S19 and L10 are about. These say nothing of a history without such records, so the simulator is none the wiser.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from penstock.domain import limits
from penstock.domain.invariants.facts import Call, Pieces, number, text, texts, whole
from penstock.domain.invariants.finding import Finding
from penstock.domain.invariants.history import Record
from penstock.domain.invariants.indexed import Indexed, happened

DRAIN_S: Final = 30.0  #: from SIGTERM until the server's process is gone
_ACKNOWLEDGED: Final = frozenset({"submit", "cancel"})


# --- S17 ---
def s17_team_walls(history: Indexed) -> Finding:
    """No answer shows what belongs to a team that is not the caller's, and none changes when only others act."""
    finding = Finding(rule="S17")
    owners = {record.subject: text(record.body, "team") for record in history.witnessed("owned")}
    granted = {record.subject: texts(record.body, "teams") for record in history.witnessed("granted")}
    acts = history.witnessed("acted")
    last: dict[tuple[str, str], Record] = {}
    for call in history.calls:
        if call.verb != "answer" or call.client not in granted:
            continue
        own, route, answer = granted[call.client], text(call.body, "route"), call.answer
        for mark in texts(call.body, "marks"):
            if owners.get(mark, "") not in ("", *own):
                message = f"{route} showed {mark!r} of team {owners[mark]}"
                finding.broken("principal", call.client, answer.seq, message)
        # A route puts the rule to the test when there is something that it must not show.
        finding.premises += any(team not in own for team in owners.values())
        before = last.get((call.client, route))
        if before is not None and _only_strangers_acted(acts, own, before, answer):
            finding.premises += 1
            if text(before.body, "digest") != text(answer.body, "digest"):
                message = f"{route} answered otherwise after only other teams had acted"
                finding.broken("principal", call.client, answer.seq, message)
        last[call.client, route] = answer
    return finding


def _only_strangers_acted(acts: list[Record], own: tuple[str, ...], since: Record, until: Record) -> bool:
    between = [act for act in acts if since.order < act.order < until.order]
    return bool(between) and all(text(act.body, "team") not in own for act in between)


# --- S18 ---
def s18_logs_account_for_loss(history: Indexed) -> Finding:
    """What is read of a stream is what was written; what is missing is marked with its size; the cap is kept."""
    finding = Finding(rule="S18")
    wanted: dict[str, tuple[int, str, int]] = {}  #: stream -> bytes written, hash of what may be read, bytes taken
    for record in history.records:
        stream, body = record.subject, record.body
        if record.kind == "log.written":
            wanted[stream] = (whole(body, "bytes"), text(body, "sha256"), 0)
        elif record.kind == "log.taken" and stream in wanted:
            written, _, taken = wanted[stream]
            wanted[stream] = (written, text(body, "sha256"), taken + whole(body, "bytes"))
        elif record.kind == "log.read.ok" and stream in wanted:
            finding.premises += 1
            _check_reading(finding, record, *wanted[stream])
    return finding


def _check_reading(finding: Finding, read: Record, written: int, sha256: str, taken: int) -> None:
    stream, pieces = read.subject, Pieces(read.body)
    for offset, end in pieces.unmarked:
        finding.broken("stream", stream, read.seq, f"bytes {offset} to {end} are missing and nothing says so")
    for offset in pieces.repeated:
        finding.broken("stream", stream, read.seq, f"what was read at {offset} had been read before")
    if pieces.read + pieces.missing != written:
        message = f"{written} bytes were written, {pieces.read} read and {pieces.missing} marked as missing"
        finding.broken("stream", stream, read.seq, message)
    elif pieces.missing != taken:
        message = f"{pieces.missing} bytes are marked as missing, but {taken} were taken away"
        finding.broken("stream", stream, read.seq, message)
    elif text(read.body, "sha256") != sha256:
        finding.broken("stream", stream, read.seq, "what was read is not what was written")
    if pieces.read > limits.LOG_BYTES_MAX:
        finding.broken("stream", stream, read.seq, f"{pieces.read} bytes are kept, above the cap")


# --- S19 ---
def s19_no_secret_at_rest(history: Indexed) -> Finding:
    """A planted secret is found in no sink but its own file, and every change has one audit record with principal."""
    finding = Finding(rule="S19")
    planted: set[str] = set()
    for record in history.witnessed("secret.planted", "sink.scanned"):
        if record.kind == "secret.planted":
            planted.add(record.subject)
        elif text(record.body, "secret") in planted and whole(record.body, "bytes") > 0:
            finding.premises += 1
            if record.body.get("found") and not record.body.get("home"):
                finding.broken("sink", record.subject, record.seq, f"holds secret {text(record.body, 'secret')}")
    for call in history.calls:
        if call.verb == "change" and call.outcome == "ok":
            finding.premises += 1
            _check_audit(finding, history, call)
    return finding


def _check_audit(finding: Finding, history: Indexed, change: Call) -> None:
    """One record of the kind, about the thing, by the caller, made while the call ran."""
    entity, id, what = (text(change.body, name) for name in ("entity", "id", "what"))
    since, until = change.invoked, change.answer
    events = [
        event.actor
        for event in history.of[entity].get(id, ())
        if event.kind == what and since.seq < event.seq <= until.seq
    ]
    lines = [
        text(record.body, "principal")
        for record in history.witnessed("audit.line")
        if since.order < record.order and (text(record.body, "what"), record.subject) == (what, id)
    ]
    by = [*events, *lines]
    if by != [change.client]:
        message = f"{what} of {id} has {len(by)} audit records, by {', '.join(by) or 'nobody'}"
        finding.broken("principal", change.client, until.seq, message)


# --- S21 ---
def s21_upgrades_replay(history: Indexed) -> Finding:
    """What an older release has committed is read, allowed and carried on by this one."""
    finding = Finding(rule="S21")
    for record in history.witnessed("replayed"):
        finding.premises += whole(record.body, "events")
        for rejected in texts(record.body, "rejected"):
            finding.broken("release", record.subject, record.seq, f"its history does not replay: {rejected}")
    return finding


# --- S22 ---
def s22_what_was_sent_runs(history: Indexed) -> Finding:
    """The tree a payload finds is the tree that was submitted, on every host and in every attempt."""
    finding = Finding(rule="S22")
    sent: dict[str, str] = {}
    for record in history.witnessed("tree.sent", "tree.found"):
        tree = text(record.body, "tree")
        if record.kind == "tree.sent":
            sent[record.subject] = tree
        elif record.subject in sent:
            finding.premises += 1
            if tree != sent[record.subject]:
                finding.broken("job", record.subject, record.seq, f"runs tree {tree}, not {sent[record.subject]}")
    return finding


# --- L10 ---
def l10_orderly_shutdown(history: Indexed) -> Finding:
    """A server told to stop is gone within 30 s, and whatever it acknowledged until then is committed."""
    finding = Finding(rule="L10")
    told: dict[str, Record] = {}
    answered: dict[str, list[Call]] = defaultdict(list)
    for call in history.calls:
        if call.verb in _ACKNOWLEDGED and call.outcome == "ok":
            answered[text(call.body, "server")].append(call)
    for record in history.witnessed("server.told", "server.gone"):
        server = record.subject
        if record.kind == "server.told":
            told[server] = record
            continue
        asked = told.pop(server, None)
        if asked is None:
            continue
        # Only answers that were given after it was told put the second half to the test.
        late = [call for call in answered[server] if asked.order < call.answer.order]
        finding.premises += bool(late)
        took_s = record.t - asked.t
        if took_s > DRAIN_S:
            finding.broken("server", server, record.seq, f"took {took_s:.1f} s to stop")
        if number(record.body, "code") not in (None, 0.0):
            finding.broken("server", server, record.seq, f"ended with {record.body.get('code')!r}")
        for call in answered[server]:
            if not _committed(history, call):
                id = text(call.body, "job")
                finding.broken("job", id, call.answer.seq, f"its {call.verb} was acknowledged by {server} and is lost")
    for server, asked in told.items():
        if history.end_t - asked.t > DRAIN_S:
            finding.broken("server", server, asked.seq, "was told to stop and has not stopped")
    return finding


def _committed(history: Indexed, call: Call) -> bool:
    job = history.jobs.get(text(call.body, "job"))
    if job is None or not happened(job.created, call.answer):
        return False
    return call.verb == "submit" or happened(job.cancel, call.answer) or happened(job.terminal, call.answer)
