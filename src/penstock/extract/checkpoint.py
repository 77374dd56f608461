"""A Hugging Face directory of safetensors files: which tensor lies where, and the reading of single tensors.

`weights` asks it for tensors by name; headers and byte ranges are read as needed, so a file no wanted tensor lies in is
never opened. `work` has names and shapes checked when it plans, before capacity is bought for a model that cannot be
loaded. The files are somebody else's: offsets, shapes and dtypes are checked before they are believed, and no code in
them can run. It must not import jax.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Final, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from penstock.domain.admission import BadInput
from penstock.extract.config import ModelConfig
from penstock.extract.parameters import embedding, final_norm, layer_parameters
from penstock.objects.inputs import Input, find_inputs, open_input, read_beginning, read_input

INDEX: Final = "model.safetensors.index.json"
HEADER_BYTES_MAX: Final = 100 << 20  #: as the safetensors library has it
_REQUESTS: Final = 8
_FIRST_BYTES: Final = 256 << 10  #: in which most headers end; a longer one is asked for a second time
SMALL_BYTES_MAX: Final = 64 << 20  #: config and index

#: Where a text model's tensors begin, in the order of likelihood; the last two are of models that also see images.
_PREFIXES: Final = ("model.", "", "language_model.model.", "model.language_model.")
_SEEING: Final = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_HEADS: Final = ("lm_head.weight", "language_model.lm_head.weight")

_DTYPES: Final[dict[str, npt.DTypeLike]] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class _Entry(msgspec.Struct, frozen=True):
    """One tensor in a header, as the format has it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class _Place(NamedTuple):
    dtype: np.dtype[np.generic]
    start: int  #: in the file


class Checkpoint:
    """The tensors of one directory, here or in a bucket. Safe to read from several threads."""

    def __init__(self, address: str, environment: Mapping[str, str] = os.environ) -> None:
        self.address = address.rstrip("/") + "/"
        self._environment = environment
        files = find_inputs(self.address, environment)
        # Only what lies in the directory itself: others keep further copies of the weights in folders below.
        depth = min((file.address.count("/") for file in files), default=0)
        self._files = {file.address.rpartition("/")[2]: file for file in files if file.address.count("/") == depth}
        self._headers: dict[str, tuple[int, dict[str, _Entry]]] = {}
        self._lock = Lock()
        self.where = self._index()  #: by tensor name: the file it is in

    def read(self, name: str, out: npt.NDArray[np.generic]) -> None:
        """Fill `out` with the tensor, which must have its shape, rounded to its dtype."""
        place = self._place(name, out.shape)
        # What needs no rounding is read to where it belongs.
        raw = out if out.dtype == place.dtype and out.flags.c_contiguous else np.empty(out.shape, place.dtype)
        with open_input(self._files[self.where[name]], self._environment) as file:
            file.seek(place.start)
            view = raw.view(np.uint8).reshape(-1).data
            if file.readinto(view) != len(view):  # type: ignore[attr-defined]  # typeshed: BinaryIO has no readinto
                raise BadInput("weights", self.where[name], f"ends inside {name}", "fetch the file again")
        if raw is not out:
            out[...] = raw.astype(out.dtype)

    def read_headers(self) -> None:
        """Of all files with tensors, several at once: a large model has hundreds, and each costs a request."""
        names = sorted(set(self.where.values()) - set(self._headers))
        with ThreadPoolExecutor(_REQUESTS, "penstock-headers") as threads:
            found = threads.map(lambda name: _read_header(self._files[name], self._environment), names)
            self._headers |= dict(zip(names, found, strict=True))

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that `read` would refuse, from the file's header alone."""
        self._place(name, shape)

    def _index(self) -> dict[str, str]:
        data = read_input(self.address + INDEX, self._environment, at_most=SMALL_BYTES_MAX)
        if data is not None:
            try:
                where = msgspec.json.decode(data, type=_Index).weight_map
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise BadInput("weights", INDEX, "is no index of tensors", str(error)) from error
            absent = sorted(set(where.values()) - set(self._files))
            if absent:
                rule = f"names {len(absent)} files that are not in {self.address}"
                raise BadInput("weights", INDEX, rule, f"fetch {_some(absent)}")
            return where
        stored = sorted(name for name in self._files if name.endswith(".safetensors"))
        if len(stored) != 1:
            rule = f"has no {INDEX} and {len(stored)} safetensors files"
            raise BadInput("weights", self.address, rule, "give a Hugging Face directory with safetensors weights")
        return dict.fromkeys(self._header(stored[0])[1], stored[0])

    def _place(self, name: str, shape: tuple[int, ...]) -> _Place:
        file = self.where[name]
        start, entries = self._header(file)
        entry = entries.get(name)
        if entry is None:
            raise BadInput("weights", file, f"does not hold {name}, though the index says so", "fetch the files again")
        if entry.shape != shape:
            rule = f"has the shape {list(entry.shape)}, and by config.json it is {list(shape)}"
            raise BadInput(f"weights: {name}", file, rule, "use the config.json that came with the weights")
        if entry.dtype not in _DTYPES:
            rule = f"has the dtype {entry.dtype}, and only {', '.join(_DTYPES)} can be read"
            raise BadInput(f"weights: {name}", file, rule, "use the unquantised weights")
        dtype = np.dtype(_DTYPES[entry.dtype])
        low, high = entry.data_offsets
        if low < 0 or high - low != math.prod(shape) * dtype.itemsize or start + high > self._files[file].size:
            rule = f"has bytes {low} to {high} for {name}, which cannot be"
            raise BadInput("weights", file, rule, "the file is damaged or cut short: fetch it again")
        return _Place(dtype, start + low)

    def _header(self, name: str) -> tuple[int, dict[str, _Entry]]:
        """Where the tensors' bytes begin, and the tensors."""
        with self._lock:
            if name not in self._headers:
                self._headers[name] = _read_header(self._files[name], self._environment)
            return self._headers[name]


