"""Who is in which place of a fleet: which places are empty, and which slices are in none.

`growth.upkeep` fills the one, `scaling` lets go of the other; both read here, so that they agree. What places a fleet
has is decided when it is made or resized (`domain.places`), never by a plan. It must not decide what to do.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import msgspec

from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Pool, Slice
from penstock.domain.places import assign, has, numbers
from penstock.planner.snapshot import Snapshot


class TooMany(NamedTuple):
    """So many of these slices have no place in their fleet."""

    spare: int
    slices: list[Slice]
    why: str


def empty(snapshot: Snapshot, pool: Pool) -> list[tuple[str, int]]:
    """The places of a fleet that nobody is in, zone by zone. One that drains is as good as gone."""
    known, staying = _known(snapshot, pool), _staying(snapshot, pool)
    found: list[tuple[str, int]] = []
    for zone in pool.zones:
        free, unnumbered = _free(numbers(known, zone), staying[zone])
        found += [(zone, number) for number in free[: max(0, len(free) - len(unnumbered))]]
    return found


def too_many(snapshot: Snapshot, pool: Pool) -> list[TooMany]:
    """Slices that stay and have no place: their number is not the fleet's, or somebody else is in it."""
    known, staying = _known(snapshot, pool), _staying(snapshot, pool)
    found: list[TooMany] = []
    for zone, here in sorted(staying.items()):
        places = numbers(known, zone)
        why = f"pool {pool.name} has more than {len(places)} in {zone}"
        in_place: dict[int, list[Slice]] = defaultdict(list)
        for slice in here:
            if slice.number is not None and not has(known, zone, slice.number):
                found.append(TooMany(1, [slice], f"fleet {pool.name} was made smaller"))
            elif slice.number is not None:
                in_place[slice.number].append(slice)
        found += [TooMany(len(sharing) - 1, sharing, why) for sharing in in_place.values() if len(sharing) > 1]
        free, unnumbered = _free(places, here)
        if len(unnumbered) > len(free):
            found.append(TooMany(len(unnumbered) - len(free), unnumbered, why))
    return found


def _staying(snapshot: Snapshot, pool: Pool) -> dict[str, list[Slice]]:
    """By zone, the slices of a fleet that count and stay."""
    found: dict[str, list[Slice]] = defaultdict(list)
    for slice in snapshot.pool_slices.get(pool.name, {}).values():
        if slice.state is not SliceState.DRAINING:
            found[slice.zone].append(slice)
    return found


def _free(places: tuple[int, ...], here: list[Slice]) -> tuple[list[int], list[Slice]]:
    """The numbers that no slice has, and the slices that have none: those of a pool that was made a fleet later."""
    taken = {slice.number for slice in here}
    return [number for number in places if number not in taken], [slice for slice in here if slice.number is None]


def _known(snapshot: Snapshot, pool: Pool) -> Pool:
    """The fleet with its places. One that an earlier release made has none until it is resized; they are worked out
    anew each time, from the slices it has."""
    if pool.places or not pool.per_zone:
        return pool
    pools = dict(snapshot.pools)
    for name in sorted(pools):
        other = pools[name]
        if other.per_zone and not other.places and not other.deleted:
            places = assign(other, None, pools.values(), snapshot.slices.values())
            pools[name] = msgspec.structs.replace(other, places=places)
    return pools[pool.name]
