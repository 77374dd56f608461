"""`make demo` as a newcomer meets it: the whole story, on one screen; and nothing left of it, however it ends."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.capacity import processes
from tests.process.machine import environ
from tests.tidy.tracked import ROOT

DEMO = ROOT / "tools" / "demo.py"
WITHIN_S = 240.0  #: a quiet machine needs 30 s; others may share it
ROWS, COLUMNS = 24, 80


def environment(tmp: Path) -> dict[str, str]:
    # A variable of the user's own must not lead the demo to another server.
    return {**os.environ, "TMPDIR": str(tmp), "PENSTOCK_URL": "http://127.0.0.1:9", "PENSTOCK_HOME": str(tmp / "own")}


def left(tmp: Path) -> list[str]:
    """Files and processes of the demo that are still there."""
    running = [
        str(found.pid)
        for found in processes.with_arguments()
        if any(word.startswith(f"PENSTOCK_HOME={tmp}/penstock-demo-".encode()) for word in environ(found.pid))
    ]
    return [*(path.name for path in tmp.iterdir()), *running]


@pytest.mark.long
def test_the_demo_tells_its_story_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO), "--within", str(WITHIN_S)],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=WITHIN_S + 60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout, "plain where there is no terminal"
    lines = done.stdout.splitlines()
    assert len(lines) <= ROWS, "it fits on one screen"
    assert max(map(len, lines)) <= COLUMNS, done.stdout
    story = ("accepted", "running", "step", "lost", "running", "resumed", "result", "equal", "cost", "over")
    words = iter(re.findall(r"^ *[\d.]+ s  (\w+)", done.stdout, re.MULTILINE))
    assert all(word in words for word in story), done.stdout
    lost = re.search(r"slice lost at step (\d+)", done.stdout)
    resumed = re.search(r"resumed +at step (\d+) on s\w+", done.stdout)
    assert lost is not None
    assert resumed is not None
    assert 0 < int(resumed[1]) < 200
    assert "free: this machine" in done.stdout
    assert "docs/tutorial/first-job.md" in lines[-1]
    assert left(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_stops_everything_it_started(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    demo = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, str(DEMO)],  # the terminal becomes its own: Ctrl-C reaches it
        env={**environment(tmp_path), "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + WITHIN_S
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 1.0)[0]:
                try:
                    seen += os.read(ours, 65536)
                except OSError:
                    break  # the last writer is gone
            if b"running" in seen and b"\x03" not in seen:
                seen += b"\x03"
                os.write(ours, b"\x03")
        code = demo.wait(60)
    finally:
        demo.kill()
        demo.wait()
        os.close(ours)
    assert code == 130, seen
    assert b"\r\x1b[K" in seen, "a line moves on a terminal"
    assert b"demo: interrupted; what it had started was stopped" in seen
    assert left(tmp_path) == []


@pytest.mark.slow
def test_what_is_not_as_it_should_be_is_one_line_and_a_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO), "--within", "0"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 1
    assert re.fullmatch(r"demo: time is up, and its middle was not seen; j\w+ is \w+ \(.*\)\n", done.stderr)
    assert left(tmp_path) == []
