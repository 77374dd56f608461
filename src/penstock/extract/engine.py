"""The engine: runs the model's step over packed batches, with copies to the host and later steps under way.

`compute` calls `room` and `prepare` once per worker and `run` for each unit. One shape is compiled, and on request a
second one of fewer rows, for what is left over at the end of a unit; a batch of another shape is an error, because it
would compile anew in the middle of a run. A step that does not fit the device has half the rows, before the first unit.
Results are copied to page-locked memory as soon as they exist (plain copies cost two thirds of the speed on a GPU) and
handed over in order, as views where the platform allows. It must not know documents: it takes batches and gives arrays.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from penstock.extract import attention, gate_up
from penstock.extract.attention import Attention
from penstock.extract.capture import arrange
from penstock.extract.config import ModelConfig
from penstock.extract.fit import IN_FLIGHT, Fit, fit
from penstock.extract.fused import fuse
from penstock.extract.gate_up import GateUp
from penstock.extract.mesh import ONE_DEVICE, ROWS, MeshShape
from penstock.extract.model import Params, Step, make_step
from penstock.extract.shapes import PackedBatch, Site

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

PINNED: Final = "pinned_host"
PATIENCE_S: Final = 5.0  #: with another run, whose steps are before one's own

#: Additions and biases inside the matrix products, and the library's own products rather than generated ones. In a
#: profile on an H200 the additions then had no kernels of their own; the options' worth alone was not measured.
GPU_OPTIONS: Final[dict[str, bool | int | float | str]] = {
    "xla_gpu_enable_cublaslt": True,
    "xla_gpu_enable_triton_gemm": False,
}

#: How XLA says that a device's memory does not suffice, and how it names the memories inside a processor: what a kernel
#: asks of those does not shrink with the rows.
OUT_OF_MEMORY: Final = ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", "out of memory")
INSIDE: Final = ("vmem", "smem", "shared memory")


class UnderWay:
    """A step that has a place, and what it gives once it was started."""

    def __init__(self) -> None:
        self.results: dict[str, jax.Array] = {}


class Queue:
    """Steps under way of all runs, in the order in which the device comes to them; no more than there is memory for.

    One unit's last steps overlap the next one's first. Whoever finds no place takes the result of its own oldest step,
    if that is the next to be there. If steps of another run are before it, it waits for one of their places: if it
    waited for its own, it would start its next step only when the device has nothing left to do.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._steps: list[UnderWay] = []
        self._changed = threading.Condition()

    def enter(self, oldest: UnderWay | None) -> UnderWay | None:
        """A place for one more step, of a run whose oldest is this; None: it has to take that one first."""
        with self._changed:
            # Not for ever: who has the steps before may have failed, and be held by its own error.
            patience = None if oldest is None else PATIENCE_S
            self._changed.wait_for(lambda: len(self._steps) < self._most or self._steps[0] is oldest, patience)
            if len(self._steps) >= self._most:
                return None
            step = UnderWay()
            self._steps.append(step)
            return step

    def leave(self, step: UnderWay) -> None:
        with self._changed:
            self._steps.remove(step)
            self._changed.notify_all()


