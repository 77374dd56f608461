"""Calls the emulator of Cloud Storage as its HTTP server would, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import msgspec

from penstock.emulator.asgi import CUT
from penstock.emulator.gcs import GcsEmulator

BUCKET = "bkt"


class Got(NamedTuple):
    """An answer; status 0 is a connection that was broken."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


def call(
    emulator: GcsEmulator, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Got:
    path, _, query = target.partition("?")
    broken: list[bool] = []
    sent: list[MutableMapping[str, Any]] = []
    scope = {
        "type": "http",
        "method": method,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in {"host": "here", **(headers or {})}.items()],
        "extensions": {CUT: lambda: broken.append(True)},
    }
    incoming: list[MutableMapping[str, Any]] = [
        {"type": "http.request", "body": body[:7], "more_body": True},
        {"type": "http.request", "body": body[7:]},
    ]

    async def receive() -> MutableMapping[str, Any]:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(emulator(scope, receive, send))
    if broken:
        assert not sent
        return Got(0, {}, b"")
    start, *rest = sent
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return Got(start["status"], found, b"".join(each["body"] for each in rest))


def upload(emulator: GcsEmulator, name: str, data: bytes, query: str = "") -> Got:
    """A simple upload in the JSON dialect."""
    return call(emulator, "POST", f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}{query}", data)
