"""Reads `shard_*.pkl.gz` of the older extraction tool without ever running what is in them.

`tpu extract old-shard` and users with old data call it. A pickle is a program; this is a machine of its own for it,
which knows the few instructions that build numbers, texts, lists, dicts and arrays, and no others. Python's own is not
used, and nothing that a pickle names is looked up: the few names that numpy's arrays need stand for objects of this
module, which check every word before they make an array from plain bytes. A small file can cost little: bytes and
instructions are bounded while reading, lists and dicts have one place each, and only texts and small numbers are keys,
so that nothing is written out, hashed or compared more often than the file is long.
"""

from __future__ import annotations

import gzip
import math
import pickletools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, NoReturn, Self, cast

import ml_dtypes
import msgspec
import numpy as np

from penstock.domain.admission import BadInput
from penstock.extract.tensors import Array

#: The older tool closed a shard at about one gigabyte of arrays.
BYTES_MAX: Final = 8 << 30
#: A sample takes some fifty. An instruction can cost some seventy bytes of memory and next to none of a packed file, so
#: there may be this many, and for each byte of the file one more, up to the largest number.
INSTRUCTIONS_FREE: Final = 100_000
INSTRUCTIONS_MAX: Final = 20_000_000
LINE_BYTES_MAX: Final = 1 << 20  #: of texts as the oldest protocol writes them
KEY_MAX: Final = 1 << 31  #: larger numbers can be chosen so that a dict takes them for one another
_DIMENSIONS_MAX: Final = 8
_TYPES: Final = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"})

#: What damaged and hostile streams make gzip, numpy and the machine raise.
_MALFORMED: Final = (
    zlib.error,
    EOFError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    TypeError,
    ValueError,
    gzip.BadGzipFile,
)


class Refused(ValueError):
    """The file is not a shard, or more than one."""


class OldSample(msgspec.Struct, frozen=True, eq=False):
    """One sample of one layer, as it was written: padded, without token ids."""

    layer: str
    sample: int
    activation: Array
    text: str


def load_old_shard(path: str | Path, bytes_max: int = BYTES_MAX) -> list[OldSample]:
    """The samples of a shard, in its order; raises `BadInput` for anything else."""
    path = Path(path)
    allowed = min(INSTRUCTIONS_FREE + path.stat().st_size, INSTRUCTIONS_MAX)
    with _Bounded(path, bytes_max) as stream:
        try:
            return list(_samples(_built(stream, allowed)))
        except _MALFORMED as error:
            said = " ".join(str(error).split())[:200] or type(error).__name__
            rule = f"is not a shard of activations: {said}"
            raise BadInput("file", str(path), rule, "give shard_*.pkl.gz") from error


class _Bounded:
    """Not more than so many bytes of a file, unpacked if it is packed. It has no position, so nobody can go back."""

    def __init__(self, path: Path, left: int) -> None:
        self._file = path.open("rb")
        packed = self._file.peek(2)[:2] == b"\x1f\x8b"
        self._stream: Any = gzip.GzipFile(fileobj=self._file) if packed else self._file
        self._left = left
        self.taken = 0  #: bytes so far

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, count: int) -> bytes:
        if not 0 <= count <= self._left:
            raise Refused("it holds more bytes than a shard may")
        return self._taken(self._stream.read(count))

    def readline(self) -> bytes:
        line = self._taken(self._stream.readline(min(self._left, LINE_BYTES_MAX) + 1))
        if len(line) > LINE_BYTES_MAX:
            raise Refused(f"it has a line of more than {LINE_BYTES_MAX} bytes")
        return line

    def _taken(self, data: bytes) -> bytes:
        self._left -= len(data)
        self.taken += len(data)
        if self._left < 0:
            raise Refused("it holds more bytes than a shard may")
        return data


# --- what stands for the few things of numpy's that a shard may name ---


