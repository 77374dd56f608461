"""How the emulators meet an HTTP server: one request in with all of its body, one answer out, or a broken connection.

`gcs` and `google` call it from their ASGI applications. It knows no API; the dialects know what a request means.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from penstock.emulator.http_words import Answer, Request, query_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Below this address tests talk to the emulator itself; no bucket can be called so.
CONTROL: Final = "/_emulator/"
#: The ASGI extension by which a server lets us break a connection; see `serving`.
CUT: Final = "penstock.cut"


async def read_request(scope: Scope, receive: Receive) -> Request | None:
    """A request with all of its body, or None if its sender went away first: half a body must have no effect."""
    assert scope["type"] == "http", "served without lifespan and websockets"
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    return Request(
        scope["method"],
        scope["raw_path"].decode("latin-1"),
        query_of(scope["query_string"].decode("latin-1")),
        {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]},
        b"".join(chunks),
    )


async def send_answer(answer: Answer, send: Send, *, head: bool) -> None:
    headers = {"content-length": str(len(answer.body)), **answer.headers}
    if answer.status in (204, 304):
        del headers["content-length"]
    sent = [(name.encode("latin-1"), _header(value)) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": sent})
    await send({"type": "http.response.body", "body": b"" if head else answer.body})


def _header(value: str) -> bytes:
    """What came in a header goes out as the same bytes; of what came in JSON, more than a header's letters as UTF-8."""
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        return value.encode()


async def break_connection(scope: Scope, receive: Receive) -> None:
    """End the connection without an answer; returns when the server knows that it is gone."""
    scope["extensions"][CUT]()
    await until_gone(receive)


async def until_gone(receive: Receive) -> None:
    """Answer nothing until the caller gives up."""
    while (await receive())["type"] != "http.disconnect":
        pass
