"""`tpu watch`: the list of jobs, kept up to date on the terminal; elsewhere one line per change.

Looks once in a while and draws what `tpu ps` would print. Rich draws on a terminal, and is loaded only then. Ctrl-C
ends it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

import click

from penstock.cli import follow, jobs, preferences, terminal
from penstock.cli.talk import talking
from penstock.cli.words import job_filters

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.wire.api import JobView

SHOWN_MAX = 200


@click.command()
@job_filters
@click.option("--every", type=click.FloatRange(0.1, 3600), metavar="S", help="Seconds between two looks.")
def watch(
    *,
    user: str | None,
    state: str | None,
    tag: str | None,
    queue: str | None,
    since: float | None,
    every: float | None,
) -> None:
    """Keep the list of jobs on the screen; into a file or a pipe, write a line per change."""
    pause_s = preferences.load().settings.refresh_s if every is None else every
    with talking() as client:

        def look() -> list[JobView]:
            return list(islice(jobs.select(client, state, user, tag, queue, since, False), SHOWN_MAX))

        try:
            if sys.stdout.isatty():
                _draw(look, pause_s)
            else:
                _tell(look, pause_s)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(0) from None


def _draw(look: Callable[[], list[JobView]], pause_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()  # it knows NO_COLOR and dumb terminals itself
    with Live(_table(look()), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(pause_s)
            live.update(_table(look()), refresh=True)


def _table(found: list[JobView]) -> Table:
    from rich.table import Table
    from rich.text import Text

    counts = {state: sum(job.state == state for job in found) for state in (*jobs.LIVE, *sorted(follow.ENDED))}
    title = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no jobs"
    table = Table(box=None, title=title, title_justify="left", caption="Ctrl-C leaves", caption_justify="left")
    for name in jobs.HEADER:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for job in found:
        table.add_row(*(Text.from_ansi(cell) for cell in jobs.row(job)))
    return table


def _tell(look: Callable[[], list[JobView]], pause_s: float) -> None:
    """One line per job that is new or in another state than before; what it says of itself is not a change."""
    before: dict[str, str] = {}
    while True:
        for job in look():
            if before.get(job.id) != job.state:
                cause = "" if job.cause in (None, job.state) else f" ({job.cause})"
                name = terminal.safe(job.name or job.kind)
                click.echo(f"{terminal.moment(terminal.now_s())}  {job.id}  {job.state}{cause}  {name}")
                before[job.id] = job.state
        sys.stdout.flush()
        time.sleep(pause_s)
