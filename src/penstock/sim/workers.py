"""An extraction replica as a process model: claims units over the bucket, writes, commits, ends when none is open.

It performs `domain.ledger` exactly as a real worker must, over whatever `Objects` its host gives it, so that
lost replies, crashes at any object call, and two workers on one unit meet the true rules. The history of
shards is written by the bucket (`shard_record`), not by the worker: what counts is what was stored, not what
a worker thinks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from penstock.domain import ledger
from penstock.domain.ledger import Commit, DataObject, Lease, Plan, Put, SeenLease, Unit, Verdict
from penstock.ports.objects import AlreadyThere, Objects, ObjectsError
from penstock.sim.processes import Process

T = TypeVar("T")

RETRY_S = (0.5, 5.0)  #: between tries of an object call that failed


class Extraction(msgspec.Struct, frozen=True, kw_only=True):
    """One run, and how long its work takes."""

    plan: Plan
    unit_s: float = 40.0  #: of one unit on average; each takes between half and one and a half of it
    lease_s: float = 120.0
    look_s: float = 15.0  #: how often a worker that found nothing to claim looks again


class Replica:
    """One worker process on a run."""

    def __init__(
        self,
        extraction: Extraction,
        objects: Objects,
        rng: random.Random,
        *,
        attempt: str,
        fence: int = 0,
        report: Callable[[int, bool], None] | None = None,
    ) -> None:
        self.attempt = attempt
        self._extraction = extraction
        self._plan = extraction.plan
        self._objects = objects
        self._rng = rng
        self._fence = fence
        self._report = report
        self._first_seen: dict[str, float] = {}  #: lease path -> when this worker first saw it

    async def work(self) -> int:
        """Until no unit is open; the exit code."""
        await self.publish_plan()
        while True:
            units = ledger.open_units(self._plan, await self._committed())
            self._say(len(units), holding=False)
            if not units:
                await self._seal()
                return 0
            if not await self._do_one(units):
                await asyncio.sleep(self._extraction.look_s)

    def _say(self, units: int, *, holding: bool) -> None:
        if self._report is not None:
            self._report(units, holding)

    async def publish_plan(self) -> None:
        """Whoever comes first writes the plan; a run whose plan is another one is not ours to touch."""
        path = ledger.plan_path(self._plan.run)
        await self._create(path, ledger.encode(self._plan))
        stored = await self._read(path)
        if stored is None or ledger.decode_plan(stored) != self._plan:
            raise ValueError(f"run {self._plan.run} has another plan: choose another run name")

    async def _do_one(self, units: tuple[Unit, ...]) -> bool:
        """Claim and finish one of the open units; False when all of them are claimed by others."""
        first = self._rng.randrange(len(units))
        for unit in (*units[first:], *units[:first]):
            if await self._claim(unit):
                self._say(len(units), holding=True)
                await asyncio.sleep(self._extraction.unit_s * self._rng.uniform(0.5, 1.5))
                await self._commit(unit, await self._write(unit))
                return True
        return False

    async def _claim(self, unit: Unit) -> bool:
        run, now = self._plan.run, asyncio.get_running_loop().time()
        paths = await self._list(ledger.leases_prefix(run, unit.id))
        seen = [
            SeenLease(number=ledger.lease_number(path), since=self._first_seen.setdefault(path, now)) for path in paths
        ]
        number = ledger.next_lease(seen, asyncio.get_running_loop().time(), self._extraction.lease_s)
        if number is None:
            return False
        lease = Lease(unit=unit.id, attempt=self.attempt, fence=self._fence)
        path = ledger.lease_path(run, unit.id, number)
        won = await self._create_own(path, ledger.encode(lease), lambda data: ledger.decode_lease(data).attempt)
        self._first_seen.setdefault(path, asyncio.get_running_loop().time())
        return won

    async def _write(self, unit: Unit) -> DataObject:
        """Write under this attempt's own name, then read back: what is committed is what is stored."""
        data = f"rows {unit.start}:{unit.stop} of {self._plan.run}".encode()
        path = ledger.data_path(self._plan.run, unit.id, self.attempt, "rows")
        while True:
            await self._create(path, data)
            stored = await self._try(lambda: self._objects.get(path))
            if stored is not None and ledger.checksum(stored.data) == ledger.checksum(data):
                return DataObject(path=path, generation=stored.generation, checksum=ledger.checksum(stored.data))

    async def _commit(self, unit: Unit, data: DataObject) -> bool:
        commit = Commit(
            unit=unit.id,
            attempt=self.attempt,
            fence=self._fence,
            start=unit.start,
            stop=unit.stop,
            objects=(data,),
        )
        path = ledger.commit_path(self._plan.run, unit.id)
        return await self._create_own(path, ledger.encode(commit), lambda stored: ledger.decode_commit(stored).attempt)

    async def _seal(self) -> None:
        """Write the manifest: every worker that gets here would write the same bytes under the same name."""
        commits: dict[str, Commit] = {}
        for unit in self._plan.units:
            stored = await self._read(ledger.commit_path(self._plan.run, unit.id))
            if stored is not None:
                commits[unit.id] = ledger.decode_commit(stored)
        manifest = ledger.assemble(self._plan, commits)
        await self._create(ledger.manifest_path(self._plan.run, manifest), ledger.encode(manifest))

    # --- object calls that fail and are tried again ---

    async def _committed(self) -> list[str]:
        prefix = ledger.commits_prefix(self._plan.run)
        return [path.removeprefix(prefix) for path in await self._list(prefix)]

    async def _list(self, prefix: str) -> tuple[str, ...]:
        return await self._try(lambda: self._objects.list(prefix))

    async def _read(self, path: str) -> bytes | None:
        stored = await self._try(lambda: self._objects.get(path))
        return None if stored is None else stored.data

    async def _create(self, path: str, data: bytes) -> None:
        """Create if absent where it does not matter who was first."""
        while await self._put_new(path, data) is Put.UNKNOWN:
            await self._pause()

    async def _create_own(self, path: str, data: bytes, holder_of: Callable[[bytes], str]) -> bool:
        """Create if absent and find out whether the record that stands is this attempt's."""
        while True:
            put = await self._put_new(path, data)
            stored = None if put is Put.CREATED else await self._read(path)
            holder = None if stored is None else holder_of(stored)
            verdict = ledger.settle(put, holder, self.attempt)
            if verdict is not Verdict.AGAIN:
                return verdict is Verdict.WON
            await self._pause()

    async def _put_new(self, path: str, data: bytes) -> Put:
        try:
            await self._objects.put_new(path, data)
        except AlreadyThere:
            return Put.TAKEN
        except ObjectsError:
            return Put.UNKNOWN
        return Put.CREATED

    async def _try(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except ObjectsError:
                await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.uniform(*RETRY_S))


