"""The agent's start: alone on its state directory, or not at all."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from penstock.agent import __main__ as agent


def test_a_second_agent_on_one_state_directory_waits_and_gives_up_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "TAKEN_S", 0.1)
    token = tmp_path / "token"
    token.write_text("t")
    given = ["--server", "http://127.0.0.1:1", "--slice", "s1", "--provider-id", "p", "--token-file", str(token)]

    async def run(*_: object) -> None:
        raise AssertionError("it began all the same")

    monkeypatch.setattr(agent, "_run", run)
    with (tmp_path / "agent.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert agent.main([*given, "--state", str(tmp_path)]) == agent.EXIT_TAKEN
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "another agent runs on this state directory" in said
    with pytest.raises(AssertionError, match="it began"):
        agent.main([*given, "--state", str(tmp_path)])
