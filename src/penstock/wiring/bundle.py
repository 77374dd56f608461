"""Packs what a bare host needs to become ours: one archive with a Python, its libraries, the agent and jobs' imports.

The server builds it once per content, keeps it beside its state, and serves it by its hash; hosts fetch it in their
startup script, which needs a shell, curl and tar, no package index and no Python of the image. The Python is the
server's own, made to find its libraries beside itself. It needs the C library of the machine it was built on or a
newer one (`built_for`), which the startup script checks. It must not hold settings, tokens or anything of a user.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import io
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from typing_extensions import override

from penstock.wiring import elf

#: Never on a host: the machine's own C library must be the one everything else uses.
_OF_THE_SYSTEM: Final = re.compile(r"(ld-linux.*|lib(c|m|dl|pthread|rt|util|resolv|nsl|anl|mvec|nss_.*))\.so.*")
_LEFT_OUT: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3",
     "__pycache__", "__phello__", "pydoc_data"}
)  # fmt: skip
_NO_SCREENS: Final = ("_tkinter", "_curses_panel", "_test", "xxlimited", "_ctypes_test")
_KEPT: Final = 3  #: bundles
_LEVEL: Final = 1  #: of gzip: five times as fast as the default, a tenth larger


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """A packed archive: its file, its hash and size, and the oldest C library that can run it."""

    path: str
    sha256: str
    size: int
    built_for: str


def build(directory: Path, packages: Iterable[str]) -> Bundle:
    """The bundle for this server's own code and Python, from `directory` where it was built before."""
    parts = dict(sorted(_parts(tuple(packages))))
    key = _key(parts)
    directory.mkdir(parents=True, exist_ok=True)
    known = directory / f"{key}.json"
    if known.is_file():
        bundle = msgspec.json.decode(known.read_bytes(), type=Bundle)
        if Path(bundle.path).is_file() and Path(bundle.path).stat().st_size == bundle.size:
            return bundle
    archive = directory / f"{key}.tar.gz"
    partial = directory / f"{key}.partial-{os.getpid()}"
    digest = hashlib.sha256()
    with partial.open("wb") as file:
        _write(_Hashing(file, digest), parts)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(archive)
    bundle = Bundle(path=str(archive), sha256=digest.hexdigest(), size=archive.stat().st_size, built_for=_c_library())
    partial.write_bytes(msgspec.json.encode(bundle))
    partial.replace(known)
    _forget_old(directory)
    return bundle


def find(directory: Path, sha256: str) -> Path | None:
    """The archive with this hash, if it was built here and is still there."""
    for known in directory.glob("*.json"):
        bundle = msgspec.json.decode(known.read_bytes(), type=Bundle)
        if bundle.sha256 == sha256 and Path(bundle.path).is_file():
            return Path(bundle.path)
    return None


def _forget_old(directory: Path) -> None:
    """Hosts on their way may still ask for the last few; older ones only fill the disk."""
    known = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in known[_KEPT:]:
        old.with_suffix(".tar.gz").unlink(missing_ok=True)
        old.unlink(missing_ok=True)


class _Hashing(io.RawIOBase):
    """Writes through, and hashes what it writes."""

    def __init__(self, file: io.BufferedWriter, digest: hashlib._Hash) -> None:
        self._file = file
        self._digest = digest

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, data: object) -> int:
        block = bytes(memoryview(data))  # type: ignore[arg-type]
        self._digest.update(block)
        return self._file.write(block)


