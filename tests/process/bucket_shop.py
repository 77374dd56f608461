"""A server whose root is an emulated bucket, and what tests say of the checkpoints in it.

The tests of bucket roots use it. It must not judge anything but what it needs itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec

from penstock.wire.agent import Saved
from tests.contract.objects.servers import BUCKET, Emulator
from tests.process.machine import until
from tests.process.shop import Shop

PREFIX = "team/a"
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
    # HOLD: the first attempt goes no further until its test has looked, or takes it away.
    while (str(step), payload.stage()) == (os.environ.get("HOLD"), 0) and not os.path.exists("go"): time.sleep(0.05)
pathlib.Path(payload.output_dir(), "weights").write_text(state.hex())
"""


def chain(steps: int) -> str:
    """The weights of an undisturbed run."""
    state = b"seed"
    for step in range(1, steps + 1):
        state = hashlib.sha256(state + b"%d" % step).digest()
    return state.hex()


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


def at_rest(gcs: Emulator, method: str, name: str, data: bytes | None = None) -> bytes:
    """An object behind the server's back."""
    with urlopen(Request(f"{gcs.url}/{BUCKET}/{PREFIX}/{name}", data, method=method), timeout=30) as answer:
        return bytes(answer.read())


def lists_of(gcs: Emulator, job: str, rank: int = 0, fence: int = 1) -> list[Saved]:
    """The copies that a host left, newest first."""
    paths = sorted(names(gcs, f"jobs/{job}/checkpoints/{fence}/{rank}/lists/"), reverse=True)
    found = []
    for path in paths:
        try:
            found.append(msgspec.json.decode(at_rest(gcs, "GET", path), type=Saved))
        except HTTPError as error:
            if error.code != 404:  # swept since it was listed
                raise
    return found
