"""A request and its answer as the emulators see them, and the refusal that each dialect words in its own way.

The ASGI side (`gcs`) makes requests and sends answers; the dialects know nothing of ASGI. Paths stay escaped, because
an object's name may hold an escaped slash.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec


class Request(NamedTuple):
    method: str
    path: str  #: still escaped
    query: Mapping[str, str]
    headers: Mapping[str, str]  #: names in lower case
    body: bytes

    @property
    def origin(self) -> str:
        return f"http://{self.headers.get('host', '127.0.0.1')}"


class Answer(NamedTuple):
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = {}


class Refused(Exception):
    """A call that the service answers with an error: status, the XML dialect's code, the JSON dialect's reason."""

    def __init__(
        self, status: int, code: str, reason: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.headers = headers or {}
        self.status = status
        self.code = code
        self.reason = reason


def bad(message: str) -> Refused:
    return Refused(400, "InvalidArgument", "invalid", message)


def query_of(text: str) -> dict[str, str]:
    return dict(parse_qsl(text, keep_blank_values=True))


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    found = {"content-type": "application/json; charset=UTF-8", **(headers or {})}
    return Answer(status, msgspec.json.encode(content), found)


def number(value: str | None, field: str) -> int | None:
    if value is None or value == "":
        return None
    if not value.isascii() or not value.isdigit():
        raise bad(f"{field}: {value!r} is not a whole number")
    return int(value)


def token_of(name: str) -> str:
    """A page's token: opaque, and never empty, because an empty one means the beginning."""
    return "p" + base64.urlsafe_b64encode(name.encode()).decode()


def name_of(token: str) -> str:
    """The last name of the page before; "" where there was none."""
    if not token:
        return ""
    try:
        if not token.startswith("p"):
            raise ValueError(token)
        return base64.b64decode(token[1:], altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise bad(f"the page token {token!r} was not given by this service") from error
