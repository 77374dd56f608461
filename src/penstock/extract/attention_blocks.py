"""Attention over packed rows for CPUs: a block of queries meets only as many columns as its documents reach back.

`attention.py` chooses it. Rows of 2,048 columns hold documents of some hundred tokens, and the definition computes the
scores of the whole row for each of them. Here rows and blocks of queries are taken one after another, each with the
shortest of a few fixed lengths of columns that covers its documents: shapes stay static, as the compiler needs, and a
length that is not taken costs nothing. Scores, softmax and product are those of `attention.attend_plain`, over fewer
columns that are hidden; it must not read outside its row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import jax
import jax.numpy as jnp

from penstock.extract.attention_pallas import firsts

if TYPE_CHECKING:
    from penstock.extract.attention import Mask

BLOCK: Final = 64  #: queries; with more, blocks reach into more documents
SHORTEST: Final = 128  #: columns
FROM: Final = 512  #: columns of a row; below, it is soon computed, and several lengths take longer to compile
HIDDEN: Final = -1e30  #: finite, as the definition's

segments = firsts  #: of each column, where its document begins


def attend(q: jax.Array, k: jax.Array, v: jax.Array, firsts: jax.Array, mask: Mask) -> jax.Array:
    """q [B, T, heads, D], k and v [B, T, kv heads, D]; T is a multiple of BLOCK."""

    def row(given: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return _row(*given, mask)

    # Row by row: a length would otherwise be that of the longest reach among the rows.
    rows: jax.Array = jax.lax.map(row, (q, k, v, firsts))
    return rows


def lengths(width: int) -> list[int]:
    """128, 192, 256, 384, …: each at most half as long again as the one before, and the whole row at the end."""
    found: list[int] = []
    size = SHORTEST
    while size < width:
        found += [size, size * 3 // 2]
        size *= 2
    return [each for each in found if each < width] + [width]


def _row(q: jax.Array, k: jax.Array, v: jax.Array, firsts: jax.Array, mask: Mask) -> jax.Array:
    width, heads, size = q.shape
    known = lengths(width)

    def block(number: jax.Array) -> jax.Array:
        begin = number * BLOCK
        columns = begin + jnp.arange(BLOCK)
        low = jax.lax.dynamic_slice_in_dim(firsts, begin, BLOCK)
        if mask.window is not None:
            low = jnp.maximum(low, columns - mask.window + 1)
        queries = jax.lax.dynamic_slice_in_dim(q, begin, BLOCK).reshape(BLOCK, k.shape[1], -1, size)

        def over(length: int) -> jax.Array:
            # Near the row's beginning there are not so many columns to the left: some to the right are hidden then.
            start = jnp.maximum(begin + BLOCK - length, 0)
            keys, values = (jax.lax.dynamic_slice_in_dim(each, start, length) for each in (k, v))
            scores = jnp.einsum("tkgd,skd->kgts", queries, keys, preferred_element_type=jnp.float32) * mask.scale
            if mask.soft_cap is not None:
                scores = jnp.tanh(scores / mask.soft_cap) * mask.soft_cap
            seen = start + jnp.arange(length)
            visible = (low[:, None] <= seen) & (seen <= columns[:, None])
            shares = jax.nn.softmax(jnp.where(visible, scores, HIDDEN), axis=-1).astype(v.dtype)
            out = jnp.einsum("kgts,skd->tkgd", shares, values, preferred_element_type=jnp.float32)
            return out.reshape(BLOCK, heads, size).astype(q.dtype)

        # Documents' beginnings never fall along a row, so that the first query reaches back furthest.
        which = jnp.searchsorted(jnp.array(known), begin + BLOCK - low[0])
        found: jax.Array = jax.lax.switch(which, [lambda each=each: over(each) for each in known])
        return found

    blocks: jax.Array = jax.lax.map(block, jnp.arange(width // BLOCK))
    return blocks.reshape(q.shape)
