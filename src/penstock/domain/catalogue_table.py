"""The data of the accelerator catalogue: what each TPU generation is, where it exists, what it costs.

Decides nothing beyond the facts: families, slice shapes, zones and list prices, each with the source and the
day it was read. `catalogue.py` is the only caller. A fact without a source stays None with the reason beside
it; nobody may fill a hole here with a likely value.
"""

from functools import cache
from typing import Literal

import msgspec


class Source(msgspec.Struct, frozen=True):
    """Where a fact was read, and on which day."""

    title: str
    address: str
    read_on: str
    note: str


class Family(msgspec.Struct, frozen=True):
    """One TPU generation and the rules that turn a name into a shape.

    `spellings` are the prefixes users type before the size; the first one is the canonical prefix.
    `other_shapes` says that shapes of whole cubes other than the default one may be asked for by topology.
    """

    generation: str
    spellings: tuple[str, ...]
    suffix_counts: Literal["cores", "chips"]
    cores_per_chip: int
    jax_devices_per_chip: int
    small_topologies: tuple[str, ...]
    cubes: tuple[int, ...]
    other_shapes: bool
    gke_accelerator: str | None
    gke_machine_stem: str | None
    runtime_version: str | None
    providers: tuple[str, ...]


class ZoneFact(msgspec.Struct, frozen=True):
    """Zones of the named accelerators of a generation; no names means all that no earlier row took."""

    generation: str
    names: tuple[str, ...]
    zones: tuple[str, ...] | None
    source: Source


class PriceFact(msgspec.Struct, frozen=True):
    """US dollars per chip and hour in one region; no names means all that no earlier row took."""

    generation: str
    names: tuple[str, ...]
    on_demand: float | None
    spot: float | None
    region: str | None
    source: Source


CUBE_EDGE_CHIPS = 4
"""Slices larger than half a cube are built from whole cubes of 4x4x4 chips (v4, v5p, 7x)."""

LONGEST_ROW_OF_CUBES = 61
"""The longest edge, in cubes, of any published shape (4x4x244); a count with a larger prime has no shape."""

V4_POD_CUBES = 64
"""A v4 pod is 4096 chips."""

SCHEDULABLE_CUBES = 96
"""The largest v5p job Google schedules is 16x16x24 chips; the complete run of 7x shapes ends there too."""

LARGE_7X_CUBES = (108, 128, 140, 144)
"""Beyond the complete run, 7x has 12x24x24, 16x16x32, 16x20x28 and the whole pod, 16x24x24."""

_BELOW_A_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_FLAT_TO_256 = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")


def _row_fits(cubes: int) -> bool:
    return cube_edges(cubes)[2] <= LONGEST_ROW_OF_CUBES


