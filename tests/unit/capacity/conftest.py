"""A machine for the tests of local slices; what they leave running is ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.capacity import processes
from penstock.capacity.slice_files import SliceFiles
from tests.unit.capacity.local_house import House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / "slices")
    yield house
    files = SliceFiles(house.folder)
    for name in files.names():
        # Also what an agent left that is no agent of the slice any more: nothing marks it but that agent's note.
        roots = [*(agent.process for agent in files.agents(name)), *house.family(name)]
        processes.end(roots, files.of(name), 10)
