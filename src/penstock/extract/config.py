"""A model's shape and rules, read from the config.json of a Hugging Face directory and checked.

`load_config` turns the file into a `ModelConfig`, in which nothing is left to be looked up: windows, rotary rules and
scales are per layer. The plan, the memory estimate, the loader and the model work from it. A field that would change
the arithmetic in a way the model does not know is refused here, never passed over. It must not import jax.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from penstock.domain.admission import BadInput
from penstock.extract.families import FAMILIES, WRAPPERS, Family, Windows
from penstock.extract.shapes import LAYERS_MAX, Kind, Site
from penstock.objects.inputs import read_input

_ACTIVATIONS: Final = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}
_ROPES: Final = ("default", "linear", "llama3", "yarn")
_FILE_BYTES_MAX: Final = 1 << 20
_SIZE_MAX: Final = 1 << 24  #: of any one dimension; a config is a file from elsewhere

_T = TypeVar("_T")


class Rope(msgspec.Struct, frozen=True, gc=False):
    """How positions turn queries and keys; `rotary.frequencies` does the arithmetic. Unused fields keep their zeros."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low: float = 0.0  #: llama3: low_freq_factor; yarn: beta_slow
    high: float = 0.0  #: llama3: high_freq_factor; yarn: beta_fast
    original: int = 0  #: positions the model was first trained for
    gain: float = 1.0  #: yarn: multiplies cosine and sine
    whole: bool = True  #: yarn: bounds are rounded to whole dimensions


class LayerKind(msgspec.Struct, frozen=True, gc=False):
    """What may differ between the layers of a model, apart from their weights."""

    window: int | None  #: a token sees this many tokens at most, itself included
    rope: Rope


