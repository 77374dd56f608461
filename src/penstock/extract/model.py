"""The model: one implementation of the decoder for every family, which returns what is read and computes nothing else.

`make_step` gives the function that the engine compiles. It walks the pieces of `capture.arrange`: layers nobody wants
in scans, wanted ones by themselves or, when there are many, into a buffer. What differs between families comes from
`config` and `families`; there is no branch on a family's name. Weights, residual stream and results have one dtype;
norms, rotation and activations are computed in float32 and rounded once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from penstock.domain.admission import BadInput
from penstock.extract.attention import Attention, Mask
from penstock.extract.capture import ORDER, Course, Piece, arrange
from penstock.extract.config import LayerKind, ModelConfig
from penstock.extract.gate_up import GateUp
from penstock.extract.mesh import ROWS, SIZES, Spread
from penstock.extract.parameters import layer_parameters
from penstock.extract.rotary import Angles, angles, turn
from penstock.extract.shapes import Kind, Site

Layer = Mapping[str, jax.Array]
Seen = dict[Kind, jax.Array]


class Params(TypedDict, total=False):
    """`pieces` goes with the course's: per piece and kind of layer in its period, tensors stacked over the groups."""

    embed: jax.Array
    pieces: tuple[tuple[Layer, ...], ...]
    final_norm: jax.Array


Step = Callable[[Params, jax.Array, jax.Array, jax.Array], dict[str, jax.Array]]


