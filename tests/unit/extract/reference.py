"""Small models of every family as Hugging Face has them, and what their layers hold for a few documents.

`tools/make_golden.py` keeps some of it as files, `test_parity.py` compares with it live, the other tests use the
documents and layouts. torch and transformers are loaded inside functions, by name: where they are not installed the
golden files still serve, and the type checker need not read them. Weights are rounded to bfloat16, so that an error in
bfloat16 is one of arithmetic.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.extract.shapes import Kind, PackedBatch, Site

Floats = npt.NDArray[np.float32]

GOLDEN: Final = Path(__file__).parent / "golden"
EXPECTED: Final = "expected.tensors"  #: safetensors, under a name the loader does not take for weights
WIDTH: Final = 24  #: of a row; both layouts have ROWS of them, so that they share one program
ROWS: Final = 4
LENGTHS: Final = (19, 11, 5, 13)  #: they fit into two rows, one of them filled to the end
SMALL: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

#: What each model's config says beyond `SMALL`. Windows are shorter than the documents, or nothing would show.
CASES: Final[dict[str, dict[str, Any]]] = {
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "rope_theta": 1e6, "tie_word_embeddings": False},
    "llama2": {"model_type": "llama", "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": 4,
        "attn_logit_softcapping": 2.0,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": 4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
}

SHARDED: Final = ("qwen3",)  #: whose weights lie in several files with an index

#: Compared live only: what is rarer in the wild.
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "qwen2-windows": CASES["qwen2"] | {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 4},
    "llama-linear-biases": CASES["llama3"]
    | {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen3-yarn": CASES["qwen3"]
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}


def documents(seed: int = 7) -> list[npt.NDArray[np.int32]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(3, SMALL["vocab_size"], length, dtype=np.int32) for length in LENGTHS]


def padded(docs: Sequence[npt.NDArray[np.int32]]) -> tuple[PackedBatch, list[tuple[int, int]]]:
    """A document per row; with it (row, first column) of each."""
    return _laid(docs, [(row, 0, 1) for row in range(len(docs))])


def packed(docs: Sequence[npt.NDArray[np.int32]]) -> tuple[PackedBatch, list[tuple[int, int]]]:
    """Two rows of two documents each, one without any padding, one with some between them; the others are empty."""
    gap = WIDTH - len(docs[1]) - len(docs[3])
    return _laid(docs, [(2, 0, 1), (0, 0, 1), (2, len(docs[0]), 2), (0, len(docs[1]) + gap, 2)])


def _laid(
    docs: Sequence[npt.NDArray[np.int32]], places: Sequence[tuple[int, int, int]]
) -> tuple[PackedBatch, list[tuple[int, int]]]:
    tokens, positions, segments = (np.zeros((ROWS, WIDTH), np.int32) for _ in range(3))
    for document, (row, column, segment) in zip(docs, places, strict=True):
        span = slice(column, column + len(document))
        tokens[row, span] = document
        positions[row, span] = np.arange(len(document))
        segments[row, span] = segment
    return PackedBatch(tokens, positions, segments), [(row, column) for row, column, _ in places]


def rows_of(values: npt.NDArray[Any], places: Sequence[tuple[int, int]]) -> Floats:
    """The documents' vectors, one after another, out of [B, T, width]."""
    parts = [values[row, at : at + length] for (row, at), length in zip(places, LENGTHS, strict=True)]
    return np.concatenate(parts).astype(np.float32)


def all_sites(layers: int) -> tuple[Site, ...]:
    per_layer = (Kind.RESID_PRE, Kind.HEAD_OUT, Kind.ATTN_OUT, Kind.MLP_OUT, Kind.RESID_POST)
    sites = [Site(kind, layer) for layer in range(layers) for kind in per_layer]
    return (Site(Kind.EMBED), *sites, Site(Kind.FINAL_NORM))


def error(ours: Floats, theirs: Floats) -> float:
    """Relative, over everything."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def worst_token(ours: Floats, theirs: Floats) -> float:
    """Relative, of the token that is farthest off; NaN counts as infinitely far."""
    off = np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)
    return float(np.nan_to_num(off, nan=np.inf).max())


def build(fields: Mapping[str, Any], folder: Path, *, shards: bool = False, seed: int = 3) -> None:
    """A random-initialised model, saved by Hugging Face as it saves models; `shards`: over several files."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    fields = {**SMALL, **fields}
    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Large enough that attention is not flat and that no norm weight or bias can be forgotten.
            values = torch.randn(weight.shape, generator=draw) * (0.3 if weight.ndim == 1 else 0.18)
            if name.endswith("norm.weight") and not fields["model_type"].startswith("gemma"):
                values += 1.0
            weight.copy_(values.to(torch.bfloat16))
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB" if shards else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)


def capture(folder: Path, docs: Sequence[npt.NDArray[np.int32]], dtype: str, *, alone: bool) -> dict[str, Floats]:
    """By site name, all documents' vectors one after another; `alone`: run one at a time, else in one padded batch."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    kind = getattr(torch, dtype)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="eager")
    model = whole.model.eval()
    found: dict[str, list[Any]] = {}
    _hook(model, found)
    with torch.no_grad():
        if alone:
            runs = [(torch.from_numpy(doc[None].astype(np.int64)), None) for doc in docs]
        else:
            batch, _ = padded(docs)
            runs = [(torch.from_numpy(batch.tokens.astype(np.int64)), torch.from_numpy(batch.segments != 0).long())]
        for tokens, mask in runs:
            model(input_ids=tokens, attention_mask=mask, use_cache=False)
    values = {name: [part.float().numpy() for part in parts] for name, parts in found.items()}
    if alone:
        return {name: np.concatenate([part[0] for part in parts]) for name, parts in values.items()}
    return {name: rows_of(parts[0], padded(docs)[1]) for name, parts in values.items()}


def _hook(model: Any, found: dict[str, list[Any]]) -> None:
    """Write what passes each site of the model into `found`."""

    def keep(name: str) -> Any:
        return lambda value: found.setdefault(name, []).append(value[0] if isinstance(value, tuple) else value)

    def before(module: Any, name: str) -> None:
        put = keep(name)
        module.register_forward_pre_hook(lambda _, given, named: put(given or named["hidden_states"]), with_kwargs=True)

    def after(module: Any, name: str) -> None:
        put = keep(name)
        module.register_forward_hook(lambda _, given, value: put(value))

    before(model.layers[0], "embed")
    after(model.norm, "final_norm")
    for number, layer in enumerate(model.layers):
        post_norms = hasattr(layer, "post_feedforward_layernorm")
        before(layer, f"resid_pre.{number}")
        before(layer.self_attn.o_proj, f"head_out.{number}")
        after(layer.post_attention_layernorm if post_norms else layer.self_attn, f"attn_out.{number}")
        after(layer.post_feedforward_layernorm if post_norms else layer.mlp, f"mlp_out.{number}")
        after(layer, f"resid_post.{number}")


def versions() -> dict[str, str]:
    return {name: str(importlib.import_module(name).__version__) for name in ("torch", "transformers")}
