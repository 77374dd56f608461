"""How values are written on the command line: times, sizes, arrays, replicas, pairs."""

from __future__ import annotations

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.words import ARRAY_MEMBERS_MAX, Array, Copies, Members, Pair, Size, Span


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("30s", 30), ("15m", 900), ("1h30m", 5400), ("7d", 604800), ("1.5h", 5400), ("2W", 1209600)],
)
def test_times(text: str, seconds: float) -> None:
    assert Span().convert(text, None, None) == seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [("512", 512), ("2k", 2000), ("2KiB", 2048), ("16G", 16_000_000_000), ("1.5GiB", 1_610_612_736), ("1tb", 10**12)],
)
def test_sizes(text: str, count: int) -> None:
    assert Size().convert(text, None, None) == count


@pytest.mark.parametrize(
    ("text", "indices", "at_once"),
    [
        ("0-3", (0, 1, 2, 3), None),
        ("0-99%10", tuple(range(100)), 10),
        ("1,5,9%2", (1, 5, 9), 2),
        ("0-30:10,7", (0, 10, 20, 30, 7), None),
    ],
)
def test_arrays(text: str, indices: tuple[int, ...], at_once: int | None) -> None:
    assert Array().convert(text, None, None) == Members(indices, at_once)


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-9:0", "1,1", "0-9%0", "0-9%", "0-9%x", "-5", "0-", "٣"])
def test_bad_arrays(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Array().convert(text, None, None)


def test_an_array_is_bounded_before_it_is_built() -> None:
    with pytest.raises(click.BadParameter, match=str(ARRAY_MEMBERS_MAX)):
        Array().convert("0-999999999", None, None)


@pytest.mark.parametrize(("text", "replicas"), [("4", (4, 4)), ("1-8", (1, 8))])
def test_replicas(text: str, replicas: tuple[int, int]) -> None:
    assert Copies().convert(text, None, None) == replicas


def test_pairs_keep_what_follows_the_first_equals_sign() -> None:
    assert Pair().convert("A=b=c", None, None) == ("A", "b=c")
    assert Pair().convert("A=", None, None) == ("A", "")


@given(st.text(max_size=20))
def test_no_text_is_a_fault(text: str) -> None:
    """Whatever is typed is a value or bad input, never anything else."""
    for kind in (Span(), Size(), Array(), Copies(), Pair()):
        try:
            kind.convert(text, None, None)
        except click.BadParameter as error:
            assert "\n" not in error.format_message().strip() or "\n" in text  # noqa: PT017
