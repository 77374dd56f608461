"""The engine: runs the model's step over packed batches, with copies to the host and later steps under way.

`compute` calls `prepare` once per worker and `run` for each unit. One shape is compiled, and on request a second one of
fewer rows, for what is left over at the end of a unit; a batch of another shape is an error, because it would compile
anew in the middle of a run. Results are copied to page-locked memory as soon as they
exist (plain copies cost two thirds of the speed on a GPU) and handed over in order, as views where the platform allows.
It must not know documents: it takes batches and gives arrays.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import numpy.typing as npt

from penstock.extract import attention, gate_up
from penstock.extract.config import ModelConfig
from penstock.extract.fused import fuse
from penstock.extract.mesh import ROWS
from penstock.extract.model import Params, Step, make_step
from penstock.extract.shapes import PackedBatch, Site

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

#: Steps whose results the host has not taken yet: one computes, one is copied, one waits for the device.
IN_FLIGHT: Final = 3
PINNED: Final = "pinned_host"

#: Additions and biases inside the matrix products, and the library's own products rather than generated ones. In a
#: profile on an H200 the additions then had no kernels of their own; the options' worth alone was not measured.
GPU_OPTIONS: Final[dict[str, bool | int | float | str]] = {
    "xla_gpu_enable_cublaslt": True,
    "xla_gpu_enable_triton_gemm": False,
}


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
                self.said = (*self.said, f"no steps of {small} rows: {str(error).splitlines()[0][:200]}")

    def _compiled(self, step: Any, shape: tuple[int, int]) -> Any:
        ints = jax.ShapeDtypeStruct(shape, np.int32, sharding=self._rows)  # type: ignore[no-untyped-call]
        return step.lower(self._params, ints, ints, ints).compile()

    def run(self, batches: Iterable[PackedBatch]) -> Iterator[dict[str, Array]]:
        """One dictionary per batch, by site name, [rows, width, d] each, in order; read-only.

        Batches are asked for until there are none, and the last results are waited for after that.

        Arrays may lie in page-locked memory, which lasts as long as they do: copy what is to be kept for long.
        """
        under_way: deque[dict[str, jax.Array]] = deque()
        for batch in batches:
            under_way.append(self._start(batch))
            if len(under_way) >= self._in_flight:
                yield _taken(under_way.popleft())
        while under_way:
            yield _taken(under_way.popleft())

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
) -> Engine:
    """The fastest engine this device can compile; `said` has what was chosen, and what was given up and why."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    facts = attention.Device.of(device)
    chosen = attention.choose(facts, config, dtype=dtype, width=width, segments_max=segments_max)
    kernel, why = gate_up.Choice(None, "on a mesh the gated MLP is cut, and multiplied as everywhere else"), ""
    if mesh is None:
        params = fuse(params)
        kernel = gate_up.choose(device, config, dtype, rows * width)
        if small is not None and kernel.kernel and not gate_up.choose(device, config, dtype, small * width).kernel:
            small = None
    tries = [(chosen, kernel.kernel, (chosen.reason, kernel.reason))]
    if kernel.kernel is not None:
        tries.append((chosen, None, (chosen.reason, "without the gated MLP's kernel")))
    if chosen.name != "plain":
        tries.append((attention.plain(), None, ("plain attention", "without the gated MLP's kernel")))
    for number, (way, product, said) in enumerate(tries):
        step = make_step(config, sites, attention=way, dtype=dtype, mesh=mesh, gate_up=product)
        try:
            return Engine(
                step,
                params,
                rows=rows,
                width=width,
                small=small,
                in_flight=in_flight,
                mesh=mesh,
                said=(*said, why) if why else said,
            )
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            if number == len(tries) - 1:
                raise
            why = f"{said[0]}, {said[1]}: not compiled: {str(error).splitlines()[0][:200]}"
            logger.warning("%s", why)
    raise AssertionError("the last try returns or raises")


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
