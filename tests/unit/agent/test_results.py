"""What a snippet's result becomes: JSON, array files that any reader of theirs takes, or a repr with the reason."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from typing_extensions import override

from penstock.agent.results import Told, tell

JSON_MAX, ARRAY_MAX = 10_000, 1_000_000


def told(value: object, folder: Path, *, json_max: int = JSON_MAX, array_max: int = ARRAY_MAX) -> Told:
    return tell(value, str(folder), json_max=json_max, array_max=array_max)


def value_of(answer: Told) -> Any:
    return json.loads(answer.json)


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab$é", max_size=5), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@given(_json)
def test_json_values_come_back_as_they_were(value: object) -> None:
    answer = tell(value, "/nonexistent", json_max=1 << 20, array_max=0)
    assert value_of(answer) == value
    assert (answer.note, answer.artifacts) == ("", [])


def test_tuples_and_numpy_scalars_are_lists_and_numbers(tmp_path: Path) -> None:
    value = (np.float32(1.5), np.int64(-3), np.bool_(True), jnp.float32(2.0), np.array(7))
    assert value_of(told(value, tmp_path)) == [1.5, -3, True, 2.0, 7]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.zeros((0, 3)),
        np.array([1 + 2j]),
        np.array(["añ", "b"]),
        np.arange(4, dtype=">f4"),
        np.arange(6.0).reshape(2, 3).T,
        jnp.ones((3, 2)),
    ],
    ids=str,
)
def test_one_array_is_an_npy_file(array: Any, tmp_path: Path) -> None:
    answer = told(array, tmp_path)
    assert value_of(answer) == {
        "$array": {
            "artifact": "result.npy",
            "key": None,
            "shape": list(array.shape),
            "dtype": np.asarray(array).dtype.name,
        }
    }
    assert answer.artifacts == ["result.npy"]
    np.testing.assert_array_equal(np.load(tmp_path / "result.npy", allow_pickle=False), np.asarray(array))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_dtypes_that_npy_cannot_name_go_to_safetensors(dtype: Any, tmp_path: Path) -> None:
    answer = told(np.arange(5).astype(dtype), tmp_path)
    (reference,) = value_of(answer).values()
    assert (reference["artifact"], reference["key"]) == ("result.safetensors", "result")
    header = (tmp_path / "result.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    assert length % 8 == 0
    start, end = json.loads(header[8 : 8 + length])["result"]["data_offsets"]
    data = header[8 + length :]
    assert np.frombuffer(data[start:end], dtype).tolist() == [0, 1, 2, 3, 4]


class State(NamedTuple):
    step: int
    momentum: Any


@dataclasses.dataclass
class Model:
    weights: dict[str, Any]
    name: str


def test_pytrees_keep_their_shape_and_share_one_file(tmp_path: Path) -> None:
    model = Model({"w": jnp.ones((2, 2)), "b": np.arange(3, dtype=np.float16)}, "m")
    answer = told({"model": model, "state": State(4, [np.ones(2, ">i4")]), "loss": 0.5}, tmp_path)
    said = value_of(answer)
    assert said["loss"] == 0.5
    assert said["model"]["name"] == "m"
    assert said["state"]["step"] == 4
    assert said["model"]["weights"]["w"]["$array"]["key"] == "result/model/weights/w"
    assert "Model came as a dict" in answer.note
    assert answer.artifacts == ["result.safetensors"]
    arrays = load_file(tmp_path / "result.safetensors")
    np.testing.assert_array_equal(arrays["result/model/weights/w"], np.ones((2, 2), np.float32))
    np.testing.assert_array_equal(arrays["result/model/weights/b"], np.arange(3, dtype=np.float16))
    np.testing.assert_array_equal(arrays["result/state/momentum/0"], np.ones(2, np.int32))


def test_what_others_registered_with_jax_is_taken_apart(tmp_path: Path) -> None:
    import optax  # type: ignore[import-untyped]

    state = optax.adam(1e-3).init({"w": jnp.zeros(3)})
    answer = told(state, tmp_path)
    assert value_of(answer)[0]["mu"]["w"]["$array"]["shape"] == [3]
    assert "result/0/nu/w" in load_file(tmp_path / "result.safetensors")


def test_arrays_of_a_pytree_that_safetensors_cannot_hold_get_files_of_their_own(tmp_path: Path) -> None:
    answer = told([np.array([1j]), np.arange(2)], tmp_path)
    first, second = (each["$array"] for each in value_of(answer))
    assert (first["artifact"], first["key"]) == ("result-0.npy", None)
    assert (second["artifact"], second["key"]) == ("result.safetensors", "result/1")
    assert sorted(answer.artifacts) == ["result-0.npy", "result.safetensors"]


class Odd:
    @override
    def __repr__(self) -> str:
        return "Odd()"


class Rude:
    @override
    def __repr__(self) -> str:
        raise SystemExit(3)


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "shown", "why"),
    [
        (Odd(), "Odd()", "test_results.Odd"),
        ({"a": {1, 2}}, "{'a': {1, 2}}", "result/a is a set"),
        (math.nan, "nan", "result is nan"),
        ([math.inf], "[inf]", "result/0 is inf"),
        (2**64, str(2**64), "integer of 65 bits"),
        ({1: 2}, "{1: 2}", "keys that are no strings"),
        (CIRCLE, "[[...]]", "deeper than 64"),
        ("\ud800", "'\\ud800'", "no character"),
        (np.array([Odd()], dtype=object), "array([Odd()], dtype=object)", "without pickle"),
        (Rude(), "<Rude>", "its repr raised SystemExit"),
        (10**5000, "<int>", "its repr raised ValueError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_its_repr_with_the_reason(value: object, shown: str, why: str, tmp_path: Path) -> None:
    answer = told(value, tmp_path)
    assert value_of(answer) == shown
    assert why in answer.note
    assert list(tmp_path.iterdir()) == []


def test_caps_are_kept_and_said(tmp_path: Path) -> None:
    long = told("x" * 20_000, tmp_path)
    assert len(value_of(long)) == 10_000
    assert "over the cap of 10000" in long.note
    large = told({"a": np.zeros(10), "b": np.zeros(1000)}, tmp_path, array_max=1000)
    assert "result/b (shape [1000], dtype float64)" in large.note
    assert "1000 bytes" in large.note
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_crash(tmp_path: Path) -> None:
    answer = told(np.ones(2), tmp_path / "missing")
    assert "FileNotFoundError" in answer.note
    assert answer.artifacts == []
