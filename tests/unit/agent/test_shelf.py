"""Which environments go when a host has too many: the longest unused, and never one in use."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.agent import shelf

HOUR_NS = 3600 * 1_000_000_000


def environment(folder: Path, name: str, hours: float, size: int = 100_000) -> Path:
    """One that was used so many hours ago."""
    home = folder / name
    (home / "venv" / "bin").mkdir(parents=True)
    (home / "venv" / "data").write_bytes(os.urandom(size))
    (home / "ready").write_text("setup")
    used = (home / "ready").stat().st_mtime_ns - int(hours * HOUR_NS)
    os.utime(home / "ready", ns=(used, used))
    return home


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, hours in (("old", 30), ("older", 40), ("young", 2), ("new", 0)):
        environment(tmp_path, name, hours)
    return tmp_path


def test_nothing_goes_while_all_fit(folder: Path) -> None:
    assert shelf.make_room(folder, folder / "new", 1 << 30) == []
    assert {each.name for each in folder.glob("*/")} == {"old", "older", "young", "new"}


def test_the_longest_unused_go_first_until_the_rest_fits(folder: Path) -> None:
    assert shelf.make_room(folder, folder / "new", 350_000) == ["older"]
    assert shelf.make_room(folder, folder / "new", 150_000) == ["old", "young"]
    assert [each.name for each in folder.iterdir() if each.is_dir()] == ["new"]


def test_what_was_used_within_the_hour_stays(tmp_path: Path) -> None:
    for name in ("a", "b"):
        environment(tmp_path, name, 0.5)
    assert shelf.make_room(tmp_path, tmp_path / "a", 0) == []


def test_one_that_a_process_runs_in_stays(folder: Path) -> None:
    venv = folder / "older" / "venv"
    argv = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]
    env = {**os.environ, "VIRTUAL_ENV": str(venv)}
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert shelf.in_use(folder) == {"older"}
        assert shelf.make_room(folder, folder / "new", 0) == ["old", "young"]
        process.communicate()
    assert shelf.make_room(folder, folder / "new", 0) == ["older"]


def test_one_that_is_being_built_stays_and_remains_of_a_killed_sweep_go(folder: Path) -> None:
    (folder / ".gone-12345678").mkdir()
    with (folder / "older.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert shelf.make_room(folder, folder / "new", 0) == ["old", "young"]
    assert (folder / "older" / "ready").exists()
    assert not list(folder.glob(".gone-*"))
