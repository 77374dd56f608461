"""A unit's objects, made while the unit is computed: rows are hashed, looked over and written as they come.

`worker` adds pieces as the device gives them; threads take each block of 8 MiB as soon as it is full, straight from the
memory it arrived in, and at the end only the header and the last block are left. An object is hashed by blocks, so that
several threads can work on one, and its first bytes, which name the number of rows, can come last (ADR 0039). Only so
many blocks may wait: a slow disk holds up the device and not the memory. It must not name an object: `commit` does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from penstock.domain import ledger
from penstock.domain.ledger import BLOCK_BYTES, Unit
from penstock.extract import layout, tensors
from penstock.extract.layout import Content, Made, Piece, SiteFacts, UnitFacts
from penstock.extract.plan import RunPlan
from penstock.extract.tensors import Array
from penstock.ports.objects import Draft

T = TypeVar("T")

#: Of each site and unit at least so many rows are looked at for means; all of them for what is not a number.
SAMPLED_ROWS: Final = 1024
#: Of results that wait to be hashed and written in the memory they arrived in; page-locked memory is slow to get.
HELD_BYTES: Final = 1 << 30
_EXPONENTS: Final = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}


class Hands:
    """Threads that work on blocks, of all units of a process; and how many blocks may wait for them."""

    def __init__(self, threads: int | None = None, held: int = HELD_BYTES // BLOCK_BYTES) -> None:
        """`threads` None: three of four processors this process may use; others tokenise and feed the device."""
        self._pool = ThreadPoolExecutor(threads or max(2, len(os.sched_getaffinity(0)) * 3 // 4), "blocks")
        self._room = threading.Semaphore(held)

    def do(self, work: Callable[[], T]) -> Future[T]:
        """Waits for room first."""
        self._room.acquire()
        given = self._pool.submit(work)
        given.add_done_callback(lambda _: self._room.release())
        return given

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Span(NamedTuple):
    """Bytes `start` to `stop` of an array's memory, which it keeps."""

    owner: Array
    start: int
    stop: int

    def view(self) -> memoryview:
        return self.owner.reshape(-1).view(np.uint8)[self.start : self.stop].data


class SiteWriter:
    """The object of one site; `add` and `finish` are for one thread."""

    def __init__(self, dtype: str, draft: Draft, hands: Hands) -> None:
        self._dtype = dtype
        self._draft = draft
        self._hands = hands
        self._spans: list[_Span] = []
        self._at = tensors.ROOM_BYTES  #: where in the object the next byte lies
        self._block_at = self._at  #: where the first of those that wait lies
        self._first: Future[tuple[bytes, int]] | None = None
        self._blocks: list[Future[tuple[bytes, int]]] = []
        self._looked_at = 0  #: how many of these are known to be written
        self._rows = 0
        self._width = 0
        self._every = 1  #: of these rows is one sampled
        self._sample: list[Array] = []
        self._sampled = 0

    def add(self, values: Array) -> None:
        """Rows of the site, [n, d]."""
        values = np.ascontiguousarray(values, tensors.dtype_of(self._dtype))
        if self._rows and values.shape[1] != self._width:
            raise layout.NotWhole(f"rows of {values.shape[1]} values follow rows of {self._width}")
        self._width = values.shape[1]
        self._keep_some(values)
        self._rows += len(values)
        span = _span_of(values)
        while span.start < span.stop:
            room = BLOCK_BYTES - self._at % BLOCK_BYTES
            here = span._replace(stop=min(span.stop, span.start + room))
            last = self._spans[-1] if self._spans else None
            if last is not None and last.owner is here.owner and last.stop == here.start:
                self._spans[-1] = last._replace(stop=here.stop)  # neighbours in memory are one
            else:
                self._spans.append(here)
            self._at += here.stop - here.start
            span = span._replace(start=here.stop)
            if self._at % BLOCK_BYTES == 0:
                self._hand_over()

    def finish(self, about: dict[str, str]) -> tuple[Made, SiteFacts]:
        """Waits for all blocks."""
        if self._block_at < self._at:
            self._hand_over()
        facts = self._hands.do(self._facts)
        shape = (self._rows, self._width)
        header = tensors.header_of(layout.VALUES, self._dtype, shape, about)
        self._draft.write(0, [header])
        first, odd = (b"", 0) if self._first is None else self._first.result()
        digests = [_digest([header, first])]
        for block in self._blocks:
            digest, more = block.result()
            digests.append(digest)
            odd += more
        made = Made(self._at, ledger.checksum_of_blocks(digests, ledger.FAST_KIND), self._draft)
        return made, msgspec.structs.replace(facts.result(), not_finite=odd)

    def _hand_over(self) -> None:
        """The block that is full, or the last one; what went wrong with one before is raised here."""
        while self._looked_at < len(self._blocks) and self._blocks[self._looked_at].done():
            self._blocks[self._looked_at].result()
            self._looked_at += 1
        if self._first is not None and self._first.done():
            self._first.result()
        parts = [span.view() for span in self._spans]
        dtype, draft, at = self._dtype, self._draft, self._block_at
        # The first block begins with the header, which is not known yet: its rows are kept and hashed behind it.
        if at == tensors.ROOM_BYTES:
            self._first = self._hands.do(lambda: (b"".join(parts), _looked_over_and_written(parts, dtype, draft, at)))
        else:
            self._blocks.append(self._hands.do(lambda: _hashed(parts, dtype, draft, at)))
        self._spans = []
        self._block_at = self._at

    def _keep_some(self, values: Array) -> None:
        """Every row at first; whenever there are twice as many as wanted, every second of them is dropped."""
        # As bits: numpy copies a type that is not its own value by value.
        some = values.view(f"u{values.itemsize}")[-self._rows % self._every :: self._every]
        if not len(some):
            return
        self._sample.append(some.copy())
        self._sampled += len(some)
        while self._sampled > 2 * SAMPLED_ROWS:
            self._sample = [np.concatenate(self._sample)[::2].copy()]
            self._sampled = len(self._sample[0])
            self._every *= 2

    def _facts(self) -> SiteFacts:
        """All but `not_finite`."""
        sample = _wide(np.concatenate(self._sample), self._dtype) if self._sample else np.zeros((0, 0))
        finite = sample[np.isfinite(sample).all(axis=1)] if len(sample) else sample
        return SiteFacts(
            width=self._width,
            bytes=self._at - tensors.ROOM_BYTES,
            sampled=len(finite),
            mean_norm=float(np.linalg.norm(finite, axis=1).mean()) if len(finite) else 0.0,
            mean=float(finite.mean()) if finite.size else 0.0,
            max_abs=float(np.abs(finite).max()) if finite.size else 0.0,
            not_finite=0,
        )


