"""The world script of the emulated Cloud TPU: how much capacity there is, what goes wrong, and when.

A TOML file (`tpu emulator --world FILE`) or a test's own struct; `tpu_cloud` and `tpu_service` ask it. Moments (`at_s`)
count from the emulator's start. Chance is drawn from `seed` and the node's name, never from the order of requests, so
the same script and the same calls give the same world. docs/reference/emulator.md lists every key.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from penstock.domain.admission import BadInput
from penstock.domain.catalogue import Accelerator, UnknownAccelerator, all_accelerators, find
from penstock.emulator.tpu_faults import TpuFault

#: Seconds, or a range from which they are drawn.
Seconds = float | tuple[float, float]

#: By the API's own pages; more may be named in the script.
RUNTIME_VERSIONS = (
    "tpu-ubuntu2204-base",
    "tpu-vm-base",
    "tpu-vm-v4-base",
    "v2-alpha-tpuv4",
    "v2-alpha-tpuv5",
    "v2-alpha-tpuv5-lite",
    "v2-alpha-tpuv6e",
)
#: Generations as the API's AcceleratorConfig calls them. 7x is not offered by this API.
GENERATIONS = {"v2": "V2", "v3": "V3", "v4": "V4", "v5e": "V5LITE_POD", "v5p": "V5P", "v6e": "V6E"}


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Delays(_Part, frozen=True):
    """How long things take."""

    create: Seconds = 0.0  #: from the request until READY
    stockout: Seconds = 0.0  #: until a create without capacity fails
    delete: Seconds = 0.0
    stop: Seconds = 0.0
    start: Seconds = 0.0
    accept: Seconds = 0.0  #: a queued resource in CREATING
    provision: Seconds = 0.0  #: a queued resource in PROVISIONING before its nodes appear
    suspend: Seconds = 0.0  #: a queued resource in SUSPENDING
    maintenance: Seconds = 60.0  #: how long hosts are down
    maintenance_notice: Seconds = 0.0  #: between a maintenance event and the hosts going down
    pool_pending: Seconds = 0.0  #: an operation on a node pool in PENDING
    pool_create: Seconds = 0.0  #: and then in RUNNING
    pool_delete: Seconds = 0.0


class ZoneRule(_Part, frozen=True):
    """A zone; those of the catalogue need no entry."""

    types: tuple[str, ...] = ()  #: besides those that the catalogue has there
    open: bool = True  #: False: the project may not use it
    flex_start: bool = True
    create: Seconds | None = None  #: until READY here; None: as `delays.create`


class Capacity(_Part, frozen=True):
    """From a moment on there are so many chips for these types together in each of these zones."""

    chips: int
    zone: str = "*"
    type: str = "*"
    at_s: float = 0.0


class Quota(_Part, frozen=True):
    """The project may hold so many chips of these types, preempted and suspended ones included."""

    chips: int
    zone: str = "*"
    type: str = "*"
    spot: bool | None = None  #: None: both kinds count together
    per: Literal["zone", "region"] = "zone"
    status: Literal[403, 429] = 429


class Reservation(_Part, frozen=True):
    name: str
    zone: str
    type: str
    chips: int


class ClusterRule(_Part, frozen=True):
    """A cluster of Kubernetes Engine, there from the start."""

    name: str
    location: str  #: a zone or a region
    project: str = "p1"


class Denied(_Part, frozen=True):
    """Types that the project may not ask for."""

    zone: str = "*"
    type: str = "*"
    spot: bool | None = None


class Preemption(_Part, frozen=True):
    """Takes nodes away: at a moment, or so long after each entered a state, or at a rate while it is in it."""

    zone: str = "*"
    type: str = "*"
    name: str = "*"
    state: Literal["CREATING", "READY", "DELETING"] = "READY"
    at_s: float | None = None
    after_s: Seconds | None = None
    per_hour: float | None = None
    notice_s: float = 0.0  #: 0: none
    most: int = 1_000_000  #: how many nodes in all
    undo_delete: bool = False  #: a node that is being deleted is PREEMPTED instead, and stays
    any_kind: bool = False  #: also nodes that are neither spot nor preemptible


Deed = Literal[
    "preempt", "maintain", "notify_host", "stop_host", "start_host", "replace_host", "die_unseen", "fail", "hide",
    "show", "delete", "create",
]  # fmt: skip


class Happening(_Part, frozen=True):
    """Something that is done to the nodes that match; over the control address it happens at once."""

    what: Deed
    at_s: float = 0.0
    zone: str = "*"
    name: str = "*"
    host: int = 0
    seconds: float = 60.0  #: of maintenance
    notice_s: float = 0.0
    project: str = "p1"  #: the rest is for `create`: somebody makes a node by hand
    type: str = ""
    labels: dict[str, str] = {}
    spot: bool = False


class World(_Part, frozen=True):
    """The whole script. Without one there is capacity for everything and nothing goes wrong."""

    seed: int = 0
    zones: dict[str, ZoneRule] = {}
    runtime_versions: tuple[str, ...] = ()
    delays: Delays = Delays()
    capacity: tuple[Capacity, ...] = ()
    quotas: tuple[Quota, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    clusters: tuple[ClusterRule, ...] = ()
    denied: tuple[Denied, ...] = ()
    create_calls_per_minute: int = 0  #: 0: any number
    retry_after_s: int | None = None  #: said when that many are exceeded
    accepted_state: Literal["ACCEPTED", "WAITING_FOR_RESOURCES"] = "WAITING_FOR_RESOURCES"
    suspended_keeps_nodes: bool = False
    page_size: int = 500
    preemptions: tuple[Preemption, ...] = ()
    happenings: tuple[Happening, ...] = ()
    faults: tuple[TpuFault, ...] = ()


def read_world(text: str, where: str) -> World:
    """The world of a script; BadInput tells what is wrong with it."""
    try:
        return msgspec.convert(tomllib.loads(text), World)
    except tomllib.TOMLDecodeError as error:
        raise BadInput("world", where, f"is not TOML: {error}", "mend that line") from error
    except msgspec.ValidationError as error:
        raise BadInput("world", where, str(error), "docs/reference/emulator.md lists every key") from error


def drawn(seconds: Seconds, rng: random.Random) -> float:
    return seconds if isinstance(seconds, float | int) else rng.uniform(*seconds)


def api_type(accelerator: Accelerator) -> str:
    """What the API calls a shape that has a name there: the catalogue's name, but for v5e."""
    return accelerator.name.replace("v5e-", "v5litepod-") if accelerator.generation == "v5e" else accelerator.name


