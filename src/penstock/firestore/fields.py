"""Which fields of a document are whose, which status follows which, and how Firestore's values become Python's.

Every module of the bridge speaks of documents in these words; docs/reference/firestore.md says the same to people. It
must not talk to anybody.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

PENDING: Final = "pending"
SCHEDULED: Final = "scheduled"
RUNNING: Final = "running"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
CANCEL_REQUESTED: Final = "cancel_requested"

#: How far each status is. A document never goes back, and from the last step nowhere.
RANK: Final[Mapping[str, int]] = {PENDING: 0, SCHEDULED: 1, RUNNING: 2, COMPLETED: 3, FAILED: 3}
TERMINAL: Final = frozenset({COMPLETED, FAILED})
#: Of documents that some bridge has taken and not finished.
ACTIVE: Final = (SCHEDULED, RUNNING)

#: Everything a bridge writes. Taking a document removes what a client may have put there.
OUT: Final = (
    "attempt",
    "bridge",
    "completed_at",
    "error",
    "job_id",
    "job_key",
    "log_url",
    "result",
    "result_bytes",
    "result_json",
    "result_truncated",
    "result_url",
    "scheduled_at",
    "started_at",
    "status",
    "updated_at",
)
#: What a look at a document needs when its code does not matter.
LOOK: Final = ("status", "job_id", "job_key", "bridge", "attempt")


class Now:
    """Stands for the database's own time in a write."""


NOW: Final = Now()
Content = Mapping[str, object]


class Stamp(NamedTuple):
    """A version of a document: when it was last written, by the database's clock."""

    seconds: int
    nanos: int


class Opaque(msgspec.Struct, frozen=True):
    """A value of a kind that no field of ours has (bytes, a reference, a place on earth)."""

    kind: str


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a document, or of the fields of it that were asked for."""

    name: str  #: projects/P/databases/D/documents/COLLECTION/ID
    fields: dict[str, object]
    created: Stamp
    stamp: Stamp

    @property
    def id(self) -> str:
        return self.name.rpartition("/")[2]

    def text(self, field: str) -> str:
        """A field that should be text; what is not counts as absent."""
        value = self.fields.get(field)
        return value if isinstance(value, str) else ""

    @property
    def status(self) -> str:
        return self.text("status")


def decode(value: Any) -> object:
    """A `google.firestore.v1.Value` as Python sees it."""
    match value.WhichOneof("value_type"):
        case "null_value" | None:
            return None
        case "boolean_value":
            return bool(value.boolean_value)
        case "integer_value":
            return int(value.integer_value)
        case "double_value":
            return float(value.double_value)
        case "string_value":
            return str(value.string_value)
        case "timestamp_value":
            return moment(value.timestamp_value.seconds + value.timestamp_value.nanos / 1e9)
        case "array_value":
            return [decode(one) for one in value.array_value.values]
        case "map_value":
            return {str(key): decode(one) for key, one in value.map_value.fields.items()}
        case other:
            return Opaque(other.removesuffix("_value"))


def encode(value: object, into: Any) -> None:
    """Put a Python value into an empty `google.firestore.v1.Value`."""
    match value:
        case None:
            into.null_value = 0
        case bool():
            into.boolean_value = value
        case int():
            into.integer_value = value
        case float():
            into.double_value = value
        case str():
            # Half characters cannot be sent at all; what a payload said with them is still worth reading.
            into.string_value = value.encode("utf-8", "replace").decode()
        case datetime.datetime():
            into.timestamp_value.FromDatetime(value)
        case list() | tuple():
            into.array_value.SetInParent()
            for one in value:
                encode(one, into.array_value.values.add())
        case dict():
            into.map_value.SetInParent()
            for key, one in value.items():
                encode(one, into.map_value.fields[key])
        case _:
            raise TypeError(f"{type(value).__name__} is no kind of value that the bridge writes")


def moment(seconds: float) -> datetime.datetime:
    """Seconds since the epoch as Firestore takes them."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
