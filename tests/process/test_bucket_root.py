"""A server whose root is a bucket: jobs from submit to result, with every byte in the cloud and none beside it.

Real processes: the emulated Cloud Storage, `tpu serve --root gs://…`, its agents and their payloads.
"""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from penstock.emulator.gcs_faults import Fault
from tests.contract.objects.servers import BUCKET, Emulator, gcs_emulator
from tests.process.machine import WITHIN_S, Machine, until

PREFIX = "team/a"
PROGRAM = """
import os, pathlib, sys
print(pathlib.Path("data.txt").read_text())
print("to the side", file=sys.stderr)
pathlib.Path(os.environ["PENSTOCK_OUTPUT_DIR"], "made.txt").write_text("made here")
"""


@pytest.fixture
def gcs() -> Iterator[Emulator]:
    with gcs_emulator() as emulator:
        yield emulator


@pytest.fixture
def machine(tmp_path: Path, gcs: Emulator) -> Iterator[Machine]:
    machine = Machine(tmp_path / "home")
    machine.environment |= gcs.environment
    yield machine
    machine.end()


@contextlib.contextmanager
def serving(machine: Machine) -> Iterator[subprocess.Popen[str]]:
    words = ["serve", "--root", f"gs://{BUCKET}/{PREFIX}", "--log-level", "warning"]
    argv = [sys.executable, "-c", "from penstock.cli.main import main; main()", *words]
    with subprocess.Popen(argv, env=machine.environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            assert f"root gs://{BUCKET}/{PREFIX}" in server.stdout.readline()
            until(lambda: machine.call("GET", "/v1/queues")[1]["queues"])
            yield server
        finally:
            server.kill()


def names(gcs: Emulator, below: str = "") -> set[str]:
    """What is in the bucket now, by the emulator's own books."""
    there: set[str] = set()
    for change in gcs.history():
        (there.add if change.verb == "put" else there.discard)(change.name)
    assert all(name.startswith(f"{PREFIX}/") for name in there)
    return {name.removeprefix(f"{PREFIX}/") for name in there if name.startswith(f"{PREFIX}/{below}")}


def whole_output(machine: Machine, job: str) -> bytes | None:
    """A job's standard output; None when the server refused, or broke off before the end."""
    address = urlsplit(machine.server.url)
    token = (machine.home.path / "token").read_text().strip()
    with contextlib.closing(http.client.HTTPConnection(address.netloc, timeout=WITHIN_S)) as connection:
        headers = {"authorization": f"Bearer {token}"}
        connection.request("GET", f"/v1/jobs/{job}/logs?host=0&stream=out", headers=headers)
        answer = connection.getresponse()
        try:
            body = answer.read()
        except http.client.IncompleteRead:
            return None
        return body if answer.status == 200 else None


def test_a_job_leaves_its_files_logs_and_result_in_the_bucket(machine: Machine, gcs: Emulator, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(PROGRAM)
    (project / "data.txt").write_text("from the snapshot")
    # The bucket has a bad day: short refusals of writes and reads, and one answer that is lost.
    gcs.plant(Fault("refuse", BUCKET, times=4, skip=3), Fault("refuse_after", BUCKET, "PUT", skip=1, times=2))
    with serving(machine):
        ran = machine.tpu("run", "--on", "v5e-1", "--dir", str(project), "train.py")
        assert ran.returncode == 0, ran.stderr
        assert "from the snapshot" in ran.stdout
        job = msgspec.json.decode(machine.tpu("ps", "--json", "--state", "succeeded").stdout)[0]["id"]
        logs = machine.tpu("logs", job)
        assert logs.stdout == "from the snapshot\n"
        assert "to the side\n" in logs.stderr
        saved = tmp_path / "saved"
        assert machine.tpu("result", job, "-o", str(saved)).returncode == 0
        assert [path.read_text() for path in saved.rglob("made.txt")] == ["made here"]
        said = machine.tpu("exec", "--on", "v5e-1", "-c", "print('heard'); result = {'answer': 42}", "--json")
        assert said.returncode == 0, said.stderr
        outcome = msgspec.json.decode(said.stdout)
        assert outcome["result"] == {"answer": 42}
    assert all(planted.struck for planted in gcs.planted())
    assert names(gcs, "snapshots/")
    assert names(gcs, "blobs/")
    assert names(gcs, f"jobs/{job}/log/")
    assert {name.rpartition("/")[2] for name in names(gcs, f"jobs/{job}/staging/")} == {"made.txt"}
    assert names(gcs, f"jobs/{outcome['id']}/results/")
    assert not (machine.home.path / "root").exists(), "nothing is kept beside the bucket"


def test_another_server_finds_everything_in_the_bucket(machine: Machine, gcs: Emulator) -> None:
    """Killed at once, while the bucket is away; the next one has logs and result all the same."""
    body = {"payload": {"type": "command", "argv": ["sh", "-c", "echo one; echo two >&2"]}, "on": ["v5e-1"]}
    with serving(machine):
        job = machine.call("POST", "/v1/jobs", body)[1]["id"]
        until(lambda: machine.call("GET", f"/v1/jobs/{job}")[1]["state"] == "succeeded")
    gcs.plant(Fault("refuse", BUCKET, times=10_000, status=503))
    with serving(machine):
        assert whole_output(machine, job) is None, "what cannot be read must not look like an empty log"
        gcs.heal()
        assert whole_output(machine, job) == b"one\n"
        assert machine.tpu("logs", job, "--stream", "out").stdout == "one\n"
        assert machine.tpu("logs", job, "--stream", "err").stdout == "two\n"


def test_a_bucket_that_is_not_there_is_told_at_once(machine: Machine) -> None:
    done = machine.tpu("serve", "--root", "gs://some-other-bucket/x")
    assert done.returncode == 3
    assert "root: gs://some-other-bucket/x: there is no such bucket" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_emulator_says_what_it_cannot_do(machine: Machine) -> None:
    done = machine.tpu("emulator", "gcs", "No Bucket")
    assert done.returncode == 2
    assert "a name is 3 to 63" in done.stderr
    assert done.stderr.count("\n") == 1
