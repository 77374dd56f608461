"""The routes about jobs: submit, list, look, change, cancel, again, and why one waits.

Everything is checked here or behind `server.submission` and `controller.commands`; writes go straight to the store and
so work on any server of an installation. Bytes of jobs (results, artifacts, logs) are elsewhere. A job of another team
is not there, whoever asks and however (S17).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.controller.jobs import NotFound, Submitted
from penstock.domain import admission, limits
from penstock.domain.admission import BadInput
from penstock.domain.ids import KINDS, encode
from penstock.domain.lifecycle import TERMINAL_JOB_STATES, JobState
from penstock.domain.nouns import Attempt, Job, JobSpec, Pool, Role, Slice
from penstock.ports.store import Reader
from penstock.server.arrivals import CAPACITY_CODES, capacity_details
from penstock.server.bytes import job_result
from penstock.server.cleaning import refuse_cleaned
from penstock.server.cost import job_cost, read_life
from penstock.server.routing import ID_PATTERN, JOB_FILTERS, Call, Parameter, Refusal, Route
from penstock.server.service import Service
from penstock.server.silences import troubles
from penstock.server.submission import in_wire_words, prepare
from penstock.server.views import cost_usd, ending, job_view, payload_kind
from penstock.wire.api import (
    Accepted,
    AgainRequest,
    BatchAccepted,
    BatchRequest,
    CancelReply,
    EditRequest,
    JobPage,
    JobRequest,
    JobView,
    WhyView,
)

JOB_BODY_MAX: Final = 8 * limits.CODE_BYTES_MAX  #: JSON may need six bytes for one of the code
BATCH_BODY_MAX: Final = 64 << 20
PAGE_JOBS: Final = 100
_SCAN: Final = 500  #: jobs read at once while a filter looks for more
_ID_LEAD_S: Final = 60.0  #: at most so long before its commit was an id made

KEY_HEADER: Final = Parameter(
    "idempotency-key",
    "The same key with the same request again answers the first job.",
    pattern="^[!-~]{1,128}$",
)


# --- taking in ---
async def submit(service: Service, call: Call) -> Accepted:
    """Take a job in. The answer is durable."""
    request = call.given(JobRequest)
    key = _key(call, request.idempotency_key)
    (spec,) = await prepare(service, call, (request,))
    (accepted,) = await _accepted(service, await _commit(service, call, [(spec, key)]))
    return accepted


async def submit_batch(service: Service, call: Call) -> BatchAccepted:
    """Take many jobs in, all or none. With a key for the batch each job has the key and its place."""
    requests = call.given(BatchRequest).jobs
    whole = call.headers.get("idempotency-key")
    keys = [
        request.idempotency_key if request.idempotency_key is not None or whole is None else f"{whole[:110]}/{place}"
        for place, request in enumerate(requests)
    ]
    for key in keys:
        _check_key(key)
    specs = await prepare(service, call, requests)
    done = await _commit(service, call, list(zip(specs, keys, strict=True)))
    return BatchAccepted(tuple(await _accepted(service, done)))


async def _commit(service: Service, call: Call, wanted: Sequence[tuple[JobSpec, str | None]]) -> list[Submitted]:
    try:
        return await service.commands(call.user).submit_many(wanted)
    except BadInput as error:
        if error.field == "queue":
            # It is another team's: for this caller there is no such queue.
            raise NotFound("queue", wanted[0][0].queue) from error
        raise Refusal("conflict", str(error), field=error.field) from error


async def _accepted(service: Service, done: Sequence[Submitted]) -> list[Accepted]:
    earlier = [one.id for one in done if not one.created]
    states = await service.store.read(_read_states, earlier) if earlier else {}
    queued = JobState.QUEUED.value
    return [Accepted(id=one.id, state=states.get(one.id, queued), created=one.created) for one in done]


def _read_states(reader: Reader, ids: Sequence[str]) -> dict[str, str]:
    return {job.id: job.state.value for job in reader.jobs(ids)}


def _key(call: Call, given: str | None) -> str | None:
    header = call.headers.get("idempotency-key")
    if header is not None and given is not None and header != given:
        detail = "idempotency_key: the header and the field differ"
        raise Refusal("conflict", detail, field="idempotency_key", advice="send one of them")
    key = header if header is not None else given
    _check_key(key)
    return key


def _check_key(key: str | None) -> None:
    if key is not None:
        admission.check_name("idempotency_key", key)


# --- looking ---
class Portrait(msgspec.Struct, frozen=True):
    """A job and what its view needs beside it."""

    job: Job
    kind: str
    attempts: list[Attempt]
    slices: dict[str, Slice]
    life_s: float | None = None  #: of capacity like its own; only where one job is shown


class Listed(msgspec.Struct, frozen=True):
    portraits: list[Portrait]
    pools: dict[str, Pool]
    next: str | None = None


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs a list is of."""

    team: str | None
    states: tuple[str, ...] = ()
    user: str | None = None
    tag: str | None = None
    queue: str | None = None
    since: float = 0.0

    @property
    def oldest(self) -> str:
        """No job of before `since` has a higher id: ids sort by time, and are made a little before the commit."""
        return KINDS["job"] + encode(max(0, int((self.since - _ID_LEAD_S) * 1000)), 10)

    def take(self, job: Job) -> bool:
        return (
            (self.user is None or job.spec.user == self.user)
            and (self.tag is None or self.tag in job.tags)
            and (self.queue is None or job.spec.queue == self.queue)
            and job.created_at >= self.since
        )


