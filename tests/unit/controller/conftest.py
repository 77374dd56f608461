"""The stage the controller's verbs are tried on; what must always hold is checked when a test has passed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.controller.stage import Stage


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    made.check_projection()  # from here on it follows the events
    try:
        yield made
        made.check()
    finally:
        made.finish()
