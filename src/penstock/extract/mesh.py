"""Devices as a mesh of three axes, what is cut along which, and what fits: shapes that cannot be are refused here.

`data` cuts the rows of a batch and is the default; `fsdp` cuts rows and also the weights, which are gathered layer by
layer; `tensor` cuts heads and the MLP. Values that are read leave the model whole: `Spread.rows` cuts them by rows
and nothing else, whatever the compiler would prefer. `check_shape` and `estimate` are for plans and dry runs: they
need no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from typing_extensions import override

from penstock.domain.admission import BadInput
from penstock.extract.capture import Course
from penstock.extract.config import ModelConfig
from penstock.extract.parameters import Parameter, embedding, final_norm, layer_parameters

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

DATA: Final = "data"
FSDP: Final = "fsdp"
TENSOR: Final = "tensor"
ROWS: Final = (DATA, FSDP)

SIZES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

SCORES_BYTES_MAX: Final = 1 << 30  #: of plain attention at once; beyond, it goes row by row


class MeshShape(msgspec.Struct, frozen=True, gc=False):
    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @override
    def __str__(self) -> str:
        return f"data={self.data},fsdp={self.fsdp},tensor={self.tensor}"


ONE_DEVICE: Final = MeshShape()


def parse_mesh(text: str | None) -> MeshShape | None:
    """`data=4,tensor=2`, each axis at most once."""
    if text is None:
        return None
    found: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in MeshShape.__struct_fields__ or axis in found or not (size.isascii() and size.isdecimal()):
            raise BadInput("mesh", text, f"has {part!r}, which is no axis", "write data=4,fsdp=1,tensor=2")
        found[axis] = int(size)
    return MeshShape(**found)


def check_shape(shape: MeshShape, config: ModelConfig, *, devices: int, rows: int) -> None:
    """Refuse what cannot be, with the arithmetic."""
    for axis, size in ((DATA, shape.data), (FSDP, shape.fsdp), (TENSOR, shape.tensor)):
        if size < 1:
            raise BadInput(f"mesh: {axis}", size, "is not above 0")
    if shape.devices != devices:
        rule = f"needs {shape.data} × {shape.fsdp} × {shape.tensor} = {shape.devices} devices, and there are {devices}"
        raise BadInput("mesh", str(shape), rule, f"as data={devices}")
    _must_divide("batch rows", rows, "data × fsdp", shape.data * shape.fsdp, "use a multiple of it")
    _must_divide("mesh: tensor: heads", config.heads, TENSOR, shape.tensor, "use a divisor")
    _must_divide("mesh: tensor: MLP width", config.hidden, TENSOR, shape.tensor, "use a divisor")
    _must_divide("mesh: fsdp: model width", config.width, FSDP, shape.fsdp, "use a divisor")


def _must_divide(what: str, whole: int, axis: str, parts: int, fix: str) -> None:
    if whole % parts:
        rule = f"cannot be cut into {parts} ({axis}): {whole} = {whole // parts} × {parts} + {whole % parts}"
        raise BadInput(what, whole, rule, fix)


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    import jax
    from jax.sharding import AxisType

    # Said outright, because the default differs between versions of jax; with Auto the compiler moves data as needed.
    kinds = (AxisType.Auto,) * 3
    sizes = (shape.data, shape.fsdp, shape.tensor)
    return jax.make_mesh(sizes, (DATA, FSDP, TENSOR), axis_types=kinds, devices=devices)


class Spread:
    """Where arrays lie on a mesh; without one, every method gives back what it got."""

    def __init__(self, mesh: Mesh | None, config: ModelConfig) -> None:
        self.mesh = mesh
        self.kv_cut = mesh is None or config.kv_heads % mesh.shape[TENSOR] == 0
        #: How often each key and value head is repeated, so that every device has those of its own query heads.
        self.kv_repeats = 1
        if mesh is not None and not self.kv_cut:
            parts = mesh.shape[TENSOR]
            self.kv_repeats = next(n for n in range(2, parts + 1) if config.kv_heads * n % parts == 0)

    def rows(self, x: jax.Array) -> jax.Array:
        """Cut by rows, every vector whole."""
        return self._put(x, ROWS)

    def heads(self, x: jax.Array) -> jax.Array:
        """[B, T, heads, D], heads over the tensor axis."""
        return self._put(x, ROWS, None, TENSOR)

    def hidden(self, x: jax.Array) -> jax.Array:
        """[B, T, hidden], the MLP's width over the tensor axis."""
        return self._put(x, ROWS, None, TENSOR)

    def slots(self, x: jax.Array) -> jax.Array:
        """[slots, B, T, width]: as `rows`, behind an axis of slots."""
        return self._put(x, None, ROWS)

    def gathered(self, tensor: Parameter, weight: jax.Array) -> jax.Array:
        """A layer's weight as it is used: whole along fsdp, still cut along the tensor axis."""
        return self._put(weight, *(axis if axis == TENSOR else None for axis in self._cuts(tensor)))

    def sharding(self, tensor: Parameter, *, stacked: bool) -> jax.sharding.NamedSharding | None:
        """How a weight is kept; `stacked`: behind an axis of layers."""
        if self.mesh is None:
            return None
        cuts = self._cuts(tensor)
        return _named(self.mesh, *([None, *cuts] if stacked else cuts))

    def per_device(self, call: Callable[..., Any], *cut_by_heads: bool) -> Callable[..., Any]:
        """`call` on each device's own part: kernels do not know about meshes.

        One word per argument: is it [B, T, heads, D], or anything whose first axis goes with the rows. The result is
        by heads if any argument is.
        """
        if self.mesh is None:
            return call
        import jax

        by_heads, by_rows = _named(self.mesh, ROWS, None, TENSOR).spec, _named(self.mesh, ROWS).spec
        specs = tuple(by_heads if each else by_rows for each in cut_by_heads)
        result = by_heads if any(cut_by_heads) else by_rows
        return jax.shard_map(call, mesh=self.mesh, in_specs=specs, out_specs=result, check_vma=False)

    def _cuts(self, tensor: Parameter) -> list[str | None]:
        words = {"heads": TENSOR, "hidden": TENSOR, "kv": TENSOR if self.kv_cut else None, "width": FSDP, "": None}
        return [words[axis] for axis in tensor.axes]

    def _put(self, x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
        if self.mesh is None:
            return x
        import jax

        # Axes that are not named are whole, and must stay so: the seed's vectors were cut because nobody said it.
        kept: jax.Array = jax.lax.with_sharding_constraint(x, _named(self.mesh, *axes))  # type: ignore[no-untyped-call]
        return kept


def _named(mesh: Mesh, *axes: str | tuple[str, ...] | None) -> jax.sharding.NamedSharding:
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]  # jax leaves it untyped


