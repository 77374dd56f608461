"""The production controller under all faults: no rule broken, the same trace everywhere, and every alarm can ring."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.sim.bugs import BUGS
from penstock.sim.check import COVERING_SEEDS, Report, catch, coverage_problems, judge_seed
from penstock.sim.points import all_points

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", range(7000, 7012))
def test_no_rule_is_broken(seed: int) -> None:
    report = judge_seed(seed)
    assert not report.failures, "\n\n".join(
        f"{failure.rule}: {failure.message}\n{failure.story}\nreplay: {failure.replay}"
        for failure in report.failures[:2]
    )
    assert report.events > 500, "a seed that does little proves little"


@pytest.mark.parametrize("seed", [3, 11])
def test_a_seed_replays_the_same_under_any_hash_seed(seed: int) -> None:
    traces = set()
    for hash_seed in ("1", "4242"):
        code = f"from penstock.sim.seed import run_seed; print(run_seed({seed}).trace)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        traces.add(done.stdout.strip())
    assert len(traces) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_planted_bug_is_caught_by_its_rule(name: str) -> None:
    caught = catch(name, 0, 200)
    assert caught.seed is not None, f"{name} ({BUGS[name].what}) was not noticed in 200 seeds"
    assert set(caught.rules) & set(BUGS[name].rules)


def test_the_twelve_bugs_and_seven_more_are_planted() -> None:
    assert len(BUGS) >= 19


def test_a_run_that_misses_a_point_or_a_premise_is_bad() -> None:
    report = Report(seeds=COVERING_SEEDS, points={point: {"before": 1, "after": 1} for point in all_points()})
    assert any("never had a premise" in problem for problem in coverage_problems(report))
    report.points["store.read"]["after"] = 0
    assert "no crash after store.read" in coverage_problems(report)
    assert coverage_problems(Report(seeds=3)) == []
