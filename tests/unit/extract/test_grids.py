"""Grids as text: every encoder that words can name reads back what it wrote, refuses the rest, evaluates nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.admission import BadInput
from penstock.extract.grids import ENCODERS, Encoder, Grid, NotAGrid, as_grid, encoder

GRID: Grid = ((0, 1, 2), (3, 4, 5))


@st.composite
def some_grids(draw: st.DrawFn, side: int = 30) -> Grid:
    rows, columns = draw(st.integers(1, side)), draw(st.integers(1, side))
    flat = draw(st.lists(st.integers(0, 9), min_size=rows * columns, max_size=rows * columns))
    return tuple(tuple(flat[row * columns : (row + 1) * columns]) for row in range(rows))


def _wrapped(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds("{}({})".format, st.sampled_from(["rows", "block", "shape"]), inner)


between = st.text(st.characters(codec="utf-8", exclude_characters="0123456789\n\r'\""), min_size=1, max_size=4)
cells = st.one_of(
    st.just("minimal"),
    st.builds("separated('{}')".format, between),
    st.builds("repeat({})".format, st.integers(1, 9)),
)
around_cells = st.builds("symbols({})".format, st.sampled_from(["minimal", "repeat(2)"]))
encoders = st.recursive(cells | around_cells, _wrapped, max_leaves=5)


@given(encoders, some_grids(side=12))
def test_what_was_written_is_read_back(words: str, grid: Grid) -> None:
    made = encoder(words)
    assert made.to_grid(made.to_text(grid)) == grid


@given(encoders, some_grids(side=4), st.data())
def test_a_text_that_was_not_written_so_is_refused_or_means_what_it_says(
    words: str, grid: Grid, data: st.DataObject
) -> None:
    """Whatever is read is what would be written: a damaged text never passes for another grid's."""
    made = encoder(words)
    text = made.to_text(grid)
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + data.draw(st.sampled_from(["", "1", "\n", "x", " ", text])) + text[at + 1 :]
    try:
        read = made.to_grid(damaged)
    except NotAGrid:
        return
    assert made.to_text(read) == damaged


@given(st.text(max_size=60))
def test_no_text_breaks_an_encoder(text: str) -> None:
    for words in ("minimal", "separated(', ')", "repeat(2)", "shape(rows(minimal))", "block(symbols)"):
        try:
            read = encoder(words).to_grid(text)
        except NotAGrid:
            continue
        assert encoder(words).to_text(read) == text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("minimal", "012\n345"),
        ("separated('|')", "0|1|2\n3|4|5"),
        ("separated", "0 1 2\n3 4 5"),
        ("repeat(3)", "000111222\n333444555"),
        ("symbols", "ABC\nDEF"),
        ("symbols('qwertyuiop')", "qwe\nrty"),
        ("symbols(separated('|'))", "A|B|C\nD|E|F"),
        ("rows(minimal)", "1 012\n2 345"),
        ("block(minimal)", "```grid\n012\n345\n```"),
        ("shape(minimal)", "```grid shape: 2x3\n012\n345\n```"),
        ("shape(rows(minimal))", "```grid shape: 2x3\n1 012\n2 345\n```"),
        ("shape", "```grid shape: 2x3\n012\n345\n```"),
        # As other tools write them.
        ("GridShapeEncoder(RowNumberEncoder(MinimalGridEncoder()))", "```grid shape: 2x3\n1 012\n2 345\n```"),
        ("GridWithSeparationEncoder('|')", "0|1|2\n3|4|5"),
        ("GridCodeBlockEncoder( RepeatNumberEncoder( 2 ) )", "```grid\n001122\n334455\n```"),
    ],
)
def test_words_name_encoders(words: str, text: str) -> None:
    assert encoder(words).to_text(GRID) == text


def test_the_default_is_shape_of_numbered_rows() -> None:
    assert encoder().to_text(GRID) == encoder("shape(rows(minimal))").to_text(GRID)


@pytest.mark.parametrize("name", ENCODERS)
def test_every_name_of_the_registry_can_be_used_alone_and_has_a_line_about_it(name: str) -> None:
    made: Encoder = encoder(name)
    assert made.to_grid(made.to_text(GRID)) == GRID
    assert encoder(f"{name}()").to_text(GRID) == made.to_text(GRID)
    assert ENCODERS[name].about


@pytest.mark.parametrize(
    "words",
    [
        "",
        "nothing",
        "__import__('os').system('true')",
        "minimal)",
        "minimal(",
        "minimal()()",
        "rows(minimal",
        "rows(minimal))",
        "rows(minimal)x",
        "rows('x')",
        "minimal(rows)",
        "repeat(0)",
        "repeat(10)",
        "repeat('x')",
        "separated('')",
        "separated('1')",
        "separated('\n')",
        "separated('12345')",
        "symbols('short')",
        "symbols('AABCDEFGHI')",
        "symbols('ABCDEFGH J')",
        "symbols(rows(minimal))",
        "symbols(separated('A'))",
        "(" * 1000,
        "rows(" * 1000 + "minimal" + ")" * 1000,
    ],
)
def test_other_words_are_refused_in_one_line(words: str) -> None:
    with pytest.raises(BadInput, match=r"^encoder: ") as caught:
        encoder(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "is no list of rows"),
        ("012", "is no list of rows"),
        ([], "is no list of rows"),
        ([[]], "has a row that is no list of cells"),
        (["012"], "has a row that is no list of cells"),
        ([[1], [1, 2]], "has rows of different lengths"),
        ([[10]], "has a cell 10"),
        ([[-1]], "has a cell -1"),
        ([[1.5]], "has a cell 1.5"),
        ([[True]], "has a cell True"),
        ([["1"]], "has a cell '1'"),
        ([[0] * 31], "has 1 by 31 cells"),
        ([[0]] * 31, "has 31 by 1 cells"),
    ],
)
def test_what_is_no_grid_is_refused(value: object, reason: str) -> None:
    with pytest.raises(NotAGrid, match=reason):
        as_grid(value)


def test_whole_floats_are_cells() -> None:
    assert as_grid([[3.0, 0]]) == ((3, 0),)
