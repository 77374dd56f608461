"""What user code sees of its job: defaults outside of Penstock, the agent's words inside, and whole progress files."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock import payload


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)


def test_outside_of_penstock_everything_has_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert payload.job_id() is None
    assert payload.stage() == 0
    assert (payload.rank(), payload.world_size()) == (0, 1)
    assert payload.checkpoint_dir() == "checkpoints"
    assert payload.output_dir("out/here") == "out/here"
    assert (tmp_path / "checkpoints").is_dir()
    assert (tmp_path / "out/here").is_dir()
    assert payload.restore_dir() is None
    assert payload.restore_dirs() == []
    assert payload.deadline() is None
    assert payload.seconds_left() is None
    assert payload.distributed() is False
    payload.progress(1, 2, loss=0.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out"]


def test_open_units_are_said_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "progress.json"
    monkeypatch.setenv("PENSTOCK_PROGRESS_FILE", str(file))
    payload.progress(3, 40, open_units=37)
    assert json.loads(file.read_text())["open_units"] == 37
    assert "holding" not in json.loads(file.read_text())
    payload.progress(4, 40, holding=True)
    payload.progress(4, 40)
    said = json.loads(file.read_text())
    assert (said["open_units"], said["holding"]) == (37, True)


def test_inside_the_environment_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "JOB_ID": "j1",
        "STAGE": "3",
        "RANK": "2",
        "WORLD_SIZE": "4",
        "CHECKPOINT_DIR": str(tmp_path / "c/7"),
        "RESTORE_DIR": "gs://bucket/c/6",
        "OUTPUT_DIR": str(tmp_path / "o"),
        "DEADLINE": "1000.5",
    }.items():
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    assert (payload.job_id(), payload.stage(), payload.rank(), payload.world_size()) == ("j1", 3, 2, 4)
    assert payload.checkpoint_dir() == str(tmp_path / "c/7")
    assert (tmp_path / "c/7").is_dir()
    assert payload.restore_dir() == "gs://bucket/c/6"
    assert payload.restore_dirs() == ["gs://bucket/c/6"]
    assert payload.output_dir() == str(tmp_path / "o")
    assert payload.deadline() == 1000.5
    assert payload.seconds_left() == 0.0


def test_addresses_of_a_bucket_are_not_made_into_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_CHECKPOINT_DIR", "gs://bucket/c/7")
    assert payload.checkpoint_dir() == "gs://bucket/c/7"
    assert list(tmp_path.iterdir()) == []


def test_older_attempts_stand_behind_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("2", "9", "10", "11", "12", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "3").write_text("a file")
    monkeypatch.setenv("PENSTOCK_RESTORE_DIR", str(tmp_path / "11"))
    assert [Path(found).name for found in payload.restore_dirs()] == ["11", "10", "9", "2"]


def test_progress_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "progress"
    monkeypatch.setenv("PENSTOCK_PROGRESS_FILE", str(file))
    payload.progress(3, 10, loss=0.25, bad=float("nan"), accuracy=1)
    said = json.loads(file.read_text())
    assert (said["done"], said["total"], said["metrics"]) == (3.0, 10.0, {"loss": 0.25, "accuracy": 1.0})
    assert said["at"] > 1.7e9
    payload.progress(4)
    assert json.loads(file.read_text())["total"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["progress"]


def test_what_a_save_costs_is_told_with_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with payload.saving():
        pass  # outside of Penstock: nothing happens
    file = tmp_path / "progress"
    monkeypatch.setenv("PENSTOCK_PROGRESS_FILE", str(file))
    monkeypatch.setattr("penstock.payload.reporting._last", {})
    moments = iter([10.0, 14.0, 20.0, 22.0])
    monkeypatch.setattr("penstock.payload.reporting.time.monotonic", lambda: next(moments))
    with payload.saving():
        pass
    assert not file.exists(), "nobody reports progress yet"
    payload.progress(1, 10)
    assert json.loads(file.read_text())["save_s"] == 4.0
    with payload.saving():
        pass
    said = json.loads(file.read_text())
    assert (said["done"], said["save_s"]) == (1.0, 3.0)


def test_readers_never_see_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "progress"
    monkeypatch.setenv("PENSTOCK_PROGRESS_FILE", str(file))
    payload.progress(0)
    over = threading.Event()

    def write(start: int) -> None:
        for step in range(start, start + 300):
            payload.progress(step, 1000, **{f"metric_{index}": float(step) for index in range(50)})
        over.set()

    writers = [threading.Thread(target=write, args=(start,)) for start in (0, 1000)]
    for writer in writers:
        writer.start()
    while not over.is_set():
        json.loads(file.read_text())
    for writer in writers:
        writer.join()


def test_a_disk_that_is_full_does_not_stop_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.payload.reporting._complained", threading.Event())
    monkeypatch.setenv("PENSTOCK_PROGRESS_FILE", str(tmp_path / "nowhere" / "progress"))
    with pytest.warns(RuntimeWarning, match="progress is not reported"):
        payload.progress(1)
    payload.progress(2)  # said once


def test_the_stop_file_is_the_wish_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "stop"
    monkeypatch.setenv("PENSTOCK_STOP_FILE", str(file))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert payload.should_stop() is False
        file.touch()
        assert payload.should_stop() is True
    finally:
        signal.signal(signal.SIGTERM, before)


ASKS = """
import sys
from penstock import payload
{before}
print(payload.should_stop(), flush=True)
for line in sys.stdin:
    print(payload.should_stop(), flush=True)
