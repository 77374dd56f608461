"""Grids of coloured cells, as in ARC, written as text and read back.

An encoder is named in words, such as `shape(rows(minimal))`: wrappers around a way to write cells, put together from a
registry by a small parser; nothing is evaluated. Whatever can be put together can be read back: `to_grid` gives the
grid that `to_text` was given, and refuses every other text. `grid_prompts` writes prompts with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from penstock.domain.admission import BadInput

SIDE_MAX: Final = 30  #: cells, both ways, as in the challenge
COLOURS: Final = 10
DEFAULT: Final = "shape(rows(minimal))"
_NESTED_MAX: Final = 8
_REPEAT_MAX: Final = 9
_FENCE: Final = "```"
_DIGITS: Final = "0123456789"
_LETTERS: Final = "ABCDEFGHIJ"

Grid = tuple[tuple[int, ...], ...]


class NotAGrid(ValueError):
    """A value that is no grid, or a text that this encoder does not write."""


def as_grid(value: object) -> Grid:
    """A grid from JSON: rows of equal length, 1 to 30 each way, whole numbers 0 to 9."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise NotAGrid("is no list of rows")
    rows = []
    for row in value:
        if not isinstance(row, Sequence) or isinstance(row, str) or not row:
            raise NotAGrid("has a row that is no list of cells")
        rows.append(tuple(_cell(cell) for cell in row))
    if len({len(row) for row in rows}) > 1:
        raise NotAGrid("has rows of different lengths")
    if len(rows) > SIDE_MAX or len(rows[0]) > SIDE_MAX:
        raise NotAGrid(f"has {len(rows)} by {len(rows[0])} cells, more than {SIDE_MAX} by {SIDE_MAX}")
    return tuple(rows)


def _cell(value: object) -> int:
    # Datasets that went through a table of floats have 3.0 for 3.
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in range(COLOURS):
        raise NotAGrid(f"has a cell {value!r}, and cells are 0 to {COLOURS - 1}")
    return int(value)


class Encoder(Protocol):
    """A way to write grids."""

    def to_text(self, grid: Grid) -> str: ...

    def to_grid(self, text: str) -> Grid:
        """Raises `NotAGrid` for what `to_text` does not write."""


class Cells(msgspec.Struct, frozen=True):
    """A line for each row, and each cell as `repeat` times its symbol, with `between` between cells."""

    symbols: str = _DIGITS
    between: str = ""
    repeat: int = 1

    def to_text(self, grid: Grid) -> str:
        return "\n".join(self.between.join(self.symbols[cell] * self.repeat for cell in row) for row in grid)

    def to_grid(self, text: str) -> Grid:
        grid = as_grid([self._row(line) for line in text.split("\n")])
        if self.to_text(grid) != text:
            raise NotAGrid("is written in another way")
        return grid

    def _row(self, line: str) -> list[int]:
        step = self.repeat
        cells = line.split(self.between) if self.between else [line[at : at + step] for at in range(0, len(line), step)]
        found = [self.symbols.find(cell[:1]) if cell else -1 for cell in cells]
        if -1 in found:
            raise NotAGrid(f"has the line {line[:40]!r}")
        return found


class RowNumbers(msgspec.Struct, frozen=True):
    """Each line of the inner text after its number, from 1 on."""

    inner: Encoder

    def to_text(self, grid: Grid) -> str:
        return "\n".join(f"{number} {line}" for number, line in enumerate(self.inner.to_text(grid).split("\n"), 1))

    def to_grid(self, text: str) -> Grid:
        lines = []
        for number, line in enumerate(text.split("\n"), 1):
            if not line.startswith(f"{number} "):
                raise NotAGrid(f"has a line {number} without its number")
            lines.append(line.removeprefix(f"{number} "))
        return self.inner.to_grid("\n".join(lines))


class Block(msgspec.Struct, frozen=True):
    """The inner text between fences; with `shape`, the first one says how many rows and columns there are."""

    inner: Encoder
    shape: bool = False

    def to_text(self, grid: Grid) -> str:
        return f"{self._opening(grid)}\n{self.inner.to_text(grid)}\n{_FENCE}"

    def to_grid(self, text: str) -> Grid:
        opening, _, rest = text.partition("\n")
        if not opening.startswith(f"{_FENCE}grid") or not rest.endswith(f"\n{_FENCE}"):
            raise NotAGrid("does not stand between fences")
        grid = self.inner.to_grid(rest.removesuffix(f"\n{_FENCE}"))
        if opening != self._opening(grid):
            raise NotAGrid(f"begins with {opening[:40]!r} and is {len(grid)}x{len(grid[0])}")
        return grid

    def _opening(self, grid: Grid) -> str:
        return f"{_FENCE}grid shape: {len(grid)}x{len(grid[0])}" if self.shape else f"{_FENCE}grid"


