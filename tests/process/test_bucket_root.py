"""A server whose root is a bucket: jobs from submit to result, with every byte in the cloud and none beside it.

Real processes: the emulated Cloud Storage or an S3 server, `tpu serve --root gs://…` on SQLite or PostgreSQL, its
agents and their payloads. What a host saved is found on another one, whatever was killed, cut off or away meanwhile.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import msgspec
import pytest

from penstock.agent.record import Journal, Record
from penstock.capacity import processes
from penstock.capacity.slice_files import SliceFiles
from penstock.emulator.gcs_faults import Fault
from penstock.wire.agent import Saved
from tests.contract.objects.servers import BUCKET, ROOT, S3_ENVIRONMENT, Emulator, gcs_emulator, s3_server
from tests.process.machine import WITHIN_S, until
from tests.process.shop import Shop, soon

PREFIX = "team/a"
PROGRAM = """
import os, pathlib, sys
print(pathlib.Path("data.txt").read_text())
print("to the side", file=sys.stderr)
pathlib.Path(os.environ["PENSTOCK_OUTPUT_DIR"], "made.txt").write_text("made here")
"""
#: Steps that each need the one before; a checkpoint of so many MiB after each, renamed when it is whole, two kept.
CHAIN = """
import hashlib, pathlib, shutil
from penstock import payload
steps, pause, size = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
folder, step, state = pathlib.Path(payload.checkpoint_dir()), 0, b"seed"
def whole(place):
    found = [each for each in pathlib.Path(place).iterdir() if each.name.isdecimal()]
    return sorted(found, key=lambda each: int(each.name))
def content(): return b"".join(b"%032d" % block + state * 32767 for block in range(size))
for place in payload.restore_dirs():
    if whole(place):
        step, state = int(whole(place)[-1].name), (whole(place)[-1] / "state").read_bytes()[32:64]
        assert (whole(place)[-1] / "state").read_bytes() == content()
        say("resumed at", step)
        break
while step < steps:
    step += 1
    state = hashlib.sha256(state + b"%d" % step).digest()
    time.sleep(pause)
    part = folder / f"{step}.tmp"
    part.mkdir()
    (part / "state").write_bytes(content())
    part.rename(folder / str(step))
    for old in whole(folder)[:-2]: shutil.rmtree(old)
    if len(sys.argv) > 4 and (step, payload.stage()) == (int(sys.argv[4]), 0): sys.exit(1)
    payload.progress(step, steps)
    say("step", step)
pathlib.Path(payload.output_dir(), "weights").write_text(state.hex())
"""


def chain(steps: int) -> str:
    """The weights of an undisturbed run."""
    import hashlib

    state = b"seed"
    for step in range(1, steps + 1):
        state = hashlib.sha256(state + b"%d" % step).digest()
    return state.hex()


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


@contextlib.contextmanager
def serving(machine: Shop, root: str = f"gs://{BUCKET}/{PREFIX}", store: str = "") -> Iterator[subprocess.Popen[str]]:
    words = [
        "serve",
        "--root",
        root,
        "--log-level",
        "warning",
        *(["--store", store, "--local-hosts", "8"] if store else []),
    ]
    argv = [sys.executable, "-c", "from penstock.cli.main import main; main()", *words]
    with subprocess.Popen(argv, env=machine.environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            assert f"root {root}" in server.stdout.readline()
            until(lambda: machine.call("GET", "/v1/queues")[1]["queues"])
            if store:  # a team's server makes no pools by itself
                made = machine.command("pools", "set", "small", "--on", "v5e-1", "--max", "4", "--idle", "1s")
                assert made.returncode == 0, made.stderr
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


# --- checkpoints ---
def progress(machine: Shop, job: str, attempt: int = 1) -> float:
    """How far this attempt is."""
    view = machine.view(job)
    assert view["state"] not in ("succeeded", "failed", "cancelled"), view
    if len(view["attempts"]) != attempt or view.get("progress") is None:
        return 0
    return float(view["progress"]["done"])


def preempt(machine: Shop, job: str) -> str:
    """Take the job's slice away without a word; which it was."""
    place = str(machine.view(job)["slice"])
    assert machine.command("local", "preempt", place).returncode == 0
    return place


def weights(machine: Shop, job: str) -> str:
    with machine.client() as client:
        return client.artifact(job, "weights").decode()


def copied(gcs: Emulator, job: str, kind: str = "lists", fence: int = 1) -> set[str]:
    return names(gcs, f"jobs/{job}/checkpoints/{fence}/0/{kind}/")


