"""Routes that move bytes, with a real bucket behind them that has one fault at a time (O1 and O2 of the fault list).

Handlers of a whole server without HTTP, on the emulated Cloud Storage and on an S3 server behind a proxy that refuses
and loses answers. Every route is called as a client calls it, again while storage does not answer; afterwards what was
sent is there once, and what was there is what is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from typing_extensions import override

from penstock.domain.nouns import Attempt
from penstock.emulator.gcs_faults import Fault
from penstock.objects import bucket
from penstock.objects.bucket import open_gcs, open_s3
from penstock.ports.objects import ObjectsError
from penstock.server import bytes as moving
from penstock.server import checkpoints
from penstock.wire.agent import ResultReport, Saved, SavedFile
from tests.contract.objects.servers import BUCKET, S3_ENVIRONMENT, Emulator, gcs_emulator, s3_server
from tests.unit.server.plant import USER, Host, Plant, plant

PREFIX = "team/"
TRIES = 6  #: a client asks for minutes; one fault must not need more than this

#: Kind and status. The third and fourth let the effect happen: of a conditional write the next try meets a 412.
FAULTS = (("refuse", 503), ("refuse", 429), ("refuse_after", 503), ("lose", 0), ("cut", 0))


class Weather:
    """One fault at a time, on one method."""

    faults: tuple[tuple[str, int], ...]

    def plant(self, kind: str, method: str, status: int) -> None:
        raise NotImplementedError

    def struck(self) -> bool:
        """Whether it struck; then the weather is fine again."""
        raise NotImplementedError


# --- Cloud Storage ---
class Emulated(Weather):
    faults = (*FAULTS, ("damage", 0))

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator

    @override
    def plant(self, kind: str, method: str, status: int) -> None:
        self._emulator.plant(Fault(kind, f"{BUCKET}/{PREFIX}", method, status=status))  # type: ignore[arg-type]

    @override
    def struck(self) -> bool:
        counts = self._emulator.struck()
        self._emulator.heal()
        return counts == [1]


# --- S3 ---
class Proxy(Weather):
    """Stands before an S3 server, which has no faults of its own."""

    faults = FAULTS

    def __init__(self, url: str) -> None:
        self.target = urlsplit(url).netloc
        self.fault: tuple[str, str, int] | None = None
        self.hits = 0
        self._lock = threading.Lock()

    @override
    def plant(self, kind: str, method: str, status: int) -> None:
        self.fault, self.hits = (kind, method, status), 0

    @override
    def struck(self) -> bool:
        self.fault = None
        return self.hits == 1

    def strike(self, method: str) -> tuple[str, int]:
        with self._lock:
            if self.fault is None or self.fault[1] != method or self.hits:
                return "", 0
            self.hits += 1
            return self.fault[0], self.fault[2]


class Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: ClassVar[Proxy]

    def _pass(self) -> None:
        kind, status = self.proxy.strike(self.command)
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        if kind == "cut":
            self.close_connection = True
            return
        answer: tuple[int, list[tuple[str, str]]] = (status, [])
        data = b"<Error><Code>ServiceUnavailable</Code></Error>"
        if kind != "refuse":
            with contextlib.closing(http.client.HTTPConnection(self.proxy.target, timeout=60)) as behind:
                behind.request(self.command, self.path, body, dict(self.headers.items()))
                reply = behind.getresponse()
                if kind != "refuse_after":
                    answer, data = (reply.status, reply.getheaders()), reply.read()
                else:
                    reply.read()
        if kind == "lose":
            self.close_connection = True
            return
        self.send_response_only(answer[0])
        for name, value in answer[1]:
            if name.lower() not in ("connection", "transfer-encoding", "content-length") or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass  # noqa: N815 (names of the library)

    @override
    def log_message(self, *_: object) -> None:
        return


@contextlib.contextmanager
def a_proxy(url: str) -> Iterator[tuple[str, Proxy]]:
    proxy = Proxy(url)
    handler = type("Handler", (Passing,), {"proxy": proxy})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", proxy
        finally:
            server.shutdown()
            serving.join(30)


@pytest.fixture(params=["gs", "s3"])
def stored(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Weather]]:
    quick = {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=50), "base": 2}
    monkeypatch.setitem(bucket._RETRY, "backoff", quick)
    if request.param == "gs":
        with gcs_emulator() as emulator:
            yield open_gcs(BUCKET, PREFIX, emulator.environment), Emulated(emulator)
    else:
        with s3_server() as url, a_proxy(url) as (address, proxy):
            environment = {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": address}
            yield open_s3(BUCKET, PREFIX, environment, time.time), proxy  # noqa: TID251 (stamps of a real server)


# --- the routes ---
async def insist(call: Callable[[], Awaitable[Any]]) -> Any:
    """As clients and agents do: again, while the storage does not answer."""
    for _ in range(TRIES - 1):
        try:
            return await call()
        except ObjectsError:
            continue
    return await call()


class Routes:
    """Each route as a pair: write these bytes, and read what is there under the same name."""

    def __init__(self, made: Plant, host: Host, attempt: Attempt) -> None:
        self._made, self._host, self._attempt = made, host, attempt
        self._number = 0

    async def put(self, route: str, data: bytes) -> None:
        service, name = self._made.service, hashlib.sha256(data).hexdigest()
        own = self._made.call(USER, params={"sha256": name}, body=data)
        match route:
            case "blob":
                await insist(lambda: moving.put_blob(service, own))
            case "snapshot":
                await insist(lambda: moving.put_snapshot(service, own))
            case "artifact":
                call = self._host.call(self._attempt, body=data, name="made")
                await insist(lambda: moving.put_artifact(service, call))
            case "result":
                call = self._host.call(self._attempt, body=ResultReport(result=data.decode()))
                await insist(lambda: moving.put_result(service, call))
            case "piece":
                call = self._host.call(self._attempt, body=data, sha256=name)
                await insist(lambda: checkpoints.put_piece(service, call))
            case _:
                self._number += 1
                saved = Saved(number=self._number, files=(SavedFile(data.decode(), 0, 0o600, 1, ()),))
                call = self._host.call(self._attempt, body=saved)
                await insist(lambda: checkpoints.put_saved(service, call))

    async def get(self, route: str, data: bytes) -> bytes:
        """What is there: all of it as a client would see it, or, where only a later attempt may, as it lies there."""
        service, name = self._made.service, hashlib.sha256(data).hexdigest()
        own = self._made.call(USER, params={"sha256": name})
        job = self._attempt.job
        match route:
            case "blob":
                return bytes((await insist(lambda: moving.get_blob(service, own))).body)
            case "snapshot":
                return bytes((await insist(lambda: moving.get_snapshot(service, own))).body)
            case "artifact":
                call = self._made.user_call(job, params={"name": "made"})
                return bytes((await insist(lambda: moving.artifact(service, call))).body)
            case "result":
                report = await insist(lambda: moving._report(service.objects, self._attempt, 0))
                return str(report.result).encode()
            case "piece":
                path = f"jobs/{job}/checkpoints/{self._attempt.fence}/0/pieces/{name}"
                return bytes((await insist(lambda: service.objects.get(path))).data)
            case _:
                saved = await insist(lambda: checkpoints.saved(service, self._host.call(self._attempt)))
                assert saved.number == self._number
                return str(saved.files[0].path).encode()


ROUTES = ("blob", "snapshot", "artifact", "result", "piece", "list")


@pytest.mark.slow
def test_one_fault_at_a_time_neither_loses_nor_doubles_anything(stored: tuple[Any, Weather], tmp_path: Path) -> None:
    objects, weather = stored

    async def story() -> None:
        async with plant(tmp_path, objects) as made:
            _, host, attempt = await made.running()
            routes = Routes(made, host, attempt)
            for number, (route, (kind, status)) in enumerate(itertools.product(ROUTES, weather.faults)):
                what, data = f"{route}, {kind} {status}", b"%s-%d" % (route.encode(), number)
                weather.plant(kind, "PUT", status)
                await routes.put(route, data)
                assert weather.struck(), f"{what}: the fault did not strike"
                assert await routes.get(route, data) == data, what
                weather.plant(kind, "GET", status)
                assert await routes.get(route, data) == data, what
                assert weather.struck(), f"{what}: the fault did not strike a read"
            # Every name was written by us alone: each is there once, and nothing else.
            assert len(await objects.list("blobs/")) == len(weather.faults)
            assert len(await objects.list(f"jobs/{attempt.job}/staging/")) == 1
            lists = await objects.list(f"jobs/{attempt.job}/checkpoints/{attempt.fence}/0/lists/")
            assert [int(path[-21:-5]) for path in lists] == [len(weather.faults) - 1, len(weather.faults)]

    asyncio.run(story())
