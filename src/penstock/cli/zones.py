"""`tpu zones`: what was learned of each zone, which is what decides where slices are asked for.

Shows what the server keeps; decides nothing. How the numbers come about is in docs/adr/0006-zone-odds.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli import terminal
from penstock.cli.talk import talking
from penstock.cli.terminal import moment, safe, span
from penstock.cli.words import as_json

if TYPE_CHECKING:
    from penstock.wire.capacity import ZoneView


@click.command()
@click.option("--type", "--on", "accelerator", metavar="ACCELERATOR", help="Only of this accelerator.")
@as_json
def zones(accelerator: str | None, as_json: bool) -> None:
    """Where slices can be had: odds, time to ready, life, price, and zones that rest.

    \b
    tpu zones --type v5e-8

    Of zones that pools name. ODDS is how likely the next request is granted; LIFE how long slices stayed that were
    taken away. A zone that refused is asked again when its REST is over; one whose API does not answer, when it does.
    """
    with talking() as client:
        found = client.zones()
    if accelerator is not None:
        from penstock.domain import catalogue

        try:
            name = catalogue.find(accelerator).name
        except catalogue.UnknownAccelerator as error:
            raise click.BadParameter(str(error), param_hint="--type") from error
        found = tuple(each for each in found if each.accelerator == name)
    if as_json:
        terminal.echo_json(found)
    elif not found:
        click.echo("no zones; pools name them (`tpu pool create NAME --type ACCELERATOR --zones …`)")
    else:
        header = ("ZONE", "ACCELERATOR", "BOUGHT", "ODDS", "TRIES", "READY IN", "LIFE", "$/H", "REST", "")
        right = ("ODDS", "TRIES", "READY IN", "LIFE", "$/H", "REST")
        terminal.echo_table(header, [_row(each) for each in found], right=right)


def silence(zone: ZoneView) -> str:
    """Since when a zone does not show what is there, and what that means; nothing when it does."""
    if zone.silent_since is None:
        return ""
    since = f"for {span(zone.silent_s)} (since {moment(zone.silent_since)})"
    said = f": {zone.said}" if zone.said else ""
    if zone.denied:
        return f"its API has refused {since}{said}; nothing is made there until the server's account may do that"
    return f"its API has not answered {since}{said}; nothing is made there until it does: does the server reach it?"


def _bought(zone: ZoneView) -> str:
    if zone.provider == "local":
        return "-"
    return safe(zone.kind) or ("spot" if zone.spot else "-")  # an older server knows no other kinds


def _row(zone: ZoneView) -> tuple[str, ...]:
    return (
        safe(zone.zone),
        zone.accelerator,
        _bought(zone),
        f"{zone.odds:.0%}" if zone.tries else "-",
        str(zone.tries),
        "-" if zone.ready_s is None else span(zone.ready_s),
        "-" if zone.life_s is None else span(zone.life_s),
        "?" if zone.usd_per_hour is None else f"{zone.usd_per_hour:.2f}",
        span(zone.rests_s) if zone.rests_s > 0 else "-",
        safe(silence(zone) or zone.why),
    )
