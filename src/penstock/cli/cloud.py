"""`tpu cloud selftest`: compares a real project with what is known of the Cloud TPU API, within a budget.

Shows what would be done and what it may cost, asks for `--yes`, shows the differences, and writes a report that can be
sent in. What is probed and how is `emulator.selftest`'s business.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from penstock.cli import terminal
from penstock.cli.talk import Refused
from penstock.cli.terminal import safe

if TYPE_CHECKING:
    from penstock.wiring.selftests import Planned, Report

_CHECK_FAILED: Final = 1
_NOT_AVAILABLE: Final = 3
_SHOWN_MAX: Final = 90


@click.group()
def cloud() -> None:
    """A project at a cloud.

    \b
    tpu cloud selftest --project p --budget 5          what it would do and cost
    tpu cloud selftest --project p --budget 5 --yes    do it
    """


@cloud.command()
@click.argument("words", nargs=-1, metavar="[WORD]...")
@click.option("--project", required=True, metavar="NAME", help="The project; best one that has no other TPUs.")
@click.option("--zone", default="us-central1-a", show_default=True, help="Where nodes are made.")
@click.option(
    "--budget",
    type=click.FloatRange(0, 10_000),
    required=True,
    metavar="USD",
    help="Spend no more. 0: only what is free.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0.05, 120),
    default=15.0,
    show_default=True,
    help="How long the nodes of one probe may live.",
)
@click.option("--endpoint", metavar="URL", help="Another address than Google's: an emulator.")
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the report here."
)
@click.option("--yes", is_flag=True, help="Do it; without this only the plan is shown.")
def selftest(
    words: tuple[str, ...],
    *,
    project: str,
    zone: str,
    budget: float,
    minutes: float,
    endpoint: str | None,
    report: Path | None,
    yes: bool,
) -> None:
    """Send the probes of `tpu emulator facts` to a real project and show what differs.

    \b
    tpu cloud selftest --project p --budget 0 --yes          only what is free
    tpu cloud selftest quota --project p --budget 5 --yes    facts about quota

    With WORDs only rows whose name or text has all of them. Everything made is called penstock-selftest-…, has the
    label penstock-selftest, and is deleted; what an earlier run left is found by them and deleted too. Nothing else is
    touched. A probe begins only if what was spent and the most it may cost fit into the budget: nodes times catalogue
    price times --minutes and five more for their deletion. Run one at a time in a project. Credentials are the
    application-default ones. Exit code 0: nothing differs.
    """
    from penstock.domain.admission import BadInput
    from penstock.wiring.selftests import Stuck, Trial

    try:
        trial = Trial(project, zone, budget_usd=budget, minutes=minutes, endpoint=endpoint, words=words)
    except BadInput as error:
        raise click.UsageError(str(error)) from error
    try:
        planned, leftovers = trial.planned()
        _tell_plan(planned, leftovers, budget)
        if not yes:
            raise click.UsageError("nothing was made; add --yes to do this")
        status = terminal.StatusLine()
        done = trial.run(planned, lambda row: status.show(f"{row.fact}: {row.verdict} …"))
        status.clear()
    except Stuck as stuck:
        raise Refused(str(stuck), _NOT_AVAILABLE) from stuck
    finally:
        trial.close()
    path = report or Path(f"penstock-selftest-{trial.place.run}.json")
    _write(path, done)
    _tell(done, path)
    if done.undeleted or any(row.verdict == "differs" or row.fact == "-" for row in done.results):
        raise click.exceptions.Exit(_CHECK_FAILED)


def _tell_plan(planned: list[Planned], leftovers: list[str], budget: float) -> None:
    chosen = [each for each in planned if not each.skipped]
    most = sum(each.most_usd for each in chosen)
    free = sum(not each.most_usd for each in chosen)
    click.echo(f"{len(chosen)} of {len(planned)} behaviours can be probed; {free} of them make nothing")
    click.echo(f"if every node lived as long as it may: ${most:.2f}; budget: ${budget:.2f}")
    for name in leftovers:
        click.echo(f"left over from an earlier run: {safe(name)}")


def _tell(done: Report, path: Path) -> None:
    rows = [
        (row.fact, safe(row.expected)[:_SHOWN_MAX], safe("; ".join(row.differences))[:_SHOWN_MAX])
        for row in done.results
        if row.verdict == "differs"
    ]
    if rows:
        terminal.echo_table(("FACT", "EXPECTED", "SEEN"), rows)
    for row in done.results:
        if row.verdict == "blocked":
            terminal.note(f"{row.fact} could not be shown: {safe(row.why)[:200]}")
    words = {"holds": "hold", "differs": "differ", "blocked": "could not be shown", "skipped": "were skipped"}
    counts = ", ".join(f"{sum(row.verdict == each for row in done.results)} {said}" for each, said in words.items())
    click.echo(f"{counts}; about ${done.spent_usd:.2f} spent")
    if done.leftovers:
        click.echo(f"deleted {len(done.leftovers)} left over from an earlier run: {safe(', '.join(done.leftovers))}")
    for name in done.undeleted:
        click.echo(f"NOT DELETED, and it costs money: {safe(name)}", err=True)
    click.echo(f"the report is in {path}; it names neither your project nor accounts")


def _write(path: Path, done: Report) -> None:
    import msgspec

    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(done), indent=2) + b"\n")
    os.replace(part, path)  # noqa: PTH105
