"""Why a job is not running: the table of codes, and the sentence, numbers and advice for each.

`planner.admission` makes reasons for the jobs it looked at, `planner.plan` merges those of growth, and `explain`
answers for every other job when somebody asks: jobs far back in a queue, in back-off, starting, blocked. Codes are
stable, sentences are not. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from penstock.domain.budgets import HOUR_S, Spent, Unit, amount, called
from penstock.domain.endings import said_of_stop
from penstock.domain.lifecycle import JobState
from penstock.domain.nouns import Job, Pool, Queue
from penstock.planner import budgets
from penstock.planner.actions import Reason
from penstock.planner.snapshot import Snapshot

#: Every code, and what it means. Programs may rely on these; the sentences are for people.
CODES: Final[Mapping[str, str]] = {
    "behind_head": "other jobs of the queue come first",
    "waiting_for_capacity": "no slice of the wanted kind is free, and no more may be made",
    "creating_slices": "slices for it are being made",
    "zone_backoff": "the zones refused lately; they are tried again at a known time",
    "zone_mute": "the zones cannot be seen, for their API does not answer or refuses; nothing is asked for there",
    "quota": "the queue's quota is in use, and its peers have nothing to lend",
    "borrow_limit": "the queue has borrowed all it may",
    "team_limit": "the team's limit on chips is reached",
    "pool_at_max": "the pool has as many slices as it may have",
    "provider_limit": "the provider's limit on chips is reached",
    "infeasible": "no pool can ever hold it",
    "backoff": "it failed lately and waits before it tries again",
    "blocked": "it waits for other jobs to succeed",
    "array_full": "as many jobs of its array are under way as may be at once",
    "paused": "its queue is paused",
    "budget": "its queue has spent its budget: nothing new of it starts until the next day, week or month",
    "reserved": "what it could use is reserved by somebody else",
    "maintenance": "the installation is in maintenance: nothing new starts",
    "reserved_for_head": "the free slices are kept for a job ahead of it",
    "slice_busy": "it asked for one slice by name, and that one is not free",
    "running": "it runs",
    "starting": "its slices are found and its processes are being started",
    "stopping": "it is being stopped",
    "reclaiming": "borrowed or less urgent work is being stopped for it",
}


def reason(code: str, sentence: str, advice: str = "", **numbers: float) -> Reason:
    if code not in CODES:
        raise KeyError(f"{code} is not in the table of reason codes; add it to CODES")
    return Reason(code=code, sentence=sentence, numbers=numbers, advice=advice)


def kind(job: Job) -> str:
    """What a job asks for, as one would say it."""
    resources = job.spec.resources
    names = " or ".join(resources.accelerators)
    return f"{resources.slices} slices of {names}" if resources.slices > 1 else f"a {names} slice"


def advise(snapshot: Snapshot, job: Job, taken: AbstractSet[str]) -> str:
    """The cheapest change that would let the job start on what is idle now; empty when nothing idle would do."""
    resources, team = job.spec.resources, job.spec.team
    idle: dict[str, list[str]] = {}
    chips: dict[str, int] = {}
    for (owner, accelerator), slices in snapshot.idle.items():
        if owner == team:
            free = sorted(one.zone for one in slices.values() if one.id not in taken)
            if free:
                idle[accelerator] = free
                chips[accelerator] = next(iter(slices.values())).chips
    own = [accelerator for accelerator in resources.accelerators if accelerator in idle]
    if own:
        there = idle[own[0]]
        elsewhere = [zone for zone in there if resources.zones and zone not in resources.zones]
        if len(elsewhere) >= resources.slices:
            return f"allow zone {elsewhere[0]}: {_idle(len(elsewhere), own[0])} there now"
        if resources.slices > 1:
            most = max(there.count(zone) for zone in there)
            if most < resources.slices:
                return f"ask for {most} slices instead of {resources.slices}: that many are idle in one zone now"
    others = [name for name in idle if name not in resources.accelerators and len(idle[name]) >= resources.slices]
    if others:
        best = min(others, key=lambda name: (abs(chips[name] - resources.chips), name))
        return f"accept {best} as well: {_idle(len(idle[best]), best)} now"
    return ""


def _idle(count: int, accelerator: str) -> str:
    return f"1 slice of {accelerator} is idle" if count == 1 else f"{count} slices of {accelerator} are idle"


# --- made during a round ---
def infeasible(snapshot: Snapshot, job: Job, ceiling: int | None, waited_s: float, limit_s: float) -> Reason:
    """Says which rule no pool could meet, tried in the order a user would change things."""
    resources, team = job.spec.resources, job.spec.team
    pools = [
        pool
        for _, pool in sorted(snapshot.pools.items())
        if not pool.deleted and (team == pool.team or team in pool.teams)
    ]
    right = [pool for pool in pools if pool.accelerator in resources.accelerators]
    needed = resources.chips * resources.slices
    left = max(0.0, limit_s - waited_s)
    names = " or ".join(resources.accelerators)
    if resources.slice is not None:
        why, advice = f"there is no slice {resources.slice} of {names} for it", "ask for the accelerator instead"
    elif not right:
        have = ", ".join(dict.fromkeys(pool.accelerator for pool in pools)) or "none at all"
        why, advice = f"team {team} has no pool of {names}", f"make such a pool, or ask for one of: {have}"
    elif not (fitting := _allowed(right, job)):
        why = f"no pool of {names} meets the job's own pool, zone or spot condition"
        advice = f"drop the condition: {', '.join(pool.name for pool in right)} would do"
    elif all(resources.slices > _most(pool) for pool in fitting):
        most = max(_most(pool) for pool in fitting)
        why = f"it asks for {resources.slices} slices and the largest pool may have {most} in one place"
        advice = f"ask for {most} slices or fewer, or raise the maximum of pool {fitting[0].name}"
    elif (short := _short(snapshot, job, fitting)) is not None:
        scope, name, most = short
        why = f"it needs {needed} chips and {scope} {name} leaves {most} beside what its pools always hold"
        advice = f"ask for a smaller gang, or raise the limit of {scope} {name}"
    else:
        why = f"it needs {needed} chips and queue {job.spec.queue} may never use more than {ceiling}"
        advice = "ask for a smaller gang, or raise the queue's quota"
    sentence = f"No pool can ever run this: {why}. The job fails in {left:.0f} s if that stays so."
    return reason("infeasible", sentence, advice, chips=needed, fails_in_s=left)


def _short(snapshot: Snapshot, job: Job, pools: list[Pool]) -> tuple[str, str, int] | None:
    """The limit of the team or provider under which no pool can ever hold the gang, and what it leaves."""
    found = None
    for pool in pools:
        chips = job.spec.resources.slices * pool.chips
        for scope, name in (("team", job.spec.team), ("provider", pool.provider)):
            most = snapshot.ever_free_chips(scope, name, pool)
            if most is not None and chips > most:
                found = (scope, name, max(0, most))
                break
        else:
            return None
    return found


def _allowed(pools: list[Pool], job: Job) -> list[Pool]:
    resources = job.spec.resources
    return [
        pool
        for pool in pools
        if resources.pool in {None, pool.name}
        and resources.spot in {None, pool.spot}
        and (not resources.zones or any(zone in resources.zones for zone in pool.zones))
    ]


def _most(pool: Pool) -> int:
    return pool.max if pool.per_zone is None else min(pool.max, pool.per_zone)


def no_quota(code: str, queue: Queue, used: int, limit: int, chips: int) -> Reason:
    if code == "borrow_limit":
        sentence = (
            f"Queue {queue.name} may use {limit} chips with borrowed ones and {used} are taken; this needs {chips}."
        )
        advice = f"raise borrow_chips of queue {queue.name} by {used + chips - limit}, or ask for a smaller gang"
    elif queue.borrow_chips == 0:
        sentence = (
            f"Queue {queue.name} owns {limit} chips and {used} are taken; this needs {chips}, and it may not borrow."
        )
        advice = f"let queue {queue.name} borrow, or raise its quota by {used + chips - limit} chips"
    else:
        sentence = (
            f"The queues of team {queue.team} own {limit} chips together and {used} are taken; this needs {chips}."
        )
        advice = f"raise the quota of queue {queue.name} by {used + chips - limit} chips, or ask for a smaller gang"
    return reason(code, sentence, advice, used_chips=used, limit_chips=limit, chips=chips)


def no_capacity(job: Job, code: str, pool: Pool, used: int, limit: int, advice: str) -> Reason:
    """A limit keeps more slices from being made."""
    what = {
        "team_limit": f"team {job.spec.team} uses {used} of its {limit} chips",
        "provider_limit": f"provider {pool.provider} allows {limit} chips and {used} are in use",
        "pool_at_max": f"pool {pool.name} may have {pool.max} slices, and all are in use or promised to jobs ahead",
    }[code]
    cure = {
        "team_limit": f"raise the limit of team {job.spec.team}",
        "provider_limit": "ask the provider for more quota",
        "pool_at_max": f"raise the maximum of pool {pool.name}",
    }[code]
    sentence = f"It needs {kind(job)}; what it could use is busy, and not enough can be made: {what}."
    if pool.adopted and code == "pool_at_max":  # nothing is ever made for such a pool, whatever its maximum
        doing = "is in use" if used else "is gone, or was let go"
        sentence = f"It needs {kind(job)}; pool {pool.name} is one TPU that was adopted, and that {doing}."
        advice = (
            "wait for it" if used else f"`tpu adopt {pool.name} --zone {pool.zones[0]}` takes over one of that name"
        )
    return reason(code, sentence, advice or cure, used_chips=used, limit_chips=limit)


def slice_busy(snapshot: Snapshot, slice: str) -> Reason:
    """The job asked for one slice by name, and that one is not free."""
    attempt = snapshot.attempts.get(snapshot.slices[slice].attempt or "")
    doing = f"runs job {attempt.job}" if attempt is not None else "is not ready, or kept for a job ahead"
    return reason("slice_busy", f"It asked for slice {slice}, which {doing}.", "drop the wish, and any slice will do")


def reserved(job: Job, pool: Pool) -> Reason:
    claim = pool.reserved
    assert claim is not None
    note = f" ({claim.note})" if claim.note else ""
    sentence = f"It needs {kind(job)}, and pool {pool.name} is reserved by {claim.user}{note}."
    return reason("reserved", sentence, f"wait, ask {claim.user}, or accept another pool", until=claim.until)


def budget_spent(queue: Queue, book: Spent, running: int) -> Reason:
    budget = queue.budget
    assert budget is not None
    used = amount(book.of(budget.unit), budget.unit)
    if budget.unit is Unit.USD and book.unpriced_chip_s:
        used = f"at least {used}: {amount(book.unpriced_chip_s / HOUR_S, Unit.CHIP_HOURS)} have no known price"
    rest = "; what runs goes on" if running else ""
    sentence = (
        f"queue {queue.name}: budget of {amount(budget.limit, budget.unit)} for {called(book.window, book.since)}"
        f" is used up ({used}){rest}."
    )
    advice = f"raise the budget of queue {queue.name}, or wait for the next {budget.window.value}"
    return reason("budget", sentence, advice, limit=budget.limit, used=book.of(budget.unit))


def creating(job: Job, idle: int, coming: int, wanted: int) -> Reason:
    need = job.spec.resources.slices
    beside = f", {idle} stand ready and are kept for it" if idle else ""
    sentence = f"It needs {kind(job)}: {coming + wanted} of {need} are being made{beside}."
    return reason("creating_slices", sentence, idle=idle, coming=coming, asked=wanted, slices=need)


def reclaiming(victims: int, chips: int) -> Reason:
    doing = f"{victims} attempts ({chips} chips) were asked to stop" if victims else "attempts are stopping already"
    sentence = f"It is within its queue's quota, so others give way: {doing}; they go on later."
    return reason("reclaiming", sentence, victims=victims, chips=chips)


def fleet_busy(job: Job, pool: Pool, advice: str) -> Reason:
    sentence = f"Every slice it could use is busy: it needs {kind(job)}, and fleet {pool.name} has a fixed size."
    return reason(
        "waiting_for_capacity", sentence, advice or f"enlarge fleet {pool.name}", slices=job.spec.resources.slices
    )


def kept_for_head(job: Job) -> Reason:
    sentence = "Slices it could use are idle but kept for a job ahead of it, and it might not be over in time."
    advice = "give a shorter expected_s or timeout_s, so that it can run in the gap"
    return reason("reserved_for_head", sentence, advice, timeout_s=job.spec.timeout_s)


def in_backoff(job: Job, until: float, now: float) -> Reason:
    left = max(0.0, until - now)
    chain = job.chain(0)
    cause = chain.last_cause.value if chain.last_cause else "a failure"
    sentence = f"After {cause} it waits {left:.0f} s more before attempt {chain.attempts + 1}."
    return reason("backoff", sentence, seconds=left, attempts=chain.attempts)


# --- made when asked ---
def explain(snapshot: Snapshot, plan_reasons: Mapping[str, Reason], job: Job, position: int, now: float) -> Reason:
    """The reason of any job that is not running and not finished. `position` counts from 1 in its queue."""
    found = _of_its_state(snapshot, job)
    if found is not None:
        return found
    if job.blocked:
        sentence = f"It waits for {job.blocked} of the {len(job.spec.after)} jobs it comes after."
        return reason("blocked", sentence, "cancel it, or finish the jobs it waits for", jobs=job.blocked)
    if job.held and job.spec.throttle is not None:
        return _array_full(snapshot, job, job.spec.throttle.at_most)
    if snapshot.maintenance:
        return reason("maintenance", "The installation is in maintenance: running jobs go on, none start.")
    view = snapshot.queues[job.spec.queue]
    if view.queue.paused:
        return reason("paused", f"Queue {view.queue.name} is paused.", f"resume queue {view.queue.name}")
    if not job.chains and (book := budgets.used_up(view, now)) is not None:
        return budget_spent(view.queue, book, len(view.live))
    if job.id in plan_reasons:
        return plan_reasons[job.id]
    if job.chains:
        until = min(chain.not_before for chain in job.chains)
        if until > now:
            return in_backoff(job, until, now)
    head = next((one for one in _first_of(snapshot, job.spec.queue) if one.id in plan_reasons), None)
    ahead = f" The first, {head.id}, waits: {plan_reasons[head.id].sentence}" if head is not None else ""
    sentence = f"It is number {position} of queue {view.queue.name}.{ahead}"
    advice = plan_reasons[head.id].advice if head is not None else ""
    return reason("behind_head", sentence, advice, position=position)


def _array_full(snapshot: Snapshot, job: Job, at_most: int) -> Reason:
    name = job.spec.member.array if job.spec.member is not None else ""
    mine = (one for one in snapshot.jobs.values() if one.spec.throttle == job.spec.throttle)
    running = sum(1 for one in mine if one.state is not JobState.QUEUED)
    rest = f", {at_most - running} about to" if running < at_most else ""
    sentence = f"Array {name}: {running} of {at_most} running{rest}; it is let in when one of them ends."
    return reason("array_full", sentence, "wait, or cancel others of the array", running=running, at_most=at_most)


def _of_its_state(snapshot: Snapshot, job: Job) -> Reason | None:
    live = snapshot.attempts_of.get(job.id, {})
    if job.cancel_at is not None:
        return reason("stopping", f"It was cancelled; {len(live)} attempts are being stopped.", attempts=len(live))
    if job.state is JobState.QUEUED:
        return None
    if live and all(attempt.stop is not None for attempt in live.values()):
        orders = {attempt.stop.why: said_of_stop(attempt) for attempt in live.values() if attempt.stop is not None}
        why = min(orders)
        why = "; ".join(orders[why]) or why
        return reason("stopping", f"Its attempt is being stopped ({why}); then it goes on or ends.", attempts=len(live))
    started = sum(len(attempt.started) for attempt in live.values())
    hosts = sum(attempt.hosts for attempt in live.values())
    if hosts and started == hosts:
        return reason("running", f"It runs on {hosts} host{'' if hosts == 1 else 's'}.", hosts=hosts)
    sentence = f"Its slices are found; {started} of {hosts} hosts have started it."
    return reason("starting", sentence, started=started, hosts=hosts)


def _first_of(snapshot: Snapshot, queue: str) -> list[Job]:
    view = snapshot.queues[queue]
    return sorted((*view.returning.values(), *view.waiting), key=lambda one: (-one.priority, one.id))
