"""Which tensors a model has: ours and Hugging Face's names, shapes, and along which mesh axes each may be cut.

`weights` loads by it, `mesh` places and counts by it. Matrices keep the layout of the files, [out, in]; those that are
multiplied with the same vectors lie one behind the other, so that one product serves both. It must not import jax: the
memory estimate of a dry run needs it.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.extract.config import ModelConfig


class Parameter(NamedTuple):
    """`axes` has a word per dimension: heads, kv, hidden (cut by the tensor axis), width (by fsdp) or "" (whole)."""

    name: str  #: key in the layer's dictionary
    sources: tuple[str, ...]  #: names in the files, behind the layer's or model's prefix; several are stacked
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def source_shape(self) -> tuple[int, ...]:
        return self.shape if len(self.sources) == 1 else self.shape[1:]


def embedding(config: ModelConfig) -> Parameter:
    return Parameter("embed", ("embed_tokens.weight",), (config.vocab, config.width), ("", "width"))


def final_norm(config: ModelConfig) -> Parameter:
    return Parameter("final_norm", ("norm.weight",), (config.width,), ("",))


def layer_parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """Of one layer; all layers of a model have the same."""
    facts, size = config.facts, config.head_dim
    width = (config.width, "width")
    heads, kv = (config.heads * size, "heads"), (config.kv_heads * size, "kv")
    hidden = (config.hidden, "hidden")
    found = [
        *_linear("q", ("self_attn.q_proj",), heads, width, bias=config.qkv_bias),
        *_linear("kv", ("self_attn.k_proj", "self_attn.v_proj"), kv, width, bias=config.qkv_bias),
        *_linear("o", ("self_attn.o_proj",), width, heads, bias=config.out_bias),
        *_linear("gate_up", ("mlp.gate_proj", "mlp.up_proj"), hidden, width, bias=config.mlp_bias),
        *_linear("down", ("mlp.down_proj",), width, hidden, bias=config.mlp_bias),
    ]
    # The files call the norm behind the attention by one name, whether it is before or after the addition.
    norms = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if facts.post_norms:
        norms["mlp_norm"] = "pre_feedforward_layernorm"
        norms |= {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
    found += [Parameter(name, (f"{source}.weight",), (config.width,), ("",)) for name, source in norms.items()]
    if facts.qk_norm:
        found += [Parameter(f"{each}_norm", (f"self_attn.{each}_norm.weight",), (size,), ("",)) for each in ("q", "k")]
    return tuple(found)


def _linear(
    name: str, sources: tuple[str, ...], out: tuple[int, str], into: tuple[int, str], *, bias: bool
) -> list[Parameter]:
    stacked, whole = ((len(sources),), ("",)) if len(sources) > 1 else ((), ())
    weights = tuple(f"{source}.weight" for source in sources)
    found = [Parameter(name, weights, (*stacked, out[0], into[0]), (*whole, out[1], into[1]))]
    if bias:
        # A bias is short, and one cut by fsdp would be gathered for nothing.
        axis = "" if out[1] == "width" else out[1]
        biases = tuple(f"{source}.bias" for source in sources)
        found.append(Parameter(f"{name}_bias", biases, (*stacked, out[0]), (*whole, axis)))
    return found
