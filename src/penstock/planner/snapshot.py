"""The planner's view of the world: what is live, and the heads of the queues, kept indexed between ticks.

`controller.projection` keeps one `Snapshot` up to date from the event log (`put_*`, `drop_*`), tests build small ones
by hand with the same calls. Everything derived here (idle slices, chips in use, returning jobs) is maintained with
each change, so that a tick costs what changed, not what exists. The planner only reads it.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from penstock.domain.lifecycle import (
    BILLED_SLICE_STATES,
    COUNTED_SLICE_STATES,
    LIVE_ATTEMPT_STATES,
    TERMINAL_JOB_STATES,
    JobState,
    SliceState,
)
from penstock.domain.nouns import Attempt, Bound, Job, Pool, Queue, Quota, Slice, Team, Zone
from penstock.planner.deadlines import Deadlines

#: Slices an attempt can go on running on.
SERVING_SLICE_STATES = frozenset({SliceState.READY, SliceState.DRAINING})


class Mute(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A zone that could not be listed: what is there cannot be seen, and what is not there cannot be proven."""

    seconds: float  #: since the first of the listings that had no answer began
    said: str = ""  #: what the last of them got instead; "" while there was nothing at all
    denied: bool = False  #: it answers, and will not let us look


class Witness(msgspec.Struct):
    """What this process has seen with its own steady clock; ages in seconds. Lost at a restart, and seen again.

    Nothing here is compared with another machine's clock, so a jump of any clock cannot shorten a wait.
    """

    silent: dict[str, float] = {}  #: slice -> seconds since its most silent host was last heard
    absent: dict[str, float] = {}  #: slice -> seconds between the first and the last complete listing without it
    unjoined: dict[str, float] = {}  #: slice -> seconds the provider has said READY, hosts still missing
    missing: set[str] = set()  #: slices the last direct get said do not exist
    denied: set[str] = set()  #: slices a direct get, after those listings, said do not exist
    fenced: dict[str, float] = {}  #: attempt -> seconds since this process saw its higher fence written
    stopping: dict[str, float] = {}  #: attempt -> seconds since this process saw its stop order
    asked: dict[str, float] = {}  #: slice -> seconds since the provider was asked about it directly
    deletes: dict[str, float] = {}  #: slice -> seconds since delete was last called
    tried: dict[str, float] = {}  #: slice -> seconds since a create of it was first left without an answer
    unmade: set[str] = set()  #: slices of which it is certain that nothing was ever made
    mute: dict[tuple[str, str], Mute] = {}  #: (provider, zone) -> why it cannot be listed
    busy: set[str] = set()  #: slices with a provider call in flight
    overdue: set[str] = set()  #: attempts past their timeout and grace
    objects_down: bool = False  #: the bucket could not be written when last tried


