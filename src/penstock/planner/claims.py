"""Reserved slices and pools in one round: only their holder's jobs start there, and nobody lets them go meanwhile.

`planner.admission` makes one `Claims` per round, takes its slices out of the `Ground` that all share, and asks it first
for a job whose user holds some. A reservation that is over is not one. It must not look at quotas or at whose turn it
is: a reservation is a claim on a place, not on a share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from penstock.domain.nouns import Slice
from penstock.domain.reservations import in_force, others_claim
from penstock.planner import slices
from penstock.planner.placement import Fit, Ground, Option, idle_from
from penstock.planner.snapshot import Snapshot


class Claims:
    """Who holds which slices."""

    def __init__(self, snapshot: Snapshot, now: float, ground: Ground) -> None:
        self._now = now
        self._ground = ground
        self._of: dict[str, str] = {}  #: slice -> user
        self._idle: dict[tuple[str, str], dict[str, Slice]] = defaultdict(dict)  #: (team, user) -> usable slices
        for name, pool in snapshot.pools.items():
            claim = in_force(pool.reserved, now)
            if claim is not None:
                self._of.update(dict.fromkeys(snapshot.pool_slices.get(name, ()), claim.user))
        for id, slice in snapshot.reserved.items():
            claim = in_force(slice.reserved, now)
            if claim is not None:
                self._of[id] = claim.user
        for id, user in self._of.items():
            slice = snapshot.slices[id]
            free = slice.usable and id not in snapshot.holders and slices.leaving(snapshot, slice) is None
            if free and ground.set_aside(slice):
                self._idle[slice.team, user][id] = slice

    def any_idle(self, team: str) -> bool:
        return any(held for (owner, _), held in self._idle.items() if owner == team)

    def open_to(self, user: str, options: Sequence[Option]) -> Sequence[Option]:
        """Those of the pools that nobody else holds."""
        if any(option.pool.reserved is not None for option in options):
            return tuple(each for each in options if not others_claim(each.pool.reserved, user, self._now))
        return options

    def fit(self, team: str, user: str, options: Sequence[Option], count: int, environment: str) -> Fit | None:
        """Slices of one pool and zone, the user's own first, filled up with free ones."""
        held = self._idle.get((team, user))
        if not held:
            return None
        for option in options:
            for zone in option.zones:
                mine = [
                    one
                    for one in held.values()
                    if one.pool == option.pool.name and one.zone == zone and option.only in (None, one.id)
                ]
                if not mine:
                    continue
                mine.sort(key=lambda one: (one.warm != environment, idle_from(one), one.id))
                chosen = mine[:count]
                bucket = self._ground.bucket(team, option.pool, zone)
                if len(chosen) < count and option.only is None and bucket is not None:
                    chosen += bucket.best(count - len(chosen), environment)
                if len(chosen) == count:
                    return Fit(tuple(chosen), False)
        return None

    def take(self, taken: Iterable[Slice]) -> list[Slice]:
        """Count reserved slices as used; answers the others."""
        rest = []
        for slice in taken:
            user = self._of.get(slice.id)
            if user is None or self._idle[slice.team, user].pop(slice.id, None) is None:
                rest.append(slice)
        return rest
