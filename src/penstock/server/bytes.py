"""Routes that move bytes: blobs and snapshots by hash, artifacts and results of attempts.

Clients send what the server lacks and name it by its SHA-256; hosts fetch it, and put what their payloads left under
the fence of their attempt, so that nobody can write over another attempt's (S6). The result of a job is that of the
attempt that succeeded, its error that of the last. Content by hash is kept for each team apart, so that no team learns
from a hash what another has (S17, ADR 0021). It must not unpack, decode or run anything it stores.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.controller.jobs import NotFound
from penstock.domain import limits
from penstock.domain.admission import check_outputs
from penstock.domain.custody import staging_path
from penstock.domain.endings import first_exit
from penstock.domain.lifecycle import TERMINAL_JOB_STATES, AttemptState, Cause, JobState
from penstock.domain.nouns import Attempt, Job, Role, Slice
from penstock.ports.objects import AlreadyThere, Objects
from penstock.ports.store import Reader
from penstock.server.agents import bells, bound_attempt
from penstock.server.routing import Call, Parameter, Raw, Refusal, Route
from penstock.server.service import Service
from penstock.server.sweeping import BLOBS, blob_path, folder_of, lost_blobs, snapshot_path
from penstock.server.views import exit_code
from penstock.wire.agent import ResultReport
from penstock.wire.api import ArtifactPage, ArtifactView, ErrorView, MissingReply, MissingRequest, Outcome

BLOB_LISTING_S: Final = 10.0  #: one listing of all blobs answers for so long; what is put meanwhile is added
_THREAD_BYTES: Final = 1 << 20  #: hashed beside the event loop
_encode = msgspec.json.Encoder().encode
_NAME: Final = (
    Parameter(
        "name", "the artifact's name; it may have folders", longest=limits.NAME_CHARACTERS_MAX, shape="relative-path"
    ),
)
_OF_TEAM: Final = (
    Parameter("team", "of this team; for operators", longest=limits.NAME_CHARACTERS_MAX, shape="printable"),
)
_WAIT: Final = Parameter(
    "wait", "answer when the job has ended, or after so many seconds", "number", least=0, most=limits.RESULT_WAIT_S
)


# --- content by hash ---
class _Known:
    """The blobs of one team."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.listed_at = float("-inf")
        self.listing = asyncio.Lock()


class Blobs:
    """Which blobs each team has, as far as this server has looked."""

    def __init__(self, service: Service) -> None:
        self._objects = service.objects
        self._clock = service.clock
        self._teams: dict[str, _Known] = {}

    async def missing(self, team: str, wanted: Sequence[str]) -> tuple[str, ...]:
        known = self._teams.setdefault(team, _Known())
        async with known.listing:
            if self._clock.steady() - known.listed_at > BLOB_LISTING_S:
                listed_at = self._clock.steady()
                paths = await self._objects.list(BLOBS + folder_of(team))
                known.names = {path.rpartition("/")[2] for path in paths}
                known.listed_at = listed_at
        return tuple(dict.fromkeys(name for name in wanted if name not in known.names))

    def note(self, team: str, name: str) -> None:
        self._teams.setdefault(team, _Known()).names.add(name)

    def forget(self) -> None:
        """Some were removed: the next question is answered by a new listing."""
        for known in self._teams.values():
            known.listed_at = float("-inf")


async def _team(service: Service, call: Call) -> str:
    """Whose content a call is about: the user's team's, the one an operator names, or that of the host's slice."""
    if call.host is None:
        named = call.query.get("team", call.user.team)
        if named != call.user.team and call.user.role is not Role.OPERATOR:
            detail = f"query team: {named!r} is not the team of {call.user.name}"
            raise Refusal("forbidden", detail, field="team", advice="leave it out")
        return named
    slice = service.controller.snapshot.slices.get(call.host.slice)
    if slice is None:
        slice = await service.store.read(_slice_of, call.host.slice)
    if slice is None:
        raise NotFound("slice", call.host.slice)
    return slice.team


def _slice_of(reader: Reader, id: str) -> Slice | None:
    return reader.slice(id)


async def missing_blobs(service: Service, call: Call) -> MissingReply:
    """Which of these blobs still have to be sent: those that the team has not sent itself."""
    assert isinstance(call.body, MissingRequest)
    return MissingReply(await service.part(Blobs).missing(await _team(service, call), call.body.blobs))


async def put_blob(service: Service, call: Call) -> None:
    """Store a blob under the hash of these very bytes; storing it again is harmless."""
    team, name = await _team(service, call), call.params["sha256"]
    await _put_by_hash(service, call, blob_path(team, name))
    service.part(Blobs).note(team, name)


async def get_blob(service: Service, call: Call) -> Raw:
    """A blob as it is stored."""
    name = call.params["sha256"]
    return await _get(service, blob_path(await _team(service, call), name), "blob", name)


