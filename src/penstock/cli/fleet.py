"""`tpu fleet`: the same number of slices in each of several zones, kept whole by the server.

A fleet is a pool with a count per zone: the server makes what is missing and replaces what breaks, each zone by itself,
whether anybody looks or not. So these commands only say what is wanted and show how it stands; they create nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli import terminal
from penstock.cli.cloud_options import cloud_options, wish, zone_words
from penstock.cli.naming import confirm
from penstock.cli.talk import Refused, talking
from penstock.cli.terminal import many, now_s, safe, span
from penstock.cli.words import SPAN, as_json
from penstock.cli.zones import silence

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.wire.api import PoolRequest, PoolView, SliceView
    from penstock.wire.capacity import ZoneView

NOT_FOUND, CHECK_FAILED = 5, 1
LOOK_EVERY_S = 1.0
_STAYING = ("intended", "creating", "ready")


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a fleet stands: what `tpu fleet status --json` prints."""

    name: str
    accelerator: str
    zones: tuple[str, ...]
    per_zone: int
    wanted: int
    ready: int
    coming: int
    leaving: int
    slices: tuple[SliceView, ...]
    resting: tuple[ZoneView, ...]  #: zones that are not asked for a while, or do not answer


@click.group(invoke_without_command=True)
@click.pass_context
def fleet(context: click.Context) -> None:
    """So many slices in each zone, always.

    \b
    tpu fleet create --zones us-central1-a,us-central1-b --per-zone 4 --type v3-8
    tpu fleet status                     how each slice stands
    tpu fleet recreate                   look for what is broken now
    tpu fleet resize --per-zone 6
    tpu fleet delete
    """
    if context.invoked_subcommand is None:
        context.invoke(list_fleets)


