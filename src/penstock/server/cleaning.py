"""`POST /v1/clean`: what ended jobs left goes after its time, a bounded part of it per call.

`tpu clean` calls until there is no `next`, `server.retention` does the same by a timer; ages are those of the policy
unless the caller names one. Snapshots, blobs and this machine's caches first (operators only: they have no team, S17),
then jobs by age. Bytes of a job go before its row, so that a call that is cut off leaves nothing that the next one
cannot find; the row goes only after the retention (S1). Nothing of a job that has not ended is touched, nor a
checkpoint that such a job may restore. A dry run goes the same way and counts what it would remove.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from penstock.controller.commands import Commands
from penstock.domain import limits
from penstock.domain.ids import KINDS, encode
from penstock.domain.lifecycle import TERMINAL_JOB_STATES
from penstock.domain.nouns import Job, Role
from penstock.domain.retention import Retention
from penstock.ports.objects import Kept, ObjectsError
from penstock.ports.store import Reader
from penstock.server.bytes import Blobs
from penstock.server.routing import Call, Refusal, Route
from penstock.server.service import Service
from penstock.server.sweeping import Swept, sweep_blobs, sweep_snapshots
from penstock.wire.api import CleanedView, CleanReply, CleanRequest

audit = logging.getLogger("penstock.audit")

SURVEYS_AT_ONCE: Final = 8
_PAGE: Final = 1_000
_ANCESTORS_MAX: Final = 1_000  #: of one job: as far back as a launch looks for checkpoints
_LAST: Final = "z" * 6  #: behind the time of an id: after every id of that millisecond
_TIME_CHARACTERS: Final = 10
_LAST_SECOND: Final = 32.0**_TIME_CHARACTERS / 1000 - 1  #: that fits into an id
#: What lies under a job, and what it is called when it goes. What is not named here goes with the row.
_KINDS: Final = {
    "log": "logs",
    "results": "results",
    "staging": "artifacts",
    "checkpoints": "checkpoints",
    "jax-cache": "compiled code",
}
_RESULTS: Final = frozenset({"results", "staging"})
_REST: Final = "records"
_LIST: Final = re.compile(r"^jobs/[^/]+/checkpoints/\d+/\d+/lists/\d{16}\.json$")


class Turns:
    """One sweep at a time in this process."""

    def __init__(self, _: Service) -> None:
        self.lock = asyncio.Lock()


class Tally:
    """How much of each kind went."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self.jobs = 0
        self.notes: list[str] = []

    def add(self, kind: str, kept: Iterable[Kept]) -> None:
        for one in kept:
            self.count(kind, 1, one.size)

    def count(self, kind: str, count: int, size: int = 0) -> None:
        self._counts[kind] += count
        self._bytes[kind] += size

    @property
    def views(self) -> tuple[CleanedView, ...]:
        return tuple(
            CleanedView(kind=kind, count=count, bytes=self._bytes[kind])
            for kind, count in sorted(self._counts.items())
            if count
        )


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """One call's wish, with its ages as moments."""

    before: Mapping[str, float]  #: by folder: what jobs left there that ended before goes
    forget_before: float  #: rows of jobs that ended before this may go
    explicit: bool = False  #: the caller said how old; then the last checkpoint goes as well
    keep_results: bool = False
    dry_run: bool = False

    @property
    def ended_before(self) -> float:
        """A job that ended later loses nothing. Not before 1970, where everything is kept for ever."""
        return max(0.0, self.forget_before, *self.before.values())

    def forgets(self, job: Job) -> bool:
        return not self.keep_results and job.finished_at is not None and job.finished_at < self.forget_before

    def keeps_newest(self, job: Job) -> bool:
        """Whether the job can be resumed afterwards, and nobody asked that it could not."""
        return not self.explicit and not self.forgets(job)

    def takes(self, job: Job, folder: str) -> bool:
        """Whether what lies in `jobs/J/KIND/…` has had its time."""
        kind = folder.split("/")[2]
        if self.keep_results and kind in _RESULTS:
            return False
        return job.finished_at is not None and job.finished_at < self.before[kind]


