"""How a job ended, as fields of its document: a result that fits, or a reference to it; an error with its last lines.

`firestore.bridge` calls it once a job has ended. Pure. It must not decide whether a document may still be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.domain.lifecycle import Cause, JobState
from penstock.firestore.fields import COMPLETED, FAILED, NOW, moment
from penstock.wire.api import Outcome

#: Of `result` and `result_json` together. A document has 1 MiB for everything, and the code is in it too.
INLINE_BYTES_MAX: Final = 700_000
PREVIEW_CHARACTERS: Final = 2_000
MESSAGE_CHARACTERS: Final = 4_000
LINE_CHARACTERS: Final = 500
#: Causes that say more than whatever the payload said when it was stopped.
_CAUSES: Final = {
    Cause.TIMEOUT.value: "Timeout",
    Cause.OOM.value: "OutOfMemory",
    Cause.CANCELLED.value: "Cancelled",
    Cause.LOST.value: "Lost",
    Cause.INFRA.value: "Lost",
    Cause.PREEMPTED.value: "Lost",
}


def ended(outcome: Outcome, *, reason: str, lines: Sequence[str], result_url: str) -> dict[str, object]:
    """The fields of a document whose job has ended."""
    at = NOW if outcome.finished_at is None else moment(outcome.finished_at)
    fields: dict[str, object] = {"completed_at": at, "attempt": max(1, outcome.attempts)}
    if outcome.started_at is not None:
        fields["started_at"] = moment(outcome.started_at)
    if outcome.state == JobState.SUCCEEDED:
        return {**fields, "status": COMPLETED, **result_fields(outcome.result, result_url)}
    return {**fields, "status": FAILED, "error": _error(outcome, reason, lines)}


def result_fields(value: object, url: str) -> dict[str, object]:
    """A result as the first queue had it (text), and as JSON beside it when it was something else than text."""
    if value is None:
        return {"result": None}
    text = str(value)
    fields: dict[str, object] = {"result": text}
    size = len(text.encode("utf-8", "replace"))
    if not isinstance(value, str):
        json = msgspec.json.encode(value)
        fields["result_json"] = json.decode()
        size += len(json)
    return fields if size <= INLINE_BYTES_MAX else reference(fields, url)


def reference(fields: dict[str, object], url: str) -> dict[str, object]:
    """The same, for a document in which it has no room: the beginning, the size, and where all of it is."""
    text = fields.get("result")
    assert isinstance(text, str)
    json = fields.get("result_json", text)
    assert isinstance(json, str)
    rest = {name: value for name, value in fields.items() if name not in ("result", "result_json")}
    return {
        **rest,
        "result": text[:PREVIEW_CHARACTERS],
        "result_truncated": True,
        "result_bytes": len(json.encode("utf-8", "replace")),
        "result_url": url,
    }


def failure(kind: str, message: str, *, field: str = "", cause: str = "") -> dict[str, object]:
    """The fields of a document that fails without a job's help."""
    error: dict[str, object] = {"type": kind, "message": message[:MESSAGE_CHARACTERS], "last_lines": []}
    if field:
        error["field"] = field
    if cause:
        error["cause"] = cause
    return {"status": FAILED, "completed_at": NOW, "error": error}


def _error(outcome: Outcome, reason: str, lines: Sequence[str]) -> dict[str, object]:
    said = outcome.error
    kind = _CAUSES.get(outcome.cause or "")
    if outcome.state == JobState.CANCELLED:
        kind = "Cancelled"
    if kind is None:
        kind = said.type if said is not None else "Failed"
    message = said.message if said is not None and kind == said.type else ""
    if not message:
        message = reason or f"exit code {outcome.exit_code}"
    return {
        "type": kind,
        "message": message[:MESSAGE_CHARACTERS],
        "last_lines": [line[:LINE_CHARACTERS] for line in lines],
        "cause": outcome.cause or outcome.state,
    }
