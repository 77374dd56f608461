"""Capacity in daily work: `tpu pools`, `tpu queues`, `tpu slices`.

Each lists when it is called alone; `set` makes or changes, `rm` removes. Values are checked by the server. What the
numbers mean for placement is in docs/explanation/planning.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import terminal
from penstock.cli.cloud_options import cloud_options, wish, zone_words
from penstock.cli.talk import talking
from penstock.cli.terminal import many, now_s, safe, span
from penstock.cli.words import BUDGET, SPAN, as_json, slice_filters

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.wire.api import QueueRequest, QueueView, SliceView


@click.group(invoke_without_command=True)
@as_json
@click.pass_context
def pools(context: click.Context, as_json: bool) -> None:
    """Where slices come from.

    \b
    tpu pools                                             list them
    tpu pools set big --on v5e-8 --max 4                  make or change one
    tpu pool create spot --type v5e-8 --zones 'us-*' --max 40 --spot
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
                f"{pool.slices} of " + (f"{pool.min}..{pool.max}" if pool.per_zone is None else str(pool.max)),
                pool.cloud.kind if pool.cloud is not None else "spot" if pool.spot else "-",
                span(pool.idle_s) if pool.per_zone is None else "-",  # a fleet keeps its slices however idle
                safe(pool.team),
            )
            for pool in found
        ]
        header = ("NAME", "ACCELERATOR", "PROVIDER", "ZONES", "SLICES", "BOUGHT", "IDLE", "TEAM")
        terminal.echo_table(header, rows, spare=("TEAM", "PROVIDER", "IDLE"))


@pools.command(name="set")
@click.argument("name")
@click.option(
    "--on", "--type", "accelerator", required=True, metavar="ACCELERATOR", help="What its slices are, such as v5e-8."
)
@click.option("--provider", help="Who makes them: local or tpu_vm.  [default: tpu_vm with zones, else local]")
@click.option("--zone", "--zones", "zones", multiple=True, metavar="ZONES", help="Where: names or patterns (us-*).")
@click.option("--min", "least", type=int, default=0, show_default=True, help="Slices kept, wanted or not.")
@click.option("--max", "most", type=int, default=1, show_default=True, help="Slices at most.")
@click.option("--idle", type=SPAN, default="10m", show_default=True, help="How long an unused slice is kept.")
@click.option(
    "--race", type=int, metavar="N", help="Ask N zones at once, keep the slice that is ready first.  [default: 1]"
)
@cloud_options
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
    race: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Make the pool NAME, or change it to this.

    \b
    tpu pools set big --on v5e-8 --max 4
    tpu pool create spot --type v5e-8 --zones 'us-*' --max 40 --spot --idle 10m
    tpu pool create fast --type v5e-8 --zones 'us-*' --race 3    the first of 3
    """
    from penstock.wire.api import PoolRequest

    chosen = zone_words(zones)
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
        cloud=wish(kind, reservation, options) if maker != "local" else None,
        race=race,
    )
    if maker == "local" and (kind not in (None, "spot") or reservation or race or any(options.values())):
        raise click.UsageError("these options are for slices of a cloud; name its zones with --zones")
    with talking(start=True) as client:
        pool = client.put_pool(name, request)
    if as_json:
        terminal.echo_json(pool)
    else:
        where = f" in {', '.join(pool.zones)}" if cloudy else ""
        if pool.race > 1:
            where += f", {min(pool.race, len(pool.zones))} zones at once"
        click.echo(f"{safe(pool.name)}: {pool.min} to {pool.max} slices of {pool.accelerator}{safe(where)}")


pools.add_command(set_pool, "create")


@pools.command(name="rm")
@click.argument("name")
@as_json
def remove_pool(name: str, as_json: bool) -> None:
    """Remove the pool NAME; its slices go when their jobs have ended.

    \b
    tpu pools rm spot
    """
    with talking() as client:
        client.delete_pool(name)
        left = [each for each in client.slices() if each.pool == name]
    busy = sum(each.job is not None for each in left)
    if as_json:
        terminal.echo_json({"name": name, "removed": True, "slices": len(left), "in_use": busy})
    elif not left:
        click.echo(safe(f"{name} is removed; it had no slices"))
    else:
        going = f"{many(len(left), 'slice')} of it {'is' if len(left) == 1 else 'are'} let go"
        rest = f", {busy} of them when {'its job has' if busy == 1 else 'their jobs have'} ended" if busy else ""
        click.echo(safe(f"{name} is removed; {going}{rest}"))


@click.group(invoke_without_command=True)
@as_json
@click.pass_context
def queues(context: click.Context, as_json: bool) -> None:
    """Where jobs wait, and how teams share.

    \b
    tpu queues                                     list them
    tpu queues set night --quota 64 --weight 2     make or change one
    tpu queues set night --paused                  nothing of it starts
    tpu queues set night --budget 500usd/month     nothing new once that is spent
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
                _budget(queue),
                "paused" if queue.paused else "running",
                safe(queue.team),
            )
            for queue in found
        ]
        header = ("NAME", "WAITING", "QUOTA", "BORROW", "WEIGHT", "BAND", "BUDGET", "STATE", "TEAM")
        terminal.echo_table(header, rows, right=("WAITING", "QUOTA", "BORROW", "WEIGHT", "BAND"))