def wanted_by(policy: Retention, now: float) -> Wanted:
    """What the installation's own policy wants."""
    before = {"log": now - policy.logs_s, "checkpoints": now - policy.checkpoints_s}
    before |= {"jax-cache": before["checkpoints"], **dict.fromkeys(_RESULTS, now - policy.results_s)}
    return Wanted(before=before, forget_before=now - policy.forget_s)


def _wanted(service: Service, request: CleanRequest) -> Wanted:
    now = service.clock.now()
    wanted = wanted_by(service.settings.retention, now)
    if request.older_than_s is not None:
        before = dict.fromkeys(_KINDS, now - request.older_than_s)
        forget_s = max(request.older_than_s, service.settings.retention.jobs_s)
        wanted = Wanted(before=before, forget_before=now - forget_s, explicit=True)
    return msgspec.structs.replace(wanted, keep_results=request.keep_results, dry_run=request.dry_run)


async def clean(service: Service, call: Call) -> CleanReply:
    """Remove what jobs left that ended long ago, and what nothing names; call again with `next` until it is null."""
    request, cursor = call.given(CleanRequest), call.given(CleanRequest).cursor
    wanted = _wanted(service, request)
    notes: tuple[str, ...] = ()
    if call.walls is not None:
        if cursor is None:
            notes = ("snapshots, blobs and caches stay: they have no team, so operators clean them",)
            cursor = _first_job(wanted)
        elif not cursor.startswith("jobs:"):
            raise Refusal("forbidden", f"cursor: {cursor} is for operators", field="cursor", advice="leave it out")
    if not wanted.dry_run:
        audit.info("%s/%s cleans %s", call.user.team, call.user.name, cursor or "snapshots")
    reply = await Cleaner(service, service.commands(call.user), call.walls).part(wanted, cursor)
    return msgspec.structs.replace(reply, notes=(*notes, *reply.notes))


def _first_job(wanted: Wanted) -> str:
    """Where the jobs begin that were made before the newest of what goes ended."""
    moment = int(min(wanted.ended_before, _LAST_SECOND) * 1000)
    return f"jobs:{KINDS['job']}{encode(moment, _TIME_CHARACTERS)}{_LAST}"


class Cleaner(NamedTuple):
    """Who cleans, and whose: a team's jobs, or, without a team, everybody's and what nobody owns."""

    service: Service
    commands: Commands
    team: str | None

    async def part(self, wanted: Wanted, cursor: str | None) -> CleanReply:
        """One bounded part, beginning at a cursor; nobody else in this process cleans meanwhile."""
        tally = Tally()
        async with self.service.part(Turns).lock:
            at = cursor or "snapshots"
            if at.startswith("jobs:"):
                after: str | None = await _clean_jobs(self, wanted, at.removeprefix("jobs:"), tally)
            else:
                unused = await _clean_unused(self.service, at, tally, dry_run=wanted.dry_run)
                after = unused or _first_job(wanted)
        return CleanReply(
            dry_run=wanted.dry_run,
            ended_before=wanted.ended_before,
            jobs=tally.jobs,
            removed=tally.views,
            notes=tuple(tally.notes),
            next=after,
        )


# --- what no job owns ---
async def _clean_unused(service: Service, cursor: str, tally: Tally, *, dry_run: bool) -> str | None:
    """One step of snapshots, blobs, caches; the next one, or None at the end."""
    if cursor == "snapshots":
        done = await sweep_snapshots(service, dry_run=dry_run)
        tally.add("snapshots", done.gone)
        return "snapshots" if done.more else "blobs"
    if cursor != "caches":
        done = await sweep_blobs(service, dry_run=dry_run, fresh=cursor == "blobs")
        tally.add("blobs", done.gone)
        _forget_blobs(service, done)
        return "blobs:on" if done.more else "caches"
    if service.caches is not None:
        views, note = await service.caches(service.clock.now() - service.settings.retention.unused_s, dry_run)
        for view in views:
            tally.count(view.kind, view.count, view.bytes)
        if note:
            tally.notes.append(note)
    return None


