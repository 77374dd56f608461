"""An emulated Google cloud whose hosts really run, and a server that uses it, as processes from outside.

`tools.storm` and `bench.recovery` drive it: the emulator outlives the server, which can be killed without a word and
started again with the same state. What truly happened is asked of the emulator's control address alone. It must not
judge anything, nor look inside the server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from penstock import Client

TPU: Final = (sys.executable, "-c", "from penstock.cli.main import main; main()")
PROJECT: Final = "p1"
BUCKET: Final = "storm"
START_S_MAX: Final = 120.0
STOP_S_MAX: Final = 60.0
LOOK_S: Final = 0.05


class Unusable(Exception):
    """It cannot be done here, or did not start; the text says why."""


def lacking() -> str:
    """Why hosts cannot run on this machine; empty when they can."""
    if os.geteuid() == 0 and shutil.which("bwrap") and shutil.which("nsenter"):
        return ""
    return "emulated hosts need root, bubblewrap and nsenter"


def until(what: Callable[[], object], within_s: float, told: str, every_s: float = LOOK_S) -> None:
    """Look until it is so; Unusable with `told` when it is not in time."""
    deadline = time.monotonic() + within_s
    while not what():
        if time.monotonic() > deadline:
            raise Unusable(f"not within {within_s:.0f} s: {told}")
        time.sleep(every_s)


class Emulated:
    """One emulator and one server on it, in a folder of their own."""

    def __init__(self, folder: Path, world: str = "") -> None:
        if why := lacking():
            raise Unusable(why)
        self.folder = folder.absolute()
        self.home = self.folder / "home"
        self.url = ""  #: of the emulator
        self._world = world
        self._emulator: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    # --- processes ---
    @contextlib.contextmanager
    def running(self) -> Iterator[Emulated]:
        """Both processes; at the end neither is left, and no host either."""
        self.home.mkdir(parents=True)
        with (self.folder / "emulator.log").open("wb") as said, (self.folder / "server.log").open("wb") as self._log:
            try:
                self._start_emulator(said)
                self.serve()
                yield self
            finally:
                for process in (self._server, self._emulator):
                    _end(process)

    def _start_emulator(self, said: IO[bytes]) -> None:
        script = self.folder / "world.toml"
        script.write_text(self._world)
        words = ("emulator", "--bucket", BUCKET, "--world", str(script))
        self._emulator = subprocess.Popen([*TPU, *words], cwd=self.folder, stdout=subprocess.PIPE, stderr=said)
        assert self._emulator.stdout is not None
        self.url = self._emulator.stdout.readline().decode().strip()
        if not self.url.startswith("http://127.0.0.1:"):
            raise Unusable(f"the emulator did not start: {(self.folder / 'emulator.log').read_text()[-500:]}")
        # Of the packages that jobs could use a host gets one that is small: hosts come and go all the time here.
        settings = f'[tpu_vm]\nproject = "{PROJECT}"\nendpoint = "{self.url}"\nbundle = ["msgspec"]\n'
        (self.home / "penstock.toml").write_text(settings)

    @property
    def environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        return {**own, "PENSTOCK_HOME": str(self.home), "STORAGE_EMULATOR_HOST": self.url}

    def serve(self) -> None:
        """Start the server, or start it again with what it left behind."""
        self._server = subprocess.Popen(
            [*TPU, "serve", "--local-hosts", "0", "--root", f"gs://{BUCKET}/root"],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        assert self._server.stdout is not None
        if not self._server.stdout.readline().startswith(b"http"):
            raise Unusable(f"the server did not start: {(self.folder / 'server.log').read_text()[-500:]}")

    def kill_server(self) -> None:
        """As a power cut would end it."""
        assert self._server is not None
        with self._server as server:
            server.kill()

    def server_lives(self) -> bool:
        return self._server is not None and self._server.poll() is None

    def tpu(self, *words: str) -> str:
        """A command of the user's; Unusable when it fails."""
        done = subprocess.run(
            [*TPU, *words],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S_MAX,
            check=False,
        )
        if done.returncode != 0:
            raise Unusable(f"tpu {' '.join(words)}: {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def client(self) -> Client:
        url = msgspec.json.decode((self.home / "server.json").read_bytes())["url"]
        return Client(url, (self.home / "token").read_text().strip())

    # --- the emulator's own word ---
    def control(self, method: str, what: str, content: object = None) -> Any:
        """A call to the control address: `tpu/history`, `tpu/happen`, `history` (of storage), …"""
        body = None if content is None else msgspec.json.encode(content)
        request = urllib.request.Request(f"{self.url}/_emulator/{what}", body, method=method)
        with urllib.request.urlopen(request, timeout=STOP_S_MAX) as answer:
            return msgspec.json.decode(answer.read() or b"null")

    def nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.control("GET", "tpu/nodes")
        return found

    def preempt(self, node: str, notice_s: float = 0.0) -> bool:
        """Take a node away by its short name; False when there is none any more."""
        return any(self.control("POST", "tpu/happen", [{"what": "preempt", "name": node, "notice_s": notice_s}]))

    def object(self, name: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}/{BUCKET}/{name}", timeout=STOP_S_MAX) as answer:
            return bytes(answer.read())


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is None:
        return
    with process:
        process.terminate()
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
