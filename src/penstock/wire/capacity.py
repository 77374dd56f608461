"""What is said over HTTP about capacity beyond lists of pools and slices: zones, hosts, repair, adoption.

As in `wire.api`: one shape for `server`, which answers it, and `client`, which reads it. Structs alone, no rules.
"""

from __future__ import annotations

import msgspec


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """One host of a slice: its addresses in its network and outside; none of either where its provider tells none."""

    index: int
    inside: str = ""
    outside: str = ""
    trouble: str = ""  #: why its provider could not be asked: then these are the last known ones, if any


class HostPage(msgspec.Struct, frozen=True):
    hosts: tuple[HostView, ...]


class ReplaceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Let a slice go, so that its pool makes another; with `now` a job on it is stopped and goes on elsewhere."""

    now: bool = False


class ReplaceReply(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    state: str  #: draining while a job is on it, else deleting
    job: str | None = None  #: what is on it


class RecreateReply(msgspec.Struct, frozen=True, kw_only=True):
    """How a pool stands when its repair begins: what is broken is replaced, the rest is left alone."""

    pool: str
    wanted: int  #: slices it keeps whether anybody wants them or not
    ready: int
    coming: int
    broken: tuple[str, ...]  #: titles of slices that are lost, or on their way out
    retried: tuple[str, ...]  #: zones that rested after refusals and are tried at once


class ZoneView(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one kind of capacity in one zone."""

    provider: str
    zone: str
    accelerator: str
    spot: bool
    kind: str = ""  #: how it is bought: on-demand, spot, preemptible, reserved, flex-start
    odds: float  #: that the next try is granted, from 0 to 1; 0.5 where nothing is known
    tries: int
    ready_s: float | None = None  #: smoothed, from the wish to a slice that works
    life_s: float | None = None  #: smoothed, of slices that were taken away
    usd_per_hour: float | None = None  #: of one slice; None where no price is known
    rests_s: float = 0.0  #: it is not asked for so long
    refusals: int = 0  #: in a row
    why: str = ""  #: what it said when it last refused
    tried_at: float | None = None
    silent_s: float = 0.0  #: its API has not shown what is there for so long; 0: it does
    silent_since: float | None = None
    denied: bool = False  #: not for want of an answer: it refuses
    said: str = ""  #: what it said instead; nothing where it hangs


class ZonePage(msgspec.Struct, frozen=True):
    zones: tuple[ZoneView, ...]


class AdoptRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Take over a TPU that exists; with `own` it is deleted when it is let go, else it only loses our labels."""

    name: str
    zone: str
    own: bool = False


class HostTrouble(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What went wrong with one host of a slice, in the words of whoever tried."""

    index: int
    said: str


class UnreachedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hosts of an adopted TPU that could not be set up."""

    hosts: tuple[HostTrouble, ...]


class AdoptReply(msgspec.Struct, frozen=True, kw_only=True):
    slice: str
    pool: str
    hosts: int
    script: str  #: what makes each of its hosts ours, run there as root; it holds the slice's join token
    returns: bool = True  #: after a reboot its hosts run that by themselves
