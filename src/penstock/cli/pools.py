"""Capacity in daily work: `tpu pools`, `tpu queues`, `tpu slices`.

Each lists when it is called alone; `set` makes or changes, `rm` removes. Values are checked by the server. What the
numbers mean for placement is in docs/explanation/planning.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli import terminal
from penstock.cli.talk import talking
from penstock.cli.terminal import now_s, safe, span
from penstock.cli.words import SPAN, as_json

if TYPE_CHECKING:
    from penstock.wire.api import SliceView


@click.group(invoke_without_command=True)
@as_json
@click.pass_context
def pools(context: click.Context, as_json: bool) -> None:
    """Where slices come from.

    \b
    tpu pools                                             list them
    tpu pools set big --on v5e-8 --max 4                  make or change one
    tpu pools set spot --on v4-8 --spot --zone us-central2-b --provider tpu_vm
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
                "spot" if pool.spot else "-",
                span(pool.idle_s),
                safe(pool.team),
            )
            for pool in found
        ]
        terminal.echo_table(("NAME", "ACCELERATOR", "PROVIDER", "ZONES", "SLICES", "SPOT", "IDLE", "TEAM"), rows)


@pools.command(name="set")
@click.argument("name")
@click.option("--on", "accelerator", required=True, metavar="ACCELERATOR", help="What its slices are, such as v5e-8.")
@click.option("--provider", default="local", show_default=True, help="Who makes them.")
@click.option("--zone", "zones", multiple=True, metavar="ZONE", help="Where; may be repeated.")
@click.option("--min", "least", type=int, default=0, show_default=True, help="Slices kept, wanted or not.")
@click.option("--max", "most", type=int, default=1, show_default=True, help="Slices at most.")
@click.option("--spot", is_flag=True, help="Cheap, and may be taken away.")
@click.option("--idle", type=SPAN, default="10m", show_default=True, help="How long an unused slice is kept.")
@as_json
def set_pool(
    *,
    name: str,
    accelerator: str,
    provider: str,
    zones: tuple[str, ...],
    least: int,
    most: int,
    spot: bool,
    idle: float,
    as_json: bool,
) -> None:
    """Make the pool NAME, or change it to this."""
    from penstock.wire.api import PoolRequest

    request = PoolRequest(
        accelerator=accelerator,
        provider=provider,
        zones=zones or ("local",),
        min=least,
        max=most,
        spot=spot,
        idle_s=idle,
    )
    with talking(start=True) as client:
        pool = client.put_pool(name, request)
    if as_json:
        terminal.echo_json(pool)
    else:
        click.echo(f"{safe(pool.name)}: {pool.min} to {pool.max} slices of {pool.accelerator}")


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


@click.command()
@click.option("--pool", metavar="NAME", help="Only slices of this pool.")
@click.option("--state", metavar="STATE", help="Only slices in this state.")
@as_json
def slices(pool: str | None, state: str | None, as_json: bool) -> None:
    """List slices: what there is, who uses it, what is free."""
    with talking() as client:
        found = [each for each in client.slices() if pool in (None, each.pool) and state in (None, each.state)]
    if as_json:
        terminal.echo_json(found)
    elif not found:
        click.echo("no slices")
    else:
        header = ("ID", "ACCELERATOR", "STATE", "POOL", "ZONE", "HOSTS", "SPOT", "JOB", "")
        terminal.echo_table(header, [_slice_row(each) for each in found], right=("HOSTS",))


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
        safe(each.why) or idle,
    )
