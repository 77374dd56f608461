"""`tpu doctor`: walls of this machine; the checks of a store are tested beside the store."""

from __future__ import annotations

import json

import pytest

from penstock.agent.sandbox import Walls
from penstock.cli.main import run
from penstock.wiring import walls


@pytest.mark.parametrize(("missing", "code"), [((), 0), (("a payload can use up the memory: no cgroup",), 1)])
def test_missing_walls_are_told_and_fail_only_when_asked(
    missing: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(walls, "try_walls", lambda: Walls(bubblewrap="/usr/bin/bwrap", missing=missing))
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "file system and processes (bubblewrap): stands" in out
    assert all(line in out for line in missing)
    assert run(["doctor", "--strict", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["ok"] is not bool(missing)


def test_a_store_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--store", "/nowhere/at-all.db"]) != 0
    assert capsys.readouterr().err.count("\n") <= 1