class QueueView:
    """One queue with what waits and runs in it."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.waiting: list[Job] = []  #: the window: first jobs never placed, best first
        self.waiting_total = 0
        self.returning: dict[str, Job] = {}  #: queued again after an attempt; outside the window
        self.live_chips = 0
        self.live_chip_starts = 0.0  #: sum of chips x start time of live attempts: accrual in one subtraction
        self.live: dict[str, Attempt] = {}  #: live attempts


class Snapshot:
    """All that is live, indexed. See the module's first lines for who may change it."""

    def __init__(self) -> None:
        self.maintenance = False
        self.teams: dict[str, Team] = {}
        self.pools: dict[str, Pool] = {}
        self.queues: dict[str, QueueView] = {}
        self.zones: dict[str, Zone] = {}
        self.limits: dict[tuple[str, str], int | None] = {}  #: (scope, name) -> chips
        self.used: dict[tuple[str, str], int] = defaultdict(int)  #: (scope, name) -> chips
        self.slices: dict[str, Slice] = {}
        self.attempts: dict[str, Attempt] = {}
        self.jobs: dict[str, Job] = {}  #: unfinished jobs that were placed at least once
        self.witness = Witness()
        # indexes
        self.idle: dict[tuple[str, str], dict[str, Slice]] = {}  #: (team, accelerator) -> usable slices
        self.unsettled: dict[str, Slice] = {}  #: slices that are not simply ready, in use or usable
        self.pool_slices: dict[str, dict[str, Slice]] = {}  #: counted slices of each pool
        self.races: dict[str, dict[str, Slice]] = {}
        self.reserved: dict[str, Slice] = {}  #: slices somebody reserved, be it over or not
        self.elastic: dict[str, Job] = {}  #: placed jobs with more than one replica
        self.cancelling: dict[str, Job] = {}
        self.attempts_of: dict[str, dict[int, Attempt]] = {}  #: job -> replica -> live attempt
        self.troubled: dict[str, Attempt] = {}  #: attempts with an exit, a stop order or a fence
        self.holders: dict[str, str] = {}  #: slice -> the live attempt bound to it
        self.bereft: dict[str, Attempt] = {}  #: attempts one of whose slices broke, left or was replaced
        self.timeouts = Deadlines()  #: when each live attempt has had all its time

    # --- teams, pools, queues, zones, limits ---
    def put_team(self, team: Team) -> None:
        self.teams[team.name] = team
        self.limits["team", team.name] = team.chip_limit

    def put_pool(self, pool: Pool) -> None:
        self.pools[pool.name] = pool
        self.limits["pool", pool.name] = pool.max * pool.chips

    def put_queue(self, queue: Queue) -> None:
        view = self.queues.get(queue.name)
        if view is None:
            self.queues[queue.name] = QueueView(queue)
        else:
            view.queue = queue

    def put_zone(self, zone: Zone) -> None:
        self.zones[zone.id] = zone

    def put_quota(self, quota: Quota) -> None:
        if quota.scope == "provider":
            self.limits[quota.scope, quota.name] = quota.limit_chips

    # --- jobs ---
    def put_job(self, job: Job) -> None:
        """An unfinished job that was placed at least once; anything else is dropped from the live view."""
        self.drop_job(job.id)
        if job.state in TERMINAL_JOB_STATES or not job.chains:
            return
        self.jobs[job.id] = job
        if job.state is JobState.QUEUED and job.cancel_at is None:
            self.queues[job.spec.queue].returning[job.id] = job
        if job.spec.replicas.max > 1:
            self.elastic[job.id] = job
        if job.cancel_at is not None:
            self.cancelling[job.id] = job

    def drop_job(self, id: str) -> None:
        old = self.jobs.pop(id, None)
        if old is not None:
            self.queues[old.spec.queue].returning.pop(id, None)
            self.elastic.pop(id, None)
            self.cancelling.pop(id, None)

    # --- attempts ---
    def put_attempt(self, attempt: Attempt) -> None:
        self._forget_attempt(attempt.id)
        if attempt.state not in LIVE_ATTEMPT_STATES:
            self.timeouts.drop(attempt.id)
            return
        self.attempts[attempt.id] = attempt
        self.attempts_of.setdefault(attempt.job, {})[attempt.replica] = attempt
        view = self.queues[attempt.queue]
        view.live[attempt.id] = attempt
        view.live_chips += attempt.chips
        view.live_chip_starts += attempt.chips * attempt.created_at
        if attempt.exits or attempt.stop or attempt.fencing_at is not None:
            self.troubled[attempt.id] = attempt
        for bound in attempt.slices:
            self.holders[bound.slice] = attempt.id
        self._check_hold(attempt)
        began = attempt.created_at if attempt.started_at is None else attempt.started_at
        self.timeouts.put(attempt.id, began + attempt.timeout_s)

    def _forget_attempt(self, id: str) -> None:
        old = self.attempts.pop(id, None)
        if old is None:
            return
        self.troubled.pop(id, None)
        self.bereft.pop(id, None)
        for bound in old.slices:
            if self.holders.get(bound.slice) == id:
                del self.holders[bound.slice]
        replicas = self.attempts_of.get(old.job, {})
        if replicas.get(old.replica) is old:
            del replicas[old.replica]
            if not replicas:
                del self.attempts_of[old.job]
        view = self.queues[old.queue]
        view.live.pop(old.id, None)
        view.live_chips -= old.chips
        view.live_chip_starts = view.live_chip_starts - old.chips * old.created_at if view.live_chips else 0.0

    def _check_hold(self, attempt: Attempt) -> None:
        if all(self._holds(bound) for bound in attempt.slices):
            self.bereft.pop(attempt.id, None)
        else:
            self.bereft[attempt.id] = attempt

    def _holds(self, bound: Bound) -> bool:
        slice = self.slices.get(bound.slice)
        if slice is None or slice.provider_id != bound.provider_id:
            return False
        return slice.state in SERVING_SLICE_STATES

    # --- slices ---
    def put_slice(self, slice: Slice) -> None:
        self._forget_slice(slice.id)
        self._add_slice(slice)
        holder = self.attempts.get(self.holders.get(slice.id, ""))
        if holder is not None:
            self._check_hold(holder)

    def _add_slice(self, slice: Slice) -> None:
        if slice.state is SliceState.GONE:
            return
        self.slices[slice.id] = slice
        if slice.reserved is not None:
            self.reserved[slice.id] = slice
        if slice.state in BILLED_SLICE_STATES:
            self.used["provider", slice.provider] += slice.chips
        if slice.race is not None:
            self.races.setdefault(slice.race, {})[slice.id] = slice
        if slice.state in COUNTED_SLICE_STATES:
            self.pool_slices.setdefault(slice.pool, {})[slice.id] = slice
            if self._counts_in_race(slice):
                self.used["team", slice.team] += slice.chips
                self.used["pool", slice.pool] += slice.chips
        if slice.usable:
            self.idle.setdefault((slice.team, slice.accelerator), {})[slice.id] = slice
        if slice.state is not SliceState.READY or slice.dirty:
            self.unsettled[slice.id] = slice

    def _forget_slice(self, id: str) -> None:
        old = self.slices.pop(id, None)
        if old is None:
            return
        self.unsettled.pop(id, None)
        self.reserved.pop(id, None)
        if old.state in BILLED_SLICE_STATES:
            self.used["provider", old.provider] -= old.chips
        if old.state in COUNTED_SLICE_STATES:
            del self.pool_slices[old.pool][id]
            if self._counts_in_race(old):
                self.used["team", old.team] -= old.chips
                self.used["pool", old.pool] -= old.chips
        if old.race is not None:
            del self.races[old.race][id]
            if not self.races[old.race]:
                del self.races[old.race]
        idle = self.idle.get((old.team, old.accelerator))
        if idle is not None and idle.pop(id, None) is not None and not idle:
            del self.idle[old.team, old.accelerator]

    def _counts_in_race(self, slice: Slice) -> bool:
        """A racing set counts once for team and pool: only while no other of its slices is counted."""
        if slice.race is None:
            return True
        return not any(
            other.state in COUNTED_SLICE_STATES
            for other in self.races.get(slice.race, {}).values()
            if other.id != slice.id
        )

    def ever_free_chips(self, scope: str, name: str, pool: Pool) -> int | None:
        """Chips a pool could ever have under a limit: what other pools always hold (minimum, fleet) is taken."""
        limit = self.limits.get((scope, name))
        if limit is None:
            return None
        others = (
            each.chips * each.always
            for each in self.pools.values()
            if each.name != pool.name and not each.deleted and name == (each.team if scope == "team" else each.provider)
        )
        return limit - sum(others)

    def free_chips(self, scope: str, name: str) -> int | None:
        """Chips left under a limit; None when there is none."""
        limit = self.limits.get((scope, name))
        return None if limit is None else limit - self.used[scope, name]
