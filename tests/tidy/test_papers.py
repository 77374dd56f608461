"""Rules about what is not Python: locks without addresses, no registry hosts, and documents that stay true.

Reads the tracked files as text. `make check` and `make test` run it.
"""

import re
import subprocess
from pathlib import Path

import pytest

from penstock.cli.main import COMMANDS, ExitCode
from tests.tidy.tracked import ROOT, tracked_files

# Joined here so that this file does not name them either.
REGISTRY_HOSTS = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npmjs", "org"),
        ("yarnpkg", "com"),
        ("crates", "io"),
        ("proxy", "golang", "org"),
        ("anaconda", "org"),
    )
)
LOCKS = sorted((ROOT / "locks").glob("*.txt"))


def text_of(path: Path) -> str:
    return path.read_text(errors="replace")


def test_no_file_names_a_package_registry() -> None:
    naming = [
        f"{path.relative_to(ROOT)}: {host}"
        for path in tracked_files()
        for host in REGISTRY_HOSTS
        if host in text_of(path)
    ]
    assert not naming, f"package indexes are the machine's business, not the project's: {naming}"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_locks_hold_hashes_and_no_addresses(lock: Path) -> None:
    text = text_of(lock)
    assert "://" not in text
    assert not re.search(r"^\s*--(extra-)?index-url|^\s*--find-links|^\s*-[if] ", text, re.MULTILINE)
    pins = re.findall(r"^[a-z0-9][\w.\[\]-]*==\S+.*$", text, re.MULTILINE)
    bare = [pin for pin in pins if not pin.endswith("\\")]
    assert pins
    assert not bare, f"pinned without a hash: {bare}"


def test_the_locks_are_all_there() -> None:
    assert {"bench.txt", "client.txt", "dev.txt"} <= {path.name for path in LOCKS}


def test_the_bare_install_stays_within_its_package_budget() -> None:
    pins = re.findall(r"^[a-z0-9][\w.-]*==", text_of(ROOT / "locks" / "client.txt"), re.MULTILINE)
    assert 0 < len(pins) <= 19  # twenty with penstock itself


def test_no_other_lock_format_is_committed() -> None:
    banned = re.compile(r"uv\.lock|poetry\.lock|Pipfile\.lock|pylock.*\.toml")
    assert not [path.name for path in tracked_files() if banned.fullmatch(path.name)]


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_readme_shows_both_commands(command: str) -> None:
    assert re.search(rf"^{command}\b", text_of(ROOT / "README.md"), re.MULTILINE)


def test_readme_explains_every_exit_code() -> None:
    explained = {int(code) for code in re.findall(r"^\| (\d+) \|", text_of(ROOT / "README.md"), re.MULTILINE)}
    assert explained == {int(code) for code in ExitCode}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_readme_shows_every_command(name: str) -> None:
    assert f"`tpu {name}" in text_of(ROOT / "README.md")


def test_architecture_opens_with_a_table_of_places_that_exist() -> None:
    opening = text_of(ROOT / "ARCHITECTURE.md").split("\n## ")[1]
    assert opening.startswith("Where is")
    places = re.findall(r"^\|[^|]+\| `([^`]+)`", opening, re.MULTILINE)
    assert len(places) > 10
    missing = [place for place in places if not (ROOT / place).exists()]
    assert not missing, f"ARCHITECTURE.md points to nothing: {missing}"


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in tracked_files()
        if path.suffix == ".md"
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(path))
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert not broken, f"links to files that are not there: {broken}"


def test_make_help_lists_every_target_people_call() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("setup", "demo", "test", "check", "sim-check", "bench-core", "soak", "lock", "clean"):
        assert f"make {target} " in shown
