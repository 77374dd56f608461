"""Parameters joined for speed: the matrices of queries, keys and values in one.

`engine` calls `fuse` once after loading, where the model lies on one device. Products of one input become one that
fills the device; the arithmetic of each value stays what it was. On a mesh nothing is joined, because queries and keys
are cut differently there.
"""

from __future__ import annotations

import jax.numpy as jnp

from penstock.extract.model import Layer, Params


def fuse(params: Params) -> Params:
    """The same parameters, joined along what comes out; the ones given can be dropped then."""
    joined: Params = {**params, "pieces": tuple(tuple(_fuse(each) for each in piece) for piece in params["pieces"])}
    return joined


def _fuse(layer: Layer) -> Layer:
    found = dict(layer)
    for end in ("", "_bias"):
        if f"q{end}" in found and f"kv{end}" in found:
            queries, both = found.pop(f"q{end}"), found.pop(f"kv{end}")
            # Axis 0 is the layers of a piece; keys and values are one above the other, and come apart the same way.
            stacked = both.reshape(both.shape[0], -1, *both.shape[3:])
            found[f"qkv{end}"] = jnp.concatenate([queries, stacked], axis=1)
    return found
