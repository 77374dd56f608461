"""What a unit leaves in the bucket: one safetensors object per site, the tokens beside it, an Arrow index, and facts.

`unit_writer` makes the objects from the pieces that a unit's computation gave, in any order; `commit` stores them. Rows
have no padding and lie as the pieces came; the index says where each document is. Here is decided, too, that a unit is
whole: each input row of its range must have given a piece, if only an empty one with a note. It must not talk to a
bucket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.domain import ledger
from penstock.domain.ledger import Unit
from penstock.extract.plan import RunPlan
from penstock.extract.tensors import Array
from penstock.ports.objects import Damaged, Draft

INDEX: Final = "index.arrow"
TOKENS: Final = "tokens.safetensors"
VALUES: Final = "acts"  #: the tensor's name in a site's object


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
    note: str = ""  #: why there is nothing, if there is nothing
    excerpt: str = ""  #: of a row that gave nothing: its beginning
    total: int | None = None  #: tokens the document had before anything was cut; None: they were not counted
    first: int = 0  #: position in the document of the first token that the model saw in this call
    cut: str = ""  #: what was done to a document longer than a row: head, tail, windows
    dropped: int = 0  #: tokens of the document that no call of the model sees


class Course:
    """Pieces of a unit that the device works on, for whoever wants to know how far that is.

    `on_read` is called when whatever tokenises has got all of its input, which may have been before anybody asked for
    pieces; `on_fed` when the device has got the last of its work. Both on the thread that asks for the pieces.
    """

    def __init__(self, pieces: Generator[Piece, None, None]) -> None:
        self._pieces = pieces
        self.is_read = False
        self.on_read: Callable[[], object] = lambda: None
        self.on_fed: Callable[[], object] = lambda: None

    def was_read(self) -> None:
        self.is_read = True
        self.on_read()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def close(self) -> None:
        """No more pieces are wanted: what the device has of it makes room for the next unit."""
        self._pieces.close()


#: The pieces of a unit, from plan and unit alone: another worker must get the same. What can be prepared is done by the
#: call; the device works when pieces are asked for. It gets the work of one unit at a time: of the next only when the
#: pieces of this one were all there, or, of a `Course`, when it has told that it is fed.
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
    truncated: int  #: documents of which tokens were dropped
    rows_sha256: str  #: of input rows, documents, positions and tokens: see `rows_hash`
    sizes: tuple[int, ...]  #: of the objects, in their order
    sites: dict[str, SiteFacts]
    seconds: float  #: from claim to the last piece
    worker: str
    code: str


class UnitCommit(ledger.Commit, frozen=True, kw_only=True):
    edition: int = 0  #: how many commits of the unit were made void before this one
    facts: UnitFacts


def decode_commit(data: bytes) -> UnitCommit:
    try:
        return msgspec.json.decode(data, type=UnitCommit)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"a commit cannot be read: {error}") from error


class Made(NamedTuple):
    """An object that is ready to be stored."""

    size: int
    checksum: str
    data: bytes | Draft


class Content(NamedTuple):
    """A unit, ready to be stored: objects by name, and what is known of them."""

    objects: dict[str, Made]
    facts: UnitFacts


def rows_hash(pieces: Iterable[tuple[int, str, NDArray[np.int32], NDArray[np.int32]]]) -> str:
    """The hash of what a unit holds, by input row and first position; readers and checkers compute it again."""
    digest = hashlib.sha256()
    for row, document, positions, tokens in pieces:
        digest.update(msgspec.json.encode((row, document, len(tokens))))
        digest.update(np.ascontiguousarray(positions, "<i4").tobytes())
        digest.update(np.ascontiguousarray(tokens, "<i4").tobytes())
    return digest.hexdigest()


def shared_ids(index: Any) -> int:
    """How many ids of a run's index name several input rows of which something is stored."""
    import pyarrow.compute as pc

    rows = index.filter(pc.greater(index["count"], 0)).group_by("document").aggregate([("row", "count_distinct")])
    return int(pc.sum(pc.greater(rows["row_count_distinct"], 1), min_count=0).as_py())


