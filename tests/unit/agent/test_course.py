"""The course of an attempt where only the order of two moments decides; `tests.process.test_agent` has the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from penstock.agent.course import Course
from penstock.agent.host import Host, Place
from penstock.agent.layout import attempt_home
from penstock.agent.link import Link
from penstock.agent.record import Kept, Record
from penstock.agent.tree import Ended
from penstock.domain.custody import Launch, Phase
from penstock.domain.nouns import Exit
from penstock.wiring.clock import SystemClock


def a_course(state: Path, phase: Phase, exit: Exit | None = None) -> Course:
    given = {"replica": 0, "fence": 1, "stage": 0, "rank": 0, "world_size": 1, "timeout_s": 60.0}
    order = msgspec.convert({"attempt": "a1", "job": "j1", **given}, Launch)
    link = Link("http://penstock.example.org:8080")
    host = Host(Place(slice="s1", host=0, provider_id="p"), state, link, SystemClock(), Record(incarnation="i"))
    attempt_home(state, "a1").mkdir(parents=True)
    return Course(host, Kept(launch=order, phase=phase, exit=exit), lambda: None)


def test_one_forgotten_in_the_moment_its_logs_are_safe_leaves_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        course = a_course(tmp_path, Phase.EXITED, Exit(host=0, code=0))

        async def deliver() -> None:  # it has nothing to send; the server's word is next in line
            asyncio.get_running_loop().call_soon(course.forget)

        course._spool.deliver = deliver  # type: ignore[method-assign]
        course.begin()
        for _ in range(500):
            await asyncio.sleep(0.01)
            if course.cleared:
                return
        raise AssertionError("nobody cleared it away")

    asyncio.run(story())
    assert not attempt_home(tmp_path, "a1").exists()


class Deaf:
    """A payload that goes on until it is killed; it hears at the second time."""

    exit: Ended | None = None
    handle = None
    pid = started = 0

    def __init__(self) -> None:
        self.asked = 0
        self.killed = asyncio.Event()

    def terminate(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def dump(self) -> list[int]:
        return []

    async def kill(self) -> bool:
        self.killed.set()
        return True

    async def wait(self) -> Ended:
        await self.killed.wait()
        return Ended(signal=9)

    def close(self) -> None:
        pass


def test_a_full_disk_keeps_nobody_from_being_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def story() -> None:
        course = a_course(tmp_path, Phase.RUNNING)
        course._running = deaf = Deaf()
        monkeypatch.setattr(Host, "save", full)
        monkeypatch.setattr(Path, "touch", full)
        course.stop(grace_s=0.3)
        async with asyncio.timeout(60.0):
            await deaf.killed.wait()
        assert course.kept.heard
        assert deaf.asked == 2, "who has heard it is not told again"

    asyncio.run(story())
