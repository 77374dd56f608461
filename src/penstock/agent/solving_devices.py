"""Checks of `tpu solve` about accelerators: who holds one without a job, and libtpu's lock file.

`solving` has them in its registry. Processes are told from each other by what they were given: a payload has its
attempt among its variables, and so has what it started. It must not end this agent, what started it, init, or a
process of an attempt that runs; and on a machine that others use too, nothing that is not a leftover of our own.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path
from typing import Final

from penstock.agent.devices import find
from penstock.agent.processes import stat_of
from penstock.agent.surroundings import CannotFix, Surroundings, Trouble

TERM_S: Final = 3.0  #: for a stale process to leave by itself
KILL_S: Final = 5.0
POLL_S: Final = 0.02
_ANCESTORS_MAX: Final = 1_000
_SHOWN_MAX: Final = 120


class _Holder:
    """A process as it was when it was seen: a number that was given away since is another process."""

    def __init__(self, pid: int, path: Path) -> None:
        self.pid = pid
        self.path = path
        seen = stat_of(pid)
        self.started = seen[4] if seen is not None else -1

    def alive(self) -> bool:
        now = stat_of(self.pid)
        return now is not None and now[4] == self.started and now[1] not in "ZX"

    def described(self) -> str:
        words = " ".join(word.decode("utf-8", "replace") for word in _words(self.pid, "cmdline") if word)
        shown = words or (stat_of(self.pid) or ("?",))[0]
        return f"{self.path} is held by process {self.pid}: {shown[:_SHOWN_MAX]}"


def look_at_devices(around: Surroundings) -> Trouble | None:
    found = find(around.dev)
    files = found.files if found.kind == "tpu" else ()
    stale: list[_Holder] = []
    strange: list[_Holder] = []
    for holder in _holders(files):
        kin = _kinship(holder.pid, around)
        if kin == "stale" or (kin == "stranger" and around.ours_alone):
            stale.append(holder)
        elif kin == "stranger":
            strange.append(holder)
    if not stale and not strange:
        return None
    evidence = "; ".join(holder.described() for holder in (*stale, *strange))
    if strange:
        return Trouble(
            evidence, "it is no process of ours, and this machine is not ours alone: ask its owner to end it"
        )
    numbers = ", ".join(str(holder.pid) for holder in stale)
    return Trouble(evidence, f"end process {numbers}", lambda: _end(stale))


def look_at_lock_file(around: Surroundings) -> Trouble | None:
    path = around.lock_file
    try:
        seen = path.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISREG(seen.st_mode) and _holders((path,)):
        return None  # it does its work; who holds the devices is another check's question
    age_s = max(0.0, around.now() - seen.st_mtime)
    evidence = f"{path} of user {seen.st_uid}, {age_s:.0f} s old, is open nowhere"
    if not around.ours_alone and seen.st_uid != os.geteuid():
        return Trouble(evidence, "it is another user's: ask them to remove it")
    return Trouble(evidence, f"remove {path}", lambda: _remove_unheld(path))


def _remove_unheld(path: Path) -> None:
    if _holders((path,)):
        raise CannotFix("a process has opened it meanwhile")
    path.unlink(missing_ok=True)


# --- who holds what ---
def _holders(files: tuple[Path, ...]) -> list[_Holder]:
    """Processes that have one of these open, by whatever name: a payload's root may differ from ours."""
    wanted = {identity: path for path in files if (identity := _identity(str(path))) is not None}
    names = {path.name for path in files}
    found: list[_Holder] = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        held = _held(f"/proc/{entry.name}/fd", wanted, names)
        if held is not None:
            found.append(_Holder(int(entry.name), held))
    return sorted(found, key=lambda holder: holder.pid)


def _held(folder: str, wanted: dict[tuple[int, int, int], Path], names: set[str]) -> Path | None:
    try:
        descriptors = os.listdir(folder)  # noqa: PTH208 (for every process)
    except OSError:
        return None  # it ended meanwhile, or is another user's
    for each in descriptors:
        try:
            target = os.readlink(f"{folder}/{each}")  # noqa: PTH115
        except OSError:
            continue  # closed meanwhile
        # The name first: to look at a file of a dead network mount would take for ever.
        if target.rpartition("/")[2] in names and (path := wanted.get(_identity(f"{folder}/{each}") or (0, 0, 0))):
            return path
    return None


def _identity(path: str) -> tuple[int, int, int] | None:
    """Which file it is: a device by its number, any other by its place on the disk."""
    try:
        seen = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    if stat.S_ISCHR(seen.st_mode):
        return (0, 0, seen.st_rdev)
    return (seen.st_dev, seen.st_ino, 0)


# --- whose it is ---
def _kinship(pid: int, around: Surroundings) -> str:
    """`kept` (ours, and in use), `stale` (left over from an attempt of ours) or `stranger`."""
    if pid in _ancestry(os.getpid()) or pid <= 1:
        return "kept"
    inside = os.fsencode(around.state) + b"/"
    for each in _ancestry(pid):
        if each == os.getpid():
            return "kept"  # a warm parent, a set-up
        variables = dict(word.split(b"=", 1) for word in _words(each, "environ") if b"=" in word)
        attempt = variables.get(b"PENSTOCK_ATTEMPT", b"").decode("utf-8", "replace")
        if attempt in around.attempts:
            return "kept"
        if attempt:
            here = any(name.startswith(b"PENSTOCK_") and value.startswith(inside) for name, value in variables.items())
            return "stale" if here or around.ours_alone else "kept"  # another agent of this machine answers for it
        if any(word.startswith(inside) or word == inside[:-1] for word in _words(each, "cmdline")):
            return "kept"  # the keeper of an earlier agent of this host, or what it keeps warm
    return "stranger"


def _ancestry(pid: int) -> list[int]:
    line: list[int] = []
    while pid > 1 and pid not in line and len(line) < _ANCESTORS_MAX:
        line.append(pid)
        seen = stat_of(pid)
        pid = seen[2] if seen is not None else 0
    return line


def _words(pid: int, file: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")
    except OSError:
        return []


# --- ending it ---
def _end(holders: list[_Holder]) -> None:
    for number, patience_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        for holder in holders:
            _send(holder, number)
        until = time.monotonic() + patience_s
        while any(holder.alive() for holder in holders) and time.monotonic() < until:
            time.sleep(POLL_S)
    left = [str(holder.pid) for holder in holders if holder.alive()]
    if left:
        raise CannotFix(f"process {', '.join(left)} does not end after SIGKILL")


def _send(holder: _Holder, number: signal.Signals) -> None:
    try:
        handle = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return
    try:
        # The handle is of whoever has the number now; only then is it compared with who was seen.
        if holder.alive():
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise CannotFix(f"process {holder.pid} is another user's") from error
    finally:
        os.close(handle)
