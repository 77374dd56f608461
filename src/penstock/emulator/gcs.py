"""An emulated Cloud Storage as an ASGI application: both dialects, faults, and a control address for tests.

`wiring.emulators` serves it for `tpu emulator gcs`. Any credential is accepted. Under `/_emulator/` (no bucket can be
called so) tests plant faults, see which ones struck, and read the history of true changes and the last requests. It
must not be reachable by others: it listens on 127.0.0.1 and asks nobody who they are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from penstock.emulator import gcs_json, gcs_xml
from penstock.emulator.asgi import CONTROL, Receive, Scope, Send, break_connection, read_request, send_answer
from penstock.emulator.gcs_buckets import Buckets
from penstock.emulator.gcs_faults import Fault, Faults, damaged, damaged_answer, refused_by, shortened
from penstock.emulator.gcs_uploads import Uploads
from penstock.emulator.http_words import Answer, Refused, Request, as_json, bad

REQUESTS_KEPT: Final = 10_000


class Seen(msgspec.Struct, frozen=True):
    """A request as it came, and how it was answered; status 0: the connection broke."""

    method: str
    path: str
    status: int
    bearer: str  #: whose token it brought: any is accepted


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
        self.requests: deque[Seen] = deque(maxlen=REQUESTS_KEPT)
        self._uploads = Uploads(self.buckets)
        self._json = gcs_json.JsonDialect(self.buckets, self._uploads)
        self._xml = gcs_xml.XmlDialect(self.buckets, self._uploads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await read_request(scope, receive)
        if request is None:
            return
        answer = await self.answer(request)
        if answer is None:
            await break_connection(scope, receive)
        else:
            await send_answer(answer, send, head=request.method == "HEAD")

    async def answer(self, request: Request) -> Answer | None:
        """The answer, or None when the connection is to break instead."""
        if request.path.startswith(CONTROL):
            return self._control(request)
        answer = await self._answer(request)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        self.requests.append(Seen(request.method, request.path, 0 if answer is None else answer.status, bearer))
        return answer

    async def _answer(self, request: Request) -> Answer | None:
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
            case ("GET", "requests"):
                return as_json(list(self.requests))
            case _:
                return gcs_json.refusal(Refused(404, "NotFound", "notFound", "there are faults, history and requests"))
