"""Rows of one file, whatever its format: how many there are, where to begin for the nth, and the rows themselves.

`source` calls it. A row is a JSON-like mapping, or `Broken` with the reason; a row that cannot be read never stops the
rows after it. Files are read front to back in pieces of bounded size, never whole. A row's number is fixed by the file
alone: in text formats it is the line, so blank and malformed lines have numbers too.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import itertools
import math
import sys
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple, cast

import msgspec

from penstock.domain.admission import BadInput
from penstock.extract.pieces import DIGEST_LETTERS, Pieces
from penstock.objects.hashing import checksum_of_file
from penstock.ports.objects import Damaged

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from penstock.objects.inputs import Input

LINE_BYTES_MAX: Final = 64 << 20  #: of one row; a file without line ends must not fill the memory
MARK_BYTES: Final = 4 << 20  #: between two marks of a text file: what is read in vain to reach a row
BATCH_ROWS: Final = 256  #: of a columnar file, decoded at once
_CHUNK_BYTES: Final = 1 << 20
_EXCERPT_CHARACTERS: Final = 200
_BOM: Final = b"\xef\xbb\xbf"


class Format(StrEnum):
    """`text` is one document a line; `file` is one document a file."""

    JSONL = "jsonl"
    TEXT = "text"
    FILE = "file"
    PARQUET = "parquet"
    ARROW = "arrow"


#: By the end of a file's name, without a compression's own.
SUFFIXES: Final[Mapping[str, Format]] = {
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".txt": Format.TEXT,
    ".parquet": Format.PARQUET,
    ".arrow": Format.ARROW,
    ".feather": Format.ARROW,
}
COMPRESSED: Final = (".gz", ".zst")

Row = Mapping[str, object]


class Broken(NamedTuple):
    """A row that cannot be read: why, and how it begins."""

    reason: str
    excerpt: str


#: A line with nothing in it. It is a row as well, so that every row of a file is accounted for.
BLANK: Final = Broken("is a blank line", "")


class Mark(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where reading can begin: at `place` (a byte, a row group, a record batch) comes row `row` of the file.

    Of the rows up to the next mark: `digest` is the hash of their bytes, in formats that are read byte by byte, and
    `size` about how many bytes the wanted columns have, by which units are cut. Plans of older versions have neither.
    """

    row: int
    place: int
    digest: str = ""
    size: int = 0


class Extent(msgspec.Struct, frozen=True):
    """What one pass over a file finds out. `fingerprint` says which bytes: their hash, or the bucket's tag."""

    rows: int
    fingerprint: str
    marks: tuple[Mark, ...]
    columns: tuple[str, ...] | None  #: of a columnar file


def format_of(address: str) -> Format | None:
    """As the name says; None: the name says nothing."""
    name = address.rpartition("/")[2].lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    found = [kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)]
    columnar = found and found[0] in (Format.PARQUET, Format.ARROW)
    return None if not found or (columnar and address.endswith(COMPRESSED)) else found[0]


def measure(
    file: Input, opened: BinaryIO, kind: Format, tell: Callable[[], None], columns: Collection[str] | None = None
) -> Extent:
    """Count a file's rows and set marks; `tell` is called after each piece that was read. `columns`: those wanted."""
    with _damage_told(file, kind):
        match kind:
            case Format.JSONL | Format.TEXT:
                return _measure_lines(_inflated(file, opened), tell, MARK_BYTES)
            case Format.FILE:
                found = _measure_lines(_inflated(file, opened), tell, math.inf)
                return Extent(1, found.fingerprint, found.marks, None)
            case Format.PARQUET:
                return _measure_parquet(file, opened, tell, columns)
            case Format.ARROW:
                return _measure_arrow(file, opened, tell, columns)


def read_rows(
    file: Input, opened: BinaryIO, kind: Format, marks: Sequence[Mark], stop: int, columns: Collection[str] | None
) -> Iterator[tuple[int, Row | Broken]]:
    """Rows from the first mark to `stop`, each with its number; `marks` are that one and all behind it.

    What is read is compared with the marks' hashes, if they have some and no tag says which version is read.
    """
    with _damage_told(file, kind):
        if kind is Format.PARQUET:
            yield from _until(stop, _parquet_rows(file, opened, marks[0], columns))
        elif kind is Format.ARROW:
            yield from _until(stop, _arrow_rows(opened, marks[0], columns))
        else:
            read = {Format.JSONL: _json_rows, Format.TEXT: _text_rows, Format.FILE: _whole}[kind]
            inflated = _inflated(file, opened)
            if file.tag or not marks[0].digest:
                inflated.seek(marks[0].place)
                yield from _until(stop, read(inflated, marks[0].row))
                return
            needed = bisect_left(marks, stop, key=lambda mark: mark.row)
            end = marks[needed].place if needed < len(marks) else None
            pieces = Pieces(inflated, file.address, marks[:needed], end)
            buffered = cast("BinaryIO", io.BufferedReader(pieces, _CHUNK_BYTES))
            yield from _until(stop, read(buffered, marks[0].row))
            pieces.finish()


