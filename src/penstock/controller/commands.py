"""What users and operators may ask for: checked, then committed by one verb each.

The server, the SDK's in-process mode and the simulator call these. A command answers only after its commit is durable;
when the answer is lost (`UnknownOutcome`), repeating it with the same key is safe. It must not plan or perform.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.controller import adoption, attempts, inventory, jobs, settings, slices
from penstock.controller.jobs import CancelAnswer, NewJob, NotFound, Submitted
from penstock.domain import admission, limits
from penstock.domain.admission import BadInput
from penstock.domain.ids import IdMaker
from penstock.domain.lifecycle import TERMINAL_JOB_STATES
from penstock.domain.nouns import Attempt, Job, JobSpec, Pool, Queue, Reservation, Slice, Team
from penstock.domain.transfers import Transfer
from penstock.ports.clock import Clock
from penstock.ports.store import Reader, Store


class Commands:
    def __init__(self, store: Store, clock: Clock, ids: IdMaker) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids

    # --- jobs ---
    async def submit(self, spec: JobSpec, key: str | None = None) -> Submitted:
        """Take one job in. The same key and request again answer the same job."""
        return (await self.submit_many([(spec, key)]))[0]

    async def submit_many(self, wanted: Sequence[tuple[JobSpec, str | None]]) -> list[Submitted]:
        """Take many in, all or none, in one commit."""
        if len(wanted) > limits.BATCH_JOBS_MAX:
            raise BadInput("jobs", len(wanted), f"are more than {limits.BATCH_JOBS_MAX}", "split the batch")
        return await self._store.transact(jobs.submit, [self._new(spec, key) for spec, key in wanted])

    def _new(
        self, spec: JobSpec, key: str | None, *, again: str = "", parent: Job | None = None, stage: int = 0
    ) -> NewJob:
        """`again` says what a resume or rerun repeats: with one key it must not be taken for its own first run."""
        if key is not None:
            admission.check_name("idempotency_key", key)
        spec = admission.normal_spec(spec)
        return NewJob(
            id=self._ids.make("job", self._clock.now()),
            spec=spec,
            body_hash=admission.body_hash(spec) + again,
            key=key,
            parent=parent.id if parent is not None else None,
            stage=stage,
        )

    async def cancel(self, *ids: str) -> list[CancelAnswer]:
        return await self._store.transact(jobs.cancel, ids)

    async def resume(
        self, id: str, key: str | None = None, *, on: tuple[str, ...] = (), user: str | None = None
    ) -> Submitted:
        """Go on from a finished job's last checkpoint, as a new job one stage further; perhaps elsewhere."""
        return await self._again(id, key, on, user, resume=True)

    async def rerun(
        self, id: str, key: str | None = None, *, on: tuple[str, ...] = (), user: str | None = None
    ) -> Submitted:
        """Run a finished job's request once more, from nothing; perhaps elsewhere."""
        return await self._again(id, key, on, user, resume=False)

    async def _again(
        self, id: str, key: str | None, on: tuple[str, ...], user: str | None, *, resume: bool
    ) -> Submitted:
        parent = await self.job(id)
        if parent is None:
            raise NotFound("job", id)
        if parent.state not in TERMINAL_JOB_STATES:
            raise BadInput("job", id, f"is {parent.state.value}", "cancel it first, or wait until it ends")
        stage = max([parent.stage, *(chain.stage for chain in parent.chains)]) + 1 if resume else 0
        spec = msgspec.structs.replace(parent.spec, after=(), user=parent.spec.user if user is None else user)
        if on:
            # A pool or slice that was named has one accelerator: with another, the wish for it is over.
            elsewhere = msgspec.structs.replace(spec.resources, accelerators=on, pool=None, slice=None)
            spec = msgspec.structs.replace(spec, resources=elsewhere)
        again = f" {'resume' if resume else 'rerun'} {id}"
        new = self._new(spec, key, again=again, parent=parent if resume else None, stage=stage)
        return (await self._store.transact(jobs.submit, [new]))[0]

    async def set_priority(self, id: str, priority: int) -> Job:
        admission.check_number("priority", priority, -limits.PRIORITY_MAX, limits.PRIORITY_MAX)
        return await self._store.transact(jobs.edit, id, priority=priority)

    async def tag(self, id: str, tags: Sequence[str]) -> Job:
        for tag in tags:
            admission.check_name("tags", tag)
        if len(tags) > limits.TAGS_MAX:
            raise BadInput("tags", len(tags), f"tags are more than {limits.TAGS_MAX}")
        return await self._store.transact(jobs.edit, id, tags=tuple(tags))

    async def purge(self, ids: Sequence[str], older_than: float) -> int:
        """Forget jobs that ended before `older_than`, which must be at least the retention ago."""
        if not older_than <= self._clock.now() - limits.RETENTION_S:
            days = limits.RETENTION_S / 86_400
            raise BadInput("older_than", older_than, f"is less than {days:g} days ago", "keep them until then")
        return await self._store.transact(jobs.purge, ids, older_than)

    async def job(self, id: str) -> Job | None:
        return await self._store.read(_read_job, id)

    async def attempts(self, job: str) -> list[Attempt]:
        return await self._store.read(_read_attempts, job)

    # --- what operators set ---
    async def put_team(self, team: Team) -> Team:
        admission.check_name("name", team.name)
        return await self._store.transact(settings.put_team, team)

    async def put_queue(self, queue: Queue) -> Queue:
        admission.check_queue(queue)
        return await self._store.transact(settings.put_queue, queue)

    async def delete_queue(self, name: str) -> Queue:
        """Take a queue away; refused while an unfinished job is in it."""
        return await self._store.transact(settings.delete_queue, name)

    async def reserve_slice(self, id: str, wanted: Reservation | None, user: str | None) -> Slice:
        """Reserve a slice for one user, or give it back; `user` may replace only an own claim, None anybody's."""
        return await self._store.transact(inventory.reserve_slice, id, wanted, user)

    async def reserve_pool(self, name: str, wanted: Reservation | None, user: str | None) -> Pool:
        """The same for all slices of a pool."""
        return await self._store.transact(inventory.reserve_pool, name, wanted, user)

    async def note_save(self, attempt: str, host: int, cost_s: float | None, at: float | None = None) -> None:
        """A checkpoint of one host of an attempt is whole in the root since `at`; None: since now."""
        await self._store.transact(attempts.note_save, attempt, host, cost_s, at)

    async def note_transfer(self, attempt: str, transfer: Transfer) -> None:
        """A checkpoint that an attempt goes on from is copied from another region first."""
        await self._store.transact(attempts.note_transfer, attempt, transfer)

    async def put_pool(self, pool: Pool) -> Pool:
        """Create a pool, or resize it."""
        return await self._store.transact(settings.put_pool, admission.normal_pool(pool))

    async def delete_pool(self, name: str) -> Pool:
        return await self._store.transact(settings.delete_pool, name)

    async def recreate(self, pool: str) -> tuple[str, ...]:
        """Ask zones of a pool at once that rest after refusals; answers which."""
        return await self._store.transact(settings.retry_zones, pool)

    async def replace_slice(self, id: str, why: str, *, now: bool) -> Slice:
        """Let a slice go for another; with `now` a job on it goes on elsewhere."""
        return await self._store.transact(slices.replace, id, why, now)

    async def adopt(self, pool: Pool, machine: str) -> Slice:
        """Take in what exists, as the one slice of a pool of its own; the same again while it is on its way."""
        id = self._ids.make("slice", self._clock.now())
        return await self._store.transact(adoption.take_in, admission.normal_pool(pool), id, machine)

    async def limit_provider(self, provider: str, chips: int | None) -> None:
        if chips is not None:
            admission.check_number("chips", chips, 0, 10_000_000)
        await self._store.transact(settings.limit_provider, provider, chips)

    async def set_maintenance(self, on: bool) -> None:
        await self._store.transact(settings.set_maintenance, on)


def _read_job(reader: Reader, id: str) -> Job | None:
    return reader.job(id)


def _read_attempts(reader: Reader, job: str) -> list[Attempt]:
    return reader.attempts_of(job)
