"""What a unit leaves in the bucket: one safetensors object per site, the tokens beside it, an Arrow index, and facts.

`worker` hands over the pieces that a unit's computation gave, in any order; `commit` stores what comes out. Rows have
no padding and lie as the pieces came; the index says where each document is. Here is decided, too, that a unit is
whole: each input row of its range must have given a piece, if only an empty one with a note. It must not talk to a
bucket.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.domain import ledger
from penstock.domain.ledger import Unit
from penstock.extract import tensors
from penstock.extract.plan import RunPlan
from penstock.extract.tensors import Array

INDEX: Final = "index.arrow"
TOKENS: Final = "tokens.safetensors"
VALUES: Final = "acts"  #: the tensor's name in a site's object
SAMPLED_ROWS: Final = 1024  #: of each site and unit, for means; all rows are looked at for what is not a number
_SCANNED_VALUES: Final = 1 << 20  #: at once, so that the masks stay in the processor's cache


class NotWhole(ValueError):
    """What a computation gave for a unit is not the unit."""


class Piece(NamedTuple):
    """Vectors of consecutive or chosen positions of one document, as one call of the model saw them."""

    row: int  #: of the input, counted over the whole run
    document: str
    tokens: NDArray[np.int32]  #: [n]
    sites: Mapping[str, Array]  #: by site name, [n, d]
    positions: NDArray[np.int32] | None = None  #: in the document, rising; None: 0 to n - 1
    file: str = ""
    offset: int = 0  #: line or record in the file
    truncated: bool = False
    note: str = ""  #: why there is nothing, if there is nothing


#: The pieces of a unit, from plan and unit alone: another worker must get the same. What can be prepared is done by the
#: call; the device works when pieces are asked for, and never for two units at once.
Compute = Callable[[RunPlan, Unit], Iterable[Piece]]


class SiteFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one site's vectors in one unit; means are over `sampled` rows, the rest over all."""

    width: int
    bytes: int
    sampled: int
    mean_norm: float
    mean: float
    max_abs: float
    not_finite: int


class UnitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit says about a unit beside its objects."""

    documents: int
    empty: int  #: documents of which nothing is stored
    tokens: int  #: rows of every site
    truncated: int
    rows_sha256: str  #: of input rows, documents, positions and tokens: see `rows_hash`
    sizes: tuple[int, ...]  #: of the objects, in their order
    sites: dict[str, SiteFacts]
    seconds: float  #: from claim to the last piece
    worker: str
    code: str


class UnitCommit(ledger.Commit, frozen=True, kw_only=True):
    facts: UnitFacts


def decode_commit(data: bytes) -> UnitCommit:
    return msgspec.json.decode(data, type=UnitCommit)


class Content(NamedTuple):
    """A unit, ready to be stored: objects by name, and what is known of them."""

    objects: dict[str, bytes]
    facts: UnitFacts


def encode_unit(
    plan: RunPlan, unit: Unit, pieces: Iterable[Piece], *, seconds: float, worker: str, code: str
) -> Content:
    """The unit's objects; raises `NotWhole` when the pieces are not what plan and unit ask for."""
    pieces = list(pieces)
    _check(plan, unit, pieces)
    index, order = _index(pieces)
    positions = [_positions(piece) for piece in pieces] or [np.zeros(0, np.int32)]
    token_parts = [piece.tokens for piece in pieces] or [np.zeros(0, np.int32)]
    about = {"run": plan.run, "unit": unit.id, "penstock": code}
    objects = {
        TOKENS: tensors.encode({"tokens": token_parts, "positions": positions}, about),
        INDEX: index,
    }
    sites: dict[str, SiteFacts] = {}
    for site in plan.sites:
        parts = _values(plan, site, pieces)
        objects[f"{site}.safetensors"] = tensors.encode({VALUES: parts}, {**about, "site": site})
        sites[site] = _site_facts(parts)
    facts = UnitFacts(
        documents=len({piece.row for piece in pieces}),
        empty=sum(not len(piece.tokens) for piece in pieces),
        tokens=sum(len(piece.tokens) for piece in pieces),
        truncated=sum(piece.truncated for piece in pieces),
        rows_sha256=rows_hash(
            (pieces[at].row, pieces[at].document, _positions(pieces[at]), pieces[at].tokens) for at in order
        ),
        sizes=tuple(len(data) for data in objects.values()),
        sites=sites,
        seconds=seconds,
        worker=worker,
        code=code,
    )
    return Content(objects, facts)


def rows_hash(pieces: Iterable[tuple[int, str, NDArray[np.int32], NDArray[np.int32]]]) -> str:
    """The hash of what a unit holds, by input row and first position; readers and checkers compute it again."""
    digest = hashlib.sha256()
    for row, document, positions, tokens in pieces:
        digest.update(msgspec.json.encode((row, document, len(tokens))))
        digest.update(np.ascontiguousarray(positions, "<i4").tobytes())
        digest.update(np.ascontiguousarray(tokens, "<i4").tobytes())
    return digest.hexdigest()


def read_index(data: bytes) -> Any:
    """The Arrow table of an index object."""
    import pyarrow as pa

    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        return reader.read_all()


