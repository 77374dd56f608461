"""`tpu clean`: what is asked part by part, and what is told at the end."""

from __future__ import annotations

import json

import pytest

from penstock.cli.main import run
from penstock.wire.api import CleanedView, CleanReply
from penstock.wire.problems import problem
from tests.unit.cli.stand_in import StandIn


def reply(jobs: int = 0, then: str | None = None, note: str = "", **removed: tuple[int, int]) -> CleanReply:
    views = tuple(CleanedView(kind=kind, count=count, bytes=size) for kind, (count, size) in removed.items())
    notes = (note,) if note else ()
    return CleanReply(dry_run=False, ended_before=1000.0, jobs=jobs, removed=views, notes=notes, next=then)


def test_it_asks_until_nothing_is_left_and_adds_up(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.cleaned = [
        reply(then="jobs:jz", blobs=(2, 500)),
        reply(2, "jobs:j5", "one stays", logs=(3, 1_500_000)),
        reply(1, None, "one stays", logs=(1, 500_000), rows=(1, 0)),
    ]
    assert run(["clean", "--older-than", "7d", "--keep-results"]) == 0
    asked = [(one.cursor, one.older_than_s, one.keep_results, one.dry_run) for one in server.cleanings]
    week = 7 * 86_400.0
    assert asked == [(None, week, True, False), ("jobs:jz", week, True, False), ("jobs:j5", week, True, False)]
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["WHAT", "COUNT", "SIZE"],
        ["blobs", "2", "500", "B"],
        ["logs", "4", "2.0", "MB"],
        ["rows", "1", "0", "B"],
    ]
    assert lines[4].startswith("2.0 MB removed: 3 jobs that ended before ")
    assert said.err == "one stays\n"


def test_a_dry_run_says_that_nothing_went(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.cleaned = [reply(1, logs=(1, 12))]
    assert run(["clean", "--dry-run"]) == 0
    assert server.cleanings[0].dry_run
    assert server.cleanings[0].older_than_s is None
    assert "12 B would go; nothing was removed (--dry-run): 1 jobs" in capsys.readouterr().out


def test_json_is_one_reply(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.cleaned = [reply(2, "jobs:j5", logs=(3, 7)), reply(1, logs=(1, 5), rows=(1, 0))]
    assert run(["clean", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["jobs"], told["next"]) == (3, None)
    assert told["removed"] == [
        {"kind": "logs", "count": 4, "bytes": 12},
        {"kind": "rows", "count": 1, "bytes": 0},
    ]


def test_a_job_that_ended_just_now_cannot_be_cleaned(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["clean", "--older-than", "5m"]) == 2
    line = capsys.readouterr().err
    assert "--older-than" in line
    assert "5m00s is less than 15m" in line
    assert server.cleanings == []


def test_a_refusal_is_one_line(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.refusals["/v1/clean"] = problem("forbidden", "this needs the role admin; ada is a submitter")
    assert run(["clean"]) == 4
    assert capsys.readouterr().err == "tpu: this needs the role admin; ada is a submitter\n"
