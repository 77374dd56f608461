"""Homes of attempts that serve again: kept when a snippet left them as they were made, taken by the next attempt.

`launch` asks for one before it makes an attempt's folders, `course` gives one back when nothing in it is needed any
more. Making and removing a dozen folders and files for each snippet costs an agent more than anything else it does, and
file systems grow slow on it. What a payload could reach is looked at with care: a folder that is not exactly as it was
made, down to its mode and attributes, is no longer used. It must not decide when an attempt is done with its home.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from penstock.agent.layout import Layout

SPARES_MAX = 8  #: more than attempts that end at about the same time on one host
NOTE_BYTES = 1024  #: notes have a fixed size, so that one can be written over another
#: Notes of the agent's own. Put aside under another name they are no notes; the next ones are written over them.
_NOTES = ("exit.json", "group.json")
_ASIDE = ".part"


def take(layout: Layout, spares: Path) -> bool:
    """Give an attempt a used home, with all its folders; False if there is none."""
    try:
        for name in os.listdir(spares):  # noqa: PTH208 (names are enough)
            (spares / name).rename(layout.home)
            return True
    except FileNotFoundError:
        return False  # no attempt has ended yet, or none has begun
    except OSError:
        return False  # an agent before this one made its home already
    return False


def give_back(layout: Layout, spares: Path) -> bool:
    """Whether the home was kept for another attempt; if not, it is for the caller to remove."""
    home = layout.home
    folders = (layout.work, layout.output, layout.temporary, layout.control)
    try:
        made = home.lstat()
        if not all(_is_as_made(folder, made) for folder in folders):
            return False
        layout.result.unlink(missing_ok=True)  # in a folder that is no link, as was just seen
        names = {folder.name for folder in (*folders, layout.spool)}
        names.update(_NOTES, (name + _ASIDE for name in _NOTES))
        if any(os.listdir(folder) for folder in (*folders, layout.spool)) or not names.issuperset(os.listdir(home)):  # noqa: PTH208
            return False
        spares.mkdir(exist_ok=True)
        if len(os.listdir(spares)) >= SPARES_MAX:  # noqa: PTH208
            return False
        for name in _NOTES:
            if (home / name).exists():
                (home / name).replace(home / (name + _ASIDE))
        home.rename(spares / home.name)
    except OSError:
        return False
    return True


def _is_as_made(folder: Path, made: os.stat_result) -> bool:
    found = folder.lstat()
    same = (found.st_mode, found.st_uid, found.st_gid) == (made.st_mode, made.st_uid, made.st_gid)
    return same and stat.S_ISDIR(found.st_mode) and not os.listxattr(folder, follow_symlinks=False)


def write_note(path: Path, text: str) -> None:
    """One of the agent's own notes, whole or not at all, over one that was put aside."""
    aside = f"{path}{_ASIDE}"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, text.encode().ljust(NOTE_BYTES))
    finally:
        os.close(fd)
    Path(aside).rename(path)
