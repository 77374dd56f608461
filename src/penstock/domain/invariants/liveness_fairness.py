"""Liveness of sharing: L6, nobody's head waits behind more than a fair share and one maximal job.

Called through `rules`. Chip-time is counted again from the attempts that were made and closed. Two things are judged
whenever a job starts: that its queue was not already ahead of a waiting peer by more than one maximal job, and that a
job let past a waiting gang ends, by its own word, before the gang could have started.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from math import inf

from penstock.domain import limits
from penstock.domain.invariants.facts import AttemptFacts, JobFacts, blockers, maybe_whole, number, text, texts, whole
from penstock.domain.invariants.finding import Finding
from penstock.domain.invariants.indexed import Indexed
from penstock.domain.invariants.liveness_capacity import (
    PLACED_S,
    accelerators_if_clear,
    has_no_wishes,
)
from penstock.domain.nouns import Event

#: A start this much later than it could have been is the loop's rhythm, not a delay.
_START_MARGIN_S = 2 * limits.TICK_S
_KINDS = (
    "queue.created", "queue.edited", "queue.deleted", "pool.created", "pool.edited", "job.created", "job.edited",
    "job.unblocked", "job.released", "job.placed", "job.requeued", "job.cancel_requested", "job.succeeded",
    "job.failed", "job.cancelled", "attempt.created", "attempt.started", "attempt.closed", "slice.intended",
    "slice.ready", "slice.draining", "slice.preempted", "slice.failed", "slice.deleting", "slice.gone",
)  # fmt: skip


class _Queue:
    """One queue: its settings, who waits in it, and the chip-time it has had."""

    __slots__ = (
        "band", "closed_chip_s", "live", "live_chip_starts", "live_chips", "others", "paused", "quota", "returning",
        "team", "waiting", "weight",
    )  # fmt: skip

    def __init__(self, team: str) -> None:
        self.team = team
        self.weight = 1.0
        self.band = 0
        self.quota: int | None = None
        self.paused = False
        self.waiting: dict[str, float] = {}  #: clear-case jobs never placed, since when
        self.others: dict[str, float] = {}  #: other jobs never placed
        self.returning: set[str] = set()  #: jobs that were placed before and wait again
        self.closed_chip_s = 0.0
        self.live: dict[str, tuple[int, float]] = {}  #: attempt -> chips, start
        self.live_chips = 0
        self.live_chip_starts = 0.0  #: sum of chips x start: what runs has had in one subtraction

    def had_at_least(self, t: float) -> float:
        return self.closed_chip_s + self.live_chips * t - self.live_chip_starts

    def start(self, attempt: str, chips: int, t: float) -> None:
        if attempt not in self.live:
            self.live[attempt] = (chips, t)
            self.live_chips += chips
            self.live_chip_starts += chips * t

    def end(self, attempt: str, t: float) -> float:
        """Charge what a closed attempt has had; answers what counts for the largest one."""
        chips, start = self.live.pop(attempt, (0, t))
        self.live_chips -= chips
        self.live_chip_starts -= chips * start
        self.closed_chip_s += chips * (t - start)
        return chips * max(limits.SHARE_CHARGE_S, t - start)

    def had_at_most(self, t: float) -> float:
        """Starting is charged in advance, so a queue may be held to have had that much already."""
        return self.had_at_least(t) + self.live_chips * limits.SHARE_CHARGE_S


class _Slot:
    """A ready slice: what it is, and what the attempt on it promised."""

    __slots__ = ("began", "expected_s", "kind", "timeout_s")

    def __init__(self, kind: tuple[str, ...]) -> None:
        self.kind = kind  #: team, accelerator, zone, pool: a gang stands in one of each
        self.began = -inf
        self.timeout_s = 0.0
        self.expected_s: float | None = None

    def hold(self, t: float, timeout_s: float, expected_s: float | None = None) -> None:
        self.began, self.timeout_s, self.expected_s = t, timeout_s, expected_s

    def free_at(self, t: float) -> float:
        """When it will be free by the word of its attempt: as expected, or at its timeout once that is past."""
        if self.expected_s is not None and self.began + self.expected_s > t:
            return self.began + self.expected_s
        return max(t, self.began + self.timeout_s)


class _Shares:
    """Queues and slices replayed from events, with a judgement at each start."""

    def __init__(self, history: Indexed, finding: Finding) -> None:
        self._history = history
        self._finding = finding
        self._queues: dict[str, _Queue] = {}
        self._blocked: dict[str, int] = {}
        self._priorities: dict[str, int] = {}
        self._largest: dict[str, float] = defaultdict(float)  #: team -> chip-seconds of its largest attempt so far
        self._kinds: dict[str, tuple[str, ...]] = {}
        self._slots: dict[str, _Slot] = {}
        self._room: dict[str, int] = defaultdict(int)  #: pool -> how many more slices its maximum allows
        self._most: dict[str, int] = defaultdict(int)
        self._coming: set[str] = set()  #: slices that were asked for and are not ready yet
        self._began = history.time(history.events[0]) if history.events else 0.0
        self._skewed = any(record.subject == "P4" for record in history.witnessed("fault"))

    def take(self, event: Event) -> None:
        t = self._history.time(event)
        if event.entity == "queue":
            self._set(event)
        elif event.entity == "pool":
            most = whole(event.body, "max")
            self._room[event.id] += most - self._most[event.id]
            self._most[event.id] = most
        elif event.entity == "job":
            self._job(event, t)
        elif event.entity == "slice":
            self._slice(event)
        elif event.kind == "attempt.created":
            self._start(event, t)
        elif event.kind == "attempt.started":
            for slot in self._slots_of(event.id):
                slot.began = t
        else:
            self._end(event, t)

    def _slots_of(self, attempt: str) -> list[_Slot]:
        facts = self._history.attempts.get(attempt)
        return [self._slots[slice] for slice, _ in facts.slices if slice in self._slots] if facts else []

    def _set(self, event: Event) -> None:
        queue = self._queues.setdefault(event.id, _Queue(text(event.body, "team")))
        queue.weight = number(event.body, "weight") or queue.weight
        queue.band = whole(event.body, "band", queue.band)
        if "quota_chips" in event.body:
            queue.quota = maybe_whole(event.body, "quota_chips")
        # Whether a budget is spent only the controller knows: such a queue is never owed a turn.
        queue.paused = bool(event.body.get("paused")) or event.body.get("budget") is not None

    def _has_room(self, queue: _Queue, chips: int) -> bool:
        """Whether nothing but its turn keeps so many chips from a queue: no pause, no quota, no loan to its peers."""
        if queue.paused or (queue.quota is not None and queue.live_chips + chips > queue.quota):
            return False
        peers = [each for each in self._queues.values() if each.team == queue.team]
        quotas = [each.quota for each in peers if each.quota is not None]
        return len(quotas) < len(peers) or sum(each.live_chips for each in peers) + chips <= sum(quotas)

    def _queue_of(self, job: JobFacts) -> _Queue:
        return self._queues.setdefault(text(job.body, "queue"), _Queue(text(job.body, "team")))

    def _job(self, event: Event, t: float) -> None:
        job = self._history.jobs[event.id]
        queue = self._queue_of(job)
        if event.kind in ("job.created", "job.edited"):
            self._priorities[event.id] = whole(event.body, "priority")
        if event.kind == "job.edited":
            return
        if event.kind in ("job.created", "job.unblocked", "job.released"):
            if event.kind == "job.created":
                self._blocked[event.id] = blockers(event)
            else:
                self._blocked[event.id] = self._blocked.get(event.id, 0) - 1 + bool(event.body.get("held"))
            if self._blocked[event.id] <= 0:
                (queue.waiting if accelerators_if_clear(job) else queue.others)[event.id] = t
        elif event.kind == "job.requeued":
            queue.returning.add(event.id)
        else:
            queue.waiting.pop(event.id, None)
            queue.others.pop(event.id, None)
            queue.returning.discard(event.id)

    def _slice(self, event: Event) -> None:
        if event.kind == "slice.intended":
            body = event.body
            self._kinds[event.id] = tuple(text(body, name) for name in ("team", "accelerator", "zone", "pool"))
            self._room[text(body, "pool")] -= 1
            self._coming.add(event.id)
            return
        self._coming.discard(event.id)
        if event.kind == "slice.ready":
            self._slots[event.id] = _Slot(self._kinds.get(event.id, ("", "", "", "")))
        elif event.kind == "slice.gone":
            self._room[self._kinds.get(event.id, ("", "", "", ""))[3]] += 1
        else:
            self._slots.pop(event.id, None)

    def _end(self, event: Event, t: float) -> None:
        attempt = self._history.attempts.get(event.id)
        if attempt is None:
            return
        queue = self._queues.get(attempt.queue)
        if queue is not None:
            self._largest[attempt.team] = max(self._largest[attempt.team], queue.end(event.id, t))
        for slot in self._slots_of(event.id):
            slot.hold(t, 0.0 if event.body.get("clean") else inf)

    def _start(self, event: Event, t: float) -> None:
        attempt = self._history.attempts[event.id]
        job = self._history.jobs.get(attempt.job)
        queue = self._queues.get(attempt.queue)
        if job is not None and queue is not None and t >= self._history.settled_t:
            if event.body.get("backfilled"):
                self._judge_backfill(attempt, t)
            elif attempt.job in queue.waiting and not event.body.get("borrowed"):
                self._judge_share(attempt, job, queue, t)
        if queue is not None:
            queue.start(event.id, attempt.chips, t)
            largest = attempt.chips * limits.SHARE_CHARGE_S
            self._largest[attempt.team] = max(self._largest[attempt.team], largest)
        longest = number(event.body, "timeout_s")
        for slot in self._slots_of(event.id):
            slot.hold(t, inf if longest is None else longest, number(event.body, "expected_s"))

    def _claim(self, job: JobFacts) -> tuple[int, str]:
        """The order inside a queue: higher priority first, then the older id."""
        return -self._priorities.get(job.id, 0), job.id

    def _judge_share(self, attempt: AttemptFacts, job: JobFacts, queue: _Queue, t: float) -> None:
        """The queue that starts a job may be ahead of a waiting peer by one maximal job, not more.

        Only peers of the same team and band count, whose head wants just what this job got and whom no quota keeps from
        it. Where the controller's clock jumped (P4), its books of chip-time are off by the jump and nothing
        is judged.
        """
        wanted = accelerators_if_clear(job)
        if not wanted or self._skewed:
            return
        # The controller forgets old use by halves; forgetting all of it at the fastest rate favours the accused.
        faded = 0.5 ** ((t - self._began) / limits.SHARE_HALF_LIFE_S)
        mine = queue.had_at_least(t) * faded / queue.weight
        for name, peer in self._queues.items():
            if peer is queue or peer.team != queue.team or peer.band != queue.band:
                continue
            if peer.others or peer.returning or not 0 < len(peer.waiting) <= limits.WINDOW_JOBS:
                continue
            if not self._has_room(peer, attempt.chips):
                continue
            head = min(peer.waiting, key=lambda id: self._claim(self._history.jobs[id]))
            if t - peer.waiting[head] <= PLACED_S or accelerators_if_clear(self._history.jobs[head]) != wanted:
                continue
            self._finding.premises += 1
            slack = self._largest[attempt.team] / min(queue.weight, peer.weight)
            theirs = peer.had_at_most(t) / peer.weight
            if mine > theirs + slack:
                self._finding.broken(
                    "job",
                    attempt.job,
                    attempt.created.seq,
                    f"started though its queue had {mine:.0f} chip-s per weight and {name!r}, waiting, {theirs:.0f}",
                )

    def _judge_backfill(self, attempt: AttemptFacts, t: float) -> None:
        """A job let past may keep its slices no longer than until the gang that waits could start without it.

        Ends are those the attempts promised (`expected_s`, and `timeout_s` for those past it), as the planner may
        believe them. Without such a promise there is nothing to judge.
        """
        promises = [number(attempt.created.body, name) for name in ("timeout_s", "expected_s")]
        known = [promise for promise in promises if promise is not None]
        gang = self._gang_before(attempt, t)
        if not known or gang is None:
            return
        ends = t + min(known)
        needed, wanted = whole(gang.body, "slices", 1), texts(gang.body, "accelerators")
        taken = {slice for slice, _ in attempt.slices}
        free: dict[tuple[str, ...], list[float]] = defaultdict(list)  #: as if it had not been let past
        left: dict[tuple[str, ...], list[float]] = defaultdict(list)  #: as it is
        for id, slot in self._slots.items():
            if slot.kind[0] == attempt.team and slot.kind[1] in wanted:
                free[slot.kind].append(t if id in taken else slot.free_at(t))
                left[slot.kind].append(ends if id in taken else slot.free_at(t))
        could = min((_kth(frees, needed) for frees in free.values()), default=inf)
        # Where slices are on their way, or the pool may grow, the gang need not wait for as many; how soon they can be
        # made is not its delay.
        made = Counter(self._kinds[id] for id in self._coming)
        can = min(
            (_kth(frees, needed - max(0, self._room[kind[3]]) - made[kind]) for kind, frees in left.items()),
            default=inf,
        )
        if could == inf:
            return
        self._finding.premises += 1
        if can > could + _START_MARGIN_S:
            self._finding.broken(
                "job",
                gang.id,
                attempt.created.seq,
                f"{attempt.job} was let past it and delays its start by {can - could:.0f} s",
            )

    def _gang_before(self, attempt: AttemptFacts, t: float) -> JobFacts | None:
        """The gang that stands first of its whole team, with a better claim than the attempt's job.

        Behind another head it might not have started anyhow, so only a gang that nobody precedes is judged by.
        """
        queue = self._queues.get(attempt.queue)
        job = self._history.jobs.get(attempt.job)
        if queue is None or job is None or queue.returning:
            return None
        peers = [each for each in self._queues.values() if each is not queue and each.team == queue.team]
        if any(each.waiting or each.others or each.returning for each in peers):
            return None
        gangs = [
            gang
            for id, since in queue.others.items()
            if t - since > PLACED_S and has_no_wishes(gang := self._history.jobs[id])
        ]
        gangs = [gang for gang in gangs if whole(gang.body, "slices", 1) > 1 and self._claim(gang) < self._claim(job)]
        first = min(gangs, key=self._claim, default=None)
        if first is None or any(
            self._claim(self._history.jobs[id]) < self._claim(first) for id in (*queue.waiting, *queue.others)
        ):
            return None
        if not self._has_room(queue, whole(first.body, "chips") * whole(first.body, "slices", 1)):
            return None
        return first


def _kth(frees: list[float], needed: int) -> float:
    """When `needed` slices of one zone are free together; at once if none are."""
    if needed <= 0:
        return -inf
    return sorted(frees)[needed - 1] if needed <= len(frees) else inf


def l6_fair_share(history: Indexed) -> Finding:
    """No head waits behind more than its fair share and one maximal job, nor behind a job let past it."""
    finding = Finding(rule="L6")
    if history.heal is None:
        return finding
    shares = _Shares(history, finding)
    for event in history.committed(*_KINDS):
        shares.take(event)
    return finding
