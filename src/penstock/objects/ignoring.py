"""Which files of a working directory stay at home: `.gitignore`, `.tpuignore`, and what is never sent.

`snapshots` asks for each name on its way down. Rules are git's: the last line that matches decides, a deeper file beats
a higher one, `.tpuignore` beats the `.gitignore` beside it, and what lies in an ignored folder cannot be called back.
Files above the directory count up to the repository's root. It must not decide about links, sizes or kinds of files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.objects.manifest import BadSnapshot

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

FILES: Final = (".gitignore", ".tpuignore")
#: Never sent, whatever an ignore file says; nor is any folder with a `pyvenv.cfg` in it.
ALWAYS: Final = frozenset(
    {
        ".DS_Store",
        ".git",
        ".hg",
        ".ipynb_checkpoints",
        ".mypy_cache",
        ".nox",
        ".penstock",
        ".pytest_cache",
        ".ruff_cache",
        ".svn",
        ".tox",
        ".venv",
        "__pycache__",
    }
)


class Level(NamedTuple):
    """The rules of one folder. A path is looked up as `lead` plus itself without its first `strip` characters."""

    strip: int
    lead: str
    rules: GitIgnoreSpec


def above(directory: Path) -> tuple[Level, ...]:
    """The `.gitignore` files between the root of the repository and the directory, highest first."""
    inside = [directory, *directory.parents]
    root = next((index for index, folder in enumerate(inside) if (folder / ".git").exists()), 0)
    levels: list[Level] = []
    for folder in reversed(inside[1 : root + 1]):
        lead = directory.relative_to(folder).as_posix() + "/"
        levels += _read(folder, (".gitignore",), 0, lead)
    # Who works in a folder that the repository ignores means to send it all the same.
    return () if _decide(tuple(levels), "") else tuple(levels)


def within(directory: Path, folder: str) -> tuple[Level, ...]:
    """The rules that a folder (`""` or `a/b/`) of the directory adds."""
    return tuple(_read(directory / folder, FILES, len(folder), ""))


def ignored(levels: tuple[Level, ...], path: str, *, folder: bool) -> bool:
    return _decide(levels, path + "/" if folder else path)


def _decide(levels: tuple[Level, ...], path: str) -> bool:
    for level in reversed(levels):
        found = level.rules.check_file(level.lead + path[level.strip :]).include
        if found is not None:
            return found
    return False


def _read(folder: Path, names: tuple[str, ...], strip: int, lead: str) -> list[Level]:
    from pathspec import GitIgnoreSpec

    levels: list[Level] = []
    for name in names:
        source = folder / name
        try:
            lines = source.read_text("utf-8-sig", errors="surrogateescape").splitlines()
        except (FileNotFoundError, IsADirectoryError):
            continue
        except OSError as error:
            raise BadSnapshot(name, str(source), f"cannot be read: {error.strerror}", "make it readable") from error
        # A line that no git would understand matches nothing, as in git.
        levels.append(Level(strip, lead, GitIgnoreSpec.from_lines([line for line in lines if _sensible(line)])))
    return levels


def _sensible(line: str) -> bool:
    from pathspec import GitIgnoreSpec

    try:
        GitIgnoreSpec.from_lines([line])
    except ValueError:
        return False
    return True
