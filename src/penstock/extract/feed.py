"""Passages of a range of rows, made in processes ahead of the device, and handed over in the order of the rows.

`compute` iterates over it while the device works. This process reads the rows; the others render templates and
tokenise, a chunk of rows at a time. Only so many chunks are under way, so that a slow device holds up the reading
and not the memory. A process that was left alone by a killed parent ends itself. Results do not depend on the number
of processes; with none, the work is done here.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Final, Self

import msgspec

from penstock.domain.admission import BadInput
from penstock.extract import content, tokens
from penstock.extract.source import Document, RawRow, Refuse, Refused, Source, document_of, raw_rows, stop_at_first
from penstock.extract.tokens import Passage, Rules, Tokenizer
from penstock.ports.objects import ObjectsError

CHUNK_ROWS: Final = 32  #: few, so that the device has its first step soon
CHUNK_CHARACTERS: Final = 1 << 18  #: a chunk ends here too, so that long rows do not pile up
AHEAD: Final = 8  #: chunks per process that are under way or wait to be taken
#: Signals that a terminal or a launcher sends to all processes; a worker may need its own to its end.
_FOR_THE_WORKER: Final = (signal.SIGINT, signal.SIGTERM)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """All a process needs to know. `tokenizer` is an address; None where the dataset brings token ids."""

    source: Source
    rules: Rules
    tokenizer: str | None
    tokenizer_sha256: str | None = None  #: None: whichever is there
    environment: dict[str, str] | None = None  #: for buckets; None: the process's own


class Feeder:
    """Passages of one range after another, from processes that are started once. To be used in a `with`."""

    def __init__(self, order: Order, processes: int = 0) -> None:
        tokens.check(order.rules)
        if order.tokenizer is None and order.source.reading.tokens is None:
            fix = "give one, or a column of token ids"
            raise BadInput("tokenizer", None, "is missing, and the dataset is text", fix)
        self._order = order
        # Also where processes do the work: what is wrong with the tokenizer is told here, in words.
        self._maker = _Maker(order)
        self._processes = processes
        # Not forked: this process has threads of jax and of the bucket's client.
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, spawn, _begin, (order,)) if processes else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self) -> None:
        """Have the processes come up now, for whoever has something else to do first; otherwise rows bring them up."""
        if self._pool is None:
            return
        resource_tracker.ensure_running()  # it would let signals through again
        # A process is told what is meant for the worker as soon as it is there, before it can ignore it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_WORKER)
        try:
            for _ in range(self._processes):
                self._pool.submit(_make, [])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def passages(
        self,
        start: int = 0,
        stop: int | None = None,
        refuse: Refuse = stop_at_first,
        on_read: Callable[[], object] = lambda: None,
    ) -> Generator[Passage, None, None]:
        """The passages of rows `start` to `stop`, in order; rows that give none go to `refuse`.

        While the caller works on some, the processes make the next. `on_read` is called when they have got the last
        rows: those of another range come behind them.
        """
        chunks = _chunks(raw_rows(self._order.source, start, stop, _environment(self._order)))
        for result in self._results(chunks, on_read):
            for each in result:
                if isinstance(each, Refused):
                    refuse(each)
                else:
                    yield each

    def _results(
        self, chunks: Iterator[list[RawRow]], on_read: Callable[[], object]
    ) -> Iterator[list[Passage | Refused]]:
        if self._pool is None:
            yield from map(self._maker.make, chunks)
            on_read()
            return
        under_way: deque[Future[list[Passage | Refused]]] = deque()
        try:
            for chunk in chunks:
                under_way.append(self._pool.submit(_make, chunk))
                if len(under_way) >= AHEAD * self._processes:
                    yield under_way.popleft().result()
            on_read()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for left in under_way:  # the caller has had enough
                left.cancel()


def passages(
    order: Order, start: int = 0, stop: int | None = None, refuse: Refuse = stop_at_first, *, processes: int = 0
) -> Iterator[Passage]:
    """One range only; for several, a `Feeder` starts its processes once."""
    with Feeder(order, processes) as feeder:
        yield from feeder.passages(start, stop, refuse)


def _environment(order: Order) -> Mapping[str, str]:
    return os.environ if order.environment is None else order.environment


def _chunks(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    chunk: list[RawRow] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        if isinstance(row.columns, Mapping):
            characters += sum(len(value) for value in row.columns.values() if isinstance(value, str | list))
        if len(chunk) >= CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


class _Maker:
    """What one process keeps between chunks."""

    def __init__(self, order: Order) -> None:
        self._rules = order.rules
        self._chat = order.source.reading.chat is not None
        self._read = content.reading(order.source.reading)
        self._tokenizer = None if order.tokenizer is None else Tokenizer.open(order.tokenizer, _environment(order))
        found = None if self._tokenizer is None else self._tokenizer.fingerprint
        if order.tokenizer_sha256 not in (None, found):
            raise BadInput("tokenizer", order.tokenizer, "is not the plan's", "put it back, or make a new run")

    def make(self, rows: list[RawRow]) -> list[Passage | Refused]:
        made = [document_of(row, self._read) for row in rows]
        documents = [each for each in made if isinstance(each, Document)]
        done = iter(tokens.passages(documents, self._tokenizer, self._rules, chat=self._chat))
        return [each for each in made if isinstance(each, Refused)] + list(done)


_maker: _Maker | None = None
_fault: Exception | None = None


def _begin(order: Order) -> None:
    """Runs first in each process."""
    global _maker, _fault  # noqa: PLW0603 (the pool offers a process no other place for what it keeps)
    for number in _FOR_THE_WORKER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_THE_WORKER)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _maker = _Maker(order)
    except (BadInput, ObjectsError) as error:
        _fault = error  # told with the first rows: the pool would tell only that a process has ended


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _make(rows: list[RawRow]) -> list[Passage | Refused]:
    if _maker is None:
        raise _fault or RuntimeError("the process was not begun")
    return _maker.make(rows)
