"""Old shards are read as they were written; pickles that would do anything else are refused before they do it."""

from __future__ import annotations

import collections
import gzip
import io
import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from typing_extensions import override

from penstock.domain.admission import BadInput
from penstock.extract.old_shards import load_old_shard

DID = "PENSTOCK_TEST_HOSTILE_PICKLE_RAN"


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(gzip.compress(data, 1))
    return path


def shard(dtype: Any = np.float32) -> dict[int, list[dict[str, Any]]]:
    rng = np.random.default_rng(1)
    return {
        layer: [
            {
                "sample_idx": number,
                "activation": rng.normal(size=(4, 6)).astype(dtype),
                "shape": (4, 6),
                "text_preview": f"text {number} ü",
            }
            for number in range(3)
        ]
        for layer in (10, 12)
    }


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, ml_dtypes.bfloat16, ">f4"])
def test_a_shard_is_read_as_it_was_written(tmp_path: Path, protocol: int, dtype: Any) -> None:
    written = shard(dtype)
    found = load_old_shard(write(tmp_path / "shard_0001.pkl.gz", pickle.dumps(written, protocol)))
    assert [(sample.layer, sample.sample, sample.text) for sample in found] == [
        (str(layer), each["sample_idx"], each["text_preview"]) for layer, samples in written.items() for each in samples
    ]
    for sample, each in zip(found, [each for samples in written.values() for each in samples], strict=True):
        assert sample.activation.dtype == each["activation"].dtype
        assert sample.activation.tobytes() == each["activation"].tobytes()


def test_other_ways_to_write_the_same(tmp_path: Path) -> None:
    """Column order, arrays of one's own slices, defaultdict, numpy's own numbers, no gzip."""
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    layers: Any = collections.defaultdict(list)
    layers["7"].append({"sample_idx": 1, "activation": np.asfortranarray(array), "score": np.float32(0.5)})
    layers["7"].append({"sample_idx": 2, "activation": array[1:3, ::2], "text_preview": None})
    path = tmp_path / "shard_0002.pkl"
    path.write_bytes(pickle.dumps(layers))
    first, second = load_old_shard(path)
    assert np.array_equal(first.activation, array)
    assert np.array_equal(second.activation, array[1:3, ::2])


class Runs:
    """Unpickled by the standard library, it would set a variable."""

    def __init__(self, how: Any) -> None:
        self.how = how

    @override
    def __reduce__(self) -> Any:
        return self.how


def harm() -> str:
    return f"__import__('os').environ.__setitem__({DID!r}, '1')"


def globals_of(module: str, name: str, argument: str) -> bytes:
    """Protocol 0, as somebody would write it by hand: module.name(argument)."""
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


HOSTILE = {
    "eval": pickle.dumps(Runs((eval, (harm(),)))),
    "exec": pickle.dumps(Runs((exec, (harm(),)))),
    "system": globals_of("os", "system", "true"),
    "posix": globals_of("posix", "system", "true"),
    "builtins.getattr": globals_of("builtins", "getattr", "x"),
    "numpy.load": globals_of("numpy", "load", "/etc/passwd"),
    "numpy dotted": b"\x80\x04\x8c\x05numpy\x8c\x12ndarray.__subclasses__\x93)R.",
    "numpy runstring": globals_of("numpy.testing._private.utils", "runstring", harm()),
    "inst": f"(V{harm()}\nibuiltins\neval\n.".encode(),
    "obj": f"(cbuiltins\neval\nV{harm()}\no.".encode(),
    "newobj": b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85\x81.",
    "newobj_ex": b"\x80\x04cbuiltins\nlist\n)}\x92.",
    "persistent id": b"Psomewhere\n.",
    "binary persistent id": b"Vsomewhere\nQ.",
    "extension": b"\x82\x01.",
    "buffer from elsewhere": b"\x80\x05\x97.",
    "a function's state": b"cnumpy.core.multiarray\n_reconstruct\n}V__class__\nNsb.",
    "a function's slots": b"cnumpy\ndtype\n(N}V_make\ncnumpy\nndarray\nstb.",
    "a type called": b"cnumpy\nndarray\n(I3\ntR.",
    "list called": b"cbuiltins\nlist\n(V123\ntR.",
    "objects in an array": pickle.dumps({1: [{"sample_idx": 1, "activation": np.array([Runs((eval, (harm(),)))])}]}),
    "plain objects in an array": pickle.dumps({1: [{"sample_idx": 1, "activation": np.array([[], {}], dtype=object)}]}),
    "records": pickle.dumps({1: [{"sample_idx": 1, "activation": np.zeros(2, [("a", "f4")])}]}),
    "texts in an array": pickle.dumps({1: [{"sample_idx": 1, "activation": np.array(["a"])}]}),
    "a set": pickle.dumps({1, 2}, 4),
    "no layers": pickle.dumps([1, 2]),
    "no samples": pickle.dumps({1: 5}),
    "no activation": pickle.dumps({1: [{"sample_idx": 1}]}),
    "no number": pickle.dumps({1: [{"activation": np.zeros(2)}]}),
    "cut": pickle.dumps(shard())[:-40],
    "nothing": b"",
    "text": b"hello, world\n",
    "deep": b"(" * 100_000 + b".",
    "a length that lies": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"abc.",
    "a shape that lies": pickle.dumps({1: [{"sample_idx": 1, "activation": np.zeros((3, 5), np.float32)}]}, 2).replace(
        b"K\x03K\x05", b"K\x7fK\x05"
    ),
    "a negative shape": pickle.dumps({1: [{"sample_idx": 1, "activation": np.zeros((3, 5), np.float32)}]}, 2).replace(
        b"K\x03K\x05", b"J\xff\xff\xff\xffK\x05"
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_and_damaged_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    os.environ.pop(DID, None)
    with pytest.raises(BadInput, match="is not a shard of activations") as caught:
        load_old_shard(write(tmp_path / "shard.pkl.gz", HOSTILE[name]))
    assert "\n" not in str(caught.value)
    assert DID not in os.environ


def test_the_hostile_ones_would_do_it_elsewhere() -> None:
    """Otherwise the refusals above would show nothing."""
    for name in ("eval", "exec", "inst", "obj", "objects in an array"):
        os.environ.pop(DID, None)
        pickle.loads(HOSTILE[name])  # noqa: S301 (our own bytes, three lines above)
        assert os.environ.pop(DID, None) == "1", name


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=9) as file:
        file.write(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 25))
        file.write(bytes(1 << 25))
    path = tmp_path / "bomb.pkl.gz"
    path.write_bytes(packed.getvalue())
    assert len(packed.getvalue()) < 1 << 17
    with pytest.raises(BadInput, match="more bytes than a shard may"):
        load_old_shard(path, bytes_max=1 << 20)


