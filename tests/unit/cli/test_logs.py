"""`tpu logs`: bytes as they were written, gaps told, hosts marked."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from penstock.cli.logs import Writer
from penstock.cli.main import run
from penstock.client.client import Client
from penstock.wire.api import LogChunk
from tests.unit.cli.stand_in import StandIn, attempt, chunk, job

BYTES = b"\x1b[31mred\xff\xfe\x00 no newline"


def raw(data: bytes, offset: int = 0, rank: int = 0) -> LogChunk:
    return chunk(offset=offset, rank=rank, base64=base64.b64encode(data).decode())


def test_bytes_are_written_as_they_are(server: StandIn, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    server.jobs["j1"] = job("j1", "succeeded")
    server.logs = [raw(BYTES), chunk("e\n", stream="err"), raw(BYTES, len(BYTES)), chunk("l\n", stream="log")]
    assert run(["logs", "j1"]) == 0
    streams = capfdbinary.readouterr()
    assert streams.out == BYTES + BYTES
    assert streams.err == b"e\nl\n"


def test_one_stream_goes_to_standard_output(server: StandIn, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    server.jobs["j1"] = job("j1", "succeeded")
    server.logs = [raw(b"o"), chunk("e\n", stream="err")]
    assert run(["logs", "j1", "--stream", "err", "--host", "0", "--attempt", "a0001"]) == 0
    assert capfdbinary.readouterr() == (b"e\n", b"")
    assert server.queries[-1].items() >= {"host": "0", "attempt": "a0001"}.items()


def test_what_is_missing_is_told_once(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["j1"] = job("j1", "succeeded")
    server.logs = [chunk("abc"), chunk(offset=13, dropped=10), chunk("def\n", offset=13)]
    assert run(["logs", "j1"]) == 0
    streams = capsys.readouterr()
    assert streams.out == "abcdef\n"
    assert streams.err == "tpu: 10 bytes of out of host 0 are missing here: over the cap, or lost\n"


def test_what_comes_twice_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    writer = Writer()
    for each in (chunk("abc"), chunk("abc"), chunk("bcde\n", offset=1), chunk("", offset=6)):
        writer.write(each)
    assert capsys.readouterr() == ("abcde\n", "")


def test_hosts_of_a_gang_are_marked(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["j1"] = job("j1", "succeeded", attempts=(attempt(hosts=2),))
    server.logs = [chunk("a\nb"), chunk("c\n", offset=3), chunk("x"), raw(b"y\nz", rank=1), chunk("d\n", offset=5)]
    assert run(["logs", "j1"]) == 0
    assert capsys.readouterr().out == "[host 0] a\n[host 0] bc\n[host 1] y\n[host 1] z\n[host 0] d\n"
    assert run(["logs", "j1", "--host", "1"]) == 0
    assert capsys.readouterr().out == "y\nz"


def test_ctrl_c_leaves_a_stream_quietly(
    server: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_client: Client, _id: str, **_: object) -> Iterator[LogChunk]:
        yield chunk("a\n")
        raise KeyboardInterrupt

    server.jobs["j1"] = job("j1")
    monkeypatch.setattr(Client, "logs", interrupted)
    assert run(["logs", "-f", "j1"]) == 130
    assert capsys.readouterr() == ("a\n", "")