def cube_edges(cubes: int) -> tuple[int, int, int]:
    """Return the edges, in cubes, of the box of that volume which is nearest to a cube.

    Google documents the shape nearest to a cube as the default for a size; of two boxes with the same longest
    edge, the one with the longer shortest edge is nearer.
    """
    best = (1, 1, cubes)
    for short in range(1, cubes + 1):
        if short**3 > cubes:
            break
        if cubes % short:
            continue
        rest = cubes // short
        for middle in range(short, rest + 1):
            if middle * middle > rest:
                break
            if rest % middle == 0 and (rest // middle, -short) < (best[2], -best[0]):
                best = (short, middle, rest // middle)
    return best


@cache
def default_topologies(family: Family) -> tuple[str, ...]:
    """Return the default topology of every size of the family, smallest first."""
    whole = tuple(
        "x".join(str(CUBE_EDGE_CHIPS * edge) for edge in cube_edges(cubes))
        for cubes in family.cubes
        if _row_fits(cubes)
    )
    return family.small_topologies + whole


FAMILIES: tuple[Family, ...] = (
    Family(
        generation="v2",
        spellings=("v2",),
        suffix_counts="cores",
        cores_per_chip=2,
        jax_devices_per_chip=2,
        small_topologies=("2x2", "4x4", "8x8", "8x16", "16x16"),
        cubes=(),
        other_shapes=False,
        gke_accelerator=None,
        gke_machine_stem=None,
        runtime_version="tpu-ubuntu2204-base",
        providers=("tpu_vm",),
    ),
    Family(
        generation="v3",
        spellings=("v3",),
        suffix_counts="cores",
        cores_per_chip=2,
        jax_devices_per_chip=2,
        small_topologies=("2x2", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32"),
        cubes=(),
        other_shapes=False,
        gke_accelerator=None,
        gke_machine_stem=None,
        runtime_version="tpu-ubuntu2204-base",
        providers=("tpu_vm",),
    ),
    Family(
        generation="v4",
        spellings=("v4",),
        suffix_counts="cores",
        cores_per_chip=2,
        jax_devices_per_chip=1,
        small_topologies=_BELOW_A_CUBE,
        cubes=tuple(range(1, V4_POD_CUBES + 1)),
        other_shapes=True,
        gke_accelerator="tpu-v4-podslice",
        gke_machine_stem="ct4p-hightpu",
        runtime_version="tpu-ubuntu2204-base",
        providers=("tpu_vm", "gke"),
    ),
    Family(
        generation="v5e",
        spellings=("v5e", "v5litepod"),
        suffix_counts="chips",
        cores_per_chip=1,
        jax_devices_per_chip=1,
        small_topologies=_FLAT_TO_256,
        cubes=(),
        other_shapes=False,
        gke_accelerator="tpu-v5-lite-podslice",
        gke_machine_stem="ct5lp-hightpu",
        runtime_version="v2-alpha-tpuv5-lite",
        providers=("tpu_vm", "gke"),
    ),
    Family(
        generation="v5p",
        spellings=("v5p",),
        suffix_counts="cores",
        cores_per_chip=2,
        jax_devices_per_chip=1,
        small_topologies=_BELOW_A_CUBE,
        cubes=tuple(range(1, SCHEDULABLE_CUBES + 1)),
        other_shapes=True,
        gke_accelerator="tpu-v5p-slice",
        gke_machine_stem="ct5p-hightpu",
        runtime_version="v2-alpha-tpuv5",
        providers=("tpu_vm", "gke"),
    ),
    Family(
        generation="v6e",
        spellings=("v6e",),
        suffix_counts="chips",
        cores_per_chip=1,
        jax_devices_per_chip=1,
        small_topologies=_FLAT_TO_256,
        cubes=(),
        other_shapes=False,
        gke_accelerator="tpu-v6e-slice",
        gke_machine_stem="ct6e-standard",
        runtime_version="v2-alpha-tpuv6e",
        providers=("tpu_vm", "gke"),
    ),
    Family(
        generation="7x",
        spellings=("tpu7x", "7x", "v7x"),
        suffix_counts="cores",
        cores_per_chip=2,
        jax_devices_per_chip=2,
        small_topologies=_BELOW_A_CUBE,
        cubes=(*range(1, SCHEDULABLE_CUBES + 1), *LARGE_7X_CUBES),
        other_shapes=False,
        gke_accelerator="tpu7x",
        gke_machine_stem="tpu7x-standard",
        runtime_version=None,
        providers=("gke",),
    ),
)

EIGHT_CHIP_HOST_GENERATIONS = ("v5e", "v6e")
"""Only these have 1-chip and 8-chip machines beside the 4-chip one."""

_ZONE_PAGE = Source(
    title="Google Cloud, TPU regions and zones",
    address="https://docs.cloud.google.com/tpu/docs/types-zones",
    read_on="2026-11-15",
    note="stored copy, cut short: North America in full, other continents only as far as the copies went",
)
_OLDER_ZONE_PAGES = Source(
    title="Google Cloud, TPU regions and zones, older copies",
    address="https://cloud.google.com/tpu/docs/regions-zones",
    read_on="2026-11-15",
    note="the newest copy was cut short before v2 and v3, so these rows come from copies of the years before",
)
_PRICE_LIST = Source(
    title="SkyPilot catalogue of Google's billing SKUs, catalogs/v7/gcp/vms.csv at 017e2502",
    address="https://github.com/skypilot-org/skypilot-catalog",
    read_on="2026-11-15",
    note="stored copy; slice price divided by chips; spot prices move and differ much between regions",
)
_NO_7X_PRICE = Source(
    title="no source",
    address="https://github.com/skypilot-org/skypilot-catalog",
    read_on="2026-11-15",
    note="the price list read has no 7x row and no other list price was found",
)

ZONES: tuple[ZoneFact, ...] = (
    ZoneFact(
        "v2",
        ("v2-8",),
        ("us-central1-b", "us-central1-c", "europe-west4-a", "asia-east1-c"),
        _OLDER_ZONE_PAGES,
    ),
    ZoneFact("v2", (), ("us-central1-a", "europe-west4-a"), _OLDER_ZONE_PAGES),
    ZoneFact("v3", ("v3-8",), ("us-central1-a", "us-central1-b", "europe-west4-a"), _OLDER_ZONE_PAGES),
    ZoneFact("v3", (), ("europe-west4-a",), _OLDER_ZONE_PAGES),
    ZoneFact("v4", (), ("us-central2-b",), _ZONE_PAGE),
    ZoneFact("v5e", (), ("us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a"), _ZONE_PAGE),
    ZoneFact("v5p", (), ("us-central1-a", "us-east5-a"), _ZONE_PAGE),
    ZoneFact(
        "v6e",
        (),
        (
            "us-central1-b",
            "us-central1-ai1",
            "us-east1-d",
            "us-east5-a",
            "us-east5-b",
            "us-south1-ai1b",
            "europe-west4-a",
        ),
        _ZONE_PAGE,
    ),
    ZoneFact("7x", (), ("us-central1-c",), _ZONE_PAGE),
)

PRICES: tuple[PriceFact, ...] = (
    PriceFact("v2", ("v2-8",), 1.125, 0.3375, "us-central1", _PRICE_LIST),
    PriceFact("v2", (), 1.5, 0.3825, "us-central1", _PRICE_LIST),
    PriceFact("v3", ("v3-8",), 2.0, 0.51, "us-central1", _PRICE_LIST),
    PriceFact("v3", (), 2.0, 0.66, "europe-west4", _PRICE_LIST),
    PriceFact("v4", (), 3.22, 0.9215, "us-central2", _PRICE_LIST),
    PriceFact("v5e", (), 1.2, 0.21298, "us-central1", _PRICE_LIST),
    PriceFact("v5p", (), 4.2, 1.68, "us-central1", _PRICE_LIST),
    PriceFact("v6e", (), 2.7, 0.64833, "us-central1", _PRICE_LIST),
    PriceFact("7x", (), None, None, None, _NO_7X_PRICE),
)
