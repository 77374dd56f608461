"""Capacity in daily work: `tpu pools`, `tpu queues`, `tpu slices`.

Each lists when it is called alone; `set` makes or changes, `rm` removes. Values are checked by the server. What the
numbers mean for placement is in docs/explanation/planning.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli import terminal
from penstock.cli.talk import talking
from penstock.cli.terminal import now_s, safe, span
from penstock.cli.words import SPAN, as_json, slice_filters

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.domain.cloud import CloudWish, Mount
    from penstock.wire.api import SliceView


@click.group(invoke_without_command=True)
@as_json
@click.pass_context
def pools(context: click.Context, as_json: bool) -> None:
    """Where slices come from.

    \b
    tpu pools                                             list them
    tpu pools set big --on v5e-8 --max 4                  make or change one
    tpu pool create spot --type v5e-8 --zones us-* --max 40 --spot      slices of a cloud
    tpu pools rm big                                      remove it
    """
    if context.invoked_subcommand is not None:
        return
    with talking() as client:
        found = client.pools()
    if as_json:
        terminal.echo_json(found)
    elif not found:
        click.echo("no pools; `tpu pools set NAME --on ACCELERATOR` makes one")
    else:
        rows = [
            (
                safe(pool.name),
                pool.accelerator,
                pool.provider,
                safe(",".join(pool.zones)),
                f"{pool.slices} of {pool.min}..{pool.max}",
                pool.cloud.kind if pool.cloud is not None else "spot" if pool.spot else "-",
                span(pool.idle_s),
                safe(pool.team),
            )
            for pool in found
        ]
        terminal.echo_table(("NAME", "ACCELERATOR", "PROVIDER", "ZONES", "SLICES", "BOUGHT", "IDLE", "TEAM"), rows)


_MOUNT = "KIND:SOURCE:PATH"


def _mount(word: str) -> Mount:
    """nfs:HOST:/EXPORT:/mnt/x, gcs:BUCKET:/mnt/x or disk:NAME:/mnt/x."""
    from penstock.domain.cloud import Mount

    kind, _, rest = word.partition(":")
    source, _, path = rest.rpartition(":")
    if not (kind and source and path):
        raise click.UsageError(f"--mount: {word!r} is not {_MOUNT}; such as nfs:10.0.0.2:/export:/mnt/data")
    return Mount(kind, source, path)


@pools.command(name="set")
@click.argument("name")
@click.option(
    "--on", "--type", "accelerator", required=True, metavar="ACCELERATOR", help="What its slices are, such as v5e-8."
)
@click.option("--provider", help="Who makes them: local or tpu_vm.  [default: tpu_vm with zones, else local]")
@click.option("--zone", "--zones", "zones", multiple=True, metavar="ZONES", help="Where: names or patterns (us-*).")
@click.option("--min", "least", type=int, default=0, show_default=True, help="Slices kept, wanted or not.")
@click.option("--max", "most", type=int, default=1, show_default=True, help="Slices at most.")
@click.option("--spot", "kind", flag_value="spot", help="Cheap, and may be taken away.")
@click.option("--preemptible", "kind", flag_value="preemptible", help="The same in its older form, for a day at most.")
@click.option("--flex-start", "kind", flag_value="flex-start", help="Waits in the cloud's queue; ends after --life.")
@click.option("--reserved", "reservation", metavar="NAME", help="From this reservation; `any`: from whichever fits.")
@click.option("--queued", is_flag=True, help="Ask by a queued resource where a node would do.")
@click.option("--wait", type=SPAN, metavar="TIME", help="Give a queued request up after so long.")
@click.option("--life", type=SPAN, metavar="TIME", help="Of flex-start slices.  [default: 7d]")
@click.option("--idle", type=SPAN, default="10m", show_default=True, help="How long an unused slice is kept.")
@click.option("--runtime-version", default="", metavar="NAME", help="Image of the hosts.  [default: the catalogue's]")
@click.option("--network", default="", metavar="NAME", help="Of the hosts.")
@click.option("--subnetwork", default="", metavar="NAME", help="Of the hosts.")
@click.option("--service-account", default="", metavar="EMAIL", help="Whom the hosts act as.")
@click.option("--no-external-ip", is_flag=True, help="Hosts have no address of their own outside the network.")
@click.option("--network-tag", "tags", multiple=True, metavar="TAG", help="Of the hosts; may be repeated.")
@click.option("--disk", "disks", multiple=True, metavar="NAME", help="Attach this disk read-only; may be repeated.")
@click.option("--mount", "mounts", multiple=True, metavar=_MOUNT, help="On every host, nfs, gcs or disk; repeatable.")
@as_json
def set_pool(
    *,
    name: str,
    accelerator: str,
    provider: str | None,
    zones: tuple[str, ...],
    least: int,
    most: int,
    kind: str | None,
    reservation: str | None,
    idle: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Make the pool NAME, or change it to this.

    \b
    tpu pools set big --on v5e-8 --max 4
    tpu pool create spot --type v5e-8 --zones us-*,europe-west4-a --max 40 --spot --idle 10m
    """
    from penstock.wire.api import PoolRequest

    chosen = tuple(zone.strip() for word in zones for zone in word.split(",") if zone.strip())
    cloudy = chosen not in ((), ("local",))
    maker = provider or ("tpu_vm" if cloudy else "local")
    request = PoolRequest(
        accelerator=accelerator,
        provider=maker,
        zones=chosen or ("local",),
        min=least,
        max=most,
        spot=kind in ("spot", "preemptible"),
        idle_s=idle,
        cloud=_wish(kind, reservation, options) if maker != "local" else None,
    )
    if maker == "local" and (kind not in (None, "spot") or reservation or any(options.values())):
        raise click.UsageError("these options are for slices of a cloud; name its zones with --zones")
    with talking(start=True) as client:
        pool = client.put_pool(name, request)
    if as_json:
        terminal.echo_json(pool)
    else:
        where = f" in {', '.join(pool.zones)}" if cloudy else ""
        click.echo(f"{safe(pool.name)}: {pool.min} to {pool.max} slices of {pool.accelerator}{safe(where)}")


