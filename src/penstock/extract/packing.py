"""Packing: which documents share a row of the model's input, and the arrays that say so.

`pack` decides, from lengths alone; `batches` lays the tokens out; `stream` does both as documents come, and begins with
few of them. `compute` calls it for one unit at a time, so that the content of a unit depends on plan and unit, and on
nothing that ran before. Equal input gives equal rows, on every machine. Nothing here splits or shortens a document:
`tokens` did that before, and recorded it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.extract.shapes import PackedBatch

#: Documents of a stream's first window, each following one has twice as many: the device can begin when these are
#: tokenised, if they fill a step and `KEPT_OPEN` rows more; 32 rows of 2,048 with documents of some 350 tokens.
FIRST_WINDOW: Final = 256
#: Rows of a window whose documents go into the next one instead: the least full ones. Without them many small windows
#: would pack worse than a large one.
KEPT_OPEN: Final = 8


class Placement(NamedTuple):
    """Where one document lies in a batch: `tokens[row, column : column + length]`."""

    document: int
    row: int
    column: int
    length: int


#: Documents with their numbers, which lie in one row or are yet to be put into rows.
_Row = list[tuple[int, NDArray[np.int32]]]


def pack(lengths: Sequence[int], width: int, segments_max: int, window: int) -> list[list[int]]:
    """Rows of document indices: each document once, no row over `width` tokens or `segments_max` documents.

    Documents are taken `window` at a time, longest first, each into the fullest row that still has room (best fit
    decreasing). A row never spans two windows, so rows are final as soon as their window has been read.
    """
    if width < 1 or segments_max < 1 or window < 1:
        raise ValueError(f"width {width}, segments_max {segments_max}, window {window}: each must be at least 1")
    rows: list[list[int]] = []
    for start in range(0, len(lengths), window):
        rows.extend(_pack_window(lengths, range(start, min(start + window, len(lengths))), width, segments_max))
    return rows


def _pack_window(lengths: Sequence[int], indices: range, width: int, segments_max: int) -> list[list[int]]:
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (tokens free, row), sorted: the first one with room is the fullest
    for index in sorted(indices, key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        if not 1 <= length <= width:
            raise ValueError(f"document {index} has {length} tokens: a row takes 1 to {width}; split or leave it out")
        place = bisect_left(open_rows, (length, 0))
        if place == len(open_rows):
            row, free = len(rows), width
            rows.append([])
        else:
            free, row = open_rows.pop(place)
        rows[row].append(index)
        if free > length and len(rows[row]) < segments_max:
            insort(open_rows, (free - length, row))
    return rows


def batches(
    docs: Sequence[NDArray[np.int32]], rows: list[list[int]], batch: int, width: int
) -> Iterator[tuple[PackedBatch, list[Placement]]]:
    """The rows as arrays, `batch` at a time, always of one shape: the last batch ends in rows of padding.

    Positions restart with each document. Segments count from 1 in each row; 0 is padding, whose token and position
    are 0 as well.
    """
    _check_batch(batch)
    for start in range(0, len(rows), batch):
        chosen = [[(document, docs[document]) for document in row] for row in rows[start : start + batch]]
        yield _laid_out(chosen, batch, width)


def stream(
    docs: Iterable[NDArray[np.int32]],
    *,
    width: int,
    segments_max: int,
    window: int,
    batch: int,
    small: int | None = None,
    on_last: Callable[[], object] = lambda: None,
) -> Iterator[tuple[PackedBatch, list[Placement]]]:
    """Packed batches as documents come: never more of them are held than two windows' and those of a few open rows.

    So the device can begin before the last document of a unit has been tokenised. The rows that are left over at the
    end go in batches of `small` rows, if that means fewer rows of padding. `on_last` is called before the last batch
    is given.
    """
    _check_batch(batch)
    waiting: list[_Row] = []
    for row in _rows(docs, width, segments_max, window):
        if len(waiting) == batch:  # and there is one more row: this batch is not the last
            yield _laid_out(waiting, batch, width)
            waiting = []
        waiting.append(row)
    step = small if small is not None and len(waiting) <= batch - small else batch
    for start in range(0, len(waiting), step):
        if start + step >= len(waiting):
            on_last()
        yield _laid_out(waiting[start : start + step], step, width)


def _rows(docs: Iterable[NDArray[np.int32]], width: int, segments_max: int, window: int) -> Iterator[_Row]:
    """Rows that nothing is added to any more, which does not depend on how many make a batch."""
    held: _Row = []
    for chunk in _windows(docs, window):
        held += chunk
        rows = _packed(held, width, segments_max)
        by_fill = sorted(range(len(rows)), key=lambda at: sum(len(doc) for _, doc in rows[at]))
        still_open = set(by_fill[:KEPT_OPEN])
        yield from (row for at, row in enumerate(rows) if at not in still_open)
        held = sorted((each for at in still_open for each in rows[at]), key=lambda each: each[0])
    yield from _packed(held, width, segments_max)


def _packed(docs: _Row, width: int, segments_max: int) -> list[_Row]:
    lengths = [len(doc) for _, doc in docs]
    return [[docs[at] for at in row] for row in pack(lengths, width, segments_max, max(1, len(docs)))]


def _check_batch(batch: int) -> None:
    if batch < 1:
        raise ValueError(f"batch {batch}: a batch has at least 1 row")


def _windows(docs: Iterable[NDArray[np.int32]], window: int) -> Iterator[_Row]:
    """With the documents' numbers."""
    numbered = enumerate(docs)
    size = min(FIRST_WINDOW, window)
    while chunk := list(islice(numbered, size)):
        yield chunk
        size = min(2 * size, window)


def _laid_out(rows: Sequence[_Row], batch: int, width: int) -> tuple[PackedBatch, list[Placement]]:
    tokens = np.zeros((batch, width), np.int32)
    positions = np.zeros((batch, width), np.int32)
    segments = np.zeros((batch, width), np.int32)
    steps = np.arange(width, dtype=np.int32)
    placements: list[Placement] = []
    for row, members in enumerate(rows):
        column = 0
        for segment, (document, doc) in enumerate(members, 1):
            length = len(doc)
            here = slice(column, column + length)
            if here.stop > width:
                raise ValueError(f"a row holds {here.stop} tokens or more: the width is {width}")
            tokens[row, here] = doc
            positions[row, here] = steps[:length]
            segments[row, here] = segment
            placements.append(Placement(document, row, column, length))
            column = here.stop
    return PackedBatch(tokens=tokens, positions=positions, segments=segments), placements
