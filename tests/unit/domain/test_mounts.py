"""What hosts run to mount what a pool asks for: disks by their number, everything else as it was written."""

from __future__ import annotations

from penstock.domain.cloud import Mount
from penstock.domain.mounts import as_attached, mount_words


def test_a_disk_is_known_to_hosts_by_its_place_among_those_attached() -> None:
    disks = ("first", "projects/p1/zones/z/disks/second")
    wanted = (
        Mount("disk", "second", "/mnt/b"),
        Mount("disk", "projects/p1/zones/z/disks/second", "/mnt/c"),
        Mount("disk", "first", "/mnt/a"),
        Mount("disk", "local-ssd-0", "/mnt/d"),
        Mount("gcs", "first", "/mnt/e"),
    )
    seen = [each.source for each in as_attached(wanted, disks)]
    assert seen == ["persistent-disk-2", "persistent-disk-2", "persistent-disk-1", "local-ssd-0", "first"]
    assert mount_words(as_attached(wanted, disks)[0]) == (
        "mount", "-o", "ro,noload", "/dev/disk/by-id/google-persistent-disk-2", "/mnt/b",
    )  # fmt: skip
