"""`tpu cancel`, `kill`, `resume`, `rerun`, `tag`: what is asked for, several at once, what comes back."""

from __future__ import annotations

import json

import pytest

from penstock.cli.main import run
from tests.unit.cli.stand_in import StandIn, chunk, job, outcome


def test_cancel_asks_and_tells(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["j1"] = job("j1")
    assert run(["cancel", "j1"]) == 0
    assert capsys.readouterr().out == "j1 cancelling\n"


def test_one_refusal_does_not_keep_the_others(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs = {"j1": job("j1"), "j3": job("j3")}
    assert run(["cancel", "j1", "j2", "j3"]) == 5
    streams = capsys.readouterr()
    assert streams.out == "j1 cancelling\nj3 cancelling\n"
    assert streams.err == "tpu: j2: job: there is no 'j2'\ntpu: 1 of 3 were refused\n"


def test_kill_comes_back_when_it_has_ended(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["j1"] = job("j1")
    server.outcomes["j1"] = outcome("j1", state="cancelled")
    assert run(["kill", "j1"]) == 0
    assert "j1 cancelled after 2s" in capsys.readouterr().err
    assert server.asked[-1] == ("GET", "/v1/jobs/j1/result")


@pytest.mark.parametrize("verb", ["resume", "rerun"])
def test_again_gives_the_new_id(verb: str, server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "j1", "--on", "v4-8"]) == 0
    assert capsys.readouterr().out == "j1x\n"
    assert ("POST", f"/v1/jobs/j1/{verb}") in server.asked


def test_again_can_stay_with_the_new_job(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.logs = [chunk("on\n")]
    server.ending = outcome(state="failed", cause="user_error", exit_code=4)
    assert run(["resume", "j1", "--wait"]) == 4
    assert capsys.readouterr().out == "on\n"


def test_again_on_a_pool_is_refused(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.pool("big", "v4-8")
    assert run(["rerun", "j1", "--on", "big"]) == 2
    assert "name accelerators" in capsys.readouterr().err


def test_tags_are_added_and_taken_away(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["j1"] = job("j1", tags=("a", "b"))
    assert run(["tag", "j1", "c", "a", "--rm", "b"]) == 0
    assert capsys.readouterr().out == "a\nc\n"
    assert run(["tag", "j1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ["a", "c"]
    assert [method for method, _ in server.asked].count("PATCH") == 1
