"""Rotary frequencies against the rules as published, in double precision; the parity tests hold the whole to it."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from penstock.extract.config import Rope
from penstock.extract.rotary import angles, frequencies, turn

EXACT = 3e-7  #: relative; two or three roundings of float32


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_plain_and_linear(theta: float, head_dim: int) -> None:
    truth = np.array([theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)])
    np.testing.assert_allclose(frequencies(Rope(theta), head_dim), truth, rtol=EXACT * 5)
    np.testing.assert_allclose(frequencies(Rope(theta, "linear", 8.0), head_dim), truth / 8, rtol=EXACT * 5)


def test_llama3_slows_long_waves_and_blends_those_between() -> None:
    rope = Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    plain, found = frequencies(Rope(500_000.0), 128), frequencies(rope, 128)
    waves = 2 * math.pi / plain.astype(np.float64)
    long, short = waves > 8192, waves < 2048
    np.testing.assert_array_equal(found[short], plain[short])
    np.testing.assert_array_equal(found[long], plain[long] / 8)
    between = ~(long | short)
    assert between.sum() > 3
    share = (8192 / waves[between] - 1) / 3
    np.testing.assert_allclose(found[between], ((1 - share) / 8 + share) * plain[between], rtol=EXACT)


def test_yarn_keeps_fast_dimensions_and_slows_slow_ones() -> None:
    rope = Rope(1e6, "yarn", 4.0, 1.0, 32.0, 32768)
    plain, found = frequencies(Rope(1e6), 128), frequencies(rope, 128)
    ratio = plain / found
    assert (np.diff(ratio) >= -1e-6).all()
    np.testing.assert_allclose(ratio[:20], 1.0, rtol=EXACT)
    np.testing.assert_allclose(ratio[-15:], 4.0, rtol=EXACT)


def test_turning_keeps_lengths_and_differences_of_positions() -> None:
    """The product of a query and a key depends on how far apart they are, not on where they are."""
    draw = np.random.default_rng(2)
    q, k = (jnp.asarray(draw.normal(size=(1, 1, 1, 64)), jnp.float32) for _ in range(2))

    def product(at: int, behind: int) -> float:
        by = [angles(Rope(1e4), 64, jnp.array([[position]])) for position in (at, at - behind)]
        return float(jnp.sum(turn(q, by[0]) * turn(k, by[1])))

    assert product(7, 7) == pytest.approx(product(500, 7), abs=1e-3)
    assert product(7, 7) != pytest.approx(product(500, 8), abs=1e-2)
    by = angles(Rope(1e4), 64, jnp.array([[1000]]))
    assert float(jnp.linalg.norm(turn(q, by))) == pytest.approx(float(jnp.linalg.norm(q)), rel=1e-5)


def test_a_gain_multiplies_both() -> None:
    positions = jnp.arange(5)[None]
    plain, gained = (angles(Rope(1e4, gain=gain), 16, positions) for gain in (1.0, 1.5))
    for one, other in zip(plain, gained, strict=True):
        np.testing.assert_allclose(np.asarray(other), 1.5 * np.asarray(one), rtol=1e-6)
