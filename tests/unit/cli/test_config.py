"""`tpu config show`: every setting with its source, and no secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import run


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[object, str]]:
    assert run(["config", "show", "--json"]) == 0
    return {row["name"]: (row["value"], row["from"]) for row in json.loads(capsys.readouterr().out)}


def test_each_value_names_its_source(
    home: Path, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "penstock.toml").write_text("[server]\nlocal_hosts = 2\n")
    monkeypatch.setenv("PENSTOCK_STORE", "postgresql://me:hunter2@db/p")
    monkeypatch.setenv("PENSTOCK_URL", "https://penstock.example")
    monkeypatch.setenv("PENSTOCK_TOKEN", "a-secret-token")
    found = shown(capsys)
    assert found["home"] == (str(home), "PENSTOCK_HOME")
    assert found["server.local_hosts"] == (2, str(project / "penstock.toml"))
    assert found["server.store"] == ("postgresql://me:***@db/p", "PENSTOCK_STORE")
    assert found["server.root"] == (str(home / "root"), "default")
    assert found["client.url"] == ("https://penstock.example", "PENSTOCK_URL")
    assert found["client.token"] == ("(set)", "PENSTOCK_TOKEN")
    assert not home.exists()


def test_the_table_says_the_same_without_secrets(
    home: Path, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_STORE", "postgresql://me:hunter2@db/p")
    assert run(["config", "show"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["SETTING", "VALUE", "FROM"]
    assert "client.url" in out
    assert "no server is configured" in out
    assert "hunter2" not in out


def test_a_mistake_in_a_file_is_one_line(home: Path, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "penstock.toml").write_text("[server]\nstor = 'x'\n")
    assert run(["config", "show"]) == 2
    err = capsys.readouterr().err
    assert "did you mean server.store?" in err
    assert err.count("\n") == 1
