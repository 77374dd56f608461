"""What a pool asks of a cloud beyond its shape: how capacity is bought, and how its machines are set up.

A pool holds one of these, each of its slices a copy, so that what was asked stays known when the pool changes. The
API checks it on the way in (`cloud_admission`), `capacity.tpu_vm` turns it into requests. No word of any one API here.
"""

from __future__ import annotations

from typing import Final

import msgspec

ON_DEMAND: Final = "on-demand"
SPOT: Final = "spot"
PREEMPTIBLE: Final = "preemptible"
RESERVED: Final = "reserved"
FLEX_START: Final = "flex-start"
KINDS: Final = (ON_DEMAND, SPOT, PREEMPTIBLE, RESERVED, FLEX_START)
#: The longest life of flex-start capacity.
FLEX_START_LIFE_S_MAX: Final = 7 * 24 * 3600.0
MOUNT_KINDS: Final = ("nfs", "gcs", "disk")


class Mount(msgspec.Struct, frozen=True, gc=False):
    """Something every host sees at `path`: an NFS export, a bucket, or a disk."""

    kind: str
    source: str
    path: str


class CloudWish(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How slices are bought and made. Empty words leave the choice to the provider's settings."""

    kind: str = ON_DEMAND
    queued: bool = False  #: ask by a queued resource even where a node would do
    wait_s: float | None = None  #: a queued request is withdrawn after so long
    life_s: float | None = None  #: flex-start: the slice ends by itself after so long
    reservation: str = ""
    runtime_version: str = ""
    network: str = ""
    subnetwork: str = ""
    external_ip: bool = True
    service_account: str = ""
    tags: tuple[str, ...] = ()
    disks: tuple[str, ...] = ()  #: names of disks that exist, attached read-only
    mounts: tuple[Mount, ...] = ()

    @property
    def in_line(self) -> bool:
        """Whether it waits in the provider's own line: this kind of capacity can only be had, or is wanted, so."""
        return self.queued or self.kind == FLEX_START or bool(self.reservation)

    @property
    def spot(self) -> bool:
        """Whether the provider may take it away at any time."""
        return self.kind in (SPOT, PREEMPTIBLE)


def bought(spot: bool, wish: CloudWish | None) -> str:
    """One of `KINDS`: how capacity is bought. Where no cloud is asked, `spot` is all that is known of it."""
    kind = ON_DEMAND if wish is None else wish.kind
    return SPOT if spot and kind == ON_DEMAND else kind
