"""A host's notice, heard from a metadata server that waits for changes: the emulator's, and broken ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from penstock.agent import metadata
from penstock.agent.host import Host, Place
from penstock.agent.link import Link
from penstock.agent.loop import Agent
from penstock.agent.record import Record
from penstock.emulator.facts import PROBED_HOST
from penstock.emulator.vm_metadata import Metadata, serve_metadata

DEADLINE_S = 10.0


class Clock:
    def now(self) -> float:
        return time.time()  # noqa: TID251 (a test of real time)

    def steady(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.05))


def emulated() -> Metadata:
    spec = msgspec.structs.replace(PROBED_HOST, index=0, hosts=1, addresses=("127.0.0.1",), slices=1, coordinator="")
    return Metadata(spec, "t1v-n-0")


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def at(serve: Serve) -> AsyncIterator[str]:
    """A metadata server; its address up to `instance`."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/computeMetadata/v1/instance"
    finally:
        server.close()


def telling(told: Metadata) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve_metadata(told, reader, writer)

    return serve


async def heard(url: str, change: Callable[[], None] | None) -> tuple[str, float]:
    """What is heard, and how long after the change."""
    said: asyncio.Queue[str] = asyncio.Queue()
    task = asyncio.create_task(metadata.watch(url, Clock(), lambda key, _: said.put_nowait(key)))
    try:
        if change is not None:
            await asyncio.sleep(0.2)  # both questions wait by now, or hear the change with their first answer
            assert said.empty()
            change()
        began = time.monotonic()
        async with asyncio.timeout(DEADLINE_S):
            return await said.get(), time.monotonic() - began
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_preemption_is_heard_at_once() -> None:
    async def play() -> None:
        told = emulated()
        async with at(telling(told)) as url:
            key, after_s = await heard(url, lambda: told.notify("preempted"))
        assert key == "preempted"
        assert after_s < 30.0, "the next question is a minute later"

    asyncio.run(play())


def test_a_maintenance_that_ends_the_host_is_heard() -> None:
    async def play() -> None:
        told = emulated()
        async with at(telling(told)) as url:
            assert (await heard(url, lambda: told.notify("maintenance")))[0] == "maintenance-event"

    asyncio.run(play())


def test_what_was_told_before_the_agent_came_is_heard_too() -> None:
    async def play() -> None:
        told = emulated()
        told.notify("preempted")
        async with at(telling(told)) as url:
            assert (await heard(url, None))[0] == "preempted"

    asyncio.run(play())


def test_a_migration_and_other_changes_are_no_notice() -> None:
    async def play() -> None:
        told = emulated()
        said: list[str] = []
        async with at(telling(told)) as url:
            task = asyncio.create_task(metadata.watch(url, Clock(), lambda key, _: said.append(key)))
            await asyncio.sleep(0.1)
            told._maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
            told.describe({"color": "blue"})
            await asyncio.sleep(0.2)
            assert said == []
            assert not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(play())


def test_a_metadata_server_that_fails_is_asked_again() -> None:
    async def play() -> None:
        told, answers = emulated(), 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal answers
            answers += 1
            match answers:
                case 1:
                    writer.close()
                case 2:
                    writer.write(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n")
                    await writer.drain()
                    writer.close()
                case 3:
                    writer.write(b"nonsense\r\n\r\n")
                    await writer.drain()
                    writer.close()
                case 4:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n")
                    await writer.drain()
                    writer.close()
                case _:
                    await serve_metadata(told, reader, writer)

        async with at(serve) as url:
            assert (await heard(url, lambda: told.notify("preempted")))[0] == "preempted"
        assert answers > 4

    asyncio.run(play())


def test_an_agent_passes_the_notice_on(tmp_path: Path) -> None:
    async def play() -> None:
        told = emulated()
        async with at(telling(told)) as url:
            place = Place(slice="s1", host=0, provider_id="vm")
            host = Host(place, tmp_path, Link("http://127.0.0.1:1"), Clock(), Record(incarnation="i"))
            host.metadata = url
            agent = Agent(host, "token")
            task = asyncio.create_task(agent._watch_metadata())
            assert not agent._request().notice
            told.notify("preempted")
            async with asyncio.timeout(DEADLINE_S):
                while not agent._request().notice:
                    agent._news.clear()
                    await agent._news.wait()
            assert host.address == "127.0.0.1"
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(play())
