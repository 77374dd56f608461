"""What is painted: lines cut to the width there is, frames to the height, and nothing left behind on the terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time

import click
import pytest

from penstock.cli import watch
from penstock.cli.screen import ENTER, LEAVE, RESET, fit, usable
from tests.unit.cli.stand_in import job


@pytest.mark.parametrize(
    ("line", "columns", "shown"),
    [
        ("short", 5, "short"),
        ("longer", 5, "long" + RESET + "…"),
        ("日本語", 6, "日本語"),
        ("日本語", 5, "日本" + RESET + "…"),
        ("日本語", 4, "日" + RESET + "…"),
        ("e\u0301e\u0301", 2, "e\u0301e\u0301"),
        ("", 0, ""),
        ("ab", 1, RESET + "…"),
    ],
)
def test_lines_are_cut_to_what_is_seen(line: str, columns: int, shown: str) -> None:
    assert fit(line, columns) == shown


def test_colours_take_no_room() -> None:
    line = click.style("running", fg="cyan") + " on"
    assert fit(line, 10) == line
    assert fit(line, 9) == click.style("running", fg="cyan") + " " + RESET + "…"


def test_a_low_screen_says_how_many_are_left_out() -> None:
    found = [job(f"j{number:02}", "running") for number in range(30)]
    lines = [click.unstyle(line) for line in watch._frame(found, 12, "")]
    assert len(lines) == 12
    assert lines[0] == "30 running"
    assert lines[8].startswith("j06")
    assert lines[9] == "… and 23 more; `tpu ps` lists them"
    assert lines[-1].endswith("; q or Ctrl-C leaves")
    assert len(watch._frame(found[:2], 12, "")) == 6
    assert watch._frame([], 12, "the server does not answer")[-1] == "the server does not answer"


def test_a_dumb_terminal_is_not_painted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert not usable()
    monkeypatch.setenv("TERM", "xterm")
    assert usable()


ENDLESS = """
from penstock.cli.screen import Screen
with Screen(lambda height: ["painted"], colour=True) as screen:
    screen.paint()
    while screen.pause(60): pass
"""


@pytest.mark.parametrize(("way", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT), ("q", 0)])
def test_however_it_ends_the_terminal_is_given_back(way: signal.Signals | str, code: int) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdin=follower, stdout=follower, stderr=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm"}, start_new_session=True,
    )  # fmt: skip
    try:
        said = read_until(leader, b"painted")
        assert said.startswith(ENTER.encode())
        if isinstance(way, str):
            os.write(leader, way.encode())
        else:
            process.send_signal(way)
        assert process.wait(30) == code
        assert read_until(leader, LEAVE.encode()).count(LEAVE.encode()) == 1
    finally:
        process.kill()
        process.wait(30)
        os.close(follower)
        os.close(leader)


def read_until(leader: int, mark: bytes) -> bytes:
    said, deadline = b"", time.monotonic() + 30
    while mark not in said:
        assert time.monotonic() < deadline, said
        if select.select([leader], [], [], 0.1)[0]:
            said += os.read(leader, 65536)
    return said
