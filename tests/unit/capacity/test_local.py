"""Local slices with real processes: made, found again by the next server, kept running, limited by the machine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence

import pytest

from penstock.capacity import processes
from penstock.capacity.local import QUICK_ENDS_MAX
from penstock.ports.capacity import (
    FAILED,
    READY,
    CapacityError,
    NameTaken,
    PermissionDenied,
    QuotaExceeded,
    Seen,
    Stockout,
)
from tests.unit.capacity.local_house import House, a_slice, keeping, state_of, until


def test_a_slice_is_one_agent_per_host(house: House) -> None:
    async def story() -> None:
        capacity = house.capacity()
        seen = await capacity.create(a_slice(hosts=3))
        assert (seen.name, seen.zone, seen.state, seen.label) == ("s1", "local", READY, "ours")
        await house.up("s1", hosts=3)
        words = [house.file("s1", host, "seen").read_text() for host in range(3)]
        assert words == [f"{house.url} s1 {host} {seen.provider_id}\n" for host in range(3)]
        assert house.file("s1", 0, "token").read_text() == "token of s1"
        assert oct((house.folder / "s1" / "join").stat().st_mode & 0o777) == "0o600"
        names = house.file("s1", 0, "environment").read_text().split()
        assert "PENSTOCK_HOME" in names
        assert "PENSTOCK_TOKEN" not in names
        agents = house.family("s1")
        assert len(agents) == 3
        assert {os.getsid(agent.pid) for agent in agents} == {agent.pid for agent in agents}, "sessions of their own"

    asyncio.run(story())


def test_a_name_serves_once(house: House) -> None:
    async def story() -> None:
        capacity = house.capacity()
        first = await capacity.create(a_slice())
        with pytest.raises(NameTaken):
            await house.capacity().create(a_slice())
        assert await capacity.get("s1", "local") == first
        await capacity.delete("s1", "local")
        assert await capacity.get("s1", "local") is None
        again = await capacity.create(a_slice())
        assert again.provider_id != first.provider_id

    asyncio.run(story())


@pytest.mark.parametrize("id", ["../s1", ".s1", "", "a/b", "x" * 200])
def test_a_name_that_is_a_path_is_refused(house: House, id: str) -> None:
    async def story() -> None:
        capacity = house.capacity()
        with pytest.raises(PermissionDenied):
            await capacity.create(a_slice(id))
        assert await capacity.get(id, "local") is None
        await capacity.delete(id, "local")

    asyncio.run(story())


def test_the_next_server_finds_every_slice(house: House) -> None:
    async def story() -> Seen:
        seen = await house.capacity().create(a_slice())
        await house.up("s1")
        return seen

    first = asyncio.run(story())

    async def next_server() -> None:
        capacity = house.capacity()

        async def look() -> None:
            assert (await capacity.list("local")).slices == (first,)
            assert (await capacity.list("local")).complete

        await keeping(capacity, look)
        assert len(house.starts("s1")) == 1, "an agent that runs is not started again"

    asyncio.run(next_server())


def test_a_dead_agent_is_started_again(house: House) -> None:
    async def story() -> None:
        capacity = house.capacity()
        await capacity.create(a_slice(hosts=2))
        await house.up("s1", hosts=2)

        async def kill_twice() -> None:
            for count in (2, 3):
                os.kill(house.starts("s1", 1)[-1], signal.SIGKILL)
                await until(lambda count=count: len(house.starts("s1", 1)) == count)  # type: ignore[misc]
            assert len(house.starts("s1", 0)) == 1
            assert await state_of(capacity) == READY

        await keeping(capacity, kill_twice)

    asyncio.run(story())


def test_an_agent_that_ends_before_it_is_watched_is_not_forgotten(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        capacity = house.capacity()
        await capacity.create(a_slice())
        await house.up("s1")
        real = capacity._open_handles
        killed: list[int] = []

        def kill_first() -> tuple[Sequence[tuple[int, int]], bool]:
            if not killed:
                killed.extend(house.starts("s1"))
                assert all(processes.kill(process, 10) for process in house.family("s1"))
            return real()

        monkeypatch.setattr(capacity, "_open_handles", kill_first)

        async def wait() -> None:
            await until(lambda: len(house.starts("s1")) == 2)

        await keeping(capacity, wait)

    asyncio.run(story())


def test_an_agent_that_was_dead_before_the_server_started_is_started_again(house: House) -> None:
    async def story() -> None:
        await house.capacity().create(a_slice())
        await house.up("s1")
        os.kill(house.starts("s1")[0], signal.SIGKILL)
        processes.collect(house.starts("s1"))
        capacity = house.capacity()

        async def wait() -> None:
            await until(lambda: len(house.starts("s1")) == 2)

        await keeping(capacity, wait)

    asyncio.run(story())


def test_an_agent_that_never_stays_makes_the_slice_failed(house: House) -> None:
    house.manner = "quick"

    async def story() -> None:
        capacity = house.capacity()
        await capacity.create(a_slice())

        async def give_up() -> Seen:
            told = house.told
            deadline = time.monotonic() + 30
            while (seen := await capacity.get("s1", "local")) is not None and seen.state != FAILED:
                house.clock.ahead_s += 1.0  # the pauses between starts need not be waited for
                capacity._stirred.set()
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            await until(lambda: house.told > told)
            assert seen is not None
            return seen

        seen = await keeping(capacity, give_up)
        assert "ended at once" in seen.detail
        assert "the stand-in will not run" in seen.detail
        assert len(house.starts("s1")) == QUICK_ENDS_MAX

    asyncio.run(story())


def test_an_agent_that_cannot_be_started_makes_the_slice_failed(house: House) -> None:
    seen = asyncio.run(house.capacity(command=("/nowhere/agent",)).create(a_slice()))
    assert (seen.state, seen.detail) == (FAILED, "cannot start an agent: No such file or directory")


def test_an_agent_nobody_wrote_down_is_replaced_not_doubled(house: House) -> None:
    async def story() -> None:
        capacity = house.capacity()
        await capacity.create(a_slice())
        await house.up("s1")
        (house.folder / "s1" / "host-0.json").unlink()
        first = house.family("s1")

        async def wait() -> None:
            await until(lambda: len(house.starts("s1")) == 2)

        await keeping(capacity, wait)
        assert not any(process.alive for process in first)
        assert len(house.family("s1")) == 1

    asyncio.run(story())


def test_agents_follow_the_server_to_another_address(house: House) -> None:
    house.manner = "family"

    async def story() -> None:
        await house.capacity().create(a_slice())
        await house.up("s1")
        first = house.family("s1")
        house.file("s1", 0, "ready").unlink()
        house.url = "http://127.0.0.1:2"

        async def wait() -> None:
            await house.up("s1")

        await keeping(house.capacity(), wait)
        assert house.file("s1", 0, "seen").read_text().startswith("http://127.0.0.1:2 s1 0 ")
        gone = [process for process in first if not process.alive]
        assert [process.pid for process in gone] == house.starts("s1")[:1], "payloads go on"

    asyncio.run(story())


def test_scraps_and_strange_files_are_no_slices(house: House) -> None:
    house.folder.mkdir()
    (house.folder / ".new-s1-abc").mkdir()
    (house.folder / ".gone-s2-abc" / "deep").mkdir(parents=True)
    (house.folder / ".gone-s2-abc" / "deep").chmod(0o500)
    (house.folder / "a file").write_text("x")
    (house.folder / "link").symlink_to("/etc")

    async def story() -> None:
        capacity = house.capacity()
        assert (await capacity.list("local")).slices == ()

        async def wait() -> None:
            await until(lambda: sorted(path.name for path in house.folder.iterdir()) == ["a file", "link"])

        await keeping(capacity, wait)

    asyncio.run(story())


def test_a_machine_holds_so_many_hosts(house: House) -> None:
    async def story() -> None:
        capacity = house.capacity(hosts_max=3)
        await capacity.create(a_slice("s1", hosts=2))
        with pytest.raises(Stockout, match="runs 2 local hosts of at most 3"):
            await capacity.create(a_slice("s2", hosts=2))
        with pytest.raises(QuotaExceeded, match="has 4 hosts"):
            await capacity.create(a_slice("s3", hosts=4))
        await capacity.preempt("s1")
        assert (await capacity.create(a_slice("s2", hosts=2))).state == READY

    asyncio.run(story())


def test_a_full_disk_is_told_as_doubt(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CapacityError, match="No space left"):
        asyncio.run(house.capacity().create(a_slice()))
    assert [path.name for path in house.folder.iterdir()] == []
