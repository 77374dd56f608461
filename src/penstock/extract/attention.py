"""Attention over packed rows: which implementation a device gets, and what each of them computes.

`choose` decides once, from the device and the model's heads, and says why; `model.py` calls what it returned.
Documents share a row, so every implementation keeps them apart by segment: nothing here may let a token see another
document. Columns rise with positions inside a segment, so masks are a matter of columns; values at padding (segment 0)
mean nothing. `plain` is the definition; the others are held to it by tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import msgspec

from penstock.extract import attention_blocks, attention_cudnn, attention_pallas, attention_splash
from penstock.extract.config import ModelConfig
from penstock.extract.mesh import SCORES_BYTES_MAX

MASKED: Final = -1e30  # finite, so that a row without any visible column gives numbers instead of NaN
HALVES: Final = ("bfloat16", "float16")
POWERS: Final = (16, 32, 64, 128, 256)


class Mask(msgspec.Struct, frozen=True):
    """What a layer's queries may see, and how scores are scaled; a constant of the compiled program."""

    scale: float
    causal: bool = True
    window: int | None = None  # a query sees this many columns at most, itself included
    soft_cap: float | None = None


@dataclass(frozen=True)
class Attention:
    """One implementation: `segments` runs once per step, outside the loop over layers; the call runs in each layer."""

    name: str
    reason: str
    segments: Callable[[jax.Array], Any]
    attend: Callable[[jax.Array, jax.Array, jax.Array, Any, Mask], jax.Array]

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, mask: Mask) -> jax.Array:
        """q [B, T, heads, D], k and v [B, T, kv heads, D] -> [B, T, heads, D], in q's dtype."""
        if not mask.causal and self.name != "plain":
            raise ValueError(f"{self.name} attention is causal; use plain for a mask that is not")
        return self.attend(q, k, v, segments, mask)


class Device(msgspec.Struct, frozen=True):
    """What `choose` must know of a device; `of` reads it from one that is there."""

    platform: str
    kind: str = ""
    capability: tuple[int, int] = (0, 0)  #: of an NVIDIA GPU

    @classmethod
    def of(cls, device: jax.Device) -> Device:
        capability = str(getattr(device, "compute_capability", "")).split(".")
        # Other makers' GPUs have names instead of numbers there.
        numbers = (
            (int(capability[0]), int(capability[1]))
            if [each.isdecimal() for each in capability] == [True] * 2
            else (0, 0)
        )
        return cls(device.platform, device.device_kind, numbers)


def choose(
    device: Device | str, config: ModelConfig, *, dtype: str = "bfloat16", width: int = 2048, segments_max: int = 32
) -> Attention:
    """For rows of `width` columns that hold at most `segments_max` documents."""
    if isinstance(device, str):
        device = Device(device)
    if device.platform == "tpu":
        return _on_tpu(config, width)
    if device.platform == "cpu" and width >= attention_blocks.FROM and width % attention_blocks.BLOCK == 0:
        reason = f"attention in blocks: rows of {width} on a CPU"
        return Attention("blocks", reason, attention_blocks.segments, attention_blocks.attend)
    if device.platform != "gpu":
        return plain(f"plain attention: {device.platform} has none of its own for rows of {width}")
    if dtype not in HALVES:
        return plain(f"plain attention: the kernels are for {' and '.join(HALVES)}, and {dtype} was asked for")
    return _on_gpu(device, config, width, segments_max)


def _on_tpu(config: ModelConfig, width: int) -> Attention:
    if width % attention_splash.LANES:
        return plain(f"plain attention: splash takes rows in multiples of {attention_splash.LANES}, not {width}")
    reason = f"splash attention: rows of {width} on a TPU, {config.head_dim} values a head"
    return Attention("splash", reason, attention_splash.segments, attention_splash.attend)


def _on_gpu(device: Device, config: ModelConfig, width: int, segments_max: int) -> Attention:
    size = config.head_dim
    if device.capability >= (8, 0) and size in POWERS and width % attention_pallas.BLOCK_Q == 0:
        reason = f"Pallas attention: rows of {width} on {device.kind}, {size} values a head"
        return Attention("pallas", reason, attention_pallas.firsts, attention_pallas.attend)
    why = f"{size} values a head, rows of {width}, compute capability {device.capability[0]}.{device.capability[1]}"
    if device.capability < (8, 0) or size % 8 or size > (256 if device.capability >= (9, 0) else 128):
        return plain(f"plain attention: neither the Pallas kernel nor cuDNN takes {why}")
    if config.soft_cap is not None:
        return plain(f"plain attention: the Pallas kernel does not take {why}, and cuDNN has no soft cap")
    windows = {kind.window for kind in config.layers}
    if device.capability >= (9, 0) and windows == {None}:
        documents = functools.partial(attention_cudnn.ragged, segments_max=segments_max)
        return Attention("cudnn-ragged", f"cuDNN's packed layout: {why}", documents, attention_cudnn.attend_ragged)
    hidden = functools.partial(attention_cudnn.biases, windows=tuple(windows))
    return Attention("cudnn-bias", f"cuDNN with a bias: {why}", hidden, attention_cudnn.attend_biased)


def visible(segments: jax.Array, mask: Mask) -> jax.Array:
    """[B, T, T] of bool: may the query of column i see column j."""
    width = segments.shape[-1]
    behind = jnp.arange(width)[:, None] - jnp.arange(width)[None, :]
    seen = segments[:, :, None] == segments[:, None, :]
    if mask.causal:
        seen &= behind >= 0
    if mask.window is not None:
        seen &= jnp.abs(behind) < mask.window
    return seen


def attend_plain(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, mask: Mask) -> jax.Array:
    """The definition: scores and softmax in float32, every column of the row."""
    batch, width, heads, _ = q.shape
    if batch > 1 and 4 * batch * heads * width * width > SCORES_BYTES_MAX:

        def one(row: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
            q, k, v, segments = (each[None] for each in row)
            return _attend(q, k, v, segments, mask)[0]

        rows: jax.Array = jax.lax.map(one, (q, k, v, segments))
        return rows
    return _attend(q, k, v, segments, mask)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, mask: Mask) -> jax.Array:
    batch, width, heads, size = q.shape
    grouped = q.reshape(batch, width, k.shape[2], heads // k.shape[2], size)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=jnp.float32) * mask.scale
    if mask.soft_cap is not None:
        scores = jnp.tanh(scores / mask.soft_cap) * mask.soft_cap
    scores = jnp.where(visible(segments, mask)[:, None, None], scores, MASKED)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", shares, v, preferred_element_type=jnp.float32)
    return out.reshape(batch, width, heads, size).astype(q.dtype)


def plain(reason: str = "the reference") -> Attention:
    """The definition itself: for tests, and where nothing faster fits."""
    return Attention("plain", reason, lambda segments: segments, attend_plain)
