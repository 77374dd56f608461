"""The agent's side of warm snippets: keeps a warm parent per team and environment, and has it fork.

`launch` calls `run` for every snippet and gets a tree with the same methods as a command's. The parent (`nursery`) sits
in a sandbox of its own and is started by the first snippet that needs it; one that died is replaced by the next run.
Each fork waits for the agent's word, so that it is in its control group before any code of the user's runs; one is made
ahead of time. Nothing is lost with the agent: the parent outlives it until its last snippet ended, and the end is in a
file.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import IO

from penstock.agent import cgroups, devices, homes, processes, sandbox
from penstock.agent.forks import (
    END_S,
    EXIT_POLL_S,
    WRITE_S,
    Fork,
    Mode,
    Parent,
    ParentGone,
    WarmTree,
    Weight,
    introduced,
)
from penstock.agent.host import Host
from penstock.agent.layout import DEFAULT_PATH, PASSED_NAMES, PASSED_PREFIXES, Layout, directory_of
from penstock.agent.rooms import Room
from penstock.agent.snippet import Order
from penstock.agent.tree import Handle, Limits, StartError
from penstock.domain import limits
from penstock.wire.agent import LaunchSpec
from penstock.wire.api import SnippetRequest

PARENTS_MAX = 3  #: per agent; each holds about 160 MB once jax is imported

#: What imports nothing and does not name jax runs as well in a fork of a process without it, and several times faster.
#: A snippet that gets at jax in some other way still has it: it is imported then.
_HEAVY = re.compile(r"import|jax|jnp")
#: Starts the nursery without the package's own modules, which load what the user's environment may not have.
_NURSERY = "penstock.agent.nursery:main"
_BOOT = """
import importlib, sys, types
for name, path in (("penstock", sys.argv[1]), ("penstock.agent", sys.argv[1] + "/agent")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
module, _, function = sys.argv[2].partition(":")
getattr(importlib.import_module(module), function)()
"""


GROUPS_MAX = 4  #: control groups kept for later snippets


class Warm:
    """All warm parents of one agent."""

    def __init__(self, host: Host, walls: sandbox.Walls | None = None) -> None:
        self._host = host
        self._walls = walls
        self._state = host.state.resolve()
        self._parents: dict[tuple[str, str, Mode], Parent] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._kind = f"{host.place.slice}-{host.place.host}-{host.mark}-w"  #: how its control groups are called
        self._groups: list[cgroups.Group] = []  #: used and empty; making one and removing it costs a tenth of a snippet
        self._real = devices.find().real
        self._hidden = sandbox.hidden_places(self._state)
        self._needed = sandbox.needed(self._hidden, sys.executable, host.env)

    async def run(
        self,
        spec: LaunchSpec,
        layout: Layout,
        out_fd: int,
        err_fd: int,
        log_fd: int,
        *,
        env: Mapping[str, str],
        bounds: Limits,
        begun: Callable[[Handle], None] = lambda _: None,
    ) -> WarmTree:
        """Start a snippet. The caller keeps the descriptors. Raises `StartError`.

        `begun` is told its processes before they get the word to go, so that who must know them knows them in time.
        """
        payload = spec.payload
        assert isinstance(payload, SnippetRequest)
        walls = await self._standing()
        mode: Mode = "inline" if payload.isolation == "inline" else "rooms" if walls.rooms else "plain"
        weight: Weight = "heavy" if mode != "rooms" or _HEAVY.search(payload.code) else "light"
        order = _order(spec, payload, layout, env, bounds, walls, accelerator=self._real)
        venv = env["VIRTUAL_ENV"] if payload.setup.strip() else ""
        for last in (False, True):
            parent = await self._parent(spec, mode, walls, venv)
            try:
                fork = await self._take(parent, walls, weight)
                process = parent.process if mode == "inline" else None
                streams = [out_fd, err_fd, log_fd]
                tree = await self._let_go(fork, spec, layout, order, streams, bounds, process, begun, venv)
            except ParentGone as error:
                if last:
                    raise StartError(f"the warm parent died twice: {error}; see {self._state / 'warm.log'}") from error
            else:
                parent.running += 1
                tree.then = partial(self._ended, parent, walls, weight)
                return tree
        raise AssertionError("the loop returns or raises")

    async def close(self) -> None:
        """Let all parents go. Snippets that still run are the next agent's."""
        parents, self._parents = list(self._parents.values()), {}
        await asyncio.gather(*(parent.close() for parent in parents), *self._leaving)
        if self._walls is not None:
            patience_s = 0.0 if any(parent.running for parent in parents) else WRITE_S
            await asyncio.to_thread(_remove_empty, self._walls, self._kind, patience_s)

    async def _standing(self) -> sandbox.Walls:
        if self._walls is None:
            self._walls = await asyncio.to_thread(sandbox.probe)
        return self._walls

    def _ended(self, parent: Parent, walls: sandbox.Walls, weight: Weight) -> None:
        """The next snippet need not wait for what can be done before it comes; while one ran, that one came first."""
        parent.running -= 1
        if parent.mode == "rooms" and parent.alive and parent in self._parents.values() and weight not in parent.spares:
            parent.spares[weight] = asyncio.create_task(self._fork(parent, walls, weight))

    async def _take(self, parent: Parent, walls: sandbox.Walls, weight: Weight) -> Fork:
        """The fork that waits, or a new one."""
        spare = parent.spares.pop(weight, None)
        if spare is not None:
            try:
                return await spare
            except (ParentGone, StartError):
                if not parent.alive:
                    raise
        return await self._fork(parent, walls, weight)

    async def _fork(self, parent: Parent, walls: sandbox.Walls, weight: Weight) -> Fork:
        name = f"{self._kind}{os.getpid()}-{next(self._numbers)}"
        fork = await parent.fork(name, weight)
        if parent.mode != "inline":
            # Entering a group waits for the whole kernel to take notice, so it is done before there is a snippet.
            fork.group = await asyncio.to_thread(self._place, fork.main, walls, name)
        return fork

    def _place(self, pid: int, walls: sandbox.Walls, name: str) -> cgroups.Group | None:
        """A process in a group of its own, before the word to go: so nothing it ever starts can be outside."""
        while self._groups:
            group = self._groups.pop()
            try:
                group.admit(pid)
            except FileNotFoundError:
                continue  # somebody cleaned up while it stood empty
            return group
        made = cgroups.make(walls.groups, name)
        if made is not None:
            made.admit(pid)
        return made

    def take_back(self, note: Path) -> bool:
        """Whether the group of a snippet that is over was kept for the next one; a few small reads, no waiting."""
        group = cgroups.noted(note)
        if group is None or len(self._groups) >= GROUPS_MAX or not group.unused:
            return False
        self._groups.append(group)
        return True

    async def _let_go(
        self,
        fork: Fork,
        spec: LaunchSpec,
        layout: Layout,
        order: bytes,
        streams: list[int],
        bounds: Limits,
        process: subprocess.Popen[bytes] | None,
        begun: Callable[[Handle], None],
        venv: str,
    ) -> WarmTree:
        """Give a waiting fork its limits, its directories and its order. From here on it is the user's."""
        over = fork.door or fork.hello
        memory = os.memfd_create("order", os.MFD_CLOEXEC)
        try:
            with os.fdopen(memory, "wb", closefd=False) as file:
                file.write(os.fsencode(layout.home / "exit.json") + b"\n" + order)
            handle = _handle(fork, spec, layout)
            if fork.group is not None:
                fork.group.limit(memory_bytes=bounds.memory_bytes, tasks=bounds.tasks)
                homes.write_note(layout.home / "group.json", json.dumps(fork.group.folders))
            if fork.door is not None:
                fork.door.send(_room(layout, self._stages(), self._readable(venv)))
                await asyncio.wait_for(introduced(fork.door), END_S)
            begun(handle)
            socket.send_fds(fork.hello, [b"go"], [memory, *streams])
        except (BrokenPipeError, ConnectionResetError, TimeoutError) as error:
            fork.close()
            raise ParentGone(str(error)) from error
        except BaseException:
            fork.close()
            raise
        finally:
            os.close(memory)
        if fork.hello is not over:
            fork.hello.close()
        return WarmTree(handle, over, process)

    async def _parent(self, spec: LaunchSpec, mode: Mode, walls: sandbox.Walls, venv: str) -> Parent:
        """The parent of a team for an environment; `venv` is empty for the agent's own."""
        key = (spec.team, venv, mode)
        async with self._starting:
            parent = self._parents.pop(key, None)
            if parent is not None and not parent.alive:
                self._leave(parent)
                parent = None
            if parent is None:
                if not self._parents:
                    await asyncio.to_thread(_remove_empty, walls, self._kind)
                parent = await asyncio.to_thread(self._start, mode, walls, venv)
            self._parents[key] = parent  # the last one is the one used last
            if len(self._parents) > PARENTS_MAX:
                self._leave(self._parents.pop(next(iter(self._parents))))
            return parent

    def _leave(self, parent: Parent) -> None:
        task = asyncio.create_task(parent.close())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _stages(self) -> tuple[Path, ...]:
        """Below these lie the directories of all attempts; the parent sees them, each snippet its own only."""
        root = directory_of(self._host.root)
        return (self._state / "attempts", Path(_resolved(str(root))) / "jobs" if root else self._state / "jobs")

    def _readable(self, venv: str) -> tuple[Path, ...]:
        """Of what is hidden, what runs here cannot do without; an environment is of use only as a whole."""
        return (*self._needed, Path(venv).parent) if venv else self._needed

    def _start(self, mode: Mode, walls: sandbox.Walls, venv: str) -> Parent:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        python, env = sys.executable, _parent_env(self._host.env, real=self._real)
        if venv:
            python, env["VIRTUAL_ENV"] = f"{venv}/bin/python", venv  # by the variable it is known that it is in use
        argv = [python, "-P", "-X", "utf8", "-c", _BOOT, str(Path(__file__).parents[1]), _NURSERY]
        argv += [mode, str(theirs.fileno())]
        if walls.bubblewrap is not None and (walls.rooms or mode == "inline"):
            for folder in self._stages():
                folder.mkdir(parents=True, exist_ok=True)
            inside = sandbox.Inside(hidden=self._hidden, readable=self._readable(venv), writable=self._stages())
            rights = sandbox.ROOM_RIGHTS if mode == "rooms" else ()
            argv = [*sandbox.enclose(walls.bubblewrap, inside, rights=rights), "--chdir", "/", "--", *argv]
        with theirs, _log(self._state / "warm.log") as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return Parent(process, ours, mode)


def _log(path: Path) -> IO[bytes]:
    """What parents themselves print, such as warnings of imports: the newest is enough."""
    return path.open("wb" if path.exists() and path.stat().st_size > limits.LOG_OBJECT_BYTES else "ab")


def _parent_env(own: Mapping[str, str], *, real: bool) -> dict[str, str]:
    """What importing jax may depend on; each snippet brings its whole environment itself."""
    env = {name: value for name, value in own.items() if name in PASSED_NAMES or name.startswith(PASSED_PREFIXES)}
    env.setdefault("PATH", DEFAULT_PATH)
    if not real:
        env["JAX_PLATFORMS"] = "cpu"
    return env


def _order(
    spec: LaunchSpec,
    payload: SnippetRequest,
    layout: Layout,
    env: Mapping[str, str],
    bounds: Limits,
    walls: sandbox.Walls,
    *,
    accelerator: bool,
) -> bytes:
    rlimits = {"RLIMIT_CORE": 0}
    if not walls.memory and bounds.memory_bytes is not None:
        rlimits["RLIMIT_DATA"] = bounds.memory_bytes
    if not walls.tasks and not walls.root:  # root is exempt from it
        rlimits["RLIMIT_NPROC"] = bounds.tasks
    order: Order = {
        "code": payload.code,
        "variables": payload.variables,
        "env": dict(env),
        "hidden": list(spec.secrets.values()),
        "work": str(layout.work),
        "output": str(layout.output),
        "result": str(layout.result),
        "devices": spec.jax_devices,
        "accelerator": accelerator,
        "gang": spec.world_size > 1,
        "rlimits": rlimits,
        "json_max": limits.RESULT_BYTES_MAX // 2,  # the report says more than the result
        "array_max": limits.ARTIFACT_BYTES_MAX // 2,
    }
    return json.dumps(order).encode()


def _room(layout: Layout, stages: tuple[Path, ...], needed: tuple[Path, ...]) -> bytes:
    room: Room = {
        "covered": [str(stage) for stage in stages],
        "writable": [_real(path) for path in layout.writable],
        "readable": [str(path) for path in (*needed, *sandbox.restored(layout))],
        "temporary": _real(layout.temporary),
    }
    return json.dumps(room).encode()


def _real(path: Path) -> str:
    """A folder of an attempt by its real name. Only the way to it can lead over links: it was made a moment ago."""
    for parent in path.parents:
        if parent.name in ("attempts", "jobs"):
            return _resolved(str(parent)) + str(path)[len(str(parent)) :]
    return os.path.realpath(path)


@lru_cache(maxsize=64)
def _resolved(folder: str) -> str:
    return os.path.realpath(folder)


def _handle(fork: Fork, spec: LaunchSpec, layout: Layout) -> Handle:
    started = processes.started_at(fork.shim)
    if started is None:
        raise ParentGone("the fork ended before it was let go")
    return Handle(
        folder=str(layout.home),
        shim=fork.shim,
        shim_started=started,
        main=fork.main,
        main_started=processes.started_at(fork.main),
        group=fork.group.folders if fork.group else {},
        attempt=spec.attempt,
    )


def _remove_empty(walls: sandbox.Walls, kind: str, patience_s: float = 0.0) -> None:
    """Groups of forks that never ran a snippet, or whose agent was killed. One that is in use cannot be removed."""
    until = time.monotonic() + patience_s
    while True:
        left = 0
        for folder in walls.groups.folders.values():
            for each in Path(folder).glob(f"penstock-{kind}*"):
                try:
                    each.rmdir()
                except OSError:
                    left += 1
        if not left or time.monotonic() >= until:
            return
        time.sleep(EXIT_POLL_S)  # bubblewrap ends a moment before the last process behind it
