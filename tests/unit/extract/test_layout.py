"""A unit is stored whole or refused: each input row, each position once, every site; odd numbers are counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.extract.layout import INDEX, NotWhole, Piece, UnitFacts, read_index
from penstock.extract.plan import make_plan
from tests.process.extraction import SITES, cheap_compute, cheap_plan, check_unit, tokens_of
from tests.unit.extract.cheap import encode_unit

PLAN = cheap_plan(rows=12, unit_rows=6)
UNIT = PLAN.units[0]
PIECES = tuple(cheap_compute()(PLAN, UNIT))


def encode(pieces: Any) -> tuple[dict[str, bytes], UnitFacts]:
    return encode_unit(PLAN, UNIT, pieces)


def test_a_unit_holds_each_row_once() -> None:
    objects, facts = encode(PIECES)
    assert check_unit(objects) == ([0, 1, 2, 3, 4, 5], facts.tokens)
    assert facts.tokens == sum(len(tokens_of(row)) for row in range(6))
    assert facts.sizes == tuple(len(data) for data in objects.values())


def test_the_hash_of_the_rows_does_not_depend_on_the_order_of_the_pieces() -> None:
    assert encode(PIECES)[1].rows_sha256 == encode(PIECES[::-1])[1].rows_sha256
    assert (
        encode([*PIECES[:-1], PIECES[-1]._replace(document="another")])[1].rows_sha256 != encode(PIECES)[1].rows_sha256
    )


FAULTS = {
    "gave nothing": PIECES[1:],
    "are not its own": [*PIECES, PIECES[0]._replace(row=6)],
    "begins two pieces": [*PIECES, PIECES[0]],
    "sites are": [PIECES[0]._replace(sites={SITES[0]: PIECES[0].sites[SITES[0]]}), *PIECES[1:]],
    "for 1 tokens|for [2-9] tokens": [
        PIECES[0]._replace(sites={site: values[:0] for site, values in PIECES[0].sites.items()}),
        *PIECES[1:],
    ],
    "should be int32": [PIECES[0]._replace(tokens=PIECES[0].tokens.astype(np.int64)), *PIECES[1:]],
    "positions do not rise": [PIECES[0]._replace(positions=np.zeros(9, np.int32)), *PIECES[1:]],
}


@pytest.mark.parametrize("what", FAULTS)
def test_pieces_that_are_not_the_unit_are_refused(what: str) -> None:
    with pytest.raises(NotWhole, match=what):
        encode(FAULTS[what])


def test_windows_of_a_document_and_chosen_positions() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    plan = make_plan(rows=1, unit_rows=1, sites=("embed",), dtype="float32", work={})
    pieces = [
        Piece(
            0,
            "d",
            np.array([7, 8, 9], np.int32),
            {"embed": values},
            np.array([64, 66, 68], np.int32),
            total=70,
            first=64,
        ),
        Piece(0, "d", np.array([1, 2, 3], np.int32), {"embed": values + 1}, np.array([0, 2, 4], np.int32), total=70),
    ]
    objects, facts = encode_unit(plan, plan.units[0], pieces)
    index = read_index(objects[INDEX]).to_pylist()
    assert [(entry["position"], entry["start"], entry["first"], entry["total"]) for entry in index] == [
        (0, 3, 0, 70),
        (64, 0, 64, 70),
    ]
    assert (facts.documents, facts.tokens, facts.truncated) == (1, 6, 0)


def test_documents_that_lost_tokens_are_counted_and_say_how_many() -> None:
    plan = make_plan(rows=3, unit_rows=3, sites=("embed",), dtype="float32", work={})
    values = np.ones((2, 4), np.float32)
    pieces = [
        Piece(0, "a", np.array([1, 2], np.int32), {"embed": values}, total=9, cut="head", dropped=7),
        Piece(1, "b", np.array([1, 2], np.int32), {"embed": values}, total=5, first=3, cut="tail", dropped=3),
        Piece(2, "c", np.array([1, 2], np.int32), {"embed": values}, total=2),
    ]
    objects, facts = encode_unit(plan, plan.units[0], pieces)
    assert facts.truncated == 2
    found = read_index(objects[INDEX]).select(["total", "first", "cut", "dropped", "truncated"]).to_pylist()
    assert [tuple(each.values()) for each in found] == [
        (9, 0, "head", 7, True),
        (5, 3, "tail", 3, True),
        (2, 0, "", 0, False),
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_not_a_number_is_counted(dtype: Any) -> None:
    plan = make_plan(rows=1, unit_rows=1, sites=("embed",), dtype=dtype, work={})
    values = np.ones((4, 5), np.float32) * 3
    values[1, 2], values[3, 0] = np.nan, -np.inf
    piece = Piece(0, "d", np.arange(4, dtype=np.int32), {"embed": values})
    facts = encode_unit(plan, plan.units[0], [piece])[1].sites["embed"]
    assert (facts.not_finite, facts.sampled, facts.max_abs) == (2, 2, 3.0)
    assert facts.mean_norm == pytest.approx(np.sqrt(45), rel=1e-3)


def test_a_unit_in_which_nothing_is_stored() -> None:
    plan = make_plan(rows=2, unit_rows=2, sites=("embed",), dtype="bfloat16", work={})
    pieces = [Piece(row, f"d{row}", np.zeros(0, np.int32), {}, note="not UTF-8") for row in range(2)]
    objects, facts = encode_unit(plan, plan.units[0], pieces)
    assert (facts.documents, facts.empty, facts.tokens) == (2, 2, 0)
    assert [entry["note"] for entry in read_index(objects[INDEX]).to_pylist()] == ["not UTF-8"] * 2
