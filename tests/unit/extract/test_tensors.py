"""Objects are safetensors to the library itself, and headers of damaged ones are refused."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from penstock.extract import tensors
from penstock.ports.objects import Damaged


def test_the_library_reads_what_was_joined_from_parts() -> None:
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    ids = np.arange(5, dtype=np.int32)
    data = tensors.encode({"acts": [whole[:1], whole[1:4], whole[4:]], "ids": [ids]}, {"run": "r"})
    found = safetensors.numpy.load(data)
    assert np.array_equal(found["acts"], whole)
    assert np.array_equal(found["ids"], ids)
    assert tensors.decode_header(data, "x")[1] == {"run": "r"}


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_rows_are_where_the_header_says(name: str) -> None:
    rows = np.random.default_rng(1).normal(size=(7, 5)).astype(tensors.dtype_of(name))
    data = tensors.encode({"acts": [rows[:2], rows[2:]]}, {})
    tensor = tensors.decode_header(data, "x")[0]["acts"]
    assert tensor.start % 8 == 0
    assert data[tensor.start + 3 * tensor.row_bytes :][: tensor.row_bytes] == rows[3].tobytes()
    assert tensors.view(data, "acts", "x").tobytes() == rows.tobytes()
    ((_, facts),) = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    assert bytes(facts["data"]) == rows.tobytes()


def test_nothing_is_a_tensor_too() -> None:
    data = tensors.encode({"acts": [np.zeros((0, 3), ml_dtypes.bfloat16)]}, {})
    assert tensors.view(data, "acts", "x").shape == (0, 3)


def test_parts_of_different_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="different types or widths"):
        tensors.encode({"acts": [np.zeros((1, 3)), np.zeros((1, 4))]}, {})


GOOD = tensors.encode({"acts": [np.zeros((2, 3), np.float32)]}, {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1\2\3",
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 4) + b"{{{{",
        struct.pack("<Q", 2) + b"[]",
        GOOD.replace(b"F32", b"X99"),
        GOOD.replace(b"[2,3]", b"[9,3]"),
        GOOD[:-4],
        GOOD.replace(b"acts", b"atcs"),
    ],
)
def test_damaged_objects_are_told(data: bytes) -> None:
    with pytest.raises(Damaged):
        tensors.view(data, "acts", "x")