def hash_bytes(file: Input, opened: BinaryIO, kind: Format) -> str:
    """The fingerprint in plans of older versions: the SHA-256 of the file, of lines without their compression."""
    with _damage_told(file, kind):
        return _hash(_inflated(file, opened) if kind in (Format.JSONL, Format.TEXT) else opened)


def _until(stop: int, rows: Iterator[tuple[int, Row | Broken]]) -> Iterator[tuple[int, Row | Broken]]:
    return itertools.takewhile(lambda row: row[0] < stop, rows)


@contextlib.contextmanager
def _damage_told(file: Input, kind: Format) -> Iterator[None]:
    """A file that breaks off or was damaged is no row's fault: it is an error that names the file."""
    faults: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    if kind in (Format.PARQUET, Format.ARROW):
        import pyarrow as pa

        faults += (pa.ArrowException, OSError)  # it has OSError for pages that cannot be decoded
    if file.address.endswith(".zst"):
        faults += (zstd.ZstdError,)
    try:
        yield
    except faults as error:
        raise Damaged(f"{file.address}: cannot be read to its end, it is damaged: {_first_line(error)}") from error


def _inflated(file: Input, opened: BinaryIO) -> BinaryIO:
    """The file without its compression. Places in it count inflated bytes; reaching one means inflating all before."""
    if file.address.endswith(".gz"):
        return cast("BinaryIO", gzip.GzipFile(fileobj=opened))
    if file.address.endswith(".zst"):
        return cast("BinaryIO", zstd.ZstdFile(opened))
    return opened


