"""Packing: each document once, no row over a limit, the fill that was measured, arrays that say what lies where."""

import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.extract.packing import FIRST_WINDOW, KEPT_OPEN, Placement, batches, pack, stream
from penstock.extract.shapes import PackedBatch

WIDTH = 2048


def corpus(seed: int = 0) -> list[int]:
    """4096 lengths as in shared/extraction.md §5: log-normal, median 268, mean about 400, about 1.3% cut at 2048."""
    chance = random.Random(seed)
    return [min(WIDTH, max(1, round(chance.lognormvariate(math.log(268), 0.9)))) for _ in range(4096)]


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    width = draw(st.integers(1, 60))
    lengths = draw(st.lists(st.integers(1, width), max_size=80))
    return lengths, width, draw(st.integers(1, 9)), draw(st.integers(1, 90))


@given(packings())
def test_each_document_lies_in_one_row_and_no_row_is_over_a_limit(case: tuple[list[int], int, int, int]) -> None:
    lengths, width, segments_max, window = case
    rows = pack(lengths, width, segments_max, window)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    for row in rows:
        assert 1 <= len(row) <= segments_max
        assert sum(lengths[document] for document in row) <= width
        assert len({document // window for document in row}) == 1, "a row is final once its window has been read"


@given(packings())
def test_a_window_is_packed_the_same_whatever_comes_before_it(case: tuple[list[int], int, int, int]) -> None:
    lengths, width, segments_max, window = case
    alone = pack(lengths, width, segments_max, window)
    after = pack([1] * window + lengths, width, segments_max, window)
    assert [[document - window for document in row] for row in after if row[0] >= window] == alone


@given(packings())
@settings(max_examples=50)
def test_no_two_rows_of_a_window_could_have_been_one(case: tuple[list[int], int, int, int]) -> None:
    """Best fit leaves at most one row half empty; without a limit on segments only."""
    lengths, width, _, _ = case
    rows = pack(lengths, width, len(lengths) or 1, len(lengths) or 1)
    sums = sorted(sum(lengths[document] for document in row) for row in rows)
    assert len(sums) < 2 or sums[0] + sums[1] > width


@pytest.mark.parametrize(
    ("segments_max", "window", "share"),
    [
        (16, 64, 0.949),
        (16, 256, 0.970),
        (16, 1024, 0.978),
        (16, 4096, 0.980),
        (32, 64, 0.959),
        (32, 256, 0.988),
        (32, 1024, 0.995),
        (32, 4096, 0.998),
    ],
)
def test_the_fill_is_what_was_measured(segments_max: int, window: int, share: float) -> None:
    lengths = corpus()
    rows = pack(lengths, WIDTH, segments_max, window)
    assert sum(lengths) / (len(rows) * WIDTH) == pytest.approx(share, abs=0.008)


def test_the_corpus_is_the_one_that_was_measured() -> None:
    lengths = sorted(corpus())
    assert sum(lengths) / len(lengths) == pytest.approx(399.5, rel=0.04)
    assert lengths[2048] == pytest.approx(268, rel=0.04)
    assert sum(length == WIDTH for length in lengths) / 4096 == pytest.approx(0.013, abs=0.004)


@pytest.mark.parametrize("length", [0, -1, 9])
def test_a_document_that_fits_no_row_is_refused_by_its_number(length: int) -> None:
    with pytest.raises(ValueError, match=f"document 1 has {length} tokens: a row takes 1 to 8"):
        pack([3, length], 8, 4, 4)


@pytest.mark.parametrize("limits", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_limit_of_nothing_is_refused(limits: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        pack([1], *limits)


@given(packings(), st.integers(1, 5), st.booleans(), st.randoms(use_true_random=False))
def test_batches_hold_each_documents_tokens_where_they_say(
    case: tuple[list[int], int, int, int], batch: int, streamed: bool, chance: random.Random
) -> None:
    lengths, width, segments_max, window = case
    docs = [np.array([chance.randrange(1, 1000) for _ in range(length)], np.int32) for length in lengths]
    if streamed:
        found = stream(iter(docs), width=width, segments_max=segments_max, window=window, batch=batch)
    else:
        found = batches(docs, pack(lengths, width, segments_max, window), batch, width)
    seen: list[int] = []
    real = 0
    for packed, placements in found:
        for array in (packed.tokens, packed.positions, packed.segments):
            assert array.shape == (batch, width)
            assert array.dtype == np.int32
        for document, row, column, length in placements:
            here = slice(column, column + length)
            assert packed.tokens[row, here].tolist() == docs[document].tolist()
            assert packed.positions[row, here].tolist() == list(range(length))
            (segment,) = set(packed.segments[row, here].tolist())
            assert (packed.segments[row] == segment).sum() == length, "no other document has this number in the row"
            assert 1 <= segment <= segments_max
            seen.append(document)
        real += int((packed.segments > 0).sum())
        padding = packed.segments == 0
        assert not packed.tokens[padding].any()
        assert not packed.positions[padding].any()
    assert sorted(seen) == list(range(len(lengths)))
    assert real == sum(lengths)


def streamed_rows(lengths: list[int], batch: int, segments_max: int = 32, window: int = 4096) -> list[list[int]]:
    """The documents of each row that is not padding."""
    docs = (np.ones(length, np.int32) for length in lengths)
    rows: list[list[int]] = []
    for _, placements in stream(docs, width=WIDTH, segments_max=segments_max, window=window, batch=batch):
        by_row: dict[int, list[int]] = {}
        for place in placements:
            by_row.setdefault(place.row, []).append(place.document)
        rows.extend(by_row.values())
    return rows


@pytest.mark.parametrize("documents", [1, 300, 1480, 4096])
@pytest.mark.parametrize("segments_max", [16, 32])
def test_a_stream_that_begins_with_few_documents_packs_as_well_as_a_whole_window(
    documents: int, segments_max: int
) -> None:
    for seed in range(4):
        lengths = corpus(seed)[:documents]
        alike = len(pack(lengths, WIDTH, segments_max, 4096))
        assert len(streamed_rows(lengths, 32, segments_max)) <= alike + (documents > FIRST_WINDOW)


def test_rows_of_a_stream_do_not_depend_on_how_many_make_a_batch() -> None:
    lengths = corpus()[:1500]
    expected = streamed_rows(lengths, 32)
    assert all(streamed_rows(lengths, batch) == expected for batch in (1, 7, 64))


@pytest.mark.parametrize("batch", [8, 32])
def test_a_stream_gives_its_first_batch_when_the_first_window_is_there(batch: int) -> None:
    taken = 0

    def docs() -> Iterator[NDArray[np.int32]]:
        nonlocal taken
        for length in corpus():
            taken += 1
            yield np.ones(length, np.int32)

    found = stream(docs(), width=WIDTH, segments_max=32, window=4096, batch=batch)
    next(found)
    assert taken == FIRST_WINDOW


@pytest.mark.parametrize("length", [1, 1100, WIDTH])
def test_a_stream_holds_no_more_than_a_window_and_some_open_rows(length: int) -> None:
    """Rows that nothing fits into do not pile up."""
    taken = given_back = most = 0

    def docs() -> Iterator[NDArray[np.int32]]:
        nonlocal taken, most
        for _ in range(2000):
            taken += 1
            most = max(most, taken - given_back)
            yield np.ones(length, np.int32)

    for _, placements in stream(docs(), width=WIDTH, segments_max=4, window=100, batch=2):
        given_back += len(placements)
    assert given_back == 2000
    assert most <= 100 + (KEPT_OPEN + 2) * 4


@pytest.mark.parametrize(
    ("rows", "shapes"),
    [(8, [8]), (9, [8, 2]), (12, [8, 2, 2]), (14, [8, 2, 2, 2]), (15, [8, 8]), (1, [2])],
)
def test_rows_that_are_left_over_go_in_smaller_batches(rows: int, shapes: list[int]) -> None:
    docs = [np.full(4, number + 1, np.int32) for number in range(rows)]
    found: list[tuple[PackedBatch, list[Placement]]] = []
    last: list[int] = []

    def note() -> None:
        last.append(len(found))

    for each in stream(iter(docs), width=4, segments_max=4, window=100, batch=8, small=2, on_last=note):
        found.append(each)  # noqa: PERF402 (one by one: they are counted on the way)
    assert [len(batch.tokens) for batch, _ in found] == shapes
    assert last == [len(shapes) - 1], "told before the last batch, and once"
    for batch, placements in found:
        for place in placements:
            assert batch.tokens[place.row].tolist() == docs[place.document].tolist()
    assert sorted(place.document for _, placements in found for place in placements) == list(range(rows))


def test_batches_refuse_rows_that_are_too_long() -> None:
    with pytest.raises(ValueError, match="a row holds 6 tokens or more: the width is 5"):
        list(batches([np.ones(3, np.int32), np.ones(3, np.int32)], [[0, 1]], 1, 5))


def test_batches_refuse_a_batch_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least 1 row"):
        list(batches([], [], 0, 5))
