"""Verbs on jobs: submit, cancel, edit, end, unblock and purge, each one transaction.

Called by `controller.commands` for users and by `controller.execute` for plans. They decide from what they read in the
transaction. They must not touch attempts' processes: stopping is an order that agents read (`controller.attempts`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.controller.verbs import Outdated, save_job, verb
from penstock.domain.admission import BadInput
from penstock.domain.cost import hold_of, hours_of
from penstock.domain.lifecycle import TERMINAL_JOB_STATES, Cause, JobState
from penstock.domain.nouns import Job, JobSpec
from penstock.ports.store import Transaction


class NotFound(LookupError):
    """No such entity: what kind, which name."""

    def __init__(self, entity: str, id: str) -> None:
        super().__init__(f"{entity} {id!r} does not exist")


class KeyReused(ValueError):
    """An idempotency key came again with another body: a conflict, nothing was submitted."""

    def __init__(self, key: str, job: str) -> None:
        super().__init__(f"idempotency_key: {key!r} was used for {job} with another request; use a new key")
        self.job = job


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A checked submit: the id is made by the caller, so that a repeated call can be told apart by its key only."""

    id: str
    spec: JobSpec
    body_hash: str
    key: str | None = None
    parent: str | None = None
    stage: int = 0


class Submitted(msgspec.Struct, frozen=True):
    """The job a submit stands for, and whether this call made it."""

    id: str
    created: bool
    version: int


@verb
def submit(tx: Transaction, wanted: Sequence[NewJob]) -> list[Submitted]:
    """All or none: one bad member refuses the batch. A known key with the same body answers the first job."""
    answers: list[Submitted] = []
    known_queues: dict[str, str] = {}
    places: dict[str, int] = {}
    for new in wanted:
        spec = new.spec
        if spec.queue not in known_queues:
            queue = tx.queue(spec.queue)
            if queue is None or queue.deleted:
                raise NotFound("queue", spec.queue)
            known_queues[spec.queue] = queue.team
        if known_queues[spec.queue] != spec.team:
            raise BadInput("queue", spec.queue, f"belongs to another team than {spec.team!r}")
        if new.key is not None:
            old = tx.job_by_key(spec.team, new.key)
            if old is not None:
                if old.body_hash != new.body_hash:
                    raise KeyReused(new.key, old.id)
                answers.append(Submitted(old.id, False, old.version))
                continue
        blocked = _open_dependencies(tx, spec)
        job = Job(
            id=new.id,
            spec=spec,
            state=JobState.QUEUED,
            created_at=tx.at,
            updated_at=tx.at,
            key=new.key,
            body_hash=new.body_hash,
            priority=spec.priority,
            tags=spec.tags,
            blocked=blocked,
            held=blocked == 0 and not _has_place(tx, spec, places),
            parent=new.parent,
            stage=new.stage,
        )
        job = save_job(tx, None, job, "job.created", _created_facts(new, job.held))
        answers.append(Submitted(job.id, True, job.version))
    return answers


def _has_place(tx: Transaction, spec: JobSpec, places: dict[str, int]) -> bool:
    """Whether the array of a new job lets it into its queue. `places` counts on, so that a batch asks once."""
    throttle = spec.throttle
    if throttle is None:
        return True
    taken = places[throttle.array] if throttle.array in places else tx.under_way(throttle.array)
    free = taken < throttle.at_most
    places[throttle.array] = taken + free
    return free


def _fill_places(tx: Transaction, array: str) -> None:
    """Let the next members of an array into their queues, as many as may be under way at once."""
    taken = tx.under_way(array)
    while (held := tx.first_held(array)) is not None:
        throttle = held.spec.throttle
        if throttle is None or taken >= throttle.at_most:
            return
        freed = msgspec.structs.replace(held, held=False, updated_at=tx.at)
        save_job(tx, held, freed, "job.released", {"array": array})
        taken += 1


def _created_facts(new: NewJob, held: bool) -> dict[str, object]:
    spec = new.spec
    facts: dict[str, object] = {
        "team": spec.team,
        "queue": spec.queue,
        "key": new.key,
        "body_hash": new.body_hash,
        "outputs": spec.outputs,
        "failure_budget": spec.rule.failure_budget,
        "infra_budget": spec.rule.infra_budget,
        "replicas_max": spec.replicas.max,
        "chips": spec.resources.chips,
        "slices": spec.resources.slices,
        "accelerators": spec.resources.accelerators,
        "pool": spec.resources.pool,
        "zones": spec.resources.zones,
        "spot": spec.resources.spot,
        "after": spec.after,
        "parent": new.parent,
    }
    if spec.throttle is not None:
        facts.update(array=spec.throttle.array, at_most=spec.throttle.at_most, held=held)
    return facts


def _open_dependencies(tx: Transaction, spec: JobSpec) -> int:
    """How many of `after` are still open; one that failed, or never was, can never be waited for."""
    needed = tuple(dict.fromkeys(spec.after))
    found = {job.id: job for job in tx.jobs(needed)} if needed else {}
    for id in needed:
        job = found.get(id)
        if job is None or job.spec.team != spec.team:
            raise BadInput("after", id, "is not a job of your team")
        if job.state in (JobState.FAILED, JobState.CANCELLED):
            raise BadInput("after", id, f"has {job.state.value}, so this job could never start")
    return sum(1 for job in found.values() if job.state is not JobState.SUCCEEDED)


