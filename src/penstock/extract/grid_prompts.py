"""Conversations about tasks of grids: rows for a dataset that any chat model can be asked with.

`tpu dataset grids` writes them as JSON lines; extraction then reads them like any other chat. A row tells all it was
made from (encoder, prompt, seed, changes), so that an answer can be read and turned back. Prompts are Jinja templates
from a registry, or the user's own; both run in the sandbox of `templates`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from penstock.domain.admission import BadInput
from penstock.extract import grid_changes, grids
from penstock.extract.grid_changes import Change, Pair, Task
from penstock.extract.grids import Encoder, NotAGrid, as_grid
from penstock.extract.templates import Unrendered, columns_of, render_row

SEED: Final = 42
VARIANTS: Final = 8  #: of each test: every way to lay a grid once
SYSTEM: Final = "You solve puzzles about coloured grids. Each symbol is a colour."
_EXAMPLES: Final = (
    "{% for example in examples %}Example {{ loop.index }}\n\nInput:\n{{ example.input }}\n\n"
    "Output:\n{{ example.output }}\n\n{% endfor %}"
)


class Prompt(msgspec.Struct, frozen=True):
    """What the user says and what the right answer is. Templates see `examples`, `question`, `answer` and `row`."""

    about: str
    user: str
    answer: str | None = None


PROMPTS: Final[Mapping[str, Prompt]] = {
    "output-from-examples": Prompt(
        "the output of a new input, from examples",
        f"One rule turns each input into its output.\n\n{_EXAMPLES}"
        "Apply the rule to this input.\n\nInput:\n{{ question }}\n\nOutput:\n",
        "{{ answer }}",
    ),
    "input-from-inputs": Prompt(
        "one more input like the others",
        "These grids are inputs of one puzzle. Make another one like them.\n\n"
        "{% for example in examples %}Grid {{ loop.index }}\n\n{{ example.input }}\n\n{% endfor %}Another grid:\n",
        "{{ question }}",
    ),
    "output-from-outputs": Prompt(
        "one more output like the others",
        "These grids are outputs of one puzzle. Make another one like them.\n\n"
        "{% for example in examples %}Grid {{ loop.index }}\n\n{{ example.output }}\n\n{% endfor %}Another grid:\n",
        "{{ answer }}",
    ),
    "code-from-examples": Prompt(
        "a program that applies the rule; rows with answers have it in the column code",
        f"One rule turns each input into its output.\n\n{_EXAMPLES}"
        "Write a Python function that takes an input grid and returns its output grid.\n",
        "```python\n{{ row.code }}\n```",
    ),
    "output-from-code": Prompt(
        "the output of an input, from the program in the column code",
        "This program turns an input grid into its output grid.\n\n```python\n{{ row.code }}\n```\n\n"
        "Apply it to this input.\n\nInput:\n{{ question }}\n\nOutput:\n",
        "{{ answer }}",
    ),
}


class GridOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be written. `column` holds pairs of grids, the last one being the test; None: `train` and `test`."""

    encoder: str = grids.DEFAULT
    prompt: str = "output-from-examples"
    template: str | None = None  #: the user's own words, in the place of `prompt`
    system: str | None = (
        SYSTEM  #: what is said first; None: nothing, for models whose template refuses a system's message
    )
    changes: tuple[str, ...] = tuple(grid_changes.CHANGES)
    variants: int = VARIANTS
    seed: int = SEED
    answers: bool = False
    column: str | None = None
    id: str | None = None


def parse_system(words: str | None) -> str | None:
    """What an option says the system's message is: None where it is not given, `none` for no message."""
    return SYSTEM if words is None else None if words == "none" else words