"""


def asking(before: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ASKS.format(before=before)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_sigterm_is_the_wish_to_stop_once_the_program_asks() -> None:
    with asking() as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "False"
        assert ask(process) == "False"
        process.send_signal(signal.SIGTERM)
        assert ask(process) == "True"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0


def test_a_program_that_never_asks_dies_of_sigterm_as_ever() -> None:
    code = "from penstock import payload\nprint(1, flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM


def test_a_handler_of_the_programs_own_stays() -> None:
    with asking("import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 7


def test_other_threads_may_ask() -> None:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(payload.should_stop()))
    thread.start()
    thread.join()
    assert answers == [False]


def test_a_gang_is_joined_by_its_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr("atexit.register", lambda _call: None)  # it would end this process, if any test failed

    class Jax:
        class distributed:  # noqa: N801 (as JAX calls it)
            @staticmethod
            def initialize(**options: Any) -> None:
                calls.append(options)

    monkeypatch.setenv("PENSTOCK_RANK", "1")
    monkeypatch.setenv("PENSTOCK_WORLD_SIZE", "4")
    assert payload.distributed(Jax) is False  # on TPUs there is no coordinator: JAX finds the hosts
    monkeypatch.setenv("PENSTOCK_COORDINATOR", "10.0.0.1:8476")
    assert payload.distributed(Jax, initialization_timeout=5) is True
    assert calls == [
        {"coordinator_address": "10.0.0.1:8476", "num_processes": 4, "process_id": 1, "initialization_timeout": 5}
    ]
    monkeypatch.setenv("PENSTOCK_WORLD_SIZE", "1")
    assert payload.distributed(Jax) is False


#: Stands for JAX: when it is imported it registers that it waits, at the end, for hosts that never come.
WAITING_JAX = """
import atexit, os, sys, time
from types import SimpleNamespace
atexit.register(lambda: time.sleep(600))
jax = SimpleNamespace(distributed=SimpleNamespace(initialize=lambda **_: None))
from penstock import payload
assert payload.distributed(jax)
atexit.register(lambda: print("cleaned up"))
sys.stdout.write("no newline")
"""


def test_after_an_error_a_host_of_a_gang_does_not_wait_for_the_others() -> None:
    env = {**os.environ, "PENSTOCK_WORLD_SIZE": "4", "PENSTOCK_COORDINATOR": "127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-c", WAITING_JAX + "raise RuntimeError('first')"],
        env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "no newlinecleaned up\n")
    assert done.stderr.endswith("RuntimeError: first\n")


def test_a_host_of_a_gang_that_ends_well_waits_for_the_others() -> None:
    env = {**os.environ, "PENSTOCK_WORLD_SIZE": "4", "PENSTOCK_COORDINATOR": "127.0.0.1:1"}
    code = WAITING_JAX.replace("time.sleep(600)", "print('waited')")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "no newlinecleaned up\nwaited\n"
