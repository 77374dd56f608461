"""Ids rise strictly, sort by time, and can be read aloud."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.ids import ALPHABET, KINDS, IdMaker, encode

TIMES = st.lists(st.floats(0, 4e9), min_size=2, max_size=50)


@given(TIMES, st.integers(0, 2**64))
def test_ids_of_one_maker_rise_whatever_the_clock_does(times: list[float], entropy: int) -> None:
    maker = IdMaker(lambda: entropy)
    made = [maker.make("job", time) for time in times]
    assert all(earlier < later for earlier, later in itertools.pairwise(made))


@given(st.floats(0, 4e9), st.floats(0.001, 1e6), st.integers(0, 2**64), st.integers(0, 2**64))
def test_ids_of_two_makers_sort_by_time(time: float, later_s: float, one: int, two: int) -> None:
    """A millisecond apart is enough, whatever chance gave each of them."""
    earlier = IdMaker(lambda: one).make("slice", time)
    later = IdMaker(lambda: two).make("slice", time + later_s + 0.001)
    assert earlier < later


@given(st.sampled_from(sorted(KINDS)), st.floats(0, 4e9), st.integers(0, 2**64))
def test_an_id_is_a_letter_and_sixteen_plain_characters(kind: str, time: float, entropy: int) -> None:
    id = IdMaker(lambda: entropy).make(kind, time)
    assert id[0] == KINDS[kind]
    assert len(id) == 17
    assert set(id[1:]) <= set(ALPHABET)


def test_a_burst_in_one_millisecond_counts_up_without_meeting_the_next() -> None:
    maker = IdMaker(lambda: -1)  # the largest start that chance can give
    burst = [maker.make("attempt", 1000.0) for _ in range(100_000)]
    assert burst == sorted(set(burst))
    assert maker.make("attempt", 1000.001) > burst[-1]
    assert len({id[:11] for id in burst}) == 1


def test_no_letter_is_mistaken_for_a_digit() -> None:
    assert not set("ilou") & set(ALPHABET)
    assert len(set(ALPHABET)) == 32
    assert "".join(sorted(ALPHABET)) == ALPHABET  # so that text order is number order


@given(st.integers(0, 2**30 - 1), st.integers(0, 2**30 - 1))
def test_encoding_keeps_order(one: int, two: int) -> None:
    assert (encode(one, 6) < encode(two, 6)) == (one < two)


def test_kinds_have_letters_of_their_own() -> None:
    assert len(set(KINDS.values())) == len(KINDS)
