"""Who starts now: one round over the heads of all queues, by band, fair share and quota, gang or nothing.

`planner.plan` calls `admit` between recovery and growth. Two passes, each from the highest band to the lowest: first
jobs within their queue's own quota, then jobs that borrow, so that nothing borrowed stands before a job that is owed.
A job that cannot start keeps what it needs (slices, chips of its quota) and says what it lacks; later jobs pass it only
where they cannot delay it. See docs/adr/0005-admission-fair-share-backfill.md. It must not create or delete slices,
and it must not look further into a queue than its window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush, merge, nsmallest
from itertools import islice

import msgspec

from penstock.domain import limits
from penstock.domain.nouns import Attempt, Job, Queue, Resources
from penstock.planner import budgets, elastic, reasons
from penstock.planner.actions import Action, Close, Drain, Finish, Place, Reason, Release, Stop, Want
from penstock.planner.backfill import Endings, end_of_job
from penstock.planner.claims import Claims
from penstock.planner.fairness import Books, Verdict, score
from penstock.planner.lines import NOBODY, Line, Outcome, Unit
from penstock.planner.placement import Fit, Gap, Ground, Option
from penstock.planner.reclaim import Found, Group, Reclaim
from penstock.planner.snapshot import QueueView, Snapshot


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """What a round decided: actions, slices to be made, slices nobody may let go, and reasons of jobs looked at."""

    actions: tuple[Action, ...]
    wants: tuple[Want, ...]
    keep: frozenset[str]
    reasons: dict[str, Reason]


def admit(snapshot: Snapshot, now: float, before: Sequence[Action] = ()) -> Admission:
    """One round. `before` are actions already planned in this tick: what they stop or release is not used."""
    return _Round(snapshot, now, before).run()


class _Round:
    def __init__(self, snapshot: Snapshot, now: float, before: Sequence[Action]) -> None:
        self.snapshot = snapshot
        self.now = now
        self.leaving = {id for id, attempt in snapshot.troubled.items() if attempt.stop is not None}
        self.leaving.update(action.attempt for action in before if isinstance(action, Stop | Close))
        released = {action.slice for action in before if isinstance(action, Release | Drain)}
        self.endings = Endings(snapshot, now, self.leaving)
        self.ground = Ground(snapshot, now, self.endings, released)
        self.claims = Claims(snapshot, now, self.ground)
        self.books = Books(snapshot)
        self._broke = {name for name, view in snapshot.queues.items() if budgets.used_up(view, now) is not None}
        self.actions: list[Action] = []
        self.wants: list[Want] = []
        self.reasons: dict[str, Reason] = {}
        self._hopeless: set[tuple[str, Resources]] = set()
        self._possible: dict[tuple[str, Resources], tuple[Option, ...]] = {}
        for attempt in elastic.surplus(snapshot, self.leaving):
            self._stop(attempt.id, "replica")
        self.reclaim = Reclaim(snapshot, self.books, self.leaving)

    def run(self) -> Admission:
        if not self.snapshot.maintenance:
            lines = self._lines()
            self._pass(lines, borrowing=False)
            self._pass(lines, borrowing=True)
            self._expand()
        return Admission(
            actions=tuple(self.actions),
            wants=tuple(self.wants),
            keep=frozenset(self.ground.touched),
            reasons=self.reasons,
        )

    # --- whose turn ---
    def _lines(self) -> list[Line]:
        short_of_minimum: dict[str, list[Job]] = {}
        for id in sorted(self.snapshot.elastic):
            job = self.snapshot.elastic[id]
            if job.cancel_at is None and job.live_chains and elastic.lacking(job):
                short_of_minimum.setdefault(job.spec.queue, []).append(job)
        lines = []
        for name in sorted(self.snapshot.queues):
            view = self.snapshot.queues[name]
            short = short_of_minimum.get(name, [])
            fresh = bool(view.waiting) and name not in self._broke
            if not view.queue.paused and (fresh or view.returning or short):
                lines.append(Line(view, self._units(view, short), self._first_in_backoff(view)))
        return [line for line in lines if line.unit is not None]

    def _first_in_backoff(self, view: QueueView) -> tuple[int, str]:
        later = [
            (-job.priority, job.id)
            for job in view.returning.values()
            if all(chain.not_before > self.now for chain in job.chains)
        ]
        return min(later, default=NOBODY)

    def _units(self, view: QueueView, short: list[Job]) -> Iterator[Unit]:
        fresh = (
            unit
            for job in (() if view.queue.name in self._broke else view.waiting)
            if job.cancel_at is None and job.id not in self.snapshot.jobs
            for unit in self._of_job(job)
        )
        if not view.returning and not short:
            return islice(fresh, limits.WINDOW_JOBS)
        early = [unit for job in (*view.returning.values(), *short) for unit in self._of_job(job)]
        early = nsmallest(limits.WINDOW_JOBS, early, key=lambda unit: unit.order)
        return islice(merge(early, fresh, key=lambda unit: unit.order), limits.WINDOW_JOBS)

    def _of_job(self, job: Job) -> Iterator[Unit]:
        if job.spec.replicas.max == 1 and not job.chains:
            yield Unit((-job.priority, job.id, 0), job, 0, True)
            return
        indexes = list(islice(elastic.vacant(job, self.now), elastic.lacking(job)))
        for index in indexes:
            yield Unit((-job.priority, job.id, index), job, index, True)
        if not indexes and not job.live_chains and elastic.bounced(job) is not None:
            yield Unit((-job.priority, job.id, 0), job, 0, False)

    def _pass(self, lines: list[Line], *, borrowing: bool) -> None:
        bands: dict[int, list[Line]] = {}
        for line in lines:
            bands.setdefault(line.queue.band, []).append(line)
        for band in sorted(bands, reverse=True):
            heap = [self._turn(line) for line in bands[band] if line.unit is not None]
            heapify(heap)
            while heap:
                line = heappop(heap)[-1]
                outcome = self._consider(line, borrowing)
                if outcome is Outcome.BORROWS:
                    continue
                line.advance()
                if outcome is Outcome.WAITS:
                    self._skip_hopeless(line)
                if line.unit is not None:
                    heappush(heap, self._turn(line))

    def _turn(self, line: Line) -> tuple[bool, float, str, str, Line]:
        """Heads before jobs that could only pass a head; then fair share; then the older head."""
        assert line.unit is not None
        share = score(line.view, self.now, self.books.charged(line.queue.name))
        return (bool(line.waiting), share, line.unit.job.id, line.queue.name, line)

    def _skip_hopeless(self, line: Line) -> None:
        """Pass jobs that ask for what was asked for in vain in this round; `explain` says why they wait.

        Their claim on the quota is noted, so that nothing behind them takes it.
        """
        if line.may_reclaim or self.claims.any_idle(line.queue.team):
            return
        if self.ground.exhausted(line.queue.team):
            line.unit = None
            return
        team, hopeless, claimed, known = line.queue.team, self._hopeless, 0, None
        while line.unit is not None:
            resources = line.unit.job.spec.resources
            if resources is not known and (team, resources) not in hopeless:
                break
            known = resources
            claimed += resources.chips * resources.slices
            line.advance()
        if claimed:
            self.books.claim(line.queue, claimed, of_cohort=True)
            line.waiting.append(lambda: self.now)

    # --- one job ---
    def _consider(self, line: Line, borrowing: bool) -> Outcome:
        unit = line.unit
        assert unit is not None
        job, queue, resources = unit.job, line.queue, unit.job.spec.resources
        options = self._feasible(queue, resources)
        if not options:
            return self._infeasible(line, job)
        feasible, options = options, tuple(self.claims.open_to(job.spec.user, options))
        if not options:
            return self._wait_for_holder(line, job, feasible)
        if not unit.due:
            return self._keep_in_backoff(line, unit, options)
        count = resources.slices
        verdicts = {o.pool.chips: self.books.check(queue, count * o.pool.chips) for o in options}
        nominal = [option for option in options if verdicts[option.pool.chips].nominal]
        if not nominal and not borrowing:
            return Outcome.BORROWS
        allowed = [o for o in (options if borrowing else nominal) if verdicts[o.pool.chips].ok]
        end = end_of_job(job, self.now)
        if allowed:
            fit = self._fit(job, allowed, end)
            if fit is not None:
                return self._start(line, unit, fit)
            if resources.slice is not None:
                return self._wait_for_that_slice(line, job, resources.slice)
            owed = [option for option in allowed if verdicts[option.pool.chips].nominal]
            return self._wait_for_slices(line, unit, allowed, owed)
        fit = self._fit_in_the_gap(line, unit, options, end)
        if fit is not None:
            return self._start(line, unit, fit)
        if nominal:
            return self._wait_for_peers(line, unit, nominal, verdicts[nominal[0].pool.chips])
        return self._wait_for_quota(line, unit, options[0], verdicts[options[0].pool.chips])

    def _fit(self, job: Job, options: Sequence[Option], end: float | None) -> Fit | None:
        """What the job's user has reserved comes before what all share."""
        team, count, environment = job.spec.team, job.spec.resources.slices, job.spec.environment
        mine = self.claims.fit(team, job.spec.user, options, count, environment)
        return mine or self.ground.fit(team, options, count, environment, end)

    def _feasible(self, queue: Queue, resources: Resources) -> tuple[Option, ...]:
        key = (queue.name, resources)
        found = self._possible.get(key)
        if found is None:
            found = self.ground.options(queue.team, resources)
            ceiling = self.books.ceiling(queue)
            if ceiling is not None:
                found = tuple(o for o in found if resources.slices * o.pool.chips <= ceiling)
            self._possible[key] = found
        return found

    def _infeasible(self, line: Line, job: Job) -> Outcome:
        line.overtakes = True
        if job.live_chains:
            return Outcome.PASSED_OVER
        since = max(job.created_at, job.updated_at) if job.chains else job.created_at
        why = reasons.infeasible(
            self.snapshot, job, self.books.ceiling(line.queue), self.now - since, limits.INFEASIBLE_S
        )
        self.reasons[job.id] = why
        if self.now - since >= limits.INFEASIBLE_S and job.id not in self.snapshot.attempts_of:
            self.actions.append(Finish(job=job.id, cancelled=False, reason=why.sentence))
        return Outcome.PASSED_OVER

    def _keep_in_backoff(self, line: Line, unit: Unit, options: Sequence[Option]) -> Outcome:
        """A gang that lost a slice keeps the others meanwhile, or smaller jobs take them and it starts over."""
        until = elastic.bounced(unit.job) or self.now
        slices = self.ground.fullest(line.queue.team, options, unit.job.spec.resources.slices)
        self.ground.keep(slices, until)
        self.reasons[unit.job.id] = reasons.in_backoff(unit.job, until, self.now)
        line.overtakes = True
        return Outcome.PASSED_OVER

    def _start(self, line: Line, unit: Unit, fit: Fit) -> Outcome:
        overtakes = line.overtakes or line.in_backoff < unit.order[:2]
        self._place(line.queue, unit.job, unit.replica, fit, overtakes or fit.on_kept)
        return Outcome.STARTED

    def _place(self, queue: Queue, job: Job, replica: int, fit: Fit, backfilled: bool) -> None:
        chips = sum(slice.chips for slice in fit.slices)
        self.ground.take(self.claims.take(fit.slices))
        self.endings.started(queue.name, fit.slices, end_of_job(job, self.now))
        borrowed = self.books.start(queue, chips)
        self.actions.append(
            Place(
                job=job.id,
                replica=replica,
                slices=tuple(slice.id for slice in fit.slices),
                chips=chips,
                band=queue.band,
                borrowed=borrowed,
                backfilled=backfilled,
            )
        )

    def _fit_in_the_gap(self, line: Line, unit: Unit, options: Sequence[Option], end: float) -> Fit | None:
        """Quota that an earlier job of the queue waits for may be used by what is over before that job can start."""
        if not line.waiting or not self.ground.any_idle(line.queue.team):
            return None
        count = unit.job.spec.resources.slices
        free = [
            option for option in options if self.books.check(line.queue, count * option.pool.chips, claims=False).ok
        ]
        fit = self.ground.fit(line.queue.team, free, count, unit.job.spec.environment, end)
        if fit is None or any(shadow() < end for shadow in line.waiting):
            return None
        return fit

    # --- what a job does that cannot start ---
    def _waits(self, line: Line, shadow: Callable[[], float]) -> Outcome:
        line.waiting.append(shadow)
        line.overtakes = True
        return Outcome.WAITS

    def _wait_for_slices(self, line: Line, unit: Unit, options: Sequence[Option], owed: Sequence[Option]) -> Outcome:
        job, team, count = unit.job, line.queue.team, unit.job.spec.resources.slices
        gap = self.ground.gather(team, options, count)
        released = self.ground.clear_way(team, options, gap) if gap.short else []
        self.actions.extend(Release(slice.id, "room_for_waiting_job") for slice in released)
        self.ground.hold_rest(team, gap)
        found: Found | None = None
        if gap.short and not released and owed and line.may_reclaim and self.reclaim.possible(line.queue):
            found = self._reclaim(line, unit, self._groups(team, gap, owed, count), 0)
        if gap.short and not released and found is None:
            line.may_reclaim = False
            if not (gap.idle or gap.coming or gap.wanted or self.ground.could_lend(team, options, count)):
                self._hopeless.add((team, job.spec.resources))
        self._gather(unit, gap, found)
        chips = count * gap.options[0].pool.chips
        self.books.claim(line.queue, chips, of_cohort=True)
        if gap.wanted and (found or not gap.short):
            self.books.asked[line.queue.name] += chips
        self._explain_gap(job, gap, found, options)
        return self._waits(line, lambda: self._slices_at(options, gap))

    def _wait_for_that_slice(self, line: Line, job: Job, slice: str) -> Outcome:
        """It wants one slice and no other: no room is made for it, and it holds nobody up."""
        line.overtakes = True
        self._say(job, reasons.slice_busy(self.snapshot, slice))
        return Outcome.PASSED_OVER

    def _wait_for_holder(self, line: Line, job: Job, options: Sequence[Option]) -> Outcome:
        """All it could use is reserved: it holds nobody up."""
        line.overtakes = True
        if not job.live_chains:
            self._say(job, reasons.reserved(job, options[0].pool))
        return Outcome.PASSED_OVER

    def _slices_at(self, options: Sequence[Option], gap: Gap) -> float:
        """When a job that waits for slices could start: unknown, hence now, while slices are being made for it."""
        if not gap.short:
            return gap.shadow
        return min(self.endings.slices_free_at(o.pool.name, o.zones, gap.short) for o in options)

    def _wait_for_peers(self, line: Line, unit: Unit, nominal: Sequence[Option], verdict: Verdict) -> Outcome:
        """It is owed the chips, but peers have borrowed them."""
        queue, count, chips = line.queue, unit.job.spec.resources.slices, verdict.short
        found: Found | None = None
        if line.may_reclaim and self.reclaim.possible(queue):
            fit = self.ground.fit(queue.team, nominal, count, unit.job.spec.environment, None)
            if fit is not None:
                found = self._reclaim(line, unit, (), chips)
                if found is not None:
                    self.ground.keep(fit.slices, self.now)
            else:
                gap = self.ground.gather(queue.team, nominal, count)
                groups = self._groups(queue.team, gap, nominal, count) if gap.short else ()
                found = self._reclaim(line, unit, groups, chips)
                if found is not None:
                    self._gather(unit, gap, found)
        needed = count * nominal[0].pool.chips
        self.books.claim(queue, needed, of_cohort=True)
        if found is None:
            line.may_reclaim = False
            self._say(unit.job, reasons.no_quota("quota", queue, verdict.used, verdict.limit or 0, needed))
        views = self.books.cohorts[queue.team].views
        return self._waits(line, lambda: self.endings.chips_free_at(views, chips))

    def _wait_for_quota(self, line: Line, unit: Unit, option: Option, verdict: Verdict) -> Outcome:
        """Over the ceiling, or peers have nothing to lend. Extras of the queue's own elastic jobs give way."""
        queue, chips = line.queue, unit.job.spec.resources.slices * option.pool.chips
        limit = verdict.limit or 0
        short = verdict.used + chips - limit
        victims = None if line.waiting else self.reclaim.own_extras(queue, short)
        if victims is None:
            self._say(unit.job, reasons.no_quota(verdict.code, queue, verdict.used, limit, chips))
        else:
            self._stop_all(unit.job, victims)
        line.may_reclaim = False
        self.books.claim(queue, chips, of_cohort=False)
        views = self.books.cohorts[queue.team].views if verdict.short else [line.view]
        return self._waits(line, lambda: self.endings.chips_free_at(views, short))

    # --- giving way ---
    def _groups(self, team: str, gap: Gap, options: Sequence[Option], count: int) -> list[Group]:
        """Where the job could gather, and what it lacks there."""
        groups = []
        for option in options:
            room = self.ground.room(team, option.pool)
            for zone in option.zones:
                if gap.zone == zone and gap.options[0] == option:
                    groups.append(Group(option, zone, gap.short))
                    continue
                bucket = self.ground.bucket(team, option.pool, zone)
                idle = bucket.free if bucket is not None else 0
                coming = self.ground.coming(team, option.pool, (zone,))
                groups.append(Group(option, zone, max(1, count - idle - coming - room)))
        return groups

    def _reclaim(self, line: Line, unit: Unit, groups: Sequence[Group], chips: int) -> Found | None:
        found = self.reclaim.find(line.queue, unit.job.id, groups, chips)
        if found is not None:
            self._stop_all(unit.job, found.victims)
        return found

    def _stop_all(self, job: Job, victims: Sequence[Attempt]) -> None:
        chips = 0
        for attempt in victims:
            self.actions.append(Stop(attempt.id, "reclaimed"))
            chips += attempt.chips
        self._say(job, reasons.reclaiming(len(victims), chips))

    def _stop(self, attempt: str, why: str) -> None:
        self.leaving.add(attempt)
        self.actions.append(Stop(attempt, why))

    def _gather(self, unit: Unit, gap: Gap, found: Found | None) -> None:
        """Keep the idle slices the gang counts on, and ask for those that must be made.

        While a limit keeps the rest from being had, room for part of a gang is kept, but not used: idle slices cost.
        """
        team, resources = unit.job.spec.team, unit.job.spec.resources
        group = found.group if found is not None else None
        if group is not None and (group.zone, group.option) != (gap.zone, gap.options[0]):
            bucket = self.ground.bucket(team, group.option.pool, group.zone)
            if bucket is not None:
                self.ground.keep(bucket.best(min(bucket.free, resources.slices), ""), self.now)
            return
        if found is None:
            self.ground.keep(gap.idle[gap.spare :], gap.shadow)
        else:
            self.ground.keep(gap.idle, self.now)
        asked = gap.coming + (gap.wanted if found is not None or not gap.short else 0)
        if asked:
            self.wants.append(
                Want(
                    job=unit.job.id,
                    team=team,
                    pools=tuple(option.pool.name for option in gap.options),
                    slices=asked,
                    zones=resources.zones if gap.zone is None else (gap.zone,),
                    same_zone=resources.slices > 1,
                )
            )

    # --- elastic extras ---
    def _expand(self) -> None:
        """Replicas beyond the minimum, one at a time, after everybody else: they delay nobody."""
        heap = []
        for id in sorted(self.snapshot.elastic):
            job = self.snapshot.elastic[id]
            view = self.snapshot.queues[job.spec.queue]
            more = min(limits.ELASTIC_STEP, elastic.room_for_extras(job))
            if more > 0 and job.cancel_at is None and not view.queue.paused and view.queue.name not in self._broke:
                indexes = islice(elastic.vacant(job, self.now), more)
                heap.append((*self._extra_turn(view, job), view, indexes))
        heapify(heap)
        while heap:
            *_, id, view, indexes = heappop(heap)
            job = self.snapshot.elastic[id]
            index = next(indexes, None)
            if index is not None and self._add_replica(view.queue, job, index):
                heappush(heap, (*self._extra_turn(view, job), view, indexes))

    def _extra_turn(self, view: QueueView, job: Job) -> tuple[int, float, int, str]:
        share = score(view, self.now, self.books.charged(view.queue.name))
        return (-view.queue.band, share, -job.priority, job.id)

    def _add_replica(self, queue: Queue, job: Job, index: int) -> bool:
        resources = job.spec.resources
        options = [
            option
            for option in self.claims.open_to(job.spec.user, self._feasible(queue, resources))
            if self.books.check(queue, resources.slices * option.pool.chips).ok
        ]
        if not options:
            return False
        fit = self._fit(job, options, None)
        if fit is not None:
            self._place(queue, job, index, fit, backfilled=False)
            return True
        gap = self.ground.gather(queue.team, options, resources.slices)
        if gap.short or not (gap.coming or gap.wanted):
            return False
        self._gather(Unit((0, job.id, index), job, index, True), gap, None)
        chips = resources.slices * gap.options[0].pool.chips
        self.books.claim(queue, chips, of_cohort=True)
        self.books.asked[queue.name] += chips
        return True

    # --- reasons ---
    def _say(self, job: Job, why: Reason) -> None:
        self.reasons.setdefault(job.id, why)

    def _explain_gap(self, job: Job, gap: Gap, found: Found | None, options: Sequence[Option]) -> None:
        if found is not None or job.live_chains:
            return
        if not gap.short:
            self._say(job, reasons.creating(job, len(gap.idle), gap.coming, gap.wanted))
            return
        if self.ground.could_lend(job.spec.team, options, job.spec.resources.slices):
            self._say(job, reasons.kept_for_head(job))
            return
        pool = gap.options[0].pool
        code, used, limit = self.ground.binding(job.spec.team, pool)
        advice = reasons.advise(self.snapshot, job, self.ground.touched)
        if pool.per_zone is not None:
            self._say(job, reasons.fleet_busy(job, pool, advice))
        else:
            self._say(job, reasons.no_capacity(job, code, pool, used, limit, advice))
