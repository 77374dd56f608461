"""Pumps: what a payload writes lands in the file byte for byte, without secrets, within the cap, with gaps marked."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from penstock.agent.pump import MARKER_BYTES, Pump, Redactor, punch
from tests.missing import missing

SECRETS = st.lists(st.binary(min_size=4, max_size=6).map(lambda b: bytes(x % 3 + 97 for x in b)), max_size=3)


def redact(hidden: list[bytes], pieces: list[bytes]) -> bytes:
    redactor = Redactor(hidden)
    return b"".join(redactor.feed(piece) for piece in pieces) + redactor.rest()


@given(SECRETS, st.lists(st.binary(max_size=12).map(lambda b: bytes(x % 3 + 97 for x in b)), max_size=12))
def test_no_secret_gets_through_however_it_is_split(hidden: list[bytes], pieces: list[bytes]) -> None:
    out = redact(hidden, pieces)
    for secret in hidden:
        assert secret not in out.replace(b"***", b"|")


@given(st.lists(st.binary(max_size=50), max_size=8))
def test_without_a_secret_in_it_everything_passes_as_it_is(pieces: list[bytes]) -> None:
    assert redact([b"never-written"], pieces) == b"".join(pieces)


def test_the_longer_of_two_secrets_is_hidden_whole() -> None:
    assert redact([b"abcd", b"abcdefgh"], [b"abcd", b"efgh!"]) == b"***!"
    assert redact([b"abcd", b"abcdefgh"], [b"abcd", b"!"]) == b"***!"


def test_what_cannot_become_a_secret_is_not_held_back() -> None:
    assert Redactor([b"secret"]).feed(b"a line\n") == b"a line\n"


def test_a_short_value_is_not_hidden() -> None:
    assert redact([b"1"], [b"1 2 1"]) == b"1 2 1"


def pumped(path: Path, data: bytes, *, cap: int = 1 << 30, spare: int = 0) -> bytes:
    reader, writer = os.pipe()
    pump = Pump(reader, str(path), cap, spare, [])

    def write() -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(writer, left) :]
        os.close(writer)

    thread = threading.Thread(target=write)
    thread.start()
    while pump.pump():
        continue
    thread.join()
    pump.drain()
    return path.read_bytes()


def test_bytes_are_kept_as_they_are(tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000 + b"\x00\xff\xfe no newline"
    assert pumped(tmp_path / "out", data) == data


def test_past_the_cap_bytes_are_dropped_and_said(tmp_path: Path) -> None:
    kept = pumped(tmp_path / "out", b"x" * 1_000_000, cap=100_000)
    assert len(kept) <= 100_000
    body, _, marker = kept.partition(b"\n[penstock: ")
    assert body == b"x" * (100_000 - MARKER_BYTES)
    assert marker.startswith(b"%d bytes of output are missing here" % (1_000_000 - len(body)))


def test_without_disk_bytes_are_dropped_and_said(tmp_path: Path) -> None:
    kept = pumped(tmp_path / "out", b"x" * 1000, spare=1 << 62)
    assert kept.startswith(b"\n[penstock: 1000 bytes of output are missing here")


def test_an_agent_after_a_crash_goes_on_in_the_same_file(tmp_path: Path) -> None:
    pumped(tmp_path / "out", b"one\n")
    assert pumped(tmp_path / "out", b"two\n") == b"one\ntwo\n"


def test_drain_does_not_wait_for_who_still_holds_the_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    pump = Pump(reader, str(tmp_path / "out"), 1 << 20, 0, [])
    os.write(writer, b"written")
    pump.drain()
    os.close(writer)
    assert (tmp_path / "out").read_bytes() == b"written"


def test_what_is_durable_gives_its_disk_back(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"x" * (4 << 20))
    before = path.stat()
    if not punch(str(path), 3 << 20):
        missing("a file system that can cut holes")
    assert path.stat().st_size == before.st_size
    assert path.stat().st_blocks < before.st_blocks
    assert path.read_bytes()[3 << 20 :] == b"x" * (1 << 20)
