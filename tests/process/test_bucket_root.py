"""A server whose root is a bucket: jobs from submit to result, with every byte in the cloud and none beside it.

Real processes: the emulated Cloud Storage or an S3 server, `tpu serve --root gs://…` on SQLite or PostgreSQL, its
agents and their payloads. What becomes of checkpoints is in `test_bucket_checkpoints`.
"""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import msgspec
import pytest

from penstock.agent.record import Journal, Record
from penstock.emulator.gcs_faults import Fault
from tests.contract.objects.servers import BUCKET, S3_ENVIRONMENT, Emulator, gcs_emulator, s3_server
from tests.process.bucket_shop import CHAIN, PREFIX, chain, names, preempt, progress, resumed_at, serving, weights
from tests.process.machine import WITHIN_S, until
from tests.process.shop import Shop, soon

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
def machine(tmp_path: Path, gcs: Emulator) -> Iterator[Shop]:
    machine = Shop(tmp_path / "home")
    machine.environment |= gcs.environment
    yield machine
    machine.end()


def output_of(machine: Shop, job: str) -> tuple[int, str | None, bytes | None]:
    """A job's standard output: status, Retry-After, and the bytes; None when the server broke off before the end."""
    address = urlsplit(machine.server.url)
    token = (machine.home.path / "token").read_text().strip()
    with contextlib.closing(http.client.HTTPConnection(address.netloc, timeout=WITHIN_S)) as connection:
        headers = {"authorization": f"Bearer {token}"}
        connection.request("GET", f"/v1/jobs/{job}/logs?host=0&stream=out", headers=headers)
        answer = connection.getresponse()
        try:
            body = answer.read()
        except http.client.IncompleteRead:
            return answer.status, None, None
        return answer.status, answer.getheader("retry-after"), body


def test_a_job_leaves_its_files_logs_and_result_in_the_bucket(machine: Shop, gcs: Emulator, tmp_path: Path) -> None:
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


@pytest.mark.long
def test_another_server_finds_everything_in_the_bucket(machine: Shop, gcs: Emulator) -> None:
    """Killed at once, while the bucket is away; the next one has logs and result all the same."""
    body = {"payload": {"type": "command", "argv": ["sh", "-c", "echo one; echo two >&2"]}, "on": ["v5e-1"]}
    with serving(machine):
        job = machine.call("POST", "/v1/jobs", body)[1]["id"]
        until(lambda: machine.call("GET", f"/v1/jobs/{job}")[1]["state"] == "succeeded")
    gcs.plant(Fault("refuse", BUCKET, times=10_000, status=503))
    with serving(machine):
        status, again, _ = output_of(machine, job)
        assert (status, again) == (503, "1"), "what cannot be read must not look like an empty log"
        began = time.monotonic()
        told = machine.command("logs", job)
        assert time.monotonic() - began < 30, "one who asks once is not kept waiting as long as one who follows"
        assert (told.returncode, told.stdout) == (3, b"")
        assert told.stderr.count(b"\n") == 1
        assert b"the server's storage does not answer" in told.stderr
        gcs.heal()
        assert output_of(machine, job)[::2] == (200, b"one\n")
        assert machine.tpu("logs", job, "--stream", "out").stdout == "one\n"
        assert machine.tpu("logs", job, "--stream", "err").stdout == "two\n"


def test_a_bucket_that_is_not_there_is_told_at_once(machine: Shop) -> None:
    done = machine.tpu("serve", "--root", "gs://some-other-bucket/x")
    assert done.returncode == 3
    assert "root: gs://some-other-bucket/x: there is no such bucket" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_emulator_says_what_it_cannot_do(machine: Shop) -> None:
    done = machine.tpu("emulator", "gcs", "No Bucket")
    assert done.returncode == 2
    assert "a name is 3 to 63" in done.stderr
    assert done.stderr.count("\n") == 1


def kept_fence_url(machine: Shop, slice: str) -> str:
    state = machine.home.slices / slice / "host-0"
    kept = msgspec.json.decode((state / "record.json").read_bytes(), type=Record)
    Journal(state / "journal").replay(kept)
    return next((each.fence_url for each in kept.held.values()), "")


@pytest.mark.long
def test_without_the_server_an_agent_heeds_the_fence_in_the_bucket(machine: Shop, gcs: Emulator) -> None:
    with serving(machine) as server:
        job = machine.submit("say('here'); time.sleep(600)", mark := "heeds-the-fence")
        machine.says(job, b"here")
        place = str(machine.view(job)["slice"])
        soon(lambda: kept_fence_url(machine, place))
        assert f"/jobs/{job}/fence/0" in kept_fence_url(machine, place)
        server.kill()
        server.wait()
    (payload,) = machine.payloads(mark)
    fence = Request(f"{gcs.url}/{BUCKET}/{PREFIX}/jobs/{job}/fence/0", b"1", method="PUT")
    with urlopen(fence, timeout=30):
        pass
    steady(lambda: payload.alive, 12.0)  # its own fence: two polls and more
    fence.data = b"2"
    with urlopen(fence, timeout=30):
        pass
    until(lambda: not payload.alive)


def steady(what: Callable[[], object], seconds: float) -> None:
    """It stays so."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        assert what()
        time.sleep(0.2)


# --- S3 ---
LOOKS_FOR_KEYS = """
import pathlib
seen = str(dict(os.environ))
for each in pathlib.Path("/proc").glob("[0-9]*/environ"):
    try: seen += each.read_bytes().decode("utf-8", "replace")
    except OSError: pass
say("keys:", seen.count("canary" + "-secret"))
"""


def test_the_same_on_s3_and_no_payload_sees_the_key(tmp_path: Path) -> None:
    machine = Shop(tmp_path / "home")
    with s3_server() as url:
        machine.environment |= {**S3_ENVIRONMENT, "AWS_SECRET_ACCESS_KEY": "canary-secret", "AWS_ENDPOINT_URL": url}
        try:
            with serving(machine, f"s3://{BUCKET}/{PREFIX}"):
                job = machine.submit(LOOKS_FOR_KEYS + CHAIN, "20", "0.25", "1", env={"HOLD": "8"})
                soon(lambda: progress(machine, job) >= 8 and machine.saved(job))
                first = preempt(machine, job)
                view = machine.ended(job)
                assert view["state"] == "succeeded", machine.everything(job)
                assert [each["cause"] for each in view["attempts"]] == ["preempted", "succeeded"]
                assert view["slice"] != first
                assert resumed_at(machine, job) >= 1
                assert weights(machine, job) == chain(20)
                said = machine.log(job)
                assert said.count(b"keys: 0\n") == 2, said
        finally:
            machine.end()
