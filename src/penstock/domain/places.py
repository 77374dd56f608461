"""Which places a fleet has: in each of its zones so many numbers, shown to people as `tpu-{zone}-{number}`.

`controller.settings` asks it when a fleet is made or resized and stores the answer with the pool, in one transaction:
a place belongs to its fleet from then on, whoever is in it, until the fleet is made smaller or deleted. It must not
look at anything but its arguments. docs/adr/0036-places-belong-to-fleets.md tells why numbers are stored.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from itertools import count, islice

from penstock.domain.lifecycle import COUNTED_SLICE_STATES, SliceState
from penstock.domain.nouns import Pool, Slice


def numbers(pool: Pool, zone: str) -> tuple[int, ...]:
    """The places of a fleet in a zone, ascending; none where it is not."""
    return pool.places[pool.zones.index(zone)] if pool.places and zone in pool.zones else ()


def has(pool: Pool, zone: str, number: int) -> bool:
    """Whether this is a place of the fleet. Asked for every idle slice in every round, so it does not read them all."""
    known = numbers(pool, zone)
    at = bisect_left(known, number)
    return at < len(known) and known[at] == number


def assign(
    pool: Pool, before: Pool | None, pools: Iterable[Pool], slices: Collection[Slice]
) -> tuple[tuple[int, ...], ...]:
    """The places of a fleet in each of its zones: the lowest it had before are kept, new ones are the lowest free.

    Where it had none, the numbers its slices have come first. `slices` are all that are not gone: one that is leaving
    another fleet still shows its number.
    """
    others = [other for other in pools if other.name != pool.name]
    return tuple(
        _in_zone(pool, zone, () if before is None else numbers(before, zone), others, slices) for zone in pool.zones
    )


def _in_zone(
    pool: Pool, zone: str, before: tuple[int, ...], others: Iterable[Pool], slices: Iterable[Slice]
) -> tuple[int, ...]:
    wanted = pool.per_zone or 0
    foreign: set[int] = set()
    own = set(before)
    for other in others:
        foreign.update(numbers(other, zone))
    for slice in slices:
        if slice.zone != zone or slice.number is None or slice.state is SliceState.GONE:
            continue
        if slice.pool != pool.name:
            foreign.add(slice.number)
        elif not before and slice.state in COUNTED_SLICE_STATES:
            own.add(slice.number)
    kept = sorted(own)[:wanted]
    fresh = (number for number in count() if number not in own and number not in foreign)
    return tuple(sorted([*kept, *islice(fresh, wanted - len(kept))]))
