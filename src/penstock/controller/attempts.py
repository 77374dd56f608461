"""Verbs on attempts: place, stop, fence, report and close, each one transaction.

`controller.execute` performs plans through them, `controller.agents` hands them what hosts report. Closing an attempt
is the one place where a job's next step is decided (by `domain.policies`). They must not call anything outside.
"""

from __future__ import annotations

import math

import msgspec

from penstock.controller.jobs import end_job
from penstock.controller.verbs import Outdated, reserve_all, save_job, save_slice, verb
from penstock.domain import budgets, limits, policies
from penstock.domain.endings import explained
from penstock.domain.lifecycle import (
    LIVE_ATTEMPT_STATES,
    TERMINAL_JOB_STATES,
    AttemptState,
    Cause,
    JobState,
    SliceState,
)
from penstock.domain.nouns import Attempt, Bound, Chain, Job, Queue, Save, Slice, StopOrder
from penstock.domain.reservations import others_claim
from penstock.domain.transfers import Transfer
from penstock.ports.store import Transaction


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """One replica to start: a plan's choice, with the id its attempt shall have."""

    attempt: str
    job: str
    replica: int
    slices: tuple[str, ...]
    chips: int
    band: int
    borrowed: bool
    backfilled: bool


def place_one(tx: Transaction, wanted: Placement) -> None:
    """Attempt, fence, quota and the binding of all slices of the gang in one commit: no gang is ever half placed."""
    if tx.control().maintenance:
        raise Outdated("nothing is placed in maintenance mode")
    job = _job(tx, wanted.job)
    chain = job.chain(wanted.replica)
    if not may_start(job):
        raise Outdated(f"job is {job.state.value}, on its way to its end, or waits for others")
    if chain.live or chain.done or wanted.replica >= job.spec.replicas.max:
        raise Outdated(f"replica {wanted.replica} is live or done")
    slices = tx.slices(wanted.slices)
    _check_gang(job, slices, wanted, tx.at)
    pool = tx.pool(slices[0].pool)
    if pool is not None and others_claim(pool.reserved, job.spec.user, tx.at) and slices[0].reserved is None:
        raise Outdated(f"pool {pool.name} is reserved")
    reserve_all(tx, [("queue", job.spec.queue, wanted.chips), ("cohort", job.spec.team, wanted.chips)])
    fence = next_fence(job)
    attempt = Attempt(
        id=wanted.attempt,
        job=job.id,
        replica=wanted.replica,
        fence=fence,
        team=job.spec.team,
        queue=job.spec.queue,
        chips=wanted.chips,
        slices=tuple(Bound(slice.id, slice.provider_id or "") for slice in slices),
        hosts=sum(slice.hosts for slice in slices),
        created_at=tx.at,
        timeout_s=job.spec.timeout_s,
        stage=chain.stage,
        band=wanted.band,
        borrowed=wanted.borrowed,
        user=job.spec.user,
        zone=slices[0].zone,
        usd_per_chip_hour=slices[0].usd_per_chip_hour,
        waited_s=max(0.0, tx.at - waits_since(job, chain)),
    )
    tx.add(
        attempt,
        "attempt.created",
        fence=fence,
        body={
            "job": job.id,
            "replica": wanted.replica,
            "slices": [[bound.slice, bound.provider_id] for bound in attempt.slices],
            "hosts": attempt.hosts,
            "chips": attempt.chips,
            "queue": attempt.queue,
            "team": attempt.team,
            "stage": attempt.stage,
            "borrowed": attempt.borrowed,
            "backfilled": wanted.backfilled,
            "timeout_s": attempt.timeout_s,
            "expected_s": job.spec.expected_s,
        },
    )
    for slice in slices:
        bound = msgspec.structs.replace(slice, attempt=attempt.id, idle_since=None)
        save_slice(tx, slice, bound, "slice.bound", attempt=attempt.id)
    placed = msgspec.structs.replace(
        job,
        state=JobState.RUNNING if job.state is JobState.RUNNING else JobState.PROVISIONING,
        fence=fence,
        chains=with_chain(job, msgspec.structs.replace(chain, fence=fence, attempts=chain.attempts + 1, live=True)),
        updated_at=tx.at,
    )
    facts = {"replica": wanted.replica, "attempt": attempt.id}
    save_job(tx, job, placed, "job.placed", facts, fence=fence)


