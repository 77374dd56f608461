"""Settings of bridges: where they may stand, and how a mistake is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.domain.admission import BadInput
from penstock.wiring.bridges import FirestoreSettings, configured_firestore, firestore_settings
from penstock.wiring.settings import load


def test_a_project_is_enough_and_everything_may_be_said() -> None:
    assert firestore_settings({"project": "my-project", "database": None}) == FirestoreSettings("my-project")
    full = {
        "project": "my-project",
        "database": "other",
        "collection": "jobs",
        "public_url": "https://penstock.example.com",
        "sweep_s": 1,
    }
    assert firestore_settings(full) == FirestoreSettings(**full)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "project: None is missing"),
        ({"project": "No Such"}, "project: 'No Such' is not a project's id"),
        ({"project": "p-1", "database": "../x"}, "database: '../x' is not a database's id"),
        ({"project": "p-1", "collection": "a/b"}, "collection: 'a/b' is not the name of a top-level collection"),
        ({"project": "p-1", "public_url": "ftp://x"}, "public_url: 'ftp://x' is not an http:// or https:// address"),
        ({"project": "p-1", "sweep_s": 0}, "sweep_s: 0 is not a number of seconds from 0.1 to 3600"),
        ({"project": "p-1", "colection": "x"}, "colection: 'x' stands under a name that nobody knows"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(given: dict[str, object], line: str) -> None:
    with pytest.raises(BadInput) as caught:
        firestore_settings(given)
    assert str(caught.value).startswith(line)


def test_a_server_runs_one_only_when_its_own_file_says_so(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    environment = {"PENSTOCK_HOME": str(home)}
    assert configured_firestore(environment, home) is None
    (home / "penstock.toml").write_text("[server]\nport = 1\n")
    assert configured_firestore(environment, home) is None
    (home / "penstock.toml").write_text('[bridge.firestore]\nproject = "my-project"\nsweep_s = 2.5\n')
    assert configured_firestore(environment, home) == FirestoreSettings("my-project", sweep_s=2.5)
    (home / "penstock.toml").write_text("[bridge]\nfirestore = 3\n")
    with pytest.raises(BadInput, match=r"bridge\.firestore: 3 is not a table"):
        configured_firestore(environment, home)
    (home / "penstock.toml").write_text("[bridge.firestore]\n")
    with pytest.raises(BadInput, match=r"bridge\.firestore\.project: None is missing"):
        configured_firestore(environment, home)
    (home / "penstock.toml").write_text("[bridge.pubsub]\n")
    with pytest.raises(BadInput, match=r"bridge\.pubsub"):
        configured_firestore(environment, home)


def test_a_project_directory_may_not_choose_whose_documents_run_here(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "penstock.toml").write_text('[bridge.firestore]\nproject = "theirs"\n')
    with pytest.raises(BadInput, match="may not say here whose documents become jobs"):
        load({"PENSTOCK_HOME": str(tmp_path / "home")}, None, clone)
