"""The agent bundle: the same bytes for the same parts, found by its hash, and old ones make room."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import msgspec
import pytest

from penstock.wiring import bundle, elf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundles")


@pytest.fixture(scope="module")
def made(folder: Path) -> bundle.Bundle:
    return bundle.build(folder, ("msgspec", "no-such-package"))


def test_it_is_what_its_hash_says_and_built_once(folder: Path, made: bundle.Bundle) -> None:
    content = Path(made.path).read_bytes()
    assert hashlib.sha256(content).hexdigest() == made.sha256
    assert len(content) == made.size
    stamp = Path(made.path).stat().st_mtime_ns
    assert bundle.build(folder, ("msgspec", "no-such-package")) == made
    assert Path(made.path).stat().st_mtime_ns == stamp
    assert bundle.find(folder, made.sha256) == Path(made.path)
    assert bundle.find(folder, "0" * 64) is None


def test_it_holds_a_python_the_agent_and_nothing_of_ours_but_code(made: bundle.Bundle) -> None:
    with tarfile.open(made.path) as archive:
        names = archive.getnames()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert {f"bin/{version}", "bin/python", "bin/python3", f"lib/{version}/os.py"} <= set(names)
    assert f"lib/{version}/site-packages/penstock/agent/loop.py" in names
    assert any(name.startswith(f"lib/{version}/site-packages/msgspec/") for name in names)
    private = (".db", "/token", "/key", "penstock.toml")
    assert not [name for name in names if name.endswith(private)]
    assert not [name for name in names if name.startswith("lib/libc.so") or "ld-linux" in name]


def test_it_runs_from_where_it_is_unpacked(made: bundle.Bundle, tmp_path: Path) -> None:
    with tarfile.open(made.path) as archive:
        archive.extractall(tmp_path, filter="fully_trusted")
    code = "import sys, ssl, penstock.agent.loop as it; print(sys.prefix, it.__file__)"
    done = subprocess.run(
        [tmp_path / "bin/python", "-I", "-c", code],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == str(tmp_path)
    assert done.stdout.split()[1].startswith(str(tmp_path))
    # What sets up a job's own packages on a host.
    made_there = subprocess.run(
        [tmp_path / "bin/python", "-m", "venv", tmp_path / "env"], capture_output=True, text=True, check=False
    )
    assert made_there.returncode == 0, made_there.stdout + made_there.stderr
    pip = subprocess.run([tmp_path / "env/bin/pip", "--version"], capture_output=True, text=True, check=False)
    assert str(tmp_path / "env") in pip.stdout


def test_only_the_last_few_are_kept(tmp_path: Path) -> None:
    for number in range(5):
        archive = tmp_path / f"{number}.tar.gz"
        archive.write_bytes(b"x")
        known = bundle.Bundle(path=str(archive), sha256=str(number), size=1, built_for="2.31")
        (tmp_path / f"{number}.json").write_bytes(msgspec.json.encode(known))
        os.utime(tmp_path / f"{number}.json", (number, number))
    bundle._forget_old(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.tar.gz")) == ["2.tar.gz", "3.tar.gz", "4.tar.gz"]


def test_only_programs_are_relocated_and_never_to_a_longer_path() -> None:
    assert elf.relocate(b"#!/bin/sh\n", "$ORIGIN") == b"#!/bin/sh\n"
    program = Path(os.path.realpath(sys.executable)).read_bytes()
    assert elf.is_elf(program)
    changed = elf.relocate(program, "$ORIGIN")
    assert len(changed) == len(program)
    if changed != program:  # it has a search path
        with pytest.raises(elf.NotRelocatable):
            elf.relocate(program, "x" * 10_000)
