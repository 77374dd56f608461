"""SQLite under kill -9 and failing disks: what was acknowledged is there, and the store is sound."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from penstock.ports.store import Unavailable, UnknownOutcome
from penstock.store.doctor import examine
from penstock.store.sqlite import SqliteLink, SqliteStore
from tests.contract.store.commit_forever import live_and_die
from tests.contract.store.faulty_disk import FaultyDisk
from tests.contract.store.harness import HandClock, sqlite_file

ROOT = Path(__file__).parents[3]
KILLS = 10


def sound(path: str) -> set[str]:
    """The ids of all jobs, once the doctor has found nothing wrong."""
    link = SqliteLink(path)
    try:
        findings = examine(link)
        assert [trouble for finding in findings for trouble in finding.troubles] == []
        assert len(findings) == 7
        return {row[0] for row in link.rows("select id from jobs")}
    finally:
        link.close()


def _run_until_killed(path: str, first: int, chance: random.Random) -> list[str]:
    """Let the process commit a random number of times, kill it, and answer what it had acknowledged."""
    command = [sys.executable, "-m", "tests.contract.store.commit_forever", path, str(first)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline().strip() for _ in range(chance.randrange(1, 120))]
        process.kill()
        acknowledged += process.stdout.read().split("\n")[:-1]
    assert process.returncode == -9
    return acknowledged


def test_nothing_acknowledged_is_lost_by_kill_9(tmp_path: Path) -> None:
    path, chance = sqlite_file(tmp_path), random.Random(2)
    acknowledged: set[str] = set()
    for round_ in range(KILLS):
        lines = _run_until_killed(path, round_ * 100_000, chance)  # more than a pipe takes
        assert lines
        acknowledged.update(lines)
        assert acknowledged <= sound(path)


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    disk = FaultyDisk("faulty")
    yield disk
    disk.unregister()


async def _storm(path: str, disk: FaultyDisk, **fault: Any) -> dict[str, set[str]]:
    """Groups of concurrent verbs over a disk that fails; ids by what their callers were told."""
    store = SqliteStore.open(path, HandClock(), vfs=disk.name)
    disk.arm(**fault)
    told: dict[str, set[str]] = {"done": set(), "unavailable": set(), "unknown": set()}
    for group in range(12):
        numbers = range(group * 5, group * 5 + 5)
        outcomes = await asyncio.gather(
            *(store.transact(live_and_die, number) for number in numbers), return_exceptions=True
        )
        for number, outcome in zip(numbers, outcomes, strict=True):
            match outcome:
                case str():
                    told["done"].add(outcome)
                case Unavailable():
                    told["unavailable"].add(f"j{number:04}")
                case UnknownOutcome():
                    told["unknown"].add(f"j{number:04}")
                case _:
                    raise AssertionError(f"not one of the port's errors: {outcome!r}")
    await store.close()
    return told


@pytest.mark.parametrize("sync", range(1, 11))
def test_a_failed_sync_is_an_unknown_outcome_and_the_store_goes_on(tmp_path: Path, disk: FaultyDisk, sync: int) -> None:
    path = sqlite_file(tmp_path)
    told = asyncio.run(_storm(path, disk, sync=sync))
    assert disk.fired == 1
    assert told["unknown"]
    assert not told["unavailable"]
    found = sound(path)
    assert told["done"] <= found <= told["done"] | told["unknown"]
    assert "j0059" in told["done"]  # the last group, after the fault


@pytest.mark.parametrize("first", [1, 2, 3, 5, 8, 13, 40])
def test_a_full_disk_writes_nothing_or_is_unknown_and_the_store_goes_on(
    tmp_path: Path, disk: FaultyDisk, first: int
) -> None:
    path = sqlite_file(tmp_path)
    told = asyncio.run(_storm(path, disk, writes=range(first, first + 6)))
    assert disk.fired >= 1
    assert told["unavailable"] | told["unknown"]
    found = sound(path)
    assert told["done"] <= found <= told["done"] | told["unknown"]
    assert "j0059" in told["done"]


def test_a_second_process_that_holds_the_file_makes_writers_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        store = SqliteStore.open(path, HandClock())
        other.begin()
        with pytest.raises(Unavailable, match="another process"):
            await store.transact(live_and_die, 1)
        assert await store.read(lambda r: r.last_seq()) == 0
        other.rollback()
        await store.transact(live_and_die, 1)
        await store.close()

    monkeypatch.setattr("penstock.store.sqlite.BUSY_S", 0.1)
    path = sqlite_file(tmp_path)
    asyncio.run(SqliteStore.open(path, HandClock()).close())
    other = SqliteLink(path)
    asyncio.run(story())
    other.close()
    assert sound(path) == {"j0001"}


def test_a_link_that_cannot_even_roll_back_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = SqliteLink(sqlite_file(tmp_path))
    link.script("create table t (a)")
    link.begin()
    link.write([("insert into t values ($1)", [(1,)])])
    real = link._execute

    def no_rollback(sql: str, *args: Any) -> Any:
        if sql == "rollback":
            raise apsw.IOError("no")
        return real(sql, *args)

    monkeypatch.setattr(link, "_execute", no_rollback)
    link.rollback()
    assert not link.in_transaction
    link.begin()
    assert link.rows("select * from t") == []
    link.rollback()
    link.close()


def test_a_file_that_is_no_store_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("this is not a database, only long enough to be mistaken for one" * 20)
    with pytest.raises(Unavailable, match="not a database"):
        SqliteStore.open(path, HandClock())
    with pytest.raises(Unavailable, match="unable to open"):
        SqliteStore.open(tmp_path / "no" / "such" / "folder" / "x.db", HandClock())
