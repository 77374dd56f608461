"""Whose turn it is, and how much a queue may use: weighted fair share by chip-time, quota, borrowing, claims.

`planner.admission` asks for `score` to order the queues of a band and keeps one `Books` per round. Nothing here looks
at slices: chips are counted, never found. It must not change the snapshot.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from penstock.domain import limits
from penstock.domain.nouns import Queue
from penstock.planner.snapshot import QueueView, Snapshot


def score(view: QueueView, now: float, charged_chips: int) -> float:
    """Decayed chip-seconds a queue has had per unit of weight; the lowest goes first.

    `charged_chips` were started (or asked for) in this round: they are charged a fixed time at once, so that queues
    alternate inside one round instead of the first taking all.
    """
    queue = view.queue
    decayed: float = queue.used_chip_s * 0.5 ** (max(0.0, now - queue.used_at) / limits.SHARE_HALF_LIFE_S)
    accrued = max(0.0, view.live_chips * now - view.live_chip_starts)
    return (decayed + accrued + charged_chips * limits.SHARE_CHARGE_S) / max(queue.weight, 1e-9)


class Verdict(NamedTuple):
    """Whether a queue may use some chips more. `limit` is the one that binds, None when none does."""

    ok: bool
    nominal: bool  #: within the queue's own quota, whatever the peers have taken
    code: str
    used: int
    limit: int | None
    short: int = 0  #: chips its peers' borrowing is in the way of


class Cohort:
    """The queues of one team: what they own together bounds what each may borrow."""

    def __init__(self, views: list[QueueView]) -> None:
        self.views = views
        quotas = [view.queue.quota_chips for view in views]
        owned = [quota for quota in quotas if quota is not None]
        self.limit = sum(owned) if len(owned) == len(quotas) else None
        self.used = sum(view.live_chips for view in views)
        self.claimed: dict[str, int] = defaultdict(int)  #: queue -> chips promised to its jobs
        self.claimed_in_all = 0


class Books:
    """Chips per queue and team in one round: what runs, what was started, what is promised to jobs that wait."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.started: dict[str, int] = defaultdict(int)
        self.asked: dict[str, int] = defaultdict(int)  #: chips of slices asked for on behalf of a queue
        self.claimed: dict[str, int] = defaultdict(int)
        self._views = snapshot.queues
        by_team: dict[str, list[QueueView]] = defaultdict(list)
        for name in sorted(snapshot.queues):
            view = snapshot.queues[name]
            by_team[view.queue.team].append(view)
        self.cohorts = {team: Cohort(views) for team, views in by_team.items()}

    def used(self, queue: str) -> int:
        return self._views[queue].live_chips + self.started[queue]

    def charged(self, queue: str) -> int:
        return self.started[queue] + self.asked[queue]

    def check(self, queue: Queue, chips: int, *, claims: bool = True) -> Verdict:
        """May `queue` use `chips` more? With `claims`, what earlier jobs of the queue wait for counts as used.

        What jobs of its peers wait for always does.
        """
        cohort = self.cohorts[queue.team]
        quota = queue.quota_chips
        used = self.used(queue.name) + (self.claimed[queue.name] if claims else 0)
        nominal = quota is None or used + chips <= quota
        if quota is not None and not nominal and queue.borrow_chips is not None:
            ceiling = quota + queue.borrow_chips
            if used + chips > ceiling:
                code = "borrow_limit" if queue.borrow_chips else "quota"
                return Verdict(False, False, code, used, ceiling)
        if cohort.limit is not None:
            taken = cohort.used + cohort.claimed_in_all - (0 if claims else cohort.claimed[queue.name])
            if taken + chips > cohort.limit:
                return Verdict(False, nominal, "quota", taken, cohort.limit, taken + chips - cohort.limit)
        return Verdict(True, nominal, "", used, quota)

    def start(self, queue: Queue, chips: int) -> bool:
        """Count a start; True when the queue is past its quota with it, so that the start is borrowed."""
        self.started[queue.name] += chips
        self.cohorts[queue.team].used += chips
        return queue.quota_chips is not None and self.used(queue.name) > queue.quota_chips

    def claim(self, queue: Queue, chips: int, *, of_cohort: bool) -> None:
        """Promise chips to a job that waits: later jobs see them as used."""
        self.claimed[queue.name] += chips
        if of_cohort:
            cohort = self.cohorts[queue.team]
            cohort.claimed[queue.name] += chips
            cohort.claimed_in_all += chips

    def ceiling(self, queue: Queue) -> int | None:
        """The most chips the queue could ever use at once; None when nothing bounds it."""
        bounds = [self.cohorts[queue.team].limit]
        if queue.quota_chips is not None and queue.borrow_chips is not None:
            bounds.append(queue.quota_chips + queue.borrow_chips)
        known = [bound for bound in bounds if bound is not None]
        return min(known) if known else None
