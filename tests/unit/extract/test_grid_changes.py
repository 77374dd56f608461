"""Changes of tasks: drawn from a seed, the same everywhere, and undone without a trace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.admission import BadInput
from penstock.extract.grid_changes import CHANGES, Change, Pair, Task, apply, draw, parse_changes, undo, undo_grid
from tests.unit.extract.test_grids import some_grids

NAMES = tuple(CHANGES)
small = some_grids(side=5)
pairs = st.builds(Pair, small, small)
tasks = st.builds(
    Task,
    st.lists(pairs, min_size=1, max_size=4).map(tuple),
    st.lists(st.builds(Pair, small, small | st.none()), min_size=1, max_size=2).map(tuple),
)
GRID = ((1, 2, 3), (4, 5, 6))
PINNED = (
    Change("flip", (1,)),
    Change("rotate", (1,)),
    Change("colours", (0, 1, 4, 3, 7, 8, 9, 2, 6, 5)),
    Change("order", (0, 2, 3, 1)),
)


@given(tasks, st.permutations(NAMES), st.integers(0, 4), st.integers(0, 2**40), st.integers(0, 30), st.text(max_size=8))
def test_changes_are_undone_without_a_trace(
    task: Task, names: list[str], count: int, seed: int, variant: int, name: str
) -> None:
    changes = draw(names[:count], seed=seed, task=name, variant=variant, examples=len(task.train))
    changed = apply(task, changes)
    assert undo(changed, changes) == task
    assert [undo_grid(pair.input, changes) for pair in changed.test] == [pair.input for pair in task.test]
    assert [change.name for change in changes] == names[:count]


@given(tasks, st.integers(0, 99), st.integers(0, 30))
def test_a_draw_depends_on_seed_task_and_variant_only(task: Task, seed: int, variant: int) -> None:
    first = draw(NAMES, seed=seed, task="t", variant=variant, examples=len(task.train))
    draw(NAMES, seed=seed + 1, task="u", variant=variant + 1, examples=3)
    assert draw(NAMES, seed=seed, task="t", variant=variant, examples=len(task.train)) == first


def test_draws_stay_what_they_were() -> None:
    """Runs that were made last year must be made again: this pins the sequence for all time."""
    assert draw(NAMES, seed=42, task="task_00000000", variant=5, examples=4) == PINNED


def test_eight_variants_are_the_eight_ways_to_lay_a_grid() -> None:
    task = Task((Pair(GRID, GRID),), (Pair(GRID),))
    drawn = [draw(("flip", "rotate"), seed=0, task="t", variant=variant, examples=1) for variant in range(8)]
    laid = {apply(task, changes).test[0].input for changes in drawn}
    assert len(laid) == 8


def test_flips_and_turns_are_what_they_are_called() -> None:
    flip, rotate = CHANGES["flip"], CHANGES["rotate"]
    assert flip.apply(GRID, (1,)) == ((3, 2, 1), (6, 5, 4))
    assert flip.apply(GRID, (0,)) == GRID
    assert rotate.apply(GRID, (1,)) == ((3, 6), (2, 5), (1, 4))
    assert rotate.apply(GRID, (2,)) == ((6, 5, 4), (3, 2, 1))
    assert rotate.apply(GRID, (4,)) == GRID


def test_the_background_is_changed_seldom() -> None:
    drawn = [draw(("colours",), seed=seed, task="t", variant=0, examples=1)[0].numbers for seed in range(2000)]
    assert all(sorted(numbers) == list(range(10)) for numbers in drawn)
    kept = sum(numbers[0] == 0 for numbers in drawn) / len(drawn)
    assert 0.89 < kept < 0.93  # 0.9 of the draws leave it, and one in ten of the others does by chance


def test_the_order_is_that_of_the_examples() -> None:
    task = Task(tuple(Pair(((number,),), ((number,),)) for number in range(4)), (Pair(((9,),)),))
    changed = apply(task, (Change("order", (2, 0, 3, 1)),))
    assert [pair.input for pair in changed.train] == [((2,),), ((0,),), ((3,),), ((1,),)]


def test_names_of_changes() -> None:
    assert parse_changes("flip, colours") == ("flip", "colours")
    assert parse_changes("none") == parse_changes("") == ()
    with pytest.raises(BadInput, match="augment: 'stretch' is no change; use flip, rotate, colours, order or none"):
        parse_changes("flip,stretch")
    with pytest.raises(BadInput, match="names a change twice"):
        parse_changes("flip,flip")
