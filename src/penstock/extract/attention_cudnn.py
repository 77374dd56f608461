"""cuDNN's attention over packed rows, for heads that the Pallas kernel does not take.

`attention.py` chooses it. Two ways to keep documents apart: the packed ("ragged") layout of Hopper GPUs, which has a
list of documents and no work between them, and a bias that hides other documents' columns, which is read in full by
every head. Padding is one more document here: cuDNN leaves what no document covers unwritten, and what was in that
memory could be NaN, which a block that reaches beyond a document's end would spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from penstock.extract.attention import Mask

#: Before this version the layout's offsets of keys were computed with the number of query heads.
GROUPED_FROM = (0, 11)


class Documents(NamedTuple):
    """Of each row, -1 where there are fewer: lengths [B, M], and first columns [B, M + 1]."""

    lengths: jax.Array
    starts: jax.Array


def ragged(segments: jax.Array, *, segments_max: int) -> Documents:
    """Once per step: the documents of each row, and its padding as the last one."""
    numbers = jnp.concatenate([jnp.arange(1, segments_max + 1), jnp.zeros(1, jnp.int32)])
    lengths = jnp.sum(segments[:, :, None] == numbers, axis=1, dtype=jnp.int32)
    there = lengths > 0
    starts = jnp.where(there, jnp.cumsum(lengths, axis=1) - lengths, -1)
    # cuDNN wants those that are there first; padding stands behind the gap that missing documents leave.
    order = jnp.argsort(~there, axis=1, stable=True)
    lengths = jnp.take_along_axis(jnp.where(there, lengths, -1), order, axis=1)
    starts = jnp.take_along_axis(starts, order, axis=1)
    return Documents(lengths, jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1))


def attend_ragged(q: jax.Array, k: jax.Array, v: jax.Array, documents: Documents, mask: Mask) -> jax.Array:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    if jax.__version_info__ < GROUPED_FROM:
        k, v = (jnp.repeat(each, q.shape[2] // each.shape[2], axis=2) for each in (k, v))
    out: jax.Array = cudnn.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=documents.lengths,
        kv_seqlen=documents.lengths,
        q_offsets=documents.starts,
        kv_offsets=documents.starts,
        scale=mask.scale,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )
    return out


def biases(segments: jax.Array, *, windows: tuple[int | None, ...]) -> Mapping[str, jax.Array]:
    """Once per step, for each window of the model: [B, 1, T, T], 0 where a query may look."""
    width = segments.shape[1]
    behind = jnp.arange(width)[:, None] - jnp.arange(width)[None, :]
    alike = segments[:, :, None] == segments[:, None, :]
    found: dict[str, jax.Array] = {}
    for window in windows:
        seen = alike & (behind >= 0) & (behind < (width if window is None else window))
        # cuDNN subtracts such numbers from each other: the largest of the type would overflow.
        found[str(window)] = jnp.where(seen, 0.0, -1e4)[:, None]
    return found


def attend_biased(q: jax.Array, k: jax.Array, v: jax.Array, hidden: Mapping[str, jax.Array], mask: Mask) -> jax.Array:
    bias = hidden[str(mask.window)].astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, bias=bias, scale=mask.scale, is_causal=True, implementation="cudnn")
