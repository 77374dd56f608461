"""Which queue a submitter has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.client.calls import part
from penstock.firestore.desk import queue_of


def test_plain_names_can_be_read_and_others_are_hashed() -> None:
    assert queue_of("default", "ada@example.com") == "firestore:default:ada@example.com"
    assert queue_of("default", "a/b").startswith("firestore:default:~")
    assert queue_of("default", "*") == "firestore:default:*"


@given(st.text(min_size=1, max_size=128), st.text(min_size=1, max_size=128), st.text("abc-", min_size=1, max_size=128))
def test_every_submitter_has_a_queue_of_its_own_with_a_usable_name(one: str, other: str, team: str) -> None:
    name = queue_of(team, one)
    assert len(name) <= 128
    assert name.isprintable()
    part("queue", name)
    assert (name == queue_of(team, other)) == (one == other)
    assert name != queue_of(team, "*") or one == "*"
