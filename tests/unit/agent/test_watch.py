"""The watch: what counts as progress, and when its absence is worth a stack dump."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from penstock.agent.watch import STALL_LEAST_S, STEPS_LEAST, Watch


class Payload:
    """Writes progress at times of the test's choosing."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "progress"
        self.now = 100.0
        self.watch = Watch(self.path, lambda: self.now)
        self.watch.hidden = ()
        self._written = 0

    def say(self, **said: object) -> bool:
        self._written += 1
        self.path.write_text(json.dumps(said) + " " * self._written)  # the size differs though the clock may not
        return self.watch.look()


def test_what_it_says_is_taken_as_far_as_it_makes_sense(tmp_path: Path) -> None:
    payload = Payload(tmp_path)
    assert not payload.watch.look()
    assert payload.say(done=1, total=4, metrics={"loss": 0.5, "name": "x", "bad": 10**400, "flag": True}, open_units=7)
    heard = [payload.watch.holding]
    said = payload.watch.said
    assert said is not None
    assert (said.done, said.total, said.metrics) == (1.0, 4.0, {"loss": 0.5})
    assert payload.watch.open_units == 7
    assert said.save_s is None
    assert not payload.watch.look(), "nothing is new"
    for nonsense in ("x", None, True, float("nan"), [1]):
        assert not payload.say(done=nonsense)
    assert payload.say(done=2, open_units=-1, metrics=[1], holding=True)
    assert payload.watch.open_units == 7
    heard.append(payload.watch.holding)
    for said_now in ("no", False):
        assert payload.say(done=2, holding=said_now)
        heard.append(payload.watch.holding)
    assert heard == [None, True, True, False]


def test_what_a_save_costs_is_a_number_or_nothing(tmp_path: Path) -> None:
    payload = Payload(tmp_path)
    for told, taken in ((2.5, 2.5), (0, 0.0), (-1.0, None), ("x", None), (None, None)):
        assert payload.say(done=1, save_s=told)
        assert payload.watch.said is not None
        assert payload.watch.said.save_s == taken


def test_what_rests_under_its_last_name_is_a_checkpoint(tmp_path: Path) -> None:
    watch = Payload(tmp_path).watch
    watch.look_for_saves()
    assert watch.saved_ago_s is None, "nobody said where it saves"
    folder = watch.checkpoints = tmp_path / "checkpoints"
    watch.look_for_saves()
    assert watch.saved_ago_s is None, "nothing is there yet"
    now = time.time()  # noqa: TID251 (files carry the time of this machine)
    for name, age_s in (("10", 60.0), ("20", 30.0), ("30.tmp", 10.0), ("40", 0.0)):
        (folder / name).mkdir(parents=True)
        os.utime(folder / name, (now - age_s, now - age_s))
    watch.look_for_saves()
    assert watch.saved_ago_s == pytest.approx(30.0, abs=5.0), "one is temporary, one may still be written"
    shutil.rmtree(folder / "20")
    watch.look_for_saves()
    assert watch.saved_ago_s == pytest.approx(30.0, abs=5.0), "a checkpoint that was replaced had been there"
    watch.look_for_saves(settle_s=0.0)
    assert watch.saved_ago_s == pytest.approx(0.0, abs=5.0), "its payload has ended"


def test_names_of_metrics_tell_no_secret(tmp_path: Path) -> None:
    payload = Payload(tmp_path)
    payload.watch.hidden = None
    assert payload.say(done=1, metrics={"loss of s3cret": 0.5})
    assert payload.watch.said is not None
    assert payload.watch.said.metrics == {}, "while secrets are unknown no name is told"
    payload.watch.hidden = ("s3cret",)
    assert payload.say(done=2, metrics={"loss of s3cret": 0.5})
    assert payload.watch.said.metrics == {"loss of ***": 0.5}


def test_only_a_payload_that_had_a_pace_can_stall(tmp_path: Path) -> None:
    payload = Payload(tmp_path)
    payload.say(done=0)
    payload.now += 10_000
    assert payload.watch.stalled_s() is None
    for step in range(STEPS_LEAST):
        payload.now += 60.0
        payload.say(done=step + 1)
    assert payload.watch.usual_s() == 60.0
    payload.now += 19 * 60.0
    assert payload.watch.stalled_s() is None
    payload.now += 2 * 60.0
    assert payload.watch.stalled_s() == 21 * 60.0


def test_quick_steps_do_not_make_it_nervous(tmp_path: Path) -> None:
    payload = Payload(tmp_path)
    for step in range(STEPS_LEAST + 1):
        payload.now += 0.1
        payload.say(done=step)
    payload.now += STALL_LEAST_S
    assert payload.watch.stalled_s() is None
    payload.now += 1
    assert payload.watch.stalled_s() is not None
    payload.say(done=100)
    assert payload.watch.stalled_s() is None
