"""A payload's processes as one thing: start, adopt, ask to stop, kill all of it, learn how it ended.

`launch` starts trees, `course` ends them. A tree is everything below its shim (see `keeper`) and in its control group,
so children that detached, changed session or forked twice still belong to it. Nothing here is lost with the agent: a
record of numbers and start times is enough for the next agent to go on. It must not decide when a payload ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.agent import cgroups, keeper, processes
from penstock.domain import limits

START_S = 10.0
_WRAPPERS = frozenset({"bwrap"})  #: they pass no signal on, and their own end takes the payload with it
#: Starts the keeper without the packages' own modules, which load what it does not need and cannot find.
_BOOT = """
import sys, types
for name, path in (("penstock", sys.argv[1]), ("penstock.agent", sys.argv[1] + "/agent")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from penstock.agent.keeper import main
main(sys.argv[2])
"""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one payload may use of its host."""

    memory_bytes: int | None = None
    tasks: int = limits.PIDS_MAX
    log_bytes: int = limits.LOG_BYTES_MAX
    free_bytes: int = limits.HOST_FREE_BYTES  #: of disk, below which output is dropped


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How the first process of a tree ended. `lost`: nobody saw it."""

    code: int | None = None
    signal: int | None = None
    oom_killed: bool = False
    refused: str = ""  #: "exec": the program cannot be run; "prepare": the host could not make ready for it
    lost: bool = False


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """What a record keeps of a running tree: numbers and start times, which tell a process from a later namesake."""

    folder: str
    shim: int
    shim_started: int
    main: int
    main_started: int | None = None
    group: dict[str, str] = {}
    attempt: str = ""


class StartError(Exception):
    """The host could not start a payload; it is not the payload's fault."""


class Keeping:
    """The agent's side of the keeper's socket. Calls block for milliseconds: use them in a thread."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The keeper that lives now, this agent's or its predecessor's."""
        try:
            written = json.loads((self._state / "keeper.json").read_bytes())
        except (OSError, ValueError):
            return None
        alive = processes.started_at(written["pid"]) == written["started"]
        return int(written["pid"]) if alive else None

    def ensure(self) -> None:
        if self.pid is not None:
            return
        with (self._state / "keeper.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, str(Path(keeper.__file__).parents[1]), str(self._state)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
                start_new_session=True,
            )
        until = time.monotonic() + START_S
        while self.pid is None:
            if self._process.poll() is not None or time.monotonic() > until:
                raise StartError(f"the keeper did not start: see {self._state / 'keeper.log'}")
            time.sleep(0.005)

    def start(self, order: Mapping[str, object]) -> dict[str, object]:
        answer, _ = self._call({"op": "start", **order})
        return answer

    def streams(self, key: str, order: Mapping[str, object]) -> list[int]:
        """Write ends for the given streams, in their order; the caller closes them."""
        _, fds = self._call({"op": "streams", "key": key, **order})
        return fds

    def drain(self, key: str) -> None:
        """Everything written so far lies in the spool when this returns."""
        if self.pid is not None:
            self._call({"op": "drain", "key": key})

    async def open_streams(self, key: str, order: Mapping[str, object]) -> list[int]:
        """As `streams`, for who must not wait in a thread."""
        _, fds = await self._ask({"op": "streams", "key": key, **order})
        return fds

    async def drained(self, key: str) -> None:
        """As `drain`, for who must not wait in a thread."""
        await self._ask({"op": "drain", "key": key})

    def quit(self) -> None:
        if self.pid is not None:
            self._call({"op": "quit"})
        if self._process is not None:
            self._process.wait(START_S)

    def _call(self, order: dict[str, object]) -> tuple[dict[str, object], list[int]]:
        self.ensure()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(START_S)
                self._connect(connection)
                keeper.send(connection, order)
                return _answer(connection)
        except OSError as error:
            raise StartError(f"the keeper does not answer: {error}") from error

    async def _ask(self, order: dict[str, object]) -> tuple[dict[str, object], list[int]]:
        """The same without a thread, which would cost more than the call; a keeper that is not there yet is started."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
            try:
                self._connect(connection)
                keeper.send(connection, order)
            except OSError:  # it is gone, or has too many callers
                return await asyncio.to_thread(self._call, order)
            try:
                async with asyncio.timeout(START_S):
                    await _readable(connection)
                connection.settimeout(START_S)
                return _answer(connection)
            except OSError as error:
                raise StartError(f"the keeper does not answer: {error}") from error

    def _connect(self, connection: socket.socket) -> None:
        folder = os.open(self._state, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # An address of a socket is at most 107 bytes; this one is short wherever the state directory lies.
            connection.connect(f"/proc/self/fd/{folder}/keeper.sock")
        finally:
            os.close(folder)


def _answer(connection: socket.socket) -> tuple[dict[str, object], list[int]]:
    answer, fds = keeper.receive(connection)
    if "error" in answer:
        raise StartError(str(answer["error"]))
    return answer, fds


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, ready.cancel)
    try:
        await asyncio.wait((ready,))
    finally:
        loop.remove_reader(connection)


class Tree:
    """One payload's processes."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.exit: Ended | None = None
        self._group = cgroups.Group(handle.group) if handle.group else None

    @classmethod
    async def start(
        cls,
        keeping: Keeping,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        folder: Path,
        streams: Mapping[str, Path],
        hidden: Sequence[str] = (),
        bounds: Limits,
        group: cgroups.Group | None = None,
    ) -> Tree:
        """Start `argv`; its exit status and output go to `folder` and `streams`. Raises `StartError`."""
        order = {
            "argv": list(argv),
            "env": dict(env),
            "cwd": str(cwd),
            "folder": str(folder),
            "groups": group.entrances if group else [],
            "limits": {"RLIMIT_CORE": 0},
            **stream_order(streams, hidden, bounds),
        }
        me = await asyncio.to_thread(keeping.start, order)
        return cls(_handle(me, folder, group, env.get("PENSTOCK_ATTEMPT", "")))

    @classmethod
    def adopt(cls, handle: Handle) -> Tree | None:
        """The tree of a record if it runs, or ran and left its exit status; None when nobody can know."""
        there = processes.started_at(handle.shim) == handle.shim_started
        return cls(handle) if there or (Path(handle.folder) / "exit.json").exists() else None

    @classmethod
    def found(cls, folder: Path, group: cgroups.Group | None, attempt: str) -> Tree | None:
        """The tree that was started in `folder` by an agent that died before it could write that down."""
        try:
            me = json.loads((folder / "shim.json").read_bytes())
        except (OSError, ValueError):
            return None
        return cls(_handle(me, folder, group, attempt))

    @property
    def pid(self) -> int:
        return self.handle.main

    @property
    def started(self) -> int | None:
        return self.handle.main_started

    async def wait(self) -> Ended:
        """Until the first process ended, the rest was killed and all output lies in the spool."""
        if self.exit is None:
            await gone(self.handle.shim, self.handle.shim_started)
            self.exit = await asyncio.to_thread(self._read_exit)
        return self.exit

    def terminate(self) -> bool:
        """SIGTERM to the process group of the user's program, as a terminal or `timeout` would send it.

        Whether there was a program to hear it: while walls go up there is none yet, and none in one that is leaving.
        """
        if processes.started_at(self.handle.shim) != self.handle.shim_started:
            return False
        alive = processes.descendants(self.handle.shim)
        stats = {pid: stat for pid in alive if (stat := processes.stat_of(pid)) is not None}
        groups = {stats[pid][3] for pid in self._programs(stats) if processes.hears(stats[pid])}
        for pid, stat in stats.items():
            if stat[3] in groups and stat[0] not in _WRAPPERS:
                _signal(pid, signal.SIGTERM)
                _signal(pid, signal.SIGCONT)
        return bool(groups)

    def dump(self) -> list[int]:
        """SIGUSR1 to processes that handle it (faulthandler prints their stacks); the others would die of it."""
        told = [pid for pid in processes.descendants(self.handle.shim) if _catches(pid, signal.SIGUSR1)]
        for pid in told:
            _signal(pid, signal.SIGUSR1)
        return told

    async def kill(self) -> bool:
        """SIGKILL until nothing of it is left; whether that was reached within `KILL_S`."""
        return await asyncio.to_thread(self.kill_now)

    def kill_now(self) -> bool:
        files = []
        if self._group is not None:
            self._group.close()
            self._group.kill()
            files = self._group.everyone()
        root = self.handle.shim
        if processes.started_at(root) != self.handle.shim_started:
            root = 1  # nobody's: its number may be another process's by now: what it left is found by group or mark
            for pid in () if self._group else _marked(self.handle.attempt):
                _signal(pid, signal.SIGKILL)
        return processes.kill_all(root, files, limits.KILL_S)

    def close(self) -> None:
        if self._group is not None:
            self._group.remove()

    def _programs(self, stats: dict[int, processes.Stat]) -> set[int]:
        """The user's first processes: the main one, or what its wrapper runs."""
        shim, main = self.handle.shim, self.handle.main  # 0: whoever took it over did not learn who that is
        programs = {main} & stats.keys() if main else {pid for pid, stat in stats.items() if stat[2] == shim}
        while wrappers := {pid for pid in programs if stats[pid][0] in _WRAPPERS}:
            below = {pid for pid, stat in stats.items() if stat[2] in wrappers}
            programs = (programs - wrappers) | {pid for pid in below if stats[pid][0] in _WRAPPERS or _is_first(pid)}
        return programs

    def _read_exit(self) -> Ended:
        try:
            written = json.loads((Path(self.handle.folder) / "exit.json").read_bytes())
        except (OSError, ValueError):
            self.kill_now()
            return Ended(lost=True, oom_killed=self._oom())
        bad = written["code"] != 0
        return Ended(
            code=written["code"],
            signal=written["signal"],
            refused=written["refused"],
            oom_killed=bad and self._oom(),
        )

    def _oom(self) -> bool:
        return self._group is not None and self._group.oom_kills() > 0


def stream_order(streams: Mapping[str, Path], hidden: Sequence[str], bounds: Limits) -> dict[str, object]:
    """How the keeper is told to take output in."""
    return {
        "streams": {name: str(path) for name, path in streams.items()},
        "hidden": list(hidden),
        "cap": bounds.log_bytes,
        "spare": bounds.free_bytes,
    }


def memory_for(wanted: int | None, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """How much memory a payload may use: what its job asked for, and never so much that the agent starves."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemTotal:"):
            most = int(line.split()[1]) * 1024
            most = max(most // 2, most - limits.HOST_SPARE_MEMORY_BYTES)
            return most if wanted is None else min(wanted, most)
    return wanted


def power_off(state: Path) -> None:
    """Take a host's whole life, as a lost machine would: everything under its keeper, then the keeper."""
    pid = Keeping(state).pid or 1  # without a keeper there are only groups to empty
    files = [
        f"{folder}/cgroup.procs"
        for each in state.glob("attempts/*/group.json")
        for folder in json.loads(each.read_bytes()).values()
    ]
    processes.kill_all(pid, files, limits.KILL_S)
    if pid > 1:
        _signal(pid, signal.SIGKILL)
    for each in state.glob("attempts/*/group.json"):
        cgroups.remove_noted(each, 1.0)


def _handle(me: Mapping[str, object], folder: Path, group: cgroups.Group | None, attempt: str) -> Handle:
    given = {"shim": me["pid"], "shim_started": me["started"], "main": me.get("main", 0)}
    rest = {"main_started": me.get("main_started"), "group": group.folders if group else {}}
    return msgspec.convert({**given, **rest, "folder": str(folder), "attempt": attempt}, Handle)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it was faster


def _is_first(pid: int) -> bool:
    """Not an orphan that the first process behind walls has taken over: the program's number there is 2."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                seen = line.split()[1:]
                return len(seen) == 1 or seen[-1] == "2"
    except OSError:
        return False  # it was faster
    return True


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except OSError:
        return False
    return False


def _marked(attempt: str) -> list[int]:
    """Processes that carry an attempt's mark in their environment: for hosts without control groups."""
    mark = f"PENSTOCK_ATTEMPT={attempt}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environ = Path(f"/proc/{entry.name}/environ").read_bytes()
            except OSError:
                continue
            if mark in environ.split(b"\0"):
                found.append(int(entry.name))
    return found


async def gone(pid: int, started: int) -> None:
    """Until a process, anybody's child, is gone."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()
    try:
        if processes.started_at(pid) != started:
            return
        loop.add_reader(fd, gone.cancel)
        await asyncio.wait((gone,))
    finally:
        loop.remove_reader(fd)
        os.close(fd)
