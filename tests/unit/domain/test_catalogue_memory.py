"""Memory of devices: as the pages say, by what jax calls a device, and unknown where no page was read."""

from __future__ import annotations

import pytest

from penstock.domain import catalogue
from penstock.domain.catalogue_memory import FACTS, GIB, device_memory, devices_per_host


@pytest.mark.parametrize(
    ("name", "memory", "devices"),
    [
        ("v5e-8", 16 * 10**9, 8),
        ("v5e-16", 16 * 10**9, 4),
        ("v5p-8", 95 * GIB, 4),
        ("v6e-1", 32 * GIB, 1),
        ("v4-16", 32 * GIB, 4),
        ("v3-8", 16 * GIB, 8),  # two devices on each of four chips
        ("tpu7x-8", 96 * GIB, 8),
        ("v2-8", None, 8),
    ],
)
def test_what_one_device_has(name: str, memory: int | None, devices: int) -> None:
    found = catalogue.find(name)
    assert device_memory(found) == memory
    assert devices_per_host(found) == devices


def test_every_size_has_a_source_and_a_day() -> None:
    assert set(FACTS) <= set(catalogue.generations())
    for fact in FACTS.values():
        assert fact.source.address.startswith("https://")
        assert fact.source.read_on == "2026-11-15"
