"""A server for one part of `bench/run.py`: started as people start it, asked over HTTP, weighed from outside, stopped.

Each part gets a state directory of its own, so that no part pays for the rows of another. The server's memory is its
resident set; that of the rest is what the kernel says each process owns (PSS: pages shared by forks count once).
Processor time is that of each process and of the children it has waited for. It must not look inside the server.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from penstock import Client
from penstock.wire.api import PoolRequest

TPU = Path(sys.executable).with_name("tpu")
START_S_MAX = 30.0
STOP_S_MAX = 60.0
POOL = "bench"
ACCELERATOR = "v5e-1"
_TICKS = os.sysconf("SC_CLK_TCK")


class Weight(NamedTuple):
    """What the server and everything it started hold and have used."""

    server_mib: float
    others_mib: float  #: agents, keepers, warm parents, payloads
    others: int
    server_cpu_s: float
    others_cpu_s: float

    @property
    def cpu_s(self) -> float:
        return self.server_cpu_s + self.others_cpu_s


class Served:
    """One server in one state directory; a context manager that leaves no process behind."""

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()
        self.home.mkdir(parents=True)
        self.environment = {**os.environ, "PENSTOCK_HOME": str(self.home)}
        for name in ("PENSTOCK_URL", "PENSTOCK_TOKEN", "PENSTOCK_STORE", "PENSTOCK_ROOT", "PENSTOCK_CONFIG"):
            self.environment.pop(name, None)
        self.ready_s = 0.0
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        began = time.monotonic()
        with (self.home / "serve.out").open("wb") as out:
            self._process = subprocess.Popen(
                [TPU, "serve"], env=self.environment, cwd=self.home, stdout=out, stderr=subprocess.STDOUT
            )
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() - began > START_S_MAX:
                self.__exit__(None, None, None)
                raise RuntimeError(f"tpu serve did not start: {(self.home / 'serve.out').read_text()[-500:]}")
            time.sleep(0.005)
        self.ready_s = time.monotonic() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.tpu("down", "--slices")

    def tpu(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        """A command of the user's, in this state directory."""
        return subprocess.run([TPU, *words], env=self.environment, cwd=self.home, capture_output=True, check=False)

    def client(self) -> Client:
        return Client(self.url, self.token)

    @property
    def token(self) -> str:
        return (self.home / "token").read_text().strip()

    def pool(self, client: Client, slices: int, *, kept: int = 0) -> None:
        client.put_pool(POOL, PoolRequest(accelerator=ACCELERATOR, min=kept, max=slices))

    def weigh(self) -> Weight:
        assert self._process is not None
        server = self._process.pid
        others = [pid for pid in _family(str(self.home), server) if pid != server]
        return Weight(
            server_mib=_memory_mib(server, "Rss:"),
            others_mib=sum(_memory_mib(pid, "Pss:") for pid in others),
            others=len(others),
            server_cpu_s=cpu_s(server),
            others_cpu_s=sum(map(cpu_s, others)),
        )

    def _answers(self) -> bool:
        try:
            self.url = json.loads((self.home / "server.json").read_bytes())["url"]
        except (OSError, ValueError):
            return False
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=5)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _family(home: str, server: int) -> set[int]:
    """Processes with the state directory in their command line, and all their descendants."""
    parents: dict[int, int] = {}
    found = {server}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if home in (entry / "cmdline").read_text(errors="replace"):
                    found.add(int(entry.name))
            except OSError:
                continue  # it has ended
    found.discard(os.getpid())
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found


def _memory_mib(pid: int, kind: str) -> float:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(kind):
                return int(line.split()[1]) / 1024
    except OSError:
        pass  # it has ended
    return 0.0


def cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it has ended; whoever waited for it counts it
    return sum(map(int, fields[11:15])) / _TICKS


def p(times: Sequence[float], percent: float) -> float:
    """A percentile, by the nearest rank."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def wall_and_cpu(
    command: Sequence[str | Path], runs: int, environment: dict[str, str] | None = None
) -> tuple[float, float]:
    """Medians of a command's wall and processor time, after one run that nobody counts."""
    walls, cpus = [], []
    for number in range(runs + 1):
        before, began = os.times(), time.monotonic()
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        after = os.times()
        if number:
            walls.append(time.monotonic() - began)
            cpus.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return statistics.median(walls), statistics.median(cpus)