def replica_of(extraction: Extraction, rng: random.Random) -> Callable[[Process], Awaitable[int]]:
    """What a `Behaviour` takes as `work`: a replica on whatever host its process runs."""

    async def work(process: Process) -> int:
        # Each host claims for itself, so its name in the ledger must be its own.
        launch = process.launch
        name = launch.attempt if launch.rank == 0 else f"{launch.attempt}.{launch.rank}"
        replica = Replica(
            extraction,
            process.objects,
            rng,
            attempt=name,
            fence=launch.fence,
            report=process.report_open,
        )
        return await replica.work()

    return work


def shard_record(path: str, data: bytes, generation: int) -> tuple[str, str, dict[str, object]] | None:
    """The world's record for an object of a run, made at the moment it is truly stored: kind, subject, body."""
    parts = path.split("/")
    if parts[0] != "runs" or len(parts) < 3:
        return None
    run, what = parts[1], parts[2]
    if what == "plan.json":
        plan = ledger.decode_plan(data)
        units = [[unit.id, unit.start, unit.stop] for unit in plan.units]
        return "shard.planned", run, {"units": units, "rows": plan.rows}
    if what == "leases":
        lease = ledger.decode_lease(data)
        return "shard.claimed", f"{run}/{lease.unit}", _stored(data, generation, lease.attempt, lease.fence)
    if what == "commits":
        commit = ledger.decode_commit(data)
        objects = [[each.path, each.generation, each.checksum] for each in commit.objects]
        body = _stored(data, generation, commit.attempt, commit.fence)
        return "shard.committed", f"{run}/{commit.unit}", {**body, "objects": objects}
    if what == "manifest":
        manifest = ledger.decode_manifest(data)
        named = [
            [commit.unit, commit.start, commit.stop, [[o.path, o.generation, o.checksum] for o in commit.objects]]
            for commit in manifest.units
        ]
        return "dataset.complete", run, {"manifest": path, "units": named}
    return None


def _stored(data: bytes, generation: int, attempt: str, fence: int) -> dict[str, object]:
    return {"attempt": attempt, "fence": fence, "generation": generation, "checksum": ledger.checksum(data)}
