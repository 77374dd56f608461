"""A workload as users write it: zones as they truly are, pools, queues and job classes, read from TOML and checked.

`tpu sim run` reads one with `read_workload` and hands it to `sim.workload`. Whatever does not fit is refused with one
line that names field, value and rule, before anything runs. It must not simulate anything.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from penstock.domain import catalogue, limits
from penstock.domain.admission import BadInput, check_name
from penstock.domain.catalogue import Accelerator
from penstock.domain.catalogue_names import UnknownAccelerator


class ZoneSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One zone as it truly is: the planner has to find out."""

    name: str
    chips: int = 1_000_000
    refusal_rate: float = 0.0  #: share of creates that are refused though chips are there
    refusal_s: float = 0.0  #: how long such a request is pending before it fails; 0: refused at once
    preemptions_per_hour: float = 0.0  #: of each ready spot slice
    notice_s: float = 0.0  #: before such a preemption
    ready_s: tuple[float, float] = (60.0, 180.0)
    flips_at_h: float | None = None  #: from then on `refusal_rate_after` holds
    refusal_rate_after: float = 0.0


class PoolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slices of one kind that the controller makes and lets go as jobs need them."""

    name: str
    accelerator: str
    zones: tuple[str, ...] = ()  #: all, when empty
    min: int = 0
    max: int = 1
    spot: bool = True
    idle_s: float = 600.0
    race: int = 1


class QueueSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One queue; all of them belong to one team."""

    name: str
    weight: float = 1.0
    band: int = 0
    quota_chips: int | None = None
    borrow_chips: int | None = None


class JobClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Jobs of one kind, arriving evenly from `from_h` on over `over_h` hours (0: all at once)."""

    accelerator: str
    count: int
    queue: str = "default"
    duration_s: tuple[float, float] = (600.0, 3600.0)
    checkpoint_s: float = 600.0  #: what ran since the last multiple of it is lost with the slice; 0: everything is
    slices: int = 1
    from_h: float = 0.0
    over_h: float = 0.0
    priority: int = 0


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole question: zones, pools, queues, jobs. `order` compares learned zone odds with the order as written."""

    zones: tuple[ZoneSpec, ...]
    pools: tuple[PoolSpec, ...]
    jobs: tuple[JobClass, ...]
    queues: tuple[QueueSpec, ...] = (QueueSpec("default"),)
    name: str = "workload"
    seed: int = 0
    hours_max: float = 24.0 * 14
    pace_s: float = 1.0  #: rounds of the controller are at least so far apart; 0: one for every event
    order: Literal["learned", "fixed"] = "learned"


def read_workload(path: Path, *, seed: int | None = None, order: str | None = None) -> Workload:
    """Read and check a workload file; what is wrong is said with its field."""
    try:
        fields = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput("workload", str(path), f"is not TOML: {error}") from error
    if seed is not None:
        fields["seed"] = seed
    if order is not None:
        fields["order"] = order
    try:
        workload = msgspec.convert(fields, Workload)
    except msgspec.ValidationError as error:
        raise _misfit(fields, str(error)) from error
    for field, value in _numbers("", fields):
        if not math.isfinite(value):
            raise BadInput(field, value, "must be a finite number")
    check_workload(workload)
    return workload


def _misfit(fields: object, message: str) -> BadInput:
    """The decoder's complaint as a line about one field and its value."""
    said, _, where = message.partition(" - at `")
    path = where.rstrip("`").removeprefix("$").lstrip(".")
    value = fields
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        value = value[key] if isinstance(value, dict) else value[int(index)]  # type: ignore[index]
    if isinstance(value, dict | list):  # a field too many or too few: the message names it, the table would not help
        named = re.search(r"`(\w+)`", said)
        shown = named.group(1) if named else path
        rule = "is not a known field" if "unknown field" in said else f"does not fit: {said}"
        if "missing required" in said:
            rule = "is missing"
        return BadInput(path or "workload", shown, rule, "see docs/howto/simulate-a-workload.md for the fields")
    return BadInput(path, value, f"does not fit: {said}")


