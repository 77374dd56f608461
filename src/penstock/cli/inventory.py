"""The shared inventory: `tpu find`, `tpu reserve`, `tpu release`.

What there is, who has it, since when and until when, from the server's live rows: nobody keeps a list by hand.
Reservations end by themselves. Values are checked by the server; patterns are read here, by a grammar and not by parts
of names.
"""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from penstock.cli import terminal
from penstock.cli.naming import meant
from penstock.cli.talk import talking
from penstock.cli.terminal import now_s, safe, span
from penstock.cli.words import SPAN, as_json

if TYPE_CHECKING:
    from penstock.wire.api import SliceView

DAY_S = 86400.0
DEFAULT_S = 12 * 3600.0
_CLOCK = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", re.ASCII)
_GENERATIONS = re.compile(r"v([2-9]+)", re.ASCII)
COLUMNS = (
    "id", "title", "accelerator", "chips", "hosts", "spot", "zone", "pool", "team", "state", "status", "user", "job",
    "since", "until", "note",
)  # fmt: skip


class Until(click.ParamType[float]):
    """How long from now, in seconds, written as an hour of the day (18:00) or as a time (3h)."""

    name = "time"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        match = _CLOCK.fullmatch(str(value).strip())
        if match is None:
            return SPAN.convert(value, param, ctx)
        now = time.localtime(now_s())
        wanted = (int(match[1]) * 60 + int(match[2])) * 60.0
        left = wanted - ((now.tm_hour * 60 + now.tm_min) * 60 + now.tm_sec)
        return left if left > 0 else left + DAY_S


def matches(pattern: str, accelerator: str) -> bool:
    """Whether a slice's accelerator is meant: v5e-8 in any spelling, v34 (v3 and v4), v5e, v*, v5e-*."""
    generation = accelerator.partition("-")[0]
    several = _GENERATIONS.fullmatch(pattern)
    if several is not None:
        return any(generation.startswith(f"v{digit}") for digit in several[1])
    if "*" in pattern or "?" in pattern:
        return fnmatchcase(accelerator, pattern)
    from penstock.domain import catalogue
    from penstock.domain.catalogue_names import family_of

    family = family_of(pattern)
    if family is not None:
        return family == family_of(generation)
    return catalogue.find(pattern).name == accelerator


def status(each: SliceView) -> str:
    """What the shared sheet said of a TPU: running, reserved, free, or what it is going through."""
    if each.job is not None:
        return "running"
    if each.state != "ready":
        return each.state
    return "free" if each.reserved is None else "reserved"


@click.command()
@click.argument("pattern", default="*")
@click.option("--spot", "-p", "spot", flag_value=True, type=bool, default=None, help="Only what may be taken away.")
@click.option("--on-demand", "-n", "spot", flag_value=False, type=bool, help="Only what may not.")
@click.option("--free", is_flag=True, help="Only what a job of yours could start on now.")
@click.option("--zone", metavar="PATTERN", help="Only in these zones, such as us-*.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, for a sheet.")
@as_json
def find(*, pattern: str, spot: bool | None, free: bool, zone: str | None, as_csv: bool, as_json: bool) -> None:
    """Show which slices there are of a kind, who has them, and until when.

    \b
    tpu find v34 --spot          spot slices of v3 and v4
    tpu find v5e-8 --free        what could be used now
    tpu find --csv > sheet.csv   all of it, for a sheet
    """
    with talking() as client:
        me = client.server().principal if free else ""
        found = [each for each in client.slices() if _meant(pattern, each.accelerator)]
    found = [
        each
        for each in found
        if (spot is None or each.spot is spot)
        and (zone is None or fnmatchcase(each.zone, zone))
        and (not free or status(each) == "free" or (status(each) == "reserved" and _holder(each) == me))
    ]
    if as_csv:
        echo_csv(found)
    elif as_json:
        terminal.echo_json(found)
    elif not found:
        click.echo("no such slices")
    else:
        header = ("SLICE", "ACCELERATOR", "SPOT", "ZONE", "POOL", "STATUS", "WHO", "SINCE", "UNTIL", "WHAT")
        terminal.echo_table(header, [_row(each) for each in found], spare=("POOL", "SPOT", "ZONE"))


def _meant(pattern: str, accelerator: str) -> bool:
    try:
        return matches(pattern, accelerator)
    except ValueError as error:
        raise click.UsageError(f"PATTERN: {error}; or write v34, v5e, v5e-* or *") from error


