"""Turns a job's result back into Python values: JSON as it is, references to arrays into numpy arrays.

Job handles call it with the artifacts they fetched. An array is read from its `.npy` or `.safetensors` file by checking
every length before it is used, and never by unpickling: reading a result runs no code of the job. numpy is imported
when a result holds arrays, not before; results without arrays need none.

A reference is `{"$array": {"artifact": FILE, "key": KEY or null, "shape": [...], "dtype": NAME}}` (`agent.results`).
"""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from penstock.wire.api import LogChunk

if TYPE_CHECKING:
    from numpy import dtype
    from numpy.typing import NDArray

_MARK = "$array"
_HEADER_BYTES_MAX = 100 << 20  # of a safetensors file: its own format's cap
#: Names of a safetensors header -> numpy's. What numpy itself lacks is `_foreign`.
_DTYPES = {
    "BOOL": "?", "U8": "<u1", "I8": "<i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8",
}  # fmt: skip
#: What needs the package ml_dtypes, which comes with JAX.
_FOREIGN = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


class BadResult(ValueError):
    """An array file that does not hold what the result says: cut off, altered, or of an unknown kind."""


class Reference(msgspec.Struct, frozen=True):
    """Where an array of a result is."""

    artifact: str
    shape: tuple[int, ...]
    dtype: str
    key: str | None = None


class _Tensor(msgspec.Struct, frozen=True):
    """One row of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def artifacts_of(result: object) -> tuple[str, ...]:
    """The files a result refers to, each once."""
    return tuple(dict.fromkeys(reference.artifact for reference in _references(result)))


def decode(result: object, files: Mapping[str, bytes]) -> object:
    """The result with every reference replaced by its array."""
    reference = _reference(result)
    if reference is not None:
        return load(reference, files)
    if isinstance(result, dict):
        return {key: decode(value, files) for key, value in result.items()}
    if isinstance(result, list):
        return [decode(value, files) for value in result]
    return result


def load(reference: Reference, files: Mapping[str, bytes]) -> NDArray[Any]:
    """One array, checked against what the result says of it."""
    data = files[reference.artifact]
    array = _from_npy(data, reference) if reference.key is None else _from_safetensors(data, reference.key, reference)
    if array.shape != reference.shape:
        raise BadResult(f"{reference.artifact}: holds shape {array.shape}, not {reference.shape}")
    return array


def log_bytes(chunk: LogChunk) -> bytes:
    """What a chunk of a log holds, byte for byte."""
    return base64.b64decode(chunk.base64) if chunk.base64 else chunk.text.encode()


def write_whole(target: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write a file that appears only when all of it was written."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with partial.open("w+b") as file:
            fill(file)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _references(result: object) -> Iterator[Reference]:
    reference = _reference(result)
    if reference is not None:
        yield reference
    elif isinstance(result, dict):
        for value in result.values():
            yield from _references(value)
    elif isinstance(result, list):
        for value in result:
            yield from _references(value)


def _reference(value: object) -> Reference | None:
    """A user's own dict with such a key is not a reference unless it has the whole shape of one."""
    if not isinstance(value, dict) or value.keys() != {_MARK}:
        return None
    try:
        return msgspec.convert(value[_MARK], Reference)
    except msgspec.ValidationError:
        return None


def _from_npy(data: bytes, reference: Reference) -> NDArray[Any]:
    numpy = _numpy()
    try:
        array: NDArray[Any] = numpy.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise BadResult(f"{reference.artifact}: cannot be read as .npy: {error}") from error
    return array


def _from_safetensors(data: bytes, key: str, reference: Reference) -> NDArray[Any]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, _HEADER_BYTES_MAX):
        raise BadResult(f"{reference.artifact}: is no safetensors file, or is cut off")
    try:
        header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, msgspec.Raw])
        tensor = msgspec.json.decode(header[key], type=_Tensor)
    except KeyError as error:
        raise BadResult(f"{reference.artifact}: holds no array {key!r}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadResult(f"{reference.artifact}: its header cannot be read: {error}") from error
    start, end = tensor.data_offsets
    body = memoryview(data)[8 + length :]
    if not 0 <= start <= end <= len(body) or any(size < 0 for size in tensor.shape):
        raise BadResult(f"{reference.artifact}: the bytes of {key!r} lie outside of the file")
    kind = _dtype(tensor.dtype, reference)
    if math.prod(tensor.shape) * kind.itemsize != end - start:
        raise BadResult(f"{reference.artifact}: {key!r} has {end - start} bytes, which is not {tensor.shape} {kind}")
    # A copy: arrays the user gets are writable, and do not hold the whole file in memory.
    array: NDArray[Any] = _numpy().frombuffer(body[start:end], kind).reshape(tensor.shape).copy()
    return array


def _dtype(name: str, reference: Reference) -> dtype[Any]:
    numpy = _numpy()
    if name in _DTYPES:
        known: dtype[Any] = numpy.dtype(_DTYPES[name])
        return known
    if name not in _FOREIGN:
        raise BadResult(f"{reference.artifact}: dtype {name} is not known here")
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"the result has an array of {_FOREIGN[name]}; install ml_dtypes to read it") from error
    foreign: dtype[Any] = numpy.dtype(getattr(ml_dtypes, _FOREIGN[name]))
    return foreign


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise ImportError("the result has arrays; install numpy, or read the files with job.artifact(name)") from error
    return numpy