class Geography:
    """Which zones there are and what is offered in each."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._named = {api_type(each): each for each in all_accelerators() if "tpu_vm" in each.providers}
        self._zones: dict[str, dict[str, Accelerator]] = {}
        for name, accelerator in self._named.items():
            for zone in accelerator.zones or ():
                self._zones.setdefault(zone, {})[name] = accelerator
        for zone, rule in world.zones.items():
            offered = self._zones.setdefault(zone, {})
            for name in rule.types:
                if name not in self._named:
                    raise BadInput("world", f"zones.{zone}.types {name}", "is no accelerator type", "see `tpu catalog`")
                offered[name] = self._named[name]

    def zones(self) -> list[str]:
        """Those that the project may use."""
        return sorted(zone for zone in self._zones if self.rule(zone).open)

    def rule(self, zone: str) -> ZoneRule:
        return self._world.zones.get(zone, ZoneRule())

    def offered(self, zone: str) -> dict[str, Accelerator]:
        return self._zones.get(zone, {})

    def by_shape(self, zone: str, generation: str, topology: str) -> tuple[str, Accelerator] | None:
        """The type and the exact shape that an AcceleratorConfig means; other boxes of a size share its type."""
        prefix = next((ours for ours, theirs in GENERATIONS.items() if theirs == generation), None)
        try:
            shape = find(f"{prefix}-{topology}")
        except UnknownAccelerator:
            return None
        for name, accelerator in self.offered(zone).items():
            if (accelerator.generation, accelerator.chips) == (shape.generation, shape.chips):
                return name, shape
        return None

    def runtime_versions(self) -> tuple[str, ...]:
        return tuple(sorted({*RUNTIME_VERSIONS, *self._world.runtime_versions}))


def matching(rules: tuple[Any, ...], zone: str, kind: str, spot: bool) -> Iterator[Any]:
    """The rules of one kind that speak of such a node."""
    for rule in rules:
        meant = getattr(rule, "spot", None) in (None, spot)
        if meant and fnmatchcase(zone, rule.zone) and fnmatchcase(kind, rule.type):
            yield rule