class UnitWriter:
    """All objects of one unit."""

    def __init__(self, plan: RunPlan, unit: Unit, hands: Hands, draft: Callable[[], Draft]) -> None:
        self._plan = plan
        self._unit = unit
        self._pieces: list[Piece] = []
        self._sites = {site: SiteWriter(plan.dtype, draft(), hands) for site in plan.sites}

    def add(self, piece: Piece) -> None:
        """A piece, whose vectors may go as soon as they are written; raises `NotWhole` if it is not the unit's."""
        layout.check_piece(self._plan, self._unit, piece)
        if len(piece.tokens):
            for site, writer in self._sites.items():
                writer.add(piece.sites[site])
        self._pieces.append(piece._replace(sites={}))

    def finish(self, *, seconds: float, worker: str, code: str) -> Content:
        """The unit's objects; raises `NotWhole` when the pieces are not all that plan and unit ask for."""
        pieces = self._pieces
        layout.check_whole(self._unit, pieces)
        index, order = layout.make_index(pieces)
        positions = [layout.positions_of(piece) for piece in pieces] or [np.zeros(0, np.int32)]
        tokens = [piece.tokens for piece in pieces] or [np.zeros(0, np.int32)]
        about = {"run": self._plan.run, "unit": self._unit.id, "penstock": code}
        objects = {
            layout.TOKENS: _small(tensors.encode({"tokens": tokens, "positions": positions}, about)),
            layout.INDEX: _small(index),
        }
        rows_sha256 = layout.rows_hash(
            (pieces[at].row, pieces[at].document, positions[at], pieces[at].tokens) for at in order
        )
        sites: dict[str, SiteFacts] = {}
        for site, writer in self._sites.items():  # last, because it waits for what is still being written
            objects[f"{site}.safetensors"], sites[site] = writer.finish({**about, "site": site})
        facts = UnitFacts(
            documents=len({piece.row for piece in pieces}),
            empty=sum(not len(piece.tokens) for piece in pieces),
            tokens=sum(len(piece.tokens) for piece in pieces),
            truncated=len({piece.row for piece in pieces if piece.dropped}),
            rows_sha256=rows_sha256,
            sizes=tuple(made.size for made in objects.values()),
            sites=sites,
            seconds=seconds,
            worker=worker,
            code=code,
        )
        return Content(objects, facts)


def _small(data: bytes) -> Made:
    return Made(len(data), ledger.checksum(data), data)


def _span_of(values: Array) -> _Span:
    """Where values lie in the memory of the array they are a view of, so that neighbours can be told."""
    owner = values.base
    if not isinstance(owner, np.ndarray) or not owner.flags.c_contiguous:
        return _Span(values, 0, values.nbytes)
    start = _address(values) - _address(owner)
    return _Span(owner, start, start + values.nbytes)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _hashed(parts: list[memoryview], dtype: str, draft: Draft, at: int) -> tuple[bytes, int]:
    return _digest(parts), _looked_over_and_written(parts, dtype, draft, at)


def _digest(parts: Iterable[Buffer]) -> bytes:
    found = ledger.block_hash(ledger.FAST_KIND)
    for part in parts:
        found.update(part)
    return found.digest()


def _looked_over_and_written(parts: list[memoryview], dtype: str, draft: Draft, at: int) -> int:
    """How many values are not finite."""
    odd = sum(_not_finite(part, dtype) for part in parts)
    draft.write(at, parts)
    return odd


def _not_finite(part: memoryview, dtype: str) -> int:
    """By the bits: their exponent is full. The largest of them, with a sign and without, tell whether there is any."""
    exponent = _EXPONENTS[dtype]
    size = tensors.dtype_of(dtype).itemsize
    plain, signed = (np.frombuffer(part, f"{kind}{size}") for kind in "ui")
    negative = exponent | 1 << (8 * size - 1)
    if int(signed.max()) < exponent and int(plain.max()) < negative:
        return 0
    return int(np.count_nonzero((plain & exponent) == exponent))


def _wide(bits: Array, dtype: str) -> NDArray[np.float64]:
    if dtype == "bfloat16":  # the upper half of a float32; its own conversion would keep the interpreter to itself
        return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32).astype(np.float64)
    return bits.view(dtype).astype(np.float64)
