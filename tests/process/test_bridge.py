"""The Firestore bridge against Google's own emulator, with a real server and real jobs: what clients see.

The first queue's submit and monitor code is used as it stands (tests/process/first_queue).
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.firestore_house import (
    PROJECT,
    BridgeHouse,
    Emulator,
    bridge_house,
    let_all_go,
    marked,
    over,
    require_emulator,
    wait_for,
)
from tests.process.machine import until

FIRST = Path(__file__).with_name("first_queue")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BridgeHouse]:
    with bridge_house(tmp_path_factory.mktemp("bridge")) as house:
        house.bridge()
        yield house


@pytest.fixture
def jobs(house: BridgeHouse) -> Any:
    return house.db().collection("tpu_jobs")


def test_the_first_queues_code_works_as_it_stands(house: BridgeHouse) -> None:
    environment = {**house.environment, "GOOGLE_CLOUD_PROJECT": PROJECT}
    code = "\n".join(((FIRST / "submit.txt").read_text(), (FIRST / "monitor.txt").read_text(), "input()"))
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        watchdog = threading.Timer(120, client.kill)
        watchdog.start()
        lines: list[str] = []
        for line in client.stdout:
            lines.append(line.strip())
            if line.startswith(("Result:", "Error:")):
                break
        watchdog.cancel()
        client.communicate("\n", timeout=30)
    assert lines[0].startswith("Job submitted with ID: ")
    assert lines[-1] == "Result: 1000000000.0"
    seen = [line.removeprefix("Status: ") for line in lines if line.startswith("Status: ")]
    order = ["pending", "scheduled", "running", "completed"]
    assert seen[-1] == "completed"
    assert [order.index(status) for status in seen] == sorted(order.index(status) for status in seen)


def test_the_first_queues_other_scripts_work_as_they_stand(house: BridgeHouse, jobs: Any) -> None:
    environment = {**house.environment, "GOOGLE_CLOUD_PROJECT": PROJECT, "PATH": f"{Path(sys.executable).parent}:/bin"}
    submitted = subprocess.run(
        [sys.executable, "-c", (FIRST / "submit_test_job.txt").read_text()],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    id = submitted.stdout.strip().rpartition(" ")[2]
    assert wait_for(jobs, [id], over)[id]["result"] == "1000000.0"
    for each in jobs.stream():
        if "challenge_number" not in (each.to_dict() or {}):
            each.reference.delete()  # it reads every document's number
    listed = subprocess.run(
        ["/bin/bash", "-c", (FIRST / "list.sh.txt").read_text()],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"Job {id}: status=completed, challenge=1\n  Result: 1000000.0" in listed.stdout


def test_a_document_tells_its_whole_story(house: BridgeHouse, jobs: Any) -> None:
    reference = jobs.document("story")
    reference.set(
        {
            "code": marked(
                "story", "print('hello')\nresult = {'n': challenge_number, 'env': os.environ['WHAT']}", wait=True
            ),
            "challenge_number": 7,
            "status": "pending",
            "env": {"WHAT": "x"},
            "accelerator": "v5e-1",
            "priority": 5,
            "notify": ["team-a"],
            "metadata": {"submitted_by": "ada@example.com", "page": "9"},
            "mine": ["kept"],
            "job_id": "j0somebodyelses",
        }
    )
    running = wait_for(jobs, ["story"], lambda one: one.get("status") == "running")["story"]
    assert running["attempt"] == 1
    assert running["job_id"] != "j0somebodyelses"
    view = house.view(running["job_id"])
    assert (view["user"], view["queue"], view["priority"]) == (
        "ada@example.com",
        "firestore:default:ada@example.com",
        5,
    )
    assert "notify:team-a" in view["tags"]
    assert running["log_url"].endswith(f"/v1/jobs/{view['id']}/logs")
    house.let_go(view["id"])
    done = wait_for(jobs, ["story"], over)["story"]
    assert done["status"] == "completed"
    assert done["result"] == "{'n': 7, 'env': 'x'}"
    assert done["result_json"] == '{"n":7,"env":"x"}'
    assert done["mine"] == ["kept"]
    assert done["metadata"] == {"submitted_by": "ada@example.com", "page": "9"}
    assert done["scheduled_at"] <= done["started_at"] <= done["completed_at"] <= done["updated_at"]
    assert house.runs()["story"] == 1


def test_an_error_has_type_message_and_last_lines(jobs: Any) -> None:
    _, raises = jobs.add({"code": "1/0", "status": "pending"})
    _, exits = jobs.add({"code": "import sys\nprint('so long', file=sys.stderr)\nsys.exit(3)", "status": "pending"})
    _, slow = jobs.add({"code": "import time\ntime.sleep(60)", "status": "pending", "timeout": 1})
    found = wait_for(jobs, [raises.id, exits.id, slow.id], over)
    assert {one["status"] for one in found.values()} == {"failed"}
    error = found[raises.id]["error"]
    assert (error["type"], error["message"], error["cause"]) == (
        "ZeroDivisionError",
        "division by zero",
        "user_error",
    )
    assert error["last_lines"][-1] == "ZeroDivisionError: division by zero"
    assert found[exits.id]["error"]["type"] == "SystemExit"
    assert found[exits.id]["error"]["last_lines"] == ["so long"]
    assert found[slow.id]["error"]["type"] == "Timeout"


BAD: dict[str, tuple[dict[str, object], str]] = {
    "no-code": ({}, "code"),
    "code-is-a-number": ({"code": 5}, "code"),
    "code-is-bytes": ({"code": b"x = 1"}, "code"),
    "code-is-empty": ({"code": "  "}, "code"),
    "negative-timeout": ({"code": "x=1", "timeout": -5}, "timeout"),
    "timeout-is-text": ({"code": "x=1", "timeout": "300"}, "timeout"),
    "timeout-is-nan": ({"code": "x=1", "timeout": float("nan")}, "timeout"),
    "challenge-is-text": ({"code": "x=1", "challenge_number": "42"}, "challenge_number"),
    "metadata-is-text": ({"code": "x=1", "metadata": "me"}, "metadata"),
    "submitter-is-a-number": ({"code": "x=1", "metadata": {"submitted_by": 3}}, "metadata.submitted_by"),
    "priority-is-huge": ({"code": "x=1", "priority": 10**9}, "priority"),
    "no-such-accelerator": ({"code": "x=1", "accelerator": "h100"}, "accelerator"),
    "env-of-numbers": ({"code": "x=1", "env": {"A": 1}}, "env"),
    "notify-an-address": ({"code": "x=1", "notify": ["http://169.254.169.254/"]}, "notify"),
}


def test_invalid_documents_fail_once_with_field_and_rule(house: BridgeHouse, jobs: Any) -> None:
    for name, (content, _field) in BAD.items():
        jobs.document(name).set({"status": "pending", "kept": name, **content})
    found = wait_for(jobs, BAD, over)
    for name, (_content, field) in BAD.items():
        error = found[name]["error"]
        assert (found[name]["status"], error["type"], error["field"]) == ("failed", "InvalidDocument", field), name
        assert error["message"].startswith(f"{field}: "), name
        assert "\n" not in error["message"]
        assert found[name]["kept"] == name
    before = {name: one["updated_at"] for name, one in found.items()}
    _, after = jobs.add({"code": "result = 1", "status": "pending"})
    wait_for(jobs, [after.id], over)
    assert {name: one["updated_at"] for name, one in wait_for(jobs, BAD, over).items()} == before  # never again


def test_the_largest_documents_end_too(jobs: Any) -> None:
    """A document that is full has no room for a status's fields; it must still end."""
    room = (1 << 20) - 200
    jobs.document("full").set({"status": "pending", "code": "#" * room})
    assert wait_for(jobs, ["full"], over)["full"]["status"] == "failed"


