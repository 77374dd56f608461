"""Which accelerators this machine really has, and the gate that lets one payload at a time use them.

`launch` asks what is here when it builds a payload's environment and passes the gate before it starts one; `sandbox`
passes the device files through. Everything is read from the file system, so that no accelerator library is loaded and
no device is opened by the agent. It never kills who holds a device: it waits, and says who it is.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from penstock.agent import processes

POLL_S = 0.02
POLL_SLOWEST_S = 0.5
_DEV = Path("/dev")
#: Everything a payload needs to use an accelerator; which of them exist differs from machine to machine.
_PATTERNS = (
    "accel[0-9]*", "accel/accel[0-9]*", "vfio/*", "nvidia[0-9]*", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools",
    "nvidia-modeset", "nvidia-caps/*", "dri/renderD*", "kfd",
)  # fmt: skip
_TPU = re.compile(r"accel\d+|accel/accel\d+|vfio/\d+")
_GPU = re.compile(r"nvidia\d+")


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What jax can use on this machine. `kind` is "tpu", "gpu" or "cpu"; `files` are those only one may open."""

    kind: str
    count: int
    files: tuple[Path, ...] = ()

    @property
    def real(self) -> bool:
        return self.kind != "cpu"


class Busy(Exception):
    """Somebody else holds the devices and did not let go in time; the text says who."""


def device_files(dev: Path = _DEV) -> list[Path]:
    """The accelerators' files that are here, in the order of their names."""
    return sorted({path for pattern in _PATTERNS for path in dev.glob(pattern) if not path.is_dir()})


def find(dev: Path = _DEV, cpus: int | None = None) -> Found:
    """TPUs before GPUs before CPUs: a machine with TPUs is one because of them."""
    files = device_files(dev)
    for kind, pattern in (("tpu", _TPU), ("gpu", _GPU)):
        chips = tuple(path for path in files if pattern.fullmatch(str(path.relative_to(dev))))
        if chips:
            return Found(kind=kind, count=len(chips), files=chips)
    return Found(kind="cpu", count=cpus if cpus is not None else os.cpu_count() or 1)


def holders(files: Iterable[Path]) -> dict[int, str]:
    """Processes that have one of these files open: number -> name. Those of other users are seen by root only."""
    wanted = {str(path) for path in files}
    found: dict[int, str] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and _opens(f"/proc/{name}/fd", wanted):
            stat = processes.stat_of(int(name))
            found[int(name)] = stat[0] if stat else "?"
    return found


def _opens(folder: str, wanted: set[str]) -> bool:
    try:
        names = os.listdir(folder)  # noqa: PTH208 (done for every process, as what follows is for every open file)
    except OSError:
        return False  # it ended meanwhile, or is another user's
    return any(_link(f"{folder}/{name}") in wanted for name in names)


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return ""  # closed meanwhile


class Gate:
    """One payload at a time on the devices of a machine, whichever agent of it starts the payload.

    The lock is a file, so that several agents of one machine (slices of several hosts on `local`) share it. GPUs are
    also held by daemons that share them well: who held one before the first payload is not waited for.
    """

    def __init__(self, found: Found, lock: Path) -> None:
        self._found = found
        self._lock = lock
        self._always = set(holders(found.files)) if found.kind == "gpu" else set()

    @property
    def real(self) -> bool:
        """Whether there is anything to guard: accelerators, not only processors."""
        return self._found.real

    @asynccontextmanager
    async def passage(self, patience_s: float) -> AsyncIterator[None]:
        """Hold the gate while a payload runs: entered once the devices are free. Raises `Busy`.

        The lock ends with the process that holds it. A payload that outlives its agent still holds the device files,
        and those are what the next one waits for.
        """
        if not self._found.real:
            yield
            return
        until = time.monotonic() + patience_s
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            await self._wait(until, lambda: _locked(fd), "another agent of this machine is using the devices")
            await self._wait(until, self._free, "")
            yield
        finally:
            os.close(fd)

    async def closed(self, patience_s: float) -> None:
        """Until nobody holds the devices. Raises `Busy`."""
        await self._wait(time.monotonic() + patience_s, self._free, "")

    async def _wait(self, until: float, done: Callable[[], bool], why: str) -> None:
        pause = POLL_S
        while not await asyncio.to_thread(done):
            if time.monotonic() > until:
                raise Busy(why or self._who())
            await asyncio.sleep(pause)
            pause = min(2 * pause, POLL_SLOWEST_S)

    def _others(self) -> dict[int, str]:
        held = holders(self._found.files)
        return {pid: name for pid, name in held.items() if pid not in self._always}

    def _free(self) -> bool:
        return not self._others()

    def _who(self) -> str:
        held = ", ".join(f"{name} ({pid})" for pid, name in sorted(self._others().items()))
        return f"the {self._found.kind} devices are held by {held or 'a process that let go only now'}"


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
