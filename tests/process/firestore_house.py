"""Google's Firestore emulator, a machine with a real server, and bridges as real processes: what bridge tests live in.

The emulator is the one of the Cloud SDK (`tools/firestore_emulator.py`); where there is none a test skips with the
reason, and in CI (`CI=true`) it fails. What a payload did is known from a side file it appends to, not from anybody's
word. It must not judge anything.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from tests.missing import missing
from tests.process.machine import until
from tests.process.shop import Shop

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "firestore_emulator.py"
PROJECT = "demo-bridge"
COLLECTION = "tpu_jobs"
START_S = 60.0


class Emulator:
    """One emulator process on one port; it may be stopped, started again, and given what it had."""

    def __init__(self, folder: Path, rules: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.rules = rules
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, data: Path | None = None) -> None:
        words = [sys.executable, str(TOOL), f"--port={self.port}"]
        words += [f"--rules={self.rules}"] if self.rules is not None else []
        words += [f"--data={data}"] if data is not None else []
        with (self.folder / "emulator.log").open("ab") as log:
            self._process = subprocess.Popen(words, cwd=self.folder, stdout=log, stderr=log)
        until(self._answers, START_S)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "emulator.log").read_text()[-1000:]
        try:
            return self.call("GET", "/") == 200
        except OSError:
            return False

    def call(self, method: str, path: str, body: object = None) -> int:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            sent = msgspec.json.encode(body) if body is not None else None
            connection.request(method, path, sent, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status

    def clear(self) -> None:
        assert self.call("DELETE", f"/emulator/v1/projects/{PROJECT}/databases/(default)/documents") == 200

    def export(self) -> Path:
        """Write down what it holds; the file to start with again."""
        name = f"export-{time.monotonic_ns()}"
        body = {
            "database": f"projects/{PROJECT}/databases/(default)",
            "export_directory": str(self.folder),
            "export_name": name,
        }
        assert self.call("POST", f"/emulator/v1/projects/{PROJECT}:export", body) == 200
        return self.folder / name / f"{name}.overall_export_metadata"

    def stop(self, how: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(30)
            self._process = None


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def require_emulator() -> None:
    """Skip where the SDK is missing; in CI that is no reason."""
    done = subprocess.run([sys.executable, str(TOOL), "--check"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    missing(f"Google's Firestore emulator: {done.stderr.strip()}")


class BridgeHouse(Shop):
    """A machine whose jobs come from an emulator's documents."""

    def __init__(self, path: Path, emulator: Emulator) -> None:
        super().__init__(path)
        self.emulator = emulator
        self.environment["FIRESTORE_EMULATOR_HOST"] = emulator.host
        self._bridges: list[subprocess.Popen[bytes]] = []

    # --- bridges ---
    def bridge(self, *words: str, module: str = "", env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a bridge and wait until it listens; with `module` another program that runs one."""
        command = ["-m", module] if module else ["-c", "from penstock.cli.main import main; main()"]
        log = self.home.path.parent / f"bridge-{len(self._bridges)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *command, "bridge", "firestore", "--project", PROJECT, "--sweep-s", "0.5", *words],
                env={**self.environment, **(env or {})},
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._bridges.append(process)
        until(lambda: b"listening:" in log.read_bytes() or process.poll() is not None)
        return process

    def logs(self) -> str:
        """What the bridges of this test said, and the end of what the server did."""
        files = [self.home.path.parent / f"bridge-{number}.log" for number in range(len(self._bridges))]
        return "".join(f"--- {file.name}\n{file.read_text()[-4000:]}" for file in (*files, self.home.log))

    def end_bridge(self, process: subprocess.Popen[bytes], how: int = signal.SIGTERM) -> int:
        process.send_signal(how)
        return process.wait(30)

    def end_bridges(self) -> None:
        for process in self._bridges:
            if process.poll() is None:
                self.end_bridge(process, signal.SIGKILL)
        self._bridges.clear()

    # --- documents ---
    def db(self) -> Any:
        """Google's own client, as a service would use it."""
        from google.cloud import firestore

        os.environ["FIRESTORE_EMULATOR_HOST"] = self.emulator.host
        return firestore.Client(project=PROJECT)

    def runs(self) -> Counter[str]:
        """How often each payload ran, by the marks they left."""
        marks = (self.home.path / "root" / "jobs").glob("*/checkpoints/*/ran")
        return Counter(word for file in marks for word in file.read_text().split())

    def let_go(self, job: str) -> None:
        """Let a payload go on that waits (`marked(…, wait=True)`)."""
        self.open_gate(job, "go")


@contextlib.contextmanager
def bridge_house(folder: Path) -> Iterator[BridgeHouse]:
    """An open machine with an emulator of its own; without one the test is left out."""
    require_emulator()
    emulator = Emulator(folder / "emulator")
    emulator.start()
    house = BridgeHouse(folder / "home", emulator)
    try:
        house.open()
        yield house
    finally:
        house.end_bridges()
        house.end()
        emulator.stop()


def marked(mark: str, then: str = "", *, wait: bool = False) -> str:
    """Code that leaves a mark where it ran, which is the truth about how often; with `wait` until it is let go."""
    code = f"""import os, time
folder = os.environ["PENSTOCK_CHECKPOINT_DIR"]
with open(folder + "/ran", "a") as file:
    file.write({mark + chr(10)!r})
"""
    if wait:
        code += 'while not os.path.exists(folder + "/go"): time.sleep(0.02)\n'
    return code + then


def wait_for(
    collection: Any, ids: Iterable[str], good: Callable[[Mapping[str, Any]], bool], within_s: float = 120.0
) -> dict[str, dict[str, Any]]:
    """The documents, once each of them is as wanted."""
    wanted = set(ids)
    deadline = time.monotonic() + within_s
    while True:
        found = {each.id: each.to_dict() for each in collection.stream() if each.id in wanted}
        bad = {name: found.get(name) for name in wanted if not good(found.get(name) or {})}
        if not bad:
            return found
        assert time.monotonic() < deadline, f"{len(bad)} of {len(wanted)} are not as wanted: {next(iter(bad.items()))}"
        time.sleep(0.1)


def over(document: Mapping[str, Any]) -> bool:
    return document.get("status") in ("completed", "failed")


def let_all_go(house: BridgeHouse, jobs: Any, names: list[str]) -> None:
    """Each as soon as it runs; there are fewer slices than documents."""
    waiting = set(names)
    while waiting:
        found = wait_for(jobs, waiting, bool)
        running = {name for name in waiting if found[name].get("status") == "running"}
        for name in running:
            house.let_go(found[name]["job_id"])
        waiting -= running | {name for name in waiting if over(found[name])}
