"""Ignore files: compared with git itself on random rules and trees, and our own additions to them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.objects.ignoring import ALWAYS
from penstock.objects.snapshots import freeze
from tests.unit.objects import trees
from tests.unit.objects.trees import Tree

X = b"x"


def kept(root: Path) -> list[str]:
    return [file.path for file in freeze(root).manifest.files]


def git(root: Path, *words: str) -> str:
    quiet = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"], "HOME": "/"}
    return subprocess.run(
        ["git", "-C", str(root), *words], env=quiet, check=True, capture_output=True, text=True
    ).stdout


def kept_by_git(root: Path) -> list[str]:
    return sorted(git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")[:-1])


NAMES = ("a", "b", "data", "x.log", "x.py")
FILES = st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join), min_size=1, max_size=10)
RULES = st.lists(
    st.sampled_from(
        [
            "*.log", "!x.log", "data/", "data", "/data", "!data/", "data/*", "!data/x.py", "*", "!*/", "!*.py", "a/b",
            "a/**", "**/b", "/a/*", "!/a/b", "# a", "\\!x.py", "[ab]", "?", "x.*", "b/", "!b/x.py", "a/**/x.py", "!",
            "",
        ]
    ),
    max_size=6,
)  # fmt: skip


@settings(max_examples=150)
@given(FILES, st.dictionaries(st.sampled_from(["", "a/", "data/", "a/b/"]), RULES, max_size=3))
def test_gitignore_files_mean_what_git_says(files: list[str], rules: dict[str, list[str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        git(root, "init", "-q")
        for path in files:
            if not any(parent.is_file() for parent in (root / path).parents) and not (root / path).exists():
                trees.write(root, {path: X})
        for place, lines in rules.items():
            if (root / place).is_dir():
                (root / place / ".gitignore").write_text("\n".join(lines) + "\n")
        assert kept(root) == kept_by_git(root)


def test_tpuignore_adds_to_gitignore_and_takes_back(tmp_path: Path) -> None:
    tree: Tree = {
        ".gitignore": b"*.bin\nbuild\n",
        ".tpuignore": b"!model.bin\nnotes/\n",
        "model.bin": X,
        "other.bin": X,
        "notes/today": X,
        "sub/.tpuignore": b"!other.bin\n",
        "sub/other.bin": X,
        "build/model.bin": X,
    }
    assert kept(trees.write(tmp_path, tree)) == [
        ".gitignore",
        ".tpuignore",
        "model.bin",
        "sub/.tpuignore",
        "sub/other.bin",
    ]


def test_what_is_never_sent(tmp_path: Path) -> None:
    tree: Tree = {f"sub/{name}/file": X for name in ALWAYS}
    tree |= {".tpuignore": b"!.git\n!__pycache__\n!*\n", "env/pyvenv.cfg": X, "env/lib/a.py": X, "a.py": X}
    assert kept(trees.write(tmp_path, tree)) == [".tpuignore", "a.py"]


def test_a_folder_of_a_repository_obeys_the_files_above(tmp_path: Path) -> None:
    tree: Tree = {
        ".gitignore": b"*.ckpt\n/exp/one/local\n",
        "exp/.gitignore": b"tmp/\n",
        "exp/one/a.py": X,
        "exp/one/a.ckpt": X,
        "exp/one/local": X,
        "exp/one/tmp/file": X,
        "exp/one/deep/local": X,
    }
    root = trees.write(tmp_path / "repo", tree)
    assert "a.ckpt" in kept(root / "exp/one")  # no repository: files above are nobody's business
    git(root, "init", "-q")
    assert kept(root / "exp/one") == ["a.py", "deep/local"]


def test_who_works_in_an_ignored_folder_means_it(tmp_path: Path) -> None:
    root = trees.write(tmp_path, {".gitignore": b"scratch/\n*.log\n", "scratch/try/a.py": X, "scratch/try/b.log": X})
    git(root, "init", "-q")
    assert kept(root / "scratch/try") == ["a.py", "b.log"]


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfskip\n", b"skip\r\n", b"caf\xe9\nskip\n", b"!\n\\\nskip"])
def test_odd_ignore_files_are_read_as_far_as_they_go(tmp_path: Path, content: bytes) -> None:
    root = trees.write(tmp_path, {".gitignore": content, "skip": X, "keep": X})
    assert kept(root) == [".gitignore", "keep"]
