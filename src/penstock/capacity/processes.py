"""Processes of this machine told apart for good: by pid, start time and boot, never by pid alone.

`capacity.local` finds and ends with it everything that belongs to a slice: its agents, whatever they started, and what
escaped into sessions of its own. Wiring asks it whether the process that a file names still lives. Linux only: it reads
/proc. It must not signal a process it has not recognised, nor itself, nor what started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_DEAD: Final = frozenset("ZX")
#: Looks in a row that find nothing of a family before it is gone: one that kept still, and one that grew meanwhile.
_CALM_PASSES: Final = 1
_WILD_PASSES: Final = 20
#: Lists of pids in one pass, so that a busy machine cannot hold it for ever.
_LISTS_MAX: Final = 100
_LOOK_EVERY_S: Final = 0.01
LOG_BYTES_MAX: Final = 8 << 20  #: a larger log of an earlier start is put aside, and the one before it forgotten


class Process(msgspec.Struct, frozen=True):
    """One process, as a file may remember it: the same pid in another boot or with another start is another one."""

    pid: int
    started: int  #: in ticks since boot
    boot: str = ""

    @property
    def alive(self) -> bool:
        """Whether it runs; one that only waits to be collected by its parent does not."""
        if self.boot != boot():
            return False
        now = _row(self.pid)
        return now is not None and now.started == self.started and now.state not in _DEAD

    @property
    def age_s(self) -> float:
        """How long ago it started."""
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.started / _TICKS_PER_S)


class _Row(msgspec.Struct, frozen=True):
    pid: int
    state: str
    parent: int
    session: int
    started: int


def boot() -> str:
    """Which boot of the machine this is."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def find(pid: int) -> Process | None:
    """The process that has this pid now."""
    row = _row(pid)
    return Process(pid, row.started, boot()) if row is not None and row.state not in _DEAD else None