def _holder(each: SliceView) -> str:
    return each.reserved.user if each.reserved is not None else ""


def _times(each: SliceView) -> tuple[float | None, float | None]:
    """Since when it is as it is, and until when at the latest."""
    if each.job is not None:
        return each.held_since, each.held_until
    if each.reserved is not None:
        return each.reserved.since, each.reserved.until
    return (each.idle_since if each.state == "ready" else each.made_at), None


def _what(each: SliceView) -> str:
    """The job, and the reservation that waits behind another's."""
    words = [each.job or ""]
    if each.reserved is not None:
        if each.job is not None:
            words.append(f"reserved by {each.reserved.user}")
        words.append(each.reserved.note)
    return ", ".join(word for word in words if word)


def _row(each: SliceView) -> tuple[str, ...]:
    since, until = _times(each)
    return (
        safe(each.title or each.id),
        each.accelerator,
        "spot" if each.spot else "-",
        safe(each.zone),
        safe(each.pool),
        status(each),
        safe(each.user or _holder(each) or "-"),
        "-" if since is None else span(now_s() - since),
        "-" if until is None else f"in {span(until - now_s())}",
        safe(_what(each)),
    )


def echo_csv(found: Iterable[SliceView]) -> None:
    """One line per slice. Cells that a sheet would read as a formula are quoted as text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for each in found:
        since, until = _times(each)
        cells = (
            each.id, each.title, each.accelerator, each.chips, each.hosts, "yes" if each.spot else "no", each.zone,
            each.pool, each.team, each.state, status(each), each.user or _holder(each), each.job or "",
            _stamp(since), _stamp(until), each.reserved.note if each.reserved is not None else "",
        )  # fmt: skip
        writer.writerow([_tame(cell) if isinstance(cell, str) else cell for cell in cells])
    click.echo(text.getvalue(), nl=False)


def _tame(cell: str) -> str:
    plain = safe(cell)
    return f"'{plain}" if plain[:1] in ("=", "+", "-", "@") else plain


def _stamp(at: float | None) -> str:
    return "" if at is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _target(word: str) -> tuple[str | None, str | None]:
    """(slice, None) or (None, pool): `pool:NAME`, the pool of that name, else a slice by its id or its name."""
    if word.startswith("pool:"):
        return None, word.removeprefix("pool:")
    with talking() as client:
        if any(word == pool.name for pool in client.pools()):
            return None, word
        return meant(client, word.removeprefix("slice:")).id, None


@click.command()
@click.argument("target", metavar="SLICE|POOL")
@click.option("--until", type=Until(), default=DEFAULT_S, metavar="TIME", help="18:00, or 3h.  [default: 12h]")
@click.option("--note", default="", metavar="TEXT", help="What for; others see it.")
@click.option("--for", "user", metavar="USER", help="For somebody else; administrators only.")
@as_json
def reserve(*, target: str, until: float, note: str, user: str | None, as_json: bool) -> None:
    """Keep a slice or a pool for your own jobs.

    \b
    tpu reserve tpu-us-central1-a-0 --until 18:00 --note 'demo'
    tpu reserve pool:big --until 2h

    What runs there goes on; nobody else's jobs start there until it ends, by itself or by `tpu release`.
    """
    slice, pool = _target(target)
    with talking() as client:
        made = client.reserve(slice, pool=pool, for_s=until, note=note, user=user)
    if as_json:
        terminal.echo_json(made)
    else:
        known = target if slice is not None else made.of
        click.echo(f"{safe(known)}: reserved for {safe(made.user)} until {terminal.moment(made.until)}")


@click.command()
@click.argument("target", metavar="SLICE|POOL")
@as_json
def release(target: str, as_json: bool) -> None:
    """Give back what you reserved.

    \b
    tpu release tpu-us-central1-a-0      a slice, by its name or id
    tpu release pool:big                 a pool
    """
    slice, pool = _target(target)
    with talking() as client:
        client.release(slice, pool=pool)
        found = client.slices() if slice is not None else ()
    # A slice of a reserved pool stays reserved with it.
    still = next((each.reserved for each in found if each.id == slice), None)
    if as_json:
        terminal.echo_json({"of": slice or f"pool:{pool}", "reserved": still})
        return
    rest = "" if still is None else f"; {still.of} still is, for {still.user}"
    click.echo(safe(f"{target}: no longer reserved{rest}"))
