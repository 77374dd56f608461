"""Tasks of grids from any dataset, and prompts about them as one file of JSON lines.

`tpu dataset grids` calls it. Tasks are rows of a dataset, or `.json` files as the challenge publishes them: one task a
file, or many by name in one. A task without a name of its own is called after its row's number, `task_0000002a`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from penstock.domain.admission import BadInput
from penstock.extract import grid_prompts
from penstock.extract.dataset_look import REFUSED_KEPT
from penstock.extract.formats import Broken
from penstock.extract.grid_prompts import GridOrder, prompts
from penstock.extract.grids import NotAGrid
from penstock.extract.output_files import new_file
from penstock.extract.source import Progress, Refused, Source, SourceSpec, raw_rows
from penstock.objects.inputs import Input, find_inputs, open_input

FILE_BYTES_MAX: Final = 256 << 20  #: of one `.json`; the largest set that is published so has 7 MB
_TOLD_TASKS: Final = 100


class GridsWritten(msgspec.Struct, frozen=True, kw_only=True):
    tasks: int
    prompts: int
    refused: int
    examples_left_out: int
    sha256: str


class _Found(NamedTuple):
    """A task, or why there is none, and where it stands."""

    name: str
    file: str
    line: int
    row: int
    columns: Mapping[str, Any] | Broken


def write_prompts(
    data: Sequence[str],
    out: str,
    order: GridOrder,
    *,
    split: str | None = None,
    tasks: int | None = None,
    replace: bool = False,
    environment: Mapping[str, str] = os.environ,
    progress: Progress | None = None,
) -> tuple[GridsWritten, list[Refused]]:
    """Prompts about the first `tasks` tasks; also the rows that are none, as a side file lists them."""
    grid_prompts.check(order)
    refused: list[Refused] = []
    count = wrong = left_out = 0
    found, whole = _tasks(data, split, order.id, environment)
    stop = whole if tasks is None else min(tasks, whole)
    with new_file("out", out, replace=replace, environment=environment) as file:
        for each in found:
            if each.row >= stop:
                break
            try:
                if isinstance(each.columns, Broken):
                    raise NotAGrid(each.columns.reason)
                lines = list(prompts(each.columns, each.name, order))
            except NotAGrid as error:
                wrong += 1
                if len(refused) < REFUSED_KEPT:
                    refused.append(Refused(file=each.file, line=each.line, row=each.row, reason=str(error)))
                continue
            count += 1
            left_out += lines[0]["examples_left_out"]
            for line in lines:
                file.line(msgspec.json.encode(line))
            if progress is not None and count % _TOLD_TASKS == 0:
                progress(each.row, stop)
        if not count:
            reason = refused[0].reason if refused else "there is nothing"
            raise BadInput("data", ", ".join(data), f"has no task: line 1 {reason}", "name the column of pairs")
        done = GridsWritten(
            tasks=count, prompts=file.lines, refused=wrong, examples_left_out=left_out, sha256=file.sha256
        )
    return done, refused


def _tasks(
    data: Sequence[str], split: str | None, id: str | None, environment: Mapping[str, str]
) -> tuple[Iterator[_Found], int]:
    published = [each for address in data for each in find_inputs(address, environment)]
    if published and all(each.address.endswith(".json") for each in published):
        found = [task for file in published for task in _published(file, environment)]
        return iter([each._replace(row=row) for row, each in enumerate(found)]), len(found)
    source = Source.open(SourceSpec(data=tuple(data), split=split), environment, whole_rows=True)
    return _rows(source, id, environment), source.rows


def _rows(source: Source, id: str | None, environment: Mapping[str, str]) -> Iterator[_Found]:
    for file, number, offset, columns in raw_rows(source, environment=environment, whole_rows=True):
        name = f"task_{number:08x}"
        if id is not None and not isinstance(columns, Broken):
            name = str(columns.get(id) or name)
        yield _Found(name, file, offset + 1, number, columns)


def _published(file: Input, environment: Mapping[str, str]) -> list[_Found]:
    if file.size > FILE_BYTES_MAX:
        raise BadInput("data", file.address, f"has {file.size} bytes, more than {FILE_BYTES_MAX}", "use JSON lines")
    with open_input(file, environment) as opened:
        try:
            value = msgspec.json.decode(opened.read(), type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadInput("data", file.address, f"is no JSON object: {error}", "mend it, or leave it out") from error
    stem = file.address.rpartition("/")[2].removesuffix(".json")
    tasks = {stem: value} if "train" in value else value
    return [
        _Found(name, file.address, 1, 0, task if isinstance(task, dict) else Broken("is no task", ""))
        for name, task in tasks.items()
    ]