@queues.command(name="set")
@click.argument("name")
@click.option("--weight", type=float, help="Its share beside others; a new one has 1.")
@click.option("--quota", type=int, metavar="CHIPS", help="Chips it owns; a new one has no limit.")
@click.option("--borrow", type=int, metavar="CHIPS", help="Chips it may borrow from idle queues.")
@click.option("--band", type=int, help="Higher bands go first and may take slices back; a new one has 0.")
@click.option("--paused/--running", default=None, help="Whether nothing of it starts.")
@click.option("--budget", type=BUDGET, metavar="AMOUNT", help="Nothing new starts when it is spent: 500usd/month.")
@click.option("--no", type=click.Choice(["quota", "borrow", "budget"]), multiple=True, help="Take this limit away.")
@as_json
def set_queue(*, name: str, no: tuple[str, ...], as_json: bool, **wanted: object) -> None:
    """Make the queue NAME, or change what you name of it; the rest stays."""
    with talking(start=True) as client:
        before = next((queue for queue in client.queues() if queue.name == name), None)
        queue = client.put_queue(name, _changed(before, wanted, no))
    if as_json:
        terminal.echo_json(queue)
        return
    facts = [f"weight {queue.weight:g}"]
    facts += [f"quota {queue.quota_chips} chips"] if queue.quota_chips is not None else []
    facts += [f"borrows {queue.borrow_chips} chips"] if queue.borrow_chips is not None else []
    facts += [f"band {queue.band}"] if queue.band else []
    facts += [f"budget {_budget(queue)}"] if queue.budget is not None else []
    facts += ["paused"] if queue.paused else []
    click.echo(f"{safe(queue.name)}: {', '.join(facts)}")


def _changed(before: QueueView | None, wanted: Mapping[str, object], no: Sequence[str]) -> QueueRequest:
    """The whole queue, which is what the server is told: what was there, with what was named changed."""
    from penstock.domain.budgets import Unit, Window
    from penstock.wire.api import QueueRequest
    from penstock.wire.inventory import BudgetRequest

    chips = {"quota": "quota_chips", "borrow": "borrow_chips"}
    named = {chips.get(key, key): value for key, value in wanted.items() if value is not None}
    kept: dict[str, Any] = {}
    if before is not None:
        kept = {key: getattr(before, key) for key in ("weight", "quota_chips", "borrow_chips", "band", "paused")}
        budget = before.budget
        if budget is not None:
            kept["budget"] = BudgetRequest(limit=budget.limit, unit=Unit(budget.unit), window=Window(budget.window))
    gone = dict.fromkeys(chips.get(limit, limit) for limit in no)
    return QueueRequest(**{**kept, **gone, **named})


def _budget(queue: QueueView) -> str:
    if queue.budget is None:
        return "-"
    from penstock.domain.budgets import Unit, amount

    unit = Unit(queue.budget.unit)
    least = "at least " if unit is Unit.USD and queue.budget.unpriced_chip_s else ""
    spent, limit = amount(queue.budget.spent, unit), amount(queue.budget.limit, unit)
    return f"{least}{spent} of {limit} per {queue.budget.window}"


@queues.command(name="rm")
@click.argument("name")
@as_json
def remove_queue(name: str, as_json: bool) -> None:
    """Remove the queue NAME. Refused while a job is in it that has not ended.

    \b
    tpu queues rm night
    """
    with talking() as client:
        client.delete_queue(name)
    if as_json:
        terminal.echo_json({"name": name, "removed": True})
    else:
        click.echo(safe(f"{name} is removed"))


@click.command()
@click.option("--pool", metavar="NAME", help="Only slices of this pool.")
@slice_filters
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, for a sheet.")
@as_json
def slices(
    *,
    pool: str | None,
    user: str | None,
    state: str | None,
    tag: str | None,
    since: float | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """List slices: what there is, who uses it, what is free.

    \b
    tpu slices --pool spot
    tpu slices --state creating       how far the hosts of new slices are
    """
    with talking() as client:
        found = [each for each in chosen_slices(client, user, state, tag, since) if pool in (None, each.pool)]
    if as_csv:
        from penstock.cli.inventory import echo_csv

        echo_csv(found)
    elif as_json:
        terminal.echo_json(found)
    elif not found:
        click.echo("no slices")
    else:
        header: tuple[str, ...] = ("ID", "ACCELERATOR", "STATE", "POOL", "ZONE", "HOSTS", "SPOT", "JOB", "")
        rows = [_slice_row(each) for each in found]
        if any(each.title not in ("", each.id) for each in found):
            header = ("NAME", *header)
            rows = [(safe(each.title or each.id), *row) for each, row in zip(found, rows, strict=True)]
        # A slice that has a name is known by it; one that has none shows its id as its name.
        spare = ("HOSTS", "SPOT", "POOL", *(["ID"] if header[0] == "NAME" else []), "ZONE")
        terminal.echo_table(header, rows, right=("HOSTS",), spare=spare)


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
