"""Runs the model on meshes of eight simulated devices and tells, as JSON, how its results lie and how far they are off.

`test_mesh.py` starts it in a process of its own, because the number of devices is fixed when jax starts. The yardstick
is the same model without a mesh, on one device.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np

from penstock.extract.attention import plain
from penstock.extract.capture import arrange
from penstock.extract.config import load_config
from penstock.extract.mesh import MeshShape, check_shape, make_mesh, weight_bytes
from penstock.extract.model import make_step
from penstock.extract.shapes import parse_sites
from penstock.extract.weights import load_weights
from tests.unit.extract.reference import GOLDEN, documents, packed
from tests.unit.extract.running import QUICKLY


def report(case: str, sites: str, shape: MeshShape | None) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """The results, and how they and the weights lie on the devices."""
    config = load_config(str(GOLDEN / case))
    wanted = parse_sites(sites, len(config.layers))
    mesh = None
    batch, _ = packed(documents())
    doubled = [np.concatenate([each, each]) for each in (batch.tokens, batch.positions, batch.segments)]
    if shape is not None:
        check_shape(shape, config, devices=jax.device_count(), rows=len(doubled[0]))
        mesh = make_mesh(shape)
    params = load_weights(str(GOLDEN / case), config, wanted, "float32", mesh=mesh)
    # No out_shardings: the step itself must see to it, whoever compiles it.
    step = jax.jit(make_step(config, wanted, attention=plain(), dtype="float32", mesh=mesh), compiler_options=QUICKLY)
    found = step(params, *doubled)
    facts: dict[str, Any] = {}
    if shape is not None:
        facts["widths"] = {
            name: sorted({shard.data.shape[-1] for shard in value.addressable_shards}) for name, value in found.items()
        }
        facts["rows"] = sorted({shard.data.shape[0] for value in found.values() for shard in value.addressable_shards})
        first = jax.devices()[0]
        own = [
            shard.data.nbytes
            for leaf in jax.tree.leaves(params)
            for shard in leaf.addressable_shards
            if shard.device == first
        ]
        facts["weights"] = sum(own)
        facts["counted"] = weight_bytes(config, arrange(config, wanted), "float32", shape)
    return {name: np.asarray(value) for name, value in found.items()}, facts


def main() -> None:
    _, case, sites, *shapes = sys.argv
    alone, _ = report(case, sites, None)
    told = {}
    for text in shapes:
        found, facts = report(case, sites, MeshShape(*(int(each) for each in text.split(","))))
        off = {name: float(np.abs(found[name] - values).max() / np.abs(values).max()) for name, values in alone.items()}
        told[text] = facts | {
            "off": max(off.values()),
            "shapes": {name: list(each.shape) for name, each in found.items()},
        }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
