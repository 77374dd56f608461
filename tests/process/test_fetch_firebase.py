"""`tools/fetch_firebase.py` with an npm that is missing, fails, or brings something else: told, and nothing is kept."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.tidy.tracked import ROOT

TOOL = ROOT / "tools" / "fetch_firebase.py"
PAGE = ROOT / "examples" / "firestore_web"


def fetch(tmp_path: Path, npm: str | None) -> tuple[int, str]:
    """Run it where `npm` is this shell script, or is not there."""
    programs = tmp_path / "bin"
    programs.mkdir()
    if npm is not None:
        (programs / "npm").write_text(f"#!/bin/sh\n{npm}\n")
        (programs / "npm").chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path / "files")],
        env={**os.environ, "PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not (tmp_path / "files").exists()
    assert done.stderr.count("\n") == 1
    return done.returncode, done.stderr


def test_without_npm_it_says_what_is_missing(tmp_path: Path) -> None:
    assert fetch(tmp_path, None) == (3, "fetch_firebase: npm is not installed; it comes with Node.js\n")


def test_what_npm_says_is_passed_on(tmp_path: Path) -> None:
    code, said = fetch(tmp_path, "echo 'no network' >&2; echo 'try again' >&2; exit 1")
    assert code == 3
    assert said.endswith(": no network try again\n")


def test_other_bytes_than_the_pinned_ones_are_refused(tmp_path: Path) -> None:
    code, said = fetch(tmp_path, "echo something else > firebase-${3#firebase@}.tgz")
    assert code == 1
    assert "is not the pinned" in said


def test_the_page_names_the_pinned_version_and_no_other() -> None:
    (pinned,) = re.findall(r'^VERSION = "([\d.]+)"', TOOL.read_text(), re.MULTILINE)
    texts = [(PAGE / name).read_text() for name in ("index.html", "sign_in.js")]
    named = [re.findall(r"/firebasejs/([\d.]+)/", text) for text in texts]
    assert all(named)
    assert {version for versions in named for version in versions} == {pinned}
    wanted = {name for text in texts for name in re.findall(r"/firebasejs/[\d.]+/([\w-]+\.js)", text)}
    assert wanted == set(re.findall(r'"(firebase-\w+\.js)"', TOOL.read_text()))
