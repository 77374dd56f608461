"""How much memory each TPU generation's devices have, for plans of what fits.

`wiring.extraction` asks for a dry run. Sizes are those of Google's pages, per chip, with the day they were read; what
was not read is unknown, and unknown is never a likely value. What a runtime keeps of it for itself is the asker's
matter. It does no I/O.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.domain.catalogue import Accelerator
from penstock.domain.catalogue_table import Source

GIB: Final = 1 << 30


class MemoryFact(NamedTuple):
    """Bytes of one chip, and where that was read."""

    chip: int
    source: Source


def _page(name: str, note: str) -> Source:
    return Source(
        title=f"Google Cloud, TPU {name}",
        address=f"https://docs.cloud.google.com/tpu/docs/{name}",
        read_on="2026-11-15",
        note=note,
    )


_COMPARED = _page("tpu7x", "stored copy; its table has v5p, v6e and 7x side by side, in GiB")
#: By generation. v2 is missing: no page of it was read.
FACTS: Final = {
    "v3": MemoryFact(32 * GIB, _page("v3", "stored copy; per chip, of which each of two devices has half")),
    "v4": MemoryFact(32 * GIB, _page("v4", "stored copy")),
    "v5e": MemoryFact(16 * 10**9, _page("v5e", "stored copy; it says GB, which may be GiB: the smaller is taken")),
    "v5p": MemoryFact(95 * GIB, _COMPARED),
    "v6e": MemoryFact(32 * GIB, _COMPARED),
    "7x": MemoryFact(192 * GIB, _COMPARED),
}


def device_memory(accelerator: Accelerator) -> int | None:
    """Bytes of each device as jax counts them: a chip's, or half of it where a chip is two devices."""
    fact = FACTS.get(accelerator.generation)
    return None if fact is None else fact.chip * accelerator.chips // accelerator.jax_devices


def devices_per_host(accelerator: Accelerator) -> int:
    """As jax counts them."""
    return accelerator.jax_devices // accelerator.hosts
