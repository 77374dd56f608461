"""Which job this is, which stage of it, and where its files belong.

User code calls these through `penstock.payload`. Directories are plain strings, because they may be addresses of a
bucket. It must not create anything but local directories that are about to be written.
"""

from __future__ import annotations

import os
from pathlib import Path

_ADDRESS = "://"


def job_id() -> str | None:
    """The job this process runs for; None outside of Penstock."""
    return os.environ.get("PENSTOCK_JOB_ID")


def stage() -> int:
    """How many resumes came before: 0 on the first run, and outside of Penstock."""
    return int(os.environ.get("PENSTOCK_STAGE", "0"))


def checkpoint_dir(default: str = "checkpoints") -> str:
    """Where to save checkpoints; each attempt has its own. Outside of Penstock: `default`."""
    return _made(os.environ.get("PENSTOCK_CHECKPOINT_DIR", default))


def restore_dir() -> str | None:
    """Where the newest earlier attempt saved its checkpoints; None if none did, and outside of Penstock."""
    return os.environ.get("PENSTOCK_RESTORE_DIR") or None


def restore_dirs() -> list[str]:
    """Every directory with checkpoints of earlier attempts, newest first.

    An attempt that died while it wrote its first checkpoint leaves nothing that can be loaded: then the next in this
    list is the one to go on from.
    """
    newest = restore_dir()
    if newest is None:
        return []
    folder = Path(newest)
    if _ADDRESS in newest or not folder.name.isdecimal():
        return [newest]
    # Attempts of one job are numbered by their fence, side by side.
    older = [
        sibling
        for sibling in folder.parent.iterdir()
        if sibling.name.isdecimal() and int(sibling.name) < int(folder.name) and sibling.is_dir()
    ]
    older.sort(key=lambda sibling: int(sibling.name), reverse=True)
    return [newest, *map(str, older)]


def output_dir(default: str = "outputs") -> str:
    """Files put here become the job's artifacts. Outside of Penstock: `default`."""
    return _made(os.environ.get("PENSTOCK_OUTPUT_DIR", default))


def _made(directory: str) -> str:
    if _ADDRESS not in directory:
        Path(directory).mkdir(parents=True, exist_ok=True)
    return directory
