"""Firestore's values and Python's, there and back."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.missing import missing

try:
    from google.cloud.firestore_v1.types import document as messages
except ImportError:
    missing("the extra `firestore`")

from penstock.firestore.fields import Opaque, decode, encode


def value() -> Any:
    return messages.Value.pb()()


SIMPLE = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
)
VALUES = st.recursive(
    SIMPLE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3)
)


@given(VALUES)
def test_what_is_written_is_read_again(given_value: object) -> None:
    into = value()
    encode(given_value, into)
    assert decode(into) == given_value


def test_times_and_half_characters() -> None:
    into = value()
    at = datetime.datetime(2026, 11, 15, 10, 0, 0, 250_000, tzinfo=datetime.UTC)
    encode(at, into)
    assert decode(into) == at
    into = value()
    encode("a\ud800b", into)
    assert decode(into) == "a?b"


def test_kinds_that_no_field_of_ours_has() -> None:
    into = value()
    into.bytes_value = b"x"
    assert decode(into) == Opaque("bytes")
    with pytest.raises(TypeError):
        encode(object(), value())
