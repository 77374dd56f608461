"""How many slices there should be: which to create, let go, delete and bury, and which to ask for.

`planner.plan` calls `settle` in every tick, with the slices that placed or waiting jobs need in `keep`, and
`grow` with what admission could not place. Admission asks `leaving` and `recovery.quiet` before it uses a slice.
Nothing here touches a slice that a live attempt holds, except to drain it. A slice gets at most one action, and a
snapshot where nothing is to do gets none. Limits are read here only to ask sensibly; the store keeps them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from penstock.domain import limits
from penstock.domain.lifecycle import COUNTED_SLICE_STATES, SliceState
from penstock.domain.nouns import Pool, Slice
from penstock.planner.actions import Action, Ask, Bury, Create, Delete, Drain, Release
from penstock.planner.growth import Room, grow, upkeep
from penstock.planner.places import too_many
from penstock.planner.slices import (
    UNREADY_SLICE_STATES,
    draining_of,
    held,
    in_use,
    leaving,
    may_ask,
    quiet,
    unlisted,
    zone_known,
)
from penstock.planner.snapshot import Snapshot
from penstock.planner.zones import muteness, patience_s

__all__ = ["grow", "settle"]


def settle(snapshot: Snapshot, now: float, keep: set[str]) -> list[Action]:
    """Bring every slice to rest and every pool to its size; slices by id, then new intents."""
    settling = _Settling(snapshot)
    for slice in snapshot.unsettled.values():
        settling.add(slice, _next_step(snapshot, slice, now))
    for id in snapshot.witness.absent:
        ready = snapshot.slices.get(id)
        if ready is not None and ready.usable and not quiet(snapshot, ready):
            settling.add(ready, _look_for(snapshot, ready))
    _shrink_pools(snapshot, settling, keep)
    _release_idle(snapshot, settling, now, keep)
    steps = [settling.actions[id] for id in sorted(settling.actions)]
    return [*steps, *upkeep(snapshot, now, Room(snapshot))]


class _Settling:
    """The actions on slices so far, and how many slices that leaves each pool with."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.actions: dict[str, Action] = {}
        self._snapshot = snapshot
        self._live: dict[str, int] = {}
        self._draining = draining_of(snapshot)

    def add(self, slice: Slice, action: Action | None) -> None:
        if action is None:
            return
        live = self.live(slice.pool)
        self.actions[slice.id] = action
        if isinstance(action, Release | Drain) and self._counted_alone(slice):
            self._live[slice.pool] = live - 1

    def live(self, pool: str) -> int:
        """Slices of the pool that count and are not on their way out; a race counts once."""
        if pool not in self._live:
            self._live[pool] = held(self._snapshot, pool) - self._draining[pool]
        return self._live[pool]

    def _counted_alone(self, slice: Slice) -> bool:
        if slice.state not in COUNTED_SLICE_STATES or slice.state is SliceState.DRAINING:
            return False
        if slice.race is None:
            return True
        return not any(
            other.state in COUNTED_SLICE_STATES and not isinstance(self.actions.get(other.id), Release)
            for other in self._snapshot.races[slice.race].values()
            if other.id != slice.id
        )


# --- one slice ---
def _next_step(snapshot: Snapshot, slice: Slice, now: float) -> Action | None:
    """What brings an unsettled slice further; nothing while an attempt holds it."""
    if in_use(snapshot, slice):
        return None
    match slice.state:
        case SliceState.INTENDED:
            return _start(snapshot, slice, now)
        case SliceState.CREATING:
            return _await_ready(snapshot, slice, now)
        case SliceState.DELETING:
            return _see_off(snapshot, slice)
        case SliceState.READY:
            silent_s = snapshot.witness.silent.get(slice.id, 0.0)
            mute = f"its agents have been silent for {silent_s:.0f} s: " if silent_s >= limits.SILENCE_S else ""
            why = f"{mute}a process of an earlier attempt may still live there"
            return Release(slice.id, why, vanished=slice.id in snapshot.witness.missing)
        case _:
            return Release(slice.id, slice.why or slice.state.value, vanished=slice.id in snapshot.witness.missing)


