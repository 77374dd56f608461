"""Rules about the Python tree that no linter knows: docstrings, sizes, names, dead modules, the import table.

Reads the files that git tracks or would track, parses them, and compares. `make check` and `make test` run
it. A rule that fails names the file and what to do; the way out is to mend the file, never to add an
exception here.
"""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.tidy.tracked import ROOT, tracked_files

PACKAGE = ROOT / "src" / "penstock"
MODULE_LINES_MAX = 500  # one screenful of outline; past this a module does two things
FUNCTION_LINES_MAX = 70  # fits on one screen
DEPTH_MAX = 3  # folders under penstock/: deeper trees hide their order
DOCSTRING_WORDS_MIN = 5
BANNED_WORDS = frozenset({"base", "common", "helper", "helpers", "manager", "util", "utils"})

# `tools/with_postgres` is Python too, though its name does not say so.
PYTHON_FILES = [path for path in tracked_files() if path.suffix == ".py" or path.name == "with_postgres"]
MODULES = [path for path in PYTHON_FILES if path.is_relative_to(PACKAGE)]


def where(path: Path, line: int | None = None) -> str:
    shown = str(path.relative_to(ROOT))
    return shown if line is None else f"{shown}:{line}"


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def words_of(name: str) -> set[str]:
    """`LeaseManager` and `lease_manager` both give {lease, manager}."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def config() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def test_the_tree_is_seen() -> None:
    assert PACKAGE / "cli" / "main.py" in MODULES
    assert Path(__file__) in PYTHON_FILES


def test_every_module_opens_with_a_docstring() -> None:
    bare = [
        where(path)
        for path in PYTHON_FILES
        if len((ast.get_docstring(parsed(path)) or "").split()) < DOCSTRING_WORDS_MIN
    ]
    assert not bare, f"say what it decides, who calls it and what it must not do: {bare}"


def test_modules_are_short() -> None:
    lines = {where(path): len(path.read_text().splitlines()) for path in PYTHON_FILES}
    long = {name: count for name, count in lines.items() if count > MODULE_LINES_MAX}
    assert not long, f"split modules over {MODULE_LINES_MAX} lines: {long}"


def test_functions_are_short() -> None:
    long = {
        f"{where(path, node.lineno)} {node.name}": node.end_lineno - node.lineno + 1
        for path in PYTHON_FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    }
    assert not long, f"split functions over {FUNCTION_LINES_MAX} lines: {long}"


def test_no_module_folder_or_class_has_an_empty_name() -> None:
    vague = [
        where(path)
        for path in PYTHON_FILES
        if any(words_of(part) & BANNED_WORDS for part in path.relative_to(ROOT).with_suffix("").parts)
    ]
    vague += [
        f"{where(path, node.lineno)} class {node.name}"
        for path in PYTHON_FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef) and words_of(node.name) & BANNED_WORDS
    ]
    assert not vague, f"these names say nothing ({', '.join(sorted(BANNED_WORDS))}): {vague}"


def test_folders_are_shallow() -> None:
    deep = [where(path) for path in MODULES if len(path.relative_to(PACKAGE).parts) - 1 > DEPTH_MAX]
    assert not deep, f"more than {DEPTH_MAX} folders under penstock/: {deep}"


def test_every_folder_is_a_package() -> None:
    folders = {path.parent for path in MODULES}
    missing = [where(folder) for folder in folders if folder / "__init__.py" not in MODULES]
    assert not missing, f"import-linter does not see folders without __init__.py: {missing}"


def references(path: Path) -> set[str]:
    """Names of penstock modules that this file imports, or names as `module:object` in a lazy table."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Import():
                found.update(alias.name for alias in node.names)
            case ast.ImportFrom(module=str(source)):
                found.add(source)
                found.update(f"{source}.{alias.name}" for alias in node.names)
            case ast.Constant(value=str(text)) if re.fullmatch(r"penstock(\.\w+)+:\w+", text):
                found.add(text.partition(":")[0])
            case ast.Constant(value=str(text)):
                # A program started by its text, such as the warm parent's.
                found.update(re.findall(r"^from (penstock(?:\.\w+)+) import", text, re.MULTILINE))
            case _:
                pass
    return found


def test_no_module_is_dead() -> None:
    """Alive is what the entry points reach through imports and lazy tables; tests keep nothing alive."""
    by_name = {module_name(path): path for path in MODULES}
    project = config()["project"]
    assert isinstance(project, dict)
    reached: set[str] = set()
    front = {target.partition(":")[0] for target in project["scripts"].values()}
    front |= {name for name in by_name if name.endswith(".__main__")}
    while front:
        name = front.pop()
        if name in reached or name not in by_name:
            continue
        reached.add(name)
        front |= references(by_name[name])
        front.add(name.rpartition(".")[0])  # importing a module runs the package above it
    dead = sorted(set(by_name) - reached)
    assert not dead, f"nothing that `tpu` can run imports these; use them or remove them: {dead}"


def contracts(kind: str) -> list[dict[str, object]]:
    tool = config()["tool"]
    assert isinstance(tool, dict)
    return [contract for contract in tool["importlinter"]["contracts"] if contract["type"] == kind]


def folders_of_package() -> set[str]:
    return {path.relative_to(PACKAGE).parts[0] for path in MODULES if len(path.relative_to(PACKAGE).parts) > 1}


def test_the_package_root_holds_only_folders() -> None:
    loose = [where(path) for path in MODULES if path.parent == PACKAGE and path.name != "__init__.py"]
    assert not loose, f"modules belong into a folder that the import table knows: {loose}"


def test_every_folder_has_a_place_in_the_order() -> None:
    (layers,) = contracts("layers")
    assert layers["exhaustive"] is True
    assert isinstance(layers["layers"], list)
    named = {name for layer in layers["layers"] for name in re.findall(r"\w+", layer)}
    assert named == folders_of_package(), "pyproject.toml, the layers contract"


def test_every_folder_says_who_may_import_it() -> None:
    named = {
        module.removeprefix("penstock.")
        for contract in contracts("protected")
        for module in (contract["protected_modules"] if isinstance(contract["protected_modules"], list) else ())
    }
    assert folders_of_package() <= named, "pyproject.toml, one protected contract per folder"


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent == PACKAGE / "cli"], ids=where)
def test_commands_load_wiring_only_inside_functions(path: Path) -> None:
    """Import-linter cannot tell a lazy import from an eager one, and an eager one makes `tpu --help` slow."""
    eager = [
        where(path, node.lineno)
        for node in parsed(path).body
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock.wiring"))
        or (isinstance(node, ast.ImportFrom) and node.module == "penstock" and _names(node) & {"wiring"})
        or (isinstance(node, ast.Import) and any(name.startswith("penstock.wiring") for name in _names(node)))
    ]
    assert not eager, f"import wiring inside the function that needs it: {eager}"


def _names(node: ast.Import | ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}
