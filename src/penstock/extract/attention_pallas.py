"""Flash attention over packed rows as a Pallas kernel for GPUs: a block of queries starts at its first document.

`attention.py` chooses it on NVIDIA GPUs: on an H200 it beat cuDNN's packed layout, and it knows soft caps. Rows of
2,048 columns hold documents of some hundred tokens, so most of a row's causal triangle lies between documents: a block
of queries begins its walk at the column where the document of its first query begins (or where its window does), and
masks only blocks in which a document or the diagonal begins. It computes what `attention.attend_plain` does and nothing
else; it must not read outside its row.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

if TYPE_CHECKING:
    from penstock.extract.attention import Mask

BLOCK_Q: Final = 64  #: documents are short: wider blocks are masked more than they save
BLOCK_K: Final = 64
Carry = tuple[jax.Array, jax.Array, jax.Array]  # unscaled output, highest score, sum of shares

# In base 2, far under any score, yet small enough that its rounding is a fraction of one: a row that has seen hidden
# columns only must hold finite sums until its first visible one wipes them out.
HIDDEN: Final = -1e6


def firsts(segments: jax.Array) -> jax.Array:
    """[B, T]: the column where each column's document begins; once per step."""
    columns = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    before = jnp.pad(segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    return jax.lax.cummax(jnp.where(segments != before, columns, 0), axis=1)


def _kernel(q_ref: Any, k_ref: Any, v_ref: Any, firsts_ref: Any, out_ref: Any, *, mask: Mask, block_k: int) -> None:
    block_q, size = q_ref.shape
    begin = pl.program_id(0) * block_q
    q = q_ref[...]
    # a query sees the columns from `low` of its row up to its own: firsts never fall along a row
    low = firsts_ref[pl.dslice(begin, block_q)][:, None]
    q_columns = (begin + jnp.arange(block_q))[:, None]
    # exp2 is the hardware's, and a multiply and a subtraction are one instruction: scores stay as the product left them
    factor = (mask.scale if mask.soft_cap is None else mask.soft_cap) * math.log2(math.e)

    def visit(at: jax.Array, carry: Carry, *, masked: bool) -> Carry:
        out, top, total = carry
        columns = pl.dslice(at * block_k, block_k)
        scores = triton.dot(q, k_ref[columns, :].T)
        if mask.soft_cap is not None:
            # tanh through exp: 1 - 2 / (exp(2x) + 1), exact at both ends
            scores = 1.0 - 2.0 / (jnp.exp(scores * (2.0 * mask.scale / mask.soft_cap)) + 1.0)
        if masked:
            k_columns = (at * block_k + jnp.arange(block_k))[None, :]
            scores = jnp.where((low <= k_columns) & (k_columns <= q_columns), scores, HIDDEN / factor)
        above = jnp.maximum(top, jnp.max(scores, axis=-1) * factor)
        shrink = jnp.exp2(top - above)
        shares = jnp.exp2(scores * factor - above[:, None])
        out = out * shrink[:, None] + triton.dot(shares.astype(v_ref.dtype), v_ref[columns, :])
        return out, above, total * shrink + jnp.sum(shares, axis=-1)

    carry = (
        jnp.zeros((block_q, size), jnp.float32),
        jnp.full((block_q,), HIDDEN, jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
    )
    start = jax.lax.div(firsts_ref[begin], block_k)
    inside = jax.lax.div(begin, block_k)  # blocks before this one lie left of every query
    clear = jnp.minimum(jax.lax.div(firsts_ref[begin + block_q - 1] + block_k - 1, block_k), inside)
    carry = jax.lax.fori_loop(start, clear, functools.partial(visit, masked=True), carry)
    carry = jax.lax.fori_loop(jnp.maximum(start, clear), inside, functools.partial(visit, masked=False), carry)
    last = jax.lax.div(begin + block_q + block_k - 1, block_k)
    out, _, total = jax.lax.fori_loop(inside, last, functools.partial(visit, masked=True), carry)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    firsts: jax.Array,
    mask: Mask,
    *,
    interpret: bool = False,
    block_q: int = BLOCK_Q,
    block_k: int = BLOCK_K,
    warps: int = 4,
    stages: int = 3,
) -> jax.Array:
    """q [B, T, heads, D], k and v [B, T, kv heads, D]; T is a multiple of BLOCK_Q, D a power of two from 16 on."""
    batch, width, heads, size = q.shape
    groups = heads // k.shape[2]
    whole = pl.BlockSpec((None, width, None, size), lambda _, b, h: (b, 0, h // groups, 0))
    block = pl.BlockSpec((None, block_q, None, size), lambda i, b, h: (b, i, h, 0))
    row = pl.BlockSpec((None, width), lambda _, b, __: (b, 0))
    if mask.window is not None:
        firsts = jnp.maximum(firsts, jnp.arange(width, dtype=jnp.int32) - (mask.window - 1))
    call = pl.pallas_call(
        functools.partial(_kernel, mask=mask, block_k=block_k),
        grid=(width // block_q, batch, heads),
        in_specs=[block, whole, whole, row],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),  # type: ignore[no-untyped-call]  # jax leaves it untyped
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="packed_attention",
    )
    out: jax.Array = call(q, k, v, firsts)
    return out
