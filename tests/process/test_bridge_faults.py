"""The Firestore bridge when things break: bridges that race, die at each step, an emulator and a server that go.

What counts is how often each payload ran, by the marks payloads leave themselves, and that every document ends.
"""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tests.process.crashing_bridge import VARIABLE
from tests.process.firestore_house import BridgeHouse, bridge_house, let_all_go, marked, over, wait_for

CRASHING = "tests.process.crashing_bridge"
NUMBERS = count()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BridgeHouse]:
    with bridge_house(tmp_path_factory.mktemp("faults")) as house:
        yield house


@pytest.fixture
def house(shared: BridgeHouse) -> Iterator[BridgeHouse]:
    shared.emulator.clear()
    yield shared
    sys.stdout.write(shared.logs())  # pytest shows it when the test has failed
    shared.end_bridges()


@pytest.fixture
def jobs(house: BridgeHouse) -> Any:
    return house.db().collection("tpu_jobs")


def submit(jobs: Any, how_many: int, then: str = "result = 1", *, wait: bool = False) -> list[str]:
    names = [f"doc{next(NUMBERS)}" for _ in range(how_many)]
    for name in names:
        jobs.document(name).set({"code": marked(name, then, wait=wait), "status": "pending"})
    return names


def ran_once(house: BridgeHouse, names: list[str]) -> None:
    runs = house.runs()
    assert {name: runs[name] for name in names} == dict.fromkeys(names, 1)


def test_two_bridges_race_and_each_document_runs_once(house: BridgeHouse, jobs: Any) -> None:
    names = submit(jobs, 115)
    first = house.bridge()
    house.bridge()
    first.send_signal(signal.SIGSTOP)  # so that the other has some for itself, whoever was up first
    alone = submit(jobs, 5)
    wait_for(jobs, alone, lambda one: bool(one.get("bridge")))
    first.send_signal(signal.SIGCONT)
    names += alone + submit(jobs, 80)  # while both are at work
    found = wait_for(jobs, names, over)
    assert {one["status"] for one in found.values()} == {"completed"}
    assert len({one["job_id"] for one in found.values()}) == len(names) == 200
    ran_once(house, names)
    assert len(Counter(one["bridge"] for one in found.values())) == 2, "one of the bridges took nothing"


#: After a step is before the next one, but for the bridge's own memory: those run with the long tests.
STEPS = ("before:claim", "before:submit", "before:note", "before:running", "before:end", "after:end")
AFTERS = ("after:claim", "after:submit", "after:note", "after:running")


@pytest.mark.parametrize("where", [*STEPS, *(pytest.param(step, marks=pytest.mark.long) for step in AFTERS)])
def test_a_bridge_killed_at_any_step_loses_and_repeats_nothing(house: BridgeHouse, jobs: Any, where: str) -> None:
    ends = where.endswith(":end")
    # What is over at once may never be seen running; what runs at once is not noted by a write of its own.
    names = submit(jobs, 3 if ends else 6, wait=not ends)
    doomed = house.bridge(module=CRASHING, env={VARIABLE: where})
    assert doomed.wait(60) == -signal.SIGKILL
    house.bridge()
    if not ends:
        let_all_go(house, jobs, names)
    found = wait_for(jobs, names, over)
    assert {one["status"] for one in found.values()} == {"completed"}
    ran_once(house, names)


@pytest.mark.parametrize("where", ["before:cancel", "after:cancel", "before:end"])
def test_a_bridge_killed_while_it_cancels(house: BridgeHouse, jobs: Any, where: str) -> None:
    doomed = house.bridge(module=CRASHING, env={VARIABLE: where})
    (name,) = submit(jobs, 1, wait=True)
    job = wait_for(jobs, [name], lambda one: one.get("status") == "running")[name]["job_id"]
    jobs.document(name).update({"status": "cancel_requested"})
    assert doomed.wait(60) == -signal.SIGKILL
    house.bridge()
    ended = wait_for(jobs, [name], over)[name]
    assert (ended["status"], ended["error"]["type"]) == ("failed", "Cancelled")
    assert house.view(job)["state"] == "cancelled"


def test_documents_deleted_while_no_bridge_is_there(house: BridgeHouse, jobs: Any) -> None:
    first = house.bridge()
    names = submit(jobs, 2, wait=True)
    found = wait_for(jobs, names, lambda one: one.get("status") == "running")
    house.end_bridge(first, signal.SIGKILL)
    jobs.document(names[0]).delete()
    house.bridge()
    assert house.ended(found[names[0]]["job_id"])["state"] == "cancelled"
    house.let_go(found[names[1]]["job_id"])
    assert wait_for(jobs, names[1:], over)[names[1]]["status"] == "completed"
    ran_once(house, names)


def test_jobs_that_end_while_no_bridge_is_there(house: BridgeHouse, jobs: Any) -> None:
    first = house.bridge()
    names = submit(jobs, 3, wait=True)
    found = wait_for(jobs, names, lambda one: one.get("status") == "running")
    house.end_bridge(first, signal.SIGKILL)
    for name in names:
        house.let_go(found[name]["job_id"])
        house.ended(found[name]["job_id"])
    late = submit(jobs, 2)
    house.bridge()
    assert {one["status"] for one in wait_for(jobs, names + late, over).values()} == {"completed"}
    ran_once(house, names + late)


def test_a_second_bridge_takes_over_what_a_dead_one_had(house: BridgeHouse, jobs: Any) -> None:
    first = house.bridge()
    (name,) = submit(jobs, 1, wait=True)
    found = wait_for(jobs, [name], lambda one: one.get("status") == "running")[name]
    house.bridge()
    house.end_bridge(first, signal.SIGKILL)
    house.let_go(found["job_id"])
    assert wait_for(jobs, [name], over)[name]["status"] == "completed"
    ran_once(house, [name])


def test_the_emulator_goes_and_comes_back(house: BridgeHouse, jobs: Any) -> None:
    """Killed with documents in every state, started again with what it had: the bridge goes on by itself."""
    bridge = house.bridge()
    held = submit(jobs, 2, wait=True)
    running = wait_for(jobs, held, lambda one: one.get("status") == "running")
    saved = house.emulator.export()
    house.emulator.stop(signal.SIGKILL)
    for one in running.values():
        house.let_go(one["job_id"])
        house.ended(one["job_id"])  # the write of its end fails, and is tried on
    house.emulator.start(saved)
    jobs = house.db().collection("tpu_jobs")
    late = submit(jobs, 5)
    assert {one["status"] for one in wait_for(jobs, held + late, over).values()} == {"completed"}
    assert bridge.poll() is None
    ran_once(house, held + late)


def test_the_server_goes_and_comes_back(house: BridgeHouse, jobs: Any) -> None:
    bridge = house.bridge()
    held = submit(jobs, 2, wait=True)
    running = wait_for(jobs, held, lambda one: one.get("status") == "running")
    house.kill_server()
    late = submit(jobs, 5)  # taken by the bridge, which cannot submit them yet
    wait_for(jobs, late, lambda one: one.get("status") == "scheduled")
    house.open()
    for one in running.values():
        house.let_go(one["job_id"])
    assert {one["status"] for one in wait_for(jobs, held + late, over).values()} == {"completed"}
    assert bridge.poll() is None
    ran_once(house, held + late)