def test_a_large_result_becomes_a_reference(house: BridgeHouse, jobs: Any) -> None:
    _, text = jobs.add({"code": "result = 'x' * (2 << 20)", "status": "pending"})
    _, numbers = jobs.add({"code": "result = list(range(200_000))", "status": "pending"})
    # It fits the bound of a result, but not beside this much code.
    _, crowded = jobs.add({"code": f"result = 'y' * 600_000 # {'#' * 600_000}", "status": "pending"})
    found = wait_for(jobs, [text.id, numbers.id, crowded.id], over)
    for id, begin, size in (
        (text.id, "xxx", 2 << 20),
        (numbers.id, "[0, 1, 2", len(str(list(range(200_000))).replace(" ", ""))),
        (crowded.id, "yyy", 600_000),
    ):
        one = found[id]
        assert one["status"] == "completed"
        assert one["result"].startswith(begin)
        assert len(one["result"]) == 2_000
        assert (one["result_truncated"], one["result_bytes"]) == (True, size)
        status, whole = house.call("GET", "/" + one["result_url"].split("/", 3)[3])
        assert status == 200
        assert str(whole["result"]).startswith(begin)


def test_cancel_requested_cancels_wherever_the_document_stands(house: BridgeHouse, jobs: Any) -> None:
    _, runs = jobs.add({"code": marked("cancel-running", wait=True), "status": "pending"})
    job = wait_for(jobs, [runs.id], lambda one: one.get("status") == "running")[runs.id]["job_id"]
    runs.update({"status": "cancel_requested"})
    ended = wait_for(jobs, [runs.id], over)[runs.id]
    assert (ended["status"], ended["error"]["type"]) == ("failed", "Cancelled")
    assert house.ended(job)["state"] == "cancelled"
    _, never = jobs.add({"code": marked("cancel-never"), "status": "cancel_requested"})
    ended = wait_for(jobs, [never.id], over)[never.id]
    assert (ended["status"], ended["error"]["type"], ended.get("job_id")) == ("failed", "Cancelled", None)
    assert house.runs()["cancel-never"] == 0