def resumed_at(machine: Shop, job: str) -> int:
    said = machine.log(job).decode()
    return int(said.split("resumed at ")[1].split()[0])


def bad_weather(job: str) -> list[Fault]:
    """O1 and O2, on everything of the checkpoints: refusals, lost answers, 412 by an own success, damaged bytes."""
    below = f"{BUCKET}/{PREFIX}/jobs/{job}/checkpoints/"
    return [
        Fault("refuse", below, "PUT", skip=1, times=2),
        Fault("refuse_after", below, "PUT", skip=1, times=2),
        Fault("lose", below, "PUT", skip=2, times=2),
        Fault("cut", below, "PUT", skip=3),
        Fault("refuse", below, "PUT", skip=4, status=429, retry_after_s=1),
        Fault("damage", below, "PUT", skip=5),
        Fault("damage", below, "GET", skip=1),
        Fault("lose", below, "GET"),
        Fault("short", f"{BUCKET}/{PREFIX}/jobs/{job}/checkpoints", "GET", times=20, most=2),
    ]


@pytest.mark.long
@pytest.mark.postgres
def test_a_job_whose_slice_is_lost_goes_on_elsewhere_from_the_bucket(
    machine: Shop, gcs: Emulator, postgres_url: str
) -> None:
    with serving(machine, store=postgres_url):
        job = machine.submit(CHAIN, "60", "0.15", "3")
        gcs.plant(*bad_weather(job))
        soon(lambda: progress(machine, job) >= 20 and copied(gcs, job))
        first = preempt(machine, job)
        view = machine.ended(job)
        assert view["state"] == "succeeded", machine.everything(job)
        assert [each["cause"] for each in view["attempts"]] == ["preempted", "succeeded"]
        assert view["slice"] != first
        assert 1 <= resumed_at(machine, job) <= 60
        assert weights(machine, job) == chain(60)
        struck = {planted.fault.kind for planted in gcs.planted() if planted.struck}
        assert struck >= {"refuse", "refuse_after", "lose", "damage"}, gcs.planted()
        # What the payload threw away, and what only older lists named, does not stay.
        assert len(copied(gcs, job, "lists", 2)) <= 2
        assert len(copied(gcs, job, "pieces", 2)) <= 4
    assert not (machine.home.path / "root").exists(), "nothing is kept beside the bucket"


@pytest.mark.long
@pytest.mark.postgres
def test_an_agent_killed_while_it_copies_leaves_a_whole_checkpoint_or_none(
    machine: Shop, gcs: Emulator, postgres_url: str
) -> None:
    with serving(machine, store=postgres_url):
        job = machine.submit(CHAIN, "40", "0.5", "20")  # three pieces each
        soon(lambda: copied(gcs, job))
        gcs.plant(Fault("slow", f"{BUCKET}/{PREFIX}/jobs/{job}/checkpoints/", "PUT", times=3, seconds=2.0))
        soon(lambda: any(gcs.struck()))
        files, place = SliceFiles(machine.home.slices), machine.view(job)["slice"]
        (agent,) = files.agents(place)
        processes.send(agent.process, signal.SIGKILL)  # the list of these pieces is not sent
        before = copied(gcs, job)
        soon(lambda: [new for new in files.agents(place) if new.process.alive and new.process != agent.process])
        soon(lambda: copied(gcs, job) - before)  # the next agent goes on
        gcs.plant(Fault("slow", f"{BUCKET}/{PREFIX}/jobs/{job}/checkpoints/", "PUT", times=9, seconds=2.0))
        soon(lambda: gcs.struck()[1])
        (agent,) = files.agents(place)
        processes.send(agent.process, signal.SIGKILL)  # and now its slice goes with it
        preempt(machine, job)
        gcs.heal()
        view = machine.ended(job)
        assert view["state"] == "succeeded", machine.everything(job)
        assert [each["cause"] for each in view["attempts"]] == ["preempted", "succeeded"]
        assert resumed_at(machine, job) >= 1
        assert weights(machine, job) == chain(40)


@pytest.mark.long
@pytest.mark.postgres
def test_a_bucket_that_is_away_delays_logs_and_checkpoints_and_loses_nothing(
    machine: Shop, gcs: Emulator, postgres_url: str
) -> None:
    away_s = 20.0
    with serving(machine, store=postgres_url):
        job = machine.submit(CHAIN, "40", "0.5", "1")
        soon(lambda: progress(machine, job) >= 3)
        gcs.plant(Fault("refuse", BUCKET, times=1_000_000))
        back = time.monotonic() + away_s
        at = progress(machine, job)
        soon(lambda: progress(machine, job) >= at + 3)  # it goes on
        until(lambda: time.monotonic() >= back)
        before = copied(gcs, job)
        assert machine.view(job)["state"] == "running"
        gcs.heal()
        soon(lambda: copied(gcs, job) - before)
        view = machine.ended(job)
        assert (view["state"], len(view["attempts"])) == ("succeeded", 1), view
        assert machine.log(job).decode().splitlines() == [f"step {step}" for step in range(1, 41)]
        assert weights(machine, job) == chain(40)


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