class ModelConfig(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    family: str  #: key of `families.FAMILIES`
    vocab: int
    width: int  #: of the residual stream
    hidden: int  #: of the MLP
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str  #: "silu" or "gelu_tanh"
    scale: float  #: scores are multiplied by it
    soft_cap: float | None
    embed_scale: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool  #: the language-model head is the embedding
    positions_max: int  #: the text length the model is made for
    layers: tuple[LayerKind, ...]

    @property
    def facts(self) -> Family:
        return FAMILIES[self.family]

    def site_width(self, site: Site) -> int:
        """Of the vectors read there."""
        return self.heads * self.head_dim if site.kind is Kind.HEAD_OUT else self.width


def load_config(address: str, environment: Mapping[str, str] = os.environ) -> ModelConfig:
    """Of the Hugging Face directory at `address`, here or in a bucket."""
    return parse_config(read_config(address, environment))


def read_config(address: str, environment: Mapping[str, str] = os.environ) -> bytes:
    """The bytes of the directory's config.json."""
    data = read_input(f"{address.rstrip('/')}/config.json", environment, at_most=_FILE_BYTES_MAX)
    if data is None:
        rule = "has no config.json"
        raise BadInput("model", address, rule, "give a Hugging Face directory, local, gs:// or s3://")
    return data


def parse_config(data: bytes) -> ModelConfig:
    """From the bytes of a config.json."""
    try:
        found = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadInput("config.json", data[:40], "is no JSON object", str(error)) from error
    model_type = found.get("model_type")
    if model_type in WRAPPERS:
        inner = found.get("text_config")
        if not isinstance(inner, dict):
            raise BadInput("config.json: text_config", inner, f"must be an object in a config of {model_type}")
        model_type = WRAPPERS[model_type]
        found = {"tie_word_embeddings": found.get("tie_word_embeddings", True)} | inner
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join([*FAMILIES, *WRAPPERS])
        raise BadInput("config.json: model_type", model_type, "is no family known here", f"known are {known}")
    if found.get("quantization_config") is not None:
        method = found["quantization_config"]
        raise BadInput("config.json: quantization_config", method, "is not supported", "use the unquantised weights")
    if found.get("use_bidirectional_attention"):
        raise BadInput("config.json: use_bidirectional_attention", True, "is not supported", "use a causal decoder")
    return _Reading(FAMILIES[model_type], found).config(model_type)


class _Reading:
    """One config on its way in: the fields as found, with the family's defaults behind them."""

    def __init__(self, family: Family, found: Mapping[str, Any]) -> None:
        self.family = family
        self.uncapped = found.get("attn_logit_softcapping", 0) is None  # here null means something: no cap
        self.found = {key: value for key, value in found.items() if value is not None}

    def config(self, model_type: str) -> ModelConfig:
        width, heads = self.size("hidden_size"), self.size("num_attention_heads")
        kv_heads = self.size("num_key_value_heads", heads)
        if heads % kv_heads:
            rule = f"does not divide the {heads} heads: {heads} = {heads // kv_heads} × {kv_heads} + {heads % kv_heads}"
            raise BadInput("config.json: num_key_value_heads", kv_heads, rule)
        if "head_dim" not in self.found and "head_dim" not in self.family.defaults and width % heads:
            rule = f"is no multiple of the {heads} heads, and there is no head_dim"
            raise BadInput("config.json: hidden_size", width, rule)
        head_dim = self.size("head_dim", max(width // heads, 1))
        if head_dim % 2:
            raise BadInput("config.json: head_dim", head_dim, "is odd, and rotation pairs dimensions")
        divisor = self.number(self.family.scale_field) if self.family.scale_field else float(head_dim)
        bias = self.flag("attention_bias")
        qkv_bias = bias if self.family.qkv_bias is None else self.family.qkv_bias
        return ModelConfig(
            family=model_type,
            vocab=self.size("vocab_size"),
            width=width,
            hidden=self.size("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=self.number("rms_norm_eps"),
            activation=self.activation(),
            scale=divisor**-0.5,
            soft_cap=self.number("attn_logit_softcapping") if self.family.soft_cap and not self.uncapped else None,
            embed_scale=math.sqrt(width) if self.family.embed_scaled else 1.0,
            qkv_bias=qkv_bias,
            out_bias=bias and self.family.qkv_bias is None,
            mlp_bias=self.flag("mlp_bias"),
            tied=self.flag("tie_word_embeddings"),
            positions_max=self.size("max_position_embeddings"),
            layers=self.layers(),
        )

    def value(self, field: str, kind: type[_T] | tuple[type[_T], ...], absent: object = None) -> _T:
        value = self.found.get(field, self.family.defaults.get(field, absent))
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            what = "is missing" if value is None else "is of the wrong kind"
            raise BadInput(f"config.json: {field}", value, what, f"{self.family.name} needs it")
        return value

    def size(self, field: str, absent: int | None = None) -> int:
        value = self.value(field, int, absent)
        if not 1 <= value <= _SIZE_MAX:
            raise BadInput(f"config.json: {field}", value, f"is not between 1 and {_SIZE_MAX}")
        return value

    def number(self, field: str) -> float:
        value = float(self.value(field, (int, float)))
        if not (math.isfinite(value) and value > 0):
            raise BadInput(f"config.json: {field}", value, "is not above 0")
        return value

    def flag(self, field: str) -> bool:
        return self.value(field, bool, absent=False)

    def activation(self) -> str:
        field = self.family.activation_field
        value = self.value(field, str)
        if value not in _ACTIVATIONS:
            raise BadInput(f"config.json: {field}", value, "is not supported", f"known are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def layers(self) -> tuple[LayerKind, ...]:
        count = self.size("num_hidden_layers")
        if count > LAYERS_MAX:
            raise BadInput("config.json: num_hidden_layers", count, f"is above {LAYERS_MAX}")
        local = self.local_layers(count)
        window = self.size("sliding_window") if any(local) else None
        rope, local_rope = self.ropes()
        return tuple(LayerKind(window, local_rope) if is_local else LayerKind(None, rope) for is_local in local)

    def local_layers(self, count: int) -> list[bool]:
        """Which layers have a window. `layer_types` says so itself; older configs leave it to the family's rule."""
        if self.family.windows is Windows.NONE:
            return [False] * count
        types = self.found.get("layer_types")
        if types is not None:
            known = ("sliding_attention", "full_attention")
            if not isinstance(types, list) or len(types) != count or any(each not in known for each in types):
                rule = f"is not a list of {count} times {' or '.join(known)}"
                raise BadInput("config.json: layer_types", types, rule)
            return [each == known[0] for each in types]
        if self.family.windows is Windows.ALTERNATING:
            pattern = self.size("sliding_window_pattern")
            return [(layer + 1) % pattern != 0 for layer in range(count)]
        first = self.value("max_window_layers", int)
        return [self.flag("use_sliding_window") and layer >= first for layer in range(count)]

    def ropes(self) -> tuple[Rope, Rope]:
        """Of layers without and with a window. Newer configs hold `rope_parameters`, older ones `rope_scaling`."""
        given = self.found.get("rope_parameters") or {}
        if any(isinstance(each, dict) for each in given.values()):
            return self.rope(given.get("full_attention") or {}), self.rope(
                given.get("sliding_attention") or {}, local=True
            )
        rope = self.rope(given or self.found.get("rope_scaling") or {})
        return rope, self.rope({}, local=True) if self.family.local_rope else rope

    def rope(self, given: Mapping[str, Any], *, local: bool = False) -> Rope:
        base = "rope_local_base_freq" if local and self.family.local_rope else "rope_theta"
        fields = _Reading(self.family, {"rope_theta": self.value(base, (int, float)), **given})
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in _ROPES:
            raise BadInput("config.json: rope_type", kind, "is not supported", f"known are {', '.join(_ROPES)}")
        if given.get("partial_rotary_factor", 1.0) != 1.0:
            raise BadInput("config.json: partial_rotary_factor", given["partial_rotary_factor"], "is not supported")
        theta = fields.number("rope_theta")
        if kind == "default":
            return Rope(theta)
        factor = fields.number("factor")
        if kind == "linear":
            return Rope(theta, kind, factor)
        original = fields.size("original_max_position_embeddings", self.size("max_position_embeddings"))
        if kind == "llama3":
            low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
            if high <= low:
                raise BadInput("config.json: high_freq_factor", high, f"is not above low_freq_factor, {low:g}")
            return Rope(theta, kind, factor, low, high, original)
        low = float(fields.value("beta_slow", (int, float), 1.0))
        high = float(fields.value("beta_fast", (int, float), 32.0))
        whole = fields.value("truncate", bool, absent=True)
        return Rope(theta, kind, factor, low, high, original, fields.yarn_gain(factor), whole)

    def yarn_gain(self, factor: float) -> float:
        if "attention_factor" in self.found:
            return self.number("attention_factor")

        def gain(share: float) -> float:
            return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0

        if self.found.get("mscale") and self.found.get("mscale_all_dim"):
            return gain(self.number("mscale")) / gain(self.number("mscale_all_dim"))
        return gain(1.0)
