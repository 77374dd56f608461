"""Splash attention for TPUs over packed rows.

`attention.py` chooses it on TPUs. The kernel comes with JAX and leaves out blocks above the diagonal; it takes one row
and one key head at a time, so rows and key heads are mapped over. Soft caps and windows are the kernel's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from penstock.extract.attention import Mask

LANES: Final = 128
BLOCK: Final = 512  #: columns of queries and of keys: large enough for the matrix unit, small enough to skip


def segments(ids: jax.Array) -> jax.Array:
    return ids


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, mask: Mask, *, interpret: bool = False
) -> jax.Array:
    """q [B, T, heads, D], k and v [B, T, kv heads, D]; T is a multiple of LANES."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    batch, width, heads, size = q.shape
    kv_heads = k.shape[2]
    kernel = _kernel(width, heads // kv_heads, mask, interpret=interpret)

    def row(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> Any:
        return jax.vmap(kernel, in_axes=(0, 0, 0, None))(q, k, v, splash.SegmentIds(q=ids, kv=ids))

    # The kernel does not scale. A head's width is mostly a power of four, so that this rounds nothing.
    grouped = (q * jnp.asarray(mask.scale, q.dtype)).reshape(batch, width, kv_heads, heads // kv_heads, size)
    heads_first = grouped.transpose(0, 2, 3, 1, 4)
    out = jax.vmap(row)(heads_first, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), ids)
    back: jax.Array = out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)
    return back


def _kernel(width: int, groups: int, mask: Mask, *, interpret: bool) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (width, width)
    seen = splash.CausalMask(shape) if mask.window is None else splash.LocalMask(shape, (mask.window - 1, 0), 0)
    block = next(size for size in (BLOCK, BLOCK // 2, LANES) if width % size == 0)
    return splash.make_splash_mqa_single_device(
        splash.MultiHeadMask([seen] * groups),
        block_sizes=splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block),
        attn_logits_soft_cap=mask.soft_cap,
        interpret=interpret,
    )
