"""From a launch order to a directory and an interpreter: the snapshot unpacked and verified, the set-up done once.

`launch` calls `prepare` before it starts a command. Blobs are kept on the host (`blobs`); each attempt gets a tree of
its own, written from them and read back (S22), so that no attempt can spoil another's. An environment is a venv under
the hash of its recipe (`recipes`), built by one builder at a time and used only once it is whole; a failed one leaves
nothing. With no recipe nothing is built and the agent's own interpreter serves. It must not start the payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec

from penstock.agent.blobs import BlobFolder, Fetch, Fetched
from penstock.agent.hiding import hide
from penstock.agent.recipes import BadRecipe, Recipe, agent_paths, recipe_for
from penstock.agent.shelf import make_room
from penstock.objects.archive import NoRoom, unpack
from penstock.objects.content import BadBlob
from penstock.objects.manifest import Manifest, parse
from penstock.wire.agent import LaunchSpec
from penstock.wire.api import CommandRequest

TAIL_BYTES: Final = 4096  #: of a failed set-up's output, shown with the error; the rest is in the job's log
LOCK_POLL_S: Final = 0.1
READS_AT_ONCE: Final = 16  #: a full pipe; more at a time would let a flood hold up the agent's loop
#: Of the agent's own variables, those that say how packages are reached.
PASSED: Final = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE",
                 "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "LANG", "LC_ALL", "LD_LIBRARY_PATH")  # fmt: skip
PASSED_PREFIXES: Final = ("PIP_", "UV_")
#: What pip, uv and curl say when the fault is not in what was asked for.
AWAY: Final = ("NewConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "Temporary failure in name resolution",
               "Connection reset by peer", "503 Service Unavailable", "502 Bad Gateway", "Could not resolve host",
               "error sending request for url", "dns error", "No space left on device")  # fmt: skip

#: Takes what a set-up prints; it belongs into the job's log.
Output = Callable[[bytes], None]


class SetupFailed(Exception):
    """The user's own set-up did not work: a user error, with the end of what it said."""

    def __init__(self, message: str, *, exit_code: int | None = None, tail: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.tail = tail


class HostFault(Exception):
    """This host cannot prepare the attempt (disk full, broken blobs, no venv): not the job's fault."""


class Places(Protocol):
    """What is used of `agent.layout.Layout`."""

    @property
    def work(self) -> Path: ...


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One command of a set-up. It runs the user's code, so whoever runs it puts it behind the payload's walls."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: Path
    writable: tuple[Path, ...]


Run = Callable[[Step, Output], Awaitable[int]]


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Where and with what the command runs."""

    work: Path
    python: Path
    path: tuple[str, ...]  #: goes before PATH
    environment: str = ""  #: hash of the recipe; empty: the agent's own interpreter
    venv: Path | None = None
    readable: tuple[Path, ...] = ()  #: what a sandbox must let it read beside `work`
    python_path: tuple[str, ...] = ()

    def onto(self, env: Mapping[str, str]) -> dict[str, str]:
        """The payload's environment variables with this environment in force."""
        changed = {**env, "PATH": os.pathsep.join([*self.path, *filter(None, [env.get("PATH")])])}
        changed.pop("VIRTUAL_ENV", None)
        if self.venv is not None:
            changed["VIRTUAL_ENV"] = str(self.venv)
        if self.python_path:
            own = filter(None, [env.get("PYTHONPATH")])
            changed["PYTHONPATH"] = os.pathsep.join([*self.python_path, *own])
        return changed


async def prepare(
    spec: LaunchSpec,
    get_blob: Fetch,
    get_snapshot: Fetch,
    layout: Places,
    *,
    cache: Path,
    output: Output,
    run: Run | None = None,
) -> Prepared:
    """Fill `layout.work` and build what the job needs. May be called again after a crash; cancelling stops a set-up.

    `cache` belongs to the host and may be shared by its agents. Raises `SetupFailed` and `BadSnapshot` (user errors),
    `HostFault` (infrastructure), and whatever fetching raises.
    """
    payload = spec.payload
    own = Prepared(work=layout.work, python=Path(sys.executable), path=(str(Path(sys.executable).parent),))
    if not isinstance(payload, CommandRequest) or payload.snapshot is None:
        layout.work.mkdir(parents=True, exist_ok=True)
        if not payload.setup.strip():
            return own
        manifest, snapshot = Manifest(), ""
    else:
        snapshot = payload.snapshot
        manifest = await _unpacked(snapshot, cache, get_blob, get_snapshot, layout.work)
    try:
        recipe = recipe_for(
            snapshot=snapshot,
            manifest=manifest,
            read=lambda path: (layout.work / path).read_text("utf-8", errors="replace"),
            setup=payload.setup,
            env=spec.env,
            team=spec.team,
        )
    except BadRecipe as error:
        raise SetupFailed(str(error)) from error
    if recipe is None:
        return own
    builder = _Builder(recipe, spec, layout.work, cache / "environments", output, run or run_step)
    home = await builder.ready()
    venv = home / "venv"
    sources = [layout.work, layout.work / "src"] if recipe.project else []
    return Prepared(
        work=layout.work,
        python=venv / "bin" / "python",
        path=(str(venv / "bin"),),
        environment=recipe.key,
        venv=venv,
        readable=(home,),
        python_path=tuple(str(folder) for folder in sources if folder.is_dir()),
    )


async def run_step(step: Step, output: Output) -> int:
    """Run a command in a session of its own and pass on what it prints; stopped with its session when cancelled.

    It ends when the command does: a child that lives on with the pipe in its hand is not waited for.
    """
    loop = asyncio.get_running_loop()
    reading, writing = os.pipe()
    os.set_blocking(reading, False)

    def drain() -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(READS_AT_ONCE):
                data = os.read(reading, 1 << 16)
                if not data:
                    loop.remove_reader(reading)  # the last writer is gone
                    return
                output(data)

    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *step.argv,
                env=step.env,
                cwd=step.cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
            )
        finally:
            os.close(writing)
        loop.add_reader(reading, drain)
        try:
            return await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            drain()
    finally:
        loop.remove_reader(reading)
        os.close(reading)


