"""A dataset cut into streams: JSON-lines files that together hold each row once.

`tpu dataset split` calls it. Round robin puts row n into stream n modulo their number; contiguous streams follow one
another. Rows that cannot be read are set aside in a file of their own, with their lines; its name must not be one of
data, because whoever names the folder means the streams. Streams get their names only when all of them are whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from penstock.domain.admission import BadInput
from penstock.extract.dataset_files import OLD_REFUSED
from penstock.extract.formats import Broken
from penstock.extract.output_files import new_files, present, remove
from penstock.extract.source import Progress, Refused, Source, raw_rows

STREAMS_MAX: Final = 512  #: files open at once; systems allow about a thousand
REFUSED: Final = "streams.refused"
SUMMARY: Final = "streams.json"
_STREAM: Final = re.compile(r"stream_\d{3}\.jsonl", re.ASCII)
_TOLD_ROWS: Final = 1000  #: between two words of progress


class Stream(msgspec.Struct, frozen=True):
    file: str
    rows: int
    sha256: str


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """What was written; `streams.json` holds it."""

    rows: int
    refused: int
    order: str
    streams: tuple[Stream, ...]


def split(
    source: Source,
    out: str,
    *,
    streams: int,
    contiguous: bool = False,
    number: str | None = None,
    rows: int | None = None,
    replace: bool = False,
    environment: Mapping[str, str] = os.environ,
    progress: Progress | None = None,
) -> Split:
    """Write the streams into the folder `out`, a directory or a bucket's.

    `number` is a column that gets the row's number; `rows` is how many are taken in all.
    """
    if not 1 <= streams <= STREAMS_MAX:
        raise BadInput("streams", streams, f"is not between 1 and {STREAMS_MAX}", "use one for each worker")
    stop = source.rows if rows is None else min(rows, source.rows)
    there = present(out, environment)
    earlier = {name for name in there if _STREAM.fullmatch(name)}
    if earlier and not replace:
        raise BadInput("out", out, f"holds {len(earlier)} streams already", "choose another, or say --replace")
    names = [f"stream_{index:03d}.jsonl" for index in range(streams)]
    with new_files(out, [*names, REFUSED, SUMMARY], replace=replace, environment=environment) as files:
        *parts, refused, summary = files
        for row, data in _lines(source, stop, number, environment):
            if isinstance(data, Refused):
                refused.line(msgspec.json.encode(data))
            else:
                parts[row * streams // stop if contiguous else row % streams].line(data)
            if progress is not None and row % _TOLD_ROWS == 0:
                progress(row, stop)
        done = Split(
            rows=sum(part.lines for part in parts),
            refused=refused.lines,
            order="contiguous" if contiguous else "round robin",
            streams=tuple(Stream(name, part.lines, part.sha256) for name, part in zip(names, parts, strict=True)),
        )
        summary.line(msgspec.json.encode(done))
    # Of a wider or an older split: they would be taken for some of this one.
    older = bool(earlier) and REFUSED not in there
    of_earlier = earlier | ({OLD_REFUSED} & there if older else set())
    remove(out, sorted(of_earlier - set(names)), environment)
    return done


def _lines(
    source: Source, stop: int, number: str | None, environment: Mapping[str, str]
) -> Iterator[tuple[int, bytes | Refused]]:
    for found in raw_rows(source, 0, stop, environment, whole_rows=True):
        where, row = found.number, found.columns
        if isinstance(row, Broken):
            line = found.offset + 1
            yield where, Refused(file=found.file, line=line, row=where, reason=row.reason, excerpt=row.excerpt)
        else:
            whole = row if number is None else {**row, number: where}
            yield where, msgspec.json.encode(whole, enc_hook=str)
