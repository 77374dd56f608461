"""A small real HTTP server that speaks `wire.agent`, for tests of the real agent: it orders, and keeps what is sent.

`tests.process.test_agent` starts one on a port of the system's choice and an agent as a process of its own. It can be
away, come back without its memory as a killed server does, and answer whatever a test wants. It checks what an agent
may rely on and nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from penstock.agent.processes import descendants, started_at
from penstock.domain.custody import Held, Launch, Phase, SyncReply, SyncRequest
from penstock.wire.agent import AgentSync, Join, Joined, LaunchSpec, LogAck, ResultReport
from penstock.wire.api import CommandRequest, ProgressView, SnippetRequest
from penstock.wire.problems import problem

SLICE, PROVIDER_ID, TOKEN, CREDENTIAL = "s1", "vm-1", "join-me", "h.s1.0.secret-credential"
PATIENCE_S = 60.0


class Desk:
    """The server's side. `spec` and `order` say what should run; the rest is what the agent said."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = 0
        self.orders: dict[str, Launch] = {}
        self.specs: dict[str, LaunchSpec] = {}
        self.stop: set[str] = set()
        self.kill: set[str] = set()
        self.forgets = True
        self.welcome = True
        self.joins: list[Join] = []
        self.requests: list[SyncRequest] = []
        self.progress: dict[str, ProgressView] = {}
        self.ends: dict[str, Held] = {}
        self.phases: dict[str, list[Phase]] = defaultdict(list)
        self.logs: dict[tuple[str, str], bytearray] = defaultdict(bytearray)
        self.durable: dict[tuple[str, str], int] = defaultdict(int)
        self.durable_every = 1
        self.settles = True  #: what is asked about with an empty chunk is made durable
        self.artifacts: dict[str, bytes] = {}
        self.results: dict[str, ResultReport] = {}
        self.trace: list[str] = []  #: what came, in order: "artifact …", "result …", "exited …"
        self._bell = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    # --- being there ---
    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=4 << 20)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """As kill -9 does it: connections break, and what was not durable is forgotten."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()
        for key, log in self.logs.items():
            del log[self.durable[key] :]

    def ring(self) -> None:
        self._bell.set()
        self._bell = asyncio.Event()

    # --- what tests say ---
    def launch(self, attempt: str, payload: CommandRequest | SnippetRequest, *, fence: int = 1, **more: object) -> None:
        given = {"timeout_s": 600.0, "rank": 0, "world_size": 1, "stage": 0, "replica": 0, **more}
        order = {name: given[name] for name in ("timeout_s", "rank", "world_size", "stage", "replica")}
        self.orders[attempt] = msgspec.convert({"attempt": attempt, "job": "j1", "fence": fence, **order}, Launch)
        plain = {"job": "j1", "name": "", "team": "red", "accelerator": "v5e-1", "jax_devices": 1, "coordinator": None}
        self.specs[attempt] = LaunchSpec(attempt=attempt, fence=fence, payload=payload, **{**plain, **given})  # type: ignore[arg-type]
        self.ring()

    async def until(self, fact: Callable[[], object], what: str = "") -> None:
        """Wait for a fact; the deadline is for broken code, not for slow machines."""
        until = asyncio.get_running_loop().time() + PATIENCE_S
        while not fact():
            assert asyncio.get_running_loop().time() < until, f"not within {PATIENCE_S:g} s: {what}"
            await asyncio.sleep(0.01)

    async def ended(self, attempt: str) -> Held:
        await self.until(lambda: attempt in self.ends, f"the end of {attempt}")
        return self.ends[attempt]

    def log(self, attempt: str, stream: str = "out") -> bytes:
        return bytes(self.logs[attempt, stream])

    # --- answering ---
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                method, target, _ = line.decode().split()
                headers = {}
                while (line := await reader.readline()).strip():
                    name, _, value = line.decode().partition(":")
                    headers[name.strip().lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                status, answer = await self._answer(method, target, headers.get("authorization", ""), body)
                head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(answer)}\r\ncontent-type: application/json\r\n\r\n"
                writer.write(head.encode() + answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return  # the other side is gone, or the test has ended
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, method: str, target: str, authorization: str, body: bytes) -> tuple[int, bytes]:
        parts = urlsplit(target)
        path = parts.path.removeprefix("/v1/agent/").split("/")
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if path == ["join"]:
            return self._join(msgspec.json.decode(body, type=Join))
        if authorization != f"Bearer {CREDENTIAL}":
            return 401, msgspec.json.encode(problem("unauthenticated", "no valid token"))
        match method, path:
            case "POST", ["sync"]:
                return 200, msgspec.json.encode(await self._sync(msgspec.json.decode(body, type=AgentSync)))
            case "GET", ["attempts", attempt, "launch"] if attempt in self.specs:
                return 200, msgspec.json.encode(self.specs[attempt])
            case "POST", ["attempts", attempt, "logs"]:
                return 200, msgspec.json.encode(self._append((attempt, query["stream"]), int(query["offset"]), body))
            case "PUT", ["attempts", attempt, "artifacts", *name]:
                self.artifacts[unquote("/".join(name))] = body
                self.trace.append(f"artifact {attempt}")
                return 204, b""
            case "PUT", ["attempts", attempt, "result"]:
                self.results[attempt] = msgspec.json.decode(body, type=ResultReport)
                self.trace.append(f"result {attempt}")
                return 204, b""
            case _:
                return 404, msgspec.json.encode(problem("not_found", f"{method} {target}"))

    def _join(self, wanted: Join) -> tuple[int, bytes]:
        self.joins.append(wanted)
        if wanted.token != TOKEN:
            return 401, msgspec.json.encode(problem("unauthenticated", "token"))
        return 200, msgspec.json.encode(Joined(credential=CREDENTIAL, root=self.root.as_uri()))

    async def _sync(self, sent: AgentSync) -> SyncReply:
        self.requests.append(sent.request)
        self.progress |= sent.progress
        for held in sent.request.held:
            phases = self.phases[held.attempt]
            if not phases or phases[-1] is not held.phase:
                phases.append(held.phase)
            if held.phase is Phase.EXITED and held.attempt not in self.ends:
                self.ends[held.attempt] = held
                self.trace.append(f"exited {held.attempt}")
        until = asyncio.get_running_loop().time() + sent.wait_s
        while (reply := self._reply(sent.request)) == SyncReply(welcome=True):
            bell = self._bell
            try:
                async with asyncio.timeout_at(until):
                    await bell.wait()
            except TimeoutError:
                break
        return reply

    def _reply(self, request: SyncRequest) -> SyncReply:
        if not self.welcome:
            return SyncReply(welcome=False, why="the test says so")
        phases = {held.attempt: held.phase for held in request.held}
        alive = {attempt for attempt, phase in phases.items() if phase is not Phase.EXITED}
        waiting = [order for name, order in self.orders.items() if name not in phases and name not in self.ends]
        return SyncReply(
            welcome=True,
            launch=waiting[0] if waiting else None,
            stop=tuple(self.stop & alive),
            kill=tuple(self.kill & alive),
            forget=tuple(phases.keys() - alive) if self.forgets else (),
        )

    def _append(self, key: tuple[str, str], offset: int, data: bytes) -> LogAck:
        log = self.logs[key]
        if offset <= len(log):
            log += data[len(log) - offset :]
        if len(log) - self.durable[key] >= self.durable_every or (not data and self.settles):
            self.durable[key] = len(log)
        return LogAck(self.durable[key], len(log))


class Host:
    """One host: a state directory and the agent process that runs on it."""

    def __init__(self, desk: Desk, state: Path) -> None:
        self.desk, self.state = desk, state
        state.mkdir(parents=True)
        self.token_file = state / "join-token"
        self.token_file.write_text(TOKEN)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, program: tuple[str, ...] = ("-m", "penstock.agent"), **env: str) -> None:
        """Start the agent (again)."""
        command = [
            sys.executable, *program, "--server", f"http://127.0.0.1:{self.desk.port}", "--slice", SLICE,
            "--host", "0", "--provider-id", PROVIDER_ID, "--state", str(self.state), "--token-file",
            str(self.token_file),
        ]  # fmt: skip
        with (self.state / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **env})

    def kill_agent(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Whatever the test did, nothing of this host stays."""
        if self.process is not None and self.process.poll() is None:
            self.kill_agent()
        command = [sys.executable, "-m", "penstock.agent", "--power-off", "--state", str(self.state)]
        subprocess.run(command, check=True)