def _forget_blobs(service: Service, done: Swept) -> None:
    """The next submit must be asked for what went."""
    if done.gone:
        service.part(Blobs).forget()


# --- what jobs left ---
async def _clean_jobs(cleaner: Cleaner, wanted: Wanted, below: str, tally: Tally) -> str | None:
    service = cleaner.service
    jobs, after = await service.store.read(_ended_jobs, cleaner.team, wanted.ended_before, below)
    found = await _surveys(service, jobs)
    marked = set() if wanted.dry_run else await _mark(service, wanted, jobs, found)
    # Read after the marks are written: a resume commits first and looks for the mark then, so one sees the other.
    needed = await service.store.read(_needed_by_live, [job.id for job in jobs])
    for id in marked & needed:
        await service.objects.delete(mark_of(id))
    forgotten: list[str] = []
    for job in jobs:
        try:
            if await _clean_job(service, wanted, job, found[job.id], job.id in needed, tally):
                forgotten.append(job.id)
        except ObjectsError as error:
            tally.notes.append(f"{job.id} stays: {error}")
    if needed:
        tally.notes.append(f"{len(needed)} ended jobs keep their checkpoints: jobs that have not ended go on from them")
    await _forget(cleaner, wanted, forgotten, found, tally)
    return None if after is None else f"jobs:{after}"


async def _surveys(service: Service, jobs: Sequence[Job]) -> dict[str, tuple[Kept, ...]]:
    places = asyncio.Semaphore(SURVEYS_AT_ONCE)

    async def one(job: Job) -> tuple[Kept, ...]:
        async with places:
            return await service.regions.survey(f"jobs/{job.id}/")

    surveys = await asyncio.gather(*(one(job) for job in jobs))
    return {job.id: found for job, found in zip(jobs, surveys, strict=True)}


async def _clean_job(
    service: Service, wanted: Wanted, job: Job, found: Sequence[Kept], needed: bool, tally: Tally
) -> bool:
    """Remove what goes of one job; whether its row may go too."""
    going: dict[str, list[Kept]] = {}
    stays = await _checkpoints_that_stay(service, wanted, job, found, needed)
    for kept in found:
        folder = _folder(kept.path)
        if folder is None or folder in stays or not wanted.takes(job, folder):
            continue
        going.setdefault(folder, []).append(kept)
    for folder, kept_there in going.items():
        if not wanted.dry_run:
            await service.regions.remove(folder)
        tally.add(_KINDS[folder.split("/")[2]], kept_there)
    forgets = wanted.forgets(job) and not needed
    tally.jobs += bool(going) or forgets
    return forgets


def _folder(path: str) -> str | None:
    """The folder that goes as a whole, `jobs/J/log` or `jobs/J/checkpoints/7`; None for what goes with the row."""
    parts = path.split("/")
    depth = 4 if parts[2] == "checkpoints" else 3
    return "/".join(parts[:depth]) if parts[2] in _KINDS and len(parts) > depth else None


def _is_plain(path: str) -> bool:
    """What a payload put under the root itself: it is neither a piece nor a list of a copy."""
    return path.split("/")[5:6] != ["pieces"] and not _LIST.search(path)


async def _checkpoints_that_stay(
    service: Service, wanted: Wanted, job: Job, found: Sequence[Kept], needed: bool
) -> frozenset[str]:
    """All, while a job that has not ended may restore them; the newest of each replica, while this one can resume."""
    prefix = f"jobs/{job.id}/checkpoints/"
    folders = {folder for kept in found if (folder := _folder(kept.path)) is not None and folder.startswith(prefix)}
    if needed or not folders:
        return frozenset(folders)
    if not wanted.keeps_newest(job):
        return frozenset()
    # Pieces without a list are a copy that was cut off, and hosts of a gang leave lists before there is anything to
    # copy: nothing can be resumed from either alone.
    pieces = {_folder(kept.path) for kept in found if kept.path.split("/")[5:6] == ["pieces"]}
    lists = {_folder(kept.path) for kept in found if _LIST.search(kept.path)}
    whole = (pieces & lists) | {_folder(kept.path) for kept in found if _is_plain(kept.path)}
    newest: dict[int, int] = {}
    for fence, replica in (await service.store.read(_replicas, job.id)).items():
        if f"{prefix}{fence}" in folders & whole:
            newest[replica] = max(fence, newest.get(replica, 0))
    return frozenset(f"{prefix}{fence}" for fence in newest.values())


