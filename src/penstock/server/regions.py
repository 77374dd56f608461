"""Which root holds an attempt's checkpoints: its region's where the settings name one, else the main root.

`server.checkpoints` writes and reads there, `server.transfers` copies from one to another, `server.cleaning` clears all
of them. Only checkpoints are kept by region: snapshots, logs, results and fences are small, and stay in the main root.
It must not move anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.domain.catalogue_egress import region_of
from penstock.ports.objects import Kept, Stock


class Root(NamedTuple):
    """A root and the region it is in; "": nobody said."""

    region: str
    objects: Stock


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """All roots of an installation. `others` are those of regions whose root is not the main one."""

    main: Root
    others: Mapping[str, Stock] = field(default_factory=dict)

    def at(self, zone: str) -> Root:
        """Where checkpoints of attempts in a zone belong."""
        region = region_of(zone)
        found = self.others.get(region)
        return self.main if found is None else Root(region, found)

    def all(self, first: Root | None = None) -> tuple[Root, ...]:
        """Each root once; one of them before the rest."""
        roots = (self.main, *(Root(region, objects) for region, objects in self.others.items()))
        return roots if first is None else (first, *(root for root in roots if root.objects is not first.objects))

    async def survey(self, prefix: str) -> tuple[Kept, ...]:
        """What lies under a prefix in any of them."""
        surveys = [await root.objects.survey(prefix) for root in self.all()]
        return tuple(kept for found in surveys for kept in found)

    async def remove(self, folder: str) -> None:
        """Delete a folder everywhere; the main root, where people look first, comes last."""
        for root in reversed(self.all()):
            await root.objects.remove(folder)
