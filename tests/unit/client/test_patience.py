"""How long a call goes on: rests double and are spread, servers are obeyed, and every budget ends."""

import random

import pytest

from penstock.client.patience import Patience
from penstock.domain import limits


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def spent(patience: Patience, clock: Clock) -> list[float]:
    rests = []
    while (rest := patience.rest()) is not None:
        rests.append(rest)
        clock.now += rest
    return rests


@pytest.mark.parametrize("seed", range(20))
def test_rests_grow_and_end(seed: int) -> None:
    clock = Clock()
    rests = spent(Patience(15.0, 30.0, clock=clock, dice=random.Random(seed)), clock)
    ceilings = [min(limits.CLIENT_REST_MAX_S, limits.CLIENT_REST_FIRST_S * 2**index) for index in range(len(rests))]
    assert all(ceiling / 2 <= rest <= ceiling for rest, ceiling in zip(rests, ceilings, strict=True))
    assert 15.0 - limits.CLIENT_REST_MAX_S <= sum(rests) < 15.0


def test_two_clients_do_not_come_back_in_step() -> None:
    clock = Clock()
    first, second = (Patience(15.0, clock=clock, dice=random.Random(seed)).rest() for seed in (1, 2))
    assert first != second


def test_a_server_that_names_a_time_is_obeyed_or_given_up() -> None:
    patience = Patience(15.0, 30.0, clock=Clock())
    assert patience.rest(2.0) == 2.0
    assert patience.rest(20.0) is None


def test_patience_counts_from_the_first_failure() -> None:
    """A try that hung for half of the call leaves the other half to one that does not."""
    clock = Clock()
    patience = Patience(5.0, 30.0, clock=clock)
    assert patience.attempt_s == 15.0
    clock.now += 15.0
    assert patience.rest() is not None
    assert patience.attempt_s == 15.0
    clock.now += 14.0
    assert patience.rest() is None
    clock.now += 5.0
    assert patience.attempt_s == 0.0


def test_a_stream_that_moves_never_loses_patience() -> None:
    clock = Clock()
    patience = Patience(5.0, clock=clock)
    for _ in range(100):
        assert patience.rest() is not None
        clock.now += 4.0
        patience.renew()
    assert spent(patience, clock)
