"""When running work is expected to end: the shadow start of a job that waits, which backfill must not delay.

`planner.placement` asks for slices, `planner.admission` for chips of a quota. Answers are estimates on the early side:
a candidate that ends before the earliest possible start of the job ahead cannot delay it. It decides nothing.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from penstock.domain import limits
from penstock.domain.nouns import Attempt, Job, Slice
from penstock.planner.snapshot import QueueView, Snapshot

EVERYWHERE: Final = "*"  #: stands for all zones of a pool


def end_of_job(job: Job, now: float) -> float:
    """When a job started now would be over."""
    return now + (job.spec.expected_s if job.spec.expected_s is not None else job.spec.timeout_s)


class Endings:
    """Ends of running attempts, computed for a pool or a queue when first asked for."""

    def __init__(self, snapshot: Snapshot, now: float, leaving: set[str]) -> None:
        self._snapshot = snapshot
        self._now = now
        self._leaving = leaving  #: attempts that were asked to stop
        self._pools: dict[str, dict[str, list[tuple[float, str]]]] = {}
        self._queues: dict[tuple[str, ...], list[tuple[float, int]]] = {}
        self._new_slices: dict[str, list[tuple[Slice, float]]] = defaultdict(list)
        self._new_chips: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def end(self, attempt: Attempt) -> float:
        if attempt.id in self._leaving:
            return self._now + limits.GRACE_S
        began = attempt.created_at if attempt.started_at is None else attempt.started_at
        job = self._snapshot.jobs.get(attempt.job)
        if job is not None and job.spec.expected_s is not None and began + job.spec.expected_s > self._now:
            return began + job.spec.expected_s
        return max(self._now, began + attempt.timeout_s)

    def started(self, queue: str, slices: Sequence[Slice], end: float) -> None:
        """Count something that was placed in this round."""
        for slice in slices:
            self._new_slices[slice.pool].append((slice, end))
            known = self._pools.get(slice.pool)
            if known is not None:
                insort(known.setdefault(slice.zone, []), (end, slice.team))
                insort(known.setdefault(EVERYWHERE, []), (end, slice.team))
        chips = sum(slice.chips for slice in slices)
        self._new_chips[queue].append((end, chips))
        for queues, ends in self._queues.items():
            if queue in queues:
                insort(ends, (end, chips))

    def slices_free_at(self, pool: str, zones: tuple[str, ...], count: int) -> float:
        """When `count` busy slices of a pool's zone will have become free; infinite when there are not so many.

        Slices of other teams count too: freed, they make room in the pool. Several zones stand for the whole pool.
        """
        if count <= 0:
            return self._now
        ends = self._pool(pool).get(zones[0] if len(zones) == 1 else EVERYWHERE, [])
        return ends[count - 1][0] if count <= len(ends) else math.inf

    def freed_by(self, pool: str, zone: str, team: str, time: float) -> int:
        """How many busy slices of a team in a pool's zone will have become free by then."""
        return sum(1 for end, owner in self._pool(pool).get(zone, []) if end <= time and owner == team)

    def _pool(self, pool: str) -> dict[str, list[tuple[float, str]]]:
        """Per zone the ends of what is busy, soonest first, each with the team that has the slice."""
        found = self._pools.get(pool)
        if found is None:
            found = {}
            ends = list(self._new_slices[pool])
            for slice in self._snapshot.pool_slices.get(pool, {}).values():
                attempt = self._snapshot.attempts.get(slice.attempt or "")
                if attempt is not None:
                    ends.append((slice, self.end(attempt)))
            for slice, end in ends:
                found.setdefault(slice.zone, []).append((end, slice.team))
                found.setdefault(EVERYWHERE, []).append((end, slice.team))
            for of_zone in found.values():
                of_zone.sort()
            self._pools[pool] = found
        return found

    def team_chips_free_at(self, team: str, chips: int) -> float:
        return self.chips_free_at(
            [
                self._snapshot.queues[n]
                for n in sorted(self._snapshot.queues)
                if self._snapshot.queues[n].queue.team == team
            ],
            chips,
        )

    def chips_free_at(self, views: list[QueueView], chips: int) -> float:
        """When running attempts of these queues will have given back `chips`."""
        if chips <= 0:
            return self._now
        key = tuple(view.queue.name for view in views)
        ends = self._queues.get(key)
        if ends is None:
            ends = [(self.end(a), a.chips) for view in views for a in view.live.values()]
            ends.extend(one for name in key for one in self._new_chips[name])
            ends.sort()
            self._queues[key] = ends
        freed = 0
        for end, given in ends:
            freed += given
            if freed >= chips:
                return end
        return math.inf