def make_step(
    config: ModelConfig,
    sites: Sequence[Site],
    *,
    attention: Attention,
    dtype: str,
    mesh: jax.sharding.Mesh | None = None,
    gate_up: GateUp | None = None,
) -> Step:
    """A pure function of (params, tokens, positions, segments), to be compiled; its results are by `Site.name`.

    Each result is [B, T, width of the site], whole vectors in `dtype`, on a mesh cut by rows only. `gate_up` is a
    kernel for the gated MLP, on one device.
    """
    if dtype not in SIZES:
        raise BadInput("dtype", dtype, "is not supported", f"use one of {', '.join(SIZES)}")
    course = arrange(config, sites)
    place = Spread(mesh, config)

    def step(params: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> dict[str, jax.Array]:
        _check_rows(tokens.shape[0], mesh)
        with _precision(dtype):
            walk = _Walk(config, course, place, attention, gate_up, positions, segments)
            found = walk.through(params, tokens)
        return {site.name: place.rows(found[read]) for site, read in zip(course.sites, course.reads, strict=True)}

    return step


def _check_rows(rows: int, mesh: jax.sharding.Mesh | None) -> None:
    if mesh is None:
        return
    parts = mesh.shape[ROWS[0]] * mesh.shape[ROWS[1]]
    if rows % parts:
        rule = f"cannot be cut over data × fsdp: {rows} = {rows // parts} × {parts} + {rows % parts}"
        raise BadInput("batch rows", rows, rule, f"use a multiple of {parts}")


def _precision(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """Who asks for float32 gets it: accelerators would otherwise multiply in less."""
    return jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()


class _Walk:
    """One tracing of the step: what all layers share, and the way through them."""

    def __init__(
        self,
        config: ModelConfig,
        course: Course,
        place: Spread,
        attention: Attention,
        gate_up: GateUp | None,
        positions: jax.Array,
        segments: jax.Array,
    ) -> None:
        self.config = config
        self.course = course
        self.place = place
        self.tensors = {tensor.name: tensor for tensor in layer_parameters(config)}
        self.attention = attention
        self.gate_up = gate_up
        # Once per step, outside the loops over layers.
        self.segments = place.per_device(attention.segments, False)(place.rows(segments))
        ran = {kind.rope for kind in config.layers[: course.last + 1]}
        self.angles = {rope: angles(rope, config.head_dim, place.rows(positions)) for rope in ran}

    def through(self, params: Params, tokens: jax.Array) -> dict[Site, jax.Array]:
        stream = self._embed(params["embed"], tokens)
        found = {Site(Kind.EMBED): stream}
        slots = _slots(self.course) if self.course.buffered else {}
        buffers = {kind: self._buffer(kind, len(numbers), stream) for kind, numbers in slots.items()}
        for piece, weights in zip(self.course.pieces, params["pieces"], strict=True):
            if self.course.buffered:
                stream, buffers = self._buffered(piece, weights, stream, buffers, slots)
            elif self.course.kinds(piece.first):
                seen = self._block(stream, _first(weights[0]), piece.first)
                found |= {Site(kind, piece.first): value for kind, value in seen.items()}
                stream = seen.get(Kind.RESID_POST, stream)
            else:
                stream = self._unread(piece, weights, stream)
        for kind, numbers in slots.items():
            found |= {Site(kind, layer): buffers[kind][number] for layer, number in numbers.items()}
        if self.course.final_norm:
            found[Site(Kind.FINAL_NORM)] = self._norm(stream, params["final_norm"])
        return found

    def _embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        # A token the model does not have gives NaN, which nobody takes for a result; its neighbour's row would do harm.
        stream = self.place.rows(jnp.take(table, self.place.rows(tokens), axis=0, mode="fill"))
        if self.config.facts.embed_scaled:
            # The scale is rounded first, as the models were trained: 55.4 is 55.5 in bfloat16.
            stream = stream * jnp.asarray(self.config.embed_scale, stream.dtype)
        return stream

    def _unread(self, piece: Piece, weights: Sequence[Layer], stream: jax.Array) -> jax.Array:
        def group(stream: jax.Array, layers: Sequence[Layer]) -> tuple[jax.Array, None]:
            for slot, layer in enumerate(layers):
                stream = self._block(stream, layer, piece.first + slot)[Kind.RESID_POST]
            return stream, None

        return jax.lax.scan(group, stream, tuple(weights))[0]

    def _buffered(
        self,
        piece: Piece,
        weights: Sequence[Layer],
        stream: jax.Array,
        buffers: Seen,
        slots: Mapping[Kind, Mapping[int, int]],
    ) -> tuple[jax.Array, Seen]:
        """As `_unread`, and every layer writes what is read somewhere into its slot; the last one is for the rest."""
        layers = [[piece.layer(group, slot) for slot in range(piece.period)] for group in range(piece.groups)]
        numbers = {
            kind: np.array([[slots[kind].get(layer, len(slots[kind])) for layer in row] for row in layers], np.int32)
            for kind in slots
        }

        def group(carry: tuple[jax.Array, Seen], given: Any) -> tuple[tuple[jax.Array, Seen], None]:
            stream, buffers = carry
            layers, at = given
            for slot, layer in enumerate(layers):
                seen = self._block(stream, layer, piece.first + slot)
                stream = seen.get(Kind.RESID_POST, stream)
                buffers = {
                    kind: jax.lax.dynamic_update_index_in_dim(buffer, seen[kind], at[kind][slot], 0)
                    if kind in seen
                    else buffer
                    for kind, buffer in buffers.items()
                }
            return (stream, buffers), None

        if piece.groups == 1 and piece.period == 1:
            return group((stream, buffers), ((_first(weights[0]),), {kind: each[0] for kind, each in numbers.items()}))[
                0
            ]
        return jax.lax.scan(group, (stream, buffers), (tuple(weights), numbers))[0]

    def _buffer(self, kind: Kind, slots: int, stream: jax.Array) -> jax.Array:
        rows, width, _ = stream.shape
        shape = (slots + 1, rows, width, self.config.site_width(Site(kind, 0)))
        return self.place.slots(jnp.zeros(shape, stream.dtype))

    def _block(self, stream: jax.Array, layer: Layer, number: int) -> Seen:
        """One layer: what can be read in it, up to where the model ends. `number` stands for all of its kind."""
        ending = self.course.ending if number == self.course.last else Kind.RESID_POST
        seen: Seen = {}
        heads = self._attend(self._norm(stream, layer["attn_norm"]), layer, self.config.layers[number])
        seen[Kind.HEAD_OUT] = self.place.rows(heads)
        if ending is Kind.HEAD_OUT:
            return seen
        added = self.place.rows(self._linear(heads, layer, "o"))
        if self.config.facts.post_norms:
            added = self._norm(added, layer["attn_post_norm"])
        seen[Kind.ATTN_OUT] = added
        if ending is Kind.ATTN_OUT:
            return seen
        stream = stream + added
        added = self.place.rows(self._mlp(self._norm(stream, layer["mlp_norm"]), layer))
        if self.config.facts.post_norms:
            added = self._norm(added, layer["mlp_post_norm"])
        seen[Kind.MLP_OUT] = added
        seen[Kind.RESID_POST] = stream + added
        return seen

    def _attend(self, x: jax.Array, layer: Layer, kind: LayerKind) -> jax.Array:
        """The heads' values, one after another: [B, T, heads * head_dim]."""
        config, place = self.config, self.place
        rows, width, _ = x.shape
        q, k, v = (part.reshape(rows, width, -1, config.head_dim) for part in self._projected(x, layer))
        if config.facts.qk_norm:
            q, k = self._norm(q, layer["q_norm"]), self._norm(k, layer["k_norm"])
        by: Angles = self.angles[kind.rope]
        q, k = turn(q, by), turn(k, by)
        if place.kv_repeats > 1:
            k, v = jnp.repeat(k, place.kv_repeats, axis=2), jnp.repeat(v, place.kv_repeats, axis=2)
        mask = Mask(scale=config.scale, window=kind.window, soft_cap=config.soft_cap)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any) -> jax.Array:
            return self.attention(q, k, v, segments, mask)

        per_device = place.per_device(attend, True, True, True, False)
        out: jax.Array = per_device(place.heads(q), place.heads(k), place.heads(v), self.segments)
        return out.reshape(rows, width, -1)

    def _projected(self, x: jax.Array, layer: Layer) -> Sequence[jax.Array]:
        """Queries, keys and values: of one product where `fused.fuse` has joined their matrices."""
        if "qkv" in layer:
            queries, keys = (count * self.config.head_dim for count in (self.config.heads, self.config.kv_heads))
            return jnp.split(self._linear(x, layer, "qkv"), (queries, queries + keys), axis=-1)
        kv = self._linear(x, layer, "kv")
        return self._linear(x, layer, "q"), kv[:, :, 0], kv[:, :, 1]

    def _mlp(self, x: jax.Array, layer: Layer) -> jax.Array:
        if self.gate_up is not None:
            values = self.gate_up(x.reshape(-1, x.shape[-1]), layer["gate_up"].reshape(-1, x.shape[-1]))
            return self._linear(values.reshape(*x.shape[:-1], -1), layer, "down")
        both = self._linear(x, layer, "gate_up").astype(jnp.float32)
        gate, up = both[:, :, 0], both[:, :, 1]
        gate = jax.nn.silu(gate) if self.config.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return self._linear(self.place.hidden((gate * up).astype(x.dtype)), layer, "down")

    def _linear(self, x: jax.Array, layer: Layer, name: str) -> jax.Array:
        """x [B, T, in] by a weight [… , out, in]: [B, T, … , out]."""
        # A joined matrix is not in the table of tensors: it is never cut.
        weight = self.place.gathered(self.tensors[name], layer[name]) if name in self.tensors else layer[name]
        out = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (weight.ndim - 1,)), ((), ())))
        bias = layer.get(f"{name}_bias")
        return out if bias is None else out + bias

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.config.norm_eps)
        scale = weight.astype(jnp.float32)
        return (wide * (1.0 + scale if self.config.facts.norm_plus_one else scale)).astype(x.dtype)


def _first(layer: Layer) -> Layer:
    return {name: value[0] for name, value in layer.items()}


def _slots(course: Course) -> dict[Kind, dict[int, int]]:
    """For each kind that is read: which layer has which slot of its buffer."""
    found: dict[Kind, dict[int, int]] = {}
    for kind in ORDER:
        layers = sorted({site.layer for site in course.reads if site.kind is kind and site.layer is not None})
        if layers:
            found[kind] = {layer: slot for slot, layer in enumerate(layers)}
    return found
