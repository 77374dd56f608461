"""What an attempt's environment is made of, and the hash under which a host keeps it.

`agent.environment` asks which recipe a snapshot calls for: the job's `setup`, else `uv.lock`, `requirements.txt` or the
dependencies of `pyproject.toml`, else none. The hash covers what the recipe reads, and the whole snapshot as soon as it
might read more (`pip install -e .`, `make deps`): an old environment must never run in place of what was sent. It must
not run anything, and reads only files that the manifest lists as such.
"""

from __future__ import annotations

import hashlib
import json
import platform
import posixpath
import shlex
import site
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

import penstock
from penstock.objects.manifest import Manifest

FORMAT: Final = 1  #: raise it when environments are built in another way
ENV_PREFIXES: Final = ("PIP_", "UV_")  #: variables of a job that change what an installer does
INSTALLERS: Final = (
    ("pip", "install"),
    ("pip3", "install"),
    ("python", "-m", "pip", "install"),
    ("python3", "-m", "pip", "install"),
    ("uv", "pip", "install"),
)
INCLUDES: Final = ("-r", "--requirement", "-c", "--constraint")
#: Words of an installer that lead to files which are not listed here.
WIDE: Final = ("-e", "--editable", "-f", "--find-links", "-t", "--target", "--prefix", "--root", "--config-file")
ARCHIVES: Final = (".whl", ".zip", ".tar", ".gz", ".tgz", ".bz2", ".tbz", ".xz", ".txz", ".lz", ".tlz", ".lzma")
JOINS: Final = ("&&", ";")
SHELL_SIGNS: Final = frozenset("();<>|&")


class BadRecipe(Exception):
    """A file of the user's that says what to install cannot be understood."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` is the file (or `setup`) it comes from; `whole` that it may depend on any file of the snapshot."""

    kind: str
    key: str
    setup: str = ""
    dependencies: tuple[str, ...] = ()
    whole: bool = False
    project: bool = False  #: the snapshot is a package: its folders go on PYTHONPATH, as if it were installed


def recipe_for(
    *, snapshot: str, manifest: Manifest, read: Callable[[str], str], setup: str, env: Mapping[str, str], team: str
) -> Recipe | None:
    """The recipe a job calls for, or None: then it runs with the agent's own interpreter.

    `read` gives the text of a file of the snapshot.
    """
    tree = _Tree(manifest, read)
    if setup.strip():
        named = tree.read_by_setup(setup)
        found = _Found("setup", named, whole=named is None, said=setup, project=tree.has("pyproject.toml"))
    elif tree.has("uv.lock"):
        whole = tree.lock_has_local_packages()
        found = _Found("uv.lock", ("uv.lock", "pyproject.toml"), whole=whole, project=True)
    elif tree.has("requirements.txt"):
        named = tree.included(("requirements.txt",))
        found = _Found("requirements.txt", named, whole=named is None)
    else:
        dependencies = tree.project_dependencies()
        if dependencies == ():
            return None
        found = _Found("pyproject.toml", (), whole=dependencies is None, said=dependencies or (), project=True)
    if found.kind != "setup":
        env = {name: value for name, value in env.items() if name.startswith(ENV_PREFIXES)}
    material = {
        "format": FORMAT,
        "team": team,
        "kind": found.kind,
        "said": found.said,
        "files": {path: tree.files[path] for path in found.files or () if path in tree.files},
        "snapshot": snapshot if found.whole else None,
        "env": dict(sorted(env.items())),
        "host": [sys.version, platform.machine(), sys.base_prefix, *agent_paths()],
    }
    return Recipe(
        kind=found.kind,
        key=hashlib.sha256(json.dumps(material, sort_keys=True).encode()).hexdigest(),
        setup=setup if found.kind == "setup" else "",
        dependencies=found.said if isinstance(found.said, tuple) else (),
        whole=found.whole,
        project=found.project,
    )


def agent_paths() -> tuple[str, ...]:
    """Where this agent's own packages are: an environment sees them behind its own, jax and `penstock.payload` too."""
    own = [*site.getsitepackages(), str(Path(penstock.__file__).parent.parent)]
    return tuple(dict.fromkeys(path for path in own if Path(path).is_dir()))


class _Found(msgspec.Struct, frozen=True):
    kind: str
    files: tuple[str, ...] | None
    whole: bool
    said: str | tuple[str, ...] = ()
    project: bool = False


