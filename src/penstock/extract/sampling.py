"""What some rows tell of all: how many tokens, which rows give nothing and why, and where to cut units of like size.

`work` calls it when it plans. The rows it looks at are spread over all files, so that a dataset whose beginning is
unlike the rest is not judged by its beginning; what is known of every row is how many bytes its stretch of the file has
(`formats.Mark`), and tokens are taken to follow them. It reads as a worker would, and must not read everything.
"""

from __future__ import annotations

import itertools
import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from penstock.domain.admission import BadInput
from penstock.extract import feed
from penstock.extract.content import Reading
from penstock.extract.formats import COMPRESSED
from penstock.extract.source import Refused, Source, raw_rows
from penstock.extract.tokens import Cut, Rules

ROWS: Final = 200
PLACES: Final = 20
#: Read in vain to reach a row within its stretch; where more would be, the stretch's first rows are looked at.
REACH_BYTES: Final = 8 << 20
_COLUMNS_SHOWN: Final = 8


class Stretch(NamedTuple):
    """Rows of the dataset from one mark to the next. `before` are bytes to be inflated to reach its first row."""

    start: int
    stop: int
    size: int
    first: int  #: row that the file begins with
    before: int


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows that were looked at gave."""

    rows: int
    kept: int  #: tokens
    refused: tuple[Refused, ...]
    stretches: tuple[Stretch, ...]  #: of all rows of the run
    per_row: tuple[float, ...]  #: by stretch: about how many tokens a row gives

    @property
    def tokens(self) -> float:
        """Of all rows, about."""
        return sum(
            (stretch.stop - stretch.start) * each for stretch, each in zip(self.stretches, self.per_row, strict=True)
        )

    def stops(self, units: int) -> list[int]:
        """Rows at which so many units end that have about as many tokens each; every one has a row at least."""
        ends = itertools.accumulate(
            (stretch.stop - stretch.start) * max(each, 1e-9)
            for stretch, each in zip(self.stretches, self.per_row, strict=True)
        )
        sums = [0.0, *ends]
        found: list[int] = []
        rows = self.stretches[-1].stop
        for unit in range(1, units):
            share = sums[-1] * unit / units
            index = min(bisect_right(sums, share), len(self.stretches)) - 1
            stretch = self.stretches[index]
            part = (share - sums[index]) / (sums[index + 1] - sums[index])
            row = stretch.start + round(part * (stretch.stop - stretch.start))
            found.append(min(max(row, (found[-1] if found else 0) + 1), rows - (units - unit)))
        return [*found, rows]


def look(order: feed.Order, rows: int, environment: Mapping[str, str] = os.environ) -> Look:
    """Read and tokenise some of the first `rows` rows of the dataset."""
    order = msgspec.structs.replace(order, environment=dict(environment))
    stretches = tuple(_stretches(order.source, rows))
    weights = _weights(stretches, order.rules)
    starts = [stretch.start for stretch in stretches]
    refused: list[Refused] = []
    kept, seen, weight = 0, 0, 0.0
    with feed.Feeder(order) as feeder:
        for start, stop in _places(stretches, rows):
            kept += sum(int(passage.keep.sum()) for passage in feeder.passages(start, stop, refused.append))
            seen += stop - start
            weight += sum(weights[bisect_right(starts, row) - 1] for row in range(start, stop))
    scale, most = kept / weight, _most(order.rules)
    per_row = tuple(min(each * scale, most) for each in weights)
    return Look(rows=seen, kept=kept, refused=tuple(refused), stretches=stretches, per_row=per_row)


def check(found: Look, source: Source, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a dataset of which no row that was looked at gives anything."""
    if len({each.row for each in found.refused}) < found.rows:
        return
    first = found.refused[0]
    field, value = _meant(source.reading, first)
    rule = f"gives nothing in any of the {found.rows} rows looked at: line {first.line} of {first.file} {first.reason}"
    if "; it has " not in first.reason:
        (row,) = raw_rows(source, first.row, first.row + 1, environment, whole_rows=True)
        names = ", ".join(sorted(row.columns)[:_COLUMNS_SHOWN]) if isinstance(row.columns, Mapping) else ""
        rule += f"; its columns are {names}" if names else ""
    raise BadInput(field, value, rule, "name another column, or mend the data")


def _meant(reading: Reading, refused: Refused) -> tuple[str, str]:
    """The option that the reason speaks of, and what it was given."""
    named = {
        "id": reading.id,
        "tokens": reading.tokens,
        "chat": reading.chat,
        "filter": reading.mask,
        "column": reading.column,
    }
    for field, value in named.items():
        if value is not None and f"column {value!r}" in refused.reason:
            return field, f"mask:{value}" if field == "filter" else value
    if reading.template is not None and "template" in refused.reason:
        return "template", reading.template
    return "data", refused.file


def _stretches(source: Source, rows: int) -> Iterator[Stretch]:
    first = 0
    for file in source.files:
        inflated = file.address.endswith(COMPRESSED)
        ends = [*(mark.row for mark in file.marks[1:]), file.rows]
        for mark, end in zip(file.marks, ends, strict=True):
            start, stop = first + mark.row, min(first + end, rows)
            if start < stop:
                size = mark.size * (stop - start) // (end - mark.row)
                yield Stretch(start, stop, size, first, mark.place if inflated else 0)
        first += file.rows


def _weights(stretches: Sequence[Stretch], rules: Rules) -> list[float]:
    """By stretch, what a row's tokens are taken to be proportional to: its bytes, unless every row gives one token."""
    if rules.keep.which == "last" or not any(stretch.size for stretch in stretches):
        return [1.0] * len(stretches)
    return [max(stretch.size, 1) / (stretch.stop - stretch.start) for stretch in stretches]


def _most(rules: Rules) -> float:
    """Tokens of a row at most, however long it is."""
    if rules.cut is Cut.WINDOWS:
        return math.inf
    return 1.0 if rules.keep.which == "last" else -(-rules.width // rules.keep.n)


def _places(stretches: Sequence[Stretch], rows: int) -> list[tuple[int, int]]:
    """Ranges of rows to look at, apart from each other, spread evenly as far as they can be reached quickly."""
    if rows <= ROWS:
        return [(0, rows)]
    starts = [stretch.start for stretch in stretches]
    wanted = set()
    for place in range(PLACES):
        row = place * rows // PLACES
        stretch = stretches[bisect_right(starts, row) - 1]
        if stretch.before > REACH_BYTES:
            row = stretch.first
        elif stretch.size * (row - stretch.start) > REACH_BYTES * (stretch.stop - stretch.start):
            row = stretch.start
        wanted.add(row)
    each = -(-ROWS // len(wanted))
    edges = [*sorted(wanted), rows]
    return [(start, min(start + each, following)) for start, following in itertools.pairwise(edges)]
