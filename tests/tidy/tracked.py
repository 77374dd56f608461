"""The files of this tree: what git tracks, and what it would track because nothing ignores it.

The tidy tests call it. It must not look at ignored files (.venv, caches), and it needs git: an unpacked
archive without a repository is an error, not an empty tree.
"""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def tracked_files() -> tuple[Path, ...]:
    """Absolute paths, sorted; files deleted but still in the index are left out."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (ROOT / name for name in listing.stdout.split("\0") if name)
    return tuple(sorted(path for path in paths if path.is_file()))
