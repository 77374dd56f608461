"""`tpu alias`, `tpu settings`, `tpu dir`: kept in one file, changed safely, used by `run`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.cli import preferences
from penstock.cli.main import run
from penstock.cli.preferences import DEFAULT_ALIASES, Preferences


def test_the_default_aliases_are_there(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["alias", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == DEFAULT_ALIASES
    assert set(DEFAULT_ALIASES) == {"lr", "bs", "ep", "wd", "b1", "b2", "ckpt"}
    assert not (home / "settings.toml").exists()


def test_aliases_are_set_changed_and_taken_away(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["set", "wu", "config.warmup"], ["set", "lr", "optim.lr"], ["rm", "bs"]):
        assert run(["alias", *args]) == 0
    known = preferences.load().all_aliases
    assert (known["wu"], known["lr"], "bs" in known) == ("config.warmup", "optim.lr", False)
    assert run(["alias"]) == 0
    assert "wu     config.warmup" in capsys.readouterr().out
    assert run(["alias", "rm", "bs"]) == 2
    assert run(["alias", "rm", "wu"]) == 0
    assert "wu" not in preferences.load().all_aliases


@pytest.mark.parametrize(("name", "full"), [("a=b", "x"), ("", "x"), ("a", "-x"), ("a", "x\ny")])
def test_an_alias_must_be_a_left_side(name: str, full: str, home: Path) -> None:
    assert run(["alias", "set", "--", name, full]) == 2


def test_settings_keep_their_types(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key, value in (("style", "hydra"), ("wait", "false"), ("refresh_s", "2.5"), ("on", "v5e-8")):
        assert run(["settings", "set", key, value]) == 0
    assert run(["settings", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"style": "hydra", "on": "v5e-8", "wait": False, "refresh_s": 2.5}
    assert run(["settings", "reset", "style"]) == 0
    assert preferences.load().settings.style == "flag"
    assert preferences.load().settings.on == "v5e-8"
    assert run(["settings", "reset"]) == 0
    assert preferences.load().settings == Preferences().settings


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("style", "loud", "style: 'loud' does not fit"),
        ("wait", "maybe", "wait: 'maybe' does not fit"),
        ("refresh_s", "0", "is not between 0.1 and 3600"),
        ("refresh_s", "nan", "is not between 0.1 and 3600"),
        ("colour", "red", "there is no setting 'colour'; choose from style, on, wait, refresh_s"),
    ],
)
def test_a_setting_that_does_not_fit(
    key: str, value: str, told: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["settings", "set", key, value]) == 2
    assert told in capsys.readouterr().err
    assert not (home / "settings.toml").exists()


def test_directories_have_numbers(home: Path, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "sub").mkdir()
    assert run(["dir", "set", "1"]) == 0
    assert run(["dir", "set", "10", "sub"]) == 0
    assert run(["dir", "swap", "1", "10"]) == 0
    assert run(["dir", "get", "10"]) == 0
    assert capsys.readouterr().out == f"{project}\n"
    (project / "sub").rmdir()
    assert run(["dir"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1", str(project / "sub"), "missing"]
    assert run(["dir", "rm", "1"]) == 0
    assert run(["dir", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"10": str(project)}
    for args in (["rm", "1"], ["get", "1"], ["set", "0"], ["set", "101"], ["set", "3", "nowhere"]):
        assert run(["dir", *args]) == 2


@pytest.mark.parametrize("text", ["nonsense", "[settings]\nstyle = 3\n", "[other]\n", "\xff"])
def test_a_broken_file_is_told_and_kept(text: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    (home / "settings.toml").write_bytes(text.encode("latin-1"))
    assert run(["alias", "set", "a", "b"]) == 2
    err = capsys.readouterr().err
    assert "settings.toml" in err
    assert err.count("\n") == 1
    assert (home / "settings.toml").read_bytes() == text.encode("latin-1")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.dictionaries(st.text(min_size=1), st.text(min_size=1), max_size=4))
def test_any_text_survives_the_file(home: Path, aliases: dict[str, str]) -> None:
    try:
        "".join([*aliases, *aliases.values()]).encode()
    except UnicodeEncodeError:
        return  # a lone surrogate cannot come from an argument that is text
    preferences.save(Preferences(aliases=aliases))
    assert tomllib.loads((home / "settings.toml").read_text("utf-8")).get("aliases", {}) == aliases
    assert preferences.load().aliases == aliases