# --- damage at rest ---
def at_rest(gcs: Emulator, method: str, name: str, data: bytes | None = None) -> bytes:
    """An object behind the server's back."""
    with urlopen(Request(f"{gcs.url}/{BUCKET}/{PREFIX}/{name}", data, method=method), timeout=30) as answer:
        return bytes(answer.read())


def lists_of(gcs: Emulator, job: str, rank: int = 0, fence: int = 1) -> list[Saved]:
    """The copies that a host left, newest first."""
    paths = sorted(names(gcs, f"jobs/{job}/checkpoints/{fence}/{rank}/lists/"), reverse=True)
    return [msgspec.json.decode(at_rest(gcs, "GET", path), type=Saved) for path in paths]


@pytest.mark.long
def test_a_damaged_checkpoint_is_skipped_for_the_one_before_and_then_for_none(machine: Shop, gcs: Emulator) -> None:
    with serving(machine):
        job = machine.submit(CHAIN, "6", "1.5", "1", "3", max_retries=0)
        assert machine.ended(job)["state"] == "failed"
        newest, before = lists_of(gcs, job)
        assert sorted(file.path for file in newest.files) == ["2/state", "3/state"]
        assert [file.path for file in before.files][-1:] == ["2/state"]
        (bad,) = (name for file in newest.files if file.path == "3/state" for name in file.pieces)
        where = f"jobs/{job}/checkpoints/1/0/pieces"
        at_rest(gcs, "PUT", f"{where}/{bad}", b"not what was written")
        for told, begin in ((b"SHA-256", "2"), (b"missing", None)):
            resumed = machine.command("resume", job).stdout.decode().strip()
            view = machine.ended(resumed)
            assert view["state"] == "succeeded", machine.everything(resumed)
            said = machine.everything(resumed)
            assert told in said
            assert b"is skipped" in said
            if begin is None:
                assert b"resumed at" not in said
                assert b"no whole checkpoint of an earlier attempt is left: it starts anew" in said
            else:
                assert f"resumed at {begin}\n".encode() in said
            assert weights(machine, resumed) == chain(6)
            for name in {name for saved in (newest, before) for file in saved.files for name in file.pieces}:
                if f"{where}/{name}" in names(gcs):
                    at_rest(gcs, "DELETE", f"{where}/{name}")


# --- while no agent is there ---
LAST_WORDS = """
import pathlib
from penstock import payload
folder = pathlib.Path(payload.checkpoint_dir())
def save(name):
    (folder / f"{name}.tmp").mkdir()
    (folder / f"{name}.tmp" / "state").write_text(name)
    (folder / f"{name}.tmp").rename(folder / name)
save("1")
say("first")
gate("go")
save("2")
(folder / "loose.npz").write_text("written last, under its own name")
"""


@pytest.mark.long
def test_what_a_payload_saved_after_its_agent_was_killed_is_copied_before_its_end_is_told(
    machine: Shop, gcs: Emulator
) -> None:
    with serving(machine) as server:
        job = machine.submit(LAST_WORDS, mark := "saves-alone")
        soon(lambda: copied(gcs, job))
        place = str(machine.view(job)["slice"])
        server.kill()  # so that nobody starts another agent
        server.wait()
    (agent,) = SliceFiles(machine.home.slices).agents(place)
    assert processes.kill(agent.process, 10)
    (payload,) = machine.payloads(mark)
    (folder,) = (machine.home.slices / place / "host-0" / "attempts").glob("*/checkpoints/1")
    (folder / "go").touch()
    until(lambda: not payload.alive)
    assert [file.path for file in lists_of(gcs, job)[0].files] == ["1/state"]
    with serving(machine):
        view = machine.ended(job)
        # Its end is told: so the copy is there.
        files = {file.path for file in lists_of(gcs, job)[0].files}
        assert (view["state"], len(view["attempts"])) == ("succeeded", 1), machine.everything(job)
        assert files == {"1/state", "2/state", "go", "loose.npz"}


