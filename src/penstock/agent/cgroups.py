"""Control groups for payloads, version 1 and 2: limits on memory and tasks, who belongs to a payload, OOM kills.

`tree` makes one group per attempt below the agent's own, so that whatever bounds the agent bounds its payloads too.
Where the kernel or the rights do not allow groups there is simply none: `make` answers None and `tree` falls back on
ancestry. A payload is in its group, or put there, before it becomes the user's program.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

_V1 = ("memory", "pids")


class Hierarchies(msgspec.Struct, frozen=True):
    """The folders of the agent's own groups that take subfolders: `memory`, `pids` (v1), or `unified` (v2)."""

    folders: dict[str, str] = {}


class Group(msgspec.Struct, frozen=True):
    """The group of one payload: one folder per hierarchy. A record of it can be kept and used by the next agent."""

    folders: dict[str, str]

    @property
    def entrances(self) -> list[str]:
        """Files into which a process writes itself to enter."""
        return [f"{folder}/cgroup.procs" for folder in self.folders.values()]

    def limit(self, *, memory_bytes: int | None, tasks: int) -> None:
        """What all its processes together may use; without a number of bytes memory stays as it is."""
        for kind, folder in self.folders.items():
            if kind == "memory" and memory_bytes is not None:
                plain, with_swap = f"{folder}/memory.limit_in_bytes", f"{folder}/memory.memsw.limit_in_bytes"
                raised = not _write(plain, str(memory_bytes))  # never above the other one, which is still the old one
                _write(with_swap, str(memory_bytes))
                if raised:
                    _write(plain, str(memory_bytes))
            elif kind == "unified" and memory_bytes is not None:
                _write(f"{folder}/memory.max", str(memory_bytes))
                _write(f"{folder}/memory.swap.max", "0")
            if kind != "memory":
                _write(f"{folder}/pids.max", str(tasks))

    def admit(self, pid: int) -> None:
        """Put a process into it, with all that it will ever start."""
        for entrance in self.entrances:
            fd = os.open(entrance, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, str(pid).encode())
            finally:
                os.close(fd)

    def everyone(self) -> list[str]:
        """The `cgroup.procs` of the group and of groups a payload made below it."""
        found: list[str] = []
        for folder in self.folders.values():
            found.extend(f"{each}/cgroup.procs" for each, _, _ in os.walk(folder))
        return found

    def close(self) -> None:
        """Let no further task begin, so that a kill can overtake a fork bomb."""
        for kind in ("pids", "unified"):
            if kind in self.folders:
                _write(Path(self.folders[kind]) / "pids.max", "0")

    def kill(self) -> None:
        """Version 2 can kill a whole group at once; version 1 cannot, `keeper.kill_all` does it one by one."""
        if "unified" in self.folders:
            _write(Path(self.folders["unified"]) / "cgroup.kill", "1")

    def oom_kills(self) -> int:
        """Processes of the group the kernel killed because the group was out of memory."""
        places = {"memory": "memory.oom_control", "unified": "memory.events"}
        for kind, name in places.items():
            if kind in self.folders:
                for line in _read(Path(self.folders[kind]) / name).splitlines():
                    word, _, number = line.partition(" ")
                    if word == "oom_kill":
                        return int(number)
        return 0

    @property
    def unused(self) -> bool:
        """Nobody is in it, and nothing that happened in it counts against who comes next."""
        return self.oom_kills() == 0 and not any(_read(Path(entrance)) for entrance in self.entrances)

    def remove(self) -> bool:
        """Whether it is gone. Folders of groups go only once the kernel has buried everybody who was in them."""
        gone = True
        for folder in self.folders.values():
            if _remove(Path(folder)):
                continue  # as nearly always: few payloads make groups of their own
            for each, _, _ in os.walk(folder, topdown=False):
                gone = _remove(Path(each)) and gone
        return gone


def noted(note: Path) -> Group | None:
    """The group that a file tells of, if there is one."""
    try:
        return Group(msgspec.json.decode(note.read_bytes(), type=dict[str, str]))
    except (OSError, msgspec.DecodeError):
        return None


def remove_noted(note: Path, patience_s: float) -> bool:
    """Remove the group that a file tells of, if there is one; whether it is gone."""
    group = noted(note)
    if group is None:
        return True
    until = time.monotonic() + patience_s
    while not group.remove():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def find(proc: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mounts")) -> Hierarchies:
    """Which hierarchies this process may make groups in. Version 1 wins where it holds the memory controller."""
    own: dict[str, str] = {}
    for line in _read(proc).splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(",") if controllers else ("unified",), path))
    mounted: dict[str, str] = {}
    for line in _read(mounts).splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup":
            mounted.update({name: where for name in options.split(",") if name in _V1})
        elif kind == "cgroup2":
            mounted["unified"] = where
    usable = {}
    for name in own.keys() & mounted.keys():
        folder = Path(mounted[name] + own[name].rstrip("/"))
        if not folder.is_dir():  # inside a container the mount shows the container's own group as the root
            folder = Path(mounted[name])
        if os.access(folder, os.W_OK) and _can_make(folder):
            usable[name] = str(folder)
    if usable.keys() & set(_V1):
        return Hierarchies({name: folder for name, folder in usable.items() if name in _V1})
    return Hierarchies(usable)


def make(hierarchies: Hierarchies, name: str) -> Group | None:
    """A group called `name`, without limits yet; None where there can be none. Made twice it is the same one."""
    folders: dict[str, str] = {}
    for kind, parent in hierarchies.folders.items():
        folder = Path(parent) / f"penstock-{name}"
        try:
            folder.mkdir(exist_ok=True)
        except OSError:
            continue
        folders[kind] = str(folder)
        if kind == "unified":
            _delegate(Path(parent))
    return Group(folders) if folders else None


def _delegate(parent: Path) -> None:
    """Version 2 gives controllers to subgroups only when asked, and only where no process sits beside them.

    An agent alone in its group (a service of its own) may move into a subgroup to make that true; where others sit in
    the group too there are no limits, and the group still says who belongs to the payload.
    """
    if _write(parent / "cgroup.subtree_control", "+memory +pids"):
        return
    beside = parent / "penstock-agent"
    try:
        beside.mkdir(exist_ok=True)
    except OSError:
        return
    if _read(parent / "cgroup.procs").split() == [str(os.getpid())]:
        _write(beside / "cgroup.procs", str(os.getpid()))
        _write(parent / "cgroup.subtree_control", "+memory +pids")


def _can_make(folder: Path) -> bool:
    """Only trying tells: cgroup file systems may be mounted read-only or refuse by namespace."""
    probe = folder / f"penstock-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    _remove(probe)
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # not this version, or not mounted: then it says nothing


def _write(path: Path | str, text: str) -> bool:
    """Whether the kernel took it; a file of another version or a missing controller is no error."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, text.encode())
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True
