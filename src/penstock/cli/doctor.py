"""`tpu doctor`: which walls stand around jobs on this machine, and whether a store can be trusted.

Prints what the agent's sandbox and `store/doctor.py` find, one line per check, and exits with 1 when a store is damaged
or, with `--strict`, when a wall is missing. It only reads: a store that is behind this release's schema is reported,
not migrated.
"""

from __future__ import annotations

import click

from penstock.cli import terminal


@click.command()
@click.option("--store", "address", metavar="PATH_OR_URL", help="Check this SQLite file or postgresql:// address.")
@click.option("--strict", is_flag=True, help="Fail if a wall is missing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(context: click.Context, address: str | None, strict: bool, as_json: bool) -> None:
    """Say which walls stand around jobs here; with --store, check a store.

    \b
    tpu doctor                                 sandbox and limits of this machine
    tpu doctor --store ~/.penstock/penstock.db

    Of a store: schema, integrity, rows against the log, counters, attempts.
    """
    if address is None:
        well = _show_walls(as_json) or not strict
    else:
        well = _check_store(address, as_json)
    if not well:
        context.exit(1)


def _show_walls(as_json: bool) -> bool:
    from penstock.wiring.walls import try_walls

    walls = try_walls()
    if as_json:
        found = {"bubblewrap": walls.bubblewrap, "rooms": walls.rooms, "memory": walls.memory, "tasks": walls.tasks}
        terminal.echo_json({"ok": not walls.missing, **found, "missing": walls.missing, "open": walls.open})
    else:
        for line in walls.lines():
            click.echo(line)
    return not walls.missing


def _check_store(address: str, as_json: bool) -> bool:
    from penstock.wiring.stores import examine_store

    findings = examine_store(address)
    well = all(finding.ok for finding in findings)
    if as_json:
        terminal.echo_json({"store": address, "ok": well, "checks": findings})
    else:
        for finding in findings:
            click.echo(f"{'ok  ' if finding.ok else 'FAIL'} {finding.check} ({finding.looked_at} looked at)")
            for trouble in finding.troubles:
                click.echo(f"     {trouble}")
            if finding.more_troubles:
                click.echo(f"     and {finding.more_troubles} more")
    return well
