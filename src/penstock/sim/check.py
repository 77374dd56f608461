"""Many seeds, judged: runs them on all cores, applies every rule, and adds up what was exercised.

`tpu sim check`, `tpu sim points`, `make soak` and the planted-bug tests call it. A rule that never had a premise, a
crash point that never fired, a seed that never settled and any violation make the report bad. It must not repair or
retry: a failing seed is a finding, and its replay command is printed.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec

from penstock.domain.invariants.rules import check, missing_premises
from penstock.domain.invariants.story import story
from penstock.sim.bugs import BUGS, planted
from penstock.sim.points import all_points
from penstock.sim.seed import run_seed

LANDED_ISSUE = 2  #: rules up to this issue must find premises


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One violation, with all that is needed to see it again."""

    seed: int
    rule: str
    message: str
    story: str
    replay: str


class SeedReport(msgspec.Struct, kw_only=True):
    """What is kept of one seed once it has been judged."""

    seed: int
    events: int
    handled: int
    virtual_s: float
    wall_s: float
    trace: str
    premises: dict[str, int]
    faults: dict[str, int]
    crashes: list[tuple[str, str, int]]
    failures: list[Failure]


class Report(msgspec.Struct, kw_only=True):
    """The sum over seeds."""

    seeds: int = 0
    first_seed: int = 0
    events: int = 0  #: committed by the controller
    handled: int = 0  #: by the controller: ticks, messages of agents, calls of clients and to providers, commits
    virtual_h: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    faults: dict[str, int] = {}
    premises: dict[str, int] = {}
    points: dict[str, dict[str, int]] = {}
    violations: list[Failure] = []
    problems: list[str] = []

    @property
    def good(self) -> bool:
        return not self.violations and not self.problems


def judge_seed(seed: int, bug: str | None = None, fault_s: float = 2400.0) -> SeedReport:
    """Run and judge one seed, with a planted bug if one is named."""
    started = time.perf_counter()
    with planted(bug):
        result = run_seed(seed, fault_s=fault_s)
    report = check(result.history)
    replay = f"tpu sim check --seeds 1 --start {seed}" + (f" --bug {bug}" if bug else "")
    failures = [
        Failure(
            seed=seed,
            rule=violation.rule,
            message=f"{violation.entity} {violation.id}: {violation.message}",
            story=story(result.history, violation.entity, violation.id),
            replay=replay,
        )
        for violation in report.violations
    ]
    if not result.settled:
        failures.append(
            Failure(
                seed=seed, rule="L8", message="did not settle after the faults had stopped", story="", replay=replay
            )
        )
    return SeedReport(
        seed=seed,
        events=len(result.history.events),
        handled=result.handled,
        virtual_s=result.virtual_s,
        wall_s=time.perf_counter() - started,
        trace=result.trace,
        premises=dict(report.premises),
        faults=dict(result.faults),
        crashes=[(point, side, count) for (point, side), count in sorted(result.crashes.items())],
        failures=failures,
    )


def run_seeds(
    seeds: Sequence[int],
    *,
    bug: str | None = None,
    workers: int | None = None,
    progress: Callable[[SeedReport], None] | None = None,
) -> Iterator[SeedReport]:
    """Judge seeds on all cores, in the order of the seeds."""
    workers = min(workers or os.cpu_count() or 1, len(seeds))
    if workers <= 1:
        for seed in seeds:
            report = judge_seed(seed, bug)
            if progress is not None:
                progress(report)
            yield report
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for report in pool.map(judge_seed, seeds, [bug] * len(seeds)):
            if progress is not None:
                progress(report)
            yield report


def check_seeds(
    start: int, count: int, *, workers: int | None = None, progress: Callable[[SeedReport], None] | None = None
) -> Report:
    """All seeds from `start` on, with all faults and rules, as one report."""
    began = time.perf_counter()
    report = Report(seeds=count, first_seed=start)
    faults: Counter[str] = Counter()
    premises: Counter[str] = Counter()
    points: Counter[tuple[str, str]] = Counter()
    for seed in run_seeds(range(start, start + count), workers=workers, progress=progress):
        report.events += seed.events
        report.handled += seed.handled
        report.virtual_h += seed.virtual_s / 3600.0
        report.cpu_s += seed.wall_s
        faults.update(seed.faults)
        premises.update(seed.premises)
        for point, side, times in seed.crashes:
            points[point, side] += times
        report.violations = [*report.violations, *seed.failures]
    report.wall_s = time.perf_counter() - began
    report.faults = dict(sorted(faults.items()))
    report.premises = dict(sorted(premises.items()))
    report.points = {
        point: {"before": points[point, "before"], "after": points[point, "after"]} for point in all_points()
    }
    report.problems = coverage_problems(report)
    return report


#: Fewer seeds than this cannot be expected to reach every point and premise.
COVERING_SEEDS = 200


def coverage_problems(report: Report) -> list[str]:
    """What a whole run should have exercised and did not."""
    if report.seeds < COVERING_SEEDS:
        return []
    problems = [f"rule {name} never had a premise" for name in missing_premises(report.premises, LANDED_ISSUE)]
    for point, sides in report.points.items():
        problems += [f"no crash {side} {point}" for side, times in sides.items() if times == 0]
    return problems


class Caught(msgspec.Struct, frozen=True, kw_only=True):
    """When a planted bug was noticed, and by which of the rules that should."""

    bug: str
    seed: int | None
    rules: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  #: rules that noticed too, though nobody expected them to


def catch(name: str, start: int, count: int) -> Caught:
    """Run seeds with a planted bug until one of its rules notices."""
    expected = BUGS[name].rules
    for seed in range(start, start + count):
        found = {failure.rule for failure in judge_seed(seed, name).failures}
        if found & set(expected):
            rules = tuple(rule for rule in expected if rule in found)
            return Caught(bug=name, seed=seed, rules=rules, others=tuple(sorted(found - set(expected))))
    return Caught(bug=name, seed=None)