def _write(out: io.RawIOBase, parts: dict[str, Path | bytes]) -> None:
    """The archive: the same bytes for the same parts, whenever and by whomever it is made."""
    with (
        gzip.GzipFile(fileobj=out, mode="wb", compresslevel=_LEVEL, mtime=0, filename="") as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, part in parts.items():
            data = part if isinstance(part, bytes) else _bytes(name, part)
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            entry.mode = 0o755 if name.startswith("bin/") else 0o644
            archive.addfile(entry, io.BytesIO(data))


def _bytes(name: str, file: Path) -> bytes:
    """A file as it goes into the bundle: programs and libraries look for others beside themselves."""
    data = file.read_bytes()
    if not elf.is_elf(data) or "/site-packages/" in name:
        return data  # wheels find their own
    depth = name.count("/")
    return elf.relocate(data, "$ORIGIN/../lib" if name.startswith("bin/") else "$ORIGIN" + "/.." * (depth - 1))


def _key(parts: dict[str, Path | bytes]) -> str:
    """What the parts are, cheaply: names, sizes and times of files, and our own code by content."""
    digest = hashlib.sha256(f"{sys.version} {platform.machine()}".encode())
    for name, part in parts.items():
        if isinstance(part, bytes):
            digest.update(f"{name}\0".encode() + part)
        else:
            told = part.stat()
            digest.update(f"{name}\0{told.st_size}\0{told.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _parts(packages: tuple[str, ...]) -> Iterator[tuple[str, Path | bytes]]:
    """Every file of the bundle by its name in it."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    program = Path(os.path.realpath(sys.executable))
    yield f"bin/{version}", program
    for name in ("bin/python", "bin/python3"):
        yield name, f'#!/bin/sh\nexec "$(dirname "$0")/{version}" "$@"\n'.encode()
    library = Path(sysconfig.get_path("stdlib"))
    dynamic = [program]
    for file in _files(library, _LEFT_OUT):
        inside = file.relative_to(library)
        if inside.parts[0].startswith("config-") or file.name.startswith(_NO_SCREENS):
            continue
        if file.suffix == ".so":
            dynamic.append(file)
        yield f"lib/{version}/{inside}", file
    for name, file in _distributions(("penstock", *packages)):
        if ".so" in file.name:
            dynamic.append(file)
        yield f"lib/{version}/site-packages/{name}", file
    for needed in sorted(_libraries(dynamic), key=str):
        yield f"lib/{needed.name}", needed


def _files(directory: Path, left_out: frozenset[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if name not in left_out)
        for name in sorted(names):
            file = Path(folder, name)
            if file.suffix not in (".pyc", ".a") and file.is_file():
                yield file


def _libraries(programs: list[Path]) -> set[Path]:
    """Shared libraries of this system that the programs need and that a bare host may not have."""
    said = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False).stdout
    found = {Path(match) for match in re.findall(r"=> (/\S+)", said)}
    own = Path(sysconfig.get_path("purelib"))  # what lies in a wheel travels with it
    return {path for path in found if own not in path.parents and _OF_THE_SYSTEM.fullmatch(path.name) is None}


def _distributions(names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Every file of the packages and of what they need, as the packages' own records say."""
    here = Path(sysconfig.get_path("purelib"))
    for name in _closure(names):
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # wanted by a marker that does not hold here, or not installed at all
        if name == "penstock":
            import penstock

            code = Path(penstock.__file__).parent
            yield from (
                (f"penstock/{file.relative_to(code)}", file) for file in _files(code, frozenset({"__pycache__"}))
            )
            continue
        for recorded in distribution.files or ():
            file = Path(os.path.normpath(str(distribution.locate_file(recorded))))
            if file.suffix != ".pyc" and file.is_file() and here in file.parents:
                yield str(file.relative_to(here)), file


def _closure(names: Iterable[str]) -> list[str]:
    """The packages and all they need without extras."""
    found: set[str] = set()
    open_ones = list(names)
    while open_ones:
        name = re.sub(r"[-_.]+", "-", open_ones.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            wanted = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in wanted:
            requirement, _, marker = line.partition(";")
            if "extra" not in marker:
                open_ones.append(re.split(r"[\s\[<>=!~(]", requirement.strip(), maxsplit=1)[0])
    return sorted(found)


def _c_library() -> str:
    return platform.libc_ver()[1]


def main() -> None:
    """`wiring.cloud` runs it as a process of its own: packing takes a core for half a minute, and may be cut short."""
    try:
        made = build(Path(sys.argv[1]), sys.argv[2:])
    except (OSError, ValueError, elf.NotRelocatable) as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(made))


if __name__ == "__main__":
    main()
