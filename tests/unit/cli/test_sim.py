"""`tpu sim`: what each command prints, its JSON, and how bad input is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import sim as sim_module
from penstock.cli.main import ExitCode, run
from penstock.sim.points import all_points
from penstock.sim.workload import WorkloadResult

SMALL = """
name = "small"
[[zones]]
name = "z"
[[pools]]
name = "p"
accelerator = "v5e-8"
[[queues]]
name = "q"
[[jobs]]
queue = "q"
accelerator = "v5e-8"
count = 2
duration_s = [60.0, 60.0]
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def read(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code = run(["sim", *arguments, "--json"])
    shown = capsys.readouterr()
    assert (code, shown.err) == (ExitCode.OK, "")
    return json.loads(shown.out)


# --- check and points ---
def test_check_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run(["sim", "check", "--seeds", "1", "--workers", "1", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert left.value.code == 0
    assert (report["seeds"], report["violations"]) == (1, [])
    assert report["events"] > 500
    assert report["faults"]
    assert report["premises"]


def test_points_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run(["sim", "points", "--seeds", "2", "--workers", "1", "--json"])
    points = json.loads(capsys.readouterr().out)
    assert left.value.code == 0
    assert set(points) == set(all_points())
    assert all(set(sides) == {"before", "after"} for sides in points.values())
    assert any(sum(sides.values()) for sides in points.values())


# --- run ---
def test_run_as_json_has_the_published_keys(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = read(capsys, "run", str(small))
    assert tuple(result) == WorkloadResult.__struct_fields__
    assert (result["name"], result["succeeded"], result["unfinished"]) == ("small", 2, 0)
    assert set(result["zones"]) == {"z"}


def test_run_as_a_table(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sim", "run", str(small), "--seed", "7", "--order", "fixed"]) == ExitCode.OK
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "2: 2 succeeded, 0 failed, 0 unfinished" in shown.out
    assert "$" in shown.out


def test_what_did_not_end_in_time_has_no_makespan(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.write_text("hours_max = 0.01\n" + SMALL)
    assert read(capsys, "run", str(small))["makespan_h"] is None
    assert run(["sim", "run", str(small)]) == ExitCode.OK
    assert "unknown (not all jobs ended)" in capsys.readouterr().out


def test_progress_is_for_terminals(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sim_module, "PROGRESS_EVERY_S", 0.0)
    assert run(["sim", "run", str(small), "--json"]) == ExitCode.OK
    shown = capsys.readouterr()
    lines = shown.err.split("\r")
    assert lines[-1] == lines[-1].lstrip()
    assert lines[-1].endswith("virtual hours, 2 of 2 jobs ended\n")
    assert "0 of 2 jobs ended" in lines[1]
    json.loads(shown.out)


# --- bad input ---
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "small"', 'name = "small', "is not TOML"),
        ("count = 2", "count = 0", "jobs[0].count: 0 must be at least 1"),
        ("count = 2", 'count = "two"', "jobs[0].count: 'two' does not fit: Expected `int`, got `str`"),
        ("count = 2", "", "jobs[0]: 'count' is missing"),
        ("count = 2", "count = 2\nsize = 3", "jobs[0]: 'size' is not a known field"),
        ('name = "small"', "speed = 3", "workload: 'speed' is not a known field"),
        ('queue = "q"', 'queue = "r"', "jobs[0].queue: 'r' is not one of the queues; have q"),
        ('name = "p"', 'name = "p"\nzones = ["y"]', "pools[0].zones: 'y' is not one of the zones; have z"),
        ('name = "p"\naccelerator = "v5e-8"', 'name = "p"\naccelerator = "v5e-9"', "pools[0].accelerator: 'v5e-9' is"),
        ('name = "p"\naccelerator = "v5e-8"', 'name = "p"\naccelerator = "v4-8"', "is in none of the pools; have v4-8"),
        ('name = "p"', 'name = "p"\nmin = 2', "pools[0].min: 2 must be from 0 to max, which is 1"),
        ('name = "p"', 'name = "p"\nrace = 9', "pools[0].race: 9 must be from 1 to 4"),
        ('name = "z"', 'name = "z"\nrefusal_rate = 1.5', "zones[0].refusal_rate: 1.5 must be from 0 to 1"),
        ('name = "z"', 'name = "z"\nready_s = [9.0, 1.0]', "zones[0].ready_s: (9.0, 1.0) must be least and most"),
        ('name = "z"', 'name = "z"\nnotice_s = inf', "zones[0].notice_s: inf must be a finite number"),
        ('[[queues]]\nname = "q"', '[[queues]]\nname = "q"\n[[queues]]\nname = "q"', "queues[1].name: 'q' is there"),
        ('[[queues]]\nname = "q"', '[[queues]]\nname = "q"\nweight = 0', "queues[0].weight: 0.0 must be above 0"),
        ("duration_s = [60.0, 60.0]", "duration_s = [0.0, 0.0]", "jobs[0].duration_s: (0.0, 0.0) must be"),
        ('name = "small"', "pace_s = 60.0", "pace_s: 60.0 must be from 0 to 5"),
        ('name = "small"', "seed = 1.5", "seed: 1.5 does not fit: Expected `int`, got `float`"),
        ('name = "small"', 'order = "best"', "order: 'best' does not fit: Invalid enum value 'best'"),
    ],
)
def test_bad_workloads_are_refused_in_one_line(
    small: Path, old: str, new: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in SMALL
    small.write_text(SMALL.replace(old, new))
    assert run(["sim", "run", str(small)]) == ExitCode.BAD_INPUT
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "nowhere.toml"],
        ["run"],
        ["check", "--seeds", "0"],
        ["check", "--seeds", "many"],
        ["points", "--start", "-1"],
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sim", *arguments]) == ExitCode.BAD_INPUT
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1


def test_a_file_that_is_not_text_is_refused(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.write_bytes(b"\xff\xfe\x00")
    assert run(["sim", "run", str(small)]) == ExitCode.BAD_INPUT
    assert "is not TOML" in capsys.readouterr().err
