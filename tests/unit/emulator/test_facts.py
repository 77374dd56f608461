"""Every row of facts.toml: its probe is sent to an emulator, and the answer must be what the row says."""

from __future__ import annotations

import msgspec
import pytest

from penstock.emulator.facts import Expected, Step, check_on_emulator, differences, known_facts
from penstock.emulator.http_words import Answer

FACTS = known_facts()
WORDS = ("unknown", "client", "chosen")


@pytest.mark.parametrize("name", FACTS)
def test_the_emulator_does_what_is_known(name: str) -> None:
    assert check_on_emulator(FACTS[name]) == []


@pytest.mark.parametrize("name", FACTS)
def test_a_row_says_where_it_is_known_from(name: str) -> None:
    fact = FACTS[name]
    assert fact.source.startswith("https://") or fact.source in WORDS
    assert fact.source != "client" or fact.note or fact.seen_by, "say which client"
    assert fact.expect != Expected() or fact.source == "chosen", "a probe that accepts anything shows nothing"


def test_nothing_is_claimed_to_have_been_seen() -> None:
    """Nobody of this project has run a probe against the real service; whoever does changes this with the row."""
    assert [name for name, fact in FACTS.items() if fact.seen] == []


def test_a_probe_can_fail() -> None:
    fact = FACTS["tpu.nodes.exists"]
    other = msgspec.structs.replace(fact, before=())
    assert check_on_emulator(other) != []
    wrong = msgspec.structs.replace(fact, probe=Step("GET nodes/n1"))
    assert any("status: 200, not 409" in each for each in check_on_emulator(wrong))


def test_every_kind_of_difference_is_told() -> None:
    body = {"error": {"status": "ABORTED", "message": "no", "details": [1, 2]}}
    answer = Answer(409, msgspec.json.encode(body), {"retry-after": "5"})
    wanted = Expected(
        status=400,
        reason="NOT_FOUND",
        message="~yes.*",
        body={"error": {"details": [1], "status": "absent", "code": 3}, "x": {"y": 1}},
        headers={"retry-after": "6"},
    )
    told = " | ".join(differences(wanted, answer))
    for part in (
        "status: 409", "reason: 'ABORTED'", "message: 'no' is not like", "not 1 of them", "should not be there",
        "body.error.code: None", "body.x: None is no table", "header retry-after: '5'",
    ):  # fmt: skip
        assert part in told
    assert differences(Expected(status=0), None) == []
