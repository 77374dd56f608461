"""Workers of this machine: `tpu extract --here` passes on what it is told, and judges by the run; Ctrl-C is no loss.

The long one stops real workers in every way a person would, and kills one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from examples.extract_tiny.make import make

WITHIN_S = 300.0
TPU = [sys.executable, "-c", "from penstock.cli.main import main; main()"]

CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
signal.alarm(300)  # nobody is left behind, whatever goes wrong
os.write(1, b"up\\n")  # whole: the two write to one pipe
while True:
    time.sleep(0.1)
"""
PARENT = """
import sys
from penstock.cli.extract_workers import run
print(*run([sys.executable, "-c", sys.argv[1]], 2), flush=True)
"""


def test_who_is_asked_to_stop_asks_its_workers_and_waits_for_them() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            assert [parent.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
            parent.send_signal(number)
            said, _ = parent.communicate(timeout=WITHIN_S)
        assert said == f"{int(number)} [143, 143]\n"
        assert parent.returncode == 0


LISTENER = """
import signal
from penstock.extract.replica import listening, should_stop
with listening():
    assert not should_stop()
    signal.raise_signal(signal.SIGINT)
    assert should_stop()
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("the second does not wait")
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_a_worker_takes_ctrl_c_as_a_wish_to_stop() -> None:
    argv = [sys.executable, "-c", LISTENER]
    done = subprocess.run(argv, timeout=WITHIN_S, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "the second does not wait\n"), done.stderr


@pytest.mark.long
def test_workers_are_stopped_and_started_at_will(tmp_path: Path) -> None:
    make(tmp_path)
    docs = (tmp_path / "docs.jsonl").read_bytes()
    for number in range(5):  # more than anybody will get through here
        (tmp_path / f"docs{number}.jsonl").write_bytes(docs.replace(b'"id": "', b'"id": "%d-' % number))
    said = tmp_path / "said"

    def begin(folder: str, data: str, *more: str) -> subprocess.Popen[bytes]:
        words = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / data), "--id", "id", "--width", "64"]
        words += ["--sites", "resid_post:1", "--unit-rows", "1", "--out", str(tmp_path / folder), "--here", "2"]
        argv = [*TPU, "extract", *words, "--rows", "1", "--lease", "5s", *more]
        with said.open("wb") as file:
            return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True)

    def soon(parent: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < deadline, said.read_text()
            assert parent.poll() is None, said.read_text()
            time.sleep(0.02)

    def found(folder: str, what: str) -> int:
        return len(list(tmp_path.glob(f"{folder}/runs/*/{what}")))

    def both_work(before: int) -> bool:
        return said.read_text().count(" works on ") == 2 and found("acts", "commits/*") > before

    for stop, code in (
        (lambda parent: os.killpg(parent.pid, signal.SIGINT), 130),  # as a terminal does
        (lambda parent: parent.send_signal(signal.SIGTERM), 143),
    ):
        before = found("acts", "commits/*")
        with begin("acts", "docs[0-9].jsonl") as parent:
            soon(parent, partial(both_work, before))
            children = children_of(parent)
            stop(parent)
            assert parent.wait(WITHIN_S) == code, said.read_text()
        assert said.read_text().count("asked to stop: what was begun is given back") == 2, said.read_text()
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
        assert found("acts", "leases/*/*") == 0, "the next one would have to wait for them"
    with begin("killed", "docs.jsonl", "--max-samples", "200") as parent:
        soon(parent, lambda: found("killed", "commits/*") > 0)
        os.kill(children_of(parent)[0], signal.SIGKILL)
        assert parent.wait(WITHIN_S) == 0, said.read_text()
    assert "the run is done; 1 worker ended with 137" in said.read_text()
    assert found("killed", "commits/*") == 200


def children_of(parent: subprocess.Popen[bytes]) -> list[int]:
    pids = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
    assert len(pids) == 2
    return pids
