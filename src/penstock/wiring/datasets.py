"""Datasets for the command line: options become a source, and the work of `tpu dataset` is handed to `extract`.

`tpu dataset` imports it inside its commands: pyarrow, jinja2 and the tokenizers are loaded by then and not before. It
adds nothing to what `extract` decides.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from penstock.domain.admission import BadInput
from penstock.extract import dataset_look, dataset_split, grid_files
from penstock.extract.content import Reading
from penstock.extract.dataset_look import Lengths, Look
from penstock.extract.dataset_split import Split
from penstock.extract.formats import Format
from penstock.extract.grid_changes import CHANGES, parse_changes
from penstock.extract.grid_files import GridsWritten
from penstock.extract.grid_prompts import PROMPTS, GridOrder, parse_system
from penstock.extract.grids import ENCODERS
from penstock.extract.output_files import new_file
from penstock.extract.source import Progress, Refused, Source, SourceSpec
from penstock.extract.tokens import Cut, Keep, Rules, load_chat_template, parse_filter
from penstock.objects import hub
from penstock.ports.objects import ObjectsError

__all__ = [
    "BadInput",
    "DataOptions",
    "GridOrder",
    "GridsWritten",
    "Lengths",
    "Look",
    "ObjectsError",
    "Split",
    "grids",
    "inspect",
    "model_address",
    "parse_changes",
    "parse_system",
    "reading_of",
    "registries",
    "split",
    "write_refused",
]

SAMPLED_ROWS: Final = 1000  #: in which documents to show are looked for


class DataOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a dataset is named and read, as options say it; all that is not given is None."""

    data: tuple[str, ...]
    format: str | None = None
    split: str | None = None
    column: str | None = None
    template: str | None = None
    chat: str | None = None
    tokens: str | None = None
    id: str | None = None
    filter: str = "all"
    open_answer: bool = False
    tokenizer: str | None = None


def model_address(field: str, text: str, environment: Mapping[str, str] = os.environ) -> str:
    """A directory or a bucket as it is; what can only be a name on the Hub, with the commit that it means now."""
    if text.startswith(f"{hub.SCHEME}://"):
        return hub.pin(field, text, environment)
    if not hub.is_name(text) or Path(text).exists():
        return text
    try:
        return hub.pin(field, text, environment)
    except ObjectsError as error:
        raise ObjectsError(f"{text} is no directory here, and as a name on the Hub: {error}") from error


def reading_of(options: DataOptions, environment: Mapping[str, str] = os.environ) -> tuple[Reading, Keep]:
    """Where a row's text is, and which of its tokens are kept. A chat template comes from the tokenizer's directory."""
    if options.column is not None and (options.template or options.chat or options.tokens):
        raise BadInput("column", options.column, "is given together with another place of the text", "give one")
    template = None
    if options.chat is not None:
        if options.tokenizer is None:
            raise BadInput("chat", options.chat, "needs a chat template", "name the model's directory with --tokenizer")
        template = load_chat_template(options.tokenizer, environment)
    plain = Reading(
        column=options.column or "text",
        template=options.template,
        chat=options.chat,
        chat_template=template,
        tokens=options.tokens,
        id=options.id,
        open_answer=options.open_answer,
    )
    return parse_filter(options.filter, plain)


def _spec(options: DataOptions, reading: Reading) -> SourceSpec:
    kind = None if options.format is None else Format(options.format)
    return SourceSpec(data=options.data, format=kind, split=options.split, reading=reading)


def inspect(
    options: DataOptions,
    *,
    width: int,
    cut: str,
    overlap: int,
    rows: int | None,
    samples: int,
    processes: int,
    scanned: Progress,
    read: Progress,
) -> tuple[Look, list[Refused]]:
    """Look a dataset over; with a tokenizer, or where rows bring token ids, in tokens too."""
    if options.tokenizer is not None:
        options = msgspec.structs.replace(options, tokenizer=model_address("tokenizer", options.tokenizer))
    reading, keep = reading_of(options)
    rules = Rules(width=width, cut=Cut(cut), overlap=overlap, keep=keep)
    source = Source.open(_spec(options, reading), progress=scanned)
    if options.tokenizer is None and options.tokens is None:
        return dataset_look.look(source, rows=rows, samples=samples, progress=read)
    shown, _ = dataset_look.look(source, rows=min(rows or source.rows, SAMPLED_ROWS), samples=samples)
    found, refused = dataset_look.look_at_tokens(
        source, rules, options.tokenizer, rows=rows, processes=processes, progress=read
    )
    return msgspec.structs.replace(found, samples=shown.samples), refused


def split(
    options: DataOptions,
    out: str,
    *,
    streams: int,
    contiguous: bool,
    number: str | None,
    rows: int | None,
    replace: bool,
    scanned: Progress,
    written: Progress,
) -> Split:
    """Cut a dataset into streams."""
    source = Source.open(_spec(options, Reading()), progress=scanned, whole_rows=True)
    return dataset_split.split(
        source,
        out,
        streams=streams,
        contiguous=contiguous,
        number=number,
        rows=rows,
        replace=replace,
        progress=written,
    )


def grids(
    options: DataOptions, out: str, order: GridOrder, *, tasks: int | None, replace: bool, progress: Progress
) -> tuple[GridsWritten, list[Refused]]:
    """Write prompts about tasks of grids."""
    return grid_files.write_prompts(
        options.data, out, order, split=options.split, tasks=tasks, replace=replace, progress=progress
    )


def write_refused(path: str, refused: list[Refused], *, replace: bool) -> None:
    """The side file: a JSON line for each row that gives nothing."""
    with new_file("refused", path, replace=replace) as file:
        for each in refused:
            file.line(msgspec.json.encode(each))


def registries() -> dict[str, dict[str, str]]:
    """What can be named for grids, and a line about each."""
    return {
        "encoder": {name: entry.about for name, entry in ENCODERS.items()},
        "augment": {name: kind.about for name, kind in CHANGES.items()},
        "prompt": {name: prompt.about for name, prompt in PROMPTS.items()},
    }
