"""What the tests of commands share: a stand-in server, a state directory of their own, no settings of the machine's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.stand_in import StandIn, serving


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty state directory; nothing says where a server is."""
    place = tmp_path / "home"
    monkeypatch.setenv("PENSTOCK_HOME", str(place))
    for name in ("PENSTOCK_URL", "PENSTOCK_TOKEN", "PENSTOCK_CONFIG", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return place


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A stand-in that the commands talk to."""
    with serving() as known:
        monkeypatch.setenv("PENSTOCK_URL", known.url)
        monkeypatch.setenv("PENSTOCK_TOKEN", "token")
        yield known


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a program in it, and the current one."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "train.py").write_text("print('step')\n")
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """The words that name a tiny model and its data."""
    from examples.extract_tiny.make import make  # here, because most commands need nothing of what it loads

    make(tmp_path / "in")
    words = ["--model", str(tmp_path / "in" / "model"), "--data", str(tmp_path / "in" / "docs.jsonl")]
    return [*words, "--id", "id", "--width", "256", "--sites", "resid_post:1", "--unit-rows", "100"]
