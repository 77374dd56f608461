"""Configs as they are published, old style and new, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.domain.admission import BadInput
from penstock.extract.config import LayerKind, ModelConfig, Rope, load_config, parse_config
from penstock.extract.shapes import Kind, Site

QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA31: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
GEMMA2_2B = {
    "attn_logit_softcapping": 50.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}


def read(fields: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_config(json.dumps(fields | changes).encode())


def test_qwen25_as_published() -> None:
    config = read(QWEN25)
    assert (config.width, config.heads, config.kv_heads, config.head_dim) == (896, 14, 2, 64)
    assert config.qkv_bias
    assert not config.out_bias
    assert config.tied
    assert config.layers == (LayerKind(None, Rope(1e6)),) * 24
    assert config.scale == 1 / 8
    assert config.site_width(Site(Kind.HEAD_OUT, 0)) == 896


def test_qwen_has_windows_in_its_upper_layers_if_it_uses_them() -> None:
    windows = [kind.window for kind in read(QWEN25, use_sliding_window=True, sliding_window=128).layers]
    assert windows == [None] * 21 + [128] * 3


def test_llama31_as_published() -> None:
    config = read(LLAMA31)
    assert config.layers[0].rope == Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    assert (config.tied, config.qkv_bias, config.mlp_bias) == (False, False, False)
    assert read(LLAMA31, attention_bias=True).out_bias


def test_llama2_without_what_came_later() -> None:
    old = {key: value for key, value in LLAMA31.items() if key not in ("rope_scaling", "rope_theta", "attention_bias")}
    config = read(old, num_key_value_heads=None, head_dim=None)
    assert (config.kv_heads, config.head_dim) == (32, 128)
    assert config.layers[0].rope == Rope(10_000.0)


def test_gemma2_as_published() -> None:
    config = read(GEMMA2_2B)
    assert [kind.window for kind in config.layers[:4]] == [4096, None, 4096, None]
    assert config.soft_cap == 50.0
    assert config.tied
    assert config.embed_scale == 48.0
    assert read(GEMMA2_2B, attn_logit_softcapping=None).soft_cap is None


def test_gemma3_as_published_leaves_most_to_defaults_and_has_two_rotary_rules() -> None:
    config = read(GEMMA3_4B)
    assert (config.width, config.heads, config.kv_heads, config.head_dim) == (2560, 8, 4, 256)
    assert config.vocab == 262_208
    local, whole = LayerKind(1024, Rope(10_000.0)), LayerKind(None, Rope(1_000_000.0, "linear", 8.0))
    assert config.layers == tuple(whole if layer % 6 == 5 else local for layer in range(34))
    assert config.soft_cap is None


def test_newer_configs_say_the_same_in_other_fields() -> None:
    old, kinds = GEMMA3_4B["text_config"], ["sliding_attention"] * 5 + ["full_attention"]
    assert isinstance(old, dict)
    new = {key: value for key, value in old.items() if key != "rope_scaling"} | {
        "layer_types": (kinds * 6)[:34],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }
    assert read(new) == read(GEMMA3_4B)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, "config.json: model_type: 'mamba' is no family known here; known are qwen2"),
        ({"hidden_size": None}, "hidden_size: None is missing"),
        ({"hidden_size": "896"}, "hidden_size: '896' is of the wrong kind"),
        ({"hidden_size": True}, "hidden_size: True is of the wrong kind"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not between 1 and"),
        ({"num_hidden_layers": 5000}, "num_hidden_layers: 5000 is above 1024"),
        ({"num_key_value_heads": 4}, "4 does not divide the 14 heads: 14 = 3 × 4 + 2"),
        ({"hidden_size": 900}, "900 is no multiple of the 14 heads"),
        ({"head_dim": 63}, "63 is odd"),
        ({"hidden_act": "relu"}, "hidden_act: 'relu' is not supported"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps: 0.0 is not above 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type: 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor: None is missing"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: {'quant_method': 'gptq'} is not"),
        ({"layer_types": ["full_attention"]}, "is not a list of 24 times"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(QWEN25, **changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_config_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no config\.json; give a Hugging Face directory"):
        load_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(BadInput, match=r"config\.json: .* is no JSON object"):
        load_config(f"{tmp_path}/")
