"""Rows by memory: what published models take on known devices, and that plans assume the attention workers get."""

from __future__ import annotations

import pytest

from penstock.extract.attention import Device, choose
from penstock.extract.capture import arrange
from penstock.extract.config import ModelConfig
from penstock.extract.fit import STEP_TOKENS, Fit, fit, small_rows, step_rows, writes_scores
from penstock.extract.mesh import ONE_DEVICE, MeshShape
from penstock.extract.shapes import parse_sites
from tests.unit.extract.test_config import QWEN25, read

GIB = 1 << 30
SMALL = read(QWEN25)
#: Qwen2.5-7B.
LARGE = read(
    QWEN25
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_window_layers": 28,
    }
)


def found(
    config: ModelConfig, sites: str, limit: int | None = None, shape: MeshShape = ONE_DEVICE, rows: int = 32
) -> Fit:
    course = arrange(config, parse_sites(sites, len(config.layers)))
    return fit(config, course, rows=rows, width=2048, dtype="bfloat16", shape=shape, limit=limit, scores=False)


@pytest.mark.parametrize(
    ("config", "sites", "gib"),
    [(LARGE, "resid_post:6,12,18", 21.5), (LARGE, "resid_post:all", 70.0), (SMALL, "resid_post:all", 13.6)],
)
def test_what_a_full_step_takes(config: ModelConfig, sites: str, gib: float) -> None:
    """As an accelerator's worker runs it, which is several times a step of one row."""
    told = found(config, sites)
    assert told.rows == step_rows("gpu", 2048) == 32
    assert told.memory.total / GIB == pytest.approx(gib, rel=0.02)
    assert told.memory.total > 1.5 * found(config, sites, rows=1).memory.total


def test_a_step_has_as_many_rows_as_are_likely_to_fit() -> None:
    v5e = 16 * 10**9
    assert found(SMALL, "resid_post:6,12,18", v5e).rows == 32
    assert found(SMALL, "resid_post:all", v5e).rows == 16
    few = found(LARGE, "resid_post:6,12,18", v5e)
    assert few.rows == 8
    assert few.fits
    assert found(LARGE, "resid_post:6,12,18", v5e, rows=16).memory_wished.total > 0.9 * v5e
    assert found(LARGE, "resid_post:6,12,18", 80 * GIB).rows == 32
    every = found(LARGE, "resid_post:all", v5e)
    assert (every.rows, every.fits, every.possible) == (1, False, True)
    assert not found(LARGE, "resid_post:all", 13 * GIB).possible
    # Cut four ways it fits, and rows stay a multiple of the parts.
    cut = found(LARGE, "resid_post:all", v5e, MeshShape(1, 4, 1), rows=4 * 32)
    assert cut.fits
    assert cut.rows % 4 == 0
    assert 4 <= cut.rows < 4 * 32


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("width", [64, 100, 448, 520, 576, 2048])
def test_plans_assume_the_attention_that_workers_choose(platform: str, dtype: str, width: int) -> None:
    device = Device(platform, "NVIDIA H100" if platform == "gpu" else "", (9, 0) if platform == "gpu" else (0, 0))
    chosen = choose(device, SMALL, dtype=dtype, width=width)
    # Where the Pallas kernel takes no such width, cuDNN may: a plan is not below the truth.
    assert writes_scores(platform, dtype, width) == (chosen.name not in ("blocks", "pallas", "splash"))


def test_the_second_program_is_of_whole_parts() -> None:
    assert set(STEP_TOKENS) == {"cpu", "gpu", "tpu"}
    assert step_rows("tpu", 100_000) == 1
    assert small_rows("cpu", 32, 1) is None
    assert small_rows("gpu", 32, 1) == 8
    assert small_rows("tpu", 32, 8) == 8
    assert small_rows("tpu", 16, 8) is None
