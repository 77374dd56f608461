"""Readers of logs: merged by arrival, live, resumed where they were; followers share one buffer; the routes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.domain import limits
from penstock.objects.memory import MemoryObjects
from penstock.server import logs
from penstock.server.logbook import Stream
from penstock.server.logs import Places, Wanted
from penstock.server.routing import Events, Raw, Refusal
from tests.unit.server.log_shop import OUT, Shop, content, play, until
from tests.unit.server.plant import Plant, plant


def test_merged_by_arrival_live_and_from_the_bucket() -> None:
    async def story(shop: Shop) -> None:
        script = [(0, "out", b"a\n"), (1, "err", b"b\n"), (0, "log", b"c\n"), (0, "out", b"d\n"), (1, "err", b"e\n")]
        offsets: dict[Stream, int] = {}
        for rank, name, data in script:
            stream = Stream("j1", "a1", rank, name)
            ack = await shop.book.append(stream, offsets.get(stream, 0), data)
            offsets[stream] = ack.received
        for _ in range(2):
            merged = [content(sent.data) async for sent in shop.reading().events(follow=False) if sent.event == "log"]
            assert b"".join(merged) == b"a\nb\nc\nd\ne\n"
            await shop.book.close()
            shop.restart()
        only = [piece.data async for _, piece, _ in shop.reading(Wanted(rank=1)).pieces(follow=False)]
        assert b"".join(only) == b"b\ne\n"

    play(story)


def test_a_tail_begins_near_the_end_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """From memory to the byte; of a stream that is only in the bucket, its last object."""
    monkeypatch.setattr(limits, "LOG_OBJECT_BYTES", 1000)
    err = Stream("j1", "a1", 0, "err")

    async def told(shop: Shop, tail: int) -> dict[str, bytes]:
        found = {"out": b"", "err": b""}
        async for stream, piece, lost in shop.reading(Wanted(tail=tail)).pieces(follow=False):
            assert lost <= 0, "what was not asked for is not lost"
            found[stream.name] += piece.data
        return found

    async def story(shop: Shop) -> None:
        lines = b"".join(b"%03d\n" % number for number in range(1000))
        for place in range(0, len(lines), 500):
            await shop.book.append(OUT, place, lines[place : place + 500])
        await shop.book.append(err, 0, b"short\n")
        assert await told(shop, 8) == {"out": b"998\n999\n", "err": b"short\n"[-8:]}
        assert await told(shop, 1 << 20) == {"out": lines, "err": b"short\n"}
        follower = shop.reading(Wanted(tail=4, stream="out")).events(follow=True)
        first = await anext(follower)
        assert content(first.data) == b"999\n"
        waiting = asyncio.ensure_future(anext(follower))
        await shop.book.append(OUT, len(lines), b"new\n")
        assert content((await waiting).data) == b"new\n"
        await follower.aclose()  # type: ignore[attr-defined]
        resumed = shop.reading(Wanted(tail=4, stream="out"), first.id).events(follow=False)
        assert content((await anext(resumed)).data) == b"new\n", "a tail that broke off goes on where it was"
        await shop.book.close()
        shop.restart()
        stored = await told(shop, 8)
        assert stored["err"] == b"short\n"
        assert (lines + b"new\n").endswith(stored["out"])
        assert 4 <= len(stored["out"]) <= 2000, "not all of it"

    play(story)


def test_a_follower_sees_a_line_at_once_and_ends_with_the_job() -> None:
    async def story(shop: Shop) -> None:
        events = shop.reading().events(follow=True)
        waiting = asyncio.ensure_future(anext(events))
        took = []
        for line in range(10):
            await asyncio.sleep(0.002)
            before = time.monotonic()
            await shop.book.append(OUT, line, b"%d" % line)
            assert content((await waiting).data) == b"%d" % line
            took.append(time.monotonic() - before)
            waiting = asyncio.ensure_future(anext(events))
        assert min(took) < 0.005, took
        await shop.book.append(OUT, 10, b"last")
        shop.end()
        assert content((await waiting).data) == b"last"
        assert (await anext(events)).event == "end"
        with pytest.raises(StopAsyncIteration):
            await anext(events)
        assert not shop.book._topics["j1"].followers

    play(story)


def test_a_broken_stream_goes_on_where_it_was_even_after_a_restart() -> None:
    async def story(shop: Shop) -> None:
        err = Stream("j1", "a2", 1, "err")
        await shop.book.append(OUT, 0, b"abcdef")
        await shop.book.append(err, 0, b"123")
        last = None
        async for sent in shop.reading().events(follow=False):
            if sent.event == "log":
                last = sent.id
        assert last is not None
        shop.restart()  # nothing was durable: the agents send all of it again
        resumed = shop.reading(after=last).events(follow=True)
        waiting = asyncio.ensure_future(anext(resumed))
        await shop.book.append(err, 0, b"1234")
        first = await waiting
        assert content(first.data) == b"4"
        assert "0o6" in first.id, "what is not back yet is not forgotten"
        waiting = asyncio.ensure_future(anext(resumed))
        await shop.book.append(OUT, 0, b"abc")
        await shop.book.append(OUT, 3, b"defgh")
        assert content((await waiting).data) == b"gh"
        shop.end()
        assert (await anext(resumed)).event == "end"

    play(story)


@pytest.mark.parametrize("text", ["x", "a1:", "a1:0q5", "a1:0o", "a1:0o5;;", "a1:0o" + "9" * 19, "A1:0o1"])
def test_a_foreign_id_is_refused(text: str) -> None:
    with pytest.raises(Refusal, match="Last-Event-ID"):
        Places(text)


def test_bytes_that_are_no_text_arrive_as_they_are() -> None:
    async def story(shop: Shop) -> None:
        written = b"\x1b[31mred\x1b[0m \xff\xfe\x00 end\n"
        await shop.book.append(OUT, 0, written)
        sent = [sent async for sent in shop.reading().events(follow=False)]
        assert b"\n" not in sent[0].data
        assert content(sent[0].data) == written

    play(story)


def test_a_hundred_followers_share_what_they_read() -> None:
    async def story(shop: Shop) -> None:
        lines = 200
        seen: list[list[bytes]] = [[] for _ in range(100)]

        async def follow(mine: list[bytes]) -> None:
            mine += [sent.data async for sent in shop.reading().events(follow=True) if sent.event == "log"]

        followers = [asyncio.create_task(follow(mine)) for mine in seen]
        await until(lambda: shop.book.topic("j1").followers == 100)
        text = b"".join(b"a line of a log, number %04d\n" % line for line in range(100))
        for block in range(lines // 10):
            await shop.book.append(OUT, block * len(text), text)
            await asyncio.sleep(0)
        shop.end()
        await asyncio.gather(*followers)
        for mine in seen:
            assert b"".join(content(data) for data in mine) == text * (lines // 10)
        assert all(mine[0] is seen[0][0] for mine in seen), "one buffer for all"

    play(story)


# --- the routes ---
def test_the_routes_end_to_end(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, host, attempt = await made.running()

        async def post(data: bytes, offset: int, **query: str) -> Any:
            asked = {"rank": "0", "stream": "out", "offset": str(offset), **query}
            return await logs.append_log(made.service, host.call(attempt, query=asked, body=data))

        async def read(**query: str) -> Any:
            return await logs.read_logs(made.service, made.user_call(job, query=query))

        follower = await read(follow="true")
        assert isinstance(follower, Events)
        waiting = asyncio.ensure_future(anext(follower.events))
        assert (await post(b"hello ", 0)).received == 6
        assert content((await waiting).data) == b"hello "
        waiting = asyncio.ensure_future(anext(follower.events))
        await post(b"world\n", 6)
        assert content((await waiting).data) == b"world\n"
        with pytest.raises(Refusal, match="another host"):
            await post(b"x", 0, rank="1")
        waiting = asyncio.ensure_future(anext(follower.events))
        await host.exit(attempt)
        async with asyncio.timeout(5.0):
            assert (await waiting).event == "end"
        await post(b"late\n", 12)
        raw = await read(stream="out", host="0")
        assert isinstance(raw, Raw)
        assert not isinstance(raw.body, bytes)
        assert b"".join([piece async for piece in raw.body]) == b"hello world\nlate\n"
        whole = await read()
        assert isinstance(whole, Events)
        assert [sent.event async for sent in whole.events][-1] == "end"
        with pytest.raises(LookupError, match="attempt 'a-none'"):
            await read(attempt="a-none")
        assert [sent.event async for sent in (await read(attempt=attempt.id, stream="err")).events] == ["end"]

    async def act() -> None:
        async with plant(tmp_path) as made:
            await story(made)

    asyncio.run(act())


def test_what_a_closed_attempt_sent_is_stored_without_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOG_FLUSH_S", 3600.0)

    async def act() -> None:
        objects = MemoryObjects()
        async with plant(tmp_path, objects) as made:
            _, host, attempt = await made.running()
            asked = {"rank": "0", "stream": "err", "offset": "0"}
            await logs.append_log(made.service, host.call(attempt, query=asked, body=b"oops\n"))
            await host.exit(attempt, code=1)
            await until(lambda: any("/err/" in path for path in objects.paths()))

    asyncio.run(act())
