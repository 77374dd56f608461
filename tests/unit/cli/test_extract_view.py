"""What `tpu extract verify`, `status` and `requeue` say about a run that is open, copied, left alone or damaged."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.extract.plan import RunPlan
from penstock.extract.reader import open as open_run
from penstock.objects.directory import DirectoryObjects
from tests.process.extraction import SITES, check, document_of, values_of, whole_directory
from tests.unit.extract.cheap import calls_to, finish, finished


@pytest.fixture
def acts(tmp_path: Path) -> str:
    return str(tmp_path / "acts")


@pytest.fixture
def plan(acts: str) -> RunPlan:
    """Of a finished run in `acts`, by one worker."""
    return finished(DirectoryObjects(Path(acts)))[1]


def asked(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert run(["extract", *words]) == code
    said = capsys.readouterr()
    return said.out + said.err


def again(acts: str, plan: RunPlan, name: str = "again") -> None:
    asyncio.run(finish(calls_to(DirectoryObjects(Path(acts))), plan, name))


def facts(text: str) -> dict[str, str]:
    return {name: rest.strip() for name, _, rest in (line.partition(" ") for line in text.splitlines())}


def test_a_run_that_is_not_whole_does_not_pass(acts: str, plan: RunPlan, capsys: pytest.CaptureFixture[str]) -> None:
    assert facts(asked(capsys, "verify", "--run", acts))["problems"] == "0"
    asked(capsys, "requeue", plan.units[1].id, "--force", "--run", acts)
    said = asked(capsys, "verify", "--run", acts, code=1)
    assert f"1 of {len(plan.units)} units have no commit: {plan.units[1].id}\n" in said
    assert facts(said)["problems"] == "1"
    assert json.loads(asked(capsys, "verify", "--run", acts, "--json", code=1))["open"] == [plan.units[1].id]
    assert facts(asked(capsys, "verify", "--run", acts, "--so-far"))["problems"] == "0"
    again(acts, plan)
    assert facts(asked(capsys, "verify", "--run", acts))["problems"] == "0"
    for manifest in Path(acts).glob("runs/*/manifest/*"):
        manifest.unlink()
    assert "there is no manifest of these commits" in asked(capsys, "verify", "--run", acts, code=1)
    asked(capsys, "verify", "--run", acts, "--so-far")


def test_a_copy_is_as_good_as_the_run(
    acts: str, plan: RunPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a directory a generation is the time of the last change, which a copy does not keep."""
    copy = str(tmp_path / "copy")
    shutil.copytree(acts, copy, copy_function=shutil.copyfile)
    assert facts(asked(capsys, "verify", "--run", copy))["problems"] == "0"
    with open_run(copy) as opened:
        assert opened.values(document_of(0), SITES[0]).tobytes() == values_of(0, SITES[0]).tobytes()
    again(copy, plan)  # nothing is open, and the manifest is the old one
    check(whole_directory(copy), plan)


def test_a_commit_that_a_power_cut_emptied_is_named_and_made_again(
    acts: str, plan: RunPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = plan.units[2].id
    (Path(acts) / f"runs/{plan.run}/commits/{unit}").write_bytes(b"")
    line = f"{unit}: its commit cannot be read (0 bytes); `tpu extract requeue {unit}` has it made again"
    assert line in asked(capsys, "verify", "--run", acts, code=1)
    assert json.loads(asked(capsys, "verify", "--run", acts, "--json", "--so-far", code=1))["damaged"] == [unit]
    assert facts(asked(capsys, "status", "--run", acts))["damaged"] == line
    asked(capsys, "stats", "--run", acts)
    asked(capsys, "gc", "--run", acts)
    for manifest in Path(acts).glob("runs/*/manifest/*"):
        manifest.write_bytes(b"{")  # as after the same power cut: then somebody has to seal again
    with pytest.raises(ValueError, match=r"its commit cannot be read"):
        again(acts, plan)
    assert "makes it again" in asked(capsys, "requeue", unit, "--run", acts)
    again(acts, plan, "mender")
    assert facts(asked(capsys, "verify", "--run", acts))["problems"] == "0"
    check(whole_directory(acts), plan)


@pytest.mark.parametrize("what", ["manifest/*", "index/*.arrow", "index/*.jsonl"])
@pytest.mark.parametrize("left", [b"", b"{", b"\0" * 64], ids=["empty", "cut", "zeros"])
def test_what_is_named_by_its_hash_is_written_again(
    acts: str, plan: RunPlan, capsys: pytest.CaptureFixture[str], what: str, left: bytes
) -> None:
    (victim,) = Path(acts).glob(f"runs/*/{what}")
    victim.write_bytes(left)
    asked(capsys, "verify", "--run", acts, code=1)
    again(acts, plan)
    assert facts(asked(capsys, "verify", "--run", acts))["problems"] == "0"
    check(whole_directory(acts), plan)


def test_nobody_alive_means_no_rate_and_no_time_left(
    acts: str, plan: RunPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    said = facts(asked(capsys, "status", "--run", acts))
    assert (said["workers"], said["rate"], said["left"]) == ("0 healthy, 0 working, 0 recovering", "done", "0s")
    asked(capsys, "requeue", plan.units[0].id, "--force", "--run", acts)
    said = facts(asked(capsys, "status", "--run", acts))
    assert (said["rate"], said["left"]) == ("no worker gives a sign", "unknown")
