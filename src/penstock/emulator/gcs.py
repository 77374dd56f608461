"""An emulated Cloud Storage as an ASGI application: both dialects, faults, and a control address for tests.

`wiring.emulators` serves it for `tpu emulator gcs`. Any credential is accepted. Under `/_emulator/` (no bucket can be
called so) tests plant faults, see which ones struck, and read the history of true changes. It must not be reachable by
others: it listens on 127.0.0.1 and asks nobody who they are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.emulator import gcs_json, gcs_xml
from penstock.emulator.gcs_buckets import Buckets
from penstock.emulator.gcs_faults import Fault, Faults, damaged, damaged_answer, refused_by, shortened
from penstock.emulator.gcs_uploads import Uploads
from penstock.emulator.http_words import Answer, Refused, Request, as_json, bad, query_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CONTROL: Final = "/_emulator/"
#: The ASGI extension by which a server lets us break a connection; see `serving`.
CUT: Final = "penstock.cut"


class GcsEmulator:
    """The application. Everything is in this process; two of them share nothing."""

    def __init__(
        self,
        buckets: Iterable[str],
        now: Callable[[], float],
        *,
        directory: Path | None = None,
        faults: Iterable[Fault] = (),
    ) -> None:
        self.buckets = Buckets(buckets, now, directory)
        self.faults = Faults(faults)
        self._uploads = Uploads(self.buckets)
        self._json = gcs_json.JsonDialect(self.buckets, self._uploads)
        self._xml = gcs_xml.XmlDialect(self.buckets, self._uploads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "served without lifespan and websockets"
        request = await _read(scope, receive)
        if request is None:
            return
        answer = self._control(request) if request.path.startswith(CONTROL) else await self._answer(request)
        if answer is None:
            scope["extensions"][CUT]()
            while (await receive())["type"] != "http.disconnect":
                pass  # the server must know that the connection is gone before we return
            return
        await _send(answer, send, head=request.method == "HEAD")

    async def _answer(self, request: Request) -> Answer | None:
        """The answer, or None when the connection is to break instead."""
        plain = request.path.startswith(gcs_json.PREFIXES)
        dialect, refusal = (self._json, gcs_json.refusal) if plain else (self._xml, gcs_xml.refusal)
        try:
            subject = dialect.subject(request)
            fault = self.faults.strike(request, subject)
            if fault is None:
                return dialect.answer(request)
            if fault.kind == "refuse":
                raise refused_by(fault)
            if fault.kind == "cut":
                self._uploads.cut(
                    request.query.get("upload_id", ""), request.headers.get("content-range"), request.body
                )
                return None
            answer = dialect.answer(await self._befallen(request, subject, fault))
            if fault.kind == "lose":
                return None
            if fault.kind == "refuse_after":
                raise refused_by(fault)
            return damaged_answer(answer) if fault.kind == "damage" and request.method == "GET" else answer
        except Refused as error:
            return refusal(error)

    async def _befallen(self, request: Request, subject: str, fault: Fault) -> Request:
        """What a fault does to a request before it has an effect."""
        match fault.kind:
            case "slow":
                await asyncio.sleep(fault.seconds)
            case "vanish":
                bucket, _, name = subject.partition("/")
                with contextlib.suppress(Refused):  # what is not there cannot vanish
                    self.buckets.delete(bucket, name)
            case "short":
                return shortened(request, fault)
            case "damage":
                return request._replace(body=damaged(request.body))
            case _:
                pass
        return request

    def _control(self, request: Request) -> Answer:
        match (request.method, request.path.removeprefix(CONTROL)):
            case ("GET", "faults"):
                return as_json(self.faults.planted)
            case ("POST", "faults"):
                try:
                    self.faults.plant(msgspec.json.decode(request.body, type=list[Fault]))
                except msgspec.DecodeError as error:
                    return gcs_json.refusal(bad(f"faults: {error}"))
                return as_json(self.faults.planted)
            case ("DELETE", "faults"):
                self.faults.clear()
                return Answer(204)
            case ("GET", "history"):
                return as_json(self.buckets.history)
            case _:
                return gcs_json.refusal(Refused(404, "NotFound", "notFound", "there are faults and history"))


async def _read(scope: Scope, receive: Receive) -> Request | None:
    """A request with all of its body, or None if its sender went away first: half a body must have no effect."""
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


async def _send(answer: Answer, send: Send, *, head: bool) -> None:
    headers = {"content-length": str(len(answer.body)), **answer.headers}
    if answer.status in (204, 304):
        del headers["content-length"]
    sent = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": sent})
    await send({"type": "http.response.body", "body": b"" if head else answer.body})
