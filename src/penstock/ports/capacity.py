"""Capacity: what a provider must be able to do for slices, and the typed ways in which it fails.

The executor calls `create`, `get`, `delete`; the observer calls `list`. Creation is idempotent by name: a second
create of a name answers `NameTaken`, and the caller looks with `get` whose it is. A listing that is not `complete`
proves no absence. No call may block longer than the caller's deadline.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.domain.nouns import Slice

#: The provider's words for a slice, normalised by each adapter.
CREATING = "CREATING"
READY = "READY"
PREEMPTED = "PREEMPTED"
FAILED = "FAILED"
DELETING = "DELETING"
REPAIRING = "REPAIRING"


class Seen(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One slice as the provider shows it. `label` says whose it is: our installation's name, or something else."""

    name: str
    zone: str
    provider_id: str
    state: str
    label: str | None
    detail: str = ""


class Listing(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """All slices of one zone, or a part of them when `complete` is false."""

    zone: str
    slices: tuple[Seen, ...]
    complete: bool = True


class Address(msgspec.Struct, frozen=True, gc=False):
    """Where a host is: in its own network, and outside if it has an address there."""

    inside: str
    outside: str = ""


class Existing(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Something at the provider that we did not make. `owner`: whose it is by its label, if it bears one."""

    name: str
    zone: str
    accelerator: str  #: as the provider writes it
    state: str
    spot: bool = False
    owner: str | None = None
    slice: str | None = None  #: the slice it is, where we adopted it before
    script: bool = False  #: it runs a script of its owner's at every boot, and so none of ours


class CapacityError(Exception):
    """A provider call failed; the message is the provider's own."""


class Stockout(CapacityError):
    """No capacity of this kind in this zone now."""


class QuotaExceeded(CapacityError):
    """The project may not hold more of this kind here."""


class RateLimited(CapacityError):
    """Asked too often."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PermissionDenied(CapacityError):
    """Not allowed: retrying does not help until somebody changes something."""


class NameTaken(CapacityError):
    """The name exists already, perhaps by our own earlier call."""


class Transient(CapacityError):
    """Unreachable, slow or broken for now; whether the call took effect is unknown."""


class Unsent(Transient):
    """The provider could not even be asked: nothing took effect."""


class Capacity(Protocol):
    @property
    def name(self) -> str:
        """The provider's name: "local", "tpu_vm", "gke", "fake"."""

    async def create(self, wanted: Slice) -> Seen:
        """Ask for a slice under the name `wanted.id`, labelled as ours; answers as soon as the request is taken."""

    async def list(self, zone: str) -> Listing: ...

    async def get(self, name: str, zone: str) -> Seen | None:
        """The slice as it is now, or None when the provider says that it does not exist."""

    async def delete(self, name: str, zone: str) -> None:
        """Ask for deletion. Deleting what is absent is no error."""
