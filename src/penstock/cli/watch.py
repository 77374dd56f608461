"""`tpu watch`: the list of jobs, kept up to date on the terminal; elsewhere one line per change.

Looks once in a while and draws what `tpu ps` would print, on a screen of its own (`cli.screen`). A server that is away
is waited for, with the last list standing. Ctrl-C and `q` end it.
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
    """Keep the list of jobs on the screen; into a file or a pipe, write a line per change.

    Ctrl-C or q leaves; the jobs go on.
    """
    pause_s = preferences.load().settings.refresh_s if every is None else every
    with talking() as client:

        def look() -> list[JobView]:
            return list(islice(jobs.select(client, state, user, tag, queue, since, False), SHOWN_MAX))

        try:
            from penstock.cli import screen

            if screen.usable():
                _draw(look, pause_s)
            else:
                _tell(look, pause_s)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(0) from None


def _draw(look: Callable[[], list[JobView]], pause_s: float) -> None:
    from penstock.cli.screen import Screen
    from penstock.client.errors import Unreachable

    found, away = look(), ""
    with Screen(
        lambda height: _frame(found, height, away), colour=click.get_current_context().color is not False
    ) as screen:
        screen.paint()
        while screen.pause(pause_s):
            try:
                found, away = look(), ""
            except Unreachable as error:
                away = f"the server does not answer: {error}"
            screen.paint()


def _frame(found: list[JobView], height: int, away: str) -> list[str]:
    """What stands on a screen of so many lines: the counts, the list as far as it fits, and how to leave."""
    counts = {state: sum(job.state == state for job in found) for state in (*jobs.LIVE, *sorted(follow.ENDED))}
    title = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no jobs"
    room = max(1, height - 5)  # title, header, what is left out, a blank, the last line
    lines = [title, *terminal.table(jobs.HEADER, [jobs.row(job) for job in found[:room]])]
    if len(found) > room:
        lines.append(f"… and {len(found) - room} more; `tpu ps` lists them")
    last = terminal.safe(away) if away else f"{terminal.moment(terminal.now_s())}; q or Ctrl-C leaves"
    return [*lines, "", last]


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