def _wish(kind: str | None, reservation: str | None, options: dict[str, Any]) -> CloudWish:
    from penstock.domain.cloud import ON_DEMAND, RESERVED, CloudWish

    if reservation and kind is not None:
        raise click.UsageError(f"--reserved and --{kind}: a slice is bought in one way; leave one out")
    return CloudWish(
        kind=RESERVED if reservation else kind or ON_DEMAND,
        reservation="" if reservation in (None, "any") else reservation,
        queued=options["queued"],
        wait_s=options["wait"],
        life_s=options["life"],
        runtime_version=options["runtime_version"],
        network=options["network"],
        subnetwork=options["subnetwork"],
        service_account=options["service_account"],
        external_ip=not options["no_external_ip"],
        tags=options["tags"],
        disks=options["disks"],
        mounts=tuple(_mount(word) for word in options["mounts"]),
    )


pools.add_command(set_pool, "create")


@pools.command(name="rm")
@click.argument("name")
def remove_pool(name: str) -> None:
    """Remove the pool NAME; its slices go when their jobs have ended."""
    with talking() as client:
        client.delete_pool(name)


@click.group(invoke_without_command=True)
@as_json
@click.pass_context
def queues(context: click.Context, as_json: bool) -> None:
    """Where jobs wait, and how teams share.

    \b
    tpu queues                                     list them
    tpu queues set night --quota 64 --weight 2     make or change one
    tpu queues set night --paused                  nothing of it starts
    tpu queues rm night                            remove it, once no job is in it
    """
    if context.invoked_subcommand is not None:
        return
    with talking() as client:
        found = client.queues()
    if as_json:
        terminal.echo_json(found)
    elif not found:
        click.echo("no queues")
    else:
        rows = [
            (
                safe(queue.name),
                str(queue.waiting),
                "-" if queue.quota_chips is None else str(queue.quota_chips),
                "-" if queue.borrow_chips is None else str(queue.borrow_chips),
                f"{queue.weight:g}",
                str(queue.band),
                "paused" if queue.paused else "-",
                safe(queue.team),
            )
            for queue in found
        ]
        header = ("NAME", "WAITING", "QUOTA", "BORROW", "WEIGHT", "BAND", "", "TEAM")
        terminal.echo_table(header, rows, right=("WAITING", "QUOTA", "BORROW", "WEIGHT", "BAND"))


