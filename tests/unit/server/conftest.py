"""A house per test, see `house.py`; or a yard of each kind, see `yard.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.server.house import House
from tests.unit.server.yard import Play, player


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with House(tmp_path) as made:
        yield made


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[House]:
    """A server that makes pools by itself."""
    with House(tmp_path, local_pools=True) as made:
        yield made


@pytest.fixture
def cloudy(tmp_path: Path) -> Iterator[House]:
    """A server that has a cloud beside local slices; it may use the zones of America."""
    with House(tmp_path, providers=("local", "tpu_vm"), cloud_zones=("us-*",)) as made:
        yield made


@pytest.fixture(params=["memory", "directory"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Play:
    return player(request.param, tmp_path)