def test_a_file_with_too_many_instructions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.extract.old_shards.INSTRUCTIONS_MAX", 1000)
    with pytest.raises(BadInput, match="more than 1000 instructions"):
        load_old_shard(write(tmp_path / "many.pkl.gz", b"]" + b"N" * 2000 + b"."))


def test_a_path_may_be_text(tmp_path: Path) -> None:
    found = load_old_shard(str(write(tmp_path / "shard.pkl.gz", pickle.dumps(shard()))))
    assert len(found) == 6
    with pytest.raises(TypeError, match="int"):
        load_old_shard(5)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        load_old_shard(str(tmp_path / "nothing.pkl.gz"))


def test_samples_may_share_shapes_texts_types_and_arrays(tmp_path: Path) -> None:
    array, shape = np.zeros((2, 3), np.float32), (2, 3)
    sample = {"activation": array, "shape": shape, "text_preview": "the same"}
    layers = {layer: [{**sample, "sample_idx": number} for number in range(2)] for layer in (1, 2)}
    found = load_old_shard(write(tmp_path / "shard.pkl.gz", pickle.dumps(layers)))
    assert [each.text for each in found] == ["the same"] * 4


DOUBLED = b"q\x00h\x00\x86" * 40  #: a tuple of the last one, twice: 2 ** 40 of them if anybody looks at each
LIST = pickle.dumps([{"sample_idx": 1, "activation": np.zeros(1, np.float32)}] * 1, 2)[2:-1]

SMALL_BUT_LARGE = {
    "a type whose name is nested": (b"\x80\x02cnumpy\ndtype\n)" + DOUBLED + b"\x85R.", "one tuple in two places"),
    "a key that is nested": (b"\x80\x02})" + DOUBLED + b"Ns.", "one tuple in two places"),
    "a key that is a tuple": (b"\x80\x02}K\x01\x85Ns.", "a key that is a tuple"),
    "keys that collide": (b"\x80\x02}\x8a\x08" + (2**61 - 1).to_bytes(8, "little") + b"Ns.", "large number"),
    "samples of one list": (
        b"\x80\x02}(K\x01" + LIST + b"r\xff\xff\x00\x00K\x02j\xff\xff\x00\x00u.",
        "one list in two",
    ),
    "lists doubled by DUP": (b"\x80\x02]2.", "one list in two"),
    "bytes made again and again": (
        b"\x80\x02c_codecs\nencode\nq\x00X\x00\x10\x00\x00" + b"a" * 4096 + b"q\x01X\x06\x00\x00\x00latin1q\x02"
        b"\x86R" + b"h\x00h\x01h\x02\x86R" * 1000 + b".",
        "more bytes than it holds",
    ),
    "a buffer used twice": (b"\x80\x05\x96\x01" + bytes(7) + b"a\x94h\x00.", "one bytearray in two"),
    "many empty lists": (b"\x80\x02" + b"]" * 5_000_000 + b".", "too many for its size"),
    "many marks": (b"\x80\x02" + b"(" * 5_000_000 + b".", "too many for its size"),
    "a long number": (b"I" + b"1" * (2 << 20) + b"\n.", "a line of more than"),
}


@pytest.mark.parametrize("name", SMALL_BUT_LARGE)
def test_small_files_cost_little(tmp_path: Path, name: str) -> None:
    data, said = SMALL_BUT_LARGE[name]
    path = write(tmp_path / "small.pkl.gz", data)
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match=said):
            load_old_shard(path)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
