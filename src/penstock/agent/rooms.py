"""The inner walls of one snippet: its own processes, mounts, /tmp and shared memory, made of kernel namespaces.

Called by `nursery` inside the sandbox that bubblewrap made, where it has the right to divide what it was given and no
right beyond. A *room* is a process number space and a mount table; its first process is tiny, takes in orphans, and
takes everything with it when it ends. Standard library only: this runs on the Python of the user's environment. It
must not decide what a payload may see: that is `sandbox`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from typing import TypedDict

NEW_MOUNTS, NEW_IPC, NEW_PIDS = 0x00020000, 0x08000000, 0x20000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_PR_SET_DUMPABLE, _PR_SET_NAME, _PR_SET_NO_NEW_PRIVS = 4, 15, 38
MESSAGE_BYTES = 1 << 16
CLEAR = signal.SIGUSR1  #: to the first process of a room: let nobody remain
_HEARD = {signal.SIGCHLD, signal.SIGTERM, CLEAR}
_OWN = (ctypes.c_uint32 * 2)(0x20080522, 0)  #: the third version of the call, and the calling process
_NO_RIGHTS = (ctypes.c_uint32 * 6)()
_libc = ctypes.CDLL(None, use_errno=True)
_locked = ctypes.PyDLL(None, use_errno=True)  #: keeps the interpreter's lock during a call
_CLONE = 56 if os.uname().machine == "x86_64" else 220  #: the number of the call; younger machines agree on theirs
for _call in (_libc.setns, _libc.prctl, _libc.mount, _libc.capset, _locked.syscall):
    _call.restype = ctypes.c_int


class Room(TypedDict):
    """What a snippet sees of the directories that change from one to the next; everything else is as in the sandbox."""

    covered: list[str]  #: emptied, but for what is listed below
    writable: list[str]
    readable: list[str]
    temporary: str  #: stands in for /tmp and /var/tmp


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def clone() -> int:
    """A fork whose child (0 is its answer) is the first process of a new room; the child may only call `hold`.

    It is not `os.fork`: what modules want done in every fork of an interpreter touches some two hundred pages, each of
    which the kernel then copies. That would be most of the cost of a room, and for nothing.
    """
    flags = ctypes.c_ulong(NEW_MOUNTS | NEW_IPC | NEW_PIDS | signal.SIGCHLD)
    pid: int = _locked.syscall(_CLONE, flags, None, None, None, None)
    _check(min(pid, 0), "clone")
    return pid


def enter(fd: int, kinds: int) -> None:
    """Go over into namespaces, of a process if `fd` is one; for numbers it takes effect on the next fork."""
    _check(_libc.setns(fd, kinds), "setns")


def set_option(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode() if data else None,
    )
    _check(result, f"mount {target}")


def furnish(room: Room) -> None:
    """Change the mounts of the calling process, which must be its room's own, to what `room` says."""
    # Opened first: a covered or replaced directory hides what lies under it, and /tmp may be one of them.
    kept = {path: os.open(path, os.O_PATH) for path in (*room["readable"], *room["writable"], room["temporary"])}
    for target in ("/tmp", "/var/tmp"):
        if os.path.isdir(target):  # noqa: PTH112 (no pathlib: forks stay small)
            _bind(kept[room["temporary"]], target)
    for path in room["covered"]:
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
        _mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=0755")
    for path in (*room["readable"], *room["writable"]):
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
        _bind(kept[path], path)
    for path in room["readable"]:
        _mount("none", path, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    for path in room["covered"]:
        _mount("none", path, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    for fd in kept.values():
        os.close(fd)


def _own_mounts() -> None:
    """What is the same in all rooms: memory files and processes that are nobody else's."""
    _mount("none", "/", None, _REC | _PRIVATE)
    if os.path.isdir("/dev/shm"):  # noqa: PTH112
        _mount("tmpfs", "/dev/shm", "tmpfs", _NOSUID | _NODEV, "mode=1777")
    flags = _NOSUID | _NODEV | _NOEXEC
    _mount("proc", "/proc", "proc", flags)  # not read-only as a whole: CUDA writes to its own part of it
    for name in ("sys", "sysrq-trigger", "irq", "bus"):  # the owner of these needs no further right to write there
        path = f"/proc/{name}"
        if os.path.exists(path):  # noqa: PTH110
            _mount(path, path, None, _BIND | _REC)
            _mount("none", path, None, _REMOUNT | _BIND | _RDONLY | flags)


def _bind(fd: int, target: str) -> None:
    _mount(f"/proc/self/fd/{fd}", target, None, _BIND | _REC)


def give_up_rights() -> None:
    """No capability, now or after any exec."""
    set_option(_PR_SET_NO_NEW_PRIVS, 1)
    _check(_libc.capset(_OWN, _NO_RIGHTS), "capset")


def call_it(name: str) -> None:
    """How the calling process is called in lists of processes."""
    _check(_libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0), "prctl name")


def hold(door: int) -> None:
    """Be the first process of a room: furnish it when told how, keep house, clear it. Never returns.

    The other end of the door is the agent's: it closes when nobody is left in the room.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    os.closerange(0, door)
    os.closerange(door + 1, 1 << 16)
    try:
        call_it("room")
        os.setsid()
        _own_mounts()
        os.write(door, b"room")
        told = os.read(door, MESSAGE_BYTES)
        if not told:
            os._exit(0)  # not needed any more
        furnish(json.loads(told))
        os.write(door, b"made")
        give_up_rights()
        set_option(_PR_SET_DUMPABLE, 0)  # else the snippet, which has the same user, could write into its memory
        while (heard := signal.sigwait(_HEARD)) != CLEAR:
            if heard == signal.SIGTERM:
                _everybody(signal.SIGTERM)
                _everybody(signal.SIGCONT)
            _bury(os.WNOHANG)
        _everybody(signal.SIGKILL)
        _bury(0)
        os._exit(0)  # the door closes first, the mounts go later: nobody need wait for that
    except OSError as error:
        os.write(door, f"!the room of the snippet could not be made: {error}".encode())
        os._exit(1)


def _everybody(number: int) -> None:
    """A signal to all processes of the room but its first, which is the caller."""
    try:
        os.kill(-1, number)
    except ProcessLookupError:
        return


def _bury(how: int) -> None:
    """Take the statuses of orphans that ended, so that they do not count against the limit of processes."""
    try:
        while os.waitpid(-1, how)[0]:
            continue
    except ChildProcessError:
        return