async def list_jobs(service: Service, call: Call) -> JobPage:
    """Jobs, newest first, without what only one job's own view shows."""
    query = call.query
    filters = Filters(
        team=call.walls,
        states=tuple(query["state"].split(",")) if "state" in query else (),
        user=query.get("user"),
        tag=query.get("tag"),
        queue=query.get("queue"),
        since=float(query.get("since", 0)),
    )
    limit = call.whole("limit", PAGE_JOBS)
    listed = await service.store.read(read_list, filters, query.get("cursor"), limit)
    now = service.clock.now()
    views = (_view(service, portrait, listed.pools, now) for portrait in listed.portraits)
    return JobPage(tuple(views), listed.next)


def read_list(reader: Reader, filters: Filters, cursor: str | None, limit: int) -> Listed:
    """One page. A filter that matches little ends the page early, with the cursor of where it stopped."""
    found: list[Job] = []
    at, looked, oldest = cursor, 0, filters.oldest
    more = True
    while more and len(found) < limit and looked < limits.PAGE_JOBS_SCANNED:
        page = reader.jobs_page(team=filters.team, states=filters.states, after=at, limit=max(_SCAN, limit))
        more = len(page) == max(_SCAN, limit)
        for job in page:
            if job.id < oldest:
                more = False
                break
            looked, at = looked + 1, job.id
            if filters.take(job):
                found.append(job)
                if len(found) == limit:
                    more = more or job is not page[-1]
                    break
    kinds = reader.payload_kinds([job.id for job in found])
    portraits = [_portrait(reader, job, kinds.get(job.id, "")) for job in found]
    return Listed(portraits, {pool.name: pool for pool in reader.pools()}, at if more else None)


def _portrait(reader: Reader, job: Job, kind: str) -> Portrait:
    attempts = reader.attempts_of(job.id) if job.chains else []
    names = {bound.slice for attempt in attempts for bound in attempt.slices}
    return Portrait(job, kind, attempts, {slice.id: slice for slice in reader.slices(sorted(names))})


def _view(service: Service, portrait: Portrait, pools: dict[str, Pool], now: float, *, whole: bool = False) -> JobView:
    cost = cost_usd(portrait.attempts, portrait.slices, pools, now) if portrait.attempts else None
    return job_view(
        portrait.job,
        portrait.attempts,
        portrait.kind,
        progress=service.progress,
        cost_usd=cost,
        used=job_cost(portrait.job, portrait.attempts, portrait.life_s, now) if whole and portrait.attempts else None,
        whole=whole,
    )


