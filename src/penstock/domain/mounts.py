"""The command that mounts what a pool asks for, as the words of one program.

The startup script of a cloud host runs it at every boot, and `tpu solve` when a mount is missing: the same words, so
that a host that was mended is what a new one would be. It must not run anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from penstock.domain.cloud import Mount


def as_attached(mounts: Iterable[Mount], disks: Sequence[str]) -> tuple[Mount, ...]:
    """Mounts with their disks as hosts know them.

    Cloud TPU lets nobody choose a disk's name on the host: there they are numbered as they were attached, and number 0
    is what the host booted from. A disk that the pool does not attach is somebody else's doing, and its word is taken.
    """
    known = {name: f"persistent-disk-{number}" for number, disk in enumerate(disks, 1) for name in (disk, _last(disk))}
    return tuple(
        msgspec.structs.replace(mount, source=known.get(mount.source, mount.source)) if mount.kind == "disk" else mount
        for mount in mounts
    )


def _last(disk: str) -> str:
    """A disk may be named in full: projects/P/zones/Z/disks/NAME."""
    return disk.rpartition("/")[2]


def mount_words(mount: Mount) -> tuple[str, ...]:
    """What mounts it at its path, which must be a directory."""
    match mount.kind:
        case "nfs":
            return ("mount", "-t", "nfs", "-o", "soft,timeo=100,retrans=3", mount.source, mount.path)
        case "gcs":
            return ("gcsfuse", "--implicit-dirs", "-o", "allow_other", mount.source, mount.path)
        case _:
            return ("mount", "-o", "ro,noload", f"/dev/disk/by-id/google-{mount.source}", mount.path)
