"""What sets the model families apart, as a table: one row per `model_type` of a Hugging Face config.json.

`config` reads a model's config with it, `tensors` knows from it which tensors a layer has, `model` has one
implementation for all rows. A family that needs a fact no row has needs a new column here, never a branch on its name
elsewhere. `defaults` are what Hugging Face assumes when a config leaves a field out, as published ones do.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec


class Windows(StrEnum):
    """Which layers see only a window of the text before them."""

    NONE = "none"
    UPPER = "upper"  #: from `max_window_layers` on, and only if `use_sliding_window`
    ALTERNATING = "alternating"  #: all but every `sliding_window_pattern`-th layer


class Family(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    activation_field: str = "hidden_act"
    norm_plus_one: bool = False  #: norms multiply by 1 + weight
    post_norms: bool = False  #: attention and MLP outputs are normed before they are added to the residual stream
    qk_norm: bool = False  #: queries and keys are normed per head, before rotation
    qkv_bias: bool | None = None  #: None: `attention_bias` of the config says so, of the output projection as well
    embed_scaled: bool = False  #: embeddings are multiplied by the root of the width
    scale_field: str | None = None  #: attention is scaled by the root of this field instead of the head's width
    soft_cap: bool = False  #: attention scores are capped by `attn_logit_softcapping`
    windows: Windows = Windows.NONE
    local_rope: bool = False  #: layers with a window have their own rotary base, without scaling
    defaults: Mapping[str, object]


_ALL: Final[dict[str, object]] = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
_QWEN: Final = _ALL | {"max_position_embeddings": 32768, "max_window_layers": 28, "hidden_act": "silu"}
_GEMMA: Final = _ALL | {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}

FAMILIES: Final[dict[str, Family]] = {
    "qwen2": Family(name="Qwen2", qkv_bias=True, windows=Windows.UPPER, defaults=_QWEN),
    "qwen3": Family(name="Qwen3", qk_norm=True, windows=Windows.UPPER, defaults=_QWEN | {"head_dim": 128}),
    "llama": Family(name="Llama", defaults=_ALL | {"max_position_embeddings": 2048, "hidden_act": "silu"}),
    "gemma2": Family(
        name="Gemma 2",
        activation_field="hidden_activation",
        norm_plus_one=True,
        post_norms=True,
        embed_scaled=True,
        scale_field="query_pre_attn_scalar",
        soft_cap=True,
        windows=Windows.ALTERNATING,
        defaults=_GEMMA
        | {
            "vocab_size": 256_000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "sliding_window_pattern": 2,
        },
    ),
    "gemma3_text": Family(
        name="Gemma 3",
        activation_field="hidden_activation",
        norm_plus_one=True,
        post_norms=True,
        qk_norm=True,
        embed_scaled=True,
        scale_field="query_pre_attn_scalar",
        windows=Windows.ALTERNATING,
        local_rope=True,
        defaults=_GEMMA
        | {
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
    ),
}

#: A config of these holds the text model's under `text_config`; what sees images is left aside.
WRAPPERS: Final[dict[str, str]] = {"gemma3": "gemma3_text"}
