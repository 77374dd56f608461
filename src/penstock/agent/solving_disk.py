"""The check of `tpu solve` about room on disk: which file system is full, and which of our caches go first.

`solving` has it in its registry. Only what Penstock itself put on this host and can get again is removed, the cheapest
to get again first, and only until there is room. What anything may be using now stays. What else is large is named, for
whoever owns it: this must not remove a file that is not ours.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from penstock.agent.shelf import make_room
from penstock.agent.surroundings import CannotFix, Surroundings, Trouble

FREE_BYTES_LEAST: Final = 1 << 30  #: below this jobs cannot unpack, log or save
FREE_SHARE_LEAST: Final = 20  #: of a small disk: a twentieth
INODES_LEAST: Final = 1_000
RECENT_S: Final = 600.0  #: what was used since then may be in use: an attempt that is being prepared
_LARGEST_SHOWN: Final = 3
_FILES_COUNTED_MAX: Final = 50_000


def look_at_disk(around: Surroundings) -> Trouble | None:
    full = [place for place in _places(around) if _lack(place)]
    if not full:
        return None
    evidence = "; ".join(f"{place}: {_lack(place)}" for place in full)
    large = "; ".join(line for place in full for line in _largest(place, around))
    if large:
        evidence += f" (large: {large})"
    return Trouble(evidence, "remove Penstock's own caches there", lambda: _free(around, full))


def _folders(around: Surroundings) -> list[Path]:
    """Where room is needed, or taken by whoever uses this machine."""
    shared = (Path("/tmp"), Path("/var/log"), Path("/")) if around.ours_alone else ()
    return [folder for folder in (around.state, around.cache, *around.disks, *shared) if folder.is_dir()]


def _places(around: Surroundings) -> list[Path]:
    """One directory per file system."""
    found: dict[int, Path] = {}
    for folder in _folders(around):
        found.setdefault(folder.stat().st_dev, folder)
    return list(found.values())


def _lack(place: Path) -> str:
    """What a file system lacks; empty when it has enough."""
    seen = os.statvfs(place)
    total, free = seen.f_blocks * seen.f_frsize, seen.f_bavail * seen.f_frsize
    if total and free < min(FREE_BYTES_LEAST, total // FREE_SHARE_LEAST):
        return f"{_size(free)} free of {_size(total)}"
    if seen.f_files and seen.f_favail < min(INODES_LEAST, seen.f_files // FREE_SHARE_LEAST):
        return f"room for {seen.f_favail} more files only, of {seen.f_files}"
    return ""


# --- making room ---
def _free(around: Surroundings, full: list[Path]) -> None:
    before = sum(os.statvfs(place).f_bavail * os.statvfs(place).f_frsize for place in full)
    for remove in _steps(around):
        remove()
        if not any(_lack(place) for place in full):
            return
    now = sum(os.statvfs(place).f_bavail * os.statvfs(place).f_frsize for place in full)
    raise CannotFix(f"our caches gave {_size(max(0, now - before))} and nothing of ours is left to remove")


def _steps(around: Surroundings) -> Iterator[Callable[[], None]]:
    """What to remove, the cheapest to get again first."""
    cache = around.cache
    yield lambda: _remove_halves(around)
    yield lambda: _remove_old(around, cache / "packages")
    yield lambda: _remove_old(around, around.state / "spare")
    yield lambda: _remove_old(around, cache / "blobs")
    yield lambda: _remove_old(around, cache / "snapshots")
    if (cache / "environments").is_dir():
        yield lambda: _remove_environments(cache / "environments")


def _remove_halves(around: Surroundings) -> None:
    """What an interrupted set-up left, and agent bundles that this agent does not run from."""
    if not around.ours_alone:
        return
    used = Path(sys.executable).resolve()
    for path in (*around.state.parent.glob("partial-*"), *around.state.parent.glob("bundle-*")):
        if path.is_dir() and not path.is_symlink() and path.resolve() not in used.parents:
            shutil.rmtree(path, ignore_errors=True)


def _remove_old(around: Surroundings, folder: Path) -> None:
    """Files of a folder that nothing used lately."""
    before = around.now() - RECENT_S
    for here, _, names in os.walk(folder):
        for name in names:
            path = Path(here) / name
            with contextlib.suppress(OSError):  # removed by another agent of this machine, or in use
                if path.lstat().st_mtime < before:
                    path.unlink()


def _remove_environments(folder: Path) -> None:
    make_room(folder, folder, 0)  # it spares what a process runs in, and what was used within the hour


# --- what else is large ---
def _largest(place: Path, around: Surroundings) -> list[str]:
    """The largest things at the top of a full file system that people fill."""
    device = place.stat().st_dev
    sizes: dict[Path, int] = {}
    counted = 0
    for folder in _folders(around):
        with contextlib.suppress(OSError):
            for path in folder.iterdir() if folder.stat().st_dev == device else ():
                sizes[path], looked = _tree(path, device, _FILES_COUNTED_MAX - counted)
                counted += looked
    ordered = sorted(sizes.items(), key=lambda each: each[1], reverse=True)[:_LARGEST_SHOWN]
    return [f"{path} {_size(size)}" for path, size in ordered if size]


def _tree(path: Path, device: int, files_max: int) -> tuple[int, int]:
    """Bytes below a path on one device, and how many files were looked at; counting ends at a bound."""
    total = looked = 0
    pending = [path]
    while pending and looked < files_max:
        each = pending.pop()
        with contextlib.suppress(OSError):
            seen = each.lstat()
            looked += 1
            if seen.st_dev != device:
                continue
            total += seen.st_blocks * 512
            if stat.S_ISDIR(seen.st_mode):
                pending.extend(each.iterdir())
    return total, looked


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1_000:
            return f"{number:.0f} {unit}"
        number /= 1_000
    return f"{number:.1f} TB"