def waits_since(job: Job, chain: Chain) -> float:
    """When a replica began to wait for capacity; a job that waited for others first does so from its last change."""
    if chain.freed_at is not None:
        return chain.freed_at
    bound = bool(job.spec.after) or job.spec.throttle is not None
    return max(job.created_at, job.updated_at) if bound else job.created_at


def may_start(job: Job) -> bool:
    """Whether a replica of this job may be placed at all."""
    ending = job.state in TERMINAL_JOB_STATES or job.cancel_at is not None or job.cause is not None
    return not ending and not job.blocked and not job.held


def next_fence(job: Job) -> int:
    """Above every fence ever issued for the job."""
    return job.fence + 1


def _check_gang(job: Job, slices: list[Slice], wanted: Placement, now: float) -> None:
    if len(slices) != job.spec.resources.slices or len(set(wanted.slices)) != len(slices):
        raise Outdated(f"needs {job.spec.resources.slices} slices")
    if sum(slice.chips for slice in slices) != wanted.chips:
        raise Outdated("the slices' chips are not what was planned")
    for slice in slices:
        if not slice.usable or slice.provider_id is None:
            raise Outdated(f"slice {slice.id} is not free")
        if slice.team != job.spec.team:
            raise Outdated(f"slice {slice.id} belongs to another team")
        if others_claim(slice.reserved, job.spec.user, now):
            raise Outdated(f"slice {slice.id} is reserved")
        if slice.accelerator not in job.spec.resources.accelerators:
            raise Outdated(f"slice {slice.id} is a {slice.accelerator}")
        if slice.accelerator != slices[0].accelerator or slice.zone != slices[0].zone:
            raise Outdated("the slices of a gang differ")


def with_chain(job: Job, chain: Chain) -> tuple[Chain, ...]:
    """The job's chains with one put in, in order of replica."""
    others = [other for other in job.chains if other.replica != chain.replica]
    return tuple(sorted([*others, chain], key=lambda each: each.replica))


@verb
def stop(tx: Transaction, id: str, why: str) -> None:
    """Order the agents to stop an attempt; a cancel overrides an earlier order."""
    attempt = live_attempt(tx, id)
    if attempt.stop is not None and (attempt.stop.why == "cancelled" or why != "cancelled"):
        raise Outdated(f"{id} is stopping already")
    ordered = msgspec.structs.replace(attempt, stop=StopOrder(why, tx.at))
    tx.save(ordered, "attempt.stopping", body={"why": why})


@verb
def note_save(tx: Transaction, id: str, host: int, cost_s: float | None, at: float | None = None) -> None:
    """A checkpoint of one host is whole in the root: what ran before it is not lost any more."""
    attempt = live_attempt(tx, id)
    old = next((save for save in attempt.saves if save.host == host), None)
    save = Save(
        host=host,
        at=tx.at if at is None else min(at, tx.at),
        count=1 if old is None else old.count + 1,
        cost_s=cost_s if cost_s is not None or old is None else old.cost_s,
    )
    saves = (*(each for each in attempt.saves if each.host != host), save)
    tx.save(msgspec.structs.replace(attempt, saves=saves), "attempt.saved", body={"host": host, "count": save.count})


