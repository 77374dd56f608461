"""The command that mounts what a pool asks for, as the words of one program.

The startup script of a cloud host runs it at every boot, and `tpu solve` when a mount is missing: the same words, so
that a host that was mended is what a new one would be. It must not run anything.
"""

from __future__ import annotations

from penstock.domain.cloud import Mount


def mount_words(mount: Mount) -> tuple[str, ...]:
    """What mounts it at its path, which must be a directory."""
    match mount.kind:
        case "nfs":
            return ("mount", "-t", "nfs", "-o", "soft,timeo=100,retrans=3", mount.source, mount.path)
        case "gcs":
            return ("gcsfuse", "--implicit-dirs", "-o", "allow_other", mount.source, mount.path)
        case _:
            return ("mount", "-o", "ro,noload", f"/dev/disk/by-id/google-{mount.source}", mount.path)
