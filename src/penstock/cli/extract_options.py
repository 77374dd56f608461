"""The options of `tpu extract` that make a plan: model, data, how rows become tokens, what is captured.

`cli.extract` takes them as one struct. Their rules are those of `extract`, which answers in one line; here is only how
they are written. It must not open anything.
"""

from __future__ import annotations

import click
import msgspec

from penstock.cli.words import grouped, text_or_file


class PlanOptions(msgspec.Struct, kw_only=True):
    """What the options were given."""

    model: str | None
    tokenizer: str | None
    data: tuple[str, ...]
    format: str | None
    split: str | None
    sites: str | None
    dtype: str
    column: str | None
    template: str | None
    chat: str | None
    token_column: str | None
    id_column: str | None
    filter: str
    open_answer: bool
    width: int | None
    cut: str
    overlap: int
    max_samples: int | None
    unit_rows: int | None


_OPTIONS = (
    click.option(
        "--model",
        metavar="DIR|NAME",
        help="A Hugging Face directory with safetensors, here or in a bucket; or ORG/NAME[@REVISION] on the Hub.",
    ),
    click.option("--tokenizer", metavar="DIR|FILE|NAME", help="tokenizer.json; the model's if left out."),
    click.option("--data", multiple=True, metavar="FILES", help="Files, folders, globs; may be repeated."),
    click.option(
        "--format",
        type=click.Choice(["jsonl", "parquet", "arrow", "text", "file"]),
        help="What the files are, where their names do not say it.",
    ),
    click.option("--split", metavar="NAME", help="Of a dataset directory that has several."),
    click.option("--sites", metavar="SITES", help="resid_post:10,12;attn_out:0-5;final_norm"),
    click.option(
        "--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True
    ),
    click.option("--column", metavar="NAME", help="The column with the text.  [default: text]"),
    click.option("--template", metavar="JINJA|@FILE", callback=text_or_file, help="The text from several columns."),
    click.option("--chat", metavar="COLUMN", help="A column of messages; the tokenizer's chat template writes them."),
    click.option("--tokens", "token_column", metavar="COLUMN", help="A column of token ids."),
    click.option("--id", "id_column", metavar="COLUMN", help="Names documents; the row's number if left out."),
    click.option("--open-answer", is_flag=True, help="End each chat where the model would begin to answer."),
    click.option(
        "--filter", default="all", show_default=True, metavar="WORD", help="all, last, every:N, mask:COLUMN, assistant."
    ),
    click.option(
        "--width",
        type=click.IntRange(1),
        metavar="N",
        help="Tokens of a packed row.  [default: 2048, or as many as the model has positions, if fewer]",
    ),
    click.option(
        "--cut",
        type=click.Choice(["head", "tail", "windows", "refuse"]),
        default="head",
        show_default=True,
        help="What becomes of longer documents.",
    ),
    click.option("--overlap", type=click.IntRange(0), default=0, metavar="N", help="Of windows, in tokens."),
    click.option(
        "--max-samples", type=int, metavar="N", help="Rows of the whole run, however many workers; all if left out."
    ),
    click.option("--unit-rows", type=click.IntRange(1), metavar="N", help="Rows of a unit; chosen if left out."),
)
#: Gives a command the options above; it takes them as one `PlanOptions` named `options`.
plan_options = grouped(_OPTIONS, PlanOptions, "options")
