"""What this machine's hosts keep between jobs, blobs and environments, and how that goes when nobody uses it.

`wiring.serve` gives it to `server.cleaning`. The caches are shared by all local slices, so they are only touched while
there is none; what goes is first moved aside, which takes no time, and deleted when slices may be made again. Whatever
was used since the given moment stays. It must not touch what is no cache of an agent's.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from penstock.capacity.local import LocalCapacity
from penstock.capacity.slice_files import remove
from penstock.wire.api import CleanedView

#: What was moved aside lies here until it is deleted.
ASIDE: Final = ".gone"
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_KEY: Final = re.compile(r"[0-9a-f]{32}")


class _Thing(NamedTuple):
    kind: str
    path: Path
    size: int
    used_at: float


class HostCaches:
    """Called as `Service.caches` says."""

    def __init__(self, folder: Path, local: LocalCapacity) -> None:
        self._folder = folder
        self._local = local

    async def __call__(self, before: float, dry_run: bool) -> tuple[Sequence[CleanedView], str]:
        await asyncio.to_thread(self._remove_aside)
        things = await asyncio.to_thread(lambda: [thing for thing in self._things() if thing.used_at < before])
        going = await self._local.while_empty(lambda: things if dry_run else self._move_aside(things, before))
        if going is None:
            return (), "caches of this machine's hosts stay: there are slices that may use them"
        await asyncio.to_thread(self._remove_aside)
        kinds = sorted({thing.kind for thing in going})
        return [_view(kind, [thing.size for thing in going if thing.kind == kind]) for kind in kinds], ""

    def _things(self) -> Iterator[_Thing]:
        for kind, folder in (("cached blobs", "blobs"), ("cached snapshots", "snapshots")):
            for path in (self._folder / folder).glob("??/*"):
                if _HASH.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    facts = path.stat()
                    yield _Thing(kind, path, facts.st_size, facts.st_mtime)
        for path in (self._folder / "environments").glob("*"):
            mark = path / "ready"
            if _KEY.fullmatch(path.name) and mark.is_file():  # one without the mark is being built, or built anew
                yield _Thing("environments", path, _size(path), mark.stat().st_mtime)

    def _move_aside(self, things: Sequence[_Thing], before: float) -> list[_Thing]:
        """No slice exists and none is made: what was not used until now is not used."""
        moved = []
        aside = self._folder / ASIDE
        for thing in things:
            if _used_at(thing) < before:
                aside.mkdir(mode=0o700, exist_ok=True)
                thing.path.rename(aside / f"{thing.path.name}-{secrets.token_hex(4)}")
                moved.append(thing)
        return moved

    def _remove_aside(self) -> None:
        """Also what a server left that died while it did this."""
        if (self._folder / ASIDE).is_dir():
            remove(self._folder / ASIDE)


def _used_at(thing: _Thing) -> float:
    try:
        return (thing.path / "ready" if thing.kind == "environments" else thing.path).stat().st_mtime
    except FileNotFoundError:
        return float("inf")  # gone already: a host's own sweep was faster


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _view(kind: str, sizes: Sequence[int]) -> CleanedView:
    return CleanedView(kind=kind, count=len(sizes), bytes=sum(sizes))
