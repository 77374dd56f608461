"""The two products of a gated MLP and what is done between them, as one kernel for Hopper GPUs.

`silu(x · gate) * (x · up)` is the widest part of a layer: as products and a pass over their results, it writes and
reads back a matrix eleven times as wide as the residual stream (Qwen2.5-0.5B), which costs a tenth of the whole model's
time. Here a block of both products stays in registers until it is one. `model.py` calls what `choose` returned;
`choose` decides by device, type and shape, and says why not. Sums are float32 and rounded once, at the end. It is
written after the Hopper matrix product in JAX's own examples (`pallas/ops/gpu/hopper_matmul_mgpu.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from penstock.extract.config import ModelConfig

ROWS: Final = 64  #: of one warpgroup; a block has two
COLUMNS: Final = 128  #: of the result; a block multiplies as many of gate and of up
DEPTH: Final = 64  #: of one step along the width
STEPS: Final = 4  #: blocks on their way to shared memory: 4 × 48 KiB of 227
CLUSTER: Final = 2  #: blocks, one below the other, that load their columns together
STORED: Final = 64  #: columns written at once
SNAKE: Final = 16  #: blocks side by side before the walk turns, so that they meet in the cache

TILE_ROWS: Final = 2 * ROWS * CLUSTER

#: x [rows, width], gate above up [2 * hidden, width] -> [rows, hidden]
GateUp = Callable[[jax.Array, jax.Array], jax.Array]


class Choice(NamedTuple):
    """The kernel or None, and why."""

    kernel: GateUp | None
    reason: str


def choose(device: jax.Device, config: ModelConfig, dtype: str, tokens: int) -> Choice:
    """For steps of `tokens` tokens; without a kernel the model multiplies as everywhere else."""
    if device.platform != "gpu" or getattr(device, "compute_capability", "") != "9.0":
        return Choice(None, f"the gated MLP's kernel is for Hopper GPUs, and this is {device.device_kind}")
    if dtype not in ("bfloat16", "float16") or config.activation != "silu" or config.mlp_bias:
        return Choice(None, f"the gated MLP's kernel is for 16-bit SiLU without bias, not {dtype} {config.activation}")
    if config.width % DEPTH or config.hidden % COLUMNS or tokens % TILE_ROWS:
        sizes = f"{tokens} tokens, width {config.width}, hidden {config.hidden}"
        return Choice(None, f"the gated MLP's kernel takes multiples of {TILE_ROWS}, {DEPTH} and {COLUMNS}: {sizes}")
    kernel = functools.partial(gate_up, processors=int(getattr(device, "core_count")))  # noqa: B009 - not on all
    return Choice(kernel, "gate, up and SiLU are one kernel (Mosaic, Hopper)")


def gate_up(x: jax.Array, weights: jax.Array, *, processors: int) -> jax.Array:
    """silu(x · gate) * (x · up), for sizes that `choose` takes."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    kernel = gpu.kernel(
        _kernel,
        out_type=jax.ShapeDtypeStruct((x.shape[0], weights.shape[0] // 2), x.dtype),  # type: ignore[no-untyped-call]
        grid=(processors // CLUSTER,),
        grid_names=("clusters",),
        cluster=(CLUSTER,),
        cluster_names=("block",),
        num_threads=3,
        thread_name="group",
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Warpgroup, approx_math=True),
    )
    out: jax.Array = kernel(x, weights)
    return out


def _kernel(x_ref: Any, weights_ref: Any, out_ref: Any) -> None:
    """One persistent block: two warpgroups multiply, a third one fetches."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    hidden = weights_ref.shape[0] // 2
    tiles = (x_ref.shape[0] // TILE_ROWS, hidden // COLUMNS)
    layout = (gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128))

    def pipeline(body: Any, around: Any) -> Any:
        columns = gpu.BlockSpec(
            (COLUMNS, DEPTH), lambda k: (0, k), transforms=layout, delay_release=1, collective_axes=("block",)
        )
        return gpu.emit_pipeline_warp_specialized(
            body,
            grid=(x_ref.shape[1] // DEPTH,),
            in_specs=[
                gpu.BlockSpec((2 * ROWS, DEPTH), lambda k: (0, k), transforms=layout, delay_release=1),
                columns,
                columns,
            ],
            memory_registers=40,
            wg_axis="group",
            num_compute_wgs=2,
            max_concurrent_steps=STEPS,
            compute_context=around,
        )

    def nothing(*_: Any, **__: Any) -> None: ...

    @functools.partial(
        pl.run_scoped,
        room=pipeline(nothing, nothing).get_allocations(x_ref, weights_ref, weights_ref),
        stored=gpu.SMEM((2, COLUMNS // STORED, ROWS, STORED), out_ref.dtype, transforms=layout),
        collective_axes="group",
    )
    def _scope(room: Any, stored: Any) -> None:
        group = jax.lax.axis_index("group")
        mine = pl.ds(group * ROWS, ROWS)

        @gpu.nd_loop((tiles[0] * tiles[1],), collective_axes="clusters")
        def _tile(loop: Any) -> None:
            down, across = gpu.planar_snake(loop.index[0], tiles, 0, SNAKE)
            rows = pl.ds((down * CLUSTER + jax.lax.axis_index("block")) * 2 * ROWS, 2 * ROWS)
            out = out_ref.at[rows, pl.ds(across * COLUMNS, COLUMNS)].at[mine]

            def around(multiply: Any) -> None:
                sums = gpu.ACC((ROWS, COLUMNS), jnp.float32)  # type: ignore[attr-defined]
                pl.run_scoped(functools.partial(_finish, multiply, out, stored.at[group]), gate=sums, up=sums)

            def body(_: Any, x: Any, gate: Any, up: Any, sums: Any) -> Any:
                gpu.wgmma(sums[0], x.at[mine], gate.transpose((1, 0)))
                gpu.wgmma(sums[1], x.at[mine], up.transpose((1, 0)))
                gpu.wgmma_wait(2)  # the step before this one is done: its memory may be filled again
                return sums

            pipeline(body, around)(
                x_ref.at[rows, :],
                weights_ref.at[pl.ds(across * COLUMNS, COLUMNS), :],
                weights_ref.at[pl.ds(hidden + across * COLUMNS, COLUMNS), :],
                allocations=room,
            )

    gpu.wait_smem_to_gmem(0, wait_read_only=True)


def _finish(multiply: Any, out: Any, stored: Any, gate: Any, up: Any) -> None:
    """Multiply through the width, then write the block by way of shared memory."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    multiply((gate, up))
    gates = gate[...]
    # silu through tanh, for which the hardware has an instruction; its error is a fraction of the final rounding
    values = (gates * (0.5 * jnp.tanh(gates * 0.5) + 0.5) * up[...]).astype(out.dtype)
    gpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before, or its memory would be overwritten
    for part in range(COLUMNS // STORED):
        columns = slice(part * STORED, (part + 1) * STORED)
        stored[part] = values[:, columns]
        gpu.commit_smem()  # type: ignore[no-untyped-call]
        gpu.copy_smem_to_gmem(stored.at[part], out.at[:, columns])
