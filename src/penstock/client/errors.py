"""What the SDK raises: refusals of the API, a server that does not answer, jobs that did not succeed.

Both clients and their job handles raise these; `cli` turns them into one line and `exit_code`. Waiting too long is the
builtin TimeoutError. It must not decide what to try again: that is `client.patience`.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from typing_extensions import override

from penstock.wire.api import Outcome
from penstock.wire.problems import KINDS, Problem, job_exit_code, problem

PROBLEM_TYPE = "application/problem+json"
_DETAIL_CHARACTERS = 300  # of a body that is no problem+json: enough to recognise a proxy's page
_PROBLEM_DECODER = msgspec.json.Decoder(Problem)


class ApiError(Exception):
    """The API said no. `code` is stable and says why; `exit_code` is what `tpu` exits with."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem

    @override
    def __str__(self) -> str:
        line = self.problem.detail or self.problem.title
        return f"{line}; {self.problem.advice}" if self.problem.advice else line

    @property
    def code(self) -> str:
        """One of the keys of `penstock.wire.problems.KINDS`."""
        return self.problem.code

    @property
    def status(self) -> int:
        return self.problem.status

    @property
    def field(self) -> str | None:
        """The field of the request that was wrong."""
        return self.problem.field

    @property
    def advice(self) -> str | None:
        return self.problem.advice

    @property
    def exit_code(self) -> int:
        kind = KINDS.get(self.problem.code)
        return KINDS["fault"].exit_code if kind is None else kind.exit_code


class Unreachable(ApiError):
    """No server answered in time. For a submit this says nothing about its effect: repeat it with the same key."""


class JobFailed(Exception):
    """A job ended and did not succeed: what went wrong, in the payload's own words where it had any."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome

    @override
    def __str__(self) -> str:
        outcome = self.outcome
        if outcome.error is not None:
            said = f": {outcome.error.message}" if outcome.error.message else ""
            return f"job {outcome.id} {outcome.state}: {outcome.error.type}{said}"
        because = f" ({outcome.cause})" if outcome.cause and outcome.cause != outcome.state else ""
        code = f", exit code {outcome.exit_code}" if outcome.exit_code else ""
        return f"job {outcome.id} {outcome.state}{because}{code}"

    @property
    def id(self) -> str:
        return self.outcome.id

    @property
    def cause(self) -> str | None:
        """Why the last attempt closed: user_error, oom, timeout, preempted, infra, lost, cancelled."""
        return self.outcome.cause

    @property
    def type(self) -> str | None:
        """The exception's type, when the payload raised one."""
        return None if self.outcome.error is None else self.outcome.error.type

    @property
    def message(self) -> str:
        return "" if self.outcome.error is None else self.outcome.error.message

    @property
    def traceback(self) -> str:
        """The payload's traceback, with its own lines."""
        return "" if self.outcome.error is None else self.outcome.error.traceback

    @property
    def exit_code(self) -> int:
        """What `tpu run --wait` exits with: the payload's own code, or one that stands for the cause."""
        return job_exit_code(self.outcome.state, self.outcome.cause, self.outcome.exit_code)


def bad_input(detail: str, *, field: str | None = None, advice: str | None = None) -> ApiError:
    """What the server would refuse as well, said without asking it."""
    return ApiError(problem("bad_input", detail, field=field, advice=advice))


def unreadable(path: str, why: object) -> ApiError:
    """An answer that is not what this version of the client expects."""
    return ApiError(
        problem("fault", f"the answer to {path} cannot be read: {why}", advice="is the server of another version?")
    )


def from_answer(status: int, media_type: str, body: bytes, retry_after: str | None = None) -> ApiError:
    """The error behind a reply with a bad status, whoever wrote it: our server or a proxy before it."""
    found = _decoded(body) if media_type.partition(";")[0].strip() == PROBLEM_TYPE else None
    if found is None:
        text = " ".join(body[: 4 * _DETAIL_CHARACTERS].decode("utf-8", "replace").split())[:_DETAIL_CHARACTERS]
        found = Problem(title=_phrase(status), status=status, detail=text or _phrase(status), code=_code_of(status))
    if found.retry_after_s is None and retry_after is not None and retry_after.strip().isdecimal():
        found = msgspec.structs.replace(found, retry_after_s=float(retry_after))
    return ApiError(found)


def _decoded(body: bytes) -> Problem | None:
    """A proxy may call anything problem+json; what it is not is shown as text."""
    try:
        return _PROBLEM_DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _phrase(status: int) -> str:
    try:
        return f"HTTP {status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"HTTP {status}"


def _code_of(status: int) -> str:
    if status in (502, 504):  # a proxy could not reach the server
        return "unavailable"
    by_status = {kind.status: code for code, kind in reversed(KINDS.items())}
    return by_status.get(status, "fault" if status >= 500 or status < 400 else "bad_input")
