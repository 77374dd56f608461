"""The link: kept connections, answers of every shape, and the difference between a no and a silence."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typing_extensions import override

from penstock.agent import link as link_module
from penstock.agent.checkpoints import TooSilent, patiently
from penstock.agent.link import Coming, Link, Refused, Silent
from penstock.wire.problems import problem


class Wire:
    """A server that plays back raw answers, one per request, and keeps what it was sent."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers and (head := await reader.readuntil(b"\r\n\r\n")):
                size = next(int(line.split()[1]) for line in head.decode().splitlines() if "Content-Length" in line)
                self.heads.append(head.decode())
                self.bodies.append(await reader.readexactly(size))
                answer = self.answers.pop(0)
                writer.write(answer)
                await writer.drain()
                if b"onnection: close" in answer or not answer:
                    return
            await reader.read()  # hold the connection open until the other side lets go
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.close()


class Cutting(Wire):
    """Breaks the connection after what it has to say."""

    @override
    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(self.answers[0])
        await writer.drain()
        writer.close()


def play(wire: Wire, story: Callable[[Link], Awaitable[None]]) -> None:
    async def run() -> None:
        server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
        link = Link(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "credential")
        await story(link)
        link.close()
        server.close()
        await server.wait_closed()

    asyncio.run(run())


