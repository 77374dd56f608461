"""`tpu doctor`: whether a store can be trusted, one line per check.

Prints what `store/doctor.py` finds and exits with 1 when anything is wrong. It only reads: a store that is
behind this release's schema is reported, not migrated.
"""

import click
import msgspec


@click.command()
@click.option("--store", "address", required=True, metavar="PATH_OR_URL", help="SQLite file or postgresql:// address.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(context: click.Context, address: str, as_json: bool) -> None:
    """Check a store: schema, integrity, rows against the log, counters, attempts."""
    from penstock.wiring.stores import examine_store

    findings = examine_store(address)
    well = all(finding.ok for finding in findings)
    if as_json:
        answer = msgspec.json.encode({"store": address, "ok": well, "checks": findings})
        click.echo(msgspec.json.format(answer, indent=2))
    else:
        for finding in findings:
            click.echo(f"{'ok  ' if finding.ok else 'FAIL'} {finding.check} ({finding.looked_at} looked at)")
            for trouble in finding.troubles:
                click.echo(f"     {trouble}")
            if finding.more_troubles:
                click.echo(f"     and {finding.more_troubles} more")
    if not well:
        context.exit(1)
