"""Two controllers on one store: one leads, the other takes over in time, the old one can do nothing more."""

from __future__ import annotations

import pytest

from penstock.controller import settings
from penstock.controller.leader import Leadership, elect
from penstock.domain import limits
from penstock.ports.store import StaleLeader
from tests.unit.controller.stage import HandClock, Stage

POLL_S = limits.LEADER_RENEW_S / 2


class Contender:
    """One process with clocks of its own."""

    def __init__(self, stage: Stage, holder: str) -> None:
        self.clock = HandClock()
        self.clock.steady_s = 12_345.0 if holder == "two" else 3.0  # no two clocks agree
        self.leadership = Leadership(stage.store.bound(actor=holder), holder, self.clock)
        self._stage = stage

    def poll(self) -> bool:
        return self._stage.wait(self.leadership.lead())

    @property
    def epoch(self) -> int:
        return self.leadership.epoch


def test_the_first_leads_and_the_second_waits(stage: Stage) -> None:
    one, two = Contender(stage, "one"), Contender(stage, "two")
    for _ in range(60):
        assert one.poll()
        assert not two.poll()
        for each in (one, two):
            each.clock.advance(POLL_S)
    assert (one.epoch, two.epoch) == (1, 0)
    assert len(stage.events(kind="leader.")) == 1  # renewals are no events


@pytest.mark.parametrize("died_after_s", [0.0, 0.5, 1.0, 1.9])
def test_the_second_takes_over_within_ten_seconds(stage: Stage, died_after_s: float) -> None:
    one, two = Contender(stage, "one"), Contender(stage, "two")
    assert one.poll()
    two.poll()
    one.clock.advance(limits.LEADER_RENEW_S)
    assert one.poll()
    two.clock.advance(died_after_s)  # the first dies; the second polls on, in its own rhythm
    waited = died_after_s
    while not two.poll():
        two.clock.advance(POLL_S)
        waited += POLL_S
    assert limits.LEADER_TTL_S <= waited <= 10.0
    assert two.epoch == 2


def test_what_the_old_leader_does_is_refused(stage: Stage) -> None:
    one, two = Contender(stage, "one"), Contender(stage, "two")
    assert one.poll()
    old = stage.store.bound(actor="one", epoch=one.epoch)
    stage.wait(old.transact(settings.set_maintenance, True))
    two.poll()
    two.clock.advance(limits.LEADER_TTL_S)
    assert two.poll()
    with pytest.raises(StaleLeader):
        stage.wait(old.transact(settings.set_maintenance, False))
    stage.wait(stage.store.bound(actor="two", epoch=2).transact(settings.set_maintenance, False))
    assert [event.epoch for event in stage.events(kind="control.")] == [1, 2]
    one.clock.advance(limits.LEADER_RENEW_S)
    assert not one.poll()
    assert one.epoch == 0
    one.clock.advance(limits.LEADER_TTL_S - 1)
    assert not one.poll()  # it watches the new one like any other


def test_a_renewal_within_the_term_keeps_the_lead(stage: Stage) -> None:
    one, two = Contender(stage, "one"), Contender(stage, "two")
    assert one.poll()
    for _ in range(5):
        assert not two.poll()
        two.clock.advance(limits.LEADER_TTL_S - 0.1)
        one.clock.advance(limits.LEADER_RENEW_S)
        assert one.poll()
    assert two.epoch == 0


def test_of_two_that_take_over_at_once_one_wins(stage: Stage) -> None:
    one, two, three = (Contender(stage, name) for name in ("one", "two", "three"))
    assert one.poll()
    for each in (two, three):
        assert not each.poll()
        each.clock.advance(limits.LEADER_TTL_S)
    leader = stage.look(lambda reader: reader.leader())
    assert leader is not None
    assert two.poll()
    assert stage.do(elect, "three", (leader.epoch, leader.renewed)) is None
    assert not three.poll()


def test_a_restart_under_the_same_name_leads_at_once_with_a_new_epoch(stage: Stage) -> None:
    assert Contender(stage, "one").poll()
    again = Contender(stage, "one")
    assert again.poll()
    assert again.epoch == 2


def test_stepping_down_starts_the_watch_anew(stage: Stage) -> None:
    one = Contender(stage, "one")
    assert one.poll()
    one.leadership.step_down()
    assert one.epoch == 0
    assert one.poll()
    assert one.epoch == 2