class Engine:
    """A compiled step, its parameters, and batches on their way through it."""

    def __init__(
        self,
        step: Step,
        params: Params,
        *,
        rows: int,
        width: int,
        small: int | None = None,
        in_flight: int = IN_FLIGHT,
        pinned: bool | None = None,
        mesh: jax.sharding.Mesh | None = None,
        said: Sequence[str] = (),
    ) -> None:
        """`small`: rows of the second shape. `pinned` None: where the platform has page-locked memory.

        `said` is what was chosen before, and why.
        """
        if in_flight < 1:
            raise ValueError(f"in_flight {in_flight}: at least 1 step must be under way")
        self.shape = (rows, width)
        self._in_flight = in_flight
        self._queue = Queue(in_flight)
        self._params = params
        self._device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
        self._rows: jax.sharding.NamedSharding | None = None
        if mesh is not None:
            spec = jax.sharding.PartitionSpec(ROWS)  # type: ignore[no-untyped-call]  # jax leaves much untyped
            self._rows = jax.sharding.NamedSharding(mesh, spec)
        self._pinned = _has_pinned(self._device) if pinned is None else pinned
        place = "page-locked memory" if self._pinned else "the host's memory"
        self.said = (*said, f"{in_flight} steps under way, results to {place}")
        options = GPU_OPTIONS if self._device.platform == "gpu" else None
        made = jax.jit(step, compiler_options=options)
        self._steps = {self.shape: self._compiled(made, self.shape)}
        self.small = small
        if small is not None:
            try:
                self._steps[small, width] = self._compiled(made, (small, width))
            except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
                # What is left over at the end of a unit is padded, then: a little slower, and nothing else.
                self.small = None
                self.said = (*self.said, f"no steps of {small} rows: {_line(error)}")

    def _compiled(self, step: Any, shape: tuple[int, int]) -> Any:
        ints = jax.ShapeDtypeStruct(shape, np.int32, sharding=self._rows)  # type: ignore[no-untyped-call]
        return step.lower(self._params, ints, ints, ints).compile()

    def rehearse(self) -> None:
        """One step of padding, with room taken for the results of all others: what does not fit fails here.

        A program may compile and still find no room when it runs.
        """
        results = jax.tree.leaves(self._steps[self.shape].out_info)
        others = [
            jnp.zeros(each.shape, each.dtype, device=each.sharding)
            for each in results
            for _ in range(self._in_flight - 1)
        ]
        for each in others:
            each.block_until_ready()
        empty = np.zeros(self.shape, np.int32)
        _taken(self._start(PackedBatch(tokens=empty, positions=empty, segments=empty)))

    def run(self, batches: Iterable[PackedBatch]) -> Iterator[dict[str, Array]]:
        """One dictionary per batch, by site name, [rows, width, d] each, in order; read-only.

        Batches are asked for until there are none, and the last results are waited for after that.

        Arrays may lie in page-locked memory, which lasts as long as they do: copy what is to be kept for long. Several
        threads may run batches: together they have no more steps under way than one has, for which there is memory.
        """
        under_way: deque[UnderWay] = deque()
        try:
            for batch in batches:
                while (step := self._queue.enter(under_way[0] if under_way else None)) is None:
                    yield self._take(under_way)
                under_way.append(step)
                step.results = self._start(batch)
                if len(under_way) >= self._in_flight:
                    yield self._take(under_way)
            while under_way:
                yield self._take(under_way)
        finally:
            for step in under_way:
                self._queue.leave(step)

    def _take(self, under_way: deque[UnderWay]) -> dict[str, Array]:
        found = _taken(under_way[0].results)
        self._queue.leave(under_way.popleft())
        return found

    def _start(self, batch: PackedBatch) -> dict[str, jax.Array]:
        rows, width = batch.tokens.shape
        step = self._steps.get((rows, width))
        if step is None:
            raise ValueError(f"batch is {(rows, width)} and the program was compiled for {self.shape}")
        given = jax.device_put((batch.tokens, batch.positions, batch.segments), self._rows or self._device)
        found: dict[str, jax.Array] = step(self._params, *given)
        if self._pinned:
            return {
                name: jax.device_put(value, value.sharding.with_memory_kind(PINNED)) for name, value in found.items()
            }
        for value in found.values():
            value.copy_to_host_async()
        return found


def room(
    config: ModelConfig,
    sites: Sequence[Site],
    devices: Sequence[jax.Device],
    *,
    dtype: str,
    rows: int,
    width: int,
    shape: MeshShape = ONE_DEVICE,
    segments_max: int = 32,
    in_flight: int = IN_FLIGHT,
) -> Fit:
    """The rows, `rows` at most, that these devices are likely to have memory for; asked before weights are loaded."""
    facts = attention.Device.of(devices[0])
    chosen = attention.choose(facts, config, dtype=dtype, width=width, segments_max=segments_max)
    gated = len(devices) == 1 and gate_up.choose(devices[0], config, dtype, rows * width).kernel is not None
    return fit(
        config,
        arrange(config, sites),
        rows=rows,
        width=width,
        dtype=dtype,
        shape=shape,
        limit=_limit(devices),
        scores=chosen.name == "plain",
        gated=gated,
        in_flight=in_flight,
    )


def _limit(devices: Sequence[jax.Device]) -> int | None:
    """Of the device that has the least; None where devices do not say, as CPUs."""
    told = [stats for device in devices if (stats := device.memory_stats()) is not None]
    return min((stats["bytes_limit"] for stats in told if "bytes_limit" in stats), default=None)


def prepare(
    config: ModelConfig,
    sites: Sequence[Site],
    params: Params,
    *,
    dtype: str,
    rows: int,
    width: int,
    small: int | None = None,
    segments_max: int = 32,
    mesh: jax.sharding.Mesh | None = None,
    in_flight: int = IN_FLIGHT,
    rehearsed: bool | None = None,
) -> Engine:
    """The fastest engine this device can compile and has memory for, with `rows` at most.

    `said` has what was chosen, and what was given up and why. `rehearsed` None: a step is run first on all but CPUs.
    """
    devices = [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)
    shape = ONE_DEVICE if mesh is None else MeshShape(**mesh.shape)
    facts = attention.Device.of(devices[0])
    maker = _Maker(
        config,
        sites,
        fuse(params) if mesh is None else params,
        dtype=dtype,
        width=width,
        chosen=attention.choose(facts, config, dtype=dtype, width=width, segments_max=segments_max),
        mesh=mesh,
        in_flight=in_flight,
        rehearsed=facts.platform != "cpu" if rehearsed is None else rehearsed,
    )
    parts = shape.data * shape.fsdp
    while True:
        try:
            return maker.make(devices[0], rows, small)
        except jax.errors.JaxRuntimeError as error:
            if not _out_of_memory(error):
                raise
            line = _line(error)
        # Only here, behind the error, is what the step held given back.
        if rows == parts:
            raise room(
                config, sites, devices, dtype=dtype, rows=rows, width=width, shape=shape, in_flight=in_flight
            ).refusal(line)
        fewer = rows // parts // 2 * parts
        maker.tell(f"{fewer} rows a step instead of {rows}, for which there is no memory: {line}")
        rows, small = fewer, None if small is None or small % (2 * parts) else small // 2


