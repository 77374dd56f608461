"""Custody by two clocks, and the order in which a reply is obeyed: as in `sim.agents`, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.agent import record
from penstock.agent.host import Host, Place
from penstock.agent.link import Link, Refused
from penstock.agent.loop import Agent
from penstock.agent.record import Kept, Line, Record
from penstock.domain import limits
from penstock.domain.custody import Held, Launch, Phase, SyncReply
from penstock.ports.objects import ObjectsError
from penstock.wire.agent import AgentSync, Joined, Orders
from penstock.wire.problems import problem


class HandClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at

    def steady(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds


class Puppet:
    """Stands for a course, and notes what is done to it."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.done: list[str] = []
        self.alive = True
        self.cleared = False

    def stop(self, **_: object) -> None:
        self.done.append("stop")

    def kill(self, *, agent: str | None = None) -> None:
        self.done.append(f"kill {agent}")

    def forget(self) -> None:
        self.done.append("forget")

    async def gone(self) -> None:
        return


def order(attempt: str, fence: int, job: str = "j1") -> Launch:
    return Launch(attempt=attempt, job=job, replica=0, fence=fence, stage=0, rank=0, world_size=1, timeout_s=9.0)


class Stage:
    """An agent of a host whose bucket is a dictionary, or silent."""

    def __init__(self, state: Path) -> None:
        self.clock = HandClock()
        self.bucket: dict[str, bytes] | None = {}
        place = Place(slice="s1", host=0, provider_id="vm")
        self.host = Host(place, state, Link("http://127.0.0.1:1"), self.clock, Record(incarnation="i"))
        self.host.fence_object = self._fence  # type: ignore[method-assign]
        self.agent = Agent(self.host, "token")
        self.puppet = Puppet(Kept(launch=order("a1", 4), phase=Phase.RUNNING))
        self.agent._courses["a1"] = self.puppet  # type: ignore[assignment]
        self.host.record.held["a1"] = self.puppet.kept
        self.host.record.raise_fence("j1", 0, 4)

    async def _fence(self, path: str, url: str = "") -> bytes | None:
        assert url == "", "this root is a directory"
        if self.bucket is None:
            raise ObjectsError("silent")
        return self.bucket.get(path)

    async def silent_for(self, seconds: float) -> None:
        until = self.clock.at + seconds
        while self.clock.at < until:
            self.clock.at += limits.FENCE_POLL_S
            await self.agent._keep_custody()


def play(folder: Path, story: Callable[[Stage], Awaitable[None]]) -> None:
    async def run() -> None:
        await story(Stage(folder))

    asyncio.run(run())


