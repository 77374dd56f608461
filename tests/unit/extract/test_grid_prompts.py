"""Prompts about grids: rows of both known shapes, answers that can be turned back, all it takes to repeat them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.admission import BadInput
from penstock.extract import grids
from penstock.extract.grid_prompts import PROMPTS, GridOrder, check, parse_system, prompts, read_task, undo_answer
from penstock.extract.grids import NotAGrid
from penstock.extract.templates import ChatTemplate, Unrendered, render_chat
from tests.unit.extract.chat_templates import GEMMA2
from tests.unit.extract.test_grids import encoders

A, B, C, D = [[1, 2]], [[2, 1]], [[3], [4]], [[4], [3]]
ARC: dict[str, Any] = {
    "train": [{"input": A, "output": B}, {"input": C, "output": D}],
    "test": [{"input": [[5, 6]], "output": [[6, 5]]}, {"input": [[7, 8]]}],
    "code": "def f(g): ...",
}
PAIRS = {"examples": [[A, B], [C, D], [[[5, 6]], [[6, 5]]]]}


def test_both_shapes_of_rows_are_read() -> None:
    arc, left_out = read_task(ARC, None)
    pairs, _ = read_task(PAIRS, "examples")
    assert arc.train == pairs.train
    assert left_out == 0
    assert len(arc.test) == 2
    assert arc.test[1].output is None
    assert pairs.test == arc.test[:1]


def test_examples_that_are_no_grids_are_left_out_and_counted() -> None:
    row = {"examples": [[A, B], [A, "x"], [[[99]], B], [C, D]]}
    task, left_out = read_task(row, "examples")
    assert (len(task.train), left_out) == (1, 2)
    (made, *_) = prompts(row, "t", GridOrder(column="examples"))
    assert made["examples_left_out"] == 2


@pytest.mark.parametrize(
    ("row", "column", "reason"),
    [
        ({}, None, "has no lists train and test"),
        ({"train": [], "test": []}, None, "has no lists train and test"),
        ({"examples": [[A, B]]}, "examples", "does not hold two pairs"),
        ({"examples": "xx"}, "examples", "does not hold two pairs"),
        ({}, "examples", "does not hold two pairs"),
        ({"examples": [[A, 1], [A, B]]}, "examples", "has no example that is a pair of grids"),
        ({"examples": [[A, B], 7]}, "examples", "has something else than pairs of grids"),
        ({"train": [{"input": A, "output": B}], "test": [{"input": [[77]]}]}, None, "has a cell 77"),
    ],
)
def test_what_is_no_task_says_why(row: dict[str, Any], column: str | None, reason: str) -> None:
    with pytest.raises(NotAGrid, match=reason):
        list(prompts(row, "t", GridOrder(column=column)))


def test_every_test_comes_in_every_variant_with_all_it_was_made_from() -> None:
    made = list(prompts(ARC, "t", GridOrder(variants=3)))
    assert [row["id"] for row in made] == ["t/0/0", "t/0/1", "t/0/2", "t/1/0", "t/1/1", "t/1/2"]
    assert {row["encoder"] for row in made} == {"shape(rows(minimal))"}
    assert {row["seed"] for row in made} == {42}
    assert [change["name"] for change in made[0]["changes"]] == ["flip", "rotate", "colours", "order"]
    assert [message["role"] for message in made[0]["messages"]] == ["system", "user"]
    assert made == list(prompts(ARC, "t", GridOrder(variants=3)))
    assert made != list(prompts(ARC, "t", GridOrder(variants=3, seed=43)))


def test_without_changes_the_prompt_shows_the_task_as_it_is() -> None:
    (made,) = prompts(PAIRS, "t", GridOrder(column="examples", changes=(), variants=1, encoder="minimal", answers=True))
    user, assistant = made["messages"][1]["content"], made["messages"][2]["content"]
    assert user == (
        "One rule turns each input into its output.\n\n"
        "Example 1\n\nInput:\n12\n\nOutput:\n21\n\n"
        "Example 2\n\nInput:\n3\n4\n\nOutput:\n4\n3\n\n"
        "Apply the rule to this input.\n\nInput:\n56\n\nOutput:"
    )
    assert assistant == "65"


@given(encoders, st.integers(0, 20))
def test_an_answer_is_turned_back_into_the_grid_of_the_task(words: str, seed: int) -> None:
    for made in prompts(PAIRS, "t", GridOrder(column="examples", encoder=words, seed=seed, answers=True)):
        kept = msgspec.json.decode(msgspec.json.encode(made))
        assert undo_answer(made["messages"][2]["content"], kept) == ((6, 5),)


@pytest.mark.parametrize("name", PROMPTS)
def test_every_prompt_of_the_registry_can_be_written(name: str) -> None:
    order = GridOrder(prompt=name, answers=True, variants=1, changes=())
    row = {**ARC, "test": ARC["test"][:1]}
    check(order)
    (made,) = prompts(row, "t", order)
    assert made["prompt"] == name
    assert all(message["content"] for message in made["messages"])
    assert PROMPTS[name].about


def test_an_answer_that_is_not_known_sets_the_row_aside() -> None:
    with pytest.raises(NotAGrid, match="'answer' is undefined"):
        list(prompts(ARC, "t", GridOrder(answers=True)))


def test_prompts_in_the_users_own_words() -> None:
    order = GridOrder(template="{{ row.code }}: {{ question }}", variants=1, changes=(), encoder="minimal")
    check(order)
    (made, _) = prompts(ARC, "t", order)
    assert made["messages"][1]["content"] == "def f(g): ...: 56"
    assert made["prompt"] == "template"


@pytest.mark.parametrize("template", [None, "{{ question }}"])
def test_the_system_says_what_it_is_told_or_nothing(template: str | None) -> None:
    def roles(**how: Any) -> list[tuple[str, bool]]:
        order = GridOrder(variants=1, template=template, **how)
        check(order)
        (made, _) = prompts(ARC, "t", order)
        return [(message["role"], message["content"] == "Be brief.") for message in made["messages"]]

    assert roles() == [("system", False), ("user", False)]
    assert roles(system=parse_system(None)) == roles()
    assert roles(system=parse_system("Be brief.")) == [("system", True), ("user", False)]
    assert roles(system=parse_system("none")) == [("user", False)]


def test_a_model_that_refuses_systems_can_be_asked() -> None:
    gemma = ChatTemplate(GEMMA2, {"bos_token": "<bos>"})
    order = GridOrder(column="examples", variants=1, changes=(), encoder="minimal", answers=True)
    (asked,) = prompts(PAIRS, "t", order)
    with pytest.raises(Unrendered, match="System role not supported"):
        render_chat(gemma, asked["messages"])
    (asked,) = prompts(PAIRS, "t", msgspec.structs.replace(order, system=None))
    text, ((start, stop),) = render_chat(gemma, asked["messages"], mark_answers=True)
    assert text[start:stop] == "65<end_of_turn>\n"


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (GridOrder(system=" "), "system: ' ' says nothing"),
        (GridOrder(encoder="none"), "encoder: 'none' has 'none'"),
        (GridOrder(prompt="none"), "prompt: 'none' is no prompt"),
        (GridOrder(template="{{ stranger }}"), "template: 'stranger' is not known there"),
        (GridOrder(template="{{ question }}", answers=True), "answers: True goes with our own prompts"),
        (GridOrder(variants=0), "variants: 0 is not between 1 and 1024"),
    ],
)
def test_orders_that_cannot_be_carried_out_are_refused(order: GridOrder, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check(order)


def test_the_default_encoder_is_known() -> None:
    assert grids.encoder(GridOrder().encoder)
