"""A house per test; see `house.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.server.house import House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with House(tmp_path) as made:
        yield made


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[House]:
    """A server that makes pools by itself."""
    with House(tmp_path, local_pools=True) as made:
        yield made
