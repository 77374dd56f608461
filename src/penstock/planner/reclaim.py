"""Which running attempts give way when a queue asks for what it owns: victims, as few and as cheap as will do.

`planner.admission` calls `Reclaim` for jobs that fit in their queue's own quota and cannot start. Eligible are, inside
the job's team: elastic extras of the same or a lower band, attempts of a strictly lower band, and borrowed attempts of
a queue that is past its quota. Whole attempts only, and none at all when stopping every eligible one would not help.
Attempts that are stopping already count as given back, so nothing is chosen twice. It stops nothing itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Attempt, Queue
from penstock.planner.fairness import Books
from penstock.planner.placement import Option
from penstock.planner.snapshot import Snapshot

#: Jobs that may choose victims in one round. Each wave writes checkpoints; the next one follows within a tick.
SEARCHES_PER_ROUND: Final = 64


class Group(NamedTuple):
    """A pool's zone where a job could gather: how many slices it lacks there beside idle and coming ones."""

    option: Option
    zone: str
    missing: int


class Found(NamedTuple):
    """Where the job will start once `victims` and what is stopping already have given way."""

    group: Group | None
    victims: tuple[Attempt, ...]


class _Victim(NamedTuple):
    """An attempt that may have to give way, with the slices a job would get of it."""

    attempt: Attempt
    slices: int
    extra: bool

    @property
    def level(self) -> tuple[bool, int]:
        return (not self.extra, self.attempt.band)

    @property
    def newest_first(self) -> tuple[float, str]:
        return (-self.attempt.created_at, self.attempt.id)


class _Holders:
    """The attempts on one team's slices of a pool's zone, in the order in which they would give way."""

    def __init__(self, victims: Iterable[_Victim]) -> None:
        self.order = sorted(victims, key=lambda one: (one.level, one.newest_first))
        self._cheapest = sorted(self.order, key=lambda one: (one.level, one.attempt.chips))  # equals stay newest first
        self._cheapest.reverse()  # best last, so that dropping those that are gone is cheap
        self._lowest_band = min((one.attempt.band for one in self.order), default=0)
        self._special = any(one.extra or one.attempt.borrowed for one in self.order)

    def promising(self, band: int) -> bool:
        return bool(self.order) and (self._lowest_band < band or self._special)

    def cheapest(self, gone: set[str]) -> Iterator[_Victim]:
        """One at a time, cheapest of each level first: what is asked when a single slice is short."""
        while self._cheapest and self._cheapest[-1].attempt.id in gone:
            self._cheapest.pop()
        return reversed(self._cheapest)


