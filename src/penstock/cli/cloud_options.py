"""The options that say how a cloud makes slices: for pools and fleets alike.

`tpu pools set` and `tpu fleet create` take them and turn them into the one struct that the API knows. Values are
checked by the server; here only what no server would understand is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.words import SPAN

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.domain.cloud import CloudWish, Mount

F = TypeVar("F", bound="Callable[..., Any]")

MOUNT = "KIND:SOURCE:PATH"
_OPTIONS = (
    click.option("--spot", "kind", flag_value="spot", help="Cheap, and may be taken away."),
    click.option(
        "--preemptible", "kind", flag_value="preemptible", help="The same in its older form, for a day at most."
    ),
    click.option(
        "--flex-start", "kind", flag_value="flex-start", help="Waits in the cloud's queue; ends after --life."
    ),
    click.option(
        "--reserved", "reservation", metavar="NAME", help="From this reservation; `any`: from whichever fits."
    ),
    click.option("--queued", is_flag=True, help="Ask by a queued resource where a node would do."),
    click.option("--wait", type=SPAN, metavar="TIME", help="Give a queued request up after so long."),
    click.option("--life", type=SPAN, metavar="TIME", help="Of flex-start slices.  [default: 7d]"),
    click.option(
        "--runtime-version", default="", metavar="NAME", help="Image of the hosts.  [default: the catalogue's]"
    ),
    click.option("--network", default="", metavar="NAME", help="Of the hosts."),
    click.option("--subnetwork", default="", metavar="NAME", help="Of the hosts."),
    click.option("--service-account", default="", metavar="EMAIL", help="Whom the hosts act as."),
    click.option("--no-external-ip", is_flag=True, help="Hosts have no address of their own outside the network."),
    click.option("--network-tag", "tags", multiple=True, metavar="TAG", help="Of the hosts; may be repeated."),
    click.option("--disk", "disks", multiple=True, metavar="NAME", help="Attach this disk read-only; may be repeated."),
    click.option(
        "--mount", "mounts", multiple=True, metavar=MOUNT, help="On every host, nfs, gcs or disk; repeatable."
    ),
)


def cloud_options(command: F) -> F:
    """All of them; the command takes `kind`, `reservation` and the rest as `options`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def zone_words(given: tuple[str, ...]) -> tuple[str, ...]:
    """Zones and patterns, however they were written: repeated, or with commas between."""
    return tuple(zone.strip() for word in given for zone in word.split(",") if zone.strip())


def mount(word: str) -> Mount:
    """nfs:HOST:/EXPORT:/mnt/x, gcs:BUCKET:/mnt/x or disk:NAME:/mnt/x."""
    from penstock.domain.cloud import Mount

    kind, _, rest = word.partition(":")
    source, _, path = rest.rpartition(":")
    if not (kind and source and path):
        raise click.UsageError(f"--mount: {word!r} is not {MOUNT}; such as nfs:10.0.0.2:/export:/mnt/data")
    return Mount(kind, source, path)


def wish(kind: str | None, reservation: str | None, options: dict[str, Any]) -> CloudWish:
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
        mounts=tuple(mount(word) for word in options["mounts"]),
    )
