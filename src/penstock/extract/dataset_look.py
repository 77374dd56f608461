"""What a dataset holds, before anything is paid for: rows, malformed ones and why, lengths, and how full rows would be.

`tpu dataset inspect` calls it. It reads as a worker would, with the same rules, so that what it counts is what a run
would do. Memory does not grow with the dataset: lengths are counted, not kept.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Final

import msgspec

from penstock.extract import feed
from penstock.extract.packing import pack
from penstock.extract.source import Progress, Refused, Source, documents
from penstock.extract.tokens import Rules

SEGMENTS_MAX: Final = 32  #: of a row and
WINDOW: Final = 1024  #: of documents: what `fill` is computed for
EXACT_BELOW: Final = 4096  #: lengths from here on are counted by their first three digits
REFUSED_KEPT: Final = 10_000  #: for the side file; a dataset of which more is malformed is the wrong dataset
_REASONS_MAX: Final = 50  #: that are told apart
_TOLD_ROWS: Final = 500


class Lengths(msgspec.Struct, frozen=True):
    """A distribution; the quantiles of long ones are right to three digits."""

    total: int
    mean: float
    median: int
    p95: int
    longest: int


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """What the model would read. `fill` is the share of real tokens in packed rows of `width`."""

    documents: Lengths
    width: int
    passages: int
    cut: int
    kept: int
    fill: float


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in `rows_read` of `rows` rows."""

    format: str
    files: int
    bytes: int
    rows: int
    rows_read: int
    documents: int
    refused: int
    reasons: dict[str, int]
    characters: Lengths | None = None
    tokens: Tokens | None = None
    samples: tuple[str, ...] = ()


class Tally:
    """Counts lengths."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total = 0
        self._longest = 0

    def add(self, length: int) -> None:
        self._total += length
        self._longest = max(self._longest, length)
        if length >= EXACT_BELOW:
            step = 10 ** (len(str(length)) - 3)
            length = length // step * step
        self._counts[length] += 1

    def lengths(self) -> Lengths | None:
        count = self._counts.total()
        if not count:
            return None
        return Lengths(self._total, self._total / count, self._at(0.5), self._at(0.95), self._longest)

    def _at(self, share: float) -> int:
        left = share * self._counts.total()
        for length in sorted(self._counts):
            left -= self._counts[length]
            if left <= 0:
                return length
        return self._longest


class _Filling:
    """How full rows would be, packed a window at a time."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._waiting: list[int] = []
        self.tokens = 0
        self.rows = 0

    def add(self, length: int) -> None:
        self._waiting.append(length)
        self.tokens += length
        if len(self._waiting) == WINDOW:
            self.settle()

    def settle(self) -> float:
        self.rows += len(pack(self._waiting, self._width, SEGMENTS_MAX, WINDOW))
        self._waiting = []
        return self.tokens / (self.rows * self._width) if self.rows else 0.0


class _Refusals:
    def __init__(self) -> None:
        self.count = 0
        self.rows: list[Refused] = []
        self.reasons: Counter[str] = Counter()

    def __call__(self, refused: Refused) -> None:
        self.count += 1
        # Reasons end in what is peculiar to a row ("is not JSON: … byte 17"): told apart by how they begin.
        kind = refused.reason.partition(":")[0]
        self.reasons[kind if kind in self.reasons or len(self.reasons) < _REASONS_MAX else "other reasons"] += 1
        if len(self.rows) < REFUSED_KEPT:
            self.rows.append(refused)


def look(
    source: Source,
    *,
    rows: int | None = None,
    samples: int = 0,
    environment: Mapping[str, str] = os.environ,
    progress: Progress | None = None,
) -> tuple[Look, list[Refused]]:
    """Read the documents of the first `rows` rows; also the rows that give none, as a side file lists them."""
    stop = source.rows if rows is None else min(rows, source.rows)
    refusals, tally, shown = _Refusals(), Tally(), list[str]()
    count = 0
    for document in documents(source, 0, stop, refusals, environment):
        count += 1
        tally.add(len(document.text if document.text is not None else document.tokens or ()))
        if len(shown) < samples:
            shown.append(document.text if document.text is not None else str(list(document.tokens or ())))
        if progress is not None and count % _TOLD_ROWS == 0:
            progress(document.row, stop)
    found = _look(source, stop, count, refusals)
    return msgspec.structs.replace(found, characters=tally.lengths(), samples=tuple(shown)), refusals.rows


def look_at_tokens(
    source: Source,
    rules: Rules,
    tokenizer: str | None,
    *,
    rows: int | None = None,
    processes: int = 0,
    environment: Mapping[str, str] = os.environ,
    progress: Progress | None = None,
) -> tuple[Look, list[Refused]]:
    """The same, with what the model would read of it."""
    stop = source.rows if rows is None else min(rows, source.rows)
    order = feed.Order(source=source, rules=rules, tokenizer=tokenizer, environment=dict(environment))
    refusals, tally, filling = _Refusals(), Tally(), _Filling(rules.width)
    count = passages = cut = kept = 0
    last = -1
    for passage in feed.passages(order, 0, stop, refusals, processes=processes):
        passages += 1
        kept += int(passage.keep.sum())
        filling.add(len(passage.tokens))
        if passage.row != last:
            last = passage.row
            count += 1
            cut += passage.cut is not None
            tally.add(passage.total)
            if progress is not None and count % _TOLD_ROWS == 0:
                progress(passage.row, stop)
    found = _look(source, stop, count, refusals)
    lengths = tally.lengths()
    if lengths is None:
        return found, refusals.rows
    tokens = Tokens(documents=lengths, width=rules.width, passages=passages, cut=cut, kept=kept, fill=filling.settle())
    return msgspec.structs.replace(found, tokens=tokens), refusals.rows


def _look(source: Source, stop: int, count: int, refusals: _Refusals) -> Look:
    return Look(
        format=source.format,
        files=len(source.files),
        bytes=sum(file.size for file in source.files),
        rows=source.rows,
        rows_read=stop,
        documents=count,
        refused=refusals.count,
        reasons=dict(refusals.reasons.most_common()),
    )
