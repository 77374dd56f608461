"""Pages and streams of events: in order, resumable, of the own team, ended with the job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.domain.nouns import JobSpec, Resources
from penstock.ports.store import Unavailable
from penstock.server import feed
from penstock.server.feed import Feed
from tests.unit.server.house import House, Listener
from tests.unit.server.log_shop import until


def a_spec(team: str = "lab", **changes: Any) -> JobSpec:
    return JobSpec(team=team, queue=team, resources=Resources(accelerators=("v5e-1",), chips=0), **changes)


def listening(house: House, count: int = 1) -> Callable[[], bool]:
    """Whether so many streams follow the log."""
    found = house.service.part(Feed)
    return lambda: found._listeners == count and found._cursor >= 0


def seqs(events: list[dict[str, str]]) -> list[int]:
    return [int(event["id"]) for event in events]


def kinds(events: list[dict[str, str]]) -> list[str]:
    return [event["event"] for event in events]


def test_pages_hold_the_teams_events_and_go_on(house: House) -> None:
    ours = house.submit()
    house.submit("stranger")
    seen: list[Any] = []
    after = 0
    for _ in range(50):
        page = house.get("/v1/events", after=after, limit=2)
        seen += page["events"]
        if page["next"] == after:
            break
        after = page["next"]
    assert [event["kind"] for event in seen] == ["team.created", "queue.created", "job.created"]
    assert seen[2]["id"] == ours
    assert seen[2]["body"]["accelerators"] == ["v5e-1"]
    assert after == house.get("/v1/events", "operator", limit=1000)["next"]


def test_a_jobs_page_holds_only_its_own(house: House) -> None:
    one, two = house.submit(), house.submit()
    house.call("POST", f"/v1/jobs/{one}/cancel")
    page = house.get(f"/v1/jobs/{one[:14]}/events" if one[:14] != two[:14] else f"/v1/jobs/{one}/events")
    assert [event["kind"] for event in page["events"]] == ["job.created", "job.cancel_requested", "job.cancelled"]
    assert {event["id"] for event in page["events"]} == {one}
    rest = house.get(f"/v1/jobs/{one}/events", after=page["events"][0]["seq"], limit=1)
    assert [event["kind"] for event in rest["events"]] == ["job.cancel_requested"]
    assert rest["next"] == page["events"][1]["seq"]


def test_a_stream_begins_now_and_shows_what_comes_to_the_team(house: House) -> None:
    commands = house.controller.commands

    async def watch() -> list[dict[str, str]]:
        await commands.submit(a_spec(name="before"))
        async with Listener(house, "/v1/events", query="follow=true") as listener:
            assert listener.status == 200
            reading = asyncio.ensure_future(listener.take(2))
            await until(listening(house))
            await commands.submit(a_spec("other"))
            first = await commands.submit(a_spec())
            await commands.cancel(first.id)
            return await reading

    events = house.wait(watch())
    assert kinds(events) == ["job.created", "job.cancel_requested"]
    assert seqs(events) == sorted(seqs(events))
    body = msgspec.json.decode(events[0]["data"])
    assert (body["kind"], body["seq"]) == ("job.created", int(events[0]["id"]))


def test_a_stream_resumes_after_the_last_event_seen(house: House) -> None:
    commands = house.controller.commands

    async def watch() -> tuple[list[int], list[int]]:
        for _ in range(5):
            await commands.submit(a_spec())
        async with Listener(house, "/v1/events", query="follow=true&after=0") as listener:
            first = seqs(await listener.take(3))
        async with Listener(house, "/v1/events", query="follow=true", last_event_id=str(first[-1])) as listener:
            return first, seqs(await listener.take(4))

    first, second = house.wait(watch())
    page = [event["seq"] for event in house.get("/v1/events")["events"]]
    assert first + second == page[:7]


def test_a_bad_place_to_resume_is_refused(house: House) -> None:
    said = house.refused(400, "GET", "/v1/events?follow=true", headers={"Last-Event-ID": "x"})
    assert said["field"] == "last-event-id"


def test_a_jobs_stream_ends_with_the_job(house: House) -> None:
    id = house.submit()

    async def watch() -> list[dict[str, str]]:
        async with Listener(house, f"/v1/jobs/{id}/events", query="follow=true") as listener:
            first = await listener.take(1)
            await house.controller.commands.cancel(id)
            return first + [event async for event in listener.events()]

    assert kinds(house.wait(watch())) == ["job.created", "job.cancel_requested", "job.cancelled"]

    async def late(last: str) -> list[dict[str, str]]:
        async with Listener(house, f"/v1/jobs/{id}/events", query="follow=true", last_event_id=last) as listener:
            return [event async for event in listener.events()]

    whole = house.wait(late("0"))
    assert len(whole) == 3
    assert house.wait(late(whole[1]["id"])) == whole[2:]
    assert house.wait(late(whole[2]["id"])) == []


def test_many_streams_share_one_reader_and_leave_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = house.controller.commands
    reads = 0
    good = house.store.read

    async def counted(*args: Any, **more: Any) -> Any:
        nonlocal reads
        reads += args[0] is feed.read_page
        return await good(*args, **more)

    monkeypatch.setattr(house.store, "read", counted)

    async def watch() -> list[list[int]]:
        nonlocal reads
        listeners = [Listener(house, "/v1/events", query="follow=true") for _ in range(50)]
        for listener in listeners:
            await listener.__aenter__()
        reading = [asyncio.ensure_future(listener.take(20)) for listener in listeners]
        await until(listening(house, 50))
        reads = 0
        for _ in range(20):
            await commands.submit(a_spec())
        found = [seqs(await one) for one in reading]
        for listener in listeners:
            await listener.__aexit__()
        return found

    found = house.wait(watch())
    assert len({tuple(one) for one in found}) == 1
    assert len(found[0]) == 20
    assert reads <= 60  # by one reader: a page or two per commit, and not fifty
    mine = house.service.part(Feed)
    assert (mine._listeners, mine._task, len(mine._kept)) == (0, None, 0)


def test_who_is_far_behind_misses_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "KEPT", 4)
    house.service._parts.pop(Feed, None)
    commands, good = house.controller.commands, house.store.read
    may_read = asyncio.Event()

    async def held(*args: Any, **more: Any) -> Any:
        if args[0] is feed.read_page:
            await may_read.wait()
        return await good(*args, **more)

    monkeypatch.setattr(house.store, "read", held)

    async def watch() -> list[int]:
        async with Listener(house, "/v1/events", query="follow=true&after=0") as listener:
            got: list[int] = []
            for burst in (5, 1, 30):  # pages smaller and larger than what is kept
                may_read.clear()
                for _ in range(burst):
                    await commands.submit(a_spec())
                may_read.set()
                got += seqs(await listener.take(burst + (0 if got else 2)))
            return got

    assert house.wait(watch()) == [event["seq"] for event in house.get("/v1/events", limit=1000)["events"]]


def test_streams_outlive_a_store_that_is_away(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "STORE_RETRY_S", 0.02)
    commands, good = house.controller.commands, house.store.read
    away, failures = False, 0

    async def flaky(*args: Any, **more: Any) -> Any:
        nonlocal failures
        if away:
            failures += 1
            raise Unavailable("away")
        return await good(*args, **more)

    monkeypatch.setattr(house.store, "read", flaky)

    async def watch() -> list[str]:
        nonlocal away
        async with Listener(house, "/v1/events", query="follow=true") as listener:
            reading = asyncio.ensure_future(listener.take(2))
            await until(listening(house))
            await commands.submit(a_spec())
            away = True
            await commands.submit(a_spec())
            await until(lambda: failures >= 3)
            away = False
            return kinds(await reading)

    assert house.wait(watch()) == ["job.created", "job.created"]
