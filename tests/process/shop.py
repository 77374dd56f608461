"""A machine with its embedded server, and the words in which tests speak of real jobs on it.

The tests of whole lives, of logs and of the terminal use it. A job meets its test at gates: files in its checkpoint
directory, which both can see wherever it runs. It must not judge anything.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from penstock.capacity import processes
from penstock.client import Client
from penstock.client.results import log_bytes
from tests.process.machine import Machine, until

TPU = (sys.executable, "-c", "from penstock.cli.main import main; main()")
ENDED = frozenset({"succeeded", "failed", "cancelled"})
RUN_S = 120.0  #: for a job or a command: a quiet machine needs a tenth of it

#: What payloads start with: `say(x)` prints a line at once, `gate(name)` waits until the test has opened it.
#: A line is one write: `print` writes each word by itself, and the threads of JAX's Gloo write theirs between them.
WORDS = """
import os, sys, time
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def gate(name):
    while not os.path.exists(os.environ["PENSTOCK_CHECKPOINT_DIR"] + "/" + name): time.sleep(0.02)
"""


class Shop(Machine):
    """One state directory, its server, and the jobs of a test."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.desk = path.parent / "desk"
        self.desk.mkdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def open(self) -> None:
        """Start (again) and wait until jobs are taken."""
        self.start()
        until(lambda: self.call("GET", "/v1/server")[1]["leading"] and self.call("GET", "/v1/queues")[1]["queues"])

    def client(self) -> Client:
        return Client(self.server.url, (self.home.path / "token").read_text().strip())

    def command(
        self, *words: str, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """A `tpu` command, with its output as bytes."""
        return subprocess.run(
            [*TPU, *words],
            env={**self.environment, **(env or {})},
            cwd=self.desk,
            input=stdin,
            capture_output=True,
            timeout=RUN_S,
            check=False,
        )

    def told(self, *words: str) -> Any:
        """What a command says as JSON."""
        done = self.command(*words, "--json")
        assert done.returncode == 0, done.stderr
        return msgspec.json.decode(done.stdout)

    # --- jobs ---
    def submit(self, code: str, *words: str, on: str = "v5e-1", **fields: Any) -> str:
        """A command job of Python `code`; `words` are its arguments."""
        payload = {"type": "command", "argv": ["python3", "-c", WORDS + code, *words]}
        status, accepted = self.call("POST", "/v1/jobs", {"payload": payload, "on": [on], **fields})
        assert status == 201, accepted
        return str(accepted["id"])

    def view(self, id: str) -> Any:
        return self.call("GET", f"/v1/jobs/{id}")[1]

    def ended(self, id: str, within_s: float = RUN_S) -> Any:
        """The job's view, once it has ended."""
        until(lambda: self.view(id)["state"] in ENDED, within_s)
        return self.view(id)

    def saved(self, id: str) -> bool:
        """Whether a checkpoint of it is whole where other hosts can get it."""
        told = self.call("GET", f"/v1/jobs/{id}/events?limit=1000")[1]["events"]
        return any(each["kind"] == "attempt.saved" for each in told)

    def result(self, id: str) -> Any:
        return self.call("GET", f"/v1/jobs/{id}/result")[1]

    def log(self, id: str, stream: str = "out", host: int = 0) -> bytes:
        """One stream as `tpu logs` gives it."""
        done = self.command("logs", id, "--stream", stream, "--host", str(host))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def says(self, id: str, what: bytes, hosts: int = 1) -> None:
        """Wait until each host has said it."""
        with self.client() as client:
            for host in range(hosts):
                try:
                    soon(lambda host=host: what in written(client, id, host))  # type: ignore[misc]
                except AssertionError:
                    raise AssertionError(f"host {host} of {self.view(id)} said only {self.everything(id)!r}") from None

    def everything(self, id: str) -> bytes:
        """All that a job wrote, for a reader who wonders."""
        done = self.command("logs", id)
        return done.stdout + done.stderr

    def open_gate(self, id: str, name: str, fence: int = 1) -> None:
        """Let a job go on that waits in `gate(name)`."""
        place = self.home.path / "root" / "jobs" / id / "checkpoints" / str(fence)
        assert place.is_dir(), f"{place} is not there: has it started?"
        (place / name).touch()

    def payloads(self, mark: str) -> list[processes.Process]:
        """The processes of the job that was given `mark` as an argument, not those that set its walls up."""
        found = processes.with_arguments(mark)
        return [each for each in found if _words(each).startswith(b"python3\0-c\0")]


def written(client: Client, id: str, host: int = 0) -> bytes:
    """What a host has written to its standard output so far."""
    return b"".join(log_bytes(chunk) for chunk in client.logs(id, stream="out", host=host))


def _words(process: processes.Process) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it ended meanwhile


def soon(what: Callable[[], object]) -> None:
    until(what, RUN_S)
