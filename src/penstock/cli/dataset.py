"""`tpu dataset`: look a dataset over, cut it into streams, write prompts about grids.

Parses options, shows progress, prints. What a row is and what is wrong with one is decided in `extract`, which
`wiring.datasets` brings when a command runs. It contacts no server.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from penstock.cli import terminal
from penstock.cli.talk import Refused
from penstock.cli.terminal import safe
from penstock.cli.words import as_json as json_option
from penstock.cli.words import text_or_file

if TYPE_CHECKING:
    from penstock.wiring.datasets import Lengths, Look

_NOT_AVAILABLE: Final = 3
_SHOWN_EVERY_S: Final = 0.1
_SAMPLE_CHARACTERS: Final = 400
_STREAMS_SHOWN: Final = 8

F = TypeVar("F", bound=Callable[..., Any])

_DATA = click.argument("data", nargs=-1, required=True, metavar="DATA...")
_FORMAT = click.option(
    "--format",
    "kind",
    type=click.Choice(["jsonl", "parquet", "arrow", "text", "file"]),
    help="What the files are, where their names do not say it. text: a document a line; file: a document a file.",
)
_SPLIT = click.option("--split", "part", metavar="NAME", help="The split of a Hugging Face dataset directory.")
_REPLACE = click.option("--replace", is_flag=True, help="Write over what is there.")
_REFUSED = click.option("--refused", metavar="FILE", help="List the rows that give nothing here: file, line, reason.")


@click.group()
def dataset() -> None:
    """Datasets: JSON lines, Parquet, Arrow, text; files, folders, globs, gs:// and s3://.

    \b
    tpu dataset inspect data/*.jsonl --column text --tokenizer models/qwen
    tpu dataset split data/ --streams 32 --out streams/
    tpu dataset grids tasks.jsonl --column examples --out prompts.jsonl
    """


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What datasets are refused for, as errors of the command line."""
    from penstock.wiring.datasets import BadInput, ObjectsError

    try:
        yield
    except BadInput as error:
        raise click.UsageError(str(error)) from error
    except ObjectsError as error:
        raise Refused(str(error), _NOT_AVAILABLE) from error


def _shown(status: terminal.StatusLine, word: str, unit: Callable[[int], str]) -> Callable[[int, int], None]:
    """A progress that writes at most ten times a second."""
    last = [0.0]

    def show(done: int, whole: int) -> None:
        now = time.monotonic()
        if now - last[0] >= _SHOWN_EVERY_S:
            last[0] = now
            status.show(f"{word} {unit(done)} of {unit(whole)}, {100 * done / max(whole, 1):.0f}%")

    return show


def _count(number: int) -> str:
    return f"{number:,}"


@dataset.command()
@_DATA
@_FORMAT
@_SPLIT
@click.option("--column", metavar="NAME", help="The column with the text.  [default: text]")
@click.option(
    "--template", metavar="TEXT|@FILE", callback=text_or_file, help="A Jinja template that writes a row's text."
)
@click.option("--chat", metavar="NAME", help="The column with messages; the template comes with --tokenizer.")
@click.option("--open-answer", is_flag=True, help="End each chat where the model would begin to answer.")
@click.option("--tokens", metavar="NAME", help="The column with token ids.")
@click.option("--id", "id_column", metavar="NAME", help="The column that names documents.  [default: row number]")
@click.option("--filter", "keep", default="all", metavar="WORD", help="all, last, every:N, mask:COLUMN, assistant.")
@click.option("--tokenizer", metavar="PATH", help="A tokenizer.json or a model's directory: count tokens too.")
@click.option("--width", default=2048, show_default=True, type=click.IntRange(1), help="Tokens of a packed row.")
@click.option(
    "--cut",
    type=click.Choice(["head", "tail", "windows", "refuse"]),
    default="head",
    show_default=True,
    help="What becomes of longer documents.",
)
@click.option("--overlap", default=0, show_default=True, type=click.IntRange(0), help="Of windows, in tokens.")
@click.option("--rows", type=click.IntRange(1), help="Read so many rows only.")
@click.option("--samples", default=1, show_default=True, type=click.IntRange(0, 100), help="Documents to show.")
@click.option("--processes", default=0, show_default=True, type=click.IntRange(0, 256), help="For tokenising.")
@_REFUSED
@_REPLACE
@json_option
def inspect(data: tuple[str, ...], *, as_json: bool, refused: str | None, replace: bool, **options: Any) -> None:
    """Count rows, find malformed ones, measure lengths, and say how full packed rows would be.

    DATA is files, folders, globs (quoted), Hugging Face dataset directories, or the same in gs:// and s3://.
    Reads as a run would, with the same rules. Malformed rows are no error here: they are counted.
    """
    from penstock.wiring import datasets

    named = datasets.DataOptions(
        data=data,
        format=options["kind"],
        split=options["part"],
        column=options["column"],
        template=options["template"],
        chat=options["chat"],
        open_answer=options["open_answer"],
        tokens=options["tokens"],
        id=options["id_column"],
        filter=options["keep"],
        tokenizer=options["tokenizer"],
    )
    status = terminal.StatusLine()
    with _refusing():
        found, wrong = datasets.inspect(
            named,
            width=options["width"],
            cut=options["cut"],
            overlap=options["overlap"],
            rows=options["rows"],
            samples=options["samples"],
            processes=options["processes"],
            scanned=_shown(status, "scanned", terminal.size),
            read=_shown(status, "read row", _count),
        )
        status.clear()
        if refused is not None:
            datasets.write_refused(refused, wrong, replace=replace)
    if as_json:
        terminal.echo_json(found)
    else:
        _print_look(found, refused)


def _print_look(found: Look, refused: str | None) -> None:
    share = "" if found.rows_read == found.rows else f"; read: the first {found.rows_read:,}"
    facts = [
        ("format", found.format),
        ("files", f"{found.files:,}, {terminal.size(found.bytes)}"),
        ("rows", f"{found.rows:,}{share}"),
        ("documents", f"{found.documents:,}"),
        ("refused", f"{found.refused:,}" + (f", listed in {refused}" if refused and found.refused else "")),
    ]
    facts += [("", f"{count:,} {safe(reason)}") for reason, count in list(found.reasons.items())[:10]]
    if found.characters is not None:
        facts.append(("length", _lengths(found.characters, "characters")))
    if (tokens := found.tokens) is not None:
        facts.append(("tokens", _lengths(tokens.documents, "tokens")))
        facts.append(("cut", f"{tokens.cut:,} documents are longer than {tokens.width}; {tokens.passages:,} passages"))
        facts.append(("kept", f"{tokens.kept:,} tokens"))
        facts.append(("fill", f"{100 * tokens.fill:.1f}% of packed rows of {tokens.width} are real tokens"))
    terminal.echo_facts(facts)
    for sample in found.samples:
        click.echo(f"\n{click.style('sample', bold=True)}  {safe(sample[:_SAMPLE_CHARACTERS])}")


def _lengths(lengths: Lengths, unit: str) -> str:
    return (
        f"{lengths.total:,} {unit}; mean {lengths.mean:,.1f}, median {lengths.median:,}, "
        f"95% up to {lengths.p95:,}, longest {lengths.longest:,}"
    )


@dataset.command()
@_DATA
@_FORMAT
@_SPLIT
@click.option("--streams", required=True, type=click.IntRange(1), metavar="N", help="How many files.")
@click.option("--out", required=True, metavar="DIR", help="Where stream_000.jsonl, … go: here, in gs:// or s3://.")
@click.option("--contiguous", is_flag=True, help="Rows that follow one another stay together; else round robin.")
@click.option("--number", metavar="COLUMN", help="Give each row its number in this column.")
@click.option("--max-samples", type=click.IntRange(1), metavar="N", help="Take so many rows in all.")
@_REPLACE
@json_option
def split(data: tuple[str, ...], *, as_json: bool, replace: bool, **options: Any) -> None:
    """Cut a dataset into JSON-lines files that together hold each row once.

    Rows that cannot be read go to streams.refused in DIR with their lines; streams.json sums up.
    """
    from penstock.wiring import datasets

    named = datasets.DataOptions(data=data, format=options["kind"], split=options["part"])
    status = terminal.StatusLine()
    with _refusing():
        done = datasets.split(
            named,
            options["out"],
            streams=options["streams"],
            contiguous=options["contiguous"],
            number=options["number"],
            rows=options["max_samples"],
            replace=replace,
            scanned=_shown(status, "scanned", terminal.size),
            written=_shown(status, "wrote row", _count),
        )
    status.clear()
    if as_json:
        terminal.echo_json(done)
        return
    click.echo(f"{done.rows:,} rows in {len(done.streams)} streams, {done.order}; {done.refused:,} refused")
    for stream in done.streams[:_STREAMS_SHOWN]:
        click.echo(f"{stream.file}  {stream.rows:,}")
    if len(done.streams) > _STREAMS_SHOWN:
        click.echo(f"… and {len(done.streams) - _STREAMS_SHOWN} more: {options['out']}/streams.json has them all")


def _show_registries(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from penstock.wiring.datasets import registries

    rows = [(f"--{option}", name, about) for option, names in registries().items() for name, about in names.items()]
    terminal.echo_table(("OPTION", "NAME", "WHAT IT DOES"), rows)
    ctx.exit()


@dataset.command()
@_DATA
@_SPLIT
@click.option(
    "--out", required=True, metavar="FILE", help="Where the prompts go, as JSON lines: here, in gs:// or s3://."
)
@click.option("--column", metavar="NAME", help="The column with pairs of grids.  [default: train and test]")
@click.option("--id", "id_column", metavar="NAME", help="The column that names tasks.  [default: row number]")
@click.option("--encoder", default="shape(rows(minimal))", show_default=True, help="How grids are written.")
@click.option("--prompt", default="output-from-examples", show_default=True, help="What is asked.")
@click.option("--template", metavar="TEXT|@FILE", callback=text_or_file, help="Your own words, as a Jinja template.")
@click.option(
    "--system",
    metavar="TEXT|@FILE|none",
    callback=text_or_file,
    help="What the system says first; none for models whose chat template refuses that.  [default: our own words]",
)
@click.option("--augment", default="flip,rotate,colours,order", show_default=True, help="How variants differ; or none.")
@click.option("--variants", default=8, show_default=True, type=click.IntRange(1), help="Of each test.")
@click.option("--seed", default=42, show_default=True, type=int, help="What chance is drawn from.")
@click.option("--answers", is_flag=True, help="Add the right answer as the assistant's message.")
@click.option("--max-tasks", type=click.IntRange(1), metavar="N", help="Take so many tasks in all.")
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_show_registries, help="Show all names."
)
@_REFUSED
@_REPLACE
@json_option
def grids(data: tuple[str, ...], *, as_json: bool, refused: str | None, replace: bool, **options: Any) -> None:
    """Write prompts about tasks of coloured grids (ARC): each test, in several variants.

    Rows have train and test, or one column of pairs of which the last is the test; .json files are read as the
    challenge publishes them. The same seed gives the same prompts. Run the result with --chat messages --id id.
    """
    from penstock.wiring import datasets

    status = terminal.StatusLine()
    with _refusing():
        order = datasets.GridOrder(
            encoder=options["encoder"],
            prompt=options["prompt"],
            template=options["template"],
            system=datasets.parse_system(options["system"]),
            changes=datasets.parse_changes(options["augment"]),
            variants=options["variants"],
            seed=options["seed"],
            answers=options["answers"],
            column=options["column"],
            id=options["id_column"],
        )
        done, wrong = datasets.grids(
            datasets.DataOptions(data=data, split=options["part"]),
            options["out"],
            order,
            tasks=options["max_tasks"],
            replace=replace,
            progress=_shown(status, "wrote task", _count),
        )
        status.clear()
        if refused is not None:
            datasets.write_refused(refused, wrong, replace=replace)
    if as_json:
        terminal.echo_json(done)
        return
    click.echo(f"{done.prompts:,} prompts about {done.tasks:,} tasks; {done.refused:,} rows refused")
    if done.examples_left_out:
        click.echo(f"{done.examples_left_out:,} examples were left out: they are no grids")
