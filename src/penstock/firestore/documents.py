"""What a pending document asks for: checked field by field, as a job, or refused in one line.

`firestore.claim` calls `read` before anything is written. Every rule here is in docs/reference/firestore.md; fields
nobody knows are the client's own and are not looked at. It must not talk to anybody; what only the server can know (a
pool that is not there) is refused by the server, and ends in the same kind of line.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import msgspec

from penstock.domain import admission, catalogue, limits
from penstock.domain.admission import BadInput
from penstock.firestore.fields import Document

TIMEOUT_S_DEFAULT: Final = 300.0
TIMEOUT_S_MAX: Final = 7 * 24 * 3600.0
SUBMITTER_DEFAULT: Final = "anonymous"
NOTIFY_MAX: Final = 8
_NOTIFY_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z", re.ASCII)
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z", re.ASCII)
_MISSING: Final = object()


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a valid document asks for."""

    code: str
    challenge_number: int | None = None
    timeout_s: float = TIMEOUT_S_DEFAULT
    submitter: str = SUBMITTER_DEFAULT
    priority: int = 0
    accelerator: str | None = None
    env: dict[str, str] = {}
    notify: tuple[str, ...] = ()


def read(document: Document) -> Wanted:
    """The job a document asks for; BadInput with the first field that is wrong."""
    fields = document.fields
    return Wanted(
        code=_code(fields.get("code", _MISSING)),
        challenge_number=_challenge(fields.get("challenge_number")),
        timeout_s=_timeout(fields.get("timeout")),
        submitter=_submitter(fields.get("metadata")),
        priority=_priority(fields.get("priority")),
        accelerator=_accelerator(fields.get("accelerator")),
        env=_env(fields.get("env")),
        notify=_notify(fields.get("notify")),
    )


def key_of(document: Document) -> str:
    """The idempotency key of a document: its path, and when it was made, so that one made anew is a new job."""
    created = f"@{document.created.seconds}.{document.created.nanos:09}"
    key = path_of(document.name) + created
    if len(key) <= limits.NAME_CHARACTERS_MAX and key.isprintable():
        return key
    return f"firestore/{hashlib.sha256(document.name.encode()).hexdigest()}{created}"


def key_fits(document: Document, key: str) -> bool:
    """Whether a key found in a document is one of that document: a client may have put another one's there."""
    stem, _, _created = key_of(document).rpartition("@")
    return key.rpartition("@")[0] == stem


def path_of(name: str) -> str:
    """A document's name without the words that are the same for all."""
    _, project, _, database, _, path = name.split("/", 5)
    return f"firestore/{project}/{database}/{path}"


def collection_tag(parent: str) -> str:
    """The tag of all jobs that came from one collection (`projects/P/databases/D/documents/COLLECTION`)."""
    tag = path_of(parent)
    if len(tag) <= limits.NAME_CHARACTERS_MAX:
        return tag
    return f"firestore/{hashlib.sha256(parent.encode()).hexdigest()}"


# --- one function for each field ---
def _code(value: object) -> str:
    if value is _MISSING:
        raise BadInput("code", None, "is missing", "put the Python source there, as text")
    if not isinstance(value, str):
        raise BadInput("code", _shown(value), "is not text", "put the Python source there, as text")
    if not value.strip():
        raise BadInput("code", value, "is empty", "put the Python source there")
    size = len(value.encode("utf-8", "replace"))
    if size > limits.CODE_BYTES_MAX:
        raise BadInput("code", f"{size} bytes", "is over 1 MiB", "read the rest from a bucket")
    return value


def _challenge(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadInput("challenge_number", _shown(value), "is not a whole number")
    return value


def _timeout(value: object) -> float:
    if value is None:
        return TIMEOUT_S_DEFAULT
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadInput("timeout", _shown(value), "is not a number of seconds")
    admission.check_number("timeout", value, 1, TIMEOUT_S_MAX)
    return float(value)


def _submitter(metadata: object) -> str:
    if metadata is None:
        return SUBMITTER_DEFAULT
    if not isinstance(metadata, dict):
        raise BadInput("metadata", _shown(metadata), "is not a map")
    name = metadata.get("submitted_by")
    if name is None:
        return SUBMITTER_DEFAULT
    if not isinstance(name, str):
        raise BadInput("metadata.submitted_by", _shown(name), "is not text")
    admission.check_name("metadata.submitted_by", name)
    return name


def _priority(value: object) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadInput("priority", _shown(value), "is not a whole number")
    admission.check_number("priority", value, -limits.PRIORITY_MAX, limits.PRIORITY_MAX)
    return value


def _accelerator(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadInput("accelerator", _shown(value), "is not text")
    try:
        return catalogue.find(value).name
    except catalogue.UnknownAccelerator as error:
        raise BadInput("accelerator", value, f"is not a known accelerator: {error}") from error


def _env(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadInput("env", _shown(value), "is not a map of text")
    size = 0
    for name, text in value.items():
        if _ENV_NAME.match(name) is None:
            raise BadInput("env", name, "is not a name for a variable", "use letters, digits and _")
        # The value itself may be a secret: it is not repeated.
        if not isinstance(text, str):
            raise BadInput("env", name, "has a value that is not text")
        if "\0" in text:
            raise BadInput("env", name, "has a value with a NUL character")
        size += len(name) + len(text.encode("utf-8", "replace")) + 2
    if size > limits.ENV_BYTES_MAX:
        raise BadInput("env", f"{size} bytes", f"are more than {limits.ENV_BYTES_MAX}")
    return value


def _notify(value: object) -> tuple[str, ...]:
    """Names only: an address from a document would let whoever writes one make the server call it."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BadInput("notify", _shown(value), "is not a list of names")
    if len(value) > NOTIFY_MAX:
        raise BadInput("notify", f"{len(value)} names", f"are more than {NOTIFY_MAX}")
    for name in value:
        if not isinstance(name, str) or _NOTIFY_NAME.match(name) is None:
            rule = "is not the name of a channel"
            raise BadInput("notify", _shown(name), rule, "use letters, digits, '_', '-' and '.'; no addresses")
    return tuple(value)


def _shown(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"
