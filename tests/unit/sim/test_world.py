"""The world as one: what it records, that it repeats itself exactly, and that an error in it is never lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from penstock.domain.custody import SyncReply, SyncRequest
from penstock.domain.ledger import checksum
from penstock.domain.nouns import Slice
from penstock.ports.store import Unavailable
from penstock.sim.network import Unreachable
from penstock.sim.processes import Behaviour
from tests.unit.sim.desk import Desk, story

BUSY = """
import asyncio, hashlib, random
from penstock.capacity.fakecloud import Fault, FaultKind
from penstock.domain import ledger
from penstock.sim.processes import Behaviour
from penstock.sim.workers import Extraction, replica_of
from tests.unit.sim.desk import Desk, story

async def tell(desk):
    rng = desk.world.rng
    for step in range(60):
        link = desk.world.network.link("s1", rng.randrange(3))
        link.loss, link.duplicate, link.late = rng.random() / 3, rng.random() / 3, rng.random() / 5
        link.bucket_loss = rng.random() / 4
        agents = desk.world.agents()
        if agents:
            victim = rng.choice(agents)
            rng.choice([victim.pause, victim.crash, victim.reboot])(rng.uniform(1.0, 40.0))
        desk.attempt, desk.fence = f"a{step // 6}", 1 + step // 6
        await asyncio.sleep(rng.uniform(1.0, 60.0))

work = replica_of(Extraction(plan=ledger.split("r", 60, 10), unit_s=10.0), random.Random(9))
desk = story(tell, lambda job, attempt, rank, stage: Behaviour(work=work) if attempt > "a4" else Behaviour(), hosts=3)
trace = repr(desk.history.world) + repr(desk.requests)
print(len(desk.history.world), hashlib.sha256(trace.encode()).hexdigest())
"""


def test_the_same_seed_gives_the_same_trace_whatever_the_hash_seed() -> None:
    traces = set()
    for hash_seed in ("0", "1", "31337"):
        done = subprocess.run(
            [sys.executable, "-c", BUSY],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        traces.add(done.stdout)
    assert len(traces) == 1
    assert int(traces.pop().split()[0]) > 150


def test_objects_are_recorded_with_checksum_and_writer() -> None:
    async def tell(desk: Desk) -> None:
        objects = desk.world.objects("controller")
        await objects.put("jobs/j1/fence/0", b"4")
        await objects.delete("jobs/j1/fence/0")

    desk = story(tell)
    (put,), (deleted,) = desk.records("object.put"), desk.records("object.deleted")
    assert put.body == {"generation": 1, "checksum": checksum(b"4"), "writer": "controller"}
    assert deleted.subject == put.subject


def test_a_machine_that_is_gone_leaves_nothing_behind() -> None:
    async def tell(desk: Desk) -> None:
        await desk.world.capacity().delete("s1", "z")
        assert desk.world.alive("s1", 0)  # until it is really gone
        await asyncio.sleep(2.0)
        assert desk.world.agents() == []
        assert not desk.world.alive("s1", 0)

    desk = story(tell, hosts=2)
    assert len(desk.records("agent.silent")) == 2
    assert len(desk.records("vm.deleted")) == 1


def test_partial_hosts_and_several_slices() -> None:
    async def tell(desk: Desk) -> None:
        desk.world.cloud.stop_host("s1", 3)
        wanted = Slice(
            id="s2", team="t", pool="p", provider="gke", zone="z", accelerator="v5e-8", chips=8, hosts=1,
            intended_at=0.0,
        )  # fmt: skip
        await desk.world.capacity("gke").create(wanted)
        await asyncio.sleep(2.0)
        assert [(agent.place.slice, agent.place.host) for agent in desk.world.agents() if agent.up] == [
            ("s1", 0), ("s1", 1), ("s1", 2), ("s2", 0),
        ]  # fmt: skip

    story(tell, hosts=4)


@pytest.mark.parametrize("error", [Unreachable("no leader"), Unavailable("store down")])
def test_a_server_that_cannot_answer_is_silence(error: Exception) -> None:
    async def tell(desk: Desk) -> None:
        async def refuse(request: SyncRequest) -> SyncReply:
            raise error

        desk.world.network.server = refuse
        await asyncio.sleep(20.0)
        desk.world.network.server = None
        await asyncio.sleep(20.0)
        desk.world.network.server = desk.sync
        await asyncio.sleep(20.0)

    desk = story(tell)
    assert (len(desk.records("agent.silent")), len(desk.records("agent.heard"))) == (1, 2)


def test_a_server_that_hangs_is_given_up() -> None:
    async def tell(desk: Desk) -> None:
        async def hang(request: SyncRequest) -> SyncReply:
            await asyncio.sleep(1e6)
            raise AssertionError("never")

        desk.world.network.server = hang
        await asyncio.sleep(20.0)
        assert len(desk.records("agent.silent")) == 1

    story(tell)


def test_a_bug_in_the_server_ends_the_run() -> None:
    async def tell(desk: Desk) -> None:
        async def broken(request: SyncRequest) -> SyncReply:
            raise ZeroDivisionError

        desk.world.network.server = broken
        await asyncio.sleep(100.0)

    with pytest.raises(ZeroDivisionError):
        story(tell)


def test_the_workload_sees_rank_and_stage() -> None:
    asked: list[tuple[str, str, int, int]] = []

    def behaviour(job: str, attempt: str, rank: int, stage: int) -> Behaviour:
        asked.append((job, attempt, rank, stage))
        return Behaviour()

    async def tell(desk: Desk) -> None:
        await desk.launch()

    story(tell, behaviour, hosts=2)
    assert sorted(asked) == [("j1", "a1", 0, 0), ("j1", "a1", 1, 0)]


def test_hosts_without_power_are_named_with_their_time() -> None:
    async def tell(desk: Desk) -> None:
        assert desk.world.dead_since() == {}
        desk.world.cloud.maintain("s1", 30.0)
        assert desk.world.dead_since() == {"s1": 1.5}
        await asyncio.sleep(31.0)
        assert desk.world.dead_since() == {}
        desk.world.cloud.delete_outside("s1")
        assert desk.world.dead_since() == {"s1": 32.5}
        await asyncio.sleep(700.0)
        assert desk.world.dead_since() == {}

    story(tell, hosts=2)