def _read_header(file: Input, environment: Mapping[str, str]) -> tuple[int, dict[str, _Entry]]:
    name = file.address.rpartition("/")[2]
    data = read_beginning(file, _FIRST_BYTES, environment)
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= min(HEADER_BYTES_MAX, file.size - 8):
        rule = f"has a header of {length} bytes, which cannot be"
        raise BadInput("weights", name, rule, "the file is damaged or no safetensors file: fetch it again")
    if len(data) < 8 + length:
        data = read_beginning(file, 8 + length, environment)
    data = data[8 : 8 + length]
    try:
        raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return 8 + length, {key: msgspec.json.decode(entry, type=_Entry) for key, entry in raw.items()}
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadInput("weights", name, "has no safetensors header", str(error)) from error


def _some(names: list[str]) -> str:
    """Some of many names, for one line."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def check_model(address: str, config: ModelConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Names and shapes of all tensors, as the files' headers have them, which are some kilobytes of each file."""
    checkpoint = Checkpoint(address, environment)
    prefix = check_tensors(checkpoint, config)
    checkpoint.read_headers()
    for name, shape in _tensors(config, prefix).items():
        checkpoint.check(name, shape)


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> str:
    """The prefix of the model's names, if exactly its tensors are there: also those that are not going to be read."""
    where = checkpoint.where
    embed = embedding(config).sources[0]
    prefix = next((each for each in _PREFIXES if each + embed in where), _PREFIXES[0])
    expected = set(_tensors(config, prefix))
    heads = {name for name in _HEADS if name in where}
    if not config.tied and prefix and not heads:
        expected.add(_HEADS[0])
    seeing = _SEEING if prefix in _PREFIXES[2:] else ()
    # Old files keep a table of rotary frequencies, which follows from the config.
    aside = {name for name in where if name.startswith(seeing) or name.endswith(".rotary_emb.inv_freq")}
    _check_names(where, expected, heads | aside)
    return prefix


def _tensors(config: ModelConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    """All tensors of the model but its head, by their names in the files."""
    found = {prefix + each.sources[0]: each.shape for each in (embedding(config), final_norm(config))}
    for layer in range(len(config.layers)):
        for tensor in layer_parameters(config):
            found |= {f"{prefix}layers.{layer}.{source}": tensor.source_shape for source in tensor.sources}
    return found


def _check_names(found: Mapping[str, str], expected: set[str], allowed: set[str]) -> None:
    """Refuse a checkpoint that lacks tensors or has some nobody would use: it is of another model than its config."""
    missing, extra = sorted(expected - set(found)), sorted(set(found) - expected - allowed)
    if missing:
        rule = "is missing in the files" + _others(missing)
        raise BadInput("weights", missing[0], rule, "fetch all files, with the config.json of the same model")
    if extra:
        rule = "is no tensor of the model that config.json describes" + _others(extra)
        raise BadInput("weights", extra[0], rule, "use the config.json that came with the weights")


def _others(names: list[str]) -> str:
    return f", as with {_some(names[1:])}" if len(names) > 1 else ""
