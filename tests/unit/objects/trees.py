"""Working directories for the tests of snapshots: written from a plain description, read back into one.

Tests import it; it decides nothing. A description maps a path to bytes (a file), a string (a link's target) or None (an
empty folder).
"""

from __future__ import annotations

import os
from pathlib import Path

Tree = dict[str, bytes | str | None]


def write(root: Path, tree: Tree) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        match content:
            case None:
                path.mkdir(exist_ok=True)
            case str():
                path.symlink_to(content)
            case bytes():
                path.write_bytes(content)
    return root


def read(root: Path) -> Tree:
    tree: Tree = {}
    for folder, folders, files in os.walk(root):
        for name in [*files, *folders]:
            path = Path(folder) / name
            key = path.relative_to(root).as_posix()
            if path.is_symlink():
                tree[key] = os.readlink(path)  # noqa: PTH115 - as it was written
            elif path.is_file():
                tree[key] = path.read_bytes()
            elif not any(path.iterdir()):
                tree[key] = None
    return tree