class Reclaim:
    """What gives way in one round. `leaving` are attempts already asked to stop; chosen victims join them."""

    def __init__(self, snapshot: Snapshot, books: Books, leaving: set[str]) -> None:
        self._snapshot = snapshot
        self._books = books
        self._leaving = leaving
        self._freeing: dict[tuple[str, str, str], int] = defaultdict(int)  #: team, pool, zone -> slices
        self._leaving_chips: dict[str, int] = defaultdict(int)  #: queue -> chips
        self._holders: dict[tuple[str, str], dict[str, _Holders]] = {}
        self._searches = 0
        self._vain: set[tuple[str, int, tuple[Group, ...], int]] = set()
        self._extras: dict[str, Attempt] | None = None
        for id in sorted(leaving):
            attempt = snapshot.attempts.get(id)
            if attempt is not None:
                self._count_leaving(attempt)

    def _count_leaving(self, attempt: Attempt) -> None:
        self._leaving_chips[attempt.queue] += attempt.chips
        for bound in attempt.slices:
            slice = self._snapshot.slices.get(bound.slice)
            if slice is not None and slice.state is SliceState.READY and not slice.dirty:
                self._freeing[slice.team, slice.pool, slice.zone] += 1

    def extras(self) -> dict[str, Attempt]:
        """Live attempts beyond their elastic job's minimum, the newest ones."""
        if self._extras is None:
            self._extras = {}
            for id in sorted(self._snapshot.elastic):
                least = self._snapshot.elastic[id].spec.replicas.min
                live = [a for a in self._snapshot.attempts_of.get(id, {}).values() if a.id not in self._leaving]
                live.sort(key=lambda one: (one.created_at, one.id))
                self._extras.update((one.id, one) for one in live[least:])
        return self._extras

    # --- who ---
    def possible(self, queue: Queue) -> bool:
        """Whether anything might give way to this queue; cheap, so that a blocked head costs little."""
        for view in self._books.cohorts[queue.team].views:
            if view.live_chips and (view.queue.band < queue.band or self._over(view.queue) > 0):
                return True
        return any(one.team == queue.team for one in self.extras().values()) or any(
            chips for name, chips in self._leaving_chips.items() if self._snapshot.queues[name].queue.team == queue.team
        )

    def _over(self, queue: Queue) -> int:
        """Chips a queue holds beyond its quota, those it is about to give back left out."""
        if queue.quota_chips is None:
            return 0
        return self._snapshot.queues[queue.name].live_chips - self._leaving_chips[queue.name] - queue.quota_chips

    def find(self, queue: Queue, job: str, groups: Sequence[Group], chips_short: int) -> Found | None:
        """Victims for one gang in the best of `groups` (none: only chips are short) and `chips_short` of the quota."""
        cohort = self._books.cohorts[queue.team]
        chips = max(0, chips_short - sum(self._leaving_chips[view.queue.name] for view in cohort.views))
        found = self._on_its_way(queue, groups, chips)
        if found is None:
            # What was in vain once in a round stays so: victims only become fewer.
            key = (queue.team, queue.band, tuple(groups), chips)
            if key in self._vain or self._searches >= SEARCHES_PER_ROUND:
                return None
            self._searches += 1
            found = self._search(queue, job, groups, chips)
            if found is None:
                self._vain.add(key)
                return None
        for attempt in found.victims:
            self._leaving.add(attempt.id)
            self._count_leaving(attempt)
        if found.group is not None:
            where = (queue.team, found.group.option.pool.name, found.group.zone)
            self._freeing[where] = max(0, self._freeing[where] - found.group.missing)
        return found

    def _on_its_way(self, queue: Queue, groups: Sequence[Group], chips: int) -> Found | None:
        """Where what is stopping already will do."""
        if chips:
            return None
        if not groups:
            return Found(None, ())
        for group in groups:
            if self._freeing[queue.team, group.option.pool.name, group.zone] >= group.missing:
                return Found(group, ())
        return None

    def _search(self, queue: Queue, job: str, groups: Sequence[Group], chips: int) -> Found | None:
        best: tuple[tuple[int, int, int], Found] | None = None
        for at, group in enumerate(groups or (None,)):
            lacking = 0
            if group is not None:
                where = (queue.team, group.option.pool.name, group.zone)
                lacking = max(0, group.missing - self._freeing[where])
            victims = self._give_way(queue, job, group, lacking, chips)
            if victims is not None:
                rank = group.option.rank if group is not None else 0
                cost = (rank, sum(one.chips for one in victims), at)
                if best is None or cost < best[0]:
                    best = (cost, Found(group, victims))
        return None if best is None else best[1]

    def _give_way(
        self, queue: Queue, job: str, group: Group | None, lacking: int, chips: int
    ) -> tuple[Attempt, ...] | None:
        """The victims in one group, or None when they would not do."""
        holders = None
        if group is not None:
            holders = self._held(queue.team, group.option.pool.name).get(group.zone)
        if lacking and (holders is None or not holders.promising(queue.band)):
            return None
        if holders is not None and lacking == 1 and not chips:
            for one in holders.cheapest(self._leaving):
                if self._may_go(one, queue, job, self._over(self._snapshot.queues[one.attempt.queue].queue)):
                    return (one.attempt,)
            return None
        victims = list(holders.order) if holders is not None else []
        if chips:
            victims = self._with_borrowers(queue, victims)
        return self._choose(queue, job, victims, lacking, chips)

    def own_extras(self, queue: Queue, chips: int) -> tuple[Attempt, ...] | None:
        """The queue's own elastic extras that must end so that a head of it gets `chips` of quota; None: not enough."""
        short = chips - self._leaving_chips[queue.name]
        chosen: list[Attempt] = []
        mine = [one for one in self.extras().values() if one.queue == queue.name and one.id not in self._leaving]
        for one in sorted(mine, key=lambda one: (-one.created_at, one.id)):
            if short <= 0:
                break
            chosen.append(one)
            short -= one.chips
        if short > 0:
            return None
        for one in chosen:
            self._leaving.add(one.id)
            self._count_leaving(one)
        return tuple(chosen)

    def _may_go(self, one: _Victim, queue: Queue, job: str, over: int) -> bool:
        attempt = one.attempt
        if attempt.id in self._leaving or attempt.job == job:
            return False
        if attempt.band < queue.band or (one.extra and attempt.band == queue.band):
            return True
        return over > 0 and attempt.borrowed

    def _with_borrowers(self, queue: Queue, victims: list[_Victim]) -> list[_Victim]:
        """Those, and all attempts of queues that are past their quota: they hold chips of it, if not slices."""
        known = {one.attempt.id for one in victims}
        extras = self.extras()
        for view in self._books.cohorts[queue.team].views:
            if self._over(view.queue) > 0:
                victims.extend(_Victim(a, 0, a.id in extras) for a in view.live.values() if a.id not in known)
        return sorted(victims, key=lambda one: (one.level, one.newest_first))

    def _held(self, team: str, pool: str) -> dict[str, _Holders]:
        """Per zone, who holds one team's slices of a pool. Slices that will not be reused do not count."""
        found = self._holders.get((team, pool))
        if found is None:
            counts: dict[str, dict[str, int]] = {}
            for slice in self._snapshot.pool_slices.get(pool, {}).values():
                whole = slice.state is SliceState.READY and not slice.dirty
                if slice.attempt in self._snapshot.attempts and slice.team == team and whole:
                    attempts = counts.setdefault(slice.zone, {})
                    attempts[slice.attempt] = attempts.get(slice.attempt, 0) + 1
            extras, live = self.extras(), self._snapshot.attempts
            found = {
                zone: _Holders(_Victim(live[id], count, id in extras) for id, count in attempts.items())
                for zone, attempts in counts.items()
            }
            self._holders[team, pool] = found
        return found

    # --- as few as needed ---
    def _choose(
        self, queue: Queue, job: str, victims: Sequence[_Victim], slices: int, chips: int
    ) -> tuple[Attempt, ...] | None:
        """Extras, then the lowest band, then the newest; one that covers the rest alone is taken if it is smallest."""
        over: dict[str, int] = {}
        chosen: list[_Victim] = []

        def allowed(one: _Victim) -> bool:
            name = one.attempt.queue
            if name not in over:
                over[name] = self._over(self._snapshot.queues[name].queue)
            helps = (slices > 0 and one.slices > 0) or (chips > 0 and over[name] > 0)
            return helps and one not in chosen and self._may_go(one, queue, job, over[name])

        levels: dict[tuple[bool, int], list[_Victim]] = defaultdict(list)
        for one in victims:
            levels[one.level].append(one)
        for members in levels.values():
            for one in members:
                if slices <= 0 and chips <= 0:
                    break
                alone = [v for v in members if v.slices >= slices and v.attempt.chips >= chips and allowed(v)]
                taken = min(alone, key=lambda v: (v.attempt.chips, v.newest_first)) if alone else one
                if allowed(taken):
                    chosen.append(taken)
                    slices -= taken.slices
                    chips -= taken.attempt.chips
                    over[taken.attempt.queue] -= taken.attempt.chips
        if slices > 0 or chips > 0:
            return None
        return tuple(one.attempt for one in _without_needless(chosen, slices, chips))


def _without_needless(chosen: list[_Victim], slices: int, chips: int) -> Iterable[_Victim]:
    """Spare those that turned out not to be needed, the most valuable first. `slices`, `chips`: left over, negated."""
    kept = list(chosen)
    for one in reversed(chosen):
        if slices + one.slices <= 0 and chips + one.attempt.chips <= 0:
            kept.remove(one)
            slices += one.slices
            chips += one.attempt.chips
    return kept