def check(order: GridOrder) -> None:
    grids.encoder(order.encoder)
    if order.prompt not in PROMPTS:
        raise BadInput("prompt", order.prompt, "is no prompt", f"use {', '.join(PROMPTS)}, or a template of your own")
    if order.template is not None:
        strange = columns_of(order.template) - {"examples", "question", "answer", "row"}
        if strange:
            raise BadInput("template", min(strange), "is not known there", "use examples, question, answer or row")
        if order.answers:
            raise BadInput("answers", True, "goes with our own prompts", "write the answer into your template")
    if order.system is not None and not order.system.strip():
        raise BadInput("system", order.system, "says nothing", "give its words, or none for no such message")
    if not 1 <= order.variants <= grid_changes.VARIANTS_MAX:
        raise BadInput("variants", order.variants, f"is not between 1 and {grid_changes.VARIANTS_MAX}")


def read_task(row: Mapping[str, Any], column: str | None) -> tuple[Task, int]:
    """A row's task, and how many of its examples were left out because they are no grids; raises `NotAGrid`."""
    if column is not None:
        pairs = row.get(column)
        if not isinstance(pairs, Sequence) or isinstance(pairs, str) or len(pairs) < 2:
            raise NotAGrid(f"column {column!r} does not hold two pairs of grids or more")
        train: Sequence[Any] = pairs[:-1]
        test: Sequence[Any] = pairs[-1:]
    else:
        train, test = row.get("train") or (), row.get("test") or ()
        if not isinstance(train, Sequence) or not isinstance(test, Sequence) or not train or not test:
            raise NotAGrid("has no lists train and test")
    found: list[Pair] = []
    for pair in train:
        try:
            found.append(_pair(pair, whole=True))
        except NotAGrid:
            continue  # counted below; a task with one good example is still a task
    if not found:
        raise NotAGrid("has no example that is a pair of grids")
    return Task(tuple(found), tuple(_pair(pair, whole=False) for pair in test)), len(train) - len(found)


def _pair(value: object, *, whole: bool) -> Pair:
    match value:
        case {"input": first, **rest}:
            second = rest.get("output")
        case [first, second]:
            pass
        case [first]:
            second = None
        case _:
            raise NotAGrid("has something else than pairs of grids")
    return Pair(as_grid(first), as_grid(second) if whole or second is not None else None)


def prompts(row: Mapping[str, Any], name: str, order: GridOrder) -> Iterator[dict[str, Any]]:
    """The conversations of one row: every test in every variant. Raises `NotAGrid` for what is no task."""
    write = grids.encoder(order.encoder)
    task, left_out = read_task(row, order.column)
    for test in range(len(task.test)):
        for variant in range(order.variants):
            changes = grid_changes.draw(
                order.changes, seed=order.seed, task=name, variant=variant, examples=len(task.train)
            )
            messages = _messages(grid_changes.apply(task, changes), test, write, row, order)
            yield {
                "id": f"{name}/{test}/{variant}",
                "messages": messages,
                "task": name,
                "test": test,
                "variant": variant,
                "encoder": order.encoder,
                "prompt": order.prompt if order.template is None else "template",
                "seed": order.seed,
                "changes": msgspec.to_builtins(changes),
                "examples_left_out": left_out,
            }


def _messages(task: Task, test: int, write: Encoder, row: Mapping[str, Any], order: GridOrder) -> list[dict[str, str]]:
    pair = task.test[test]
    prompt = PROMPTS[order.prompt]
    values = {
        "examples": [
            {"input": write.to_text(each.input), "output": "" if each.output is None else write.to_text(each.output)}
            for each in task.train
        ],
        "question": write.to_text(pair.input),
        "row": row,
    }
    if pair.output is not None:
        values["answer"] = write.to_text(pair.output)
    try:
        messages = [] if order.system is None else [{"role": "system", "content": order.system}]
        messages.append({"role": "user", "content": render_row(order.template or prompt.user, values)})
        if order.answers and prompt.answer is not None:
            messages.append({"role": "assistant", "content": render_row(prompt.answer, values)})
    except Unrendered as error:
        raise NotAGrid(str(error)) from error
    return messages


def undo_answer(text: str, row: Mapping[str, Any]) -> grids.Grid:
    """What a model answered to a row of ours, as it would be without the row's changes."""
    changes = msgspec.convert(row["changes"], tuple[Change, ...])
    return grid_changes.undo_grid(grids.encoder(row["encoder"]).to_grid(text), changes)
