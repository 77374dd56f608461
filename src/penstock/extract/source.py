"""Datasets: which files they are, how many rows, and the documents of any range of rows.

`Source.open` looks a dataset over once, when a run is planned; what it finds (files, sizes, hashes, marks) is plain
data and goes into the plan. Every worker then reads any range of rows with `documents`, without counting again: row n
is the same row everywhere and for ever, or an error that says which file changed. What is read is compared with the
plan: a bucket is asked for the very version, lines are hashed on their way, a columnar file of this machine as a whole
before its first row. Rows are numbered through all files, in the order of the files' names. Nothing here holds more
than one piece of one file in memory.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from penstock.domain import ledger
from penstock.domain.admission import BadInput
from penstock.extract import content, dataset_files
from penstock.extract.content import Content, Reading, Row, Unfit
from penstock.extract.formats import Broken, Format, Mark, hash_bytes, measure, read_rows
from penstock.extract.templates import Span
from penstock.objects.hashing import Identity, checksum_of_file, identity
from penstock.objects.inputs import Changed, Input, open_input

EXCERPT_CHARACTERS: Final = 200


class SourceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user asks for. `data` are files, folders, globs, dataset directories; `split` chooses a part of one."""

    data: tuple[str, ...]
    format: Format | None = None  #: None: as the files' names say
    split: str | None = None
    reading: Reading = Reading()


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file as it was when the dataset was looked over. `tag` is the bucket's own name for that version."""

    address: str
    size: int
    tag: str
    rows: int
    fingerprint: str
    marks: tuple[Mark, ...]