def _given_up(snapshot: Snapshot, slice: Slice, now: float) -> Release | None:
    why = leaving(snapshot, slice)
    if why is not None:
        return Release(slice.id, why)
    patience = patience_s(zone_known(snapshot, slice), slice)
    if now - slice.begun_at < patience:
        return None
    # A zone that was never asked has not failed.
    return Release(slice.id, f"not ready within {patience:.0f} s", useless=slice.id in snapshot.witness.tried)


def _start(snapshot: Snapshot, slice: Slice, now: float) -> Action | None:
    """Create an intended slice. A zone that turned dry since is waited for only if that is short."""
    given_up = _given_up(snapshot, slice, now)
    if given_up is not None:
        return given_up
    if snapshot.maintenance or slice.id in snapshot.witness.busy:
        return None
    mute = snapshot.witness.mute.get((slice.provider, slice.zone))
    if mute is not None:
        # What may have been made is waited for. Of the rest nobody has to think: its zone is chosen anew later.
        return Release(slice.id, muteness(slice.zone, mute)) if slice.id in snapshot.witness.unmade else None
    wait_s = zone_known(snapshot, slice).backoff_until - now
    if wait_s > limits.ZONE_BACKOFF_FIRST_S:
        return Release(slice.id, "its zone went into back-off before it was created")
    return Create(slice.id) if wait_s <= 0 else None


def _await_ready(snapshot: Snapshot, slice: Slice, now: float) -> Action | None:
    given_up = _given_up(snapshot, slice, now)
    if given_up is not None:
        return given_up
    if snapshot.witness.unjoined.get(slice.id, 0.0) >= limits.JOIN_TIMEOUT_S:
        why = f"its agents did not all join within {limits.JOIN_TIMEOUT_S:.0f} s"
        # One that was adopted was set up by a person: that it failed says nothing of its zone.
        return Release(slice.id, why, useless=not snapshot.pools[slice.pool].adopted)
    return _look_for(snapshot, slice)


def _look_for(snapshot: Snapshot, slice: Slice) -> Action | None:
    """Ask about a slice that listings do not show, and let it go when the provider denies it too."""
    if not unlisted(snapshot, slice.id):
        return None
    if slice.id in snapshot.witness.denied:
        return Release(slice.id, "vanished: absent from listings, and a direct get found nothing", vanished=True)
    return Ask(slice.id, "absent from listings") if may_ask(snapshot, slice.id) else None


def _see_off(snapshot: Snapshot, slice: Slice) -> Action | None:
    """Delete until the slice is not listed any more, ask whether it is really gone, and bury it.

    What was never made needs none of that, and in a zone that cannot be seen it would wait for ever (ADR 0035).
    """
    witness = snapshot.witness
    if slice.id in witness.unmade and slice.id not in witness.busy:
        return Bury(slice.id, ("nothing was ever made of it: no create of it was sent that was not refused",))
    if unlisted(snapshot, slice.id):
        if slice.id in witness.denied:
            apart = f"absent from complete listings {witness.absent[slice.id]:.0f} s apart"
            return Bury(slice.id, (apart, "a direct get found nothing"))
        return Ask(slice.id, "deleted and absent from listings") if may_ask(snapshot, slice.id) else None
    if slice.id in witness.busy:
        return None
    since_s = witness.deletes.get(slice.id)
    again = since_s is not None and since_s >= limits.DELETE_RETRY_S and slice.id not in witness.absent
    return Delete(slice.id) if since_s is None or again else None


# --- pools that have too many ---
def _shrink_pools(snapshot: Snapshot, settling: _Settling, keep: set[str]) -> None:
    """Let go of what deleted pools, and pools above their maximum or their count per zone, have too many."""
    for name in sorted(snapshot.pool_slices):
        slices = snapshot.pool_slices[name]
        pool = snapshot.pools.get(name)
        if pool is None or pool.deleted:
            for slice in slices.values():
                if slice.usable and not quiet(snapshot, slice):
                    settling.add(slice, Release(slice.id, "its pool is deleted"))
            continue
        if pool.per_zone is not None:
            _level_fleet(snapshot, settling, pool, keep)  # by place: what stays is never more than its maximum
        elif settling.live(name) > pool.max:
            for slice, action in _dispensable(snapshot, slices.values(), keep, f"pool {name} was made smaller"):
                if settling.live(name) <= pool.max:
                    break
                if slice.id not in settling.actions:
                    settling.add(slice, action)


