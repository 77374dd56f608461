"""`tpu run --dry-run`: what would be sent, where it could run, and what that would cost at most.

Shows a request instead of submitting it: the files are counted, not sent. Prices are list prices of the catalogue, with
their gaps said. It must not change anything anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from penstock.cli import terminal
from penstock.domain import limits

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.cli.words import Members
    from penstock.client.client import Client
    from penstock.wire.api import JobRequest, PoolView


def echo_dry_run(client: Client, request: JobRequest, place: Path | None, array: Members | None, as_json: bool) -> None:
    """Print what submitting `request` would do."""
    files, count = _measured(place)
    pools = _pools(client, request)
    jobs = 1 if array is None else len(array.indices)
    hour = _usd_per_hour(request, pools)
    most = None if hour is None else hour * (request.timeout_s or limits.TIMEOUT_S_DEFAULT) / 3600 * jobs
    if as_json:
        terminal.echo_json(
            {
                "request": request,
                "jobs": jobs,
                "files": files,
                "bytes": count,
                "pools": [pool.name for pool in pools],
                "usd_per_hour": hour,
                "usd_at_most": most,
            }
        )
        return
    payload = msgspec.to_builtins(request.payload)
    facts = [
        ("would run", terminal.safe(" ".join(payload["argv"]))),
        ("frozen", "nothing" if place is None else f"{files} files, {terminal.size(count)} of {place}"),
        ("jobs", str(jobs)),
        ("on", ", ".join(request.on) or request.pool or request.slice or "the server's default"),
        (
            "pools",
            ", ".join(terminal.safe(pool.name) for pool in pools)
            or "none yet; local capacity makes one when a job asks",
        ),
        ("rule", request.rule),
        ("cost", _cost(hour, most, request.timeout_s, sure=bool(pools))),
    ]
    terminal.echo_facts(facts)
    click.echo("nothing was sent")


def _measured(place: Path | None) -> tuple[int, int]:
    if place is None:
        return 0, 0
    from penstock.client.upload import measure_directory

    return measure_directory(place)


def _pools(client: Client, request: JobRequest) -> list[PoolView]:
    """The pools that could hold it."""
    return [
        pool
        for pool in client.pools()
        if (request.pool is None or pool.name == request.pool)
        and (not request.on or pool.accelerator in request.on)
        and (request.spot is None or pool.spot == request.spot)
        and (not request.zones or set(request.zones) & set(pool.zones))
    ]


def _usd_per_hour(request: JobRequest, pools: list[PoolView]) -> float | None:
    """The dearest of what may be chosen; None when a price is unknown."""
    from penstock.domain import catalogue

    prices: list[float] = []
    for name, spot, local in {(pool.accelerator, pool.spot, pool.provider == "local") for pool in pools} or {
        (name, bool(request.spot), False) for name in request.on
    }:
        row = catalogue.find(name)
        chip = 0.0 if local else row.usd_per_chip_hour_spot if spot else row.usd_per_chip_hour
        if chip is None:
            return None
        prices.append(chip * row.chips * request.slices * request.replicas_max)
    return max(prices, default=None)


def _cost(hour: float | None, most: float | None, timeout_s: float | None, *, sure: bool) -> str:
    if hour is None or most is None:
        return "unknown: no list price for what it may run on (`tpu catalog --gaps`)"
    if hour == 0:
        return terminal.FREE
    until = terminal.span(timeout_s or limits.TIMEOUT_S_DEFAULT)
    if_cloud = "" if sure else "; free on this machine's own capacity"
    return f"${hour:,.2f} per hour, at most ${most:,.2f} until its timeout of {until} (list prices){if_cloud}"
