"""`tpu sim`: the whole control plane in virtual time, under faults (`check`, `points`) or under a workload (`run`).

The commands only parse, show progress and print; the simulator is built by `wiring.simulator`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.wiring.simulator import Progress, Report, SeedReport, WorkloadResult, ZoneSums

PROGRESS_EVERY_S = 0.5  #: of real time, so that a terminal is not flooded


@click.group()
def sim() -> None:
    """Run the real controller in a simulated world.

    \b
    tpu sim check --seeds 200             all faults, all rules
    tpu sim points                        where it was crashed, how often
    tpu sim run examples/workloads/lab.toml    makespan, cost, waiting time
    """


_SEEDS = click.option("--seeds", default=20, show_default=True, type=click.IntRange(1), help="how many seeds")
_START = click.option("--start", default=0, show_default=True, type=click.IntRange(0), help="the first seed")
_JSON = click.option("--json", "as_json", is_flag=True, help="print JSON")
_WORKERS = click.option("--workers", type=click.IntRange(1), help="processes (default: one per core)")


@sim.command()
@_SEEDS
@_START
@_JSON
@_WORKERS
@click.option("--bug", hidden=True, help="switch a planted bug on (for tests of the checker)")
def check(seeds: int, start: int, as_json: bool, workers: int | None, bug: str | None) -> None:
    """Run seeds with all faults, then demand every rule of docs/reference/rules.md."""
    from penstock.wiring import simulator

    if bug is not None:
        _check_bug(bug, start, seeds, as_json)
        return
    report = simulator.check_seeds(start, seeds, workers=workers, progress=_progress(seeds, as_json))
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        _print_report(report)
    sys.exit(0 if report.good else 1)


def _progress(seeds: int, as_json: bool) -> Callable[[SeedReport], None] | None:
    """A line that counts seeds, on terminals only."""
    if as_json or not sys.stderr.isatty():
        return None
    done = [0, 0]

    def show(report: SeedReport) -> None:
        done[0] += 1
        done[1] += len(report.failures)
        click.echo(f"\r{done[0]} of {seeds} seeds, {done[1]} violations", nl=done[0] == seeds, err=True)

    return show


def _print_report(report: Report) -> None:
    rate = report.handled / report.cpu_s if report.cpu_s else 0.0
    click.echo(f"seeds      {report.seeds} from {report.first_seed}, {report.virtual_h:.1f} virtual hours")
    click.echo(f"events     {report.handled} handled by the controller, {report.events} of them commits")
    click.echo(f"speed      {rate:,.0f} events/s per core, {report.wall_s:.1f} s")
    click.echo("faults     " + " ".join(f"{kind}:{count}" for kind, count in report.faults.items()))
    click.echo("premises   " + " ".join(f"{rule}:{count}" for rule, count in report.premises.items()))
    click.echo(f"violations {len(report.violations)}")
    for failure in report.violations[:5]:
        click.echo(
            f"\n{failure.rule}, seed {failure.seed}: {failure.message}\n{failure.story}\nreplay: {failure.replay}"
        )
    if len(report.violations) > 5:
        click.echo(f"\n… and {len(report.violations) - 5} more")
    for problem in report.problems:
        click.echo(f"problem    {problem}")


def _check_bug(name: str, start: int, seeds: int, as_json: bool) -> None:
    from penstock.wiring import simulator

    caught = simulator.catch(name, start, seeds)
    if as_json:
        click.echo(msgspec.json.encode(caught))
    elif caught.seed is None:
        click.echo(f"{name}: not caught in {seeds} seeds")
    else:
        click.echo(f"{name}: caught by {', '.join(caught.rules)} at seed {caught.seed}")
    sys.exit(1 if caught.seed is not None else 0)


@sim.command()
@_SEEDS
@_START
@_JSON
@_WORKERS
def points(seeds: int, start: int, as_json: bool, workers: int | None) -> None:
    """List every port call and commit, with how often a crash fired before and after it."""
    from penstock.wiring import simulator

    report = simulator.check_seeds(start, seeds, workers=workers, progress=_progress(seeds, as_json))
    if as_json:
        click.echo(msgspec.json.encode(report.points))
    else:
        for point, sides in report.points.items():
            click.echo(f"{point:<28} before {sides['before']:>5}  after {sides['after']:>5}")
    missed = [point for point, sides in report.points.items() if not all(sides.values())]
    sys.exit(1 if missed and seeds >= simulator.COVERING_SEEDS else 0)


@sim.command()
@click.argument("workload", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--seed", type=click.IntRange(0), help="another seed than the file's")
@click.option("--order", type=click.Choice(["learned", "fixed"]), help="how zones are chosen")
@_JSON
def run(workload: Path, seed: int | None, order: str | None, as_json: bool) -> None:
    """Play WORKLOAD.toml: what it would take, cost and waste."""
    from penstock.wiring import simulator

    try:
        question = simulator.read_workload(workload, seed=seed, order=order)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    result = simulator.run_workload(question, _workload_progress())
    if as_json:
        click.echo(msgspec.json.encode(result))
    else:
        _print_result(result)


def _workload_progress() -> Callable[[Progress], None] | None:
    """A line with the virtual time and the jobs that have ended, on terminals only."""
    if not sys.stderr.isatty():
        return None
    shown = [0.0]

    def show(at: Progress) -> None:
        over = at.ended == at.jobs
        if over or time.monotonic() - shown[0] >= PROGRESS_EVERY_S:
            shown[0] = time.monotonic()
            line = f"\r{at.virtual_h:.1f} virtual hours, {at.ended:,} of {at.jobs:,} jobs ended"
            click.echo(line, nl=over, err=True)

    return show


def _print_result(result: WorkloadResult) -> None:
    usd = "unknown (a price is missing)" if result.usd is None else f"${result.usd:,.2f}"
    ends = f"{result.succeeded:,} succeeded, {result.failed:,} failed, {result.unfinished:,} unfinished"
    waits = f"half under {result.wait_p50_s:,.0f} s, 95% under {result.wait_p95_s:,.0f} s"
    rows = [
        ("jobs", f"{result.jobs:,}: {ends}"),
        ("makespan", "unknown (not all jobs ended)" if result.makespan_h is None else f"{result.makespan_h:.2f} h"),
        ("cost", usd),
        ("utilisation", f"{result.utilisation:.1%} of {result.held_chip_h:,.1f} chip-hours held"),
        ("wasted", f"{result.wasted_chip_h:,.1f} chip-hours run and lost"),
        ("waiting", f"mean {result.wait_mean_s:,.0f} s, {waits}"),
        ("slices", f"{result.creates:,} asked for, {result.refusals:,} refused, {result.preemptions:,} preempted"),
        *((f"  {name}", _zone_line(zone)) for name, zone in result.zones.items()),
        ("control", f"{result.ticks:,} ticks, {result.events:,} events"),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        click.echo(f"{name:<{width}}  {text}")


def _zone_line(zone: ZoneSums) -> str:
    return f"{zone.asked:,} asked for, {zone.refused:,} refused, {zone.preempted:,} preempted"
