"""The safetensors format, written and read without copies that are not needed.

`unit_writer` writes a unit's objects with it, the reader finds rows with it. Small tensors are joined from many arrays;
of a large one only the header is made here, and its rows are written elsewhere, as they come. It must not load tensors
of an object it reads: it says where their bytes are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.domain.admission import BadInput
from penstock.ports.objects import Damaged

Array = NDArray[Any]

LENGTH_BYTES: Final = 8
#: Of an object whose rows are written before their number is known: its rows begin at the start of a page.
ROOM_BYTES: Final = 4096
HEADER_BYTES_MAX: Final = 1 << 20  #: ours are some hundred bytes; more is not ours
_CODES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64"}
_NAMES: Final = {code: name for name, code in _CODES.items()}
_METADATA: Final = "__metadata__"


class Tensor(msgspec.Struct, frozen=True):
    """Where a tensor lies in its object: bytes `start` to `stop`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def row_bytes(self) -> int:
        return dtype_of(self.dtype).itemsize * math.prod(self.shape[1:])


def dtype_of(name: str) -> np.dtype[Any]:
    """The numpy type of a name; bfloat16 is not one of numpy's own."""
    if name not in _CODES:
        raise BadInput("dtype", name, "is not a type of ours", f"use one of {', '.join(_CODES)}")
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def encode(tensors: Mapping[str, Sequence[Array]], metadata: Mapping[str, str]) -> bytes:
    """An object that holds each tensor, joined along its first axis from arrays of equal type and inner shape."""
    header: dict[str, object] = {_METADATA: dict(sorted(metadata.items()))}
    chunks: list[memoryview] = []
    at = 0
    for name, parts in tensors.items():
        first = parts[0]
        if any(part.dtype != first.dtype or part.shape[1:] != first.shape[1:] for part in parts):
            raise ValueError(f"{name}: parts of different types or widths cannot be one tensor")
        size = sum(part.nbytes for part in parts)
        shape = (sum(len(part) for part in parts), *first.shape[1:])
        header[name] = {"dtype": _CODES[first.dtype.name], "shape": shape, "data_offsets": (at, at + size)}
        # As bytes: the buffer protocol knows no bfloat16.
        chunks.extend(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data for part in parts if part.nbytes)
        at += size
    text = msgspec.json.encode(header)
    return b"".join((_padded(text, -len(text) % LENGTH_BYTES), *chunks))  # the format wants its data aligned


def header_of(name: str, dtype: str, shape: Sequence[int], metadata: Mapping[str, str]) -> bytes:
    """The first `ROOM_BYTES` of an object with one tensor, whose rows lie behind them."""
    size = math.prod(shape) * dtype_of(dtype).itemsize
    facts = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": (0, size)}
    text = msgspec.json.encode({_METADATA: dict(sorted(metadata.items())), name: facts})
    if len(text) > ROOM_BYTES - LENGTH_BYTES:
        raise ValueError(f"{name}: {len(text)} bytes of header, and there is room for {ROOM_BYTES - LENGTH_BYTES}")
    return _padded(text, ROOM_BYTES - LENGTH_BYTES - len(text))


def _padded(text: bytes, spaces: int) -> bytes:
    """A header may end in spaces."""
    return (len(text) + spaces).to_bytes(LENGTH_BYTES, "little") + text + b" " * spaces


def header_stop(beginning: bytes, path: str) -> int:
    """Where the header ends, from the first bytes of an object."""
    length = int.from_bytes(beginning[:LENGTH_BYTES], "little")
    if len(beginning) < LENGTH_BYTES or length > HEADER_BYTES_MAX:
        raise Damaged(f"{path}: not a safetensors object: its header would have {length} bytes")
    return LENGTH_BYTES + length


def decode_header(beginning: bytes, path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of an object, from bytes that hold at least its header."""
    data_at = header_stop(beginning, path)
    try:
        header = msgspec.json.decode(beginning[LENGTH_BYTES:data_at], type=dict[str, dict[str, Any]])
        metadata = {str(name): str(text) for name, text in header.pop(_METADATA, {}).items()}
        tensors = {
            name: Tensor(
                _NAMES[facts["dtype"]],
                tuple(facts["shape"]),
                data_at + facts["data_offsets"][0],
                data_at + facts["data_offsets"][1],
            )
            for name, facts in header.items()
        }
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, IndexError) as error:
        raise Damaged(f"{path}: its safetensors header cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize != tensor.stop - tensor.start:
            raise Damaged(f"{path}: tensor {name} has {tensor.stop - tensor.start} bytes for shape {tensor.shape}")
    return tensors, metadata


def view(data: bytes, name: str, path: str) -> Array:
    """A tensor of an object that is in memory."""
    tensor = decode_header(data, path)[0].get(name)
    if tensor is None or tensor.stop > len(data):
        raise Damaged(f"{path}: tensor {name} is not there, or cut short")
    flat: Array = np.frombuffer(data, np.uint8, tensor.stop - tensor.start, tensor.start)
    return flat.view(dtype_of(tensor.dtype)).reshape(tensor.shape)
