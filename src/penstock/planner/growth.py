"""Which slices to ask for, where: pools below their minimum, fleets with gaps, and jobs that could start on more.

`planner.plan` calls `grow` (through `scaling`) with what admission could not place; `scaling.settle` calls `upkeep`.
What is being created already serves wants first, so that the same slice is never asked for twice. Limits are read
only to ask sensibly: the store's transactions keep them, and the executor keeps the rate of calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from penstock.domain import limits
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Pool, Slice
from penstock.planner import places
from penstock.planner.actions import Intend, Reason, Want
from penstock.planner.slices import UNREADY_SLICE_STATES, draining_of, held, leaving, slow_since
from penstock.planner.snapshot import Snapshot
from penstock.planner.zones import open_at, rank, unseen, zone_of


class Room:
    """How many more slices fit under the limits, with what this plan has already asked for."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._asked: Counter[tuple[str, str]] = Counter()

    def left(self, scope: str, name: str, chips: int) -> int | None:
        """Slices of `chips` that still fit; None when there is no limit."""
        free = self._snapshot.free_chips(scope, name)
        return None if free is None else max(0, free - self._asked[scope, name]) // chips

    def full(self, pool: Pool, team: str, slices: int) -> str | None:
        """The first limit that so many more slices would exceed."""
        for scope, name in (("pool", pool.name), ("team", team), ("provider", pool.provider)):
            left = self.left(scope, name, pool.chips)
            if left is not None and left < slices:
                return scope
        return None

    def take(self, pool: Pool, team: str, zones: int) -> None:
        self._asked["pool", pool.name] += pool.chips
        self._asked["team", team] += pool.chips
        self._asked["provider", pool.provider] += pool.chips * zones

    def take_beside(self, pool: Pool) -> None:
        """For one more in a race: team and pool count the race once, and have."""
        self._asked["provider", pool.provider] += pool.chips


def _open_zones(snapshot: Snapshot, pool: Pool, now: float, allowed: Sequence[str], ahead: int) -> list[str]:
    """Zones that may be tried now, best first."""
    return [
        zone
        for zone in rank(snapshot, pool, now, ahead)
        if (not allowed or zone in allowed) and open_at(snapshot, pool, zone) <= now
    ]


def upkeep(snapshot: Snapshot, now: float, room: Room) -> list[Intend]:
    """Intents for pools below their minimum and for fleets with gaps. They belong to the pool's own team."""
    if snapshot.maintenance:
        return []
    intents: list[Intend] = []
    draining = draining_of(snapshot)
    line = _Line(snapshot)
    for name in sorted(snapshot.pools):
        pool = snapshot.pools[name]
        if pool.deleted:
            continue
        gaps: list[tuple[tuple[str, ...], int | None]]
        if pool.per_zone is not None:
            gaps = [((zone,), number) for zone, number in places.empty(snapshot, pool)]
        else:
            live = held(snapshot, name) - draining[name]
            gaps = [(pool.zones, None)] * (min(pool.min, pool.max) - live)
        for ahead, (allowed, number) in enumerate(gaps):
            if len(allowed) == 1 and line.full(pool.provider, allowed[0]):
                continue  # spares a large fleet the ranking of what cannot be asked for yet
            zones = _open_zones(snapshot, pool, now, allowed, ahead)
            if zones and not line.full(pool.provider, zones[0]) and room.full(pool, pool.team, 1) is None:
                intent = _intent(pool, pool.team, zones, room, 1)
                line.add(pool.provider, intent.zones)
                intents.append(msgspec.structs.replace(intent, number=number))
    return intents


class _Line:
    """Slices that nobody was asked for yet, by zone. More than can be asked for soon are not intended at all: their
    zones are chosen when it is their turn, by what is known then, and no intent grows old before it is tried."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._waiting = Counter(
            (slice.provider, slice.zone) for slice in snapshot.unsettled.values() if slice.state is SliceState.INTENDED
        )

    def full(self, provider: str, zone: str) -> bool:
        return self._waiting[provider, zone] >= limits.INTENTS_PER_ZONE

    def add(self, provider: str, zones: Sequence[str]) -> None:
        self._waiting.update((provider, zone) for zone in zones)


def _intent(pool: Pool, team: str, zones: list[str], room: Room, slices: int) -> Intend:
    """Ask for one slice, racing as many zones as the pool says while the provider's limit has room for the rest."""
    width = max(1, min(pool.race, limits.RACE_ZONES_MAX, len(zones)))
    left = room.left("provider", pool.provider, pool.chips)
    if left is not None:
        width = max(1, min(width, left - (slices - 1)))
    room.take(pool, team, width)
    return Intend(pool=pool.name, team=team, zones=tuple(zones[:width]))