class _Way(NamedTuple):
    """One way to make the step; `said` tells of its attention and of its gated MLP."""

    attention: Attention
    product: GateUp | None
    said: tuple[str, str]

    @property
    def key(self) -> tuple[str, bool]:
        return self.attention.name, self.product is not None


class _Maker:
    """Makes the engine of so many rows, in the fastest way that compiles; what did not is not tried again."""

    def __init__(
        self,
        config: ModelConfig,
        sites: Sequence[Site],
        params: Params,
        *,
        dtype: str,
        width: int,
        chosen: Attention,
        mesh: jax.sharding.Mesh | None,
        in_flight: int,
        rehearsed: bool,
    ) -> None:
        self._config = config
        self._sites = sites
        self._params = params
        self._dtype = dtype
        self._width = width
        self._chosen = chosen
        self._mesh = mesh
        self._in_flight = in_flight
        self._rehearsed = rehearsed
        self._told: list[str] = []
        self._failed: set[tuple[str, bool]] = set()

    def tell(self, line: str) -> None:
        self._told.append(line)
        logger.warning("%s", line)

    def make(self, device: jax.Device, rows: int, small: int | None) -> Engine:
        """Out of memory is for the caller: another way would need as much or more."""
        ways = [way for way in self._ways(device, rows) if way.key not in self._failed]
        for number, way in enumerate(ways):
            try:
                return self._made(way, rows, small if small is None or self._takes(device, way, small) else None)
            except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
                if _out_of_memory(error) or number == len(ways) - 1:
                    raise
                self._failed.add(way.key)
                self.tell(f"{way.said[0]}, {way.said[1]}: not compiled: {_line(error)}")
        raise AssertionError("the last way returns or raises, and plain attention is never left out")

    def _ways(self, device: jax.Device, rows: int) -> Iterator[_Way]:
        kernel = gate_up.Choice(None, "on a mesh the gated MLP is cut, and multiplied as everywhere else")
        if self._mesh is None:
            kernel = gate_up.choose(device, self._config, self._dtype, rows * self._width)
        without = "without the gated MLP's kernel"
        yield _Way(self._chosen, kernel.kernel, (self._chosen.reason, kernel.reason))
        if kernel.kernel is not None:
            yield _Way(self._chosen, None, (self._chosen.reason, without))
        if self._chosen.name != "plain":
            yield _Way(attention.plain(), None, ("plain attention", without))

    def _takes(self, device: jax.Device, way: _Way, rows: int) -> bool:
        return not way.product or bool(gate_up.choose(device, self._config, self._dtype, rows * self._width).kernel)

    def _made(self, way: _Way, rows: int, small: int | None) -> Engine:
        step = make_step(
            self._config,
            self._sites,
            attention=way.attention,
            dtype=self._dtype,
            mesh=self._mesh,
            gate_up=way.product,
        )
        made = Engine(
            step,
            self._params,
            rows=rows,
            width=self._width,
            small=small,
            in_flight=self._in_flight,
            mesh=self._mesh,
            said=(*way.said, *self._told),
        )
        if self._rehearsed:
            made.rehearse()
        return made


def _out_of_memory(error: Exception) -> bool:
    inside = any(word in _line(error).lower() for word in INSIDE)
    return not inside and any(word in str(error) for word in OUT_OF_MEMORY)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def keep_compiled(folder: Path) -> None:
    """Keep compiled programs in a folder, so that the next worker on this machine starts without compiling."""
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))  # type: ignore[no-untyped-call]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)  # type: ignore[no-untyped-call]


class _Held:
    """Memory of a JAX array as numpy sees it; numpy holds this, and this holds the array."""

    def __init__(self, array: jax.Array) -> None:
        self._array = array
        self.__array_interface__ = {
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "data": (array.addressable_shards[0].data.unsafe_buffer_pointer(), True),
            "version": 3,
        }


def _taken(found: dict[str, jax.Array]) -> dict[str, Array]:
    return {name: _view(value) for name, value in found.items()}


def _view(array: jax.Array) -> Array:
    """numpy's view of what has arrived. JAX itself would copy page-locked memory once more, on one core."""
    array.block_until_ready()
    if array.sharding.memory_kind == PINNED and array.is_fully_addressable and len(array.addressable_shards) == 1:
        flat: Array = np.asarray(_Held(array))
        return flat.view(np.dtype(array.dtype)).reshape(array.shape)
    return np.asarray(array)


def _has_pinned(device: jax.Device) -> bool:
    # A CPU's results are on the host already.
    return device.platform != "cpu" and any(memory.kind == PINNED for memory in device.addressable_memories())