async def put_snapshot(service: Service, call: Call) -> None:
    """Store a snapshot's list of files under the hash of these very bytes; its blobs have been sent before."""
    team, name, body = await _team(service, call), call.params["sha256"], call.body
    assert isinstance(body, bytes)
    # Written anew if it is there: from now on it is young, and nobody sweeps it before a job can name it.
    await _put_by_hash(service, call, snapshot_path(team, name), again=True)
    lost = await lost_blobs(service, team, name, body)
    if lost:
        service.part(Blobs).forget()
        detail = f"snapshot: {len(lost)} of its blobs were removed since they were asked about, {lost[0]} first"
        raise Refusal("conflict", detail, field="snapshot", advice="ask which are missing, and send those")


async def get_snapshot(service: Service, call: Call) -> Raw:
    """A snapshot's list of files."""
    name = call.params["sha256"]
    return await _get(service, snapshot_path(await _team(service, call), name), "snapshot", name)


async def _put_by_hash(service: Service, call: Call, path: str, *, again: bool = False) -> None:
    body, name = call.body, call.params["sha256"]
    assert isinstance(body, bytes)
    found = await asyncio.to_thread(_hash, body) if len(body) > _THREAD_BYTES else _hash(body)
    if found != name:
        raise Refusal("conflict", f"sha256: the body's is {found}, not {name}", field="sha256", advice="send it again")
    try:
        await service.objects.put_new(path, body)
    except AlreadyThere:  # the name is the hash: it is these bytes
        if again:
            await service.objects.put(path, body)