async def _unpacked(snapshot: str, cache: Path, get_blob: Fetch, get_snapshot: Fetch, work: Path) -> Manifest:
    """The snapshot in `work`, whole or not at all. A blob that went bad on this disk is fetched once more."""
    blobs = BlobFolder(cache / "blobs")
    part = work.with_name(work.name + ".part")
    try:
        manifest = parse(await BlobFolder(cache / "snapshots").get(snapshot, get_snapshot), snapshot)
        ids = [blob.id for blob in manifest.blobs]
        for left in (1, 0):
            await blobs.fill(ids, get_blob)
            await asyncio.to_thread(_clear, part)
            try:
                await asyncio.to_thread(unpack, manifest, blobs.read, part)
                break
            except (BadBlob, FileNotFoundError) as error:
                if not left:
                    raise HostFault(f"the snapshot cannot be unpacked: {error}") from error
                await asyncio.to_thread(blobs.forget, [error.blob] if isinstance(error, BadBlob) else [])
        await asyncio.to_thread(_clear, work)
        part.rename(work)
        await asyncio.to_thread(blobs.sweep)
    except (NoRoom, Fetched, OSError) as error:
        raise HostFault(f"the snapshot cannot be unpacked: {error}") from error
    return manifest


def _clear(folder: Path) -> None:
    """What an earlier try of this attempt left, or the empty folder its layout made."""
    if folder.exists():
        shutil.rmtree(folder)