class _OnItsWay(NamedTuple):
    """One slice that will come up in one of these zones: what races for it, or nothing yet if this plan asks for it."""

    zones: tuple[str, ...]
    racers: tuple[Slice, ...] = ()


class _Coming:
    """Slices asked for and not ready yet: each will serve one want. A race is one of them."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._ways: dict[tuple[str, str], list[_OnItsWay]] = defaultdict(list)
        races: dict[str, list[Slice]] = defaultdict(list)
        for id in sorted(snapshot.unsettled):
            slice = snapshot.unsettled[id]
            if slice.state in UNREADY_SLICE_STATES and leaving(snapshot, slice) is None:
                races[slice.race or slice.id].append(slice)
        for members in races.values():
            way = _OnItsWay(tuple(slice.zone for slice in members), tuple(members))
            self._ways[members[0].pool, members[0].team].append(way)

    def add(self, pool: str, team: str, zones: tuple[str, ...]) -> None:
        self._ways[pool, team].append(_OnItsWay(zones))

    def count(self, pool: str) -> int:
        return sum(len(coming) for (name, _), coming in self._ways.items() if name == pool)

    def matching(self, pool: str, want: Want) -> list[_OnItsWay]:
        """Those of the pool that surely come up where the want can use them."""
        coming = self._ways.get((pool, want.team), [])
        if want.zones:
            coming = [way for way in coming if all(zone in want.zones for zone in way.zones)]
        if want.same_zone:
            single = Counter(way.zones for way in coming if len(way.zones) == 1)
            best = min(single, key=lambda zones: (-single[zones], zones), default=())
            coming = [way for way in coming if way.zones == best]
        return coming[: want.slices]

    def take(self, pool: str, team: str, taken: list[_OnItsWay]) -> None:
        for way in taken:
            self._ways[pool, team].remove(way)


def grow(snapshot: Snapshot, now: float, wants: Sequence[Want]) -> tuple[list[Intend], dict[str, Reason]]:
    """Intents for slices that jobs want and nobody is making yet, and per job why it has to wait for them.

    Wants are served in the order given. One is served whole or not at all: part of a gang is of no use.
    """
    reasons: dict[str, Reason] = {}
    if snapshot.maintenance:
        said = Reason(
            code="maintenance",
            sentence="no slices are created during maintenance",
            advice="end the maintenance mode",
        )
        return [], {want.job: said for want in wants}
    intents: list[Intend] = []
    room, coming = Room(snapshot), _Coming(snapshot)
    for intent in upkeep(snapshot, now, room):  # `settle` asks for these: they will serve wants too
        coming.add(intent.pool, intent.team, intent.zones)
    for want in wants:
        asked, reason = _serve(snapshot, now, want, room, coming)
        intents.extend(asked)
        reasons.setdefault(want.job, reason)
    return intents, reasons


def _serve(snapshot: Snapshot, now: float, want: Want, room: Room, coming: _Coming) -> tuple[list[Intend], Reason]:
    """Serve one want with slices that are coming, else with new ones of the first pool that can give the rest."""
    pools = [snapshot.pools[name] for name in want.pools if name in snapshot.pools and not snapshot.pools[name].deleted]
    matching = {pool.name: coming.matching(pool.name, want) for pool in pools}
    # What is coming already goes first, else a pool that opens again would be asked for the same slices.
    pools.sort(key=lambda pool: -len(matching[pool.name]))
    blocked: list[Reason] = []
    for pool in pools:
        taken = matching[pool.name]
        rest = want.slices - len(taken)
        allowed = taken[0].zones if want.same_zone and taken else want.zones
        reason = _blocked(snapshot, now, want, pool, room, rest, allowed) if rest else None
        if reason is not None:
            blocked.append(reason)
            continue
        coming.take(pool.name, want.team, taken)
        ahead = coming.count(pool.name) + len(taken)
        intents: list[Intend] = []
        for number in range(rest if pool.per_zone is None else 0):  # a fleet fills its places by itself: `upkeep`
            zones = _open_zones(snapshot, pool, now, allowed, ahead + number)
            if want.same_zone:  # where the first goes, the others follow
                zones = zones[:1]
                allowed = tuple(zones)
            intents.append(_intent(pool, want.team, zones, room, rest - number))
        if not want.same_zone:
            for way in taken:
                intents += _second_try(snapshot, now, want, pool, way, room)
        return intents, _creating(pool, want, rest)
    if not blocked:
        return [], Reason(code="no_pool", sentence="no pool that it may use exists", advice="create a pool")
    waits = [reason for reason in blocked if reason.code == "zone_backoff"]
    return [], min(waits, key=lambda reason: reason.numbers["seconds"]) if waits else blocked[0]


def _second_try(snapshot: Snapshot, now: float, want: Want, pool: Pool, way: _OnItsWay, room: Room) -> list[Intend]:
    """Ask another zone as well when all that race for a slice are unusually slow; whichever is ready first is kept.

    Not where a creation of this pool is slow already, and one zone at a time: the next when that one is slow too. Never
    for a fleet: each of its slices has a place, and what is made beside it elsewhere is one too many there.
    """
    if pool.per_zone is not None or not way.racers or len(way.racers) >= limits.RACE_ZONES_MAX:
        return []
    if any(slow_since(snapshot, racer, now) is None for racer in way.racers):
        return []
    if room.left("provider", pool.provider, pool.chips) == 0 or held(snapshot, pool.name) > pool.max:
        return []
    rivals = snapshot.pool_slices.get(pool.name, {}).values()
    slow = {rival.zone for rival in rivals if slow_since(snapshot, rival, now) is not None}
    zones = [zone for zone in _open_zones(snapshot, pool, now, want.zones, 0) if zone not in slow]
    if not zones:
        return []
    room.take_beside(pool)
    return [Intend(pool=pool.name, team=want.team, zones=(zones[0],), beside=way.racers[0].id)]


def _creating(pool: Pool, want: Want, asked: int) -> Reason:
    return Reason(
        code="creating_slices",
        sentence=f"waits for {want.slices} slices of pool {pool.name} to be created",
        numbers={"slices": want.slices, "asked_now": asked},
    )


def _blocked(
    snapshot: Snapshot, now: float, want: Want, pool: Pool, room: Room, rest: int, allowed: Sequence[str]
) -> Reason | None:
    """Why `rest` more slices of the pool cannot be asked for now."""
    scope = room.full(pool, want.team, rest)
    if scope == "pool":
        slices = held(snapshot, pool.name)
        return Reason(
            code="pool_at_max",
            sentence=f"pool {pool.name} has {slices} slices of at most {pool.max}; {rest} more are needed",
            numbers={"held": slices, "max": pool.max, "wanted": rest},
            advice=f"raise the maximum of pool {pool.name} to {slices + rest}",
        )
    if scope is not None:
        name = want.team if scope == "team" else pool.provider
        limit = snapshot.limits.get((scope, name)) or 0
        used = snapshot.used.get((scope, name), 0)
        return Reason(
            code=f"{scope}_limit",
            sentence=f"{scope} {name} uses {used} of {limit} chips; {rest * pool.chips} more are needed",
            numbers={"used_chips": used, "limit_chips": limit, "wanted_chips": rest * pool.chips},
            advice=f"raise the chip limit of {scope} {name} to {used + rest * pool.chips}",
        )
    zones = [zone for zone in pool.zones if not allowed or zone in allowed]
    if not zones:
        return Reason(
            code="no_zone",
            sentence=f"pool {pool.name} has no zone that it may use",
            advice=f"allow one of {', '.join(pool.zones)}",
        )
    seen = [zone for zone in zones if (pool.provider, zone) not in snapshot.witness.mute]
    if not seen:
        return unseen(snapshot, pool, zones)
    soonest = min((zone_of(snapshot, pool, zone) for zone in seen), key=lambda known: known.backoff_until)
    seconds = soonest.backoff_until - now
    if seconds <= 0:
        return None
    said = f": {soonest.why.rstrip('. ')}" if soonest.why else ""  # providers end sentences, and this one goes on
    who = f"every zone of pool {pool.name}" if len(zones) > 1 else f"zone {soonest.zone} of pool {pool.name}"
    return Reason(
        code="zone_backoff",
        sentence=f"{who} refused lately{said}; the next try is in {seconds:.0f} s",
        numbers={"seconds": seconds, "zones": len(zones)},
        # This machine is one zone, and always will be: what helps is what it said.
        advice="ask for something smaller" if pool.provider == "local" else f"give pool {pool.name} more zones",
    )
