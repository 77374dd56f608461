"""Extraction replicas: whatever crashes and whatever replies are lost, each unit is committed exactly once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.domain import ledger
from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import ObjectsError
from penstock.sim.loop import run
from penstock.sim.processes import Behaviour
from penstock.sim.workers import Extraction, Replica, replica_of, shard_record
from tests.unit.sim.desk import Desk, story

PLAN = ledger.split("r", 45, 10)
FAST = Extraction(plan=PLAN, unit_s=10.0, lease_s=60.0, look_s=5.0)


class Crash(Exception):
    """The process is gone."""


class CrashAt:
    """Dies at the n-th object call, before or after its effect."""

    def __init__(self, call: int, *, after: bool) -> None:
        self.left = call
        self.late = after

    async def before(self, verb: str, path: str) -> None:
        self.left -= 1
        if self.left == 0 and not self.late:
            raise Crash

    async def after(self, verb: str, path: str) -> None:
        if self.left == 0 and self.late:
            raise Crash


class Lossy:
    """Requests and replies get lost, calls take time."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self.rng, self.share = rng, share

    async def before(self, verb: str, path: str) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, 2.0))
        if self.rng.random() < self.share:
            raise ObjectsError("lost")

    async def after(self, verb: str, path: str) -> None:
        if self.rng.random() < self.share:
            raise ObjectsError("lost")


class Bucket:
    """A bucket whose history of shards is kept as the world would."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.objects = MemoryObjects(on_change=self._changed)

    def _changed(self, path: str, data: bytes | None, generation: int, writer: str) -> None:
        assert data is not None, "nothing of a run is ever deleted"
        record = shard_record(path, data, generation)
        if record is not None:
            self.log.append(record[:2])

    def check(self) -> None:
        """Exactly one commit per unit, one manifest, and it is true."""
        commits = Counter(subject for kind, subject in self.log if kind == "shard.committed")
        assert commits == {f"r/{unit.id}": 1 for unit in PLAN.units}
        (path,) = [path for path in self.objects.paths() if path.startswith(ledger.manifest_prefix("r"))]
        stored = self.objects.peek(path)
        assert stored is not None
        manifest = ledger.decode_manifest(stored.data)
        bucket = {
            each: (found.generation, ledger.checksum(found.data))
            for each in self.objects.paths()
            if (found := self.objects.peek(each)) is not None
        }
        assert ledger.verify(PLAN, manifest, bucket) == ()
        assert ("dataset.complete", "r") in self.log


def test_one_replica_does_the_run() -> None:
    bucket = Bucket()
    reports: list[tuple[int, bool]] = []

    def report(units: int, holding: bool) -> None:
        reports.append((units, holding))

    async def main() -> int:
        replica = Replica(FAST, bucket.objects, random.Random(1), attempt="a1", report=report)
        return await replica.work()

    assert run(main()) == 0
    assert reports == [(left, holding) for left in (5, 4, 3, 2, 1) for holding in (False, True)] + [(0, False)]
    assert [kind for kind, _ in bucket.log].count("shard.claimed") == 5
    bucket.check()


def test_replicas_share_the_work() -> None:
    bucket = Bucket()

    async def main() -> float:
        replicas = [
            Replica(FAST, bucket.objects.by(f"a{number}"), random.Random(number), attempt=f"a{number}")
            for number in range(5)
        ]
        assert await asyncio.gather(*(replica.work() for replica in replicas)) == [0] * 5
        return asyncio.get_running_loop().time()

    assert run(main()) <= 30.0  # five units of at most 15 s each, side by side
    assert [kind for kind, _ in bucket.log].count("shard.claimed") == 5
    bucket.check()


def calls_of_a_run() -> int:
    counter = CrashAt(0, after=False)

    async def main() -> None:
        await Replica(FAST, MemoryObjects(faults=counter), random.Random(1), attempt="a0").work()

    run(main())
    return -counter.left


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_object_call_costs_nothing_but_time(after: bool) -> None:
    calls = calls_of_a_run()
    assert calls > 30
    for call in range(1, calls + 1):
        bucket = Bucket()

        async def main(bucket: Bucket = bucket, call: int = call) -> None:
            doomed = bucket.objects.by("a0", CrashAt(call, after=after))
            with pytest.raises(Crash):
                await Replica(FAST, doomed, random.Random(1), attempt="a0").work()
            assert await Replica(FAST, bucket.objects, random.Random(2), attempt="a1").work() == 0

        run(main())
        bucket.check()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    share=st.floats(0.0, 0.4),
    lease_s=st.floats(1.0, 60.0),
    crashes=st.lists(st.integers(1, 60), max_size=4),
)
def test_lost_replies_short_leases_and_crashes(seed: int, share: float, lease_s: float, crashes: list[int]) -> None:
    """Leases far too short put several workers on one unit: time is lost, correctness is not."""
    bucket = Bucket()
    rng = random.Random(seed)
    extraction = Extraction(plan=PLAN, unit_s=10.0, lease_s=lease_s, look_s=3.0)

    async def live(number: int, crash: int | None) -> None:
        faults = Lossy(rng, share) if crash is None else CrashAt(crash, after=rng.random() < 0.5)
        name = f"a{number}"
        replica = Replica(extraction, bucket.objects.by(name, faults), rng, attempt=name)
        try:
            assert await replica.work() == 0
        except Crash:
            assert crash is not None

    async def main() -> None:
        await asyncio.gather(*(live(n, crash) for n, crash in enumerate([*crashes, None, None])))

    run(main())
    bucket.check()


def test_a_run_with_another_plan_is_refused() -> None:
    async def main() -> None:
        objects = MemoryObjects()
        await objects.put(ledger.plan_path("r"), ledger.encode(ledger.split("r", 50, 10)))
        with pytest.raises(ValueError, match="another plan"):
            await Replica(FAST, objects, random.Random(1), attempt="a1").work()

    run(main())


def test_a_replica_runs_as_a_process_of_an_agent() -> None:
    async def tell(desk: Desk) -> None:
        desk.world.network.link("s1", 0).bucket_loss = 0.1
        await desk.launch()
        await asyncio.sleep(600.0)

    rng = random.Random(5)
    desk = story(tell, Behaviour(work=replica_of(FAST, rng)), hosts=2)
    assert [record.body["how"] for record in desk.records("proc.exited")] == ["code 0", "code 0"]
    committed = desk.records("shard.committed")
    assert sorted(record.subject for record in committed) == [f"r/{unit.id}" for unit in PLAN.units]
    assert {record.body["attempt"] for record in committed} == {"a1", "a1.1"}
    assert {held.open_units for _, held in desk.held()} >= {5, 0}
    assert {held.holding for _, held in desk.held()} >= {True, False}
    (planned,), (complete,) = desk.records("shard.planned"), desk.records("dataset.complete")
    assert planned.body["rows"] == 45
    assert planned.t <= complete.t


def test_a_killed_replica_stops_writing() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch()
        await asyncio.sleep(15.0)
        desk.kill = ("a1",)
        await asyncio.sleep(600.0)

    desk = story(tell, Behaviour(work=replica_of(FAST, random.Random(5))))
    killed = desk.times("proc.exited")[0]
    assert max(desk.times("object.put")) <= killed
    assert desk.records("dataset.complete") == []
