"""Caches of this machine's hosts: what nobody used goes, what a slice may use stays, half-done work is finished."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.capacity.local import LocalCapacity
from penstock.wire.api import CleanedView
from penstock.wiring.caches import ASIDE, HostCaches
from penstock.wiring.clock import SystemClock

OLD, NEW, BETWEEN = 1_000.0, 3_000.0, 2_000.0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two of each kind, one of them used lately."""
    for number, used_at in enumerate((OLD, NEW)):
        for folder in ("blobs", "snapshots"):
            write(tmp_path / "cache" / folder / f"{number}a" / (f"{number}a" + "0" * 62), b"x" * 10, used_at)
        environment = tmp_path / "cache" / "environments" / (str(number) * 32)
        write(environment / "venv" / "bin" / "python", b"x" * 100, OLD)
        write(environment / "ready", b"pip", used_at)
        (environment / "venv" / "link").symlink_to("/etc/passwd")
        (environment / "venv" / "bin").chmod(0o500)
    write(tmp_path / "cache" / "environments" / ("2" * 32) / "half", b"being built", OLD)
    write(tmp_path / "cache" / "snapshots" / "hashes-of-a-directory.json", b"the client's", OLD)
    return tmp_path


def write(path: Path, data: bytes, used_at: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (used_at, used_at))


def clean(home: Path, *, dry_run: bool = False) -> tuple[Sequence[CleanedView], str]:
    local = LocalCapacity(
        home / "slices", label="ours", clock=SystemClock(), server=lambda: "", join_token=lambda _: ""
    )

    async def call() -> tuple[Sequence[CleanedView], str]:
        return await HostCaches(home / "cache", local)(BETWEEN, dry_run)

    return asyncio.run(call())


def files(home: Path) -> set[str]:
    return {str(path.relative_to(home / "cache")) for path in (home / "cache").rglob("*") if path.is_file()}


def test_what_nobody_used_goes_and_a_dry_run_counts_the_same(home: Path) -> None:
    before = files(home)
    counted = clean(home, dry_run=True)
    assert files(home) == before
    removed = clean(home)
    assert removed == counted
    assert [(view.kind, view.count, view.bytes) for view in removed[0]] == [
        ("cached blobs", 1, 10),
        ("cached snapshots", 1, 10),
        ("environments", 1, 103),
    ]
    gone = {path for path in before if path.startswith(("blobs/0a", "snapshots/0a", "environments/0"))}
    assert files(home) == before - gone
    assert not (home / "cache" / ASIDE).exists()
    assert clean(home) == ([], "")


def test_nothing_goes_while_there_is_a_slice(home: Path) -> None:
    (home / "slices" / "s1").mkdir(parents=True)
    before = files(home)
    views, note = clean(home)
    assert (views, files(home)) == ((), before)
    assert "there are slices that may use them" in note


def test_what_was_moved_aside_before_a_crash_is_removed(home: Path) -> None:
    write(home / "cache" / ASIDE / "x" / "y", b"", OLD)
    (home / "slices" / "s1").mkdir(parents=True)
    clean(home)
    assert not (home / "cache" / ASIDE).exists()


def test_a_machine_without_caches_has_nothing_to_clean(tmp_path: Path) -> None:
    assert clean(tmp_path) == ([], "")