def read_index(data: bytes) -> Any:
    """The Arrow table of an index object."""
    import pyarrow as pa

    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        return reader.read_all()


def object_of(commit: UnitCommit, name: str) -> ledger.DataObject:
    """A commit's object by its name; a damaged try has left its number behind the name."""
    for data in commit.objects:
        stem = data.path.rpartition("/")[2]
        if stem == name or (stem.startswith(f"{name}.") and stem.removeprefix(f"{name}.").isdecimal()):
            return data
    raise ledger.Incomplete(f"{commit.unit}: its commit names no {name}")


def write_table(table: Any) -> bytes:
    """An Arrow table as a file that can be mapped into memory."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return bytes(sink.getvalue().to_pybytes())


def check_piece(plan: RunPlan, unit: Unit, piece: Piece) -> None:
    """Raise `NotWhole` unless it can be a part of the unit."""
    where = f"{unit.id}, input row {piece.row}"
    if not unit.start <= piece.row < unit.stop:
        raise NotWhole(f"{where}: rows {unit.start} to {unit.stop - 1} are the unit's, others are not its own")
    if piece.tokens.dtype != np.int32 or piece.tokens.ndim != 1:
        raise NotWhole(f"{where}: tokens are {piece.tokens.dtype} {piece.tokens.shape} and should be int32 [n]")
    if piece.positions is not None and (
        len(piece.positions) != len(piece.tokens) or np.any(piece.positions[1:] <= piece.positions[:-1])
    ):
        raise NotWhole(f"{where}: positions do not rise, or are not one for each token")
    if not len(piece.tokens):
        return
    if piece.sites.keys() != set(plan.sites):
        raise NotWhole(f"{where}: sites are {sorted(piece.sites)} and should be {sorted(plan.sites)}")
    for site, values in piece.sites.items():
        if values.ndim != 2 or len(values) != len(piece.tokens):
            raise NotWhole(f"{where}: {site} is {values.shape} for {len(piece.tokens)} tokens")


def check_whole(unit: Unit, pieces: list[Piece]) -> None:
    """Raise `NotWhole` unless each input row has given a piece, and no position two."""
    rows = {piece.row for piece in pieces}
    missing = [row for row in range(unit.start, unit.stop) if row not in rows]
    if missing:
        raise NotWhole(f"{unit.id}: input rows {missing[:5]} gave nothing")
    seen: set[tuple[int, int]] = set()
    for piece in pieces:
        if len(piece.tokens):
            begins = (piece.row, first_position(piece))
            if begins in seen:
                raise NotWhole(f"{unit.id}, input row {piece.row}: position {begins[1]} begins two pieces")
            seen.add(begins)


def positions_of(piece: Piece) -> NDArray[np.int32]:
    return np.arange(len(piece.tokens), dtype=np.int32) if piece.positions is None else piece.positions


def first_position(piece: Piece) -> int:
    return 0 if piece.positions is None or not len(piece.positions) else int(piece.positions[0])


def make_index(pieces: list[Piece]) -> tuple[bytes, list[int]]:
    """The index, by input row and position, and that order of the pieces."""
    import pyarrow as pa

    counts = np.asarray([len(piece.tokens) for piece in pieces], np.int64)
    starts = np.cumsum(counts) - counts
    firsts = [first_position(piece) for piece in pieces]
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
            "truncated": pa.array([piece.dropped > 0 for piece in chosen], pa.bool_()),
            "total": pa.array([piece.total for piece in chosen], pa.int64()),
            "first": pa.array([piece.first for piece in chosen], pa.int64()),
            "cut": pa.array([piece.cut for piece in chosen], pa.string()),
            "dropped": pa.array([piece.dropped for piece in chosen], pa.int64()),
            "note": pa.array([piece.note for piece in chosen], pa.string()),
            "excerpt": pa.array([piece.excerpt for piece in chosen], pa.string()),
        }
    )
    return write_table(table), order