def _level_fleet(snapshot: Snapshot, settling: _Settling, pool: Pool, keep: set[str]) -> None:
    for spare, slices, why in too_many(snapshot, pool):
        excess = spare - sum(slice.id in settling.actions for slice in slices)
        for slice, action in _dispensable(snapshot, slices, keep, why):
            if excess <= 0:
                break
            if slice.id not in settling.actions:
                settling.add(slice, action)
                excess -= 1


def _dispensable(snapshot: Snapshot, slices: Iterable[Slice], keep: set[str], why: str) -> list[tuple[Slice, Action]]:
    """What a pool can do without, best first: not ready yet, idle for longest, in use since the least time.

    Idle slices that a job is about to use are left out, and so is what `recover` is asking about.
    """
    unready: list[Slice] = []
    idle: list[Slice] = []
    busy: list[Slice] = []
    for slice in slices:
        if slice.state in UNREADY_SLICE_STATES and not in_use(snapshot, slice):
            unready.append(slice)
        elif slice.usable and slice.id not in keep and not quiet(snapshot, slice):
            idle.append(slice)
        elif slice.state is SliceState.READY and in_use(snapshot, slice) and not _doubted(snapshot, slice):
            busy.append(slice)
    unready.sort(key=lambda slice: (-slice.intended_at, slice.race or "", slice.id))
    idle.sort(key=lambda slice: (_idle_since(slice), slice.id))
    busy.sort(key=lambda slice: (-_busy_since(snapshot, slice), slice.id))
    released: list[tuple[Slice, Action]] = [(slice, Release(slice.id, why)) for slice in (*unready, *idle)]
    return [*released, *((slice, Drain(slice.id, why)) for slice in busy)]


def _doubted(snapshot: Snapshot, slice: Slice) -> bool:
    silent_s = snapshot.witness.silent.get(slice.id, 0.0)
    return silent_s >= limits.SILENCE_S or unlisted(snapshot, slice.id)


def _idle_since(slice: Slice) -> float:
    if slice.idle_since is not None:
        return slice.idle_since
    return slice.intended_at if slice.ready_at is None else slice.ready_at


def _busy_since(snapshot: Snapshot, slice: Slice) -> float:
    attempt = snapshot.attempts.get(snapshot.holders.get(slice.id) or slice.attempt or "")
    return slice.intended_at if attempt is None else attempt.created_at


def _release_idle(snapshot: Snapshot, settling: _Settling, now: float, keep: set[str]) -> None:
    """Let go of slices nobody needs: outrun ones at once, others when idle for long, the longest first.

    A pool never goes below its minimum, and a fleet keeps its count.
    """
    overdue: dict[str, list[Slice]] = defaultdict(list)
    for slices in snapshot.idle.values():
        for slice in slices.values():
            if slice.id in settling.actions or quiet(snapshot, slice):
                continue
            why = leaving(snapshot, slice)
            if why is not None:
                settling.add(slice, Release(slice.id, why))
                continue
            pool = snapshot.pools[slice.pool]
            kept = slice.id in keep or pool.per_zone is not None or pool.adopted
            if not kept and now - _idle_since(slice) >= pool.idle_s:
                overdue[slice.pool].append(slice)
    for name, candidates in overdue.items():
        pool = snapshot.pools[name]
        candidates.sort(key=lambda slice: (_idle_since(slice), slice.id))
        spare = settling.live(name) - min(pool.min, pool.max)
        for slice in candidates[: max(0, spare)]:
            settling.add(slice, Release(slice.id, f"idle for {pool.idle_s:.0f} s"))