def test_its_own_fence_keeps_it_going_for_ever(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.bucket = {"jobs/j1/fence/0": b"4"}
        await stage.silent_for(10 * limits.CUSTODY_S)
        assert stage.puppet.done == []

    play(tmp_path, story)


def test_a_higher_fence_ends_it_at_the_next_look(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.bucket = {"jobs/j1/fence/0": b"5"}
        await stage.silent_for(limits.FENCE_POLL_S)
        assert stage.puppet.done == ["kill process_lost"]

    play(tmp_path, story)


def test_when_both_are_silent_it_ends_after_custody_and_not_before(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.bucket = None
        await stage.silent_for(limits.CUSTODY_S - 2 * limits.FENCE_POLL_S)
        assert stage.puppet.done == []
        await stage.silent_for(3 * limits.FENCE_POLL_S)
        assert stage.puppet.done[0] == "kill process_lost"

    play(tmp_path, story)


def test_a_word_of_the_server_starts_both_clocks_anew(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.bucket = None
        await stage.silent_for(limits.CUSTODY_S - 2 * limits.FENCE_POLL_S)
        stage.agent._server_at = stage.agent._bucket_at = stage.clock.at
        await stage.silent_for(limits.CUSTODY_S - 2 * limits.FENCE_POLL_S)
        assert stage.puppet.done == []

    play(tmp_path, story)


def test_orders_are_obeyed_in_the_models_order(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.agent._obey(SyncReply(welcome=True, forget=("a1",), stop=("a1", "nobody"), kill=("a1",)))
        assert stage.puppet.done == ["stop", "kill None"], "what has not exited is not forgotten"
        stage.puppet.kept.phase = Phase.EXITED
        await stage.agent._obey(SyncReply(welcome=True, forget=("a1",), stop=("a1",)))
        assert stage.puppet.done[2:] == ["forget"]
        assert stage.agent._courses == {}

    play(tmp_path, story)


@pytest.mark.parametrize("late", [order("a1", 4), order("a0", 3), order("a1b", 4)])
def test_an_old_order_starts_nothing(tmp_path: Path, late: Launch) -> None:
    async def story(stage: Stage) -> None:
        await stage.agent._obey(SyncReply(welcome=True, launch=late))
        assert set(stage.agent._courses) == {"a1"}

    play(tmp_path, story)


def test_the_chips_are_not_shared(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.agent._obey(SyncReply(welcome=True, launch=order("a2", 1, "j2")))
        kept = stage.host.record.held["a2"]
        assert kept.phase is Phase.EXITED
        assert kept.exit is not None
        assert (kept.exit.agent, kept.exit.signal) == ("device_busy", 9)
        assert stage.puppet.done == []

    play(tmp_path, story)


def test_who_is_not_welcome_ends_everything(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.agent._obey(SyncReply(welcome=False, why="test"))
        assert stage.puppet.done == ["kill None"]
        assert stage.agent._ended.is_set()

    play(tmp_path, story)


def test_a_launch_that_only_the_journal_knows_is_lost_with_its_machine(tmp_path: Path) -> None:
    """The record was written and never reached the disk: the attempt must not start again, and its end must be told."""

    async def story(stage: Stage) -> None:
        journal, kept = stage.host.journal, stage.host.record
        journal.note(Line(kept=Kept(launch=order("a1", 4), phase=Phase.EXITED)))  # in the record, too
        journal.note(Line(kept=Kept(launch=order("a9", 9, "j9"))))
        kept.boot = "another boot"
        stage.agent._find_record()
        assert kept.held["a9"].exit is not None
        assert kept.held["a9"].exit.agent == "process_lost"
        await stage.agent._obey(SyncReply(welcome=True, launch=order("a9", 9, "j9")))
        assert kept.held["a9"].phase is Phase.EXITED
        assert (stage.host.state / "journal").read_bytes() == b""
        for course in stage.agent._courses.values():
            course.close()

    play(tmp_path, story)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not true():  # noqa: ASYNC110 (what is waited for tells nobody)
            await asyncio.sleep(0.001)


class Wire:
    """Stands for the server: the first sync is answered by an order, the others wait."""

    credential = "c"

    def __init__(self) -> None:
        self.heard: list[tuple[float, list[str]]] = []

    async def ask(self, _method: str, _path: str, sent: AgentSync, _answer: object, **_: object) -> Orders:
        self.heard.append((sent.wait_s, [held.phase.value for held in sent.request.held]))
        if len(self.heard) > 1:
            await asyncio.sleep(60.0)
        return Orders(welcome=True, launch=order("a2", 5, "j2"))


@pytest.mark.parametrize("short", [True, False])
def test_one_sync_tells_of_a_short_payload_and_two_of_a_long_one(tmp_path: Path, short: bool) -> None:
    async def story(stage: Stage) -> None:
        agent, wire = stage.agent, Wire()
        agent._courses.clear()
        stage.host.link = wire  # type: ignore[assignment]
        course: Any = Puppet(Kept(launch=order("a2", 5, "j2")))
        course.report = lambda: Held(attempt="a2", fence=5, phase=course.kept.phase)
        course.progress = course.saved_ago_s = None
        agent._launch = lambda *_: agent._courses.update(a2=course)  # type: ignore[method-assign]
        tasks = [asyncio.create_task(agent._sync_for_ever()), asyncio.create_task(agent._tell())]
        await until(lambda: "a2" in agent._courses and (short or len(wire.heard) == 2))
        course.kept.phase = Phase.EXITED
        agent.poke()
        await until(lambda: wire.heard[-1][1] == ["exited"])
        long = [(limits.SYNC_S, ["launched"]), (0.0, ["exited"])]
        assert wire.heard[1:] == ([(limits.SYNC_S, ["exited"])] if short else long)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    play(tmp_path, story)


# --- joining ---
class Door:
    """Stands for the server: whether hosts may join there, and sync."""

    def __init__(self, *, joins: bool, syncs: bool) -> None:
        self.credential = ""
        self.joins, self.syncs = joins, syncs
        self.asked: list[tuple[str, str]] = []

    async def ask(self, _method: str, path: str, *_: object, **__: object) -> Joined:
        self.asked.append((path.rpartition("/")[2], self.credential))
        if not (self.joins if path.endswith("/join") else self.syncs):
            raise Refused(problem("forbidden", "no"))
        if not path.endswith("/join"):
            await asyncio.sleep(3600.0)
        return Joined(credential="new")


async def knock(stage: Stage, door: Door, calls: int) -> list[tuple[str, str]]:
    """What an agent asks for there, first to last, with which credential."""
    stage.host.link = door  # type: ignore[assignment]
    stage.agent._courses.clear()
    stage.agent._load_credential()
    task = asyncio.create_task(stage.agent._sync_for_ever())
    await until(lambda: len(door.asked) >= calls)
    task.cancel()
    return door.asked[:calls]


def test_a_host_joins_once_and_its_token_goes_when_it_has_a_credential(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        file = stage.host.token_file = tmp_path / "join-token"
        file.write_text("token")
        assert await knock(stage, Door(joins=True, syncs=True), 2) == [("join", ""), ("sync", "new")]
        assert not file.exists()
        # The next agent of this host needs no token, and throws away what a boot has written there again.
        file.write_text("token")
        assert await knock(stage, Door(joins=False, syncs=True), 1) == [("sync", "new")]
        assert not file.exists()

    play(tmp_path, story)


def test_a_credential_that_is_refused_for_a_while_is_not_forgotten(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        record.save(stage.agent._credential_file, msgspec.json.encode(Joined(credential="new")), sync=False)
        door = Door(joins=False, syncs=False)
        assert await knock(stage, door, 4) == [("sync", "new"), ("join", ""), ("sync", "new"), ("join", "")]

    play(tmp_path, story)
