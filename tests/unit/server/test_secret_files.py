"""Secrets on disk: whole, private, and under their own team only."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from penstock.domain.admission import BadInput
from penstock.server.secret_files import SecretFiles


def test_values_come_back_and_are_private(tmp_path: Path) -> None:
    secrets = SecretFiles(tmp_path / "secrets")
    secrets.put("lab", "KEY", "väl\r\nue\n")
    secrets.put("lab", "KEY2", "x")
    assert secrets.get("lab", "KEY") == "väl\r\nue\n"
    assert secrets.names("lab") == ("KEY", "KEY2")
    (file,) = (tmp_path / "secrets").glob("*/KEY")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert secrets.delete("lab", "KEY")
    assert not secrets.delete("lab", "KEY")
    assert secrets.get("lab", "KEY") is None


@pytest.mark.parametrize("team", ["..", ".", "a/b", "../lab", "%2E%2E", "team\u202e"])
def test_a_team_name_is_never_a_path(tmp_path: Path, team: str) -> None:
    home = tmp_path / "deep" / "secrets"
    secrets = SecretFiles(home)
    secrets.put("lab", "KEY", "lab's")
    secrets.put(team, "KEY", "own")
    assert secrets.get("lab", "KEY") == "lab's"
    assert secrets.get(team, "KEY") == "own"
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.parent.parent == home for path in written)
    assert len(written) == 2


@pytest.mark.parametrize("name", ["", "../KEY", "a/b", ".hidden", "1KEY", "KEY\n", "a-b", "x" * 129])
def test_a_name_must_fit_an_environment(tmp_path: Path, name: str) -> None:
    secrets = SecretFiles(tmp_path)
    with pytest.raises(BadInput, match="name"):
        secrets.put("lab", name, "x")
    with pytest.raises(BadInput, match="name"):
        secrets.get("lab", name)


def test_what_the_server_was_given_counts_for_its_team_only(tmp_path: Path) -> None:
    secrets = SecretFiles(tmp_path, {("lab", "GIVEN"): "g"})
    assert secrets.names("lab") == ("GIVEN",)
    assert secrets.get("lab", "GIVEN") == "g"
    assert secrets.get("other", "GIVEN") is None
    secrets.put("lab", "GIVEN", "own")
    assert secrets.get("lab", "GIVEN") == "own"
