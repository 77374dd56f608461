"""Which environments a host keeps: the longest unused go when all of them are too large for its disk.

`environment` calls `make_room` after it built one, and `tpu solve` where a disk is full. One that was used within the
hour stays, and so does one that a process of this machine runs in, whoever started it and when: the processes
themselves are asked, so that nothing that was written down can be wrong after a crash. A builder's lock is respected.
It must not build anything, and removes nothing but whole environments.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Final

from penstock.domain import limits

RECENT_NS: Final = 3600 * 1_000_000_000  #: from the set-up to the first process that shows its use, and then some
_ASIDE: Final = ".gone-"


def make_room(folder: Path, keep: Path, size_max: int | None = None) -> list[str]:
    """Remove environments until the rest fits; the names of those that went. `keep` stays, whatever its size."""
    for left in folder.glob(f"{_ASIDE}*"):  # by who was killed in the middle of this
        shutil.rmtree(left, ignore_errors=True)
    if size_max is None:
        share = shutil.disk_usage(folder).total * limits.HOST_ENVIRONMENTS_PERCENT // 100
        size_max = min(limits.HOST_ENVIRONMENTS_BYTES_MAX, share)
    found = sorted((mark.stat().st_mtime_ns, mark.parent) for mark in folder.glob("*/ready"))
    sizes = {home: _size(home) for _, home in found}
    total = sum(sizes.values())
    if total <= size_max:
        return []
    now_ns = _now_ns(folder)
    used = in_use(folder)
    gone: list[str] = []
    for used_ns, home in found:
        if total <= size_max or used_ns > now_ns - RECENT_NS:
            break
        if home != keep and home.name not in used and _remove(home, used_ns):
            total -= sizes[home]
            gone.append(home.name)
    return gone


def in_use(folder: Path) -> set[str]:
    """Names of the environments that some process of this machine has as its own."""
    begin = f"VIRTUAL_ENV={folder.resolve()}/".encode()
    names = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                variables = Path(f"/proc/{entry.name}/environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it ended, or is another user's: those have caches of their own
            names |= {os.fsdecode(each[len(begin) :]).split("/")[0] for each in variables if each.startswith(begin)}
    return names


def discard(home: Path) -> bool:
    """Remove one environment, however lately it was used; whether it went. Not while it is built."""
    try:
        used_ns = (home / "ready").stat().st_mtime_ns
    except FileNotFoundError:
        return not home.exists()
    return _remove(home, used_ns)


def _remove(home: Path, used_ns: int) -> bool:
    """Whether it went: not if somebody builds it, or has used it since it was looked at."""
    with home.with_suffix(".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (home / "ready").stat().st_mtime_ns != used_ns:
                return False
            aside = home.with_name(f"{_ASIDE}{secrets.token_hex(4)}")
            home.rename(aside)  # at once: nobody ever finds half of one
        except OSError:
            return False
    shutil.rmtree(aside, ignore_errors=True)
    return True


def _size(folder: Path) -> int:
    """Bytes on disk; a file that is linked several times counts once."""
    seen: dict[tuple[int, int], int] = {}
    for here, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found = os.lstat(os.path.join(here, name))  # noqa: PTH118 (tens of thousands of files)
                seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


def _now_ns(folder: Path) -> int:
    """By the clock that stamps files."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime_ns
