"""Faults of the emulated Cloud TPU API: which calls go wrong, and how (C1 to C3 of the fault list).

They come from the world script or over the control address; `tpu_service` asks for the one that strikes a call. Each
strikes the calls it is aimed at, after letting `skip` pass, at most `times` times, with chance `rate`, between `from_s`
and `until_s` of the emulator's life. Which chance it was is drawn from the world's seed.

- `refuse`: `status` is answered and nothing happens; `refuse_after`: the effect happens first;
- `lose`: the effect happens and the connection breaks before the answer; `cut`: it breaks before any effect;
- `slow`: everything happens `seconds` late; `hang`: no answer ever;
- `late` (creates): `status` is answered, and the effect happens `seconds` later;
- `stale` (listings): as it was `seconds` ago; `hide`: without what `hidden` names, and it claims to be whole;
- `short` (listings): pages of at most `most`; `unreachable`: nothing of that zone, and it says so;
- `stuck` (creates): the operation never ends; `broken`: it ends with an error though the node is there;
- `hostless`: READY with no host up; `short_of_hosts`: READY with its last host down.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from penstock.emulator.tpu_words import TpuRefusal, status_name

Kind = Literal[
    "refuse", "refuse_after", "lose", "cut", "slow", "hang", "late", "stale", "hide", "short", "unreachable",
    "stuck", "broken", "hostless", "short_of_hosts",
]  # fmt: skip
_LISTINGS = ("stale", "hide", "short", "unreachable")
_CREATES = ("late", "stuck", "broken", "hostless", "short_of_hosts")


class TpuFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One fault: what happens, to which calls, how often."""

    kind: Kind
    call: str = "*"  #: `nodes.create`, `queuedResources.*`, `*.list`, …
    zone: str = "*"
    name: str = "*"  #: id of the resource that a call names
    skip: int = 0
    times: int = 1
    rate: float = 1.0
    from_s: float = 0.0
    until_s: float | None = None  #: None: for ever
    status: int = 503
    reason: str = ""  #: google.rpc name; "": by the status
    message: str = "a planted fault"
    retry_after_s: int | None = None
    seconds: float = 1.0
    most: int = 1
    hidden: str = "*"

    def refusal(self) -> TpuRefusal:
        reason = self.reason or status_name(self.status)
        return TpuRefusal(reason, self.message, http=self.status, retry_after_s=self.retry_after_s)


class TpuPlanted(msgspec.Struct):
    """A fault and how often it has struck."""

    fault: TpuFault
    passed: int = 0
    struck: int = 0


class TpuFaults:
    """All faults there are; the first one aimed at a call strikes it."""

    def __init__(self, faults: Iterable[TpuFault], rng: random.Random) -> None:
        self._rng = rng
        self.planted: list[TpuPlanted] = []
        self.plant(faults)

    def plant(self, faults: Iterable[TpuFault]) -> None:
        self.planted.extend(TpuPlanted(fault) for fault in faults)

    def strike(self, call: str, zone: str, name: str, age_s: float) -> TpuFault | None:
        for planted in self.planted:
            fault = planted.fault
            if planted.struck >= fault.times or not _in_force(fault, age_s) or not _aimed(fault, call, zone, name):
                continue
            if planted.passed < fault.skip:
                planted.passed += 1
                continue
            if fault.rate < 1.0 and self._rng.random() >= fault.rate:
                continue
            planted.struck += 1
            return fault
        return None


def _in_force(fault: TpuFault, age_s: float) -> bool:
    return fault.from_s <= age_s and (fault.until_s is None or age_s < fault.until_s)


def _aimed(fault: TpuFault, call: str, zone: str, name: str) -> bool:
    if fault.kind in _LISTINGS and not call.endswith(".list"):
        return False
    if fault.kind in _CREATES and not call.endswith(".create"):
        return False
    # A listing of all zones is struck by what is aimed at any of them.
    there = zone == "-" or fnmatchcase(zone, fault.zone)
    return there and fnmatchcase(call, fault.call) and fnmatchcase(name, fault.name)
