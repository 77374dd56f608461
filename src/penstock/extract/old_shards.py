"""Reads `shard_*.pkl.gz` of the older extraction tool without ever running what is in them.

`tpu extract old-shard` and users with old data call it. A pickle is a program; these may only build numbers, texts,
lists, dicts and arrays. Before anything is built, every instruction is looked at: other kinds are refused, and so are
more of them than a shard needs. Then nothing that the pickle names is looked up: the few names that numpy's arrays need
stand for objects of this module, which check every word before they make an array from plain bytes. Sizes are bounded
while reading, so that a small file cannot fill the memory.
"""

from __future__ import annotations

import gzip
import math
import pickle
import pickletools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, NoReturn, Self, cast

import ml_dtypes
import msgspec
import numpy as np
from typing_extensions import override

from penstock.domain.admission import BadInput
from penstock.extract.tensors import Array

#: The older tool closed a shard at about one gigabyte of arrays.
BYTES_MAX: Final = 8 << 30
#: A sample takes some fifty.
INSTRUCTIONS_MAX: Final = 20_000_000
_DIMENSIONS_MAX: Final = 8
_TYPES: Final = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"})

#: Instructions that only build values, name something, or call what was named. Not among them: persistent ids,
#: registered extensions, classes that are instantiated, buffers from elsewhere.
_INSTRUCTIONS: Final = """
    PROTO STOP FRAME MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT
    STRING SHORT_BINSTRING BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8
    BYTEARRAY8 EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS
    GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL REDUCE BUILD
"""
_ALLOWED: Final = frozenset(_INSTRUCTIONS.split())
#: What damaged and hostile streams make pickle, gzip and numpy raise.
_MALFORMED: Final = (
    pickle.UnpicklingError,
    zlib.error,
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    gzip.BadGzipFile,
)


class Refused(pickle.UnpicklingError):
    """The file is not a shard, or more than one."""


class OldSample(msgspec.Struct, frozen=True, eq=False):
    """One sample of one layer, as it was written: padded, without token ids."""

    layer: str
    sample: int
    activation: Array
    text: str


def load_old_shard(path: Path, bytes_max: int = BYTES_MAX) -> list[OldSample]:
    """The samples of a shard, in its order; raises `BadInput` for anything else."""
    try:
        with _Bounded(path, bytes_max) as stream:
            _look_through(stream)
        with _Bounded(path, bytes_max) as stream:
            found = _Unpickler(stream).load()
        return list(_samples(found))
    except _MALFORMED as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadInput("file", str(path), f"is not a shard of activations: {said}", "give shard_*.pkl.gz") from error


class _Bounded:
    """Not more than so many bytes of a file, unpacked if it is packed. It has no position, so nobody can go back."""

    def __init__(self, path: Path, left: int) -> None:
        self._file = path.open("rb")
        packed = self._file.peek(2)[:2] == b"\x1f\x8b"
        self._stream: Any = gzip.GzipFile(fileobj=self._file) if packed else self._file
        self._left = left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, count: int) -> bytes:
        if not 0 <= count <= self._left:
            raise Refused("it holds more bytes than a shard may")
        return self._taken(self._stream.read(count))

    def readline(self) -> bytes:
        return self._taken(self._stream.readline(self._left + 1))

    def _taken(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise Refused("it holds more bytes than a shard may")
        return data


def _look_through(stream: _Bounded) -> None:
    for number, (instruction, _, _) in enumerate(pickletools.genops(cast("IO[bytes]", stream))):
        if instruction.name not in _ALLOWED:
            raise Refused(f"it has the instruction {instruction.name}, which no shard needs")
        if number > INSTRUCTIONS_MAX:
            raise Refused(f"it has more than {INSTRUCTIONS_MAX} instructions")


# --- what stands for the few things of numpy's that a shard may name ---


class _Named:
    """Something that a pickle may name and call, and do nothing else with."""

    __slots__ = ("_make", "name")

    def __init__(self, name: str, make: Callable[..., object]) -> None:
        self.name = name
        self._make = make

    def __call__(self, *words: object) -> object:
        return self._make(*words)

    def __setstate__(self, state: object) -> NoReturn:
        raise Refused(f"it would change {self.name}")


class _Type:
    """A numpy type on its way: its name first, its byte order later."""

    __slots__ = ("dtype",)

    def __init__(self, name: object, *_: object) -> None:
        if isinstance(name, _Named) and name.name == "bfloat16":
            self.dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        elif isinstance(name, str) and name in _TYPES:
            self.dtype = np.dtype(name)
        else:
            raise Refused(f"it has arrays of {name!r:.40}")

    def __setstate__(self, state: object) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        if order not in ("<", ">", "|", "="):
            raise Refused("it has a type with an unknown byte order")
        if order == ">":
            self.dtype = self.dtype.newbyteorder(">")


class _Draft:
    """An array on its way: empty first, its bytes later, as numpy writes them."""

    __slots__ = ("array",)

    def __init__(self, *_: object) -> None:
        self.array: Array | None = None

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), tuple() as shape, _Type() as kind, bool() | int() as column_first, bytes() as data):
                self.array = _array(data, kind, shape, column_first=bool(column_first))
            case _:
                raise Refused("it has an array that is not plain numbers")


