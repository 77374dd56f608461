"""Two controllers on one PostgreSQL, on real clocks: kill -9 of the leader costs ten seconds at most, and no job."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from penstock.controller.execute import carry_out
from penstock.controller.loop import Controller
from penstock.domain import limits
from penstock.domain.custody import Held, Phase, SyncReply, SyncRequest
from penstock.domain.invariants.history import History
from penstock.domain.invariants.rules import check
from penstock.domain.lifecycle import JobState
from penstock.domain.nouns import Event, Exit
from penstock.ports.capacity import Seen
from penstock.ports.store import Reader, StaleLeader, Store
from penstock.store.postgres import PostgresStore
from tests.process.installation import SLICES_MAX, FolderCapacity, SystemClock, a_controller

ROOT = Path(__file__).parents[2]
PROMISED_S = 10.0
TAKEOVER_S_MAX = 25.0  #: for a machine that stands still for moments
STORY_S_MAX = 90.0  #: a story that has not ended by then hangs

pytestmark = [pytest.mark.postgres, pytest.mark.slow]


def _events(reader: Reader) -> list[Event]:
    return reader.events(0, 1_000_000)


class Hosts:
    """The agents of all machines: they join, run what they are told to, and report that it ended well."""

    def __init__(self, controller: Controller, capacity: FolderCapacity) -> None:
        self._controller = controller
        self._capacity = capacity
        self._held: dict[str, Held] = {}

    async def work(self) -> None:
        while True:
            for machine in self._capacity.machines():
                await self._sync(machine)
            await asyncio.sleep(0.02)

    async def _sync(self, machine: Seen) -> None:
        held = self._held.get(machine.name)
        request = SyncRequest(
            slice=machine.name,
            provider_id=machine.provider_id,
            host=0,
            incarnation=f"host of {machine.provider_id}",
            held=() if held is None else (held,),
        )
        reply = await self._controller.agents.sync(request)
        self._obey(machine.name, held, reply)

    def _obey(self, name: str, held: Held | None, reply: SyncReply) -> None:
        if held is not None and held.attempt in reply.forget:
            del self._held[name]
        elif held is not None and held.phase is Phase.RUNNING:
            ended = Exit(host=0, code=0)
            self._held[name] = Held(attempt=held.attempt, fence=held.fence, phase=Phase.EXITED, exit=ended)
        elif reply.launch is not None:
            launch = reply.launch
            self._held[name] = Held(attempt=launch.attempt, fence=launch.fence, phase=Phase.RUNNING)


async def _kill_after(acknowledgements: int, leader: asyncio.subprocess.Process) -> list[str]:
    """Let the leader take in so many jobs, kill it in the middle of more, and answer all it had acknowledged."""
    assert leader.stdout is not None
    lines = [await leader.stdout.readline() for _ in range(acknowledgements)]
    leader.kill()
    lines += (await leader.stdout.read()).splitlines(keepends=True)
    return [line.decode().strip() for line in lines if line.endswith(b"\n")]


async def _until_ended_well(store: Store, id: str) -> None:
    while True:
        seq, job = await store.read(lambda reader: (reader.last_seq(), reader.job(id)))
        assert job is not None
        if job.state is JobState.SUCCEEDED:
            return
        await store.wait(seq, 1.0)


async def _check_aftermath(store: Store, capacity: FolderCapacity, acknowledged: list[str]) -> None:
    with pytest.raises(StaleLeader):
        await store.bound(actor="first", epoch=1).transact(carry_out, [])
    kept = await store.read(lambda reader: {job.id for job in reader.jobs(acknowledged)})
    assert kept == set(acknowledged), "no acknowledged job is lost"
    events = await store.read(_events)
    elections = [event for event in events if event.kind == "leader.elected"]
    assert [event.epoch for event in elections] == [1, 2]
    report = check(History(events=events), rules=["S3", "S4", "S5", "S10", "S12", "S16"])
    assert report.violations == []
    assert report.premises["S16"] == 1, "effects of both epochs were committed"
    intended = {event.id for event in events if event.kind == "slice.intended"}
    machines = {machine.name for machine in capacity.machines()}
    assert 1 <= len(machines) <= SLICES_MAX
    assert machines <= intended, "nothing was made that was not intended"


async def _story(postgres_url: str, folder: Path) -> float:
    """The first leader dies, the second goes on; answers how long nobody led."""
    capacity = FolderCapacity(folder)
    command = ["-m", "tests.process.installation", postgres_url, str(folder), "first"]
    leader = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert leader.stdout is not None
    acknowledged = [(await leader.stdout.readline()).decode().strip()]  # it leads, and the schema is there
    store = PostgresStore.open(postgres_url, SystemClock())
    leads = asyncio.Event()
    second = a_controller(store, capacity, "second", leads)
    hosts = Hosts(second, capacity)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(second.run())]
        acknowledged += await _kill_after(200, leader)
        killed_at = time.monotonic()
        assert not second.leading, "there was one leader"
        await leads.wait()
        leaderless_s = time.monotonic() - killed_at
        running.append(tasks.create_task(hosts.work()))
        await _until_ended_well(store, acknowledged[0])
        for task in running:
            task.cancel()
    assert await leader.wait() == -9
    await _check_aftermath(store, capacity, acknowledged)
    await store.close()
    return leaderless_s


def test_the_second_controller_takes_over_in_ten_seconds_and_loses_no_job(postgres_url: str, tmp_path: Path) -> None:
    leaderless_s = asyncio.run(asyncio.wait_for(_story(postgres_url, tmp_path), STORY_S_MAX))
    assert leaderless_s <= TAKEOVER_S_MAX
    looks_s = 2 * limits.LEADER_RENEW_S / 2  # at the term: to notice the last renewal, and that there was no other
    assert limits.LEADER_TTL_S + looks_s <= PROMISED_S
