"""Attention: the definition against arithmetic written out, the kernels against the definition, and who gets which.

The kernels for GPUs and TPUs run in Pallas' interpreter here. What only a device can run (cuDNN) is checked by the
benchmark on it, `bench/extract/`; of that, only the lists it is given are checked here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from penstock.extract import attention_blocks, attention_cudnn, attention_pallas, attention_splash
from penstock.extract.attention import Device, Mask, attend_plain, choose, plain
from penstock.extract.config import LayerKind, ModelConfig, Rope

Floats = npt.NDArray[np.float32]

MASKS = {
    "causal": Mask(scale=0.25),
    "window": Mask(scale=0.25, window=20),
    "window of one": Mask(scale=0.25, window=1),
    "soft cap": Mask(scale=0.5, soft_cap=5.0),
    "both": Mask(scale=0.3, window=70, soft_cap=2.0),
}


def heads(seed: int, width: int = 256, size: int = 16) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.normal(size=(2, width, 4, size)) * 3, jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, width, 2, size)), jnp.float32) for _ in range(2))
    return q, k, v


def rows(width: int = 256) -> jax.Array:
    """One row of documents of all sorts of lengths and padding, one that is a single document."""
    ids = np.ones((2, width), np.int32)
    ids[0] = 0
    column = 0
    for number, length in enumerate((100, 1, 2, 64, 30), 1):
        ids[0, column : column + length] = number
        column += length
    return jnp.asarray(ids)


def by_hand(given: tuple[jax.Array, ...], ids: jax.Array, mask: Mask) -> Floats:
    q, k, v = (np.asarray(each, np.float64) for each in given)
    out = np.zeros_like(q)
    for row, column, head in np.ndindex(*q.shape[:3]):
        low = 0 if mask.window is None else max(0, column - mask.window + 1)
        seen = [at for at in range(low, column + 1) if ids[row, at] == ids[row, column]]
        kv = head // (q.shape[2] // k.shape[2])
        scores = np.array([q[row, column, head] @ k[row, at, kv] for at in seen]) * mask.scale
        if mask.soft_cap is not None:
            scores = np.tanh(scores / mask.soft_cap) * mask.soft_cap
        shares = np.exp(scores - scores.max())
        out[row, column, head] = (shares / shares.sum()) @ v[row, seen, kv]
    return out.astype(np.float32)


def apart(found: jax.Array, wanted: jax.Array | Floats, ids: jax.Array) -> float:
    """The largest difference at a token; padding means nothing."""
    real = (ids > 0)[:, :, None, None]
    return float(jnp.max(jnp.abs(jnp.where(real, found - wanted, 0.0))))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_plain_is_what_the_formula_says(mask: Mask) -> None:
    (q, k, v), ids = heads(1, width=48), rows(256)[:, 80:128]
    assert apart(attend_plain(q, k, v, ids, mask), by_hand((q, k, v), ids, mask), ids) < 1e-5


def test_plain_goes_row_by_row_when_scores_would_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v), ids = heads(2), rows()
    at_once = attend_plain(q, k, v, ids, MASKS["causal"])
    monkeypatch.setattr("penstock.extract.attention.SCORES_BYTES_MAX", 1)
    assert apart(attend_plain(q, k, v, ids, MASKS["causal"]), at_once, ids) < 1e-6


def test_a_token_sees_nothing_of_another_document() -> None:
    (q, k, v), ids = heads(3), rows()
    before = attend_plain(q, k, v, ids, MASKS["causal"])
    k, v = (each.at[0, :100].set(1e4) for each in (k, v))
    after = attend_plain(q, k, v, ids, MASKS["causal"])
    assert not np.array_equal(before[0, :100], after[0, :100])
    assert np.array_equal(before[0, 100:195], after[0, 100:195])


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_blocks_for_cpus_are_the_definition(mask: Mask) -> None:
    """Every length of columns occurs: documents that end in their block, and one that is the whole row."""
    (q, k, v), ids = heads(4, width=320), rows(320)
    ids = ids.at[0, 197:290].set(6)
    found = jax.jit(attention_blocks.attend, static_argnums=4)(q, k, v, attention_blocks.segments(ids), mask)
    assert apart(found, attend_plain(q, k, v, ids, mask), ids) < 1e-5


def test_blocks_reach_back_as_far_as_documents_do_and_no_further() -> None:
    assert attention_blocks.lengths(64) == [64]
    assert attention_blocks.lengths(320) == [128, 192, 256, 320]
    assert attention_blocks.lengths(2048) == [128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
    (q, k, v), ids = heads(3), rows()
    before = attention_blocks.attend(q, k, v, attention_blocks.segments(ids), MASKS["causal"])
    k, v = (each.at[0, :100].set(1e4) for each in (k, v))
    after = attention_blocks.attend(q, k, v, attention_blocks.segments(ids), MASKS["causal"])
    assert not np.array_equal(before[0, :100], after[0, :100])
    assert np.array_equal(before[0, 100:195], after[0, 100:195])


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_kernel_for_gpus_is_the_definition(mask: Mask) -> None:
    (q, k, v), ids = heads(4), rows()
    found = attention_pallas.attend(q, k, v, attention_pallas.firsts(ids), mask, interpret=True)
    assert apart(found, attend_plain(q, k, v, ids, mask), ids) < 1e-5


def test_the_kernel_for_gpus_takes_large_scores() -> None:
    (q, k, v), ids = heads(5), rows()
    mask = Mask(scale=40.0)
    found = attention_pallas.attend(q, k, v, attention_pallas.firsts(ids), mask, interpret=True)
    assert bool(jnp.isfinite(found).all())
    assert apart(found, attend_plain(q, k, v, ids, mask), ids) < 1e-4


@pytest.mark.parametrize("name", ["causal", "window", "soft cap"])
def test_the_kernel_for_tpus_is_the_definition(name: str) -> None:
    (q, k, v), ids = heads(6, size=64), rows()
    found = attention_splash.attend(q, k, v, ids, MASKS[name], interpret=True)
    assert apart(found, attend_plain(q, k, v, ids, MASKS[name]), ids) < 1e-4


def test_the_list_of_documents_covers_each_column_once() -> None:
    documents = attention_cudnn.ragged(rows(), segments_max=8)
    lengths, starts = np.asarray(documents.lengths), np.asarray(documents.starts)
    assert lengths.shape == (2, 9)
    assert starts.shape == (2, 10)
    assert lengths[0, :6].tolist() == [100, 1, 2, 64, 30, 59]
    assert starts[0, :6].tolist() == [0, 100, 101, 103, 167, 197]
    assert lengths[1, 0] == 256
    assert (lengths[0, 6:] == -1).all()
    assert (lengths[1, 1:] == -1).all()
    assert (starts[0, 6:] == -1).all()
    assert (starts[1, 1:] == -1).all()


def test_biases_hide_what_a_window_hides() -> None:
    ids = rows()
    for window, bias in attention_cudnn.biases(ids, windows=(None, 20)).items():
        mask = Mask(scale=1.0, window=None if window == "None" else int(window))
        (q, k, v) = heads(7)
        scores = jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, 2, axis=2)) + bias
        out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), jnp.repeat(v, 2, axis=2))
        assert apart(out, attend_plain(q, k, v, ids, mask), ids) < 1e-4


def config(head_dim: int = 64, *, soft_cap: float | None = None, window: int | None = None) -> ModelConfig:
    kind = LayerKind(window, Rope(10_000.0))
    return ModelConfig(
        family="qwen2",
        vocab=100,
        width=64,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        norm_eps=1e-6,
        activation="silu",
        scale=head_dim**-0.5,
        soft_cap=soft_cap,
        embed_scale=1.0,
        qkv_bias=True,
        out_bias=False,
        mlp_bias=False,
        tied=True,
        positions_max=2048,
        layers=(kind, LayerKind(None, Rope(10_000.0))),
    )


HOPPER, AMPERE, VOLTA = (Device("gpu", "a GPU", capability) for capability in ((9, 0), (8, 0), (7, 0)))


@pytest.mark.parametrize(
    ("device", "model", "rest", "name", "word"),
    [
        ("cpu", config(), {}, "blocks", "2048"),
        ("cpu", config(), {"width": 512, "dtype": "float32"}, "blocks", "512"),
        ("cpu", config(), {"width": 600}, "plain", "cpu"),
        ("cpu", config(), {"width": 256}, "plain", "cpu"),
        ("tpu", config(), {}, "splash", "TPU"),
        ("tpu", config(), {"width": 100}, "plain", "128"),
        (HOPPER, config(), {}, "pallas", "a GPU"),
        (HOPPER, config(soft_cap=50.0), {}, "pallas", "64"),
        (HOPPER, config(), {"dtype": "float32"}, "plain", "float32"),
        (HOPPER, config(80), {}, "cudnn-ragged", "80"),
        (HOPPER, config(80, window=30), {}, "cudnn-bias", "80"),
        (HOPPER, config(80, soft_cap=50.0), {}, "plain", "soft cap"),
        (AMPERE, config(80), {}, "cudnn-bias", "8.0"),
        (AMPERE, config(160), {}, "plain", "160"),
        (VOLTA, config(), {}, "plain", "7.0"),
        (Device("gpu", "another maker's"), config(), {}, "plain", "0.0"),
    ],
)
def test_who_gets_which(
    device: Device | str, model: ModelConfig, rest: dict[str, object], name: str, word: str
) -> None:
    chosen = choose(device, model, **rest)  # type: ignore[arg-type]
    assert chosen.name == name
    assert word in chosen.reason


def test_this_device_is_described() -> None:
    assert Device.of(jax.devices("cpu")[0]).platform == "cpu"


def test_kernels_refuse_what_they_would_get_wrong() -> None:
    (q, k, v), ids = heads(8), rows()
    open_mask = Mask(scale=0.25, causal=False)
    chosen = choose(HOPPER, config(16))
    with pytest.raises(ValueError, match="pallas attention is causal"):
        chosen(q, k, v, chosen.segments(ids), open_mask)
    assert plain()(q, k, v, ids, open_mask).shape == q.shape