@contextlib.asynccontextmanager
async def a_host(folder: Path) -> AsyncIterator[tuple[Desk, Host]]:
    """A desk and a host whose agent runs."""
    desk = Desk(folder / "root")
    desk.root.mkdir()
    await desk.open()
    host = Host(desk, folder / "state")
    host.start()
    try:
        yield desk, host
    finally:
        await asyncio.to_thread(host.end)
        await desk.close()


def alive(pid: int) -> bool:
    return started_at(pid) is not None


Story = Callable[[Desk, Host, Path], Awaitable[None]]


def tell(folder: Path, story: Story) -> None:
    async def run() -> None:
        async with a_host(folder) as (desk, host):
            await story(desk, host, folder)

    asyncio.run(run())


def python(code: str) -> CommandRequest:
    return CommandRequest((sys.executable, "-c", code))


def shell(code: str) -> CommandRequest:
    return CommandRequest(("/bin/sh", "-c", code))


DETACHED = """
import os, sys, time
out = os.environ["PENSTOCK_OUTPUT_DIR"] + "/pids"
def note():
    with open(out, "a") as f: f.write(f"{os.getpid()}\\n")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        note()
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    os._exit(0)
note()
print("up", flush=True)
"""


def under_keeper(host: Host) -> set[int]:
    """All processes of the host's payloads, wherever they moved."""
    keeper = json.loads((host.state / "keeper.json").read_text())
    assert started_at(keeper["pid"]) == keeper["started"]
    return descendants(keeper["pid"])
