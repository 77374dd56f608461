"""What a worker's step takes on the accelerators a plan is meant for: the memory of `tpu extract --dry-run`.

It puts together what the catalogue knows of `--on` and the arithmetic by which a worker chooses its rows, so that both
say the same. Nothing is asked of a server, a device or jax; a pool or a pattern is a TPU of unknown size here.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from penstock.domain import catalogue
from penstock.domain.catalogue_memory import device_memory, devices_per_host
from penstock.extract import fit as fitting
from penstock.extract import work as planning
from penstock.extract.capture import arrange
from penstock.extract.mesh import Memory, MeshShape, check_shape, parse_mesh
from penstock.extract.unit_writer import HELD_BYTES
from penstock.extract.work import Planned


class StepMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's step on one kind of host. The fields are the keys of `--json`; sizes are bytes of each device."""

    on: str
    platform: str
    devices: int  #: of one host: a worker has all of them
    mesh: str
    rows: int  #: of a step, over all devices
    rows_full: int  #: that would fill the devices, or those that were named
    width: int
    in_flight: int
    attention: str  #: "blocks", or "plain", which writes its scores out
    parts: Memory
    total: int
    total_full: int  #: with `rows_full`
    total_one: int  #: with one row a device
    device: int | None  #: what there is; None: not known
    usable: int | None  #: of which a worker plans with this much
    fits: bool | None
    possible: bool | None  #: False: what is counted exactly is more than there is
    host: int  #: page-locked memory of the host


class _Place(NamedTuple):
    name: str
    platform: str
    devices: int
    memory: int | None


def memory_of(
    planned: Planned, mesh: str | None, on: str | None = None, rows: int | None = None
) -> tuple[StepMemory, ...]:
    """On each accelerator that `on` names; on a CPU and on an accelerator without limits if it names none.

    Refuses what each worker there would refuse: a mesh that is not the host's, rows that the mesh cannot cut. `rows` is
    what a worker was told to begin with; None: as many as fill the devices.
    """
    shape = parse_mesh(mesh)
    return tuple(_step(planned, place, shape, rows) for place in _places(on or "", shape))


def _places(on: str, shape: MeshShape | None) -> list[_Place]:
    devices = 1 if shape is None else shape.devices
    names = list(dict.fromkeys(part.strip() for part in on.split(",") if part.strip()))
    if not names:
        return [_Place("a CPU", "cpu", devices, None), _Place("a GPU or TPU", "gpu", devices, None)]
    found: list[_Place] = []
    for name in names:
        try:
            known = catalogue.find(name)
            found.append(_Place(known.name, "tpu", devices_per_host(known), device_memory(known)))
        except catalogue.UnknownAccelerator:
            found.append(_Place(name, "tpu", devices, None))
    return found


def _step(planned: Planned, place: _Place, shape: MeshShape | None, named: int | None) -> StepMemory:
    shape = shape or MeshShape(data=place.devices)
    width, dtype = planning.work_of(planned.plan).rules.width, planned.plan.dtype
    parts = shape.data * shape.fsdp
    rows = named or fitting.step_rows(place.platform, width) * parts
    check_shape(shape, planned.config, devices=place.devices, rows=rows)
    course = arrange(planned.config, planned.sites)
    scores = fitting.writes_scores(place.platform, dtype, width)

    def taken(rows: int) -> fitting.Fit:
        return fitting.fit(
            planned.config,
            course,
            rows=rows,
            width=width,
            dtype=dtype,
            shape=shape,
            limit=place.memory,
            scores=scores,
        )

    found = taken(rows)
    return StepMemory(
        on=place.name,
        platform=place.platform,
        devices=place.devices,
        mesh=str(shape),
        rows=found.rows,
        rows_full=rows,
        width=width,
        in_flight=found.in_flight,
        attention="plain" if scores else "blocks",
        parts=found.memory,
        total=found.memory.total,
        total_full=found.memory_wished.total,
        total_one=taken(parts).memory.total,
        device=place.memory,
        usable=found.usable,
        fits=None if place.memory is None else found.fits,
        possible=None if place.memory is None else found.possible,
        host=0 if place.platform == "cpu" else found.memory.results * place.devices + HELD_BYTES,
    )
