"""`docs/howto/cloud-tpu.md`, executed as far as it needs no account: the whole way on the emulator, as it stands.

As with the tutorial, the lines that the page shows must come out, in their order. Only the port is another one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.missing import need_machines
from tests.process.firestore_house import free_port
from tests.process.test_tutorial import Step, read_steps, type_in
from tests.tidy.tracked import ROOT

PAGE = ROOT / "docs" / "howto" / "cloud-tpu.md"
PORT = "9090"
WITHIN_S = 900.0  #: a quiet machine needs two minutes; packing the bundle with JAX is half of it


def steps() -> list[Step]:
    return read_steps(PAGE.read_text())


def test_the_whole_way_is_on_the_page() -> None:
    commands = "\n".join(step.commands for step in steps())
    for word in ("cloud selftest", "pool create", "run --on", "slices", "logs -f", "show", "cost", "pools rm", "down"):
        assert f"tpu {word}" in commands, f"the page no longer shows `tpu {word}`"
    assert all(step.shown for step in steps())
    text = PAGE.read_text()
    for word in ("gcloud auth application-default login", "tpu cloud selftest --project my-project", "[tpu_vm]"):
        assert word in text


@pytest.mark.slow
@pytest.mark.long
def test_the_whole_way_without_an_account(tmp_path: Path) -> None:
    need_machines()
    port = str(free_port())
    type_in([step._replace(commands=step.commands.replace(PORT, port)) for step in steps()], tmp_path, WITHIN_S)