def _hash(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


async def _get(service: Service, path: str, what: str, name: str) -> Raw:
    stored = await service.objects.get(path)
    if stored is None:
        raise NotFound(what, name)
    return Raw(stored.data)


# --- what attempts leave ---
async def put_artifact(service: Service, call: Call) -> None:
    """Store a file of an attempt. Once the attempt has succeeded its files count, and no longer change."""
    attempt, _ = await bound_attempt(service, call, late=True, committed=True)
    name = call.params["name"]
    check_outputs((name,))
    assert isinstance(call.body, bytes)
    path = staging_path(attempt.job, attempt.fence, name)
    await _put_own(service.objects, attempt, path, call.body, f"name: {name!r}")


async def put_result(service: Service, call: Call) -> None:
    """Store what one host's payload left in `result`, or how it failed; rank 0's is the attempt's."""
    attempt, rank = await bound_attempt(service, call, late=True, committed=True)
    assert isinstance(call.body, ResultReport)
    await _put_own(service.objects, attempt, result_path(attempt, rank), _encode(call.body), "the result")


async def _put_own(objects: Objects, attempt: Attempt, path: str, data: bytes, what: str) -> None:
    if attempt.state is not AttemptState.CLOSED:
        await objects.put(path, data)
        return
    if attempt.cause is not Cause.SUCCEEDED:
        await objects.put(path, data)  # it never counts as a result: only its error and what is left are looked at
        return
    stored = await objects.get(path)
    if stored is None or stored.data != data:
        raise Refusal("conflict", f"{what}: attempt {attempt.id} has succeeded; what it left cannot change")


def result_path(attempt: Attempt, rank: int) -> str:
    """Where a host's report is: the attempt's own is rank 0's."""
    return f"jobs/{attempt.job}/results/{attempt.fence}{f'-{rank}' if rank else ''}.json"


# --- what people get ---
async def job_result(service: Service, call: Call) -> Outcome:
    """How a job ended, or stands: its result when it succeeded, its error when it failed."""
    job = await _job_after(service, call, float(call.query.get("wait", 0)))
    attempts = await service.store.read(_attempts_of, job.id)
    chosen = deciding(attempts)
    result, note, error = None, "", None
    if chosen is not None and job.state in TERMINAL_JOB_STATES:
        reports = [await _report(service.objects, chosen, rank) for rank in _tellers(chosen)]
        told = [report for report in reports if report is not None]
        if job.state is JobState.SUCCEEDED and told:
            result, note = told[0].result, told[0].note
        elif job.state is not JobState.SUCCEEDED:
            error = next((report.error for report in told if report.error is not None), None)
    if error is None and job.state is JobState.FAILED:
        said = "; ".join(chosen.evidence) if chosen is not None and chosen.evidence else job.reason
        error = ErrorView(type=job.cause.value if job.cause is not None else "failed", message=said)
    return _outcome(job, attempts, chosen, result, note, error)


async def _job_after(service: Service, call: Call, wait_s: float) -> Job:
    """The job as soon as it has ended, or as it is after `wait_s`, or when the server stops."""
    id = call.params["id"]
    while wait_s > 0 and not service.stopping.is_set():
        with bells(service).end_of(id) as ended:
            job = await service.find_job(call, id)
            if job.state in TERMINAL_JOB_STATES:
                return job
            if job.id == id:
                await asyncio.wait((ended,), timeout=wait_s)
                break
        id = job.id  # it was the start of one: ends are told by the whole
    return await service.find_job(call, id)


def _outcome(
    job: Job,
    attempts: Sequence[Attempt],
    chosen: Attempt | None,
    result: object,
    note: str,
    error: ErrorView | None,
) -> Outcome:
    started = [attempt.started_at for attempt in attempts if attempt.started_at is not None]
    return Outcome(
        id=job.id,
        state=job.state.value,
        cause=job.cause.value if job.cause is not None else None,
        exit_code=exit_code(chosen.exits) if chosen is not None else None,
        result=result,
        note=note,
        error=error,
        stage=max((chain.stage for chain in job.chains), default=job.stage),
        attempts=len(attempts),
        slice=chosen.slices[0].slice if chosen is not None and chosen.slices else None,
        started_at=min(started, default=None),
        finished_at=job.finished_at,
    )


def deciding(attempts: Sequence[Attempt]) -> Attempt | None:
    """The attempt that a job's result and error come from: the first replica's that succeeded, else the last."""
    well = [attempt for attempt in attempts if attempt.cause is Cause.SUCCEEDED]
    if well:
        return min(well, key=lambda attempt: attempt.replica)
    return attempts[-1] if attempts else None


def _tellers(attempt: Attempt) -> tuple[int, ...]:
    """The ranks whose reports are read, in order: the one whose failure explains the others', then rank 0."""
    first = first_exit(attempt.exits)
    return (0,) if first is None or first.host == 0 else (first.host, 0)


async def _report(objects: Objects, attempt: Attempt, rank: int) -> ResultReport | None:
    stored = await objects.get(result_path(attempt, rank))
    return None if stored is None else msgspec.json.decode(stored.data, type=ResultReport)


async def artifacts(service: Service, call: Call) -> ArtifactPage:
    """The files left by the attempt that counts: the one that succeeded, else the last."""
    attempt = await _chosen(service, call)
    if attempt is None:
        return ArtifactPage(())
    prefix = staging_path(attempt.job, attempt.fence, "")
    paths = await service.objects.list(prefix)
    return ArtifactPage(
        tuple(ArtifactView(name=path.removeprefix(prefix), attempt=attempt.id, fence=attempt.fence) for path in paths)
    )


async def artifact(service: Service, call: Call) -> Raw:
    """One of those files."""
    attempt, name = await _chosen(service, call), call.params["name"]
    check_outputs((name,))
    if attempt is None:
        raise NotFound("artifact", name)
    raw = await _get(service, staging_path(attempt.job, attempt.fence, name), "artifact", name)
    raw.headers = {"content-disposition": "attachment"}
    return raw


async def _chosen(service: Service, call: Call) -> Attempt | None:
    job = await service.find_job(call, call.params["id"])
    return deciding(await service.store.read(_attempts_of, job.id))


def _attempts_of(reader: Reader, job: str) -> list[Attempt]:
    return reader.attempts_of(job)


ROUTES: Final = (
    Route(
        "POST",
        "/v1/blobs/missing",
        missing_blobs,
        takes=MissingRequest,
        gives=MissingReply,
        role=Role.SUBMITTER,
        query=_OF_TEAM,
    ),
    Route(
        "PUT",
        "/v1/blobs/{sha256}",
        put_blob,
        takes=bytes,
        role=Role.SUBMITTER,
        body_max=limits.BLOB_BYTES_MAX,
        status=204,
        query=_OF_TEAM,
    ),
    Route("GET", "/v1/blobs/{sha256}", get_blob, gives="bytes", agents=True, query=_OF_TEAM),
    Route(
        "PUT",
        "/v1/snapshots/{sha256}",
        put_snapshot,
        takes=bytes,
        role=Role.SUBMITTER,
        body_max=limits.SNAPSHOT_MANIFEST_BYTES_MAX,
        status=204,
        query=_OF_TEAM,
    ),
    Route("GET", "/v1/snapshots/{sha256}", get_snapshot, gives="bytes", agents=True, query=_OF_TEAM),
    Route(
        "PUT",
        "/v1/agent/attempts/{attempt}/artifacts/{name:path}",
        put_artifact,
        takes=bytes,
        role=Role.AGENT,
        body_max=limits.ARTIFACT_BYTES_MAX,
        body_optional=True,  # a file may be empty
        status=204,
        path_rules=_NAME,
    ),
    Route(
        "PUT",
        "/v1/agent/attempts/{attempt}/result",
        put_result,
        takes=ResultReport,
        role=Role.AGENT,
        body_max=limits.RESULT_BYTES_MAX,
        status=204,
    ),
    Route("GET", "/v1/jobs/{id}/result", job_result, gives=Outcome, query=(_WAIT,)),
    Route("GET", "/v1/jobs/{id}/artifacts", artifacts, gives=ArtifactPage),
    Route("GET", "/v1/jobs/{id}/artifacts/{name:path}", artifact, gives="bytes", path_rules=_NAME),
)
