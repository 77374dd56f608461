"""Ours: the product's engine over the same corpus, its values, its ceilings, and the way from text to disk.

`python bench/extract/ours.py PART FOLDER` on a machine with a GPU; `h200.py` calls it. Parts: `ceiling` (matrix
products alone, and the copy alone), `numerics` (against `rival.py make`), `speed SHAPE` (model and copies to
page-locked memory), `sites` (against the number of saved vectors per token), `disk` (end to end, in
`text_to_disk.py`). Each writes a JSON file into FOLDER.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import corpus
import jax
import jax.numpy as jnp
import numpy as np

from penstock.extract.capture import arrange
from penstock.extract.config import LayerKind, ModelConfig, Rope, load_config
from penstock.extract.engine import Engine, prepare
from penstock.extract.parameters import Parameter
from penstock.extract.shapes import Site, parse_sites
from penstock.extract.weights import assemble, load_weights

ROWS = 32
SITES = {"0.5b": "resid_post:6,12,18", "7b": "resid_post:7,14,21"}
REFERENCE_DOCUMENTS = 24


def shape(vocab: int, width: int, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        family="qwen2",
        vocab=vocab,
        width=width,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=1e-6,
        activation="silu",
        scale=head_dim**-0.5,
        soft_cap=None,
        embed_scale=1.0,
        qkv_bias=True,
        out_bias=False,
        mlp_bias=False,
        tied=True,
        positions_max=32768,
        layers=(LayerKind(None, Rope(1e6)),) * layers,
    )


SHAPES = {
    "0.5b": shape(151936, 896, 4864, 24, 14, 2, 64),
    "7b": shape(152064, 3584, 18944, 28, 28, 4, 128),
}


def random_params(config: ModelConfig, sites: Sequence[Site], dtype: str = "bfloat16") -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 1000))

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(key: jax.Array, size: tuple[int, ...], one: bool) -> jax.Array:
        return jnp.ones(size, dtype) if one else jax.random.normal(key, size, dtype) * 0.02

    def make(tensor: Parameter, layers: Sequence[int] | None) -> jax.Array:
        count = () if layers is None else (len(layers),)
        return draw(next(keys), (*count, *tensor.shape), "norm" in tensor.name)

    return assemble(config, arrange(config, sites), make)


def engine_of(config: ModelConfig, sites: Sequence[Site], params: Any, rows: int = ROWS) -> Engine:
    return prepare(config, sites, params, dtype="bfloat16", rows=rows, width=corpus.WIDTH, segments_max=corpus.SEGMENTS)


def measure(engine: Engine, given: Sequence[Any], passes: int = 3) -> dict[str, Any]:
    """Median of the passes after one for warming up; a result counts when the host has it."""

    def go() -> tuple[float, int]:
        started, arrived = time.perf_counter(), 0
        for found in engine.run(batch for batch, _ in given):
            arrived += sum(values.nbytes for values in found.values())
        return time.perf_counter() - started, arrived

    go()
    seconds = [go() for _ in range(passes)]
    real = sum(place.length for _, places in given for place in places)
    middle = statistics.median(each[0] for each in seconds)
    return {
        "tokens_s": real / middle,
        "fill": real / (len(given) * engine.shape[0] * engine.shape[1]),
        "host_gb_s": seconds[0][1] / middle / 1e9,
        "spread": max(each[0] for each in seconds) / min(each[0] for each in seconds),
        "said": list(engine.said),
    }


def products(config: ModelConfig, layers: int, passes: int) -> float:
    """Tokens/s if a step were its matrix products and nothing else."""
    tokens = ROWS * corpus.WIDTH
    joined = (config.heads + 2 * config.kv_heads) * config.head_dim
    sizes = [
        (config.width, joined),
        (config.heads * config.head_dim, config.width),
        (config.width, 2 * config.hidden),
        (config.hidden, config.width),
    ]
    pairs = []
    for number, (into, out) in enumerate(sizes):
        x = jax.random.normal(jax.random.key(number), (tokens, into), jnp.bfloat16)
        pairs.append((x, jax.random.normal(jax.random.key(number + 9), (into, out), jnp.bfloat16) * 0.02))
    product = jax.jit(jnp.matmul)

    def go() -> float:
        started = time.perf_counter()
        out: Any = None
        for _ in range(layers):
            out = [product(x, weight) for x, weight in pairs]
        jax.block_until_ready(out)
        return time.perf_counter() - started

    go()
    return tokens / statistics.median(go() for _ in range(passes))


def ceiling(_: Path) -> dict[str, Any]:
    """As many passes as the corpus has steps, so that the chip is as warm as it gets; and the copy alone."""
    found: dict[str, Any] = {
        "0.5b": {"tokens_s": products(SHAPES["0.5b"], 19, 50)},
        "7b": {"tokens_s": products(SHAPES["7b"], 22, 6)},
    }
    value = jax.device_put(jnp.ones((1 << 29,), jnp.bfloat16))
    pinned = value.sharding.with_memory_kind("pinned_host")
    for _again in range(3):
        started = time.perf_counter()
        jax.block_until_ready(jax.device_put(value, pinned))
        found["copy_gb_s"] = value.nbytes / (time.perf_counter() - started) / 1e9
    return found


def numerics(folder: Path) -> dict[str, Any]:
    """How far ours and Hugging Face's own bfloat16 are from its float32, of the engine that is measured."""
    config = load_config(str(folder / "model"))
    sites = parse_sites(SITES["0.5b"])
    engine = engine_of(config, sites, load_weights(str(folder / "model"), config, sites, "bfloat16"))
    docs = corpus.tokens(151_000)[:REFERENCE_DOCUMENTS]
    # the first row is full of other documents, so that isolation is tested by the kernels at real width
    (batch, places), *_ = corpus.packed(docs, ROWS)
    (out,) = engine.run([batch])
    reference = np.load(folder / "model" / "reference.npz")
    found: dict[str, Any] = {"said": list(engine.said)}
    for site in sites:
        rows: dict[int, Any] = {p.document: out[site.name][p.row, p.column : p.column + p.length] for p in places}
        ours = np.concatenate([rows[number] for number in range(len(docs))]).astype(np.float32)
        whole = reference[f"float32.{site.layer}"]
        theirs = reference[f"bfloat16.{site.layer}"]
        size = np.linalg.norm(whole)
        found[site.name] = {
            "ours": float(np.linalg.norm(ours - whole) / size),
            "theirs": float(np.linalg.norm(theirs - whole) / size),
        }
    return found


