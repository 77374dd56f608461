"""Nouns of the domain as people see them, and what they ask for as nouns: the only place where the two meet.

Handlers of `server` call these; names on the wire stay, whatever rows look like. Pure: what a view needs beside the
noun (attempts, prices, progress) is handed in. It must not read the store nor check values.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence

import msgspec

from penstock.domain import limits, policies
from penstock.domain.budgets import Budget, Spent
from penstock.domain.endings import first_exit, said_of_stop
from penstock.domain.lifecycle import INFRASTRUCTURE_CAUSES, TERMINAL_JOB_STATES, AttemptState, Cause, JobState
from penstock.domain.nouns import (
    Attempt,
    Command,
    Event,
    Exit,
    Job,
    JobSpec,
    Member,
    Pool,
    Queue,
    Replicas,
    Resources,
    Rule,
    Secret,
    Slice,
    Snippet,
    Task,
)
from penstock.wire.api import (
    AttemptView,
    CommandRequest,
    EventView,
    JobRequest,
    JobView,
    PoolRequest,
    PoolView,
    ProgressView,
    QueueRequest,
    QueueView,
    SliceView,
)
from penstock.wire.cost import JobCost
from penstock.wire.inventory import BudgetRequest, BudgetView, ReservationView

COMMAND_CHARACTERS = 2_000  #: of a command or snippet in a job's view: enough to know it by


# --- jobs ---
def spec_of(request: JobRequest, *, team: str, queue: str, user: str, on: tuple[str, ...]) -> JobSpec:
    """What a request means, with the server's defaults filled in; `domain.admission` still has to look at it."""
    payload: Snippet | Command
    setup = request.payload.setup
    environment = hashlib.sha256(setup.encode()).hexdigest()[:16] if setup else ""
    if isinstance(request.payload, CommandRequest):
        payload = Command(argv=request.payload.argv, snapshot=request.payload.snapshot, setup=setup)
    else:
        wanted = request.payload
        payload = Snippet(code=wanted.code, variables=wanted.variables, isolation=wanted.isolation, setup=setup)
    tags, env = request.tags, request.env
    member = None
    if request.array is not None:
        array, _, index = request.array.rpartition("/")
        member = Member(array=array, index=int(index), at_most=request.at_most)
        tags = (*tags, f"array:{array}")
        env = {**env, "PENSTOCK_ARRAY_ID": array, "PENSTOCK_ARRAY_INDEX": index}
    failures = limits.FAILURE_BUDGET_DEFAULT if request.max_retries is None else request.max_retries
    return JobSpec(
        team=team,
        queue=queue,
        user=user,
        payload=payload,
        resources=Resources(
            accelerators=on,
            chips=0,
            slices=request.slices,
            pool=request.pool,
            slice=request.slice,
            zones=request.zones,
            spot=request.spot,
            memory_bytes=request.memory_bytes,
        ),
        name=request.name,
        replicas=Replicas(request.replicas_min, request.replicas_max),
        rule=Rule(preset=request.rule, failure_budget=failures),
        priority=request.priority,
        timeout_s=limits.TIMEOUT_S_DEFAULT if request.timeout_s is None else request.timeout_s,
        expected_s=request.expected_s,
        after=request.after,
        tags=tags,
        note=request.note,
        env=env,
        secrets=tuple(Secret(name) for name in request.secrets),
        outputs=request.outputs,
        environment=environment,
        member=member,
    )


def exit_code(exits: Sequence[Exit]) -> int | None:
    """The code of the host whose failure explains the others', signals as shells count them; 0 if all went well."""
    first = first_exit(exits)
    for exit in (first, *exits) if first is not None else exits:
        if not exit.well and (exit.code is not None or exit.signal is not None):
            return exit.code if exit.code is not None else 128 + (exit.signal or 0)
    return 0 if exits and all(exit.well for exit in exits) else None


def goes_on(job: Job, attempt: Attempt, attempts: Sequence[Attempt]) -> str:
    """How a job goes on after one of its attempts lost its place; empty where it did not, and where none follows."""
    cause = attempt.cause
    if cause is None and attempt.stop is not None and attempt.stop.why == "notice":
        cause = Cause.PREEMPTED
    if cause not in INFRASTRUCTURE_CAUSES:
        return ""
    after = [each for each in attempts if each.replica == attempt.replica and each.fence > attempt.fence]
    if after:
        return f"the job resumed (stage {after[0].stage})" if after[0].stage else "the job started again"
    if job.state in TERMINAL_JOB_STATES or job.cancel_at is not None or job.cause is not None:
        return ""
    go = policies.PRESETS[job.spec.rule.preset].on.get(cause, policies.Go.STOP)
    if go is policies.Go.STOP:
        return ""
    if go is policies.Go.RERUN or attempt.started_at is None:
        return "the job starts again"
    return "the job resumes from its newest checkpoint" if attempt.saves else "the job resumes"


