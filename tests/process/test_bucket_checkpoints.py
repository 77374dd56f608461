"""Checkpoints and compiled code in a bucket: found on another host, whatever was killed, cut off, damaged or away.

Real processes: the emulated Cloud Storage, `tpu serve --root gs://…` on SQLite or PostgreSQL, its agents and their
payloads.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.capacity import processes
from penstock.capacity.slice_files import SliceFiles
from penstock.emulator.gcs_faults import Fault
from tests.contract.objects.servers import BUCKET, ROOT, Emulator, gcs_emulator
from tests.process.bucket_shop import (
    CHAIN,
    PREFIX,
    at_rest,
    chain,
    copied,
    lists_of,
    names,
    preempt,
    progress,
    resumed_at,
    serving,
    weights,
)
from tests.process.machine import until
from tests.process.shop import Shop, soon


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
        job = machine.submit(CHAIN, "60", "0.15", "3", env={"HOLD": "20"})
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
        # Two of each of the two lists, and of a copy that the payload's end cut off before its list.
        assert len(copied(gcs, job, "pieces", 2)) <= 6
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


# --- damage at rest ---
@pytest.mark.long
def test_a_damaged_checkpoint_is_skipped_for_the_one_before_and_then_for_none(machine: Shop, gcs: Emulator) -> None:
    with serving(machine):
        job = machine.submit(CHAIN, "6", "0.1", "1", "3", max_retries=0, env={"HOLD": "2"})
        soon(lambda: any(file.path == "2/state" for each in lists_of(gcs, job)[:1] for file in each.files))
        (work,) = machine.home.slices.glob("*/host-0/attempts/*/work")
        (work / "go").touch()
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


LOST = """
import pathlib
from penstock import payload
for place in payload.restore_dirs():
    say("found:", *sorted(each.name for each in pathlib.Path(place).iterdir() if each.is_dir()))
    sys.exit(0)
"""


def test_what_a_payload_saved_whose_end_nobody_saw_is_found_by_the_next_attempt(machine: Shop, gcs: Emulator) -> None:
    with serving(machine) as server:
        job = machine.submit(LOST + LAST_WORDS + "time.sleep(600)", mark := "is-lost")
        soon(lambda: copied(gcs, job))
        place = str(machine.view(job)["slice"])
        server.kill()
        server.wait()
    (agent,) = SliceFiles(machine.home.slices).agents(place)
    assert processes.kill(agent.process, 10)
    (payload,) = machine.payloads(mark)
    (home,) = (machine.home.slices / place / "host-0" / "attempts").glob("*")
    (home / "checkpoints" / "1" / "go").touch()
    until((home / "checkpoints" / "1" / "loose.npz").exists)
    shim = json.loads((home / "shim.json").read_bytes())["pid"]
    assert shim > 1
    os.kill(shim, signal.SIGKILL)  # nobody is left to say how it ended
    processes.send(payload, signal.SIGKILL)
    until(lambda: not payload.alive)
    assert not (home / "exit.json").exists()
    with serving(machine):
        view = machine.ended(job)
        assert view["state"] == "succeeded", machine.everything(job)
        assert len(view["attempts"]) == 2, view
        assert machine.log(job).decode() == "first\nfound: 1 2\n"


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


# --- with JAX ---
REAL = """
import jax
seen = []
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event))
from penstock import payload
step = jax.jit(lambda x: (x @ x.T).sum() * 3 + jax.numpy.sin(x).mean())
say("value", float(step(jax.numpy.ones((64, 64)))))
count = lambda what: sum(each.endswith("/compilation_cache/" + what) for each in seen)
say("hits", count("cache_hits") > 0, "misses", count("cache_misses"))
if payload.stage() or count("cache_hits"): sys.exit(0)
while not payload.should_stop(): time.sleep(0.05)
sys.exit(payload.STOPPED)
"""


@pytest.mark.long
def test_a_resume_on_another_slice_compiles_nothing_twice(machine: Shop) -> None:
    always = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    with serving(machine):
        job = machine.submit(REAL, env=always)
        machine.says(job, b"misses")
        first = str(machine.view(job)["slice"])
        assert machine.command("local", "preempt", first, "--notice", "30s").returncode == 0
        view = machine.ended(job)
        assert view["state"] == "succeeded", machine.everything(job)
        assert view["slice"] != first
        lines = machine.log(job).decode().splitlines()
        assert lines[1].startswith("hits False misses ")
        assert not lines[1].endswith(" 0")
        assert lines[2:] == [lines[0], "hits True misses 0"]


@pytest.mark.long
@pytest.mark.postgres
def test_training_with_orbax_resumes_from_the_bucket_bit_for_bit(
    machine: Shop, gcs: Emulator, postgres_url: str
) -> None:
    steps = ("num_epochs=2", "steps_per_epoch=40", "checkpoint_per_epoch=4")
    words = ["run", "--detach", "--on", "v5e-1", "--dir", str(ROOT / "examples" / "train_mlp"), "--"]
    words += ["python", "train.py", *(f"--config.training.{each}" for each in steps)]
    with serving(machine, store=postgres_url):
        quiet, disturbed = (machine.command(*words, *more).stdout.decode().strip() for more in ((), ("--pause=0.5",)))
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