class _Tree:
    """The files of a snapshot, as far as installers care."""

    def __init__(self, manifest: Manifest, read: Callable[[str], str]) -> None:
        self.files = {file.path: file.sha256 for file in manifest.files}
        self._links = {link.path for link in manifest.links}
        self._read = read

    def has(self, path: str) -> bool:
        if path in self._links:
            raise BadRecipe(f"{path}: is a link; replace it by the file itself")
        return path in self.files

    def included(self, start: tuple[str, ...]) -> tuple[str, ...] | None:
        """Requirement files with all they include; None when one of them reaches for other files of the tree."""
        seen: dict[str, None] = {}
        todo = list(start)
        while todo:
            path = todo.pop()
            if path in seen or "://" in path:
                continue
            if not self.has(path):
                return None  # the installer will say so better than we could
            seen[path] = None
            for line in self._read(path).splitlines():
                words = line.partition(" #")[0].split()
                if not words or words[0].startswith("#"):
                    continue
                further = _include(words)
                if further is not None:
                    todo.append(posixpath.normpath(posixpath.join(posixpath.dirname(path), further)))
                elif any(_wide(word, after) for word, after in zip(words, [*words[1:], ""], strict=True)):
                    return None
        return tuple(sorted(seen))

    def read_by_setup(self, setup: str) -> tuple[str, ...] | None:
        """The files a set-up reads if it does nothing but install named packages; None when it may read any."""
        named: list[str] = []
        for line in setup.splitlines():
            try:
                lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
                lexer.whitespace_split = True
                words = list(lexer)
            except ValueError:
                return None
            if any(SHELL_SIGNS.issuperset(word) and word not in JOINS for word in words):
                return None
            for command in _commands(words):
                found = self._installed(command)
                if found is None:
                    return None
                named += found
        return self.included(tuple(named))

    def project_dependencies(self) -> tuple[str, ...] | None:
        """What `pyproject.toml` asks for; None when only building the project can tell."""
        if not self.has("pyproject.toml"):
            return ()
        content = self._toml("pyproject.toml")
        project = content.get("project")
        if not isinstance(project, dict):
            tool = content.get("tool")
            return None if isinstance(tool, dict) and "poetry" in tool else ()
        dynamic, listed = project.get("dynamic", []), project.get("dependencies", [])
        if isinstance(dynamic, list) and "dependencies" in dynamic:
            return None
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise BadRecipe("pyproject.toml: project.dependencies is not a list of strings")
        if any("file:" in one for one in listed):
            return None
        return tuple(listed)

    def lock_has_local_packages(self) -> bool:
        packages = self._toml("uv.lock").get("package", [])
        if not isinstance(packages, list):
            raise BadRecipe("uv.lock: `package` is not a list; run `uv lock`")
        sources = [package.get("source", {}) for package in packages if isinstance(package, dict)]
        return any(
            source.get(kind, ".") != "."
            for source in sources
            if isinstance(source, dict)
            for kind in ("editable", "directory", "path", "virtual")
        )

    def _toml(self, path: str) -> dict[str, object]:
        try:
            return tomllib.loads(self._read(path))
        except tomllib.TOMLDecodeError as error:
            raise BadRecipe(f"{path}: is not TOML: {error}") from error

    def _installed(self, command: list[str]) -> list[str] | None:
        installer = next((each for each in INSTALLERS if tuple(command[: len(each)]) == each), None)
        if installer is None:
            return None
        words = command[len(installer) :]
        named: list[str] = []
        while words:
            further = _include(words[:2])
            if further is not None:
                named.append(posixpath.normpath(further))
                words = words[1:] if words[0] not in INCLUDES else words[2:]
            elif _wide(words[0], words[1] if len(words) > 1 else "") or set(words[0]) & set("$`*?{"):
                return None
            else:
                words = words[1:]
        return named


def _wide(word: str, after: str) -> bool:
    """Whether a word of an installer's command or of a requirement, before `after`, may name files of the tree."""
    if "://" in word and not word.startswith("file:"):
        return False
    if word in ("-f", "--find-links") and "://" in after and not after.startswith("file:"):
        return False
    plain = word.partition("[")[0]
    return (
        word.partition("=")[0] in WIDE
        or word.startswith((".", "/", "file:", "-e", "-f"))
        or "/" in plain
        or plain.endswith(ARCHIVES)
    )


def _include(words: list[str]) -> str | None:
    """The file in `-r FILE`, `-rFILE` and `--requirement=FILE`, and the same for constraints."""
    first = words[0]
    if first in INCLUDES:
        return words[1] if len(words) > 1 else None
    for option in ("--requirement=", "--constraint=", "-r", "-c"):
        if first.startswith(option):
            return first.removeprefix(option)
    return None


def _commands(words: list[str]) -> list[list[str]]:
    commands: list[list[str]] = [[]]
    for word in words:
        if word in JOINS:
            commands.append([])
        else:
            commands[-1].append(word)
    return [command for command in commands if command]