def test_deleting_a_document_cancels_its_job_and_the_same_name_is_a_new_one(house: BridgeHouse, jobs: Any) -> None:
    reference = jobs.document("again")
    reference.set({"code": marked("first-life", wait=True), "status": "pending"})
    first = wait_for(jobs, ["again"], lambda one: one.get("status") == "running")["again"]["job_id"]
    reference.delete()
    assert house.ended(first)["state"] == "cancelled"
    reference.set({"code": marked("second-life", "result = 2"), "status": "pending"})
    second = wait_for(jobs, ["again"], over)["again"]
    assert (second["status"], second["result"]) == ("completed", "2")
    assert second["job_id"] != first
    assert house.runs()["second-life"] == 1


def test_an_end_is_final_and_one_document_is_one_job(house: BridgeHouse, jobs: Any) -> None:
    reference = jobs.document("final")
    reference.set({"code": marked("final", "result = 1"), "status": "pending"})
    first = wait_for(jobs, ["final"], over)["final"]
    for status in ("running", "scheduled", "pending"):
        reference.update({"status": status})  # as somebody might who wants it to run again
        again = wait_for(jobs, ["final"], over)["final"]
        assert (again["job_id"], again["result"]) == (first["job_id"], "1")
    assert house.runs()["final"] == 1


def test_documents_of_one_submitter_do_not_hold_up_anothers(house: BridgeHouse, jobs: Any) -> None:
    """A long backlog of one submitter first, then one document of another: it passes what came before it."""
    many = [f"greedy-{number:03}" for number in range(40)]
    for name in many:
        code = marked(name, wait=True)
        jobs.document(name).set({"code": code, "status": "pending", "metadata": {"submitted_by": "greedy"}})
    until(lambda: all(one.get("job_id") for one in wait_for(jobs, many, bool).values()))
    jobs.document("zz-modest").set({"code": "result = 1", "status": "pending", "metadata": {"submitted_by": "modest"}})
    wait_for(jobs, ["zz-modest"], lambda one: bool(one.get("job_id")))
    let_all_go(house, jobs, many)
    found = wait_for(jobs, [*many, "zz-modest"], over)
    modest = found["zz-modest"]["started_at"]
    passed = sum(found[name]["started_at"] > modest for name in many)
    assert passed >= 8, f"it passed only {passed} of {len(many)} that were submitted before it"


def test_a_bridge_runs_beside_the_server_when_the_settings_say_so(tmp_path: Path) -> None:
    require_emulator()
    emulator = Emulator(tmp_path / "emulator")
    emulator.start()
    house = BridgeHouse(tmp_path / "home", emulator)
    house.home.path.mkdir()
    (house.home.path / "penstock.toml").write_text(f'[bridge.firestore]\nproject = "{PROJECT}"\nsweep_s = 1\n')
    try:
        house.open()
        jobs = house.db().collection("tpu_jobs")
        _, one = jobs.add({"code": "result = 41 + 1", "status": "pending"})
        assert wait_for(jobs, [one.id], over)[one.id]["result"] == "42"
        began = time.monotonic()
        house.tpu("down", "--slices")
        assert time.monotonic() - began < 60, "the bridge goes with it: it would listen for ever"
        until(lambda: not house.servers())
    finally:
        house.end()
        emulator.stop()