@fleet.command()
@click.argument("name", required=False)
@click.option("--type", "--on", "accelerator", required=True, metavar="ACCELERATOR", help="What slices are: v3-8.")
@click.option("--zone", "--zones", "zones", multiple=True, required=True, metavar="ZONES", help="Names or patterns.")
@click.option("--per-zone", type=int, required=True, metavar="N", help="Slices in each zone.")
@cloud_options
@as_json
def create(
    *,
    name: str | None,
    accelerator: str,
    zones: tuple[str, ...],
    per_zone: int,
    kind: str | None,
    reservation: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Make a fleet; without a NAME it is called after what it consists of, such as fleet-v3-8.

    \b
    tpu fleet create --zones us-central1-a,us-central1-b --per-zone 4 --type v3-8
    tpu fleet create big --zones 'us-*' --per-zone 2 --type v5e-8 --spot
    """
    from penstock.wire.api import PoolRequest

    chosen = zone_words(zones)
    local = chosen == ("local",)
    if local and (kind not in (None, "spot") or reservation or any(options.values())):
        raise click.UsageError("these options are for slices of a cloud, and local is no zone of one")
    called = name or f"fleet-{accelerator}{f'-{kind}' if kind else '-reserved' if reservation else ''}"
    request = PoolRequest(
        accelerator=accelerator,
        provider="local" if local else "tpu_vm",
        zones=chosen,
        spot=kind in ("spot", "preemptible"),
        cloud=None if local else wish(kind, reservation, options),
        per_zone=per_zone,
    )
    with talking(start=local) as client:
        if any(pool.name == called for pool in client.pools()):
            advice = "change it with `tpu fleet resize`, or give the new one a name: `tpu fleet create NAME …`"
            raise click.UsageError(f"there is a pool {called!r} already; {advice}")
        made = client.put_pool(called, request)
    if as_json:
        terminal.echo_json(made)
    else:
        click.echo(_sentence(made))


def _sentence(pool: PoolView) -> str:
    where = f"in each of {', '.join(pool.zones)}" if len(pool.zones) > 1 else f"in {pool.zones[0]}"
    count = f"{many(pool.per_zone or 0, 'slice')} of {pool.accelerator} {where}"
    return safe(f"{pool.name}: {count}; `tpu fleet status {pool.name}` shows how far they are")


@fleet.command(name="list")
@as_json
def list_fleets(as_json: bool = False) -> None:
    """List fleets, as `tpu fleet` alone does.

    \b
    tpu fleet list --json
    """
    with talking() as client:
        found = [_standing(client, pool) for pool in _fleets(client)]
    if as_json:
        terminal.echo_json(found)
        return
    if not found:
        click.echo("no fleets; `tpu fleet create --zones … --per-zone N --type ACCELERATOR` makes one")
        return
    rows = [
        (safe(one.name), one.accelerator, safe(",".join(one.zones)), str(one.per_zone), f"{one.ready} of {one.wanted}")
        for one in found
    ]
    terminal.echo_table(("NAME", "ACCELERATOR", "ZONES", "PER ZONE", "READY"), rows, right=("PER ZONE", "READY"))


@fleet.command()
@click.argument("name", required=False)
@click.option("--wait", type=SPAN, metavar="TIME", help="Stay until it is whole; exit code 1 if it is not by then.")
@as_json
def status(name: str | None, wait: float | None, as_json: bool) -> None:
    """How the fleet NAME stands, slice by slice; without a NAME, all fleets.

    \b
    tpu fleet status fleet-v3-8 --wait 10m

    What is missing is being made, and what is broken is being replaced, without any command.
    """
    whole = True
    with talking(stay=wait is not None) as client:
        wanted = _fleets(client) if name is None else [_meant(client, name)]
        found = [_standing(client, pool) for pool in wanted]
        if wait is not None:
            told = ""
            for found in looks(wait, lambda: [_standing(client, pool) for pool in wanted]):
                whole = all(one.ready == one.wanted for one in found)
                news = "; ".join(_head(one) for one in found if one.ready != one.wanted)
                if news not in ("", told):
                    terminal.note(news)
                    told = news
                if whole:
                    break
    if as_json:
        terminal.echo_json(found if name is None else found[0])
    elif not found:
        click.echo("no fleets")
    else:
        for number, one in enumerate(found):
            if number:
                click.echo()
            _show(one)
    if not whole:
        raise click.exceptions.Exit(CHECK_FAILED)


def _head(one: Standing) -> str:
    head = f"{one.name}: {one.ready} of {one.wanted} ready"
    more = [f"{count} {word}" for count, word in ((one.coming, "coming"), (one.leaving, "leaving")) if count]
    return safe(", ".join([head, *more]))


def _show(one: Standing) -> None:
    click.echo(_head(one))
    rows = [
        (
            safe(each.title),
            terminal.state(each.state),
            each.job or ("free" if each.state == "ready" else "-"),
            span(now_s() - each.made_at),
            each.id,
            safe(each.why) or safe(each.arriving),
        )
        for each in one.slices
    ]
    if rows:
        terminal.echo_table(("NAME", "STATE", "JOB", "AGE", "SLICE", ""), rows, right=("AGE",), spare=("AGE",))
    for zone in one.resting:
        told = silence(zone)
        if told:
            click.echo(safe(f"{zone.zone}: {told}"))
        else:
            click.echo(safe(f"{zone.zone} is asked again in {span(zone.rests_s)}: {zone.why or 'it had nothing'}"))


@fleet.command()
@click.argument("name", required=False)
@as_json
def recreate(name: str | None, as_json: bool) -> None:
    """Replace what is broken in the fleet NAME, now, and nothing else.

    \b
    tpu fleet recreate fleet-v3-8

    Broken slices are replaced by themselves; this looks at every zone at once, and tries those again that were left
    alone because they had no capacity.
    """
    with talking() as client:
        reply = client.recreate(_meant(client, name).name)
    if as_json:
        terminal.echo_json(reply)
        return
    missing = max(0, reply.wanted - reply.ready - reply.coming)
    click.echo(safe(f"{reply.pool}: {reply.ready} of {reply.wanted} ready, {reply.coming} coming, {missing} missing"))
    if reply.broken:
        click.echo(safe(f"being replaced: {', '.join(reply.broken)}"))
    if reply.retried:
        click.echo(safe(f"tried again now: {', '.join(reply.retried)}"))


@fleet.command()
@click.argument("name", required=False)
@click.option("--per-zone", type=int, metavar="N", help="Slices in each zone.")
@click.option("--zone", "--zones", "zones", multiple=True, metavar="ZONES", help="Names or patterns.")
@click.option("--yes", is_flag=True, help="Do not ask before slices go.")
@as_json
def resize(name: str | None, per_zone: int | None, zones: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Change how many slices the fleet NAME has in each zone, or where it is. Slices in use finish their job first.

    \b
    tpu fleet resize fleet-v3-8 --per-zone 2 --yes
    tpu fleet resize --zones us-central1-a
    """
    chosen = zone_words(zones)
    if per_zone is None and not chosen:
        raise click.UsageError("give --per-zone, --zones or both")
    with talking() as client:
        old = _meant(client, name)
        count = old.per_zone if per_zone is None else per_zone
        assert count is not None
        kept = [zone for zone in old.zones if not chosen or any(fnmatchcase(zone, word) for word in chosen)]
        if count < (old.per_zone or 0) or len(kept) < len(old.zones):
            confirm(f"{old.name}: of {many(old.slices, 'slice')} at most {count * len(kept)} stay. Go on?", yes)
        made = client.put_pool(old.name, _request(old, zones=chosen or old.zones, per_zone=count))
    if as_json:
        terminal.echo_json(made)
    else:
        click.echo(_sentence(made))


def _request(pool: PoolView, **changes: Any) -> PoolRequest:
    """A pool as a request, with some of it changed."""
    from penstock.wire.api import PoolRequest

    same = {name: getattr(pool, name) for name in PoolRequest.__struct_fields__}
    return PoolRequest(**{**same, **changes})


@fleet.command()
@click.argument("name", required=False)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--wait", type=SPAN, metavar="TIME", help="Stay until all is gone; exit code 1 if it is not by then.")
def delete(name: str | None, yes: bool, wait: float | None) -> None:
    """Delete the fleet NAME and all its slices. Those in use finish their job first; `tpu cancel` ends jobs.

    \b
    tpu fleet delete fleet-v3-8 --yes --wait 10m
    """
    with talking(stay=wait is not None) as client:
        meant = _meant(client, name)
        busy = sum(each.job is not None for each in client.slices() if each.pool == meant.name)
        used = f", {busy} of them in use" if busy else ""
        confirm(f"Delete {meant.name} with {many(meant.slices, 'slice')}{used}?", yes)
        client.delete_pool(meant.name)
        told = 0
        for left in looks(wait, lambda: [each for each in client.slices() if each.pool == meant.name]):
            if not left:
                break
            if len(left) != told:
                terminal.note(f"{safe(meant.name)}: {many(len(left), 'slice')} still there")
                told = len(left)
        else:
            if wait is not None:
                raise Refused(f"{meant.name}: {many(len(left), 'slice')} still there", CHECK_FAILED)
    click.echo(safe(f"{meant.name} is deleted" + ("" if wait is not None else "; `tpu slices` shows what still goes")))


# --- parts ---
def looks(wait: float | None, look: Callable[[], Any]) -> Iterator[Any]:
    """What there is, again and again until the time is over; nothing without a time."""
    until = None if wait is None else time.monotonic() + wait
    while until is not None:
        yield look()
        if time.monotonic() >= until:
            return
        time.sleep(LOOK_EVERY_S)


def _fleets(client: Client) -> list[PoolView]:
    return [pool for pool in client.pools() if pool.per_zone is not None]


def _meant(client: Client, name: str | None) -> PoolView:
    """The fleet of this name; without a name the only one there is."""
    found = _fleets(client)
    meant = [pool for pool in found if name in (None, pool.name)]
    if len(meant) == 1:
        return meant[0]
    there_are = f"there are {', '.join(pool.name for pool in found)}" if found else "there is none"
    if name is None and found:
        raise click.UsageError(safe(f"which fleet? {there_are}"))
    raise Refused(safe(f"fleet: {name!r} is not here; {there_are}" if name else "there is no fleet"), NOT_FOUND)


def _standing(client: Client, pool: PoolView) -> Standing:
    slices = _ordered([each for each in client.slices() if each.pool == pool.name])
    from penstock.domain.cloud import bought

    kind = bought(pool.spot, pool.cloud)
    resting = [
        zone
        for zone in client.zones()
        if (zone.provider, zone.accelerator, zone.spot) == (pool.provider, pool.accelerator, pool.spot)
        and zone.kind in ("", kind)  # an older server does not say more than `spot`
        and zone.zone in pool.zones
        and (zone.rests_s > 0 or zone.silent_since is not None)
    ]
    count = pool.per_zone or 0
    return Standing(
        name=pool.name,
        accelerator=pool.accelerator,
        zones=pool.zones,
        per_zone=count,
        wanted=count * len(pool.zones),
        ready=sum(each.state == "ready" for each in slices),
        coming=sum(each.state in ("intended", "creating") for each in slices),
        leaving=sum(each.state not in _STAYING for each in slices),
        slices=tuple(slices),
        resting=tuple(resting),
    )


def _ordered(slices: Sequence[SliceView]) -> list[SliceView]:
    """By zone and place; of two in one place the one that stays first."""

    def order(each: SliceView) -> tuple[str, int, bool, str]:
        number = each.title.rpartition("-")[2]
        return each.zone, int(number) if number.isdecimal() else 0, each.state not in _STAYING, each.id

    return sorted(slices, key=order)
