"""What a pool may ask of a cloud: words, options that contradict each other, zones by name and pattern."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.domain.admission import BadInput
from penstock.domain.catalogue import find
from penstock.domain.cloud import CloudWish, Mount
from penstock.domain.cloud_admission import check, check_together, resolve_zones

V5E = find("v5e-8")
ALL = ("*",)


def test_everything_at_once_is_fine() -> None:
    wish = CloudWish(
        kind="reserved",
        reservation="projects/p/reservations/r-1",
        wait_s=3600,
        runtime_version="v2-alpha-tpuv5-lite",
        network="projects/p/global/networks/n",
        service_account="a@p.iam.gserviceaccount.com",
        tags=("train", "a-1"),
        disks=("data-1",),
        mounts=(Mount("nfs", "10.0.0.2:/export", "/mnt/a"), Mount("gcs", "bucket", "/mnt/b")),
    )
    check(wish)
    check_together(wish)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kind": "cheap"}, "cloud.kind"),
        ({"life_s": 1.0}, "cloud.life_s"),
        ({"life_s": float("nan")}, "cloud.life_s"),
        ({"wait_s": 1e9}, "cloud.wait_s"),
        ({"network": "a b"}, "cloud.network"),
        ({"runtime_version": "x\n"}, "cloud.runtime_version"),
        ({"service_account": "$(reboot)"}, "cloud.service_account"),
        ({"tags": ("Upper",)}, "cloud.tags"),
        ({"tags": tuple(f"t{n}" for n in range(100))}, "cloud.tags"),
        ({"disks": ("",)}, "cloud.disks"),
        ({"mounts": (Mount("smb", "a", "/a"),)}, "cloud.mounts"),
        ({"mounts": (Mount("nfs", "a;b", "/a"),)}, "cloud.mounts"),
        ({"mounts": (Mount("nfs", "a:/b", "/a/../etc"),)}, "cloud.mounts"),
        ({"mounts": (Mount("nfs", "a:/b", "/"),)}, "cloud.mounts"),
        ({"mounts": (Mount("nfs", "a:/b", "mnt"),)}, "cloud.mounts"),
        ({"mounts": (Mount("nfs", "a:/b", "/mnt/a\n"),)}, "cloud.mounts"),
    ],
)
def test_words_that_no_cloud_takes_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput) as caught:
        check(CloudWish(**changes))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "wish",
    [
        CloudWish(kind="spot", reservation="r"),
        CloudWish(kind="spot", life_s=3600),
        CloudWish(mounts=(Mount("gcs", "a", "/m"), Mount("gcs", "b", "/m"))),
    ],
)
def test_options_that_contradict_each_other_are_refused(wish: CloudWish) -> None:
    check(wish)
    with pytest.raises(BadInput):
        check_together(wish)


def test_patterns_choose_among_the_zones_of_the_catalogue() -> None:
    assert V5E.zones is not None
    assert resolve_zones(("*",), V5E, ALL) == tuple(sorted(V5E.zones))
    assert resolve_zones(("us-west*", "us-west4-a"), V5E, ALL) == ("us-west1-c", "us-west4-a")
    assert resolve_zones(("us-west4-a", "us-west*"), V5E, ALL) == ("us-west4-a", "us-west1-c")
    assert resolve_zones(("*",), V5E, ("us-west*",)) == ("us-west1-c", "us-west4-a")


def test_a_zone_by_its_name_may_be_newer_than_the_catalogue() -> None:
    assert resolve_zones(("europe-west4-a", "us-west2-a"), V5E, ALL) == ("europe-west4-a", "us-west2-a")


@pytest.mark.parametrize(
    ("zones", "allowed", "told"),
    [
        (("mars-*",), ALL, "fits no zone of v5e-8; there are us-central1-a"),
        (("us-*",), ("europe-*",), "fits no zone of v5e-8; none is known"),
        (("local",), ALL, "is no zone of the cloud; there are"),
        (("us-centrl1-a",), ALL, "did you mean us-central1-a?"),
        (("us-west4-a",), ("europe-*",), "is not among the zones that this server may use"),
    ],
)
def test_a_zone_that_cannot_be_meant_is_refused(zones: tuple[str, ...], allowed: tuple[str, ...], told: str) -> None:
    with pytest.raises(BadInput) as caught:
        resolve_zones(zones, V5E, allowed)
    assert told in str(caught.value)