class Named(msgspec.Struct, frozen=True):
    """An entry of the registry: what it does, the name it had elsewhere, and how it is made from its argument."""

    about: str
    former: str
    make: Callable[[Encoder | str | None], Encoder]


def _minimal(argument: Encoder | str | None) -> Encoder:
    if argument is not None:
        raise BadInput("encoder", argument, "is too much: minimal takes nothing", "write minimal")
    return Cells()


def _separated(argument: Encoder | str | None) -> Encoder:
    between = " " if argument is None else argument
    if not isinstance(between, str) or not 1 <= len(between) <= 4 or "\n" in between or set(between) & set(_DIGITS):
        raise BadInput("encoder", between, "cannot stand between cells", "use 1 to 4 characters that are no digits")
    return Cells(between=between)


def _repeated(argument: Encoder | str | None) -> Encoder:
    times = "3" if argument is None else argument
    if not isinstance(times, str) or times not in map(str, range(1, _REPEAT_MAX + 1)):
        raise BadInput("encoder", times, "is not how often a cell can be written", f"use 1 to {_REPEAT_MAX}")
    return Cells(repeat=int(times))


def _symbols(argument: Encoder | str | None) -> Encoder:
    """Around cells only: around numbered rows it would also rewrite the numbers, and could not be read back."""
    if argument is None:
        return Cells(symbols=_LETTERS)
    if isinstance(argument, str):
        if len(argument) != COLOURS or len(set(argument)) != COLOURS or any(map(str.isspace, argument)):
            raise BadInput("encoder", argument, f"are not {COLOURS} different symbols", "give one for each colour")
        return Cells(symbols=argument)
    if not isinstance(argument, Cells) or set(argument.between) & set(_LETTERS):
        raise BadInput("encoder", "symbols", "can only stand right around cells", "write shape(rows(symbols(minimal)))")
    return msgspec.structs.replace(argument, symbols=_LETTERS)


def _around(wrap: Callable[[Encoder], Encoder]) -> Callable[[Encoder | str | None], Encoder]:
    def make(argument: Encoder | str | None) -> Encoder:
        if isinstance(argument, str):
            raise BadInput("encoder", argument, "is no encoder", "put one inside, such as minimal")
        return wrap(Cells() if argument is None else argument)

    return make


ENCODERS: Final[Mapping[str, Named]] = {
    "minimal": Named("digits, a line for each row", "MinimalGridEncoder", _minimal),
    "separated": Named("something between the cells: separated('|')", "GridWithSeparationEncoder", _separated),
    "repeat": Named("each digit several times: repeat(3)", "RepeatNumberEncoder", _repeated),
    "symbols": Named("other symbols than digits: symbols('ABCDEFGHIJ')", "ReplaceNumberEncoder", _symbols),
    "rows": Named("numbered rows", "RowNumberEncoder", _around(RowNumbers)),
    "block": Named("between fences", "GridCodeBlockEncoder", _around(Block)),
    "shape": Named("between fences, with the shape", "GridShapeEncoder", _around(lambda inner: Block(inner, True))),
}
_BY_NAME: Final = {**ENCODERS, **{entry.former: entry for entry in ENCODERS.values()}}
_WORD: Final = re.compile(r"\s*([A-Za-z]+)\s*")
_END: Final = re.compile(r"\s*\)\s*")
_ARGUMENT: Final = re.compile(r"\s*(?:'([^']*)'|\"([^\"]*)\"|(\d+))\s*")


def encoder(text: str = DEFAULT) -> Encoder:
    """The encoder that words name: `shape(rows(minimal))`, `separated('|')`; also by the names other tools use."""
    made, end = _parse(text, 0, 0)
    if end != len(text):
        raise _unreadable(text, end)
    return made


def _parse(text: str, at: int, depth: int) -> tuple[Encoder, int]:
    word = _WORD.match(text, at)
    if word is None or depth > _NESTED_MAX:
        raise _unreadable(text, at)
    entry = _BY_NAME.get(word[1])
    if entry is None:
        raise BadInput("encoder", text, f"has {word[1]!r}, which is none", f"use {', '.join(ENCODERS)}")
    at = word.end()
    if not text.startswith("(", at):
        return entry.make(None), at
    argument: Encoder | str | None = None
    at += 1
    if (value := _ARGUMENT.match(text, at)) is not None:
        argument, at = next(group for group in value.groups() if group is not None), value.end()
    elif _END.match(text, at) is None:
        argument, at = _parse(text, at, depth + 1)
    end = _END.match(text, at)
    if end is None:
        raise _unreadable(text, at)
    return entry.make(argument), end.end()


def _unreadable(text: str, at: int) -> BadInput:
    return BadInput("encoder", text, f"cannot be read from character {at + 1} on", f"write it like {DEFAULT}")