class _Named:
    """Something that a pickle may name and call, and do nothing else with."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., object]) -> None:
        self.name = name
        self.make = make


class _Type:
    """A numpy type on its way: its name first, its byte order later."""

    __slots__ = ("dtype",)

    def __init__(self, name: object, *_: object) -> None:
        if isinstance(name, _Named) and name.name == "bfloat16":
            self.dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        elif isinstance(name, str) and name in _TYPES:
            self.dtype = np.dtype(name)
        else:
            raise Refused(f"it has arrays of {name[:20] if isinstance(name, str) else type(name).__name__}")

    def build(self, state: object) -> None:
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

    def build(self, state: object) -> None:
        match state:
            case (int(), tuple() as shape, _Type() as kind, bool() | int() as column_first, bytes() as data):
                self.array = _array(data, kind, shape, column_first=bool(column_first))
            case _:
                raise Refused("it has an array that is not plain numbers")


def _array(data: bytes | bytearray, kind: _Type, shape: tuple[object, ...], *, column_first: bool) -> Array:
    sides = [side for side in shape[:_DIMENSIONS_MAX] if isinstance(side, int) and 0 <= side <= BYTES_MAX]
    if len(sides) != len(shape):
        raise Refused("it has an array whose shape is none")
    if math.prod(sides) * kind.dtype.itemsize != len(data):
        raise Refused(f"it has {len(data)} bytes for an array of another size")
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


# --- the machine ---

_VALUES: Final = frozenset(
    [
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "SHORT_BINSTRING",
        "BINSTRING",
        "UNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "SHORT_BINBYTES",
        "BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
    ]
)
_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LAST: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """What a pickle has built so far: a stack, those below the marks, and what was put aside by number.

    Not among its instructions are persistent ids, registered extensions, classes that are instantiated and buffers from
    elsewhere: no shard needs them.
    """

    def __init__(self, stream: _Bounded) -> None:
        self.stack: list[Any] = []
        self._stream = stream
        self._made = 0  #: bytes that were texts in the file
        self._below: list[list[Any]] = []
        self._aside: dict[int, Any] = {}
        self._steps: dict[str, Callable[[Any], None]] = {
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "MARK": self._mark,
            "POP": lambda _: self._drop(self.stack.pop()),
            "POP_MARK": lambda _: self._drop(self._marked()),
            "DUP": lambda _: self._push(_shareable(self.stack[-1])),
            "EMPTY_LIST": lambda _: self._push([]),
            "EMPTY_TUPLE": lambda _: self._push(()),
            "EMPTY_DICT": lambda _: self._push({}),
            "LIST": lambda _: self._push(self._marked()),
            "TUPLE": lambda _: self._push(tuple(self._marked())),
            "DICT": lambda _: self._push(_filled({}, self._marked())),
            "APPEND": lambda _: self._extend(self._last(1)),
            "APPENDS": lambda _: self._extend(self._marked()),
            "SETITEM": lambda _: self._fill(self._last(2)),
            "SETITEMS": lambda _: self._fill(self._marked()),
            "PUT": self._put_aside,
            "BINPUT": self._put_aside,
            "LONG_BINPUT": self._put_aside,
            "MEMOIZE": lambda _: self._put_aside(len(self._aside)),
            "GET": self._fetch,
            "BINGET": self._fetch,
            "LONG_BINGET": self._fetch,
            "GLOBAL": lambda words: self._name(*words.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._name(*self._last(2)),
            "REDUCE": self._call,
            "BUILD": self._build,
        }

    def do(self, name: str, word: Any) -> None:
        if name in _VALUES:
            self.stack.append(word)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _LAST:
            self.stack.append(tuple(self._last(_LAST[name])))
        elif name in self._steps:
            self._steps[name](word)
        else:
            raise Refused(f"it has the instruction {name}, which no shard needs")

    def _push(self, value: object) -> None:
        self.stack.append(value)

    def _drop(self, _: object) -> None:
        """What is not wanted any more."""

    def _last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise Refused("it takes more than it has built")
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def _mark(self, _: object) -> None:
        self._below.append(self.stack)
        self.stack = []

    def _marked(self) -> list[Any]:
        """What was built since the last mark."""
        found, self.stack = self.stack, self._below.pop()
        return found

    def _extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise Refused("it adds to something that is no list")
        self.stack[-1].extend(values)

    def _fill(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not dict:
            raise Refused("it sets items of something that is no dict")
        _filled(self.stack[-1], values)

    def _put_aside(self, number: int) -> None:
        if not 0 <= number <= INSTRUCTIONS_MAX:
            raise Refused("it puts something aside under a number that is none")
        self._aside[number] = self.stack[-1]

    def _fetch(self, number: int) -> None:
        self.stack.append(_shareable(self._aside[number]))

    def _name(self, module: object, name: object) -> None:
        found = _NAMES.get((module, name)) if isinstance(module, str) and isinstance(name, str) else None
        if found is None:
            shown = ".".join(each[:60] if isinstance(each, str) else "?" for each in (module, name))
            raise Refused(f"it names {shown}, which no shard needs")
        self.stack.append(found)

    def _call(self, _: object) -> None:
        named, words = self._last(2)
        if not isinstance(named, _Named) or not isinstance(words, tuple):
            raise Refused("it calls something that was not named")
        made = named.make(*words)
        if isinstance(made, bytes):
            self._made += len(made)
            if self._made > self._stream.taken:
                raise Refused("it makes more bytes than it holds")
        self.stack.append(made)

    def _build(self, _: object) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, _Type | _Draft):
            raise Refused(f"it would change a {type(target).__name__}")
        target.build(state)


def _built(stream: _Bounded, allowed: int) -> object:
    """What a pickle builds."""
    machine = _Machine(stream)
    for number, (instruction, word, _) in enumerate(pickletools.genops(cast("IO[bytes]", stream))):
        if number > allowed:
            raise Refused(f"it has more than {allowed} instructions, which is too many for its size")
        if instruction.name == "STOP":
            break
        machine.do(instruction.name, word)
    return machine.stack.pop()


def _filled(target: dict[Any, Any], values: list[Any]) -> dict[Any, Any]:
    for key, value in zip(values[::2], values[1::2], strict=True):
        if not isinstance(key, str) and not (isinstance(key, int) and -KEY_MAX < key < KEY_MAX):
            raise Refused(f"it has a key that is a {type(key).__name__}, or a large number")
        target[key] = value
    return target


def _shareable(value: Any) -> Any:
    """What may have a second place: not what holds other things, which would multiply, except the shape of an array."""
    shape = isinstance(value, tuple) and len(value) <= _DIMENSIONS_MAX and all(isinstance(side, int) for side in value)
    if isinstance(value, list | dict | tuple | bytearray) and not shape:
        raise Refused(f"it uses one {type(value).__name__} in two places, which no shard does")
    return value


def _samples(found: object) -> Iterator[OldSample]:
    if not isinstance(found, dict):
        raise Refused(f"it holds a {type(found).__name__}, not layers")
    for layer, samples in found.items():
        if not isinstance(samples, list):
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
