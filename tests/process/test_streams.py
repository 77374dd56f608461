"""Live streams go on where they broke off, by the id of the last event, over restarts of a server killed with -9.

The streams of a job's states, of all events and of a job's output, read raw (`Last-Event-ID`) and by the SDK, which
does that by itself. What was read in pieces is compared with what is kept: nothing twice, nothing left out.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import pytest
from typing_extensions import override

from penstock.client.results import log_bytes
from penstock.wire.api import LogChunk
from tests.process.shop import RUN_S, Shop, soon

pytestmark = pytest.mark.slow


class Got(NamedTuple):
    id: str
    event: str
    data: bytes


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("streams") / "home")
    try:
        shop.open()
        yield shop
    finally:
        shop.end()


class Reader(threading.Thread):
    """One connection: reads events until the server ends it or dies."""

    def __init__(self, shop: Shop, path: str, last: str) -> None:
        super().__init__(daemon=True)
        self._address = urlsplit(shop.server.url)
        self._headers = {"authorization": f"Bearer {(shop.home.path / 'token').read_text().strip()}"}
        if last:
            self._headers["last-event-id"] = last
        self._path = path
        self.got: list[Got] = []
        self.start()

    @override
    def run(self) -> None:
        line = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=RUN_S)
        with closing(line), suppress(OSError, http.client.HTTPException):
            line.request("GET", self._path, headers=self._headers)
            answer = line.getresponse()
            assert answer.status == 200
            fields: dict[str, bytes] = {}
            while text := answer.readline():
                name, _, value = text.rstrip(b"\n").partition(b": ")
                if name:
                    fields[name.decode()] = value
                elif "data" in fields:
                    self.got.append(Got(fields.get("id", b"").decode(), fields["event"].decode(), fields["data"]))
                    fields = {}
                else:
                    fields = {}


TALKS = """
for number in range(40):
    say("line", number, "ü" * 50)
    if number % 10 == 9: gate(f"after-{number}")
"""


def in_pieces(shop: Shop, path: str, job: str) -> list[Got]:
    """All of a stream, read over four lives of the server, each connection from where the one before broke off."""
    got: list[Got] = []
    for gate in (9, 19, 29):
        reader = Reader(shop, path, got[-1].id if got else "")
        shop.says(job, f"line {gate} ".encode())
        if not got:
            soon(lambda heard=reader.got: heard)  # type: ignore[misc]
        shop.kill_server()
        reader.join(RUN_S)
        got += [each for each in reader.got if each.id]
        shop.open()
        shop.open_gate(job, f"after-{gate}")
    reader = Reader(shop, path, got[-1].id if got else "")
    shop.says(job, b"line 39 ")
    shop.open_gate(job, "after-39")
    assert shop.ended(job)["state"] == "succeeded"
    if path.startswith("/v1/events"):  # this one never ends by itself
        soon(lambda: any(each.event == "job.succeeded" for each in reader.got))
        shop.kill_server()
        shop.open()
    reader.join(RUN_S)
    assert not reader.is_alive()
    return got + [each for each in reader.got if each.id]


def seqs(events: list[dict[str, Any]]) -> list[int]:
    return [event["seq"] for event in events]


def test_states_of_a_job(shop: Shop) -> None:
    job = shop.submit(TALKS)
    got = in_pieces(shop, f"/v1/jobs/{job}/events?follow=true", job)
    kept = shop.call("GET", f"/v1/jobs/{job}/events?limit=1000")[1]["events"]
    assert [int(each.id) for each in got] == seqs(kept)
    assert [each.event for each in got] == [event["kind"] for event in kept]
    assert (got[0].event, got[-1].event) == ("job.created", "job.succeeded")


def test_all_events(shop: Shop) -> None:
    before = shop.call("GET", "/v1/events?limit=1000")[1]["next"]
    job = shop.submit(TALKS)
    got = in_pieces(shop, f"/v1/events?follow=true&after={before}", job)
    kept = shop.call("GET", f"/v1/events?limit=1000&after={before}")[1]["events"]
    ids = [int(each.id) for each in got]
    assert ids == seqs(kept)[: len(ids)], "none twice, none left out"
    assert "job.succeeded" in [each.event for each in got]


def test_output_of_a_job(shop: Shop) -> None:
    job = shop.submit(TALKS)
    got = in_pieces(shop, f"/v1/jobs/{job}/logs?follow=true", job)
    assert got[-1].event == "end"
    chunks = [msgspec.json.decode(each.data, type=LogChunk) for each in got if each.event == "log"]
    assert not [chunk for chunk in chunks if chunk.dropped]
    said = b"".join(log_bytes(chunk) for chunk in chunks if chunk.stream == "out")
    assert said.decode() == "".join(f"line {number} {'ü' * 50}\n" for number in range(40))
    assert said == shop.log(job)


def test_an_id_of_another_stream_is_refused(shop: Shop) -> None:
    job = shop.submit("say('x')")
    shop.ended(job)
    address = urlsplit(shop.server.url)
    token = (shop.home.path / "token").read_text().strip()
    for path in ("logs?follow=true", "events?follow=true"):
        with closing(http.client.HTTPConnection(address.hostname or "", address.port, timeout=RUN_S)) as line:
            headers = {"authorization": f"Bearer {token}", "last-event-id": "no id of ours"}
            line.request("GET", f"/v1/jobs/{job}/{path}", headers=headers)
            assert line.getresponse().status in (400, 409)


class Following(threading.Thread):
    """The SDK's own iteration, which must not notice that the server was away."""

    def __init__(self, follow: Callable[[], Iterator[Any]]) -> None:
        super().__init__(daemon=True)
        self._follow = follow
        self.got: list[Any] = []
        self.start()

    @override
    def run(self) -> None:
        self.got.extend(self._follow())


def test_the_sdk_goes_on_by_itself(shop: Shop) -> None:
    job = shop.submit(TALKS)
    with shop.client() as logs, shop.client() as events:
        lines = Following(lambda: (log_bytes(chunk) for chunk in logs.logs(job, follow=True, stream="out")))
        states = Following(lambda: (event.seq for event in events.events(job, follow=True)))
        for gate in (9, 19, 29):
            shop.says(job, f"line {gate} ".encode())
            shop.kill_server()
            shop.open()
            shop.open_gate(job, f"after-{gate}")
        shop.says(job, b"line 39 ")
        shop.open_gate(job, "after-39")
        assert shop.ended(job)["state"] == "succeeded"
        lines.join(RUN_S)
        states.join(RUN_S)
    assert b"".join(lines.got) == shop.log(job)
    assert states.got == seqs(shop.call("GET", f"/v1/jobs/{job}/events?limit=1000")[1]["events"])