@verb
def note_transfer(tx: Transaction, id: str, transfer: Transfer) -> None:
    """A checkpoint is on its way from another region's root, or has come: how much it is, and what that costs."""
    attempt = live_attempt(tx, id)
    done, before = transfer.done_at is not None, attempt.copied
    if before is not None and (before.source, before.target) == (transfer.source, transfer.target):
        # A server that goes on where a killed one was: it began when that one did.
        transfer = msgspec.structs.replace(transfer, begun_at=before.begun_at)
    tx.save(
        msgspec.structs.replace(attempt, copied=transfer),
        "attempt.copied" if done else "attempt.copying",
        body={"source": transfer.source, "target": transfer.target, "bytes": transfer.size, "usd": transfer.usd},
    )


class Fenced(msgspec.Struct, frozen=True):
    """The fence object to write for a silent attempt."""

    job: str
    replica: int
    fence: int


@verb
def raise_fence(tx: Transaction, id: str) -> Fenced:
    """Pass a silent attempt's fence: from here on it cannot commit. Asking again answers the same fence."""
    attempt = live_attempt(tx, id)
    job = _job(tx, attempt.job)
    chain = job.chain(attempt.replica)
    if attempt.fencing_at is None:
        fence = next_fence(job)
        chain = msgspec.structs.replace(chain, fence=fence)
        raised = msgspec.structs.replace(job, fence=fence, chains=with_chain(job, chain), updated_at=tx.at)
        facts = {"replica": attempt.replica, "attempt": id}
        save_job(tx, job, raised, "job.fence_raised", facts, fence=fence)
        tx.save(msgspec.structs.replace(attempt, fencing_at=tx.at), "attempt.fencing", fence=fence, body={})
    return Fenced(job.id, attempt.replica, chain.fence)


@verb
def fenced(tx: Transaction, id: str) -> None:
    """The higher fence object is written."""
    attempt = live_attempt(tx, id)
    if attempt.fenced_at is None:
        fence = _job(tx, attempt.job).chain(attempt.replica).fence
        tx.save(msgspec.structs.replace(attempt, fenced_at=tx.at), "attempt.fenced", fence=fence, body={})


@verb
def close(tx: Transaction, id: str, cause: Cause, evidence: tuple[str, ...], clean: bool) -> None:
    """End an attempt on evidence other than its hosts' own reports."""
    attempt = live_attempt(tx, id)
    if cause is Cause.SUCCEEDED:
        raise Outdated("only the hosts' reports can end an attempt well")
    close_attempt(tx, attempt, cause, evidence, clean=clean)


def close_attempt(tx: Transaction, attempt: Attempt, cause: Cause, evidence: tuple[str, ...], *, clean: bool) -> None:
    """Close, free slices and quota, charge the queue, and let the job's rule decide how it goes on. Not a verb."""
    job = _job(tx, attempt.job)
    if attempt.stop is not None and attempt.stop.why == "replica" and cause is Cause.PREEMPTED:
        cause = Cause.CANCELLED  # a replica taken back for want of work is nobody's loss: no budget pays for it
    if cause in (Cause.INFRA, Cause.LOST) and job.spec.rule.preset in policies.FRESH_SLICE_PRESETS:
        clean = False  # the rule asks for another slice: this one is never used again
    if any(exit.agent == "device_busy" for exit in attempt.exits):
        clean = False  # something else holds the device there: whoever comes next would only meet it again
    closed = msgspec.structs.replace(
        attempt,
        state=AttemptState.CLOSED,
        cause=cause,
        evidence=evidence,
        closed_at=tx.at,
        exits=explained(attempt.exits),
    )
    tx.save(
        closed,
        "attempt.closed",
        fence=attempt.fence,
        body={
            "job": attempt.job,
            "replica": attempt.replica,
            "cause": cause.value,
            "evidence": list(evidence),
            "clean": clean,
        },
    )
    for slice in tx.slices([bound.slice for bound in attempt.slices]):
        if slice.attempt == attempt.id:
            _release_slice(tx, slice, attempt, job.spec.environment, clean)
    tx.reserve("queue", attempt.queue, -attempt.chips)
    tx.reserve("cohort", attempt.team, -attempt.chips)
    _charge(tx, attempt)
    _go_on(tx, job, attempt, cause)


