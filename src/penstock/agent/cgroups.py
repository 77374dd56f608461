"""Control groups for payloads, version 1 and 2: limits on memory and tasks, who belongs to a payload, OOM kills.

`tree` makes one group per attempt below the agent's own, so that whatever bounds the agent bounds its payloads too.
Where the kernel or the rights do not allow groups there is simply none: `make` answers None and `tree` falls back on
ancestry. It never moves a process itself: the payload enters its group before it becomes the user's program.
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
        for kind, path in self.folders.items():
            folder = Path(path)
            if kind == "memory" and memory_bytes is not None:
                _write(folder / "memory.limit_in_bytes", str(memory_bytes))
                _write(folder / "memory.memsw.limit_in_bytes", str(memory_bytes))
            elif memory_bytes is not None:
                _write(folder / "memory.max", str(memory_bytes))
                _write(folder / "memory.swap.max", "0")
            _write(folder / "pids.max", str(tasks))

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

    def remove(self) -> bool:
        """Whether it is gone. Folders of groups go only once the kernel has buried everybody who was in them."""
        gone = True
        for folder in self.folders.values():
            if _remove(Path(folder)):
                continue  # as nearly always: few payloads make groups of their own
            for each, _, _ in os.walk(folder, topdown=False):
                gone = _remove(Path(each)) and gone
        return gone


def remove_noted(note: Path, patience_s: float) -> bool:
    """Remove the group that a file tells of, if there is one; whether it is gone."""
    try:
        group = Group(msgspec.json.decode(note.read_bytes(), type=dict[str, str]))
    except (OSError, msgspec.DecodeError):
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


def make(hierarchies: Hierarchies, name: str, *, memory_bytes: int | None, tasks: int) -> Group | None:
    """A group called `name` with these limits; None where there can be none. Made twice it is the same one."""
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
    if not folders:
        return None
    group = Group(folders)
    group.limit(memory_bytes=memory_bytes, tasks=tasks)
    return group


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


def _write(path: Path, text: str) -> bool:
    """Whether the kernel took it; a file of another version or a missing controller is no error."""
    if not path.exists():
        return False
    try:
        path.write_text(text)
    except OSError:
        return False
    return True


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True
