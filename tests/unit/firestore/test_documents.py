"""What documents may ask for, and the line that refuses what they may not."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.admission import BadInput
from penstock.firestore.documents import Wanted, collection_tag, key_fits, key_of, read
from penstock.firestore.fields import Document, Opaque, Stamp
from tests.unit.firestore.fake_database import PLACE, name_of


def document(id: str = "d", created: int = 5, **fields: Any) -> Document:
    return Document(name=name_of(id), fields=fields, created=Stamp(created, 7), stamp=Stamp(created, 7))


def test_the_smallest_document_and_a_full_one() -> None:
    assert read(document(code="x = 1")) == Wanted(code="x = 1", timeout_s=300.0, submitter="anonymous")
    full = document(
        code="x = 1",
        challenge_number=42,
        timeout=1.5,
        metadata={"submitted_by": "ada@example.com", "other": object()},
        priority=-3,
        accelerator="V5E-8",
        env={"A": "b"},
        notify=["team-a"],
        unknown=Opaque("bytes"),
    )
    assert read(full) == Wanted(
        code="x = 1",
        challenge_number=42,
        timeout_s=1.5,
        submitter="ada@example.com",
        priority=-3,
        accelerator="v5e-8",
        env={"A": "b"},
        notify=("team-a",),
    )


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "code: None is missing; put the Python source there, as text"),
        ({"code": None}, "code: None is not text; put the Python source there, as text"),
        ({"code": ["x"]}, "code: 'a list' is not text; put the Python source there, as text"),
        ({"code": ""}, "code: '' is empty; put the Python source there"),
        ({"code": "x" * (10 << 20)}, "code: '10485760 bytes' is over 1 MiB; read the rest from a bucket"),
        ({"timeout": -1}, "timeout: -1 is not between 1 and 604800"),
        ({"timeout": 0}, "timeout: 0 is not between 1 and 604800"),
        ({"timeout": float("inf")}, "timeout: inf is not between 1 and 604800"),
        ({"timeout": True}, "timeout: True is not a number of seconds"),
        ({"timeout": datetime.timedelta(1)}, "timeout: 'a timedelta' is not a number of seconds"),
        ({"challenge_number": 1.0}, "challenge_number: 1.0 is not a whole number"),
        ({"challenge_number": False}, "challenge_number: False is not a whole number"),
        ({"metadata": []}, "metadata: 'a list' is not a map"),
        ({"metadata": {"submitted_by": ""}}, "metadata.submitted_by: '' is empty; give a name"),
        ({"metadata": {"submitted_by": "a\nb"}}, "metadata.submitted_by: 'a\\nb' has control or invisible characters"),
        ({"priority": "high"}, "priority: 'high' is not a whole number"),
        ({"accelerator": 8}, "accelerator: 8 is not text"),
        ({"env": ["A=b"]}, "env: 'a list' is not a map of text"),
        ({"env": {"A B": "c"}}, "env: 'A B' is not a name for a variable"),
        ({"env": {"A": "hidden\0"}}, "env: 'A' has a value with a NUL character"),
        ({"env": {"A": "x" * 70_000}}, "env: '70003 bytes' are more than 65536"),
        ({"notify": "ops"}, "notify: 'ops' is not a list of names"),
        ({"notify": ["a"] * 9}, "notify: '9 names' are more than 8"),
        ({"notify": ["https://x"]}, "notify: 'https://x' is not the name of a channel"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(fields: dict[str, Any], line: str) -> None:
    given_fields = {"code": "x = 1", **fields} if fields else fields
    with pytest.raises(BadInput) as caught:
        read(document(**given_fields))
    assert str(caught.value).startswith(line)
    assert "hidden" not in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.builds(Opaque, st.just("bytes")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("code", "challenge_number", "timeout", "metadata", "priority", "accelerator", "env", "notify")


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_whatever_a_document_holds_it_is_a_job_or_one_line(fields: dict[str, Any]) -> None:
    refused: BadInput | None = None
    code = None
    try:
        code = read(document(**fields)).code
    except BadInput as error:
        refused = error
    if refused is None:
        assert code == fields["code"]
    else:
        assert refused.field.partition(".")[0] in FIELDS
        assert "\n" not in str(refused)


@given(st.text(min_size=1, max_size=300).filter(lambda id: "/" not in id), st.integers(0, 1 << 40))
def test_keys_are_usable_and_belong_to_one_document(id: str, created: int) -> None:
    one = document(id, created)
    key = key_of(one)
    assert 0 < len(key) <= 128
    assert key.isprintable()
    assert key_fits(one, key)
    assert key_fits(one, key_of(document(id, created + 1)))
    assert key_of(document(id, created + 1)) != key
    assert not key_fits(one, key_of(document(id + "x", created)))


def test_the_key_is_the_documents_path() -> None:
    assert key_of(document("abc")) == "firestore/p1/(default)/tpu_jobs/abc@5.000000007"
    assert collection_tag(PLACE.parent) == "firestore/p1/(default)/tpu_jobs"