class CancelAnswer(msgspec.Struct, frozen=True):
    """What a cancel did: "cancelled" (done or on the way), or "already finished"."""

    id: str
    answer: str
    version: int


@verb
def cancel(tx: Transaction, ids: Sequence[str]) -> list[CancelAnswer]:
    """Raise the fence, so that no later success of any replica can be committed; without live attempts end at once."""
    answers = []
    for id in ids:
        job = _existing(tx, id)
        if job.state in TERMINAL_JOB_STATES:
            answers.append(CancelAnswer(id, "already finished", job.version))
            continue
        if job.cancel_at is None:
            job = _request_cancel(tx, job)
            if not job.live_chains:
                job = end_job(tx, job, JobState.CANCELLED, Cause.CANCELLED, "cancelled by its user")
        answers.append(CancelAnswer(id, "cancelled", job.version))
    return answers


def _request_cancel(tx: Transaction, job: Job) -> Job:
    fence = job.fence + 1
    chains = tuple(msgspec.structs.replace(chain, fence=fence) if chain.live else chain for chain in job.chains)
    wanted = msgspec.structs.replace(job, fence=fence, chains=chains, cancel_at=tx.at, updated_at=tx.at)
    return save_job(tx, job, wanted, "job.cancel_requested", fence=fence)


def end_job(tx: Transaction, job: Job, state: JobState, cause: Cause, reason: str) -> Job:
    """Make a job terminal and tell the jobs that wait for it. Not a verb: part of others."""
    ended = _end_one(tx, job, state, cause, reason)
    if state is JobState.SUCCEEDED:
        for id in tx.dependants(job.id):
            waiting = _existing(tx, id)
            blocked = waiting.blocked - 1
            held = blocked == 0 and not _has_place(tx, waiting.spec, {})
            freed = msgspec.structs.replace(waiting, blocked=blocked, held=held, updated_at=tx.at)
            save_job(tx, waiting, freed, "job.unblocked", {"by": job.id, **({"held": True} if held else {})})
        return ended
    # A chain of jobs may be longer than Python's stack is deep: a list, not recursion.
    stopped = [ended]
    while stopped:
        needed = stopped.pop()
        for id in tx.dependants(needed.id):
            why = f"{needed.id}, which it waits for, {needed.state.value}"
            stopped.append(_end_one(tx, _existing(tx, id), JobState.CANCELLED, Cause.CANCELLED, why))
    return ended


def _end_one(tx: Transaction, job: Job, state: JobState, cause: Cause, reason: str) -> Job:
    ended = msgspec.structs.replace(
        job, state=state, cause=cause, reason=reason, held=False, finished_at=tx.at, updated_at=tx.at
    )
    ended = save_job(tx, job, ended, f"job.{state.value}", {"cause": cause.value, "reason": reason})
    if job.under_way and job.spec.throttle is not None:
        _fill_places(tx, job.spec.throttle.array)
    return ended


@verb
def finish(tx: Transaction, id: str, cancelled: bool, reason: str) -> None:
    """End a job without live attempts: a cancelled one, or one that can never run."""
    job = _existing(tx, id)
    if job.state in TERMINAL_JOB_STATES or job.live_chains:
        raise Outdated(f"{id} is {job.state.value}")
    if cancelled != (job.cancel_at is not None):
        raise Outdated(f"{id} was {'not ' if cancelled else ''}cancelled")
    if cancelled:
        end_job(tx, job, JobState.CANCELLED, Cause.CANCELLED, reason)
    else:
        end_job(tx, job, JobState.FAILED, Cause.USER_ERROR, reason)


@verb
def edit(tx: Transaction, id: str, priority: int | None = None, tags: tuple[str, ...] | None = None) -> Job:
    """Change what a user may change: the priority of an unfinished job, the tags of any."""
    job = _existing(tx, id)
    if priority is not None and job.state in TERMINAL_JOB_STATES:
        raise BadInput("priority", priority, f"cannot change: {id} has {job.state.value}")
    wanted = msgspec.structs.replace(
        job,
        priority=job.priority if priority is None else priority,
        tags=job.tags if tags is None else tags,
        updated_at=tx.at,
    )
    return save_job(tx, job, wanted, "job.edited", {"tags": wanted.tags})


@verb
def purge(tx: Transaction, ids: Sequence[str], older_than: float) -> int:
    """Forget terminal jobs that ended before `older_than`; others are left alone. Answers how many went."""
    gone = 0
    for job in tx.jobs(ids):
        if job.state in TERMINAL_JOB_STATES and job.finished_at is not None and job.finished_at < older_than:
            closed = [hold_of(attempt) for attempt in tx.attempts_of(job.id)]
            tx.sum_up([hour for hold in closed for hour in hours_of(hold)])
            tx.purge(job)
            gone += 1
    return gone


def _existing(tx: Transaction, id: str) -> Job:
    found = tx.jobs((id,))
    if not found:
        raise NotFound("job", id)
    return found[0]
