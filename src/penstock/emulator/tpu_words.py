"""Words of the Cloud TPU API on the wire: errors and their codes, names of resources, times and durations.

All `tpu_*` modules use it. It holds no state and decides nothing about what exists.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from penstock.emulator.http_words import Answer, as_json

#: google.rpc names with their HTTP status and number.
CODES: Final[Mapping[str, tuple[int, int]]] = {
    "CANCELLED": (499, 1),
    "INVALID_ARGUMENT": (400, 3),
    "DEADLINE_EXCEEDED": (504, 4),
    "NOT_FOUND": (404, 5),
    "ALREADY_EXISTS": (409, 6),
    "PERMISSION_DENIED": (403, 7),
    "RESOURCE_EXHAUSTED": (429, 8),
    "FAILED_PRECONDITION": (400, 9),
    "ABORTED": (409, 10),
    "UNIMPLEMENTED": (501, 12),
    "INTERNAL": (500, 13),
    "UNAVAILABLE": (503, 14),
    "UNAUTHENTICATED": (401, 16),
}
#: What a bare HTTP status is called; a fault names only the status.
_NAMES: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
#: What the API's reference allows in the id of a node or a queued resource.
RESOURCE_ID: Final = re.compile(r"[A-Za-z0-9_.~+%-]{1,128}")
_DURATION: Final = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)s")


class TpuRefusal(Exception):
    """A call that the service answers with an error."""

    def __init__(
        self,
        status: str,
        message: str,
        *,
        details: list[dict[str, Any]] | None = None,
        retry_after_s: int | None = None,
        http: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.details = details or []
        self.retry_after_s = retry_after_s
        self.http = http if http is not None else CODES[status][0]

    def answer(self) -> Answer:
        error: dict[str, Any] = {"code": self.http, "message": self.message, "status": self.status}
        if self.details:
            error["details"] = self.details
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return as_json({"error": error}, self.http, headers)

    def rpc(self) -> dict[str, Any]:
        """The same as google.rpc.Status, the form inside operations."""
        return {"code": CODES[self.status][1], "message": self.message, "details": self.details}


def status_name(http: int) -> str:
    return _NAMES.get(http, "UNKNOWN")


def bad_argument(message: str, field: str = "") -> TpuRefusal:
    violation = {"field": field, "description": message} if field else {"description": message}
    details = [{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]}]
    return TpuRefusal("INVALID_ARGUMENT", message, details=details)


def not_found(name: str) -> TpuRefusal:
    details = [{"@type": "type.googleapis.com/google.rpc.ResourceInfo", "resourceName": name}]
    return TpuRefusal("NOT_FOUND", f"Resource '{name}' was not found", details=details)


def already_exists(name: str) -> TpuRefusal:
    details = [{"@type": "type.googleapis.com/google.rpc.ResourceInfo", "resourceName": name}]
    return TpuRefusal("ALREADY_EXISTS", f"Resource '{name}' already exists", details=details)


def error_id(rng: random.Random) -> str:
    """The mark at the end of many of the service's messages, by which its people find the log line."""
    return f"[EID: 0x{rng.getrandbits(60):x}]"


def no_capacity(zone: str, rng: random.Random) -> TpuRefusal:
    return TpuRefusal(
        "RESOURCE_EXHAUSTED",
        f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes are '
        f"offered (see https://cloud.google.com/tpu/docs/regions) {error_id(rng)}",
    )


def no_reserved_capacity(rng: random.Random) -> TpuRefusal:
    return TpuRefusal(
        "RESOURCE_EXHAUSTED",
        f"Insufficient reserved capacity. Contact customer support to increase your reservation. {error_id(rng)}",
    )


def stamp(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def time_of(text: Any, field: str) -> float:
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError as error:
        raise bad_argument(
            f"Invalid value at '{field}' (type.googleapis.com/google.protobuf.Timestamp)", field
        ) from error
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def seconds_of(text: Any, field: str) -> float:
    found = _DURATION.fullmatch(str(text))
    if found is None:
        raise bad_argument(f"Invalid value at '{field}' (type.googleapis.com/google.protobuf.Duration)", field)
    return float(found[1])


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda found: "_" + found[1].lower(), name)


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word[:1].upper() + word[1:] for word in rest)
