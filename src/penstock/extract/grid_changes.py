"""Changes to a task of grids that leave its rule as it is: flips, turns, other colours, another order of examples.

They are named in a registry, drawn from a seed, and recorded, so that each can be undone on a task and on an answer.
What is drawn for a task depends on the seed, the task's name and the number of the variant only: not on other tasks,
and not on how the work is shared out. `grid_prompts` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final, NamedTuple

import msgspec

from penstock.domain.admission import BadInput
from penstock.extract.grids import COLOURS, Grid

BACKGROUND_CHANGES: Final = 0.1  #: how often colour 0, the background of most tasks, is changed too
VARIANTS_MAX: Final = 1024


class Pair(msgspec.Struct, frozen=True):
    """An example; the output of a test may not be known."""

    input: Grid
    output: Grid | None = None


class Task(msgspec.Struct, frozen=True):
    """A rule shown by examples, and inputs it is to be applied to."""

    train: tuple[Pair, ...]
    test: tuple[Pair, ...]


class Change(msgspec.Struct, frozen=True):
    """One change as it was drawn: its name and its numbers."""

    name: str
    numbers: tuple[int, ...]


class Lot(NamedTuple):
    """What a change is drawn from: chance, the number of the variant, the number of examples."""

    chance: Random
    variant: int
    examples: int


class Kind(msgspec.Struct, frozen=True):
    """An entry of the registry: what it does, how it is drawn, and what it does to a grid and back."""

    about: str
    draw: Callable[[Lot], tuple[int, ...]]
    apply: Callable[[Grid, tuple[int, ...]], Grid]
    undo: Callable[[Grid, tuple[int, ...]], Grid]


def _flip(grid: Grid, numbers: tuple[int, ...]) -> Grid:
    return tuple(row[::-1] for row in grid) if numbers[0] else grid


def _turn(grid: Grid, numbers: tuple[int, ...]) -> Grid:
    """Quarter turns against the clock."""
    for _ in range(numbers[0] % 4):
        grid = tuple(zip(*grid, strict=True))[::-1]
    return grid


def _recolour(grid: Grid, numbers: tuple[int, ...]) -> Grid:
    return tuple(tuple(numbers[cell] for cell in row) for row in grid)


def _colours(chance: Random) -> tuple[int, ...]:
    first = 0 if chance.random() < BACKGROUND_CHANGES else 1
    moved = list(range(first, COLOURS))
    chance.shuffle(moved)
    return (*range(first), *moved)


def _inverse(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(numbers)), key=numbers.__getitem__))


def _same(grid: Grid, _numbers: tuple[int, ...]) -> Grid:
    """The order of examples is no matter of a single grid."""
    return grid


#: Flips and turns are counted through, so that eight variants are the eight ways to lay a grid; the rest is drawn.
CHANGES: Final[Mapping[str, Kind]] = {
    "flip": Kind("left and right swapped", lambda lot: ((lot.variant // 4) % 2,), _flip, _flip),
    "rotate": Kind(
        "quarter turns",
        lambda lot: (lot.variant % 4,),
        _turn,
        lambda grid, numbers: _turn(grid, (-numbers[0],)),
    ),
    "colours": Kind(
        "other colours; the background seldom",
        lambda lot: _colours(lot.chance),
        _recolour,
        lambda grid, numbers: _recolour(grid, _inverse(numbers)),
    ),
    "order": Kind(
        "examples in another order",
        lambda lot: tuple(lot.chance.sample(range(lot.examples), lot.examples)),
        _same,
        _same,
    ),
}


def parse_changes(text: str) -> tuple[str, ...]:
    """Names of changes, as in `flip,rotate,colours,order`; `none` for none."""
    names = tuple(name.strip() for name in text.split(",")) if text.strip() not in ("", "none") else ()
    for name in names:
        if name not in CHANGES:
            raise BadInput("augment", name, "is no change", f"use {', '.join(CHANGES)} or none")
    if len(set(names)) != len(names):
        raise BadInput("augment", text, "names a change twice", "name each once")
    return names


def draw(names: Sequence[str], *, seed: int, task: str, variant: int, examples: int) -> tuple[Change, ...]:
    """The changes that make one variant of a task."""
    lot = Lot(Random(f"{seed}/{variant}/{task}"), variant, examples)
    return tuple(Change(name, CHANGES[name].draw(lot)) for name in names)


def apply(task: Task, changes: Sequence[Change]) -> Task:
    def changed(grid: Grid) -> Grid:
        for change in changes:
            grid = CHANGES[change.name].apply(grid, change.numbers)
        return grid

    return _ordered(_each(task, changed), [change.numbers for change in changes if change.name == "order"])


def undo(task: Task, changes: Sequence[Change]) -> Task:
    """The task that `apply` was given."""
    back = [_inverse(change.numbers) for change in reversed(changes) if change.name == "order"]
    return _ordered(_each(task, lambda grid: undo_grid(grid, changes)), back)


def undo_grid(grid: Grid, changes: Sequence[Change]) -> Grid:
    """A grid as it would be without the changes: for answers of a model."""
    for change in reversed(changes):
        grid = CHANGES[change.name].undo(grid, change.numbers)
    return grid


def _ordered(task: Task, orders: Sequence[tuple[int, ...]]) -> Task:
    for order in orders:
        task = Task(tuple(task.train[index] for index in order), task.test)
    return task


def _each(task: Task, change: Callable[[Grid], Grid]) -> Task:
    def both(pair: Pair) -> Pair:
        return Pair(change(pair.input), None if pair.output is None else change(pair.output))

    return Task(tuple(map(both, task.train)), tuple(map(both, task.test)))
