"""`docs/howto/from-tpu-manager.md`, executed: what its right-hand sides tell people to type is typed.

Against the real embedded server and real jobs, in the order of the page. Placeholders are filled from a table; options
are given to `tpu run`. What cannot run here is listed with its reason, and nothing is left over.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.shop import RUN_S, WORDS, Shop
from tests.tidy.tracked import ROOT

pytestmark = pytest.mark.slow
PAGE = ROOT / "docs" / "howto" / "from-tpu-manager.md"

#: Not typed, and why.
NOT_RUN = {
    "tpu run": "only the name of the command",
    "tpu exec": "only the name of the command",
    "tpu watch": "it stays on the screen; tests/process/test_terminal.py drives it in a terminal",
    "tpu monitor --filter USER": "the same; tests/process/test_monitor.py",
    "--on 'v4-*'": "needs a pool of that kind; tests/unit/cli/test_targets.py has what it chooses",
    "tpu restart SLICE": "the rest of the page needs the slice; tests/process/test_fleets.py restarts one",
    "tpu reapply": "the same command",
    "tpu apply": "the same command as `tpu pools set`",
    "tpu check-status": "the same command as `tpu slices`",
    "tpu ssh SLICE": "slices of this machine have no hosts to enter; tests/process/test_fleets.py does",
    "tpu ssh SLICE -- COMMAND": "the same",
    "tpu mount POOL nfs:HOST:/EXPORT:/mnt/data": "the same",
    "tpu fleet delete NAME": "the same",
    "--zones": "needs a cloud; tests/process/test_tpu_vm.py has one",
    "--rm T": "the end of `tpu tag ID`, typed there",
    "config.stage=N": "what the program gets; tests/unit/cli/test_run.py has it",
}
#: Names of settings, variables and files: nobody types these alone.
WORDS_ALONE = frozenset(
    {"PENSTOCK_URL", "PENSTOCK_TOKEN", "TZ", "wait", "refresh_s", "requirements.txt", "pyproject.toml"}
)
#: What stands for something: what is put there. Accelerators are one small slice here; ID, JOB and slices are real.
FILLED = (
    ("v4-32,v5e-16", "v5e-1,v5e-16"),
    ("v4-32", "v5e-1"),
    ("ACCELERATOR", "v5e-1"),
    ("[--on v5e-1]", "--on v5e-1"),
    ("[--spot]", "--spot"),
    ("[K]", "style"),
    ("K V", "style hydra"),
    ("--on …", "--on v5e-1"),
    ("-- COMMAND …", "-- echo hello"),
    ("-- COMMAND", "-- echo hello"),
    ("--setup COMMAND", "--setup 'echo ready'"),
    ("tpu COMMAND", "tpu run"),
    ("train.py …", "train.py a b"),
    ("CODE", "'result = 1'"),
    ("PATH", "."),
    ("FULL", "config.rate"),
    ("ZONE", "local"),
    ("CHIPS", "8"),
    ("TEXT", "'a note'"),
    ("pools set NAME --on v5e-1 --max", "pools set others --on v5e-1 --max"),
    ("set NAME", "set mine"),
    ("rm NAME", "rm mine"),
    ("NAME", "WANDB_API_KEY"),
    ("ID T", "ID tagged"),
    ("--tag T", "--tag tagged"),
)
#: Would need more machines or time than a test has: planned, with `--dry-run`.
PLANNED = ("--array", "--spot", "--no-spot", "--zone", "--on", "--dir", "--setup", "--note", "--rule", "--timeout")
#: What must not stay so for the rest of the page.
UNDONE = {"tpu dir rm 2": "tpu dir set 2", "tpu settings set wait false": "tpu settings reset"}
UNDONE |= {"tpu settings set K V": "tpu settings reset", "tpu alias rm lr": "tpu alias set lr config.rate"}
VALUES = {"tpu secret set WANDB_API_KEY": b"value-of-the-key\n"}


def spans() -> list[str]:
    """What stands in code on the right-hand sides, in the order of the page, once each."""
    rights = [line.split("|", 2)[2] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return list(dict.fromkeys(span for right in rights for span in re.findall(r"`([^`]+)`", right)))


def typed(span: str) -> str:
    """What a reader types for it, but for ids."""
    for placeholder, value in FILLED:
        span = span.replace(placeholder, value)
    if span == "tpu run --detach":
        return "tpu run --detach train.py"
    if span.startswith("--"):
        if span == "--dry-run" or span.startswith(PLANNED):
            return f"tpu run {span if span == '--dry-run' else f'{span} --dry-run'} train.py"
        detach = "" if span == "--detach" else " --detach"
        return f"tpu run{detach} {span} train.py"
    return span


def test_everything_on_the_right_is_typed_or_says_why_not() -> None:
    found = spans()
    assert len(found) > 60
    left = [
        span for span in found if not span.startswith(("tpu ", "--", "cd ")) and span not in {*WORDS_ALONE, *NOT_RUN}
    ]
    assert left == []
    assert [span for span in NOT_RUN if span not in found] == [], "no reasons for what is not on the page"
    open_ends = [typed(span) for span in found if span not in NOT_RUN and re.search(r"…|\[|\bK\b|COMMAND", typed(span))]
    assert open_ends == []


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path / "home")
    try:
        yield shop
    finally:
        shop.end()


class Typist:
    """A shell in which `tpu` is a command."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        tools = shop.desk.parent / "tools"
        tools.mkdir()
        (tools / "tpu").write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "from penstock.cli.main import main; main()" "$@"\n'
        )
        (tools / "tpu").chmod(0o755)
        self._environment = {**shop.environment, "PATH": f"{tools}:{os.environ['PATH']}"}

    def type(self, line: str, stdin: bytes = b"") -> str:
        done = subprocess.run(
            ["bash", "-c", line], env=self._environment, cwd=self.shop.desk, input=stdin, capture_output=True,
            timeout=RUN_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: exit code {done.returncode}: {done.stderr.decode()}"
        assert b"Traceback" not in done.stderr
        return done.stdout.decode()


@pytest.mark.long
def test_what_the_page_says_can_be_typed(shop: Shop) -> None:
    (shop.desk / "train.py").write_text("import sys\nprint('trained', *sys.argv[1:])\n")
    typist = Typist(shop)
    ended = typist.type("tpu run --detach --on v5e-1 train.py").strip()
    shop.ended(ended)
    (slice,) = {each["id"] for each in shop.call("GET", "/v1/slices")[1]["slices"]}
    typist.type("tpu dir set 1 .; tpu dir set 2 .")
    typist.type("tpu secret set WANDB_API_KEY", VALUES["tpu secret set WANDB_API_KEY"])
    said: dict[str, str] = {}
    todo = [span for span in spans() if span not in NOT_RUN and span not in WORDS_ALONE and span != "tpu down"]
    for span in todo:
        line = (
            typed(span)
            .replace("slice:ID", f"slice:{slice}")
            .replace("SLICE", slice)
            .replace("--after JOB", f"--after {ended}")
        )
        if line.startswith(("tpu kill ID", "tpu cancel ID")):
            line = line.replace("ID", shop.submit(WORDS + "gate('never')"))
        said[span] = typist.type(line.replace("ID", ended), VALUES.get(line, b""))
        if span in UNDONE:
            typist.type(UNDONE[span])
    assert said["tpu run --on v4-32 train.py"] == "trained\n"
    assert said["tpu run train.py lr=0.01"] == "trained --config.training.learning_rate=0.01\n"
    assert said["tpu run -- COMMAND …"] == "hello\n"
    assert said["tpu exec -c CODE"] == "1\n"
    assert said["tpu logs ID"] == "trained\n"
    assert (shop.desk / "file").read_text() == "trained\n"
    assert "WANDB" not in said["tpu ps --json"]
    typist.type(typed("tpu down"))
    assert not shop.servers()
