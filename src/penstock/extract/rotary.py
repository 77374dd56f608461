"""Rotary positions: the frequencies each rule gives, and the turning of queries and keys.

`model` asks once per step for the angles of each rule that its layers have, and turns in every layer. Frequencies are
made with numpy in float32, step by step as Hugging Face makes them, because far positions multiply their rounding.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from penstock.extract.config import Rope

Floats = npt.NDArray[np.float32]
Angles = tuple[jax.Array, jax.Array]


def frequencies(rope: Rope, head_dim: int) -> Floats:
    """Radians per position, one per pair of dimensions."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power is taken in double and rounded: numpy's own in float32 is often off by one bit, torch's hardly ever,
    # and at position 30,000 that bit is a thousandth of a radian.
    periods: Floats = np.power(np.float64(rope.theta), exponents.astype(np.float64)).astype(np.float32)
    turns: Floats = np.float32(1.0) / periods
    if rope.kind == "linear":
        turns = turns / np.float32(rope.factor)
    elif rope.kind == "llama3":
        turns = _llama3(rope, turns)
    elif rope.kind == "yarn":
        slowed = np.float32(1.0) / (np.float32(rope.factor) * periods)
        share = _yarn_share(rope, head_dim)
        turns = slowed * share + turns * (1 - share)
    return turns


def _llama3(rope: Rope, turns: Floats) -> Floats:
    """Long waves are slowed by the factor, short ones are not, and those between are blended."""
    waves = np.float32(2 * math.pi) / turns
    slowed = np.where(waves > rope.original / rope.low, turns / np.float32(rope.factor), turns)
    blend = (np.float32(rope.original) / waves - np.float32(rope.low)) / np.float32(rope.high - rope.low)
    blended = (1 - blend) * slowed / np.float32(rope.factor) + blend * slowed
    between = (waves >= rope.original / rope.high) & (waves <= rope.original / rope.low)
    return np.where(between, blended, slowed).astype(np.float32)


def _yarn_share(rope: Rope, head_dim: int) -> Floats:
    """How much of each frequency is slowed, from 0 to 1."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.high), dimension(rope.low)
    if rope.whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp: Floats = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    return np.clip(ramp, np.float32(0), np.float32(1))


def angles(rope: Rope, head_dim: int, positions: jax.Array) -> Angles:
    """Cosine and sine for positions [B, T], each float32 [B, T, 1, head_dim / 2]."""
    turned = positions[:, :, None, None].astype(jnp.float32) * jnp.asarray(frequencies(rope, head_dim))
    return jnp.cos(turned) * rope.gain, jnp.sin(turned) * rope.gain


def turn(x: jax.Array, by: Angles) -> jax.Array:
    """x [B, T, heads, head_dim]: the first half of the dimensions is paired with the second."""
    cosine, sine = by
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((left * cosine - right * sine, right * cosine + left * sine), axis=-1).astype(x.dtype)
