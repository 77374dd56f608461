"""`tpu solve`: has every host of a slice looked at and mended, and tells in a table what was wrong with which.

The checks are the agents', the decision to give a slice up is the server's; docs/howto/solve.md has both. Here is only
how it is asked for and shown. The exit code says whether all is well now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from penstock.cli import terminal
from penstock.cli.talk import talking
from penstock.cli.terminal import safe
from penstock.cli.words import as_json

if TYPE_CHECKING:
    from penstock.wire.solving import SolveView

_WAIT_S: Final = 5.0
_CHECK_FAILED: Final = 1
_COLOURS: Final = {"well": "green", "fixed": "green", "found": "yellow", "waits": "yellow"}


@click.command()
@click.argument("slice")
@click.option("--dry-run", is_flag=True, help="Only look; change nothing.")
@click.option("--all", "everything", is_flag=True, help="Show also what is well.")
@as_json
def solve(slice: str, dry_run: bool, everything: bool, as_json: bool) -> None:
    """Find out what is wrong with the hosts of SLICE, and mend it.

    Checked on every host: devices held by stale processes, libtpu's lock file, full disks, missing mounts, the clock,
    jax and libtpu that do not fit, DNS, and whether the agent answers at all. What could harm a job that runs there
    waits until it has ended. A slice that cannot be mended twice in a row is given up and replaced. For administrators
    of the team. Exit code 0: all is well now; 1: something is left.

    \b
    tpu solve s0abc --dry-run      what is wrong
    tpu solve s0abc                mend it
    """
    status = terminal.StatusLine(silent=as_json)
    try:
        with talking() as client:
            view = client.solve(slice, dry_run=dry_run)
            while not view.done:
                answered = sum(bool(host.findings) for host in view.hosts)
                status.show(f"{answered} of {len(view.hosts)} hosts have answered …")
                view = client.solved(view.slice, view.run, wait_s=_WAIT_S)
    finally:
        status.clear()
    if as_json:
        terminal.echo_json(view)
    else:
        _tell(view, everything)
    if not view.well:
        raise click.exceptions.Exit(_CHECK_FAILED)


def _tell(view: SolveView, everything: bool) -> None:
    rows = [
        (
            str(host.host),
            finding.check,
            click.style(finding.verdict, fg=_COLOURS.get(finding.verdict, "red")),
            safe(finding.evidence) or "-",
            safe(finding.fix) or "-",
        )
        for host in view.hosts
        for finding in host.findings
        if everything or finding.verdict != "well"
    ]
    if rows:
        terminal.echo_table(("HOST", "CHECK", "STATE", "EVIDENCE", "FIX"), rows, right=("HOST",))
    checks = sum(len(host.findings) for host in view.hosts)
    looked = f"{checks} checks on {len(view.hosts)} host{'s' if len(view.hosts) > 1 else ''} of {view.slice}"
    if view.well:
        click.echo(f"{looked}: all is well")
    elif view.dry_run:
        click.echo(f"{looked}: something is wrong; nothing was changed (--dry-run)")
    elif view.quarantined:
        click.echo(f"{looked}: it cannot be mended; the slice is given up and replaced")
    else:
        click.echo(f"{looked}: something is left")