def speed(_: Path, name: str) -> dict[str, Any]:
    config, sites = SHAPES[name], parse_sites(SITES[name])
    began = time.perf_counter()
    engine = engine_of(config, sites, random_params(config, sites))
    prepared = time.perf_counter() - began
    given = corpus.packed(corpus.tokens(151_000), ROWS)
    return measure(engine, given, passes=3 if name == "0.5b" else 1) | {"prepared_s": prepared}


def by_sites(folder: Path) -> dict[str, Any]:
    """All 24 layers run; 1 to 72 vectors per token are saved."""
    config = SHAPES["0.5b"]
    given = corpus.packed(corpus.tokens(151_000), ROWS)
    found: dict[str, Any] = {}
    for text in (
        "resid_post:23",
        "resid_post:7,15,23",
        "resid_post:3,7,11,15,19,23",
        "resid_post:1,3,5,7,9,11,13,15,17,19,21,23",
        "resid_post:0-23",
        "resid_post:0-23;mlp_out:0-23",
        "resid_post:0-23;mlp_out:0-23;attn_out:0-23",
    ):
        sites = parse_sites(text)
        result = measure(engine_of(config, sites, random_params(config, sites)), given, passes=2)
        found[str(len(sites))] = result | {"bytes_per_token": len(sites) * config.width * 2}
        print(len(sites), {key: value for key, value in result.items() if key != "said"}, flush=True)
        (folder / "sites.json").write_text(json.dumps(found))
    return found


def main() -> None:
    part, folder, rest = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    if part == "disk":
        import text_to_disk

        result = text_to_disk.run(folder)
    else:
        ways: dict[str, Any] = {"ceiling": ceiling, "numerics": numerics, "speed": speed, "sites": by_sites}
        result = ways[part](folder, *rest)
    name = "-".join((part, *rest))
    (folder / f"{name}.json").write_text(json.dumps(result | {"jax": jax.__version__}))
    print(name, json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
