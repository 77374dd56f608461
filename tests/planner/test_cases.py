"""The hand-computed cases of `cases/*.toml`: each is a small world and exactly what one admission round does in it.

A case's comment carries the arithmetic. Actions must match exactly and in order; `reasons` and `keep` are checked for
the jobs and slices they name. Every case is also planned from a shuffled snapshot, with the same answer.
"""

import random
import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock.planner.admission import admit
from penstock.planner.reasons import CODES
from tests.planner.world import NOW, Build, in_words

FILES = sorted((Path(__file__).parent / "cases").glob("*.toml"))
CASES_PER_SUBJECT = 12
KINDS = {"place", "stop", "release", "finish", "want", "reasons", "keep"}


def load(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        return list(tomllib.load(file)["case"])


CASES = [pytest.param(case, id=f"{path.stem}-{case['name']}") for path in FILES for case in load(path)]


def test_every_subject_has_its_cases() -> None:
    counts = {path.stem: len({case["name"] for case in load(path)}) for path in FILES}
    assert set(counts) >= {"fair_share", "borrow_reclaim", "gang", "backfill", "preemption", "replicas"}
    assert all(count >= CASES_PER_SUBJECT for count in counts.values()), counts


@pytest.mark.parametrize("case", CASES)
def test_case(case: dict[str, Any]) -> None:
    expected = case["expect"]
    assert set(expected) <= KINDS, "a misspelt expectation would never fail"
    admission = admit(Build(case).snapshot, case.get("now", NOW))
    words = in_words(admission)
    assert words == {kind: expected.get(kind, []) for kind in words}
    codes = {job: why.code for job, why in admission.reasons.items()}
    assert {job: codes.get(job) for job in expected.get("reasons", {})} == expected.get("reasons", {})
    assert set(codes.values()) <= set(CODES)
    if "keep" in expected:
        touched = {slice for line in words["place"] for slice in line.partition(":")[2].split()}
        assert sorted(admission.keep - touched - set(words["release"])) == expected["keep"]


@pytest.mark.parametrize("case", CASES)
def test_case_does_not_depend_on_the_order_of_insertion(case: dict[str, Any]) -> None:
    now = case.get("now", NOW)
    plain = admit(Build(case).snapshot, now)
    for seed in range(3):
        assert admit(Build(case, random.Random(seed)).snapshot, now) == plain