def attempt_view(job: Job, attempt: Attempt, attempts: Sequence[Attempt]) -> AttemptView:
    return AttemptView(
        id=attempt.id,
        replica=attempt.replica,
        fence=attempt.fence,
        stage=attempt.stage,
        state=attempt.state.value,
        slices=tuple(bound.slice for bound in attempt.slices),
        hosts=attempt.hosts,
        created_at=attempt.created_at,
        started_at=attempt.started_at,
        closed_at=attempt.closed_at,
        cause=attempt.cause.value if attempt.cause is not None else None,
        evidence=attempt.evidence or said_of_stop(attempt),
        then=goes_on(job, attempt, attempts),
        exit_code=exit_code(attempt.exits),
        copied=attempt.copied,
    )


def job_view(
    job: Job,
    attempts: Sequence[Attempt],
    kind: str,
    *,
    progress: Mapping[str, ProgressView],
    cost_usd: float | None,
    used: JobCost | None = None,
    whole: bool = False,
) -> JobView:
    """A job; with `whole` also what lists leave out. `attempts` are all of it, oldest first."""
    spec = job.spec
    last = attempts[-1] if attempts else None
    started = [attempt.started_at for attempt in attempts if attempt.started_at is not None]
    said = [progress[attempt.id] for attempt in attempts if attempt.id in progress]
    chains: dict[int, list[Attempt]] = {}  # a thousand replicas, lost ten times each, are not held against each other
    for attempt in attempts:
        chains.setdefault(attempt.replica, []).append(attempt)
    return JobView(
        id=job.id,
        name=spec.name,
        team=spec.team,
        queue=spec.queue,
        user=spec.user,
        state=job.state.value,
        kind=kind,
        on=spec.resources.accelerators,
        slices=spec.resources.slices,
        created_at=job.created_at,
        version=job.version,
        priority=job.priority,
        tags=job.tags,
        note=spec.note,
        command=_command(job) if whole else "",
        snapshot=spec.payload.snapshot if whole and isinstance(spec.payload, Command) else None,
        cause=job.cause.value if job.cause is not None else None,
        reason=job.reason if job.reason != job.state.value else "",
        exit_code=exit_code(last.exits) if last is not None else None,
        stage=max((chain.stage for chain in job.chains), default=job.stage),
        slice=last.slices[0].slice if last is not None and last.slices else None,
        started_at=min(started, default=None),
        finished_at=job.finished_at,
        parent=job.parent,
        cancel_requested=job.cancel_at is not None,
        progress=max(said, key=lambda one: one.at, default=None),
        cost_usd=cost_usd,
        used=used,
        attempts=tuple(attempt_view(job, attempt, chains[attempt.replica]) for attempt in attempts) if whole else (),
    )


def ending(job: Job) -> str:
    """How a job ended, in one sentence."""
    reason = job.reason.rstrip(".")
    if job.state is JobState.SUCCEEDED:
        return "It has succeeded."
    if job.state is JobState.CANCELLED:
        if reason in ("", "cancelled"):
            return "It was cancelled."
        return f"It was {reason}." if reason.startswith("cancelled") else f"It was cancelled: {reason}."
    return f"It has failed: {reason}." if reason else "It has failed."


def payload_kind(job: Job) -> str:
    kinds = {Snippet: "snippet", Command: "command", Task: "task"}
    return kinds[type(job.spec.payload)]


def _command(job: Job) -> str:
    payload = job.spec.payload
    if isinstance(payload, Snippet):
        text = payload.code
    else:
        text = shlex.join(payload.argv) if isinstance(payload, Command) else payload.name
    return text if len(text) <= COMMAND_CHARACTERS else text[: COMMAND_CHARACTERS - 1] + "…"


def cost_usd(
    attempts: Sequence[Attempt], slices: Mapping[str, Slice], pools: Mapping[str, Pool], now: float
) -> float | None:
    """Slice time times price: from when an attempt got its slices until it closed. None when a price is unknown.

    The machine at hand costs nothing, whatever its slices are called.
    """
    total = 0.0
    for attempt in attempts:
        until = attempt.closed_at if attempt.state is AttemptState.CLOSED and attempt.closed_at is not None else now
        hours = max(0.0, until - attempt.created_at) / 3600
        for bound in attempt.slices:
            slice = slices.get(bound.slice)
            if slice is None:
                return None
            if slice.provider == "local":
                continue
            pool = pools.get(slice.pool)
            if pool is None or pool.usd_per_chip_hour is None:
                return None
            total += hours * slice.chips * pool.usd_per_chip_hour
    return round(total, 6)


