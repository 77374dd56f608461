"""What it costs to move bytes from one region of a cloud to another.

The server asks before it copies a checkpoint to another region's root (`server.transfers`). Prices are list prices of
one source with a date, by continent, for each GiB; what the source does not have is unknown, and unknown is never 0. It
does no I/O, and must not decide what is moved.
"""

from __future__ import annotations

from typing import Final

from penstock.domain.catalogue_table import Source

GIB: Final = 1 << 30
EGRESS_SOURCE: Final = Source(
    title="Skyplane's table of Google's prices between regions, skyplane/compute/gcp/gcp_pricing.py at 1cb58495",
    address="https://github.com/skyplane-project/skyplane",
    read_on="2026-11-15",
    note="stored copy, not Google's own page: it may be behind the list price; Middle East and Africa are not in it",
)
#: How region names begin -> the continent that prices go by.
_AREAS: Final = {
    "us": "North America",
    "northamerica": "North America",
    "europe": "Europe",
    "asia": "Asia",
    "southamerica": "South America",
    "australia": "Australia",
}
#: Continent -> USD for each GiB between two of its regions.
_WITHIN: Final = {"North America": 0.01, "Europe": 0.02, "Asia": 0.05, "South America": 0.08, "Australia": 0.08}
_FAR_REGIONS: Final = ("asia-southeast2", "australia")
_FAR: Final = 0.15  #: from or to one of these, from another continent
_ACROSS: Final = 0.08  #: between any other two continents


def region_of(zone: str) -> str:
    """The region of a zone: `us-central1` of `us-central1-a`; nothing of what is no zone of a cloud."""
    region, _, last = zone.rpartition("-")
    return region if last and "-" in region else ""


def egress_usd(source: str, target: str, size: int) -> float | None:
    """What so many bytes from one region to another cost; None when nobody can tell."""
    rate = _rate(source, target)
    return None if rate is None else size / GIB * rate


def _rate(source: str, target: str) -> float | None:
    areas = [_AREAS.get(region.partition("-")[0]) for region in (source, target)]
    if None in areas:
        return None
    if source == target:
        return 0.0
    if areas[0] == areas[1]:
        return _WITHIN[areas[0] or ""]
    far = any(region.startswith(_FAR_REGIONS) for region in (source, target))
    return _FAR if far else _ACROSS