class _Builder:
    """Builds one environment. A venv cannot be moved, so it is built in place and a file says that it is whole."""

    def __init__(self, recipe: Recipe, spec: LaunchSpec, work: Path, folder: Path, output: Output, run: Run) -> None:
        self._recipe = recipe
        self._spec = spec
        self._work = work
        self._home = (
            folder / recipe.key[:32]
        )  # programs in it name their interpreter by its path, which may not be long
        self._lock = self._home.with_suffix(".lock")
        self._output = output
        self._run = run
        self._tail = b""

    async def ready(self) -> Path:
        """The folder of the whole environment, built now if nobody has."""
        mark = self._home / "ready"
        if _still_there(mark):
            return self._home
        self._home.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._say(f"setting up an environment from {self._recipe.kind} ({self._recipe.key[:12]})")
        async with _locked(self._lock):
            if _still_there(mark):
                return self._home
            await asyncio.to_thread(_clear, self._home)  # a builder that was killed left it
            try:
                await self._build()
                mark.write_text(self._recipe.kind)
                await asyncio.to_thread(make_room, self._home.parent, self._home)
            except OSError as error:
                await asyncio.to_thread(_clear, self._home)
                raise HostFault(f"an environment cannot be built here: {error}") from error
            except BaseException:
                # Not in a thread: the task may be cancelled, and what is left behind would look like a builder's.
                _clear(self._home)
                raise
        return self._home

    async def _build(self) -> None:
        project, venv = self._home / "project", self._home / "venv"
        for folder in ("home", "tmp"):
            (self._home / folder).mkdir(parents=True)
        await asyncio.to_thread(shutil.copytree, self._work, project, symlinks=True)
        lent = importlib.util.find_spec("pip") is not None  # then making the venv takes no seconds for a pip of its own
        argv = (sys.executable, "-m", "venv", *(["--without-pip"] if lent else []), str(venv))
        if await self._step(argv) != 0:
            raise HostFault(f"`{' '.join(argv)}` failed: {self._said()[-300:]}")
        _show_agent(venv)
        if lent:
            _lend_pip(venv)
        for command in self._commands(venv):
            self._say(" ".join(command))
            code = await self._step(command)
            if code != 0 and (word := _unreached(self._said())):
                raise HostFault(f"the set-up did not reach what it needs ({word}): {' '.join(command)[:200]}")
            if code != 0:
                raise SetupFailed(
                    f"the set-up failed with exit code {code}: {' '.join(command)[:200]}",
                    exit_code=code,
                    tail=self._said(),
                )
        _show_agent(venv)  # `uv sync` may have made the venv anew
        # Editable installs point into the project; nothing else needs it once all is installed.
        gone = ["home", "tmp"] if self._recipe.whole else ["home", "tmp", "project"]
        for name in gone:
            await asyncio.to_thread(shutil.rmtree, self._home / name)

    def _commands(self, venv: Path) -> list[tuple[str, ...]]:
        recipe = self._recipe
        if recipe.kind == "setup":
            return [("/bin/sh", "-ec", recipe.setup)]
        if recipe.kind == "uv.lock":
            uv = _uv()
            if uv is None:
                raise SetupFailed("uv.lock: this host has no uv; add requirements.txt (`uv export`) or give --setup")
            return [(uv, "sync", "--frozen", "--no-install-project", "--no-progress")]
        # pip, not uv: it sees what the host has already, so that a host without a package index can do.
        install = (str(venv / "bin" / "python"), "-m", "pip", "install")
        if recipe.kind == "requirements.txt":
            return [(*install, "-r", "requirements.txt")]
        return [(*install, *(recipe.dependencies or (".",)))]

    async def _step(self, argv: tuple[str, ...]) -> int:
        venv = self._home / "venv"
        env = {name: value for name, value in os.environ.items() if name in PASSED or name.startswith(PASSED_PREFIXES)}
        env |= {**self._spec.env, **self._spec.secrets}
        cache = self._home.parent.parent / "packages"
        programs = [str(venv / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        env |= {
            "PATH": os.pathsep.join(programs),
            "VIRTUAL_ENV": str(venv),
            "UV_PROJECT_ENVIRONMENT": str(venv),
            "HOME": str(self._home / "home"),
            "TMPDIR": str(self._home / "tmp"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INPUT": "1",
        }
        env.setdefault("PIP_CACHE_DIR", str(cache / "pip"))
        env.setdefault("UV_CACHE_DIR", str(cache / "uv"))
        step = Step(argv=argv, env=env, cwd=self._home / "project", writable=(self._home, cache))
        return await self._run(step, self._heard)

    def _heard(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        self._output(data)

    def _say(self, text: str) -> None:
        self._output(f"penstock: {text}\n".encode())

    def _said(self) -> str:
        """The end of the output, without the values of secrets: it travels further than the log does."""
        return hide(self._tail.decode("utf-8", errors="replace"), tuple(self._spec.secrets.values()))


def _unreached(said: str) -> str | None:
    """The words of an installer that found the network or the index away; then another host, or later, may do."""
    return next((word for word in AWAY if word in said), None)


def _still_there(mark: Path) -> bool:
    """Whether the environment is whole; if so, from now on it was used lately, which keeps it from being cleaned."""
    try:
        os.utime(mark)
    except FileNotFoundError:
        return False
    return True


def _show_agent(venv: Path) -> None:
    """Let the venv see the agent's own packages behind its own: jax as the host has it, and `penstock.payload`."""
    for packages in venv.glob("lib/python*/site-packages"):
        (packages / "zz-penstock-host.pth").write_text("".join(f"{path}\n" for path in agent_paths()))


def _lend_pip(venv: Path) -> None:
    """The agent's pip under the names a set-up uses; it installs into the venv whose Python runs it."""
    for name in ("pip", "pip3"):
        program = venv / "bin" / name
        program.write_text('#!/bin/sh\nexec "${0%/*}/python" -m pip "$@"\n')
        program.chmod(0o755)


def _uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("uv")


@contextlib.asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """One builder at a time on this machine; the lock ends with its process, however that ends."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(LOCK_POLL_S)
        yield