# --- capacity ---
def slice_view(
    slice: Slice,
    job: Job | None,
    arriving: str = "",
    *,
    held: Attempt | None = None,
    reserved: ReservationView | None = None,
    slow_since: float | None = None,
    silence: str = "",
) -> SliceView:
    """`silence`: since when it or its zone does not speak; it is all that is known of a slice that hangs."""
    return SliceView(
        id=slice.id,
        team=slice.team,
        pool=slice.pool,
        provider=slice.provider,
        zone=slice.zone,
        accelerator=slice.accelerator,
        chips=slice.chips,
        hosts=slice.hosts,
        state=slice.state.value,
        spot=slice.spot,
        attempt=slice.attempt,
        job=job.id if job is not None else None,
        user=job.spec.user if job is not None else None,
        tags=job.tags if job is not None else (),
        made_at=slice.intended_at,
        ready_at=slice.ready_at,
        idle_since=slice.idle_since,
        why="; ".join(line for line in (slice.why, silence) if line),
        arriving=arriving,
        title=slice.title,
        held_since=held.created_at if held is not None else None,
        held_until=None if held is None else (held.started_at or held.created_at) + held.timeout_s,
        reserved=reserved,
        slow_since=slow_since,
    )


def pool_of(name: str, request: PoolRequest, team: str, old: Pool | None) -> Pool:
    """The pool a request describes; what it does not name stays as it was."""
    wanted = Pool(
        name=name,
        team=team,
        provider=request.provider,
        accelerator=request.accelerator,
        chips=0,
        hosts=0,
        zones=request.zones,
        min=request.min,
        max=request.max,
        spot=request.spot,
        idle_s=request.idle_s,
        cloud=request.cloud,
        per_zone=request.per_zone,
        race=1 if request.race is None else request.race,
    )
    if old is not None and not old.deleted:
        per_zone = old.per_zone if request.per_zone is None else request.per_zone
        race = old.race if request.race is None else request.race
        wanted = msgspec.structs.replace(wanted, race=race, per_zone=per_zone, teams=old.teams, adopted=old.adopted)
    return as_fleet(wanted)


def as_fleet(pool: Pool) -> Pool:
    """A fleet may hold what its count in each zone makes, neither more nor less; every place has a zone: none races."""
    return pool if pool.per_zone is None else msgspec.structs.replace(pool, min=0, max=pool.always, race=1)


def pool_view(pool: Pool, slices: int) -> PoolView:
    return PoolView(
        name=pool.name,
        team=pool.team,
        provider=pool.provider,
        accelerator=pool.accelerator,
        zones=pool.zones,
        min=pool.min,
        max=pool.max,
        spot=pool.spot,
        idle_s=pool.idle_s,
        slices=slices,
        cloud=pool.cloud,
        per_zone=pool.per_zone,
        race=pool.race,
    )


def queue_of(name: str, request: QueueRequest, team: str) -> Queue:
    return Queue(
        name=name,
        team=team,
        weight=request.weight,
        quota_chips=request.quota_chips,
        borrow_chips=request.borrow_chips,
        band=request.band,
        paused=request.paused,
        budget=_budget(request.budget),
    )


def _budget(asked: BudgetRequest | None) -> Budget | None:
    return None if asked is None else Budget(limit=asked.limit, unit=asked.unit, window=asked.window)


def budget_view(budget: Budget, spent: Spent) -> BudgetView:
    return BudgetView(
        limit=budget.limit,
        unit=budget.unit.value,
        window=budget.window.value,
        spent=spent.of(budget.unit),
        unpriced_chip_s=spent.unpriced_chip_s,
        since=spent.since,
    )


def queue_view(queue: Queue, waiting: int, spent: Spent | None = None) -> QueueView:
    return QueueView(
        name=queue.name,
        team=queue.team,
        weight=queue.weight,
        quota_chips=queue.quota_chips,
        borrow_chips=queue.borrow_chips,
        band=queue.band,
        paused=queue.paused,
        waiting=waiting,
        budget=budget_view(queue.budget, spent) if queue.budget is not None and spent is not None else None,
    )


# --- events ---
def event_view(event: Event) -> EventView:
    return EventView(seq=event.seq, at=event.at, kind=event.kind, id=event.id, body=event.body)
