"""`docs/tutorial/first-job.md`, executed: what a newcomer types does what the page says.

The shell blocks run in one bash, one after another, in a fresh home directory, with the real `tpu`, server and agents.
The lines of the `text` block after a shell block must be in its output, in that order; `…` stands for anything.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.process.machine import Machine
from tests.tidy.tracked import ROOT

PAGE = ROOT / "docs" / "tutorial" / "first-job.md"
WITHIN_S = 420.0  #: a quiet machine needs 40 s; others may share it
NOT_RUN = "<!-- the test has done this already -->"
FENCE = re.compile(rf"(?P<skip>{re.escape(NOT_RUN)}\n)?^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


class Step(NamedTuple):
    """A shell block, and the lines the page shows after it."""

    commands: str
    shown: tuple[str, ...]


def read_steps(page: str) -> list[Step]:
    blocks = [*FENCE.finditer(page), None]
    steps = []
    for block, following in pairwise(blocks):
        assert block is not None
        if block["kind"] == "sh" and block["skip"] is None:
            shown = following["body"] if following is not None and following["kind"] == "text" else ""
            steps.append(Step(block["body"], tuple(shown.splitlines())))
    return steps


def pattern(line: str) -> re.Pattern[str]:
    """Blanks may be wider, and `…` is anything."""
    pieces = [r"\s+".join(re.escape(word) for word in piece.split(" ")) for piece in line.split("…")]
    return re.compile("^" + ".*".join(pieces))


def missing(shown: tuple[str, ...], output: str) -> str | None:
    """The first line of the page that is not in the output after those before it."""
    lines = iter(output.splitlines())
    return next((line for line in shown if not any(pattern(line).match(each) for each in lines)), None)


def test_lines_of_the_page_are_sought_in_their_order() -> None:
    output = "job j01\nsaved 10\nj01   failed (infra) after 2s\n"
    assert missing(("job j…", "saved 10", "j… failed … after …"), output) is None
    assert missing(("saved 10", "job j…"), output) == "job j…"
    assert missing(("saved 1",), "unsaved 10") == "saved 1"
    assert missing(("a.c",), "abc") == "a.c"


def test_the_page_is_read_as_blocks() -> None:
    steps = read_steps(PAGE.read_text())
    commands = "\n".join(step.commands for step in steps)
    assert "make setup" not in commands
    for word in ("exec -c", "run count.py", "logs", "why", "local preempt", "resume", "result", "down"):
        assert f"tpu {word}" in commands, f"the tutorial no longer shows `tpu {word}`"
    assert sum(bool(step.shown) for step in steps) > 8


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    Machine(tmp_path / ".penstock").end()


def type_in(steps: list[Step], home: Path, within_s: float) -> None:
    """Type all steps in one bash, and hold what comes out against what the page shows. Nothing of it stays behind."""
    script = ["set -eu"]
    for number, step in enumerate(steps):
        script += [f"exec > {home}/{number}.output 2>&1", step.commands]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**kept, "HOME": str(home), "PATH": path, "LC_ALL": "C.UTF-8"}
    words = ["bash", "-c", "\n".join(script)]
    with subprocess.Popen(words, cwd=home, env=environment, start_new_session=True) as shell:
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = shell.wait(within_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)  # what a page started in the background and did not come to stop
    text = ""
    for number, step in enumerate(steps):
        output = home / f"{number}.output"
        assert output.exists(), f"not reached:\n{step.commands}\nthe last said\n{text}"
        text = output.read_text()
        gap = missing(step.shown, text)
        assert gap is None, f"after\n{step.commands}\nthe page shows\n  {gap}\nbut there was\n{text}"
    assert code == 0, f"the last commands failed (None: not in time): {code}\n{text}"


@pytest.mark.long
def test_the_tutorial_does_what_it_says(home: Path) -> None:
    type_in(read_steps(PAGE.read_text()), home, WITHIN_S)