@queues.command(name="set")
@click.argument("name")
@click.option("--weight", type=float, default=1.0, show_default=True, help="Its share beside others.")
@click.option("--quota", type=int, metavar="CHIPS", help="Chips it owns. Default: no limit.")
@click.option("--borrow", type=int, metavar="CHIPS", help="Chips it may borrow from idle queues.")
@click.option("--band", type=int, default=0, show_default=True, help="Higher bands go first and may take slices back.")
@click.option("--paused/--running", default=False, help="Whether nothing of it starts.")
@as_json
def set_queue(
    name: str, weight: float, quota: int | None, borrow: int | None, band: int, paused: bool, as_json: bool
) -> None:
    """Make the queue NAME, or change it to this."""
    from penstock.wire.api import QueueRequest

    request = QueueRequest(weight=weight, quota_chips=quota, borrow_chips=borrow, band=band, paused=paused)
    with talking(start=True) as client:
        queue = client.put_queue(name, request)
    if as_json:
        terminal.echo_json(queue)
    else:
        click.echo(f"{safe(queue.name)}: weight {queue.weight:g}" + (", paused" if queue.paused else ""))


@queues.command(name="rm")
@click.argument("name")
def remove_queue(name: str) -> None:
    """Remove the queue NAME. Refused while a job is in it that has not ended."""
    with talking() as client:
        client.delete_queue(name)


@click.command()
@click.option("--pool", metavar="NAME", help="Only slices of this pool.")
@slice_filters
@as_json
def slices(
    *, pool: str | None, user: str | None, state: str | None, tag: str | None, since: float | None, as_json: bool
) -> None:
    """List slices: what there is, who uses it, what is free."""
    with talking() as client:
        found = [each for each in chosen_slices(client, user, state, tag, since) if pool in (None, each.pool)]
    if as_json:
        terminal.echo_json(found)
    elif not found:
        click.echo("no slices")
    else:
        header = ("ID", "ACCELERATOR", "STATE", "POOL", "ZONE", "HOSTS", "SPOT", "JOB", "")
        terminal.echo_table(header, [_slice_row(each) for each in found], right=("HOSTS",))


def chosen_slices(
    client: Client, user: str | None, state: str | None, tag: str | None, since: float | None
) -> list[SliceView]:
    """The slices that `slice_filters` let through."""
    states = None if state is None else state.split(",")
    begin = 0.0 if since is None else now_s() - since
    return [
        each
        for each in client.slices()
        if (user is None or each.user == user)
        and (states is None or each.state in states)
        and (tag is None or tag in each.tags)
        and each.made_at >= begin
    ]


def _slice_row(each: SliceView) -> tuple[str, ...]:
    if each.job is not None or each.attempt is not None:
        used = each.job or each.attempt or "-"
    else:
        used = "free" if each.state == "ready" else "-"
    idle = "" if each.idle_since is None else f"idle for {span(now_s() - each.idle_since)}"
    return (
        each.id,
        each.accelerator,
        terminal.state(each.state),
        safe(each.pool),
        safe(each.zone),
        str(each.hosts),
        "spot" if each.spot else "-",
        used,
        safe(each.why) or safe(each.arriving) or idle,
    )