def write_table(table: Any) -> bytes:
    """An Arrow table as a file that can be mapped into memory."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return bytes(sink.getvalue().to_pybytes())


def _check(plan: RunPlan, unit: Unit, pieces: list[Piece]) -> None:
    rows = {piece.row for piece in pieces}
    missing = [row for row in range(unit.start, unit.stop) if row not in rows]
    foreign = [row for row in rows if not unit.start <= row < unit.stop]
    if missing or foreign:
        raise NotWhole(f"{unit.id}: input rows {missing[:5]} gave nothing, rows {sorted(foreign)[:5]} are not its own")
    seen: set[tuple[int, int]] = set()
    for piece in pieces:
        where = f"{unit.id}, input row {piece.row}"
        if piece.tokens.dtype != np.int32 or piece.tokens.ndim != 1:
            raise NotWhole(f"{where}: tokens are {piece.tokens.dtype} {piece.tokens.shape} and should be int32 [n]")
        positions = _positions(piece)
        if len(positions) != len(piece.tokens) or np.any(np.diff(positions) <= 0):
            raise NotWhole(f"{where}: positions do not rise, or are not one for each token")
        for position in positions[:1].tolist():
            if (piece.row, position) in seen:
                raise NotWhole(f"{where}: position {position} begins two pieces")
            seen.add((piece.row, position))
        if not len(piece.tokens):
            continue
        if set(piece.sites) != set(plan.sites):
            raise NotWhole(f"{where}: sites are {sorted(piece.sites)} and should be {sorted(plan.sites)}")
        for site, values in piece.sites.items():
            if values.ndim != 2 or len(values) != len(piece.tokens):
                raise NotWhole(f"{where}: {site} is {values.shape} for {len(piece.tokens)} tokens")


def _positions(piece: Piece) -> NDArray[np.int32]:
    return np.arange(len(piece.tokens), dtype=np.int32) if piece.positions is None else piece.positions


def _values(plan: RunPlan, site: str, pieces: list[Piece]) -> list[Array]:
    dtype = tensors.dtype_of(plan.dtype)
    parts = [piece.sites[site].astype(dtype, copy=False) for piece in pieces if len(piece.tokens)]
    return parts or [np.zeros((0, 0), dtype)]


def _index(pieces: list[Piece]) -> tuple[bytes, list[int]]:
    """The index, by input row and position, and that order of the pieces."""
    import pyarrow as pa

    counts = np.asarray([len(piece.tokens) for piece in pieces], np.int64)
    starts = np.cumsum(counts) - counts
    firsts = [int(positions[0]) if len(positions := _positions(piece)) else 0 for piece in pieces]
    order = sorted(range(len(pieces)), key=lambda at: (pieces[at].row, firsts[at]))
    chosen = [pieces[at] for at in order]
    table = pa.table(
        {
            "row": pa.array([piece.row for piece in chosen], pa.int64()),
            "document": pa.array([piece.document for piece in chosen], pa.string()),
            "start": pa.array(starts[order], pa.int64()),
            "count": pa.array(counts[order], pa.int32()),
            "position": pa.array([firsts[at] for at in order], pa.int32()),
            "file": pa.array([piece.file for piece in chosen], pa.string()),
            "offset": pa.array([piece.offset for piece in chosen], pa.int64()),
            "truncated": pa.array([piece.truncated for piece in chosen], pa.bool_()),
            "note": pa.array([piece.note for piece in chosen], pa.string()),
        }
    )
    return write_table(table), order


def _site_facts(parts: list[Array]) -> SiteFacts:
    rows = sum(len(part) for part in parts)
    chosen = np.linspace(0, rows - 1, min(rows, SAMPLED_ROWS)).astype(np.int64) if rows else np.zeros(0, np.int64)
    sample = _take(parts, chosen).astype(np.float64)
    finite = sample[np.isfinite(sample).all(axis=1)] if len(sample) else sample
    return SiteFacts(
        width=parts[0].shape[1],
        bytes=sum(part.nbytes for part in parts),
        sampled=len(finite),
        mean_norm=float(np.linalg.norm(finite, axis=1).mean()) if len(finite) else 0.0,
        mean=float(finite.mean()) if finite.size else 0.0,
        max_abs=float(np.abs(finite).max()) if finite.size else 0.0,
        not_finite=sum(_not_finite(chunk) for part in parts for chunk in _chunks(part)),
    )


def _take(parts: list[Array], rows: NDArray[np.int64]) -> Array:
    """Rows of the joined parts, without joining them."""
    ends = np.cumsum([len(part) for part in parts])
    found = np.searchsorted(ends, rows, side="right")
    picked = [parts[part][row - (ends[part] - len(parts[part]))] for part, row in zip(found, rows, strict=True)]
    return np.stack(picked) if picked else np.zeros((0, parts[0].shape[1]), parts[0].dtype)


def _chunks(part: Array) -> Iterator[Array]:
    step = max(1, _SCANNED_VALUES // max(1, math.prod(part.shape[1:])))
    for start in range(0, len(part), step):
        yield part[start : start + step]


def _not_finite(values: Array) -> int:
    """By the exponent's bits: numpy has no fast test of bfloat16."""
    if values.dtype.itemsize == 4:
        bits: Array = np.ascontiguousarray(values).view(np.uint32)
        return int(np.count_nonzero((bits & 0x7F800000) == 0x7F800000))
    mask = 0x7F80 if values.dtype.name == "bfloat16" else 0x7C00
    bits = np.ascontiguousarray(values).view(np.uint16)
    return int(np.count_nonzero((bits & mask) == mask))
