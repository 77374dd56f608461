"""The verb behind an agent's sync: take in what a host says, once, and answer what should be.

Called by `controller.agents` whenever a sync brings something new. Reports are merged monotonically (a phase never
goes back, an exit is kept once), so duplicated, late and reordered syncs change nothing. A report of a closed attempt
or an old fence is stored as rejected and can revive nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.controller.attempts import close_attempt
from penstock.controller.slices import fail_slice, heed, settle_ready
from penstock.controller.verbs import save_job, save_slice, verb
from penstock.domain.custody import Held, Launch, Phase, SyncReply, SyncRequest
from penstock.domain.endings import end_of
from penstock.domain.lifecycle import (
    LIVE_ATTEMPT_STATES,
    TERMINAL_JOB_STATES,
    AttemptState,
    Cause,
    JobState,
    SliceState,
)
from penstock.domain.nouns import Attempt, Exit, Job, Slice, StopOrder
from penstock.ports.store import Reader, Transaction

_HOSTING = (SliceState.INTENDED, SliceState.CREATING, SliceState.READY, SliceState.DRAINING)


@verb
def hear(tx: Transaction, request: SyncRequest) -> SyncReply:
    """Commit what is new in one host's sync, then answer from what is now committed."""
    slice = tx.slice(request.slice)
    refusal = unwelcome(slice, request)
    if slice is None or refusal:
        if slice is not None and refusal == HOST_REPLACED and slice.state in _HOSTING:
            fail_slice(tx, slice, refusal)
        return SyncReply(welcome=False, why=refusal)
    slice = _join(tx, slice, request)
    if request.notice:
        slice = heed(tx, slice)
    for held in request.held:
        _merge(tx, slice, request, held)
    return answer(tx, tx.slice(slice.id) or slice, request)


HOST_REPLACED = "this host was replaced by another one"


def unwelcome(slice: Slice | None, request: SyncRequest) -> str:
    """Why a host may not take part; empty when it may."""
    if slice is None:
        return "no such slice"
    if slice.state not in _HOSTING:
        return f"the slice is {slice.state.value}"
    if slice.provider_id is not None and slice.provider_id != request.provider_id:
        return "this machine is another incarnation than the slice"
    if not 0 <= request.host < slice.hosts:
        return f"the slice has {slice.hosts} hosts"
    joined = slice.joined[request.host] if slice.joined else None
    if joined is not None and joined != request.incarnation:
        return HOST_REPLACED
    return ""


def _join(tx: Transaction, slice: Slice, request: SyncRequest) -> Slice:
    """Record a host's first sync. Until the provider's id is known nobody can tell whose host it is: it waits."""
    if slice.provider_id is None or slice.state is SliceState.DRAINING:
        return slice
    joined = slice.joined or (None,) * slice.hosts
    if joined[request.host] is not None:
        return slice
    joined = (*joined[: request.host], request.incarnation, *joined[request.host + 1 :])
    slice = save_slice(
        tx,
        slice,
        msgspec.structs.replace(slice, joined=joined),
        "slice.joined",
        host=request.host,
        incarnation=request.incarnation,
    )
    return settle_ready(tx, slice)


def _merge(tx: Transaction, slice: Slice, request: SyncRequest, held: Held) -> None:
    attempt = tx.attempt(held.attempt)
    if attempt is None:
        return
    if held.fence != attempt.fence or all(each.slice != slice.id for each in attempt.slices):
        return
    host = rank_of(attempt, slice.id, request.host)
    if attempt.state not in LIVE_ATTEMPT_STATES:
        if held.exit is not None and all(exit.host != host for exit in attempt.exits):
            _reject(tx, attempt, msgspec.structs.replace(held.exit, host=host), "the attempt is closed")
        return
    attempt = _merge_launch(tx, attempt, host, request.incarnation)
    if held.phase is Phase.RUNNING or (held.exit is not None and held.exit.well):
        attempt = _merge_start(tx, attempt, host)
    attempt = _merge_holding(tx, attempt, host, held)
    _merge_progress(tx, attempt, held)
    if held.exit is not None and all(exit.host != host for exit in attempt.exits):
        _merge_exit(tx, attempt, msgspec.structs.replace(held.exit, host=host), held.outputs)


