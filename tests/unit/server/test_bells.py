"""Parked syncs end as soon as there is an order for their slice, and only then; a broken connection is a hint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.controller import attempts
from penstock.domain.lifecycle import Cause
from penstock.domain.nouns import Slice
from penstock.planner.actions import Drain, Place, Plan, Stop
from penstock.ports.store import Unavailable
from penstock.server import agents, bells
from penstock.server.bells import Bells, Woken
from penstock.wire.agent import AgentSync
from tests.unit.server.plant import Clock, Host, Plant, plant


def run(story: Any, home: Path) -> None:
    async def play() -> None:
        async with plant(home) as made:
            await story(made)

    asyncio.run(play())


async def never() -> None:
    await asyncio.Event().wait()


async def parked(made: Plant, host: Host, *held: Any) -> asyncio.Task[Any]:
    """A sync that waits by now."""
    before = agents.bells(made.service).parked
    waiting = asyncio.create_task(host.sync(*held, wait_s=5.0))

    async def waits() -> bool:
        return agents.bells(made.service).parked > before or waiting.done()

    await made.until(waits)
    assert not waiting.done()
    return waiting


def test_an_order_ends_a_parked_sync_at_its_commit(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        host = await made.ready()
        took = []
        for _ in range(15):
            waiting = await parked(made, host)
            await made.submit()
            reply = await waiting
            heard = made.clock.now()
            assert reply.launch is not None
            attempt = await made.attempt(reply.launch.attempt)
            took.append(heard - attempt.created_at)
            await host.exit(attempt)
        # The stamp is taken before the commit, so these times hold the commit itself: milliseconds on a quiet disk.
        assert min(took) < 0.5, took

    run(story, tmp_path)


def test_an_order_committed_by_anybody_wakes(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        _, host, attempt = await made.running()
        waiting = await parked(made, host, host.held(attempt))
        await made.store.transact(attempts.stop, attempt.id, "drained")
        assert (await waiting).stop == (attempt.id,)
        waiting = asyncio.create_task(host.sync(host.held(attempt), wait_s=5.0))
        await made.store.transact(attempts.close, attempt.id, Cause.PREEMPTED, ("test",), True)
        async with asyncio.timeout(30.0):
            while not (reply := await waiting).kill:
                assert reply.stop == (attempt.id,)
                waiting = asyncio.create_task(host.sync(host.held(attempt), wait_s=5.0))

    run(story, tmp_path)


def test_only_the_slice_with_an_order_is_woken(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        _, one, first = await made.running()
        _, two, second = await made.running()
        waiting = [await parked(made, one, one.held(first)), await parked(made, two, two.held(second))]
        last = await made.store.read(lambda reader: reader.last_seq())

        async def heard() -> bool:
            return agents.bells(made.service)._cursor >= last

        await made.until(heard)
        rung = agents.bells(made.service).rung(two.slice)
        await made.store.transact(attempts.stop, first.id, "drained")
        assert (await waiting[0]).stop == (first.id,)
        assert not waiting[1].done()
        assert agents.bells(made.service).rung(two.slice) == rung
        waiting[1].cancel()
        await asyncio.wait(waiting[1:])

    run(story, tmp_path)


def test_a_host_that_came_before_its_machine_was_known_is_taken_in_when_it_is(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        await made.submit()
        intended: Slice = await made.until(lambda: _any_slice(made))
        host = Host(made, intended.id, 0)
        await host.join()
        reply = await host.sync(wait_s=5.0)
        while reply.launch is None:
            assert reply.welcome
            reply = await host.sync(wait_s=5.0)

    run(story, tmp_path)


async def _any_slice(made: Plant) -> Slice | None:
    found = await made.store.read(lambda reader: reader.live_slices())
    return found[0] if found else None


def test_a_quiet_sync_ends_in_time_and_costs_no_event(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        host = await made.ready()
        await host.sync()
        before = await made.store.read(lambda reader: reader.last_seq())
        started = made.clock.steady()
        reply = await host.sync(wait_s=0.2)
        assert agents.quiet(reply)
        assert made.clock.steady() - started >= 0.19
        assert await made.store.read(lambda reader: reader.last_seq()) == before
        assert agents.bells(made.service).parked == 0

    run(story, tmp_path)


def test_parked_syncs_end_when_the_server_stops(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        host = await made.ready()
        waiting = await parked(made, host)
        started = made.clock.steady()
        made.service.stopping.set()
        await made.service.close_parts()
        assert agents.quiet(await waiting)
        assert made.clock.steady() - started < 4.0

    run(story, tmp_path)


def test_a_fault_does_not_silence_the_bells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bells.read_news
    faults = [ZeroDivisionError("planted")]

    def read_news(reader: Any, after: int) -> bells.News:
        if faults:
            raise faults.pop()
        return real(reader, after)

    monkeypatch.setattr(bells, "read_news", read_news)

    async def story(made: Plant) -> None:
        _, host, attempt = await made.running()
        waiting = await parked(made, host, host.held(attempt))
        await made.store.transact(attempts.stop, attempt.id, "drained")
        assert (await waiting).stop == (attempt.id,)
        assert not faults

    run(story, tmp_path)


# --- the bells alone ---
class Gone:
    """A store that is away so often, then holds these events."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.reads = 0

    async def read(self, query: Any, *args: Any) -> Any:
        self.reads += 1
        if self.reads <= self.failures:
            raise Unavailable("gone for a moment")
        return 7 if query is bells._last_seq else bells.News(upto=8, more=False, slices=("s1",), ended=("j1",))

    async def wait(self, after: int, timeout_s: float) -> None:
        if after >= 8:
            await asyncio.Event().wait()


