"""A unit's vectors from a model: rows are read and tokenised, packed, run on the device, and cut apart again.

`worker` calls it for one unit after another; weights are loaded and the program compiled once, by the first. What it
gives depends on plan and unit alone, up to the rounding of kernels: the number of rows per step and of processes is the
worker's own choice. Every input row gives at least one piece, if only an empty one that says why. It must not write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import chain, islice

import jax
import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.domain.ledger import Unit
from penstock.extract import engine, feed, fit, packing, work
from penstock.extract.config import load_config
from penstock.extract.engine import Engine
from penstock.extract.layout import Course, Piece
from penstock.extract.mesh import MeshShape, check_shape, make_mesh
from penstock.extract.packing import Placement
from penstock.extract.plan import RunPlan
from penstock.extract.shapes import PackedBatch
from penstock.extract.source import Refused
from penstock.extract.tensors import Array
from penstock.extract.tokens import Cut, Passage
from penstock.extract.weights import load_weights

#: Batches in, results by site name out, in order.
RunBatches = Callable[[Iterator[PackedBatch]], Iterator[Mapping[str, Array]]]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's own business."""

    rows: int | None = None  #: of a step; None: as many as the platform likes
    processes: int = 0  #: that tokenise; 0: none but this one
    in_flight: int = fit.IN_FLIGHT
    mesh: MeshShape | None = None  #: None: rows are cut over all devices of this host


class ModelCompute:
    """Implements `layout.Compute`."""

    def __init__(self, plan: RunPlan, settings: Settings, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._work = work.work_of(plan)
        self._settings = settings
        self._say = say
        work.check(self._work)
        self._feeder = feed.Feeder(self._work.order, settings.processes)  # its processes end with this one
        self._feeder.start()  # they come up while the weights are loaded
        self._engine = self._begin()
        work.check(self._work)  # again: what was loaded is what was compared

    def __call__(self, plan: RunPlan, unit: Unit) -> Course:
        """The first rows are read and tokenised at once; the device works when the pieces are asked for."""
        if plan != self._plan:
            raise ValueError("a worker computes one plan only")
        refused: list[Refused] = []
        passages: list[Passage] = []

        def pieces() -> Generator[Piece, None, None]:
            yield from cut_apart(passages, packed, self._engine.run)
            # Which rows were refused is known when the last one was read.
            yield from map(_empty, refused)

        course = Course(pieces())
        rows = self._feeder.passages(unit.start, unit.stop, refused.append, course.was_read)
        first = list(islice(rows, packing.FIRST_WINDOW))

        def docs() -> Iterator[NDArray[np.int32]]:
            for passage in chain(first, rows):
                passages.append(passage)
                yield passage.tokens

        # The device works on the first windows while the rest is being tokenised.
        packed = packing.stream(
            docs(),
            width=self._work.rules.width,
            segments_max=self._work.segments_max,
            window=self._work.window,
            batch=self._engine.shape[0],
            small=self._engine.small,
            # With its last batch: steps before it keep the device busy until the next unit is there.
            on_last=lambda: course.on_fed(),  # noqa: PLW0108 (it is set later)
        )
        return course

    def _begin(self) -> Engine:
        """Load the weights and compile the step."""
        devices = jax.local_devices()
        width, dtype = self._work.rules.width, self._plan.dtype
        config = load_config(self._work.model)
        sites = [work.site_of(name) for name in self._plan.sites]
        shape = self._settings.mesh or MeshShape(data=len(devices))
        parts, platform = shape.data * shape.fsdp, devices[0].platform
        wished = self._settings.rows or fit.step_rows(platform, width) * parts
        check_shape(shape, config, devices=len(devices), rows=wished)
        room = engine.room(
            config,
            sites,
            devices,
            dtype=dtype,
            rows=wished,
            width=width,
            shape=shape,
            segments_max=self._work.segments_max,
            in_flight=self._settings.in_flight,
        )
        if not room.possible:
            raise room.refusal()
        # Who names the rows is believed, until memory runs out.
        rows = self._settings.rows or room.rows
        if rows < wished:
            self._say(f"{rows} rows a step instead of {wished}, for which memory is too little: {room.memory_wished}")
        mesh = make_mesh(shape, devices) if len(devices) > 1 else None
        made = engine.prepare(
            config,
            sites,
            load_weights(self._work.model, config, sites, dtype, mesh=mesh),
            dtype=dtype,
            rows=rows,
            width=width,
            small=fit.small_rows(platform, rows, parts),
            segments_max=self._work.segments_max,
            mesh=mesh,
            in_flight=self._settings.in_flight,
        )
        kind, rows = devices[0].device_kind, made.shape[0]
        self._say(f"{len(devices)} × {kind}: {rows} rows of {width} a step; {'; '.join(made.said)}")
        return made


def cut_apart(
    passages: list[Passage], packed: Iterable[tuple[PackedBatch, list[Placement]]], run: RunBatches
) -> Generator[Piece, None, None]:
    """The pieces of the results: each passage's own columns, of these the ones that are kept."""
    placed: deque[list[Placement]] = deque()

    def batches() -> Iterator[PackedBatch]:
        for batch, placements in packed:
            placed.append(placements)
            yield batch

    for found in run(batches()):
        for place in placed.popleft():
            yield _piece(passages[place.document], place, found)


def _piece(passage: Passage, place: Placement, found: Mapping[str, Array]) -> Piece:
    here = slice(place.column, place.column + place.length)
    whole = bool(passage.keep.all())
    kept = np.flatnonzero(passage.keep).astype(np.int32)
    return Piece(
        row=passage.row,
        document=passage.id,
        tokens=passage.tokens if whole else passage.tokens[kept],
        sites={
            site: values[place.row, here] if whole else values[place.row, here][kept] for site, values in found.items()
        },
        positions=kept + np.int32(passage.first),
        file=passage.file,
        offset=passage.offset,
        total=passage.total,
        first=passage.first,
        cut=passage.cut or "",
        # Windows leave nothing out, so that only what a cut document keeps is less than the document.
        dropped=passage.total - len(passage.tokens) if passage.cut in (Cut.HEAD, Cut.TAIL) else 0,
    )


def _empty(refused: Refused) -> Piece:
    return Piece(
        row=refused.row,
        document=f"row {refused.row}" if refused.id is None else refused.id,
        tokens=np.zeros(0, np.int32),
        sites={},
        file=refused.file,
        offset=refused.line - 1,
        note=refused.reason,
        excerpt=refused.excerpt,
    )
