"""Prices between regions: what is known, what is free, and what nobody can tell."""

from __future__ import annotations

import pytest

from penstock.domain.catalogue_egress import EGRESS_SOURCE, GIB, egress_usd, region_of
from penstock.domain.transfers import Transfer


@pytest.mark.parametrize(
    ("zone", "region"),
    [
        ("us-central1-a", "us-central1"),
        ("europe-west4-b", "europe-west4"),
        ("us-south1-ai1b", "us-south1"),
        ("northamerica-northeast1-c", "northamerica-northeast1"),
        ("local", ""),
        ("here-1", ""),
        ("", ""),
    ],
)
def test_the_region_of_a_zone(zone: str, region: str) -> None:
    assert region_of(zone) == region


@pytest.mark.parametrize(
    ("source", "target", "usd"),
    [
        ("us-central1", "us-central1", 0.0),
        ("us-central1", "us-west4", 0.01),
        ("us-central1", "northamerica-northeast1", 0.01),
        ("europe-west4", "europe-west1", 0.02),
        ("asia-east1", "asia-northeast1", 0.05),
        ("us-central1", "europe-west4", 0.08),
        ("europe-west4", "us-central1", 0.08),
        ("us-central1", "australia-southeast1", 0.15),
        ("asia-southeast2", "us-central1", 0.15),
    ],
)
def test_what_a_gib_costs(source: str, target: str, usd: float) -> None:
    assert egress_usd(source, target, GIB) == pytest.approx(usd)
    assert egress_usd(source, target, 10 * GIB) == pytest.approx(10 * usd)


@pytest.mark.parametrize(
    ("source", "target"),
    [("us-central1", "me-west1"), ("africa-south1", "us-central1"), ("", "us-central1"), ("us-central1", ""), ("", "")],
)
def test_what_the_source_does_not_have_is_unknown_and_never_nothing(source: str, target: str) -> None:
    assert egress_usd(source, target, GIB) is None


def test_the_table_says_where_it_is_from_and_when_it_was_read() -> None:
    assert EGRESS_SOURCE.address.startswith("https://")
    assert EGRESS_SOURCE.read_on == "2026-11-15"


@pytest.mark.parametrize(
    ("usd", "told"),
    [(None, "price unknown"), (0.0, "$0.0000 at list"), (0.00001, "less than $0.0001 at list"), (1.25, "$1.2500 at")],
)
def test_a_transfer_in_one_line(usd: float | None, told: str) -> None:
    transfer = Transfer(source="us-central1", target="europe-west4", size=12_300_000, usd=usd)
    ways = "its checkpoint is being copied from us-central1 to europe-west4 first: 12300000 bytes (12.3 MB), "
    assert transfer.told.startswith(ways + told)
    done = Transfer(source="", target="europe-west4", size=7, usd=usd, done_at=1.0)
    assert done.told.startswith("its checkpoint was copied from the main root to europe-west4 first: 7 bytes, " + told)