class Memory(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Bytes on each device."""

    weights: int
    working: int
    results: int

    @property
    def total(self) -> int:
        return self.weights + self.working + self.results

    @override
    def __str__(self) -> str:
        parts = (f"{name} {size / 2**30:.2f}" for name, size in msgspec.structs.asdict(self).items())
        return f"{self.total / 2**30:.2f} GiB per device ({', '.join(parts)})"


def weight_bytes(config: ModelConfig, course: Course, dtype: str, shape: MeshShape) -> int:
    """Of the weights that are loaded, on each device."""

    def part(tensor: Parameter) -> int:
        count = 1
        for size, axis in zip(tensor.shape, tensor.axes, strict=True):
            whole = axis == "" or (axis == "kv" and config.kv_heads % shape.tensor)
            count *= size if whole else size // (shape.fsdp if axis == "width" else shape.tensor)
        return count * SIZES[dtype]

    total = part(embedding(config)) + (part(final_norm(config)) if course.final_norm else 0)
    return total + (course.last + 1) * sum(part(each) for each in layer_parameters(config))


def estimate(
    config: ModelConfig,
    course: Course,
    *,
    rows: int,
    width: int,
    dtype: str,
    shape: MeshShape = ONE_DEVICE,
    in_flight: int,
    scores: bool,
    gated: bool = False,
) -> Memory:
    """What a step of `rows` × `width` tokens takes, by arithmetic on its arrays.

    `scores`: attention writes its scores out, as the plain one does. `gated`: gate, up and what is between them are one
    kernel (`gate_up`), so that only its result is written.
    """
    size = SIZES[dtype]
    own_rows = rows // (shape.data * shape.fsdp)
    tokens = own_rows * width
    heads = config.heads // shape.tensor
    stream = tokens * config.width * size
    qkv = tokens * (heads + 2 * max(config.kv_heads // shape.tensor, 1)) * config.head_dim * size
    attention = qkv + tokens * heads * config.head_dim * size
    if scores:
        at_once = 1 if 4 * own_rows * heads * width * width > SCORES_BYTES_MAX else own_rows
        attention += at_once * heads * width * width * (4 + 4 + size)  # scores, their softmax, its rounded copy
    mlp = (1 if gated else 3) * tokens * (config.hidden // shape.tensor) * size
    tables = 2 * 4 * tokens * (config.head_dim // 2) * len({kind.rope for kind in config.layers})
    working = 3 * stream + max(attention, mlp) + tables
    if shape.fsdp > 1 and course.pieces:
        per_layer = sum(_count(each) for each in layer_parameters(config)) * size
        working += per_layer // shape.tensor  # one layer is gathered at a time
    results = sum(tokens * config.site_width(site) * size for site in course.sites)
    if course.buffered:
        working += results  # the buffer they are cut from
    return Memory(weights=weight_bytes(config, course, dtype, shape), working=working, results=results * in_flight)


def _count(tensor: Parameter) -> int:
    count = 1
    for each in tensor.shape:
        count *= each
    return count