def ok(body: bytes, status: int = 200, more: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n3;x=y\r\ntwo\r\n0\r\n\r\n"


def test_one_connection_serves_many_calls_and_carries_the_credential() -> None:
    wire = Wire(ok(b"1"), CHUNKED, ok(b"", 204), ok(b"4"))

    async def story(link: Link) -> None:
        assert await link.call("GET", "/a") == b"1"
        assert await link.call("GET", "/b") == b"onetwo"
        assert await link.call("PUT", "/c", b"body", media="application/octet-stream") == b""
        assert await link.call("GET", "/d") == b"4"

    play(wire, story)
    assert wire.connections == 1
    assert all("Authorization: Bearer credential\r\n" in head for head in wire.heads)
    assert wire.bodies[2] == b"body"


def test_a_connection_closed_at_rest_is_made_anew_without_a_word() -> None:
    wire = Wire(ok(b"1"), ok(b"2", more="Connection: close\r\n"), b"", ok(b"3"))

    async def story(link: Link) -> None:
        assert await link.call("GET", "/a") == b"1"
        assert await link.call("GET", "/b") == b"2"
        with pytest.raises(Silent):  # a new one that breaks before any answer is a silence
            await link.call("GET", "/c")
        assert await link.call("GET", "/d") == b"3"

    play(wire, story)


def test_a_no_is_told_from_a_silence() -> None:
    said = msgspec.json.encode(problem("forbidden", "not yours"))
    wire = Wire(ok(said, 403), ok(b"<html>", 404), ok(b"", 503), ok(b"", 429), b"nonsense\r\n\r\n")

    async def story(link: Link) -> None:
        with pytest.raises(Refused, match="not yours") as refused:
            await link.call("GET", "/")
        assert (refused.value.status, refused.value.problem.code) == (403, "forbidden")
        with pytest.raises(Refused) as refused:
            await link.call("GET", "/")
        assert refused.value.status == 404
        for _ in range(3):
            with pytest.raises(Silent):
                await link.call("GET", "/")

    play(wire, story)


def test_an_answer_that_never_comes_is_a_silence_in_time() -> None:
    async def story(link: Link) -> None:
        with pytest.raises(Silent, match=r"0\.05 s"):
            await link.call("GET", "/", timeout_s=0.05)

    play(Wire(b"HTTP/1.1 200 OK\r\n"), story)


def test_an_answer_cut_short_is_a_silence() -> None:
    cut = [b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", CHUNKED[:-9]]
    for answer in cut:

        async def story(link: Link) -> None:
            with pytest.raises(Silent):
                await link.call("GET", "/")

        play(Cutting(answer), story)


def test_nobody_there_is_a_silence() -> None:
    async def run() -> None:
        with pytest.raises(Silent):
            await Link("http://127.0.0.1:1").call("GET", "/")

    asyncio.run(run())


def test_files_go_both_ways(tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000
    (tmp_path / "sent").write_bytes(data)
    wire = Wire(ok(b""), ok(data))

    async def story(link: Link) -> None:
        await link.call("PUT", "/", tmp_path / "sent")
        assert await link.call("GET", "/", into=tmp_path / "got") == b""

    play(wire, story)
    assert wire.bodies[0] == data
    assert (tmp_path / "got").read_bytes() == data


@pytest.mark.parametrize("url", ["", "ftp://x", "localhost:8000", "http://"])
def test_a_bad_address_is_said_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="--server"):
        Link(url)


def test_what_is_on_its_way_is_a_silence_of_its_own_kind() -> None:
    coming = msgspec.json.encode(problem("copying", "800 bytes are being copied"))
    wire = Wire(ok(coming, 503), ok(b"", 503))

    async def story(link: Link) -> None:
        with pytest.raises(Coming, match="800 bytes"):
            await link.call("GET", "/")
        with pytest.raises(Silent) as silent:
            await link.call("GET", "/")
        assert not isinstance(silent.value, Coming)

    play(wire, story)


def test_whoever_waits_for_it_is_not_impatient_while_it_is_on_its_way() -> None:
    answers: list[Exception] = [Silent("away")]

    async def call() -> str:
        if answers:
            raise answers.pop(0)
        return "here"

    async def story() -> None:
        with pytest.raises(TooSilent):
            await patiently(call, within_s=-1.0)
        answers.extend(Coming("at work") for _ in range(3))
        assert await patiently(call, within_s=-1.0) == "here"

    asyncio.run(story())


def test_a_server_whose_name_is_gone_is_found_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(ok(b"1", more="Connection: close\r\n"), ok(b"2"))
    asked: list[str] = []
    known = socket.getaddrinfo

    def looked_up(host: str, *words: Any, **more: Any) -> Any:
        asked.append(host)
        if host == "penstock.example" and len(asked) > 1:
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return known("127.0.0.1" if host == "penstock.example" else host, *words, **more)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)

    async def story() -> None:
        server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
        asked.clear()
        port = server.sockets[0].getsockname()[1]
        link = Link(f"http://penstock.example:{port}")
        assert await link.call("GET", "/a") == b"1"
        assert await link.call("GET", "/b") == b"2"
        assert asked[:2] == ["penstock.example"] * 2
        assert f"Host: penstock.example:{port}" in wire.heads[1], "it is called by its name all the same"
        link.close()
        with pytest.raises(Silent, match="name resolution"):
            await Link(f"http://penstock.example:{port}").call("GET", "/c")  # one that never knew where it is
        server.close()

    asyncio.run(story())


def test_a_name_server_that_says_nothing_holds_up_no_server_that_was_found_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resolver asks for ten seconds and more before it gives up: a connection may not take that long."""
    wire = Wire(ok(b"1", more="Connection: close\r\n"), ok(b"2"))
    known, silent, over = socket.getaddrinfo, threading.Event(), threading.Event()

    def looked_up(host: str, *words: Any, **more: Any) -> Any:
        if host == "penstock.example" and silent.is_set():
            over.wait(60.0)
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return known("127.0.0.1" if host == "penstock.example" else host, *words, **more)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(link_module, "LOOKUP_S", 0.1)

    async def story() -> None:
        server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
        link = Link(f"http://penstock.example:{server.sockets[0].getsockname()[1]}")
        assert await link.call("GET", "/a") == b"1"
        silent.set()
        try:
            assert await link.call("GET", "/b") == b"2"
        finally:
            over.set()
        link.close()
        server.close()

    asyncio.run(story())


def test_a_connection_whose_other_end_is_gone_already_is_a_silence_and_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that ends just then: the kernel knows no peer of the connection any more."""
    monkeypatch.setattr(asyncio.StreamWriter, "get_extra_info", lambda *_: None)
    wire = Wire(b"")

    async def story() -> None:
        server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
        with pytest.raises(Silent):
            await Link(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}").call("GET", "/a")
        server.close()

    asyncio.run(story())