def _hash(opened: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := opened.read(_CHUNK_BYTES):
        digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


# Lines.


def _measure_lines(opened: BinaryIO, tell: Callable[[], None], mark_bytes: float) -> Extent:
    """Rows are lines; a mark comes at the earliest so many bytes behind the last."""
    whole, piece = hashlib.sha256(), hashlib.sha256()
    rows, begin, row, place, chunk = 0, 0, 0, 0, b"\n"
    marks: list[Mark] = []

    def set_mark(end: int) -> None:
        marks.append(Mark(row, place, piece.hexdigest()[:DIGEST_LETTERS], end - place))

    while more := opened.read(_CHUNK_BYTES):
        chunk = more
        whole.update(chunk)
        rows += chunk.count(b"\n")
        after = chunk.rfind(b"\n") + 1
        if after and begin + after - place >= mark_bytes:
            piece.update(memoryview(chunk)[:after])
            set_mark(begin + after)
            row, place, piece = rows, begin + after, hashlib.sha256(memoryview(chunk)[after:])
        else:
            piece.update(chunk)
        begin += len(chunk)
        tell()
    if not chunk.endswith(b"\n"):
        rows += 1
    if begin > place or not marks:
        set_mark(begin)
    return Extent(rows, f"sha256:{whole.hexdigest()}", tuple(marks), None)


def _lines(opened: BinaryIO, number: int) -> Iterator[tuple[int, bytes | Broken]]:
    while line := opened.readline(LINE_BYTES_MAX + 1):
        if len(line) > LINE_BYTES_MAX and not line.endswith(b"\n"):
            beginning = line[:_EXCERPT_CHARACTERS]
            while line and not line.endswith(b"\n"):
                line = opened.readline(_CHUNK_BYTES)
            yield number, Broken(f"is longer than {LINE_BYTES_MAX} bytes", beginning.decode(errors="replace"))
        else:
            if number == 0:
                line = line.removeprefix(_BOM)
            yield number, line.rstrip(b"\r\n")
        number += 1


def _json_rows(opened: BinaryIO, first: int) -> Iterator[tuple[int, Row | Broken]]:
    decode = msgspec.json.Decoder().decode
    for number, line in _lines(opened, first):
        if isinstance(line, Broken):
            yield number, line
            continue
        if not line.strip():
            yield number, BLANK
            continue
        try:
            row = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            yield number, _broken(f"is not JSON: {error}", line)
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            yield number, _broken(f"is a JSON {type(row).__name__}, not an object", line)


def _text_rows(opened: BinaryIO, first: int) -> Iterator[tuple[int, Row | Broken]]:
    for number, line in _lines(opened, first):
        if isinstance(line, Broken):
            yield number, line
        else:
            yield number, _text(line) if line.strip() else BLANK


def _whole(opened: BinaryIO, first: int) -> Iterator[tuple[int, Row | Broken]]:
    data = opened.read(LINE_BYTES_MAX + 1)
    if len(data) > LINE_BYTES_MAX:
        yield first, _broken(f"is longer than {LINE_BYTES_MAX} bytes", data)
    else:
        yield first, _text(data.removeprefix(_BOM))


def _text(data: bytes) -> Row | Broken:
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError as error:
        return _broken(f"is not UTF-8: {error.reason} at byte {error.start}", data)


def _broken(reason: str, data: bytes) -> Broken:
    return Broken(reason, data[: 4 * _EXCERPT_CHARACTERS].decode(errors="replace")[:_EXCERPT_CHARACTERS])


# Columns.


def _fingerprint(file: Input, opened: BinaryIO, tell: Callable[[], None]) -> str:
    """Where a bucket names the version, its columnar files need not be read through only to name them."""
    if file.tag:
        return f"etag:{file.tag}"
    opened.seek(0)
    found = _hash(opened) if "://" in file.address else checksum_of_file(Path(file.address))
    opened.seek(0, io.SEEK_END)
    tell()
    return found


def _measure_parquet(
    file: Input, opened: BinaryIO, tell: Callable[[], None], columns: Collection[str] | None
) -> Extent:
    table = _parquet(file, opened)
    marks, rows = [], 0
    for number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(number)
        chunks = [group.column(each) for each in range(group.num_columns)]
        wanted = [each for each in chunks if columns is None or each.path_in_schema.partition(".")[0] in columns]
        marks.append(Mark(rows, number, size=sum(each.total_uncompressed_size for each in wanted)))
        rows += group.num_rows
    names = tuple(table.schema_arrow.names)
    return Extent(rows, _fingerprint(file, opened, tell), tuple(marks) or (Mark(0, 0),), names)


def _parquet(file: Input, opened: BinaryIO) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Pages as they are needed: the default fetches a whole row group, which may be the whole file.
        return pq.ParquetFile(opened, buffer_size=_CHUNK_BYTES, pre_buffer=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        rule = f"is not Parquet: {_first_line(error)}"
        raise BadInput("data", file.address, rule, "name its format, or mend it") from error


def _parquet_rows(
    file: Input, opened: BinaryIO, mark: Mark, columns: Collection[str] | None
) -> Iterator[tuple[int, Row | Broken]]:
    table = _parquet(file, opened)
    groups = list(range(mark.place, table.metadata.num_row_groups))
    wanted = None if columns is None else [name for name in table.schema_arrow.names if name in columns]
    number = mark.row
    for batch in table.iter_batches(BATCH_ROWS, row_groups=groups, columns=wanted, use_threads=False):
        for row in _plain(batch):
            yield number, row
            number += 1


def _measure_arrow(file: Input, opened: BinaryIO, tell: Callable[[], None], columns: Collection[str] | None) -> Extent:
    import pyarrow as pa

    try:
        random_access = _is_arrow_file(opened)
        marks, rows = [Mark(0, 0)], 0
        reader = pa.ipc.open_file(opened) if random_access else pa.ipc.open_stream(opened)
        names = tuple(reader.schema.names)
        wanted = [name for name in names if columns is None or name in columns]
        for index, batch in enumerate(_arrow_batches(reader, 0)):
            if random_access and rows > marks[-1].row:
                marks.append(Mark(rows, index))
            size = marks[-1].size + batch.select(wanted).nbytes
            marks[-1] = msgspec.structs.replace(marks[-1], size=size)
            rows += batch.num_rows
    except pa.ArrowInvalid as error:
        rule = f"is not Arrow: {_first_line(error)}"
        raise BadInput("data", file.address, rule, "name its format, or mend it") from error
    return Extent(rows, _fingerprint(file, opened, tell), tuple(marks), names)


def _arrow_rows(opened: BinaryIO, mark: Mark, columns: Collection[str] | None) -> Iterator[tuple[int, Row | Broken]]:
    import pyarrow as pa

    reader = pa.ipc.open_file(opened) if _is_arrow_file(opened) else pa.ipc.open_stream(opened)
    wanted = [name for name in reader.schema.names if columns is None or name in columns]
    number = mark.row
    for batch in _arrow_batches(reader, mark.place):
        for start in range(0, batch.num_rows, BATCH_ROWS):
            for row in _plain(batch.select(wanted).slice(start, BATCH_ROWS)):
                yield number, row
                number += 1


def _arrow_batches(
    reader: pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader, first: int
) -> Iterator[pa.RecordBatch]:
    if hasattr(reader, "num_record_batches"):
        for index in range(first, reader.num_record_batches):
            yield reader.get_batch(index)
    else:
        yield from reader


def _is_arrow_file(opened: BinaryIO) -> bool:
    """An IPC file has an index at its end; an IPC stream (what Hugging Face saves) has none."""
    opened.seek(0)
    magic = opened.read(6)
    opened.seek(0)
    return magic == b"ARROW1"


def _plain(batch: pa.RecordBatch) -> list[dict[str, object]]:
    return cast("list[dict[str, object]]", batch.to_pylist())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
