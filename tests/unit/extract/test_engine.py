"""The engine on a CPU: order, steps under way, one shape, and the joined parameters against the separate ones.

Page-locked memory and the kernels need a device; `bench/extract/` checks their values there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from penstock.extract import gate_up
from penstock.extract.attention import Attention, plain
from penstock.extract.capture import arrange
from penstock.extract.config import LayerKind, ModelConfig, Rope
from penstock.extract.engine import Engine, keep_compiled, prepare
from penstock.extract.model import Params, make_step
from penstock.extract.parameters import Parameter
from penstock.extract.shapes import PackedBatch, Site, parse_sites
from penstock.extract.weights import assemble

CONFIG = ModelConfig(
    family="qwen2",
    vocab=50,
    width=32,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=8,
    norm_eps=1e-6,
    activation="silu",
    scale=8**-0.5,
    soft_cap=None,
    embed_scale=1.0,
    qkv_bias=True,
    out_bias=False,
    mlp_bias=False,
    tied=True,
    positions_max=64,
    layers=(LayerKind(None, Rope(10_000.0)),) * 4,
)
SITES = parse_sites("resid_post:1,3;head_out:2")


def parameters(sites: Sequence[Site] = SITES) -> Params:
    rng = np.random.default_rng(3)

    def make(tensor: Parameter, layers: object) -> jax.Array:
        count = () if layers is None else (len(list(layers)),)  # type: ignore[call-overload]
        return jnp.asarray(rng.normal(size=(*count, *tensor.shape)) * 0.2, jnp.float32)

    return assemble(CONFIG, arrange(CONFIG, sites), make)


def batch(number: int, rows: int = 2, width: int = 16) -> PackedBatch:
    tokens = np.full((rows, width), number, np.int32)
    tokens[:, ::3] += 1
    positions = np.tile(np.arange(width, dtype=np.int32), (rows, 1))
    return PackedBatch(tokens=tokens, positions=positions, segments=np.ones((rows, width), np.int32))


def doubled(_: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> dict[str, jax.Array]:
    return {"a": (tokens + segments * 0)[:, :, None] * 2, "b": positions[:, :, None].astype(jnp.bfloat16)}


@pytest.mark.parametrize("in_flight", [1, 9])
def test_results_come_in_order_and_whole(in_flight: int) -> None:
    engine = Engine(doubled, {}, rows=2, width=16, in_flight=in_flight)
    found = list(engine.run(batch(number) for number in range(5)))
    assert [int(each["a"][0, 1, 0]) for each in found] == [0, 2, 4, 6, 8]
    assert all(np.array_equal(each["a"][:, :, 0], 2 * batch(n).tokens) for n, each in enumerate(found))
    assert all(str(each["b"].dtype) == "bfloat16" for each in found)


def test_batches_are_taken_only_as_far_ahead_as_steps_may_be_under_way() -> None:
    taken: list[int] = []

    def given() -> Iterator[PackedBatch]:
        for number in range(6):
            taken.append(number)
            yield batch(number)

    engine = Engine(doubled, {}, rows=2, width=16, in_flight=3)
    results = engine.run(given())
    next(results)
    assert taken == [0, 1, 2]
    next(results)
    assert taken == [0, 1, 2, 3]
    assert len(list(results)) == 4


def test_another_shape_is_refused_and_not_compiled() -> None:
    engine = Engine(doubled, {}, rows=2, width=16)
    with pytest.raises(ValueError, match=r"\(3, 16\) and the program was compiled for \(2, 16\)"):
        list(engine.run([batch(1, rows=3)]))


def test_the_smaller_shape_is_run_where_it_was_compiled() -> None:
    engine = Engine(doubled, {}, rows=4, width=16, small=1)
    found = list(engine.run([batch(3, rows=4), batch(5, rows=1)]))
    assert [each["a"].shape for each in found] == [(4, 16, 1), (1, 16, 1)]
    assert [int(each["a"][0, 1, 0]) for each in found] == [6, 10]
    with pytest.raises(ValueError, match=r"\(2, 16\) and the program"):
        list(engine.run([batch(1, rows=2)]))


def test_without_the_smaller_shape_there_is_the_larger_one() -> None:
    def picky(params: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> dict[str, jax.Array]:
        if tokens.shape[0] < 4:
            raise NotImplementedError("too few rows for this kernel")
        return doubled(params, tokens, positions, segments)

    engine = Engine(picky, {}, rows=4, width=16, small=1)
    assert engine.small is None
    assert engine.said[-1] == "no steps of 1 rows: too few rows for this kernel"
    assert len(list(engine.run([batch(3, rows=4)]))) == 1


def test_no_step_under_way_is_refused() -> None:
    with pytest.raises(ValueError, match="in_flight 0"):
        Engine(doubled, {}, rows=2, width=16, in_flight=0)


def test_joined_parameters_give_what_separate_ones_give_and_it_says_what_it_chose() -> None:
    params = parameters()
    engine = prepare(CONFIG, SITES, params, dtype="float32", rows=2, width=16)
    step = jax.jit(make_step(CONFIG, SITES, attention=plain(), dtype="float32"))
    for number, found in enumerate(engine.run(batch(number) for number in range(3))):
        given = batch(number)
        wanted = step(params, *(jnp.asarray(each) for each in (given.tokens, given.positions, given.segments)))
        assert set(found) == {"resid_post.1", "resid_post.3", "head_out.2"} == set(wanted)
        for name, values in found.items():
            np.testing.assert_allclose(values, wanted[name], rtol=2e-5, atol=2e-6)
    assert "plain attention: cpu has no kernel" in engine.said[0]
    assert "for Hopper GPUs" in engine.said[1]
    assert engine.said[2] == "3 steps under way, results to the host's memory"


def test_what_cannot_be_compiled_is_given_up_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*_: object) -> jax.Array:
        raise NotImplementedError("no such unit on this chip")

    better = Attention("better", "better attention", lambda segments: segments, attend)
    monkeypatch.setattr("penstock.extract.attention.choose", lambda *_, **__: better)
    engine = prepare(CONFIG, SITES[:1], parameters(SITES[:1]), dtype="float32", rows=2, width=16)
    assert engine.said[0] == "plain attention"
    assert "better attention" in engine.said[2]
    assert "no such unit on this chip" in engine.said[2]


class Stand:
    """A device by its facts."""

    platform = "gpu"
    device_kind = "NVIDIA H200"
    compute_capability = "9.0"
    core_count = 132


@pytest.mark.parametrize(
    ("change", "dtype", "tokens", "word"),
    [
        ({"width": 896, "hidden": 4864}, "bfloat16", 65536, ""),
        ({"width": 896, "hidden": 4864}, "float32", 65536, "16-bit"),
        ({"width": 896, "hidden": 4864, "activation": "gelu_tanh"}, "bfloat16", 65536, "gelu_tanh"),
        ({"width": 896, "hidden": 4864}, "bfloat16", 65536 + 128, "multiples"),
        ({"width": 900, "hidden": 4864}, "bfloat16", 65536, "900"),
    ],
)
def test_the_gated_kernel_is_chosen_by_type_and_size(
    change: dict[str, object], dtype: str, tokens: int, word: str
) -> None:
    config = msgspec.structs.replace(CONFIG, **change)
    choice = gate_up.choose(Stand(), config, dtype, tokens)
    assert (choice.kernel is None) == bool(word)
    assert word in choice.reason


def test_the_gated_kernel_can_be_lowered_without_a_gpu() -> None:
    """Its values are checked on a device; that JAX still understands it is checked here."""
    shapes = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((512, 128), (512, 128))]  # type: ignore[no-untyped-call]
    traced = jax.jit(lambda x, weights: gate_up.gate_up(x, weights, processors=132)).trace(*shapes)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_compiled_programs_are_kept(tmp_path: Path) -> None:
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    try:
        keep_compiled(tmp_path / "programs")
        assert (tmp_path / "programs").is_dir()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "programs")  # type: ignore[attr-defined]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)  # type: ignore[no-untyped-call]
