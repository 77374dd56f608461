"""Meshes: what does not divide is refused with the arithmetic, results are whole on every mesh, memory is foreseen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from penstock.domain.admission import BadInput
from penstock.extract.attention import plain
from penstock.extract.capture import arrange
from penstock.extract.config import load_config
from penstock.extract.mesh import MeshShape, check_shape, estimate, weight_bytes
from penstock.extract.model import make_step
from penstock.extract.shapes import parse_sites
from penstock.extract.weights import load_weights
from tests.unit.extract.reference import GOLDEN
from tests.unit.extract.test_config import LLAMA31, QWEN25, read

ROOT = Path(__file__).parents[3]
SITES = "resid_post:1;head_out:2;attn_out:2;embed"


def on_eight_devices(case: str, sites: str, *shapes: str) -> dict[str, Any]:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.unit.extract.on_mesh", case, sites, *shapes]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("case", "sites", "shapes"),
    [
        # tensor=4 with two key and value heads: each is kept twice
        ("qwen3", SITES, ("8,1,1", "2,2,2", "2,1,4")),
        # with a buffer and alternating windows
        ("gemma3", "resid_post:all;head_out:6;final_norm", ("1,4,2",)),
    ],
)
def test_results_are_whole_and_the_same_on_every_mesh(case: str, sites: str, shapes: tuple[str, ...]) -> None:
    config = load_config(str(GOLDEN / case))
    wanted = parse_sites(sites, len(config.layers))
    for shape, told in on_eight_devices(case, sites, *shapes).items():
        data, fsdp, _ = (int(each) for each in shape.split(","))
        assert told["off"] < 1e-5, shape
        assert told["shapes"] == {site.name: [8, 24, config.site_width(site)] for site in wanted}, shape
        assert told["widths"] == {site.name: [config.site_width(site)] for site in wanted}, shape
        assert told["rows"] == [8 // (data * fsdp)], shape
        assert told["weights"] == told["counted"], shape


@pytest.mark.parametrize(
    ("shape", "devices", "rows", "said"),
    [
        (MeshShape(4, 1, 1), 8, 32, "needs 4 × 1 × 1 = 4 devices, and there are 8; as data=8"),
        (MeshShape(0, 1, 1), 8, 32, "mesh: data: 0 is not above 0"),
        (MeshShape(8, 1, 1), 8, 30, "batch rows: 30 cannot be cut into 8 (data × fsdp): 30 = 3 × 8 + 6"),
        (MeshShape(2, 1, 4), 8, 32, "mesh: tensor: heads: 14 cannot be cut into 4 (tensor): 14 = 3 × 4 + 2"),
        (MeshShape(1, 6, 1), 6, 30, "mesh: fsdp: model width: 896 cannot be cut into 6 (fsdp): 896 = 149 × 6 + 2"),
    ],
)
def test_shapes_that_cannot_be_are_refused_with_the_arithmetic(
    shape: MeshShape, devices: int, rows: int, said: str
) -> None:
    with pytest.raises(BadInput) as caught:
        check_shape(shape, read(QWEN25), devices=devices, rows=rows)
    assert said in str(caught.value)


def test_shapes_that_can_be_are_not_refused() -> None:
    check_shape(MeshShape(4, 1, 2), read(QWEN25), devices=8, rows=32)
    check_shape(MeshShape(1, 2, 16), read(LLAMA31), devices=32, rows=2)  # eight key and value heads for sixteen


def test_the_weights_of_published_models_are_counted_right() -> None:
    """The published sizes: 0.49 and 8.03 billion; an untied head, which is not loaded, is 0.53 of the latter."""
    for fields, count in ((QWEN25, 494_032_768), (LLAMA31, 8_030_261_248 - 128_256 * 4096)):
        config = read(fields)
        course = arrange(config, parse_sites("final_norm"))
        assert weight_bytes(config, course, "bfloat16", MeshShape()) == 2 * count
    half = arrange(read(QWEN25), parse_sites("resid_post:11"))
    whole = arrange(read(QWEN25), parse_sites("resid_post:23"))
    counts = [weight_bytes(read(QWEN25), course, "bfloat16", MeshShape()) for course in (half, whole)]
    assert counts[1] - counts[0] == 12 * 2 * 14_912_384


@pytest.mark.parametrize("sites", ["resid_post:1;attn_out:3", "mlp_out:0-6"])
def test_memory_is_foreseen(sites: str) -> None:
    """Not below what the compiler reserves, which is what a dry run is asked for, and not several times above it."""
    config = load_config(str(GOLDEN / "gemma3"))
    wanted = parse_sites(sites)
    rows, width = 16, 256
    params = load_weights(str(GOLDEN / "gemma3"), config, wanted, "float32")
    given = np.zeros((rows, width), np.int32)
    step = jax.jit(make_step(config, wanted, attention=plain(), dtype="float32"))
    truth = step.lower(params, given, given, given).compile().memory_analysis()
    assert truth is not None
    told = estimate(config, arrange(config, wanted), rows=rows, width=width, dtype="float32", in_flight=1, scores=True)
    assert told.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert told.results == truth.output_size_in_bytes - truth.output_size_in_bytes % 1024
    assert truth.temp_size_in_bytes <= told.working <= 4 * truth.temp_size_in_bytes
    assert str(told).endswith(")")


def test_a_mesh_takes_less_of_each_device() -> None:
    config = read(LLAMA31)
    course = arrange(config, parse_sites("resid_post:20"))

    def on(shape: MeshShape) -> int:
        asked = estimate(config, course, rows=32, width=2048, dtype="bfloat16", shape=shape, in_flight=3, scores=False)
        return asked.total

    assert on(MeshShape(8, 1, 1)) < on(MeshShape())
    assert on(MeshShape(1, 8, 1)) < on(MeshShape(8, 1, 1))
    assert on(MeshShape(1, 1, 8)) < on(MeshShape(1, 1, 2))
