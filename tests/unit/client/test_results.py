"""Results come back as Python values and numpy arrays: what the agent writes is read, damage is refused."""

import io
import pickle
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from penstock.agent.results import tell
from penstock.client import results
from penstock.client.results import BadResult


def npy(array: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    numpy.save(buffer, array, **options)
    return buffer.getvalue()


def refer(artifact: str, array: Any, key: str | None = None) -> dict[str, object]:
    where = {"artifact": artifact, "key": key, "shape": list(array.shape), "dtype": array.dtype.name}
    return {"$array": where}


@pytest.mark.parametrize(
    "value",
    [
        numpy.arange(12, dtype="float32").reshape(3, 4),
        {"weights": [numpy.zeros((2, 0)), numpy.full((3,), -1, "int8")], "loss": 0.25, "name": "x"},
        [numpy.array([1.5, -2.0], ml_dtypes.bfloat16), numpy.array([True, False])],
        {"complex": numpy.array([1 + 2j])},
        numpy.array([[1.0, 2.0]], ml_dtypes.float8_e4m3fn),
        [1, None, "ü", {"$array": 5}],
    ],
    ids=["array", "tree", "bfloat16", "complex", "float8", "plain"],
)
def test_what_the_agent_writes_is_read_back(value: Any, tmp_path: Path) -> None:
    told = tell(value, str(tmp_path), json_max=10_000, array_max=10_000)
    result = msgspec.json.decode(told.json)
    assert set(results.artifacts_of(result)) == set(told.artifacts)
    back = results.decode(result, {name: (tmp_path / name).read_bytes() for name in told.artifacts})
    _same(back, value)


def _same(back: Any, value: Any) -> None:
    if isinstance(value, numpy.ndarray):
        assert isinstance(back, numpy.ndarray)
        assert back.dtype == value.dtype
        assert back.flags.writeable
        numpy.testing.assert_array_equal(back, value)
    elif isinstance(value, dict):
        assert back.keys() == value.keys()
        for key in value:
            _same(back[key], value[key])
    elif isinstance(value, list):
        assert len(back) == len(value)
        for one, other in zip(back, value, strict=True):
            _same(one, other)
    else:
        assert back == value


def test_files_of_the_safetensors_library_are_read() -> None:
    arrays = {"a": numpy.arange(6, dtype="int16").reshape(2, 3), "b": numpy.array([0.5], "float64")}
    data = safetensors.numpy.save(arrays, {"made": "by the library"})
    value: Any = results.decode([refer("f", arrays[key], key) for key in arrays], {"f": data})
    numpy.testing.assert_array_equal(value[0], arrays["a"])
    numpy.testing.assert_array_equal(value[1], arrays["b"])


def test_nothing_is_ever_unpickled() -> None:
    class Trap:
        @override
        def __reduce__(self) -> Any:
            return (pytest.fail, ("it was unpickled",))

    array = numpy.array([Trap()], dtype=object)
    for data in (npy(array, allow_pickle=True), pickle.dumps(Trap())):
        with pytest.raises(BadResult, match=r"r\.npy"):
            results.decode(refer("r.npy", array), {"r.npy": data})


def test_files_that_are_not_what_the_result_says() -> None:
    array = numpy.arange(6, dtype="float32")
    whole = safetensors.numpy.save({"a": array})
    for damaged in (b"", whole[:7], whole[:20], whole[:-1], b"\xff" * 8 + whole[8:], whole.replace(b"F32", b"F64")):
        with pytest.raises(BadResult):
            results.decode(refer("f", array, "a"), {"f": damaged})
    with pytest.raises(BadResult, match="no array 'b'"):
        results.decode(refer("f", array, "b"), {"f": whole})
    with pytest.raises(BadResult, match="shape"):
        results.decode(refer("f", array.reshape(2, 3), "a"), {"f": whole})
    with pytest.raises(BadResult, match="F3Z is not known"):
        results.decode(refer("f", array, "a"), {"f": whole.replace(b"F32", b"F3Z")})
    with pytest.raises(BadResult):
        results.decode(refer("f", array), {"f": npy(array)[:-4]})


@given(st.data())
def test_damaged_headers_never_do_anything_else(data: st.DataObject) -> None:
    whole = bytearray(safetensors.numpy.save({"a": numpy.arange(3, dtype="int32")}))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found: Any = results.decode(refer("f", numpy.zeros(3, "int32"), "a"), {"f": bytes(whole)})
    except BadResult:
        return
    assert found.shape == (3,)


def test_results_without_arrays_need_no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert results.decode({"a": [1, {"b": None}]}, {}) == {"a": [1, {"b": None}]}
    with pytest.raises(ImportError, match="install numpy"):
        results.decode({"$array": {"artifact": "f", "shape": [1], "dtype": "int8"}}, {"f": b""})


def test_a_dtype_of_another_package_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    array = numpy.array([1.0], ml_dtypes.bfloat16)
    data = b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    file = len(data).to_bytes(8, "little") + data + array.tobytes()
    value: Any = results.decode(refer("f", array, "a"), {"f": file})
    assert value[0] == 1.0
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match="install ml_dtypes"):
        results.decode(refer("f", array, "a"), {"f": file})
