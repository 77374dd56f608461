"""The two long runs, `make soak` and `make bench-core`, made short: they run, add up, and can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.core import Bound, Row, scale_problems, sim_rows, table
from penstock.sim.check import COVERING_SEEDS, Failure, Report, coverage_problems
from penstock.sim.points import all_points
from tools import soak

ROOT = Path(__file__).parents[2]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_soak_of_one_seed_prints_its_sums_and_writes_them(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    options = ("--minutes", "0", "--processes", "1", "--chunk", "1", "--start", "7001", "--out", str(out))
    done = _run("tools/soak.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "violations  0" in done.stdout
    report = json.loads(out.read_text())
    assert (report["seeds"], report["first_seed"]) == (1, 7001)
    assert report["events"] > 500
    assert report["faults"]["C4"] > 0
    assert report["points"].keys() == set(all_points())


def _chunk(seeds: int, **more: object) -> Report:
    points = {point: {"before": 1, "after": 2} for point in all_points()}
    report = Report(seeds=seeds, events=10, handled=5, faults={"P1": 3}, premises={"S1": 2}, points=points)
    for name, value in more.items():
        setattr(report, name, value)
    return report


def test_chunks_add_up_and_the_whole_is_asked_for_what_it_missed() -> None:
    total = Report(faults={}, premises={}, points={})
    for _ in range(2):
        soak.add(total, _chunk(COVERING_SEEDS // 2, problems=["of a chunk alone"]))
    assert (total.seeds, total.events, total.handled) == (COVERING_SEEDS, 20, 10)
    assert (total.faults, total.premises) == ({"P1": 6}, {"S1": 4})
    assert all(sides == {"before": 2, "after": 4} for sides in total.points.values())
    assert total.problems == []
    problems = coverage_problems(total)
    assert "rule S2 never had a premise" in problems
    assert "rule S1 never had a premise" not in problems


def test_a_soak_with_a_violation_is_bad_and_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failure(seed=4, rule="S5", message="two at once", story="", replay="tpu sim check --seeds 1 --start 4")
    monkeypatch.setattr(soak, "check", lambda start, seeds: _chunk(seeds, first_seed=start, violations=[failure]))
    report = soak.soak(0, processes=1, chunk=3, start=40)
    assert not report.good
    assert (report.first_seed, report.seeds) == (40, 3)
    assert "S5: tpu sim check --seeds 1 --start 4" in soak.table(report)


def test_a_simulator_that_dies_is_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "TPU", Path("/bin/false"))
    with pytest.raises(soak.Died, match="exit code 1: no word; again with: tpu sim check --seeds 3 --start 9"):
        soak.check(9, 3)


@pytest.mark.long
def test_a_quick_bench_shows_every_figure_and_judges_none(tmp_path: Path) -> None:
    out = tmp_path / "core.json"
    done = _run("bench/core.py", "--quick", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["problems"] == []
    assert not report["judged"]
    bounded = [(row["part"], row["what"]) for row in report["rows"] if row["bound"] is not None]
    assert len(bounded) == 8, bounded  # three of SQLite, four of the tick, one of the simulator
    assert all(row["measured"] > 0 for row in report["rows"])
    assert all(row["what"] in done.stdout for row in report["rows"])


def test_a_missed_bound_is_told() -> None:
    slow = Row(part="a", what="rate", measured=400.0, unit="/s", bound=Bound(500.0))
    large = Row(part="a", what="time", measured=60.0, unit="ms", bound=Bound(50.0, at_most=True))
    good = Row(part="a", what="good", measured=25.0, unit="ms", bound=Bound(50.0, at_most=True))
    assert [row.ok for row in (slow, large, good)] == [False, False, True]
    assert (slow.ratio, good.ratio) == (0.8, 2.0)
    assert table([slow, large, good]).count("MISSED") == 2
    assert "MISSED" not in table([slow], judged=False)
    assert not sim_rows({"events": 10, "handled": 80, "virtual_h": 1.0}, cpu_s=1.0)[0].ok


def test_the_rule_about_scale_is_put_to_the_test_by_the_bench() -> None:
    measured = {"queued": 1_000_000, "tick_p99_ms": 50.0, "submit_100_p99_ms": 30.0, "rss_mib": 300.0}
    assert scale_problems(measured) == []
    assert scale_problems({**measured, "rss_mib": 2000.0}) == ["L11: memory_bytes is 2.09715e+09, limit 1.07374e+09"]
    assert scale_problems({**measured, "queued": 10}) == ["rule L11 never had a premise"]
