"""How a job's end reads in its document."""

from __future__ import annotations

from penstock.firestore.fields import moment
from penstock.firestore.outcomes import INLINE_BYTES_MAX, ended, failure, result_fields
from penstock.wire.api import ErrorView, Outcome

URL = "http://x/v1/jobs/j1/result"


def outcome(state: str, cause: str | None, **more: object) -> Outcome:
    return Outcome(id="j1", state=state, cause=cause, exit_code=1, started_at=1.0, finished_at=2.0, attempts=2, **more)  # type: ignore[arg-type]


def test_a_result_is_text_and_json_beside_it() -> None:
    assert result_fields(None, URL) == {"result": None}
    assert result_fields("text", URL) == {"result": "text"}
    assert result_fields(1.5, URL) == {"result": "1.5", "result_json": "1.5"}
    assert result_fields([[1], {"a": None}], URL) == {"result": "[[1], {'a': None}]", "result_json": '[[1],{"a":null}]'}


def test_a_large_result_is_a_reference_with_its_beginning() -> None:
    fits = "é" * (INLINE_BYTES_MAX // 2)
    assert result_fields(fits, URL) == {"result": fits}
    assert result_fields(fits + "é", URL) == {
        "result": "é" * 2_000,
        "result_truncated": True,
        "result_bytes": INLINE_BYTES_MAX + 2,
        "result_url": URL,
    }


def test_success_has_times_attempt_and_result() -> None:
    found = ended(outcome("succeeded", None, result=3), reason="", lines=(), result_url=URL)
    assert found == {
        "status": "completed",
        "attempt": 2,
        "started_at": moment(1.0),
        "completed_at": moment(2.0),
        "result": "3",
        "result_json": "3",
    }


def test_an_error_is_the_payloads_own_unless_it_was_stopped() -> None:
    raised = ErrorView(type="KeyError", message="'x'")
    own = ended(outcome("failed", "user_error", error=raised), reason="r", lines=["a"], result_url=URL)
    assert own["error"] == {"type": "KeyError", "message": "'x'", "last_lines": ["a"], "cause": "user_error"}
    late = ended(outcome("failed", "timeout", error=raised), reason="over 300 s", lines=[], result_url=URL)
    assert late["error"] == {"type": "Timeout", "message": "over 300 s", "last_lines": [], "cause": "timeout"}
    stopped = ended(outcome("cancelled", None), reason="", lines=[], result_url=URL)
    assert stopped["error"] == {"type": "Cancelled", "message": "exit code 1", "last_lines": [], "cause": "cancelled"}
    assert stopped["status"] == "failed"


def test_a_failure_without_a_job_names_the_field() -> None:
    assert failure("InvalidDocument", "code: 3 is not text", field="code")["error"] == {
        "type": "InvalidDocument",
        "message": "code: 3 is not text",
        "last_lines": [],
        "field": "code",
    }