async def _forget(
    cleaner: Cleaner,
    wanted: Wanted,
    ids: Sequence[str],
    found: dict[str, tuple[Kept, ...]],
    tally: Tally,
) -> None:
    """Rows, then the fences and marks under them: a mark must not go before the row it speaks of."""
    if not ids:
        return
    count = len(ids)
    if not wanted.dry_run:
        count = await cleaner.commands.purge(ids, wanted.forget_before)
    tally.count("rows", count)
    for id in ids:
        rest = [kept for kept in found[id] if _folder(kept.path) is None and kept.path != mark_of(id)]
        tally.add(_REST, rest)
        if not wanted.dry_run:
            await cleaner.service.regions.remove(f"jobs/{id}")


# --- reads ---
def _ended_jobs(reader: Reader, team: str | None, before: float, below: str) -> tuple[list[Job], str | None]:
    """Jobs that ended before a moment, newest first; where to go on, or None."""
    found: list[Job] = []
    looked, states = 0, sorted(state.value for state in TERMINAL_JOB_STATES)
    while looked < limits.PAGE_JOBS_SCANNED:
        page = reader.jobs_page(team=team, states=states, after=below, limit=_PAGE)
        for job in page:
            looked, below = looked + 1, job.id
            if job.finished_at is not None and job.finished_at < before:
                found.append(job)
                if len(found) == limits.CLEAN_JOBS:
                    return found, below
        if len(page) < _PAGE:
            return found, None
    return found, below


def _needed_by_live(reader: Reader, ids: Sequence[str]) -> set[str]:
    """Which of these an unfinished job resumes, directly or through others."""
    needed: set[str] = set()
    line = reader.resumed_by_live()
    for _ in range(_ANCESTORS_MAX):
        needed.update(line)
        line = sorted({job.parent for job in reader.jobs(line) if job.parent is not None} - needed)
        if not line:
            break
    return needed & set(ids)


def _replicas(reader: Reader, job: str) -> dict[int, int]:
    return {attempt.fence: attempt.replica for attempt in reader.attempts_of(job)}


# --- jobs whose checkpoints went ---
def mark_of(job: str) -> str:
    return f"jobs/{job}/cleaned"


async def _mark(service: Service, wanted: Wanted, jobs: Sequence[Job], found: dict[str, tuple[Kept, ...]]) -> set[str]:
    """Say of jobs whose checkpoints will go that they cannot be resumed; the ids that were not marked before."""
    marked = set()
    for job in jobs:
        paths: Collection[str] = {kept.path for kept in found[job.id]}
        if wanted.keeps_newest(job) or mark_of(job.id) in paths:
            continue
        if any(path.startswith(f"jobs/{job.id}/checkpoints/") for path in paths):
            await service.objects.put(mark_of(job.id), b"the checkpoints of this job were removed\n")
            marked.add(job.id)
    return marked


async def refuse_cleaned(service: Service, job: str) -> None:
    """A job without its checkpoints would silently begin anew: that has to be asked for."""
    gone = await service.store.read(_is_gone, job)
    if gone or await service.objects.get(mark_of(job)) is not None:
        detail = f"job {job} cannot be resumed: its checkpoints were removed by `tpu clean`"
        raise Refusal("conflict", detail, field="id", advice=f"start it from nothing with `tpu rerun {job}`")


def _is_gone(reader: Reader, job: str) -> bool:
    return not reader.jobs((job,))


ROUTES: Final = (
    Route(
        "POST",
        "/v1/clean",
        clean,
        takes=CleanRequest,
        gives=CleanReply,
        role=Role.ADMIN,
        body_optional=True,
    ),
)