def rank_of(attempt: Attempt, slice: str, host: int) -> int:
    """The host's index in the whole gang. The slices of a gang are equal, so hosts are counted slice by slice."""
    per_slice = attempt.hosts // len(attempt.slices)
    index = next(index for index, each in enumerate(attempt.slices) if each.slice == slice)
    return index * per_slice + host


def _merge_launch(tx: Transaction, attempt: Attempt, host: int, incarnation: str) -> Attempt:
    if host in attempt.launched:
        return attempt
    return tx.save(
        msgspec.structs.replace(
            attempt,
            state=AttemptState.LAUNCHING if attempt.state is AttemptState.ASSIGNED else attempt.state,
            launched=tuple(sorted({*attempt.launched, host})),
        ),
        "attempt.launched",
        fence=attempt.fence,
        body={"host": host, "incarnation": incarnation},
    )


def _merge_start(tx: Transaction, attempt: Attempt, host: int) -> Attempt:
    """The attempt runs once every host's process runs; only then does the job."""
    if host in attempt.started:
        return attempt
    started = tuple(sorted({*attempt.started, host}))
    whole = len(started) == attempt.hosts
    attempt = msgspec.structs.replace(attempt, started=started)
    if not whole:
        return tx.save(attempt, "attempt.reported", body={"host": host, "started": True})
    attempt = tx.save(
        msgspec.structs.replace(attempt, state=AttemptState.RUNNING, started_at=tx.at),
        "attempt.started",
        fence=attempt.fence,
        body={},
    )
    job = _job(tx, attempt)
    if job.state not in TERMINAL_JOB_STATES:
        running = msgspec.structs.replace(job, state=JobState.RUNNING, updated_at=tx.at)
        save_job(tx, job, running, "job.started", {"replica": attempt.replica})
    return attempt


def _merge_holding(tx: Transaction, attempt: Attempt, host: int, held: Held) -> Attempt:
    """Which hosts have a unit in hand: what is stopped for want of work should be another replica."""
    if held.holding is None or held.holding == (host in attempt.holding):
        return attempt
    holding = {*attempt.holding, host} if held.holding else {*attempt.holding} - {host}
    return tx.save(
        msgspec.structs.replace(attempt, holding=tuple(sorted(holding))),
        "attempt.progressed",
        body={"host": host, "holding": held.holding},
    )


def _merge_progress(tx: Transaction, attempt: Attempt, held: Held) -> None:
    if held.open_units is None:
        return
    job = _job(tx, attempt)
    if job.state in TERMINAL_JOB_STATES or job.open_units == held.open_units:
        return
    if job.open_units is not None and held.open_units > job.open_units:
        return  # a late report: open work only shrinks
    save_job(
        tx,
        job,
        msgspec.structs.replace(job, open_units=held.open_units),
        "job.progressed",
        {"open_units": held.open_units},
    )


def _merge_exit(tx: Transaction, attempt: Attempt, exit: Exit, outputs: tuple[str, ...]) -> None:
    """Keep one host's exit; the last one closes the attempt, the first bad one stops the rest of the gang."""
    attempt = tx.save(
        msgspec.structs.replace(
            attempt,
            exits=(*attempt.exits, exit),
            outputs=tuple(dict.fromkeys((*attempt.outputs, *outputs))),  # each host may know of its own only
        ),
        "attempt.reported",
        fence=attempt.fence,
        body={
            "host": exit.host,
            "code": exit.code,
            "signal": exit.signal,
            "oom_killed": exit.oom_killed,
            "agent": exit.agent,
        },
    )
    if len(attempt.exits) == attempt.hosts:
        _close_reported(tx, attempt)
    elif not exit.well and attempt.stop is None:
        tx.save(
            msgspec.structs.replace(attempt, stop=StopOrder("gang", tx.at)),
            "attempt.stopping",
            body={"why": "gang"},
        )


