"""A model's weights on the devices: read from a Hugging Face directory, rounded, stacked and placed as the step wants.

The worker calls `load_weights` once. Only the embedding, the layers that run and, if it is read, the final norm are
loaded; the language-model head never is, since nothing here needs it. A stacked tensor at a time passes through the
host's memory, so a model larger than that can be loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import jax
import numpy as np

from penstock.domain.admission import BadInput
from penstock.extract.capture import Course, arrange
from penstock.extract.checkpoint import Checkpoint, check_tensors
from penstock.extract.config import ModelConfig
from penstock.extract.mesh import SIZES, Spread
from penstock.extract.model import Params
from penstock.extract.parameters import Parameter, embedding, final_norm, layer_parameters
from penstock.extract.shapes import Site

THREADS: Final = 8  #: reads at once: one stream of a bucket does not fill the line

#: Gives a tensor of the model itself (no layers), or one stacked over layers.
Make = Callable[[Parameter, Sequence[int] | None], jax.Array]


def load_weights(
    address: str,
    config: ModelConfig,
    sites: Sequence[Site],
    dtype: str,
    *,
    mesh: jax.sharding.Mesh | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Params:
    """The weights of the directory at `address`, as `make_step` with the same sites takes them."""
    if dtype not in SIZES:
        raise BadInput("dtype", dtype, "is not supported", f"use one of {', '.join(SIZES)}")
    checkpoint = Checkpoint(address, environment)
    prefix = check_tensors(checkpoint, config)
    place = Spread(mesh, config)
    with ThreadPoolExecutor(THREADS, "penstock-weights") as threads:

        def make(tensor: Parameter, layers: Sequence[int] | None) -> jax.Array:
            before = [prefix] if layers is None else [f"{prefix}layers.{layer}." for layer in layers]
            names = [each + source for each in before for source in tensor.sources]
            whole = np.empty((len(before), *tensor.shape), jax.numpy.dtype(dtype))
            parts = whole.reshape(len(names), *tensor.source_shape)
            reads = [threads.submit(checkpoint.read, name, parts[i]) for i, name in enumerate(names)]
            for read in reads:
                read.result()
            stacked = layers is not None
            placed: jax.Array = jax.device_put(whole if stacked else whole[0], place.sharding(tensor, stacked=stacked))
            return placed

        return assemble(config, arrange(config, sites), make)


def assemble(config: ModelConfig, course: Course, make: Make) -> Params:
    """Every tensor that the course needs, in its place."""
    params: Params = {
        "embed": make(embedding(config), None),
        "pieces": tuple(
            tuple(
                {
                    tensor.name: make(tensor, [piece.layer(group, slot) for group in range(piece.groups)])
                    for tensor in layer_parameters(config)
                }
                for slot in range(piece.period)
            )
            for piece in course.pieces
        ),
    }
    if course.final_norm:
        params["final_norm"] = make(final_norm(config), None)
    return params
