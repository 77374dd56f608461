"""`tpu cost`: where chip-time and money went, by job, user, queue or zone; or what one job used, and how often to save.

Shows what `GET /v1/cost` and `GET /v1/jobs/ID/cost` answer. A price nobody knows is shown as unknown, never as nothing.
What the columns mean is in docs/explanation/cost.md. Nothing is summed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli import terminal
from penstock.cli.talk import talking
from penstock.cli.terminal import moment, now_s, safe, span
from penstock.cli.words import JOB, SPAN, as_json

if TYPE_CHECKING:
    from penstock.wire.cost import CostPage, CostRow, JobCost

HOUR_S = 3600.0
WEEK_S = 7 * 86400.0
NAMES = {"nobody": "(nobody)", "forgotten": "(cleaned away)", "others": "(others)", "total": "total"}
HEADER = ("CHIP-HOURS", "USEFUL", "LOST", "UNKNOWN", "SET-UP", "IDLE", "QUEUED", "GOODPUT", "COST")


@click.command()
@click.argument("job", type=JOB, required=False)
@click.option("--by", type=click.Choice(("job", "user", "queue", "zone")), default="job", show_default=True)
@click.option("--since", type=SPAN, default=WEEK_S, metavar="TIME", help="Of this time: 12h, 7d.  [default: 7d]")
@click.option("--until", type=SPAN, default=0.0, metavar="TIME", help="Until so long ago.  [default: now]")
@click.option("--limit", type=int, default=None, metavar="N", help="Rows at most; the others are summed up.")
@as_json
def cost(*, job: str | None, by: str, since: float, until: float, limit: int | None, as_json: bool) -> None:
    """Show where chip-time and money went.

    \b
    tpu cost                          jobs of the last 7 days, the largest first
    tpu cost --by user --since 30d    who used it
    tpu cost --by zone                where it stood idle
    tpu cost JOB                      one job, and how often it should save

    QUEUED is time that jobs waited for chips; nobody held those, and nobody pays for them.
    """
    with talking() as client:
        if job is not None:
            one = client.job_cost(job)
            if as_json:
                terminal.echo_json(one)
            else:
                terminal.echo_facts([("job", one.id), *facts(one)])
            return
        now = now_s()
        page = client.cost(by, since=now - since, until=now - until if until else None, limit=limit)
    if as_json:
        terminal.echo_json(page)
    else:
        _show(page)


def _show(page: CostPage) -> None:
    click.echo(f"{moment(page.since)} to {moment(page.until)}")
    rows = [_cells(row) for row in (*page.rows, page.total)]
    terminal.echo_table((page.by.upper(), *HEADER), rows, right=HEADER, spare=("UNKNOWN", "QUEUED", "SET-UP"))
    if page.total.unpriced_chip_s:
        hours = _hours(page.total.unpriced_chip_s)
        click.echo(
            f"{hours} chip-hours have no known price (`tpu catalog --gaps`); the rest is {usd(page.total.usd_known)}"
        )


def _cells(row: CostRow) -> tuple[str, ...]:
    times = (
        row.chip_s,
        row.useful_chip_s,
        row.lost_chip_s,
        row.unknown_chip_s,
        row.setup_chip_s,
        row.idle_chip_s,
        row.waited_chip_s,
    )
    return (
        safe(NAMES.get(row.kind, row.key)),
        *(_hours(chip_s) for chip_s in times),
        _share(row.goodput),
        usd(row.usd),
    )


def _hours(chip_s: float) -> str:
    hours = chip_s / HOUR_S
    return "-" if not hours else f"{hours:,.2f}" if hours < 100 else f"{hours:,.0f}"


def _share(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def usd(amount: float | None) -> str:
    return "unknown" if amount is None else f"${amount:,.2f}"


def facts(one: JobCost) -> list[tuple[str, str]]:
    """One job's use in words; `tpu show` has them as well."""
    row = one.row
    parts = (
        ("useful", row.useful_chip_s),
        ("lost", row.lost_chip_s),
        ("not known yet" if row.attempts and not row.lost_chip_s else "unknown", row.unknown_chip_s),
        ("set-up", row.setup_chip_s),
    )
    used = ", ".join(f"{_hours(chip_s)} {name}" for name, chip_s in parts if chip_s)
    return [
        ("chip-hours", f"{_hours(row.chip_s)}" + (f" ({used})" if used else "")),
        ("waited", f"{_hours(row.waited_chip_s)} chip-hours in the queue" if row.waited_chip_s else ""),
        ("goodput", goodput(row)),
        ("costs", usd(row.usd)),
        ("lost capacity", _losses(one)),
        ("checkpoints", _saves(one)),
        ("save every", span(one.save_every_s) if one.save_every_s is not None else _unknown(one)),
    ]


def goodput(row: CostRow) -> str:
    if row.goodput is None:
        return ""
    open_share = row.unknown_chip_s / row.chip_s
    return _share(row.goodput) + (f" at least; of {_share(open_share)} nobody knows" if open_share >= 0.005 else "")


def _losses(one: JobCost) -> str:
    times = "never" if not one.losses else "once" if one.losses == 1 else f"{one.losses} times"
    between = "" if one.between_losses_s is None else f"; expected every {span(one.between_losses_s)}"
    return times + between


def _saves(one: JobCost) -> str:
    if not one.saves:
        return "none that the server has seen"
    cost_s = "; what one costs is unknown" if one.save_s is None else f"; one takes {one.save_s:.1f}s"
    return f"{one.saves}{cost_s}"


def _unknown(one: JobCost) -> str:
    return f"unknown: {one.advice}" if one.advice else ""
