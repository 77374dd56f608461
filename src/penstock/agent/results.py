"""What a snippet left in `result`, as JSON and artifact files.

Called by `snippet` in the payload's own process, after the user's code. JSON where it can be; arrays, alone or inside
dicts, lists and other pytrees, go to `.npy` or `.safetensors` files and are named in the JSON by shape and dtype;
anything else becomes its `repr`, with a note. Nothing is ever pickled, so that reading a result runs no code. Standard
library only, and whatever array library the user's own values bring along.

A reference to an array is `{"$array": {"artifact": FILE, "key": KEY or null, "shape": [...], "dtype": NAME}}`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any, BinaryIO, NamedTuple

DEPTH_MAX = 64
REPR_CHARACTERS_MAX = 10_000
NOTES_MAX = 8
_FOREIGN = 2  #: `dtype.isbuiltin` of dtypes that other libraries added, such as bfloat16
_INT_LEAST, _INT_MOST = -(2**63), 2**64 - 1  #: what every JSON reader of ours takes
#: numpy's name of a dtype -> the name in a safetensors header. Others of numpy's own go to .npy files.
_SAFE = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class Told(NamedTuple):
    """A result ready to be sent: JSON text, why it is not the value itself, and the files written for it."""

    json: str
    note: str
    artifacts: list[str]


class Unfit(Exception):
    """The value cannot be said this way; the text says why."""


def tell(value: object, folder: str, *, json_max: int, array_max: int) -> Told:
    """Write down `value`. Files go to `folder`; caps are bytes. It never raises for what the value is."""
    teller = _Teller(array_max)
    try:
        shape = teller.shape(value, "result", 0)
        teller.place()
        text = json.dumps(shape, allow_nan=False, separators=(",", ":"))
        if len(text) > json_max:
            raise Unfit(
                f"as JSON it has {len(text)} bytes, over the cap of {json_max}; write it to PENSTOCK_OUTPUT_DIR"
            )
        artifacts = teller.write(folder)
    except Unfit as reason:
        return _as_repr(value, str(reason))
    except (OSError, ValueError, TypeError, MemoryError, RecursionError) as error:
        return _as_repr(value, f"{type(error).__name__}: {error}")
    return Told(text, "; ".join(teller.notes), artifacts)


def _as_repr(value: object, why: str) -> Told:
    note = f"result is shown by its repr: {why}"
    try:
        text = repr(value)
    except BaseException as error:  # noqa: BLE001 (the user's own __repr__ may raise anything)
        text = f"<{type(value).__qualname__}>"
        note += f"; its repr raised {type(error).__name__}"
    if len(text) > REPR_CHARACTERS_MAX:
        note += f"; the first {REPR_CHARACTERS_MAX} of {len(text)} characters"
        text = text[:REPR_CHARACTERS_MAX]
    return Told(json.dumps(text), note, [])


class _Teller:
    """Walks a value once: answers its JSON shape and remembers the arrays found on the way."""

    def __init__(self, array_max: int) -> None:
        self.notes: list[str] = []
        self._room = array_max
        self._array_max = array_max
        self._arrays: list[tuple[dict[str, object], Any]] = []  #: how the JSON names each, and the array

    def shape(self, value: object, path: str, depth: int) -> object:
        if depth > DEPTH_MAX:
            raise Unfit(f"it is nested deeper than {DEPTH_MAX} levels")
        match value:
            case None | bool() | str():
                return _text(value) if isinstance(value, str) else value
            case int() if _INT_LEAST <= value <= _INT_MOST:
                return int(value)
            case float() if math.isfinite(value):
                return float(value)
            case int() | float():
                raise Unfit(f"{path} is {_short(value)}, which JSON cannot say")
            case _:
                return self._other(value, path, depth)

    def _other(self, value: object, path: str, depth: int) -> object:
        if _is_array(value):
            return self._array(value, path)
        children = _children(value)
        if children is None:
            raise Unfit(f"{path} is a {_type_name(value)}, which JSON cannot say")
        if isinstance(children, list):
            return [self.shape(each, f"{path}/{at}", depth + 1) for at, each in enumerate(children)]
        if type(value) is not dict:
            self._remark(f"{path}: a {_type_name(value)} came as a dict")
        return {_text(key): self.shape(each, f"{path}/{key}", depth + 1) for key, each in children.items()}

    def _array(self, value: Any, path: str) -> object:
        import numpy

        array = numpy.asarray(value)
        name = array.dtype.name
        if array.ndim == 0 and array.dtype.kind in "biuf":
            return self.shape(array.item(), path, 0)
        if array.dtype.hasobject or (array.dtype.isbuiltin == _FOREIGN and name not in _SAFE):
            raise Unfit(f"{path} is an array of dtype {name}, which no array file can hold without pickle")
        if array.nbytes > self._room:
            size = f"shape {list(array.shape)}, dtype {name}"
            raise Unfit(
                f"with {path} ({size}) its arrays pass {self._array_max} bytes; write it to PENSTOCK_OUTPUT_DIR"
            )
        self._room -= array.nbytes
        reference: dict[str, object] = {"artifact": "", "key": path, "shape": list(array.shape), "dtype": name}
        self._arrays.append((reference, array))
        return {"$array": reference}

    def _remark(self, note: str) -> None:
        if len(self.notes) < NOTES_MAX:
            self.notes.append(note)

    def place(self) -> None:
        """Decide which file each array goes to. One array alone is an .npy file, as everybody reads it."""
        alone = len(self._arrays) == 1 and self._arrays[0][0]["key"] == "result"
        for number, (reference, array) in enumerate(self._arrays):
            dtype = array.dtype
            if dtype.name in _SAFE and not (alone and dtype.isbuiltin != _FOREIGN):
                reference["artifact"] = "result.safetensors"
            else:
                reference |= {"artifact": "result.npy" if alone else f"result-{number}.npy", "key": None}

    def write(self, folder: str) -> list[str]:
        """Write the arrays to the files they were placed in."""
        files: dict[str, dict[str, Any]] = {}
        for reference, array in self._arrays:
            files.setdefault(str(reference["artifact"]), {})[str(reference["key"])] = array
        for name, arrays in files.items():
            with open(os.path.join(folder, name), "wb") as file:  # noqa: PTH118, PTH123 (no pathlib: forks stay small)
                if name.endswith(".npy"):
                    import numpy

                    numpy.lib.format.write_array(file, arrays["None"], allow_pickle=False)
                else:
                    _write_safetensors(file, arrays)
        return list(files)


def _write_safetensors(file: BinaryIO, arrays: dict[str, Any]) -> None:
    """The format: length of the header, a JSON header padded to 8 bytes, then all values, little-endian."""
    header: dict[str, object] = {}
    start = 0
    for key, array in arrays.items():
        end = start + array.nbytes
        header[key] = {"dtype": _SAFE[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for array in arrays.values():
        file.write(_little(array).tobytes())


def _little(array: Any) -> Any:
    order = array.dtype.byteorder
    big = order == ">" or (order == "=" and sys.byteorder == "big")
    return array.byteswap() if big else array


def _is_array(value: object) -> bool:
    """Arrays and scalars of numpy, jax and whatever else can turn itself into a numpy array."""
    return hasattr(value, "__array__") and hasattr(value, "dtype") and hasattr(value, "shape")


def _children(value: object) -> list[object] | dict[str, object] | None:
    """The parts of a container, in a shape JSON has; None when it is no container we know."""
    match value:
        case dict():
            keys = list(value)
            if not all(isinstance(key, str) for key in keys):
                raise Unfit("a dict has keys that are no strings")
            return value
        case tuple() if hasattr(value, "_fields"):
            return dict(zip(value._fields, value, strict=True))
        case list() | tuple():
            return list(value)
        case _:
            return _registered(value)


def _registered(value: object) -> dict[str, object] | None:
    """The parts of a dataclass, or of what somebody told jax how to take apart."""
    dataclasses = sys.modules.get("dataclasses")  # else nobody has made one; it loads a lot, and forks stay small
    if dataclasses is not None and dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    tree_util = sys.modules.get("jax.tree_util")
    if tree_util is None:
        return None
    # One level only: what the value itself is made of, by the names its author registered.
    leaves, _ = tree_util.tree_flatten_with_path(value, is_leaf=lambda each: each is not value)
    if len(leaves) == 1 and leaves[0][1] is value:
        return None
    return {tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _text(text: str) -> str:
    """Half characters (lone surrogates) are no text for anybody else."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unfit(f"it contains {text[error.start : error.end]!r}, which is no character") from None
    return str(text)


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _short(value: float) -> str:
    """A number for people: `int.__str__` refuses to print a very long one."""
    return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else repr(value)
