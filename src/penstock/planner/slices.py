"""What can be said of a slice, or of a pool's slices, at a glance: held, silent, unlisted, leaving, counted.

Admission, recovery and scaling ask these questions, so that they agree on the answers: what one of them leaves
alone is what another takes care of. It must not decide what to do.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from penstock.domain import limits
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Slice, Zone, untried
from penstock.domain.places import has
from penstock.planner.snapshot import Snapshot
from penstock.planner.zones import slow_after_s

#: A slice nobody uses may miss more syncs before the provider is asked: nothing is lost by waiting.
IDLE_SILENCE_S: Final = 3 * limits.SILENCE_S
#: Asked for, and not ready yet.
UNREADY_SLICE_STATES: Final = frozenset({SliceState.INTENDED, SliceState.CREATING})


def quiet(snapshot: Snapshot, slice: Slice) -> bool:
    """Whether a slice nobody holds has been silent for so long that nothing should be placed on it.

    `recover` decides about such slices; `scaling.settle` leaves them alone.
    """
    return snapshot.witness.silent.get(slice.id, 0.0) > IDLE_SILENCE_S and not in_use(snapshot, slice)


def in_use(snapshot: Snapshot, slice: Slice) -> bool:
    """Whether a live attempt holds the slice, by either side's record."""
    return slice.attempt is not None or slice.id in snapshot.holders


def unlisted(snapshot: Snapshot, slice: str) -> bool:
    """Whether complete listings far enough apart did not show the slice: reason to ask, not yet proof."""
    return snapshot.witness.absent.get(slice, 0.0) >= limits.GONE_LISTINGS_APART_S


def may_ask(snapshot: Snapshot, slice: str) -> bool:
    """Whether the provider may be asked about a slice now: once per tick, and one call at a time."""
    witness = snapshot.witness
    return slice not in witness.busy and witness.asked.get(slice, limits.TICK_S) >= limits.TICK_S


def leaving(snapshot: Snapshot, slice: Slice) -> str | None:
    """Why a slice is let go as soon as no attempt holds it, whatever waits for it; None when it is not."""
    pool = snapshot.pools.get(slice.pool)
    if pool is None or pool.deleted:
        return "its pool is deleted"
    if slice.race is not None and _outrun(snapshot, slice, slice.race):
        return "another slice of its race was ready first"
    # A fleet that an earlier release made has no places written down; `scaling` looks after it.
    if slice.number is not None and pool.places and not has(pool, slice.zone, slice.number):
        return f"fleet {pool.name} was made smaller"
    return None


def _outrun(snapshot: Snapshot, slice: Slice, race: str) -> bool:
    ready = [
        other for other in snapshot.races.get(race, {}).values() if other.state is SliceState.READY and not other.dirty
    ]
    if not ready:
        return False
    winner = min(
        ready,
        key=lambda one: (not in_use(snapshot, one), quiet(snapshot, one), one.ready_at or 0.0, one.id),
    )
    return winner.id != slice.id


def slow_since(snapshot: Snapshot, slice: Slice, now: float) -> float | None:
    """Since when a creation takes longer than its zone's usually do; None while it does not, and when it has ended."""
    if slice.state not in UNREADY_SLICE_STATES:
        return None
    begun_at = slice.begun_at
    if slice.state is SliceState.INTENDED:
        unanswered_s = snapshot.witness.tried.get(slice.id)
        mute = snapshot.witness.mute.get((slice.provider, slice.zone))
        if unanswered_s is None and mute is not None:
            unanswered_s = mute.seconds  # it is not even asked for there
        if unanswered_s is None:
            return None  # it waits for its turn to be asked for: that is our pace, not its zone's
        begun_at = now - unanswered_s
    late_at = begun_at + slow_after_s(zone_known(snapshot, slice))
    return late_at if now >= late_at else None


def zone_known(snapshot: Snapshot, slice: Slice) -> Zone:
    """What is known of a slice's kind of capacity where it is; nothing yet, if it is the first."""
    fresh = untried(slice, slice.zone)
    return snapshot.zones.get(fresh.id, fresh)


def draining_of(snapshot: Snapshot) -> Counter[str]:
    """Per pool, slices that count and are on their way out."""
    return Counter(slice.pool for slice in snapshot.unsettled.values() if slice.state is SliceState.DRAINING)


def held(snapshot: Snapshot, pool: str) -> int:
    """Slices that count against the pool's maximum."""
    known = snapshot.pools.get(pool)
    return 0 if known is None else snapshot.used.get(("pool", pool), 0) // known.chips