# --- compiled code ---
COMPILES = """
import pathlib
from penstock import payload
cache = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
say("compiled before:", *sorted(each.name + "=" + each.read_text() for each in cache.iterdir()))
if payload.stage() or list(cache.iterdir()): sys.exit(0)
(cache / "jit_step-1a2b-cache").write_text("machine code")
say("compiled")
while not payload.should_stop(): time.sleep(0.05)
sys.exit(payload.STOPPED)
"""


@pytest.mark.long
def test_what_was_compiled_on_one_slice_is_there_on_the_next(machine: Shop, gcs: Emulator) -> None:
    with serving(machine):
        job = machine.submit(COMPILES)
        machine.says(job, b"compiled\n")
        first = str(machine.view(job)["slice"])
        # The bucket refuses the first copies of it: nothing but time is lost.
        gcs.plant(Fault("refuse", f"{BUCKET}/{PREFIX}/jobs/{job}/jax-cache/", "PUT", times=2))
        assert machine.command("local", "preempt", first, "--notice", "30s").returncode == 0
        view = machine.ended(job)
        assert view["state"] == "succeeded", machine.everything(job)
        assert (len(view["attempts"]), view["slice"] != first) == (2, True), view
        said = machine.log(job).decode()
        assert said == "compiled before:\ncompiled\ncompiled before: jit_step-1a2b-cache=machine code\n"


# --- gangs ---
TOGETHER = """
import pathlib
from penstock import payload
rank, folder = int(os.environ["PENSTOCK_RANK"]), pathlib.Path(payload.checkpoint_dir())
for place in payload.restore_dirs():
    files = [each for each in pathlib.Path(place).rglob("*") if each.is_file()]
    say("found:", *sorted(f"{each.relative_to(place)}={each.read_text()}" for each in files))
    sys.exit(0)
for step in (1, 2, 3):
    part = folder / f"{step}.tmp"
    part.mkdir()
    (part / f"of-{rank}").write_text(f"{step}.{rank}")
    if (rank, step) != (1, 3): part.rename(folder / str(step))  # this host does not get so far
time.sleep(600)
"""


@pytest.mark.long
def test_a_gang_goes_on_from_the_newest_step_that_all_its_hosts_have(machine: Shop, gcs: Emulator) -> None:
    with serving(machine):
        job = machine.submit(TOGETHER, on="v4-16")

        def steps(rank: int) -> set[str]:
            return {file.path.split("/")[0] for saved in lists_of(gcs, job, rank)[:1] for file in saved.files}

        soon(lambda: (steps(0), steps(1)) == ({"1", "2", "3"}, {"1", "2"}))
        preempt(machine, job)
        view = machine.ended(job)
        assert view["state"] == "succeeded", machine.everything(job)
        for host in (0, 1):
            said = machine.log(job, host=host).decode()
            assert said == "found: 1/of-0=1.0 1/of-1=1.1 2/of-0=2.0 2/of-1=2.1\n", host


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
                job = machine.submit(LOOKS_FOR_KEYS + CHAIN, "20", "0.25", "1")
                soon(lambda: progress(machine, job) >= 8)
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


# --- with JAX ---
@pytest.mark.long
@pytest.mark.postgres
def test_training_with_orbax_resumes_from_the_bucket_bit_for_bit(
    machine: Shop, gcs: Emulator, postgres_url: str
) -> None:
    steps = ("num_epochs=2", "steps_per_epoch=40", "checkpoint_per_epoch=4")
    words = ["run", "--detach", "--on", "v5e-1", "--dir", str(ROOT / "examples" / "train_mlp"), "--"]
    words += ["python", "train.py", *(f"--config.training.{each}" for each in steps)]
    with serving(machine, store=postgres_url):
        quiet, disturbed = (machine.command(*words, *more).stdout.decode().strip() for more in ((), ("--pause=0.1",)))
        gcs.plant(*bad_weather(disturbed))
        soon(lambda: progress(machine, disturbed) >= 25 and copied(gcs, disturbed))
        first = preempt(machine, disturbed)
        view = machine.ended(disturbed)
        assert view["state"] == "succeeded", machine.everything(disturbed)
        assert [each["cause"] for each in view["attempts"]] == ["preempted", "succeeded"]
        assert view["slice"] != first
        assert b"resumed at step " in machine.log(disturbed)
        assert machine.ended(quiet)["state"] == "succeeded"
        with machine.client() as client:
            undisturbed, resumed = (json.loads(client.artifact(job, "metrics.json")) for job in (quiet, disturbed))
        assert resumed["weights_sha256"] == undisturbed["weights_sha256"]
        assert (undisturbed["stage"], resumed["stage"]) == (0, 1)
