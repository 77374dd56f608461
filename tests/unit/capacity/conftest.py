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
        processes.end([agent.process for agent in files.agents(name)], files.of(name), 10)
