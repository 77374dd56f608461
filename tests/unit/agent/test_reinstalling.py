"""The agent's own Python put back from its bundle: whole and at once, or left as it was."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from penstock.agent.host import Host, Place
from penstock.agent.link import Link, Silent
from penstock.agent.record import Record
from penstock.agent.reinstalling import reinstaller
from penstock.agent.surroundings import CannotFix
from penstock.wiring.clock import SystemClock


def packed() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, mode in (("bin/python3", 0o755), ("lib/module.py", 0o644)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = 3, mode
            archive.addfile(entry, io.BytesIO(b"new"))
    return made.getvalue()


class Wire(Link):
    """A server that has one bundle, or cannot be reached."""

    def __init__(self, content: bytes | None) -> None:
        super().__init__("http://penstock.example.org:8080")
        self._content = content
        self.asked: list[str] = []

    @override
    async def call(self, method: str, path: str, body: Any = b"", *, into: Path | None = None, **_: Any) -> bytes:
        self.asked.append(f"{method} {path}")
        if self._content is None:
            raise Silent("nobody there")
        assert into is not None
        await asyncio.to_thread(into.write_bytes, self._content)
        return b""


def put_back(folder: Path, wire: Wire, sha256: str) -> Path:
    """A bundle that somebody spoilt, after it was put back."""
    bundle = folder / f"bundle-{sha256}"
    (bundle / "bin").mkdir(parents=True)
    (bundle / "bin/python3").write_text("old")
    (bundle / "stray").touch()
    host = Host(Place(slice="s1", host=0, provider_id="p"), folder, wire, SystemClock(), Record(incarnation="i"))

    async def story() -> None:
        mend = reinstaller(host, bundle / "bin/python3.11")
        assert mend is not None
        await asyncio.to_thread(mend)

    asyncio.run(story())
    return bundle


def test_what_was_packed_takes_the_place_of_what_is_there(tmp_path: Path) -> None:
    sha256 = hashlib.sha256(packed()).hexdigest()
    wire = Wire(packed())
    bundle = put_back(tmp_path, wire, sha256)
    assert wire.asked == [f"GET /v1/agent/bundle/{sha256}?slice=s1"]
    assert sorted(str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()) == [
        "bin/python3",
        "lib/module.py",
    ]
    assert (bundle / "bin/python3").read_text() == "new"
    assert (bundle / "bin/python3").stat().st_mode & 0o777 == 0o755
    assert [path.name for path in tmp_path.iterdir()] == [bundle.name], "nothing is left lying about"


@pytest.mark.parametrize(
    ("content", "of", "why"),
    [
        (None, packed(), "cannot be fetched: nobody there"),
        (packed()[:-9], packed(), "did not arrive whole"),
        (b"no archive", b"no archive", "cannot be unpacked"),
    ],
)
def test_what_cannot_be_put_back_stays_as_it_is(tmp_path: Path, content: bytes | None, of: bytes, why: str) -> None:
    sha256 = hashlib.sha256(of).hexdigest()
    with pytest.raises(CannotFix, match=why):
        put_back(tmp_path, Wire(content), sha256)
    assert (tmp_path / f"bundle-{sha256}" / "bin/python3").read_text() == "old"
    assert (tmp_path / f"bundle-{sha256}" / "stray").exists()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_take_its_place_leaves_the_old_one_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError(5, "Input/output error")
        return renamed(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    sha256 = hashlib.sha256(packed()).hexdigest()
    with pytest.raises(OSError, match="Input/output error"):
        put_back(tmp_path, Wire(packed()), sha256)
    assert (tmp_path / f"bundle-{sha256}" / "bin/python3").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_python_that_is_no_bundles_is_not_ours_to_put_back(tmp_path: Path) -> None:
    host = Host(
        Place(slice="s1", host=0, provider_id="p"), tmp_path, Wire(None), SystemClock(), Record(incarnation="i")
    )
    assert reinstaller(host, tmp_path / "bin/python3") is None