class Document(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One row's text or token ids. `row` counts through the dataset, `offset` within `file`, both from 0."""

    id: str
    row: int
    file: str
    offset: int
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    spans: tuple[Span, ...] | None = None  #: characters to keep; None: all
    flags: tuple[bool, ...] | None = None  #: tokens to keep; None: all


class Refused(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A row that gives no document, as the side file lists it. `line` counts from 1 within `file`."""

    file: str
    line: int
    row: int
    id: str | None = None  #: None: the row has none that can be read
    reason: str
    excerpt: str = ""


Refuse = Callable[[Refused], None]
Progress = Callable[[int, int], None]


def stop_at_first(refused: Refused) -> None:
    """What becomes of malformed rows where nobody said what should: they are an error, never lost in silence."""
    rule = f"line {refused.line} {refused.reason}"
    raise BadInput("data", refused.file, rule, "mend it, or have such rows set aside")


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A dataset that was looked over: plain data, to be written into a plan."""

    format: Format
    reading: Reading
    files: tuple[SourceFile, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @staticmethod
    def open(
        spec: SourceSpec,
        environment: Mapping[str, str] = os.environ,
        progress: Progress | None = None,
        *,
        whole_rows: bool = False,
    ) -> Source:
        """Look a dataset over: one pass over its files. `progress` hears of bytes done and bytes in all.

        `whole_rows`: rows will be taken as they are, so that nothing is asked of their columns.
        """
        content.check(spec.reading)
        wanted: frozenset[str] = frozenset() if whole_rows else content.columns(spec.reading)
        inputs, kind = dataset_files.find(spec.data, spec.format, spec.split, environment)
        whole, done, files = sum(each.size for each in inputs), 0, []
        for each in inputs:
            with open_input(each, environment) as opened:

                def tell(so_far: int = done, where: Callable[[], int] = opened.tell) -> None:
                    if progress is not None:
                        progress(so_far + where(), whole)

                extent = measure(each, opened, kind, tell, None if whole_rows else wanted)
            if extent.columns is not None and (missing := sorted(wanted - set(extent.columns))):
                rule = f"has no column {missing[0]!r}; it has {', '.join(extent.columns)}"
                raise BadInput("data", each.address, rule, "name one of these")
            done += each.size
            files.append(
                SourceFile(
                    address=each.address,
                    size=each.size,
                    tag=each.tag,
                    rows=extent.rows,
                    fingerprint=extent.fingerprint,
                    marks=extent.marks,
                )
            )
        if not sum(file.rows for file in files):
            raise BadInput("data", ", ".join(spec.data), f"has no rows in {len(files)} files", "look at the files")
        return Source(format=kind, reading=spec.reading, files=tuple(files))


def documents(
    source: Source,
    start: int = 0,
    stop: int | None = None,
    refuse: Refuse = stop_at_first,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Document]:
    """The documents of rows `start` to `stop`, in order. Each row gives one, or goes to `refuse`."""
    read = content.reading(source.reading)
    for found in raw_rows(source, start, stop, environment):
        made = document_of(found, read)
        if isinstance(made, Document):
            yield made
        else:
            refuse(made)


class RawRow(NamedTuple):
    """A row before anything was made of it: where it stands, and its columns or why it has none."""

    file: str
    number: int
    offset: int
    columns: Row | Broken


def raw_rows(
    source: Source,
    start: int = 0,
    stop: int | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    whole_rows: bool = False,
) -> Iterator[RawRow]:
    """Rows `start` to `stop`, all of them, with the columns that are needed, or with all."""
    stop = source.rows if stop is None else stop
    if not 0 <= start <= stop <= source.rows:
        raise BadInput("rows", f"{start}-{stop}", f"are not among the dataset's {source.rows}", "look at the plan")
    wanted = None if whole_rows else content.columns(source.reading)
    first = 0  # row of the dataset that is the first of the file
    for file in source.files:
        begin, end = max(start - first, 0), min(stop - first, file.rows)
        if begin < end:
            for offset, row in rows_of(file, source.format, begin, end, wanted, environment):
                yield RawRow(file.address, first + offset, offset, row)
        first += file.rows


def document_of(found: RawRow, read: Callable[[Row], Content]) -> Document | Refused:
    """What `read` (of `content.reading`) makes of a row."""
    file, number, offset, row = found
    if isinstance(row, Broken):
        return Refused(file=file, line=offset + 1, row=number, reason=row.reason, excerpt=row.excerpt)
    try:
        made = read(row)
    except Unfit as error:
        return Refused(file=file, line=offset + 1, row=number, id=error.id, reason=str(error), excerpt=_excerpt(row))
    return Document(
        id=str(number) if made.id is None else made.id,
        row=number,
        file=file,
        offset=offset,
        text=made.text,
        tokens=made.tokens,
        spans=made.spans,
        flags=made.flags,
    )


def rows_of(
    file: SourceFile,
    kind: Format,
    begin: int,
    end: int,
    columns: frozenset[str] | None,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[tuple[int, Mapping[str, object] | Broken]]:
    """Rows `begin` to `end` of one file, each with its number in the file; or `Changed`, if it is another file now."""
    first = bisect_right(file.marks, begin, key=lambda mark: mark.row) - 1
    known = Input(file.address, file.size, file.tag)
    with open_input(known, environment) as opened:
        # Nothing but the whole file's hash tells of a change where there is neither a tag nor a hash for each mark.
        alone = not (file.tag or file.marks[0].digest or "://" in file.address)
        begun = identity(opened.fileno()) if alone else None
        if begun is not None:
            _compare(file.address, file.fingerprint, kind, begun)
        for offset, row in read_rows(known, opened, kind, file.marks[first:], end, columns):
            if offset >= begin:
                yield offset, row
        if begun is not None and identity(opened.fileno()) != begun:
            raise Changed(f"{file.address}: was changed while it was read; put it back, or make a new run")


@functools.lru_cache(65_536)
def _compare(address: str, fingerprint: str, kind: Format, now: Identity) -> None:
    """Once in a process for a file that stays the same; a difference is not remembered."""
    path = Path(address)
    if fingerprint.startswith(ledger.BLOCKS_KIND):
        found = checksum_of_file(path)
    else:
        with path.open("rb", buffering=1 << 20) as opened:
            found = hash_bytes(Input(address, now.size, ""), opened, kind)
    if found != fingerprint or identity(path) != now:
        raise Changed(f"{address}: is not the file that the plan was made from; put it back, or make a new run")


def _excerpt(row: Mapping[str, object]) -> str:
    return msgspec.json.encode(row, enc_hook=str).decode()[:EXCERPT_CHARACTERS]
