"""A state directory of a test's own with its embedded server, as processes; the tests of this folder drive it."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.capacity import processes
from penstock.wiring.embedded import ensure_server, stop_server
from penstock.wiring.home import Home, ServerFile

WITHIN_S = 60.0  #: for anything: the machine may be busy with other tests


class Machine:
    """One state directory, and the environment that names it."""

    def __init__(self, path: Path) -> None:
        self.home = Home(path)
        # pytest-xdist gives its workers the size of a terminal that is not there.
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PENSTOCK_") and name not in ("COLUMNS", "LINES")
        }
        self.environment = {**kept, "PENSTOCK_HOME": str(path)}

    def start(self) -> str:
        return ensure_server(self.environment)

    @property
    def server(self) -> ServerFile:
        server = self.home.server()
        assert server is not None
        return server

    def python(self, code: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code], env=self.environment, stdout=subprocess.PIPE)

    def tpu(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", "from penstock.cli.main import main; main()", *words]
        # Not in the directory of the tests: a penstock.toml there would count.
        return subprocess.run(
            argv, env=self.environment, cwd=self.home.path.parent, capture_output=True, text=True, check=False
        )

    def call(self, method: str, path: str, body: object = None, *, token: str | None = None) -> tuple[int, Any]:
        address = urlsplit(self.server.url)
        given = (self.home.path / "token").read_text().strip() if token is None else token
        headers = {"authorization": f"Bearer {given}", "content-type": "application/json"}
        with closing(http.client.HTTPConnection(address.hostname or "", address.port, timeout=WITHIN_S)) as connection:
            connection.request(method, path, msgspec.json.encode(body) if body is not None else None, headers)
            answer = connection.getresponse()
            return answer.status, msgspec.json.decode(answer.read())

    def servers(self) -> list[processes.Process]:
        """Processes of this machine's server, whatever files say."""
        return [
            found
            for found in processes.with_arguments("-m", "penstock.wiring")
            if f"PENSTOCK_HOME={self.home.path}".encode() in environ(found.pid)
        ]

    def kill_server(self) -> ServerFile:
        """End the server as a power cut would; answers which it was."""
        server = self.server
        assert processes.kill(server.process, 10)
        return server

    def end(self) -> None:
        """Leave nothing running."""
        stop_server(self.environment, force=True, slices=True)
        for left in self.servers():
            processes.kill(left, 10)


def environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # it ended meanwhile, or is another user's


def until(what: Callable[[], object], within_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)
