"""Processes as /proc shows them: who descends from whom, when each began, and the end of all of them.

`keeper` and `tree` use it to treat a payload and everything it started as one thing. Standard library only. It kills
what its caller owns and nothing else: never init, the caller, or the caller's parent.
"""

from __future__ import annotations

import os
import signal
import time

Stat = tuple[str, str, int, int, int, int]
_EXITING = 0x4  #: of a process's flags: it frees its memory and its devices, which may take seconds


def stat_of(pid: int) -> Stat | None:
    """Name, state, parent, group, start time (clock ticks since boot) and flags of a process; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 (called for every process of the machine)
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, fields[0], int(fields[1]), int(fields[2]), int(fields[19]), int(fields[6])


def hears(stat: Stat) -> bool:
    """Whether a signal can still change how a process ends."""
    return stat[1] not in "ZX" and not stat[5] & _EXITING


def started_at(pid: int) -> int | None:
    """When a process started, which tells it from a later one with its number; None when it is gone or a zombie."""
    stat = stat_of(pid)
    return None if stat is None or stat[1] in "ZX" else stat[4]


def descendants(root: int) -> set[int]:
    """All living processes under `root`, without itself. Nobody owns what is under init."""
    if root <= 1:
        return set()
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        stat = stat_of(int(entry.name)) if entry.name.isdigit() else None
        if stat is not None and stat[1] not in "ZX":
            parents[int(entry.name)] = stat[2]
    found: set[int] = set()
    fresh = {root}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh and pid not in found}
        found |= fresh
    return found


def members(files: list[str]) -> set[int]:
    """The processes listed in cgroups' `cgroup.procs`."""
    found: set[int] = set()
    for each in files:
        try:
            with open(each, "rb") as file:  # noqa: PTH123 (a shim has no pathlib)
                found.update(map(int, file.read().split()))
        except OSError:
            continue  # removed: nobody is in it
    return found


def kill_all(root: int, files: list[str], patience_s: float, *, parent: bool = False) -> bool:
    """SIGKILL everything under `root` and in the cgroups until nothing is left; whether that was reached.

    `parent`: the caller is the one to whom orphans come, and takes their statuses.
    """
    spared = {0, 1, root, os.getpid(), os.getppid()}  # a process of another namespace shows as 0
    until = time.monotonic() + patience_s
    while True:
        alive = {pid for pid in (descendants(root) | members(files)) - spared if started_at(pid) is not None}
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not alive or time.monotonic() > until:
            return not alive
        if parent:
            reap()
        time.sleep(0.005)


def reap() -> dict[int, int]:
    """Statuses of children that ended."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status