async def get_job(service: Service, call: Call) -> JobView:
    """One job with its attempts, and how it failed."""
    job = await service.find_job(call, call.params["id"])
    view = await _whole_view(service, job)
    if job.state is JobState.FAILED:
        view = msgspec.structs.replace(view, error=(await job_result(service, call)).error)
    return view


async def _whole_view(service: Service, job: Job) -> JobView:
    listed = await service.store.read(_read_one, job)
    (portrait,) = listed.portraits
    return _view(service, portrait, listed.pools, service.clock.now(), whole=True)


def _read_one(reader: Reader, job: Job) -> Listed:
    portrait = _portrait(reader, job, payload_kind(job))
    last = portrait.attempts[-1] if portrait.attempts else None
    whole = msgspec.structs.replace(portrait, life_s=read_life(reader, last))
    return Listed([whole], {pool.name: pool for pool in reader.pools()})


async def why(service: Service, call: Call) -> WhyView:
    """Why a job is not running, or how it ended."""
    job = await service.find_job(call, call.params["id"])
    state = job.state.value
    if job.state in TERMINAL_JOB_STATES:
        cause = job.cause.value if job.cause is not None else state
        moved = _moved(await service.store.read(_read_attempts, job.id))
        return WhyView(id=job.id, state=state, code=cause, sentence=ending(job), as_of=job.updated_at, details=moved)
    if not service.controller.leading:
        raise Refusal("not_leading", "only the leading server knows the reasons", retry_after_s=1.0)
    if job.spec.queue not in service.controller.snapshot.queues:
        raise Refusal("unavailable", "the server has not planned since it started", retry_after_s=1.0)
    found = await service.controller.why(job.id)
    if found is None:
        # It ended between the two reads: its own words are truer.
        return await why(service, call)
    reason, as_of = found
    attempts = await service.store.read(_read_attempts, job.id)
    position = reason.numbers.get("position")
    return WhyView(
        id=job.id,
        state=state,
        code=reason.code,
        sentence=reason.sentence,
        advice=reason.advice,
        place=int(position) if position is not None else None,
        as_of=as_of,
        numbers=dict(reason.numbers),
        details=(
            *(capacity_details(service, job, reason.sentence) if reason.code in CAPACITY_CODES else ()),
            *troubles(service, job, attempts),
            *_moved(attempts),
        ),
    )


def _moved(attempts: Sequence[Attempt]) -> tuple[str, ...]:
    """What was copied between regions for a job's attempts, and what that cost."""
    return tuple(f"attempt {each.fence}: {each.copied.told}" for each in attempts if each.copied is not None)


def _read_attempts(reader: Reader, job: str) -> list[Attempt]:
    return reader.attempts_of(job)


# --- changing ---
async def edit_job(service: Service, call: Call) -> JobView:
    """Change the priority of an unfinished job, or the tags of any."""
    wanted = call.given(EditRequest)
    job = await service.own_job(call, call.params["id"])
    commands = service.commands(call.user)
    if wanted.tags is not None:
        if len(wanted.tags) > limits.TAGS_MAX:
            raise BadInput("tags", len(wanted.tags), f"tags are more than {limits.TAGS_MAX}")
        for tag in wanted.tags:
            admission.check_name("tags", tag)
    if wanted.priority is not None:
        admission.check_number("priority", wanted.priority, -limits.PRIORITY_MAX, limits.PRIORITY_MAX)
        await service.found_fitting(commands.set_priority(job.id, wanted.priority))
    if wanted.tags is not None:
        await service.found_fitting(commands.tag(job.id, wanted.tags))
    return await _whole_view(service, await service.find_job(call, job.id))


