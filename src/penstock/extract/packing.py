"""Packing: which documents share a row of the model's input, and the arrays that say so.

`pack` decides, from lengths alone; `batches` lays the tokens out; `stream` does both as documents come. `compute` calls
them for one unit at a time, so that the content of a unit depends on plan and unit, and on nothing that ran before.
Equal input gives equal rows, on every machine. Nothing here splits or shortens a document: `tokens` did that before,
and recorded it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.extract.shapes import PackedBatch


class Placement(NamedTuple):
    """Where one document lies in a batch: `tokens[row, column : column + length]`."""

    document: int
    row: int
    column: int
    length: int


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
) -> Iterator[tuple[PackedBatch, list[Placement]]]:
    """What `pack` and `batches` give together, as documents come: never more of them are held than one window's.

    So the device can begin before the last document of a unit has been tokenised. The rows that are left over at the
    end go in batches of `small` rows, if that means fewer rows of padding.
    """
    _check_batch(batch)
    waiting: list[list[tuple[int, NDArray[np.int32]]]] = []
    for first, chunk in _windows(docs, window):
        for row in pack([len(doc) for doc in chunk], width, segments_max, window):
            waiting.append([(first + index, chunk[index]) for index in row])
            if len(waiting) == batch:
                yield _laid_out(waiting, batch, width)
                waiting = []
    step = small if small is not None and len(waiting) <= batch - small else batch
    for start in range(0, len(waiting), step):
        yield _laid_out(waiting[start : start + step], step, width)


def _check_batch(batch: int) -> None:
    if batch < 1:
        raise ValueError(f"batch {batch}: a batch has at least 1 row")


def _windows(docs: Iterable[NDArray[np.int32]], window: int) -> Iterator[tuple[int, list[NDArray[np.int32]]]]:
    chunk: list[NDArray[np.int32]] = []
    count = 0
    for count, doc in enumerate(docs, 1):
        chunk.append(doc)
        if len(chunk) >= window:
            yield count - len(chunk), chunk
            chunk = []
    if chunk:
        yield count - len(chunk), chunk


def _laid_out(
    rows: Sequence[Sequence[tuple[int, NDArray[np.int32]]]], batch: int, width: int
) -> tuple[PackedBatch, list[Placement]]:
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