def alone(failures: int = 0) -> Bells:
    return Bells(Gone(failures), Clock(), lambda: 0)  # type: ignore[arg-type]


def test_who_waits_when_the_log_is_found_is_woken_once() -> None:
    """What it waits for may have been committed before."""

    async def story() -> None:
        mine = alone()
        waiting = asyncio.create_task(mine.park("s9", 0, 30.0, never))
        with mine.end_of("j9") as ended:
            await asyncio.sleep(0)
            following = asyncio.create_task(mine.run())
            async with asyncio.timeout(20.0):
                assert await waiting is Woken.RUNG
                await ended
        following.cancel()
        await asyncio.wait((following,))

    asyncio.run(story())


def test_a_ring_between_an_answer_and_the_wait_is_not_lost() -> None:
    async def story() -> None:
        mine = alone()
        rung = mine.rung("s1")
        mine.ring("s1", 1)
        assert await mine.park("s1", rung, 5.0, never) is Woken.RUNG
        assert await mine.park("s1", mine.rung("s1"), 0.01, never) is Woken.QUIET

    asyncio.run(story())


def test_memory_is_not_believed_before_it_reaches_the_ring() -> None:
    told = {"upto": 3}
    mine = Bells(Gone(0), Clock(), lambda: told["upto"])  # type: ignore[arg-type]
    assert mine.stale("s1", 0), "nobody was answered yet"
    mine.answered("s1", 0, mine.rung("s1"))
    assert not mine.stale("s1", 0)
    mine.ring("s1", 5)
    assert mine.stale("s1", 0)
    mine.answered("s1", 0, mine.rung("s1"))
    assert mine.stale("s1", 0), "memory is at 3, the order at 5"
    told["upto"] = 5
    assert not mine.stale("s1", 0)
    assert mine.stale("s1", 1), "another host has not been answered"


def test_a_plan_rings_for_the_slices_it_touched() -> None:
    mine = alone()
    place = Place(job="j", replica=0, slices=("s1", "s2"), chips=8, band=0)
    mine.ticked(Plan(actions=(place, Drain("s3", "test"), Stop("a1", "drained")), reasons={}), 1)
    assert [mine.rung(slice) for slice in ("s1", "s2", "s3", "s4")] == [1, 1, 1, 0]


def test_the_log_is_followed_through_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bells, "STORE_RETRY_S", 0.01)

    async def story() -> None:
        mine = alone(3)
        ended: list[str] = []
        mine.listeners.append(lambda news: ended.extend(news.ended))
        following = asyncio.create_task(mine.run())
        assert await mine.park("s1", 0, 5.0, never) is Woken.RUNG
        following.cancel()
        await asyncio.wait((following,))
        assert ended == ["j1"]

    asyncio.run(story())


def test_a_broken_connection_is_hinted_at_and_nothing_is_left_behind() -> None:
    async def story() -> None:
        mine = alone()
        dropped: list[str] = []
        mine.on_drop = dropped.append
        broken = asyncio.Event()
        waiting = asyncio.create_task(mine.park("s1", 0, 5.0, broken.wait))
        await asyncio.sleep(0)
        broken.set()
        assert await waiting is Woken.DROPPED
        assert (dropped, mine.parked) == (["s1"], 0)

    asyncio.run(story())


def test_a_host_that_dies_on_a_real_connection_is_noticed_at_once(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        host = await made.ready()
        dropped = asyncio.Event()
        agents.bells(made.service).on_drop = lambda slice: dropped.set() if slice == host.slice else None

        async def sync(request: Request) -> Response:
            call = host.call(body=msgspec.json.decode(await request.body(), type=AgentSync))
            call.request = request
            return Response(msgspec.json.encode(await agents.sync(made.service, call)))

        app = Starlette(routes=[Route("/sync", sync, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off"))
        serving = asyncio.create_task(server.serve())

        async def listening() -> bool:
            return server.started

        await made.until(listening)
        port = server.servers[0].sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = msgspec.json.encode(AgentSync(request=host.request(), wait_s=5.0))
        writer.write(f"POST /sync HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)

        async def waits() -> bool:
            return agents.bells(made.service).parked == 1

        await made.until(waits)
        writer.transport.abort()
        async with asyncio.timeout(30.0):
            await dropped.wait()
        server.should_exit = True
        await serving

    run(story, tmp_path)