def _close_reported(tx: Transaction, attempt: Attempt) -> None:
    """All hosts have exited, so nothing of the attempt can be left running: its slices are clean."""
    job = _job(tx, attempt)
    cause, evidence = end_of(attempt, job.cancel_at is not None, job.spec.outputs)
    if cause is Cause.SUCCEEDED and fence_passed(job, attempt):
        cause, evidence = Cause.LOST, ("finished after its fence was passed",)
    elif cause is Cause.SUCCEEDED:
        missing = [name for name in job.spec.outputs if name not in attempt.outputs]
        if missing:
            cause, evidence = Cause.USER_ERROR, (f"declared outputs were not written: {', '.join(missing)}",)
        else:
            _commit_outputs(tx, job, attempt)
    close_attempt(tx, attempt, cause, evidence, clean=True)


def fence_passed(job: Job, attempt: Attempt) -> bool:
    """A higher fence was issued for its replica: it may neither start nor commit any more."""
    return job.chain(attempt.replica).fence != attempt.fence


def _commit_outputs(tx: Transaction, job: Job, attempt: Attempt) -> None:
    for name in job.spec.outputs:
        if name not in job.outputs:
            job = save_job(
                tx,
                job,
                msgspec.structs.replace(job, outputs=(*job.outputs, name)),
                "job.output_committed",
                {"name": name, "attempt": attempt.id},
                fence=attempt.fence,
            )


def _reject(tx: Transaction, attempt: Attempt, exit: Exit, why: str) -> None:
    """A late report is kept for the story and for nothing else. The exit is remembered so that it is kept once."""
    tx.save(
        msgspec.structs.replace(attempt, exits=(*attempt.exits, exit)),
        "attempt.report_rejected",
        fence=attempt.fence,
        body={"host": exit.host, "why": why, "fence": attempt.fence},
    )


def answer(tx: Reader, slice: Slice, request: SyncRequest) -> SyncReply:
    """What a welcome host should do, from committed rows only."""
    refusal = unwelcome(slice, request)
    if refusal:
        return SyncReply(welcome=False, why=refusal)
    attempts = {held.attempt: tx.attempt(held.attempt) for held in request.held}
    launch = None
    mine = tx.attempt(slice.attempt) if slice.attempt else None
    if mine is not None and mine.id not in attempts:
        launch = _launch(mine, _job(tx, mine), slice, request.host)
    return orders(slice, attempts, request, launch)


def _launch(attempt: Attempt, job: Job, slice: Slice, host: int) -> Launch | None:
    """The order to start, unless the attempt is on its way out or this host was told before and ended."""
    rank = rank_of(attempt, slice.id, host)
    if (
        attempt.state not in LIVE_ATTEMPT_STATES
        or attempt.stop is not None
        or job.cancel_at is not None
        or fence_passed(job, attempt)
        or any(exit.host == rank for exit in attempt.exits)
    ):
        return None
    return Launch(
        attempt=attempt.id,
        job=attempt.job,
        replica=attempt.replica,
        fence=attempt.fence,
        stage=attempt.stage,
        rank=rank,
        world_size=attempt.hosts,
        timeout_s=attempt.timeout_s,
    )


def orders(
    slice: Slice, attempts: Mapping[str, Attempt | None], request: SyncRequest, launch: Launch | None
) -> SyncReply:
    """Stop, kill and forget for everything a host holds."""
    stop, broken, kill, forget = [], [], [], []
    for held in request.held:
        attempt = attempts[held.attempt]
        current = (
            attempt is not None
            and attempt.state in LIVE_ATTEMPT_STATES
            and attempt.fence == held.fence
            and slice.attempt == attempt.id
        )
        if held.phase is Phase.EXITED:
            rank = rank_of(attempt, slice.id, request.host) if current and attempt else -1
            if not current or any(exit.host == rank for exit in attempt.exits):  # type: ignore[union-attr]
                forget.append(held.attempt)
        elif not current or (attempt is not None and attempt.fencing_at is not None):
            kill.append(held.attempt)
        elif attempt is not None and attempt.stop is not None:
            stop.append(held.attempt)
            if attempt.stop.why == "gang":
                broken.append(held.attempt)
    return SyncReply(
        welcome=True,
        launch=launch,
        stop=tuple(stop),
        broken=tuple(broken),
        kill=tuple(kill),
        forget=tuple(forget),
    )


def _job(tx: Reader, attempt: Attempt) -> Job:
    return tx.jobs((attempt.job,))[0]
