"""Local slices with real processes: taken away, damaged, deleted; nothing of a slice survives it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time

import msgspec
import pytest

from penstock.capacity import processes
from penstock.capacity.slice_files import SliceFiles
from penstock.ports.capacity import (
    FAILED,
    PREEMPTED,
    READY,
    CapacityError,
)
from tests.unit.capacity.local_house import House, a_slice, keeping, start, state_of, until


def test_delete_takes_everything_with_it(house: House) -> None:
    house.manner = "family"

    async def story() -> None:
        capacity = house.capacity()
        await capacity.create(a_slice(hosts=2))
        await house.up("s1", hosts=2)
        family = house.family("s1")
        assert len(family) == 6, "agents, children and daemons of two hosts"
        await capacity.delete("s1", "local")
        assert not any(process.alive for process in family)
        assert list(house.folder.iterdir()) == []
        assert (await capacity.list("local")).slices == ()
        await capacity.delete("s1", "local")

    asyncio.run(story())


def test_children_of_an_agent_that_died_are_found_too(house: House) -> None:
    house.manner = "family"

    async def story() -> None:
        capacity = house.capacity()
        await capacity.create(a_slice())
        await house.up("s1")
        family = house.family("s1")
        os.kill(house.starts("s1")[0], signal.SIGKILL)
        processes.collect(house.starts("s1"))
        await capacity.delete("s1", "local")
        assert not any(process.alive for process in family)

    asyncio.run(story())


def test_processes_that_only_look_at_a_slice_are_left_alone(house: House) -> None:
    async def story() -> None:
        capacity = house.capacity()
        await capacity.create(a_slice())
        await house.up("s1")
        log = house.folder / "s1" / "host-0.log"
        onlooker = start("import time; time.sleep(600)", str(log), env={"PWD": str(house.folder / "s1")})
        try:
            await capacity.delete("s1", "local")
            assert onlooker.poll() is None
        finally:
            onlooker.kill()
            onlooker.wait()

    asyncio.run(story())


def test_preemption_without_notice_kills_all_and_tells_at_once(house: House) -> None:
    house.manner = "family"

    async def story() -> None:
        capacity = house.capacity()
        await capacity.create(a_slice(hosts=2))
        await house.up("s1", hosts=2)
        family = house.family("s1")

        async def take() -> None:
            told = house.told
            began = time.monotonic()
            await capacity.preempt("s1")
            assert time.monotonic() - began < 10.0
            assert house.told > told
            assert not any(process.alive for process in family)
            assert await state_of(capacity) == PREEMPTED
            assert await state_of(house.capacity()) == PREEMPTED, "the next server knows as well"

        await keeping(capacity, take)
        assert [len(house.starts("s1", host)) for host in (0, 1)] == [1, 1], "nothing is started there again"
        await capacity.delete("s1", "local")

    asyncio.run(story())


def test_a_slice_is_shown_as_taken_only_when_nothing_runs_any_more(house: House) -> None:
    async def story() -> None:
        capacity = house.capacity()
        await capacity.create(a_slice())
        await house.up("s1")
        files = SliceFiles(house.folder)
        record = files.record("s1")
        assert not isinstance(record, str)
        files.save(msgspec.structs.replace(record, state="STOPPING"))  # as a server leaves it that dies half-way
        assert await state_of(capacity) == READY
        family = house.family("s1")

        async def wait() -> None:
            await until(lambda: not any(process.alive for process in family))
            deadline = time.monotonic() + 10
            while await state_of(capacity) != PREEMPTED:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)

        await keeping(capacity, wait)

    asyncio.run(story())


def test_a_notice_comes_before_the_end(house: House) -> None:
    async def story() -> None:
        capacity = house.capacity()
        await capacity.create(a_slice(hosts=2))
        await house.up("s1", hosts=2)

        async def take() -> None:
            await capacity.preempt("s1", notice_s=30)
            assert [house.file("s1", host, "notice").read_text() for host in (0, 1)] == ["30\n", "30\n"]
            assert await state_of(capacity) == READY
            family = house.family("s1")
            assert all(process.alive for process in family)
            house.clock.ahead_s += 31
            capacity._stirred.set()
            await until(lambda: not any(process.alive for process in family))
            deadline = time.monotonic() + 10
            while await state_of(capacity) != PREEMPTED:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)

        await keeping(capacity, take)

    asyncio.run(story())


def test_a_notice_outlives_the_server(house: House) -> None:
    async def story() -> None:
        await house.capacity().create(a_slice())
        await house.up("s1")
        await house.capacity().preempt("s1", notice_s=0.3)
        family = house.family("s1")

        async def wait() -> None:
            await until(lambda: not any(process.alive for process in family))

        await keeping(house.capacity(), wait)

    asyncio.run(story())


def test_what_does_not_run_cannot_be_taken_away(house: House) -> None:
    async def story() -> None:
        capacity = house.capacity()
        with pytest.raises(CapacityError, match="no local slice nothing"):
            await capacity.preempt("nothing")
        await capacity.create(a_slice())
        await capacity.preempt("s1")
        with pytest.raises(CapacityError, match="not running"):
            await capacity.preempt("s1", notice_s=5)
        await capacity.preempt("s1")

    asyncio.run(story())


@pytest.mark.parametrize("damage", ["missing", "empty", "binary", "cut", "other", "folder"])
def test_a_damaged_slice_is_failed_and_can_be_deleted(house: House, damage: str) -> None:
    async def story() -> None:
        capacity = house.capacity()
        await capacity.create(a_slice())
        await capacity.create(a_slice("s2"))
        await house.up("s1")
        file = house.folder / "s1" / "slice.json"
        whole = file.read_bytes()
        file.unlink()
        match damage:
            case "empty":
                file.write_bytes(b"")
            case "binary":
                file.write_bytes(b"\xff\xfe\x00" * 50)
            case "cut":
                file.write_bytes(whole[: len(whole) // 2])
            case "other":
                file.write_bytes(whole.replace(b'"s1"', b'"s9"'))
            case "folder":
                file.mkdir()
            case _:
                pass
        family = house.family("s1")

        async def look() -> None:
            listed = (await capacity.list("local")).slices
            assert [(seen.name, seen.state, seen.label) for seen in listed] == [
                ("s1", FAILED, "ours"),
                ("s2", READY, "ours"),
            ]
            assert "slice.json" in listed[0].detail
            await capacity.delete("s1", "local")
            assert not any(process.alive for process in family)
            assert await capacity.get("s1", "local") is None

        await keeping(capacity, look)

    asyncio.run(story())


BOMB = """
import os, time
until = time.monotonic() + 30  # whatever the test finds out, the machine is shared
for _ in range(8):
    if os.fork() == 0:
        os.setsid()
        while time.monotonic() < until:
            if os.fork():
                time.sleep(0.03)
                os._exit(0)
            time.sleep(0.02)
        os._exit(0)
time.sleep(30)
"""


def test_a_family_that_keeps_forking_does_not_outrun_the_end(house: House) -> None:
    """Eight lines of descent, each child outliving its parent, all in sessions of their own."""

    async def story() -> None:
        capacity = house.capacity()
        await capacity.create(a_slice())
        await house.up("s1")
        mark = f"bomb-{secrets.token_hex(4)}"
        bomber = start(BOMB, mark, env={"PENSTOCK_STOP_FILE": str(house.file("s1", 0, "x"))})
        began = time.monotonic()
        try:
            await until(lambda: len(processes.with_arguments(mark)) >= 8)
            await capacity.delete("s1", "local")
            left = processes.with_arguments(mark)
            assert time.monotonic() - began < 27.0, "it would have ended by itself: nothing is shown"
            assert left == []
        finally:
            bomber.kill()
            bomber.wait()

    asyncio.run(story())