def _release_slice(tx: Transaction, slice: Slice, attempt: Attempt, environment: str, clean: bool) -> None:
    freed = msgspec.structs.replace(
        slice,
        attempt=None,
        dirty=slice.dirty or not clean,
        warm=environment,
        idle_since=tx.at if slice.state is SliceState.READY else None,
    )
    save_slice(tx, slice, freed, "slice.released", attempt=attempt.id, clean=clean)


def _charge(tx: Transaction, attempt: Attempt) -> None:
    queue = tx.queue(attempt.queue)
    if queue is None:
        return
    chip_s = attempt.chips * max(0.0, tx.at - attempt.created_at)
    charged = msgspec.structs.replace(
        queue,
        used_chip_s=used_now(queue, tx.at) + chip_s,
        used_at=max(queue.used_at, tx.at),
        spent=budgets.charged(queue.spent, attempt.created_at, tx.at, attempt.chips, attempt.usd_per_chip_hour),
    )
    tx.save(charged, "queue.charged", body={"chip_s": chip_s, "attempt": attempt.id})


def used_now(queue: Queue, now: float) -> float:
    """Chip-seconds of closed attempts, decayed to now."""
    age = max(0.0, now - queue.used_at)
    return queue.used_chip_s * math.exp2(-age / limits.SHARE_HALF_LIFE_S)


def _go_on(tx: Transaction, job: Job, attempt: Attempt, cause: Cause) -> None:
    """The job's next state after one of its attempts closed."""
    ran_s = tx.at - attempt.started_at if attempt.started_at is not None else None
    salt = f"{attempt.id}/{attempt.fence}"
    decision = policies.decide(job.spec.rule, job.chain(attempt.replica), cause, ran_s, tx.at, salt)
    freed = msgspec.structs.replace(decision.chain, freed_at=tx.at)
    after = msgspec.structs.replace(job, chains=with_chain(job, freed), updated_at=tx.at)
    facts = {"replica": attempt.replica, "cause": cause.value, "reason": decision.reason}
    failing = decision.go is policies.Go.STOP and cause not in (Cause.SUCCEEDED, Cause.CANCELLED)
    if failing and job.cancel_at is None and job.cause is None:
        after = msgspec.structs.replace(after, cause=cause, reason=decision.reason)
    if after.live_chains:
        after = save_job(tx, job, after, "job.replica_closed", facts)
        if after.cause is not None and job.cause is None:
            _stop_replicas(tx, after)
    elif after.cancel_at is not None:
        end_job(tx, after, JobState.CANCELLED, Cause.CANCELLED, "cancelled by its user")
    elif after.cause is not None:
        end_job(tx, after, JobState.FAILED, after.cause, after.reason)
    elif any(chain.done for chain in after.chains):
        end_job(tx, after, JobState.SUCCEEDED, Cause.SUCCEEDED, "succeeded")
    else:
        queued = msgspec.structs.replace(after, state=JobState.QUEUED)
        save_job(tx, job, queued, "job.requeued", facts)


def _stop_replicas(tx: Transaction, job: Job) -> None:
    """The job will fail: its other replicas are stopped, and the last one to close ends it."""
    for attempt in tx.attempts_of(job.id):
        if attempt.state in LIVE_ATTEMPT_STATES and attempt.stop is None:
            ordered = msgspec.structs.replace(attempt, stop=StopOrder("replica", tx.at))
            tx.save(ordered, "attempt.stopping", body={"why": "replica"})


def live_attempt(tx: Transaction, id: str) -> Attempt:
    attempt = tx.attempt(id)
    if attempt is None or attempt.state not in LIVE_ATTEMPT_STATES:
        raise Outdated(f"attempt {id} is closed")
    return attempt


def _job(tx: Transaction, id: str) -> Job:
    found = tx.jobs((id,))
    if not found:
        raise Outdated(f"job {id} is gone")
    return found[0]