def _array(data: bytes | bytearray, kind: _Type, shape: tuple[object, ...], *, column_first: bool) -> Array:
    sides = [side for side in shape if isinstance(side, int) and side >= 0]
    if len(sides) != len(shape) or len(shape) > _DIMENSIONS_MAX:
        raise Refused(f"it has an array of shape {shape!r:.60}")
    if math.prod(sides) * kind.dtype.itemsize != len(data):
        raise Refused(f"it has {len(data)} bytes for an array of shape {shape!r:.60}")
    flat: Array = np.frombuffer(bytes(data), np.uint8).view(kind.dtype)
    return flat.reshape(sides, order="F" if column_first else "C")


def _from_buffer(data: object, kind: object, shape: object, order: object) -> object:
    if not (isinstance(data, bytes | bytearray) and isinstance(kind, _Type) and isinstance(shape, tuple)):
        raise Refused("it has an array that is not plain numbers")
    draft = _Draft()
    draft.array = _array(data, kind, shape, column_first=order == "F")
    return draft


def _scalar(kind: object, data: object) -> object:
    if not (isinstance(kind, _Type) and isinstance(data, bytes)):
        raise Refused("it has a number that is none")
    return _array(data, kind, (), column_first=False).item()


def _refuse_call(*_: object) -> NoReturn:
    raise Refused("it would call a type")


def _latin(text: object, how: object) -> bytes:
    """Bytes as protocol 2 writes them."""
    if not isinstance(text, str) or how != "latin1":
        raise Refused("it encodes something else than bytes")
    return text.encode("latin1")


def _empty_dict(*_: object) -> dict[object, object]:
    return {}


_NAMES: Final = {
    **{
        (f"numpy.{core}.{module}", name): _Named(name, make)
        for core in ("core", "_core")
        for module, name, make in (
            ("multiarray", "_reconstruct", _Draft),
            ("multiarray", "scalar", _scalar),
            ("numeric", "_frombuffer", _from_buffer),
        )
    },
    ("numpy", "dtype"): _Named("dtype", _Type),
    ("numpy", "ndarray"): _Named("ndarray", _refuse_call),
    ("ml_dtypes", "bfloat16"): _Named("bfloat16", _refuse_call),
    ("collections", "defaultdict"): _Named("defaultdict", _empty_dict),
    ("collections", "OrderedDict"): _Named("OrderedDict", _empty_dict),
    ("builtins", "list"): _Named("list", _refuse_call),
    ("_codecs", "encode"): _Named("encode", _latin),
}


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = _NAMES.get((module_name, global_name))
        if found is None:
            raise Refused(f"it names {module_name}.{global_name}, which no shard needs")
        return found

    @override
    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise Refused("it refers to something outside of the file")


def _samples(found: object) -> Iterator[OldSample]:
    if not isinstance(found, dict):
        raise Refused(f"it holds a {type(found).__name__}, not layers")
    for layer, samples in found.items():
        if not isinstance(layer, str | int) or not isinstance(samples, list):
            raise Refused("its layers are not lists of samples")
        for sample in samples:
            if not isinstance(sample, dict):
                raise Refused(f"layer {layer} holds a {type(sample).__name__}, not a sample")
            activation = sample.get("activation")
            number = sample.get("sample_idx")
            text = sample.get("text_preview", "")
            if not isinstance(activation, _Draft) or activation.array is None:
                raise Refused(f"a sample of layer {layer} has no activation")
            if not isinstance(number, int) or not isinstance(text, str | None):
                raise Refused(f"a sample of layer {layer} has no number, or a text that is none")
            yield OldSample(str(layer), number, activation.array, text or "")