def _row(pid: int) -> _Row | None:
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None  # it ended, perhaps while we looked
    # The name is in brackets and may hold anything, brackets and spaces included.
    fields = text[text.rindex(b")") + 2 :].split()
    return _Row(pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def _pids() -> list[int]:
    return [int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdigit()]


def _each_pid() -> Iterator[int]:
    """Every process, and those that came while the others were looked at: a list of pids is old when it is read."""
    seen: set[int] = set()
    for _ in range(_LISTS_MAX):
        new = [pid for pid in _pids() if pid not in seen]
        if not new:
            return
        seen.update(new)
        yield from new


def _words(pid: int, file: str) -> list[bytes]:
    """The arguments or the environment of a process; none when it is another user's."""
    try:
        return (_PROC / str(pid) / file).read_bytes().split(b"\0")
    except OSError:
        return []


def with_arguments(*words: str) -> list[Process]:
    """Processes started with these words in a row among their arguments."""
    sought = [os.fsencode(word) for word in words]
    here = boot()
    found = []
    for pid in _pids():
        given = _words(pid, "cmdline")
        if any(given[at : at + len(sought)] == sought for at in range(len(given))):
            row = _row(pid)
            if row is not None and row.state not in _DEAD:
                found.append(Process(pid, row.started, here))
    return found


def belonging(roots: Iterable[Process], folder: Path, *, stop: bool = False) -> list[Process]:
    """Everything that belongs to some processes, living or dead, that work in `folder`.

    Itself, its children and theirs; the sessions any of them leads or led; and whatever was given a directory `host-N`
    of the folder, or a PENSTOCK_… variable that points into it, because its parents may be gone. With `stop` each is
    stopped as soon as it is seen, not when all have been looked at: what forks fast would be elsewhere by then.
    """
    here = boot()
    known = {root.pid: root.started for root in roots if root.boot == here}
    inside = os.fsencode(folder) + b"/"
    spared = _ancestors()
    rows: dict[int, _Row] = {}
    taken: set[int] = set()

    def take(row: _Row) -> None:
        taken.add(row.pid)
        if stop:
            send(Process(row.pid, row.started, here), signal.SIGSTOP)

    for pid in _each_pid():
        row = _row(pid)
        if row is None or row.state in _DEAD:
            continue
        rows[pid] = row
        if pid not in spared and (_is_root(row, known) or _points_into(pid, inside)):
            take(row)
    below: dict[int, list[int]] = {}
    for row in rows.values():
        below.setdefault(row.parent, []).append(row.pid)
        below.setdefault(row.session, []).append(row.pid)
    front = [*taken, *(pid for pid in known if pid not in rows)]
    while front:
        above = front.pop()
        for pid in below.get(above, ()):
            # A dead root's pid may have been given away since: what started before it is none of its own.
            if pid not in taken and pid not in spared and rows[pid].started >= known.get(above, 0):
                take(rows[pid])
                front.append(pid)
    return [Process(pid, rows[pid].started, here) for pid in sorted(taken)]


def _is_root(row: _Row, known: dict[int, int]) -> bool:
    return known.get(row.pid) == row.started


def _points_into(pid: int, inside: bytes) -> bool:
    """Whether a process works there; one that only looks at a file there (an editor, `tail -f`) does not."""
    for word in _words(pid, "cmdline"):
        if word.startswith(inside + b"host-") and word[len(inside) + 5 :].isdigit():
            return True
    return any(
        name.startswith(b"PENSTOCK_") and value.startswith(inside)
        for name, _, value in (word.partition(b"=") for word in _words(pid, "environ"))
    )


def _ancestors() -> set[int]:
    """This process and what started it."""
    found: set[int] = {1}
    pid = os.getpid()
    while pid not in found and (row := _row(pid)) is not None:
        found.add(pid)
        pid = row.parent
    return found


def end(roots: Iterable[Process], folder: Path, within_s: float) -> list[Process]:
    """Kill all that belongs to `roots` and `folder`, and wait until it is gone; answers what would not go.

    All is stopped before any is killed, so that children keep the parents they are known by. One pass over /proc is not
    one moment: a family that grew between two passes must stay unseen for many before it counts as gone.
    """
    roots = list(roots)
    deadline = time.monotonic() + within_s
    seen: set[Process] = set()
    passes = unseen = 0
    wanted = _CALM_PASSES
    while time.monotonic() < deadline:
        found = set(belonging(roots, folder, stop=True))
        if not found:
            unseen += 1
            if unseen >= wanted:
                return []
        else:
            unseen = 0
        if found - seen:
            if passes:
                wanted = _WILD_PASSES
            seen |= found
        else:
            for process in found:
                send(process, signal.SIGKILL)
            collect(process.pid for process in seen)
            time.sleep(_LOOK_EVERY_S)
        passes += 1
    return [process for process in seen if process.alive]


def kill(process: Process, within_s: float) -> bool:
    """Kill this one process and wait until it is gone; whether it went. What it started goes on."""
    deadline = time.monotonic() + within_s
    while process.alive:
        if time.monotonic() >= deadline:
            return False
        send(process, signal.SIGKILL)
        collect((process.pid,))
        time.sleep(_LOOK_EVERY_S)
    return True


def spawn(argv: tuple[str, ...], log: Path, environment: Mapping[str, str]) -> Process:
    """Start a program in a session of its own, its words going to `log`; it outlives whoever started it."""
    if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
        log.replace(log.with_suffix(".log.1"))
    words = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        pid = os.posix_spawn(
            argv[0],
            argv,
            environment,
            file_actions=(
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, words, 1),
                (os.POSIX_SPAWN_DUP2, words, 2),
            ),
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGINT, signal.SIGTERM),
        )
    finally:
        os.close(words)
    # One that ended at once is remembered all the same, as started now.
    now = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S)
    return find(pid) or Process(pid, now, boot())


def send(process: Process, number: signal.Signals) -> None:
    """Signal exactly this process: a pid that was given away meanwhile is left alone."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if process.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def watch(process: Process) -> int | None:
    """A descriptor that becomes readable when this process ends; None when it has."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # Looked at after the handle is open: what lives now cannot end unseen, nor give its pid away.
    if process.alive:
        return handle
    os.close(handle)
    return None


def collect(pids: Iterable[int]) -> None:
    """Take the exit status of those that are children of ours, so that none stays a zombie."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
