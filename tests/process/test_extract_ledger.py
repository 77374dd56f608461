"""Extraction workers that are killed, stopped and lied to: exactly one committed copy of each row, and no garbage.

Workers are real processes on one bucket, a directory or the emulated Cloud Storage. Each object call that a worker
makes is listed, and a worker is killed before and after each of them. What counts is what an independent checker finds
in the bucket (`extraction.check`), not what workers say.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.emulator.gcs_faults import Fault
from penstock.extract.iterators import batches
from penstock.extract.reader import open as open_run
from tests.contract.objects.servers import BUCKET, Emulator, gcs_emulator
from tests.process.extraction import CALLS, SITES, document_of, tokens_of, values_of

ROOT = Path(__file__).parents[2]
WHOLE_S = 150  #: for a machine ten times slower than ours
PARTS = 4

READS = ("get", "list", "survey")

POINTS = [f"kill-before:{call}" for call in CALLS]
# A read leaves nothing behind: to be killed after it is to be killed before the next call.
POINTS += [f"kill-after:{call}" for call in CALLS if not call.startswith(READS)]
POINTS += [f"{how}:{call}" for call in CALLS if call.startswith("put_new") for how in ("lose", "taken")]
POINTS += ["damage:put_new:data", "stop-before:put_new:commits", "stop-before:put_new:data"]
MORE_POINTS = [f"kill-after:{call}" for call in CALLS if call.startswith(READS)]
MORE_POINTS += [f"lose:{call}" for call in CALLS if not call.startswith("put_new")]
MORE_POINTS += [
    f"{how}:put_new:{what}:{time}"
    for how in ("kill-before", "kill-after")
    for what in ("data", "commits")
    for time in (2, 3)
]
MORE_POINTS += [f"stop-before:{call}" for call in ("get:commits", "list:commits", "put_new:leases", "put_new:manifest")]
#: On a bucket the server itself loses answers, refuses what it did (a retry meets its own success), gets wrong bytes.
BUCKET_POINTS = [*POINTS, *(point for point in MORE_POINTS if not point.startswith("lose"))]
BUCKET_POINTS += [f"spoil:{call}" for call in CALLS if call.startswith("put_new")]


def killing(*programs: tuple[str, ...], **environment: str) -> list[str]:
    """All lines that the programs say, run at the same time; each must end well."""
    head = [sys.executable, "-m", "tests.process.extract_killing"]
    environ = {**os.environ, **environment}
    lines: list[str] = []
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [*head, *words],
                    cwd=ROOT,
                    env=environ,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
            for words in programs
        ]
        try:
            for process in started:
                lines += process.communicate(timeout=WHOLE_S)[0].splitlines()
                assert process.returncode == 0, lines
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # its workers too: one of them may be asleep for ever
    return lines


@pytest.fixture(scope="module")
def gcs() -> Iterator[Emulator]:
    with gcs_emulator() as emulator:
        yield emulator


def test_every_object_call_of_a_worker_is_in_the_list(tmp_path: Path) -> None:
    assert killing(("calls", str(tmp_path))) == sorted(CALLS)


@pytest.mark.parametrize("points", [POINTS, pytest.param(MORE_POINTS, marks=pytest.mark.long)], ids=["first", "more"])
def test_a_worker_struck_at_any_object_call_loses_and_doubles_nothing(tmp_path: Path, points: list[str]) -> None:
    parts = [points[number::PARTS] for number in range(PARTS)]
    programs = [("points", str(tmp_path / str(number)), *part) for number, part in enumerate(parts)]
    assert sorted(killing(*programs)) == sorted(f"{point} ok" for point in points)


@pytest.mark.long
def test_a_worker_struck_at_any_call_of_a_bucket_loses_and_doubles_nothing(gcs: Emulator) -> None:
    points = BUCKET_POINTS
    parts = [points[number::PARTS] for number in range(PARTS)]
    programs = [("points", f"gs://{BUCKET}/points{number}", *part) for number, part in enumerate(parts)]
    try:
        assert sorted(killing(*programs, **gcs.environment)) == sorted(f"{point} ok" for point in points)
        by_server = [point for point in points if point.startswith(("lose", "taken", "spoil"))]
        assert gcs.struck() == [1] * len(by_server)
    finally:
        gcs.heal()


@pytest.mark.parametrize("storing_max", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_worker_that_is_killed_costs_its_unit_and_one_that_is_being_stored(tmp_path: Path, storing_max: int) -> None:
    lost = killing(("losses", str(tmp_path / "root"), "1", "6", str(storing_max)))[0].split()
    assert len(lost) == 6
    assert all(int(units) <= 1 + storing_max for units in lost), lost
    assert any(int(units) for units in lost), "nothing was killed at work"


def test_eight_workers_on_a_directory(tmp_path: Path) -> None:
    assert killing(("crowd", str(tmp_path / "root"), "1", "24", "4")) == ["ok"]


def test_eight_workers_on_a_bucket_that_loses_answers_and_damages_uploads(gcs: Emulator) -> None:
    runs = f"{BUCKET}/crowd/runs/"
    gcs.plant(
        # Applied and refused: the client's own retry then meets its own success, as 412.
        Fault("refuse_after", subject=runs, method="PUT", skip=5, times=2),
        Fault("lose", subject=runs, method="PUT", skip=20, times=2),
        Fault("damage", subject=runs, method="PUT", skip=40, times=1),
        Fault("refuse", subject=runs, method="PUT", skip=60, times=2),
    )
    try:
        words = ("crowd", f"gs://{BUCKET}/crowd", "2", "24", "4")
        assert killing(words, STORAGE_EMULATOR_HOST=gcs.url) == ["ok"]
        assert all(gcs.struck())
    finally:
        gcs.heal()
    with open_run(f"gs://{BUCKET}/crowd", gcs.environment) as run:
        for row in range(72):
            if len(tokens_of(row)):
                assert run.values(document_of(row), SITES[0]).tobytes() == values_of(row, SITES[0]).tobytes()
        assert sum(len(batch) for batch in batches(run, SITES[1], 16, block_rows=7, keep_rest=True)) == len(run)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_eight_workers_for_longer_on_a_directory(tmp_path: Path, seed: int) -> None:
    assert killing(("crowd", str(tmp_path / "root"), str(seed), "200", "30")) == ["ok"]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_eight_workers_for_longer_on_a_bucket(gcs: Emulator, seed: int) -> None:
    address = f"gs://{BUCKET}/long{seed}"
    faults = [Fault("lose", subject=f"{BUCKET}/long{seed}/", skip=70 * number, times=1) for number in range(1, 6)]
    faults += [Fault("refuse_after", subject=f"{BUCKET}/long{seed}/", skip=70 * number, times=1) for number in range(6)]
    gcs.plant(*faults)
    try:
        assert killing(("crowd", address, str(seed), "80", "16"), STORAGE_EMULATOR_HOST=gcs.url) == ["ok"]
    finally:
        gcs.heal()
