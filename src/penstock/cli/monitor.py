"""`tpu monitor`: everything on one screen, live: slices by zone, jobs, queues, events, and the log of what is chosen.

With `--once` or `--json` one frame as text or as data, for which the bare install is enough; the live screen needs
textual (extra `tui`). The first look is made here with a plain client, so that a server that is not there, or says no,
is told in one line before any screen is taken. What is shown is made in `cli.monitor_model` and `cli.monitor_text`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import click

from penstock.cli import monitor_feed, monitor_text, terminal
from penstock.cli.monitor_model import Board
from penstock.cli.talk import talking
from penstock.cli.words import JOB, SPAN, as_json

FAULT = 70
WIDTH_ELSEWHERE = 100  #: of what is written into a file or a pipe


@click.command()
@click.option("--once", is_flag=True, help="Print one frame and leave.")
@click.option("--filter", "words", default="", metavar="WORDS", help="Only rows that hold each of these words.")
@click.option("--job", type=JOB, metavar="JOB", help="Show this job's log.  [default: one that runs]")
@click.option(
    "--since", type=SPAN, default="1h", show_default=True, metavar="TIME", help="Count losses and ends so far back."
)
@as_json
def monitor(once: bool, words: str, job: str | None, since: float, as_json: bool) -> None:
    """Watch slices, jobs, queues, events and a log on one screen, live.

    \b
    tpu monitor                        q leaves; Tab and 1-4 change the list
    tpu monitor --filter 'us-east1 ada'
    tpu monitor --once                 one frame as text; --json as data

    c cancels the job of the row, r resumes one that has ended, s opens `tpu ssh` on the slice,
    / filters, l gives the log more room.
    """
    from penstock.cli import screen

    live = not (once or as_json)
    if live and not screen.usable():
        raise click.UsageError("this is no terminal to draw on; add --once")
    if live:
        import textual  # noqa: F401 (said now, not after the server was asked)
    board = Board(terminal.now_s() - since)
    with talking() as client:
        board.server = client.url
        monitor_feed.first_look(client, board, events=not live)
        chosen = client.get(job).id if job is not None else board.default_selection()
        if chosen is not None and not live:
            monitor_feed.log_look(client, board, chosen)
    if live:
        _show(board, words, chosen)
        return
    frame = board.frame(terminal.now_s(), words=words, selected=chosen)
    if as_json:
        terminal.echo_json(frame)
    else:
        width = shutil.get_terminal_size((WIDTH_ELSEWHERE, 0)).columns
        for line in monitor_text.printed(frame, width):
            click.echo(line)


def _show(board: Board, words: str, job: str | None) -> None:
    from penstock.cli.monitor_screen import Monitor
    from penstock.client.aio import AsyncClient

    def connect() -> AsyncClient:
        return AsyncClient(patience_s=monitor_feed.PATIENCE_S)

    app = Monitor(board, connect, words=words, job=job, ssh=_ssh)
    app.run()
    if app.return_code:
        # Textual exits with 1 after a fault of ours, which it has printed; 1 means something else to our callers.
        raise click.exceptions.Exit(FAULT if app.return_code == 1 else app.return_code)


def _ssh(slice: str) -> None:
    """`tpu ssh` on the terminal that the screen has given back; what went wrong stays until it was read."""
    click.echo(f"tpu ssh {slice}")
    code = subprocess.run([sys.argv[0], "ssh", slice], check=False).returncode
    if code:
        click.prompt(f"it ended with {code}; Enter goes back", default="", show_default=False, prompt_suffix="")
