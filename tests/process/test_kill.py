"""kill -9 of a controller on an SQLite file: the store is sound, and every acknowledged submit is in it (S1)."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.ports.store import Reader
from penstock.store.sqlite import SqliteStore
from tests.process.installation import SystemClock

ROOT = Path(__file__).parents[2]
TPU = Path(sys.executable).with_name("tpu")
KILLS = 4

pytestmark = pytest.mark.slow


def _run_until_killed(store: Path, folder: Path, chance: random.Random) -> list[str]:
    """Let a controller lead and take jobs in, kill it in the middle, and answer what it had acknowledged."""
    # The same name each time: the next incarnation of a holder need not wait out its predecessor's term.
    command = [sys.executable, "-m", "tests.process.installation", str(store), str(folder), "server"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline().strip() for _ in range(chance.randrange(1, 400))]
        process.kill()
        acknowledged += process.stdout.read().split("\n")[:-1]
    assert process.returncode == -9
    return acknowledged


def _what_is_kept(path: Path) -> tuple[set[str], list[int]]:
    """Ids of all jobs, and the epochs that were ever given out."""

    def look(reader: Reader) -> tuple[set[str], list[int]]:
        events = reader.events(0, 1_000_000)
        made = [event.id for event in events if event.kind == "job.created"]
        epochs = [event.epoch for event in events if event.kind == "leader.elected"]
        return {job.id for job in reader.jobs(made)}, epochs

    async def read() -> tuple[set[str], list[int]]:
        store = SqliteStore.open(path, SystemClock())
        found = await store.read(look)
        await store.close()
        return found

    return asyncio.run(read())


def test_no_acknowledged_submit_is_lost_by_kill_9_and_the_doctor_is_content(tmp_path: Path) -> None:
    store, folder, chance = tmp_path / "store.db", tmp_path / "cloud", random.Random(9)
    folder.mkdir()
    acknowledged: set[str] = set()
    for _ in range(KILLS):
        ids = _run_until_killed(store, folder, chance)
        assert ids
        assert not acknowledged.intersection(ids), "every submit was a new job"
        acknowledged.update(ids)
        doctor = subprocess.run([TPU, "doctor", "--store", store], capture_output=True, text=True, check=False)
        assert doctor.returncode == 0, doctor.stdout + doctor.stderr
        kept, _ = _what_is_kept(store)
        assert acknowledged <= kept
    _, epochs = _what_is_kept(store)
    assert epochs == list(range(1, KILLS + 1)), "each incarnation led, under an epoch of its own"