async def cancel(service: Service, call: Call) -> CancelReply:
    """Stop a job for good; what runs is given its grace."""
    job = await service.own_job(call, call.params["id"])
    (done,) = await service.commands(call.user).cancel(job.id)
    answer = done.answer
    if answer == "cancelled":
        states = await service.store.read(_read_states, (job.id,))
        answer = "cancelled" if states.get(job.id) == JobState.CANCELLED.value else "cancelling"
    return CancelReply(job.id, answer)


async def resume(service: Service, call: Call) -> Accepted:
    """Go on from a finished job's last checkpoint, as a new job."""
    return await _again(service, call, resume=True)


async def rerun(service: Service, call: Call) -> Accepted:
    """Run a finished job's request once more, from nothing."""
    return await _again(service, call, resume=False)


async def _again(service: Service, call: Call, *, resume: bool) -> Accepted:
    request = call.given(AgainRequest)
    key = _key(call, request.idempotency_key)
    job = await service.find_job(call, call.params["id"])
    resources = msgspec.structs.replace(job.spec.resources, accelerators=request.on or job.spec.resources.accelerators)
    try:
        admission.normal_spec(msgspec.structs.replace(job.spec, resources=resources))
    except BadInput as error:
        raise in_wire_words(error) from error
    commands = service.commands(call.user)
    again = commands.resume if resume else commands.rerun
    if resume:
        await refuse_cleaned(service, job.id)
    done = await service.found_fitting(again(job.id, key, on=request.on, user=call.user.name))
    if resume and done.created:
        try:
            await refuse_cleaned(service, job.id)  # once more: a cleaning that did not see this job has said so by now
        except Refusal:
            await commands.cancel(done.id)
            raise
    (accepted,) = await _accepted(service, (done,))
    return accepted


_FILTERS: Final = (
    *JOB_FILTERS,
    Parameter("queue", "Jobs of this queue.", shape="printable", longest=limits.NAME_CHARACTERS_MAX),
    Parameter("since", "Jobs made at or after this second since the epoch.", kind="number", least=0, most=1e11),
    Parameter("cursor", "`next` of the page before.", pattern=ID_PATTERN),
    Parameter("limit", "How many at most.", kind="integer", least=1, most=limits.PAGE_JOBS_MAX),
)
_KEY: Final = (KEY_HEADER,)

ROUTES: Final = (
    Route(
        "POST",
        "/v1/jobs",
        submit,
        takes=JobRequest,
        gives=Accepted,
        role=Role.SUBMITTER,
        status=201,
        body_max=JOB_BODY_MAX,
        headers=_KEY,
    ),
    Route(
        "POST",
        "/v1/jobs/batch",
        submit_batch,
        takes=BatchRequest,
        gives=BatchAccepted,
        role=Role.SUBMITTER,
        status=201,
        body_max=BATCH_BODY_MAX,
        headers=_KEY,
    ),
    Route("GET", "/v1/jobs", list_jobs, gives=JobPage, query=_FILTERS),
    Route("GET", "/v1/jobs/{id}", get_job, gives=JobView),
    Route("PATCH", "/v1/jobs/{id}", edit_job, takes=EditRequest, gives=JobView, role=Role.SUBMITTER),
    Route("POST", "/v1/jobs/{id}/cancel", cancel, gives=CancelReply, role=Role.SUBMITTER),
    Route(
        "POST",
        "/v1/jobs/{id}/resume",
        resume,
        takes=AgainRequest,
        gives=Accepted,
        role=Role.SUBMITTER,
        status=201,
        body_optional=True,
        headers=_KEY,
    ),
    Route(
        "POST",
        "/v1/jobs/{id}/rerun",
        rerun,
        takes=AgainRequest,
        gives=Accepted,
        role=Role.SUBMITTER,
        status=201,
        body_optional=True,
        headers=_KEY,
    ),
    Route("GET", "/v1/jobs/{id}/why", why, gives=WhyView),
)
