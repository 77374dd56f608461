"""How the API says no: problem+json with a stable code, and what each code means to HTTP and to the shell.

`server` raises by code, `client` turns a reply back into the same error, `cli` exits with its exit code. One table, so
that the three never disagree.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec


class Kind(NamedTuple):
    status: int
    exit_code: int
    title: str


#: Codes never change meaning; new ones may be added.
KINDS: Final[dict[str, Kind]] = {
    "bad_input": Kind(400, 2, "the request cannot be taken as it is"),
    "unauthenticated": Kind(401, 4, "no valid token"),
    "forbidden": Kind(403, 4, "not allowed for this principal"),
    "not_found": Kind(404, 5, "there is no such thing here"),
    "method_not_allowed": Kind(405, 2, "this path has no such method"),
    "not_acceptable": Kind(406, 2, "no such representation"),
    "conflict": Kind(409, 6, "it contradicts what is there"),
    "gone": Kind(410, 5, "it was here and is no more"),
    "too_large": Kind(413, 2, "the body is too large"),
    "unsupported_media_type": Kind(415, 2, "the body is of an unknown type"),
    "ambiguous": Kind(409, 2, "the short id means several things"),
    "too_many_requests": Kind(429, 3, "asked too often"),
    "fault": Kind(500, 70, "a fault of the server"),
    "unavailable": Kind(503, 3, "the server cannot answer now"),
    "not_leading": Kind(503, 3, "another server leads"),
    "copying": Kind(503, 3, "what was asked for is on its way"),
}


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of an error, `application/problem+json`."""

    type: str = "about:blank"
    title: str = ""
    status: int = 500
    detail: str = ""  #: one line: field, value, rule, what to do
    code: str = "fault"
    field: str | None = None
    advice: str | None = None
    retry_after_s: float | None = None
    job: str | None = None  #: the job that an idempotency key already stands for


def problem(
    code: str,
    detail: str,
    *,
    field: str | None = None,
    advice: str | None = None,
    retry_after_s: float | None = None,
    job: str | None = None,
) -> Problem:
    kind = KINDS[code]
    return Problem(
        title=kind.title,
        status=kind.status,
        detail=detail,
        code=code,
        field=field,
        advice=advice,
        retry_after_s=retry_after_s,
        job=job,
    )


#: What `tpu run --wait`, `exec` and `result` exit with when the payload itself gave no code.
JOB_EXIT_CODES: Final[dict[str, int]] = {
    "succeeded": 0,
    "user_error": 1,
    "timeout": 124,
    "cancelled": 130,
    "oom": 137,
    "preempted": 75,
    "infra": 75,
    "lost": 75,
}


def job_exit_code(state: str, cause: str | None, exit_code: int | None) -> int:
    """What a job that was waited for means to a shell: the cause's code, the payload's own where it ended by itself."""
    if state == "succeeded":
        return 0
    cause = cause or ("cancelled" if state == "cancelled" else "user_error")
    if cause != "user_error" and cause in JOB_EXIT_CODES:
        return JOB_EXIT_CODES[cause] or 1
    # A cause that this version does not know is a newer server's: the payload's own code says most.
    return (exit_code or 0) & 255 or JOB_EXIT_CODES["user_error"]