def _numbers(path: str, value: object) -> Iterator[tuple[str, float]]:
    """Every fraction in a TOML document with its path: the language has infinities, a simulation ends."""
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _numbers(f"{path}[{number}]", each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _numbers(f"{path}.{key}" if path else key, each)


def check_workload(workload: Workload) -> None:
    """Raise `BadInput` for the first thing that could not be simulated as written."""
    for field, value, good, rule in _rules(workload):
        if not good:
            raise BadInput(field, value, rule)
    zones = [zone.name for zone in workload.zones]
    accelerators = []
    for number, pool in enumerate(workload.pools):
        accelerators.append(_accelerator(f"pools[{number}].accelerator", pool.accelerator).name)
        for zone in pool.zones:
            if zone not in zones:
                raise BadInput(f"pools[{number}].zones", zone, "is not one of the zones", f"have {_list(zones)}")
    queues = [queue.name for queue in workload.queues]
    for number, job in enumerate(workload.jobs):
        row = _accelerator(f"jobs[{number}].accelerator", job.accelerator)
        if row.name not in accelerators:
            have = f"have {_list(accelerators)}"
            raise BadInput(f"jobs[{number}].accelerator", job.accelerator, "is in none of the pools", have)
        if job.queue not in queues:
            raise BadInput(f"jobs[{number}].queue", job.queue, "is not one of the queues", f"have {_list(queues)}")


def _rules(workload: Workload) -> Iterator[tuple[str, object, bool, str]]:
    """(field, value, whether it is good, rule) of every number and name."""
    yield "hours_max", workload.hours_max, workload.hours_max > 0, "must be above 0"
    yield "pace_s", workload.pace_s, 0 <= workload.pace_s <= limits.TICK_S, f"must be from 0 to {limits.TICK_S:g}"
    for kind, named in (("zones", workload.zones), ("pools", workload.pools), ("queues", workload.queues)):
        yield from _names(kind, [each.name for each in named])
    yield "jobs", len(workload.jobs), bool(workload.jobs), "must have at least one entry"
    for number, zone in enumerate(workload.zones):
        yield from _zone_rules(f"zones[{number}]", zone)
    for number, pool in enumerate(workload.pools):
        at = f"pools[{number}]"
        yield f"{at}.max", pool.max, pool.max >= 1, "must be at least 1"
        yield f"{at}.min", pool.min, 0 <= pool.min <= pool.max, f"must be from 0 to max, which is {pool.max}"
        yield f"{at}.idle_s", pool.idle_s, pool.idle_s >= 0, "must be 0 or more"
        most = limits.RACE_ZONES_MAX
        yield f"{at}.race", pool.race, 1 <= pool.race <= most, f"must be from 1 to {most}"
    for number, queue in enumerate(workload.queues):
        at = f"queues[{number}]"
        yield f"{at}.weight", queue.weight, queue.weight > 0, "must be above 0"
        yield f"{at}.quota_chips", queue.quota_chips, (queue.quota_chips or 0) >= 0, "must be 0 or more"
        yield f"{at}.borrow_chips", queue.borrow_chips, (queue.borrow_chips or 0) >= 0, "must be 0 or more"
    for number, job in enumerate(workload.jobs):
        yield from _job_rules(f"jobs[{number}]", job)


def _names(kind: str, names: Sequence[str]) -> Iterator[tuple[str, object, bool, str]]:
    yield kind, len(names), bool(names), "must have at least one entry"
    for number, name in enumerate(names):
        check_name(f"{kind}[{number}].name", name)
        yield f"{kind}[{number}].name", name, name not in names[:number], "is there twice"


def _zone_rules(at: str, zone: ZoneSpec) -> Iterator[tuple[str, object, bool, str]]:
    yield f"{at}.chips", zone.chips, zone.chips >= 0, "must be 0 or more"
    for field in ("refusal_rate", "refusal_rate_after"):
        rate = getattr(zone, field)
        yield f"{at}.{field}", rate, 0 <= rate <= 1, "must be from 0 to 1"
    for field in ("refusal_s", "preemptions_per_hour", "notice_s"):
        yield f"{at}.{field}", getattr(zone, field), getattr(zone, field) >= 0, "must be 0 or more"
    yield f"{at}.flips_at_h", zone.flips_at_h, (zone.flips_at_h or 0) >= 0, "must be 0 or more"
    yield f"{at}.ready_s", zone.ready_s, 0 <= zone.ready_s[0] <= zone.ready_s[1], "must be least and most seconds"


def _job_rules(at: str, job: JobClass) -> Iterator[tuple[str, object, bool, str]]:
    yield f"{at}.count", job.count, job.count >= 1, "must be at least 1"
    least, most = job.duration_s
    yield f"{at}.duration_s", job.duration_s, 0 < least <= most, "must be least and most seconds, above 0"
    most_slices = limits.GANG_SLICES_MAX
    yield f"{at}.slices", job.slices, 1 <= job.slices <= most_slices, f"must be from 1 to {most_slices}"
    for field in ("checkpoint_s", "from_h", "over_h"):
        yield f"{at}.{field}", getattr(job, field), getattr(job, field) >= 0, "must be 0 or more"
    high = limits.PRIORITY_MAX
    yield f"{at}.priority", job.priority, -high <= job.priority <= high, f"must be from {-high} to {high}"


def _accelerator(field: str, name: str) -> Accelerator:
    try:
        return catalogue.find(name)
    except UnknownAccelerator as error:
        nearest = f"nearest valid names: {_list(error.nearest)}" if error.nearest else ""
        raise BadInput(field, name, f"is not in the catalogue: {error.rule}", nearest) from error


def _list(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))
