"""The log book: what is read is what was written, whatever was sent twice, lost, restarted or taken by two servers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.domain import limits
from penstock.ports.objects import ObjectsError
from penstock.server import logbook
from penstock.server.logbook import Full, Slow, Stream
from penstock.server.logs import Wanted
from tests.unit.server.log_shop import OUT, Broken, Shop, play, until


class Agent:
    """An agent's half of the protocol: it keeps what is not durable and sends from where the server stands."""

    def __init__(self, shop: Shop, written: bytes) -> None:
        self.shop = shop
        self.written = written
        self.sent = 0
        self.kept_from = 0

    async def post(self, offset: int, size: int, *, heard: bool = True) -> None:
        """Send a chunk; with `heard` the answer arrives."""
        offset = max(offset, self.kept_from)
        try:
            ack = await self.shop.book.append(OUT, offset, self.written[offset : offset + size])
        except (ObjectsError, Slow):
            return
        assert ack.durable <= ack.received <= len(self.written)
        if heard:
            self.sent = ack.received
            self.kept_from = max(self.kept_from, ack.durable)
            assert self.sent >= self.kept_from, "what was durable is never asked for again"

    async def finish(self) -> None:
        """Go on until the server says that it has everything."""
        for _ in range(1000):
            await self.post(self.sent, 50)
            if self.sent == len(self.written):
                return
        pytest.fail(f"it asks for {self.sent} of {len(self.written)} for ever")


STEPS = st.one_of(
    st.tuples(st.just("send"), st.integers(1, 40)),
    st.tuples(st.just("send unheard"), st.integers(1, 40)),
    st.tuples(st.just("send again"), st.integers(0, 200), st.integers(0, 60)),
    st.tuples(st.just("send too far"), st.integers(1, 50), st.integers(1, 20)),
    st.tuples(st.just("store")),
    st.tuples(st.just("restart")),
    st.tuples(st.just("break"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("read")),
)


@settings(max_examples=150)
@given(st.binary(min_size=1, max_size=300), st.lists(STEPS, max_size=25))
def test_bytes_read_are_bytes_written(written: bytes, steps: list[tuple[Any, ...]]) -> None:
    async def story(shop: Shop) -> None:
        agent = Agent(shop, written)
        for what, *numbers in steps:
            match what:
                case "send":
                    await agent.post(agent.sent, numbers[0])
                case "send unheard":
                    await agent.post(agent.sent, numbers[0], heard=False)
                case "send again":
                    await agent.post(min(numbers[0], agent.sent), numbers[1])
                case "send too far":
                    await agent.post(agent.sent + numbers[0], numbers[1], heard=False)
                case "store":
                    await shop.book.close()
                case "restart":
                    shop.restart()
                case "break":
                    shop.objects.faults = Broken(numbers[0], numbers[1])
                case _:
                    assert written.startswith(await shop.everything())
        shop.objects.faults = None
        await agent.finish()
        assert await shop.everything() == written
        await shop.book.close()
        await agent.post(agent.sent, 0)
        assert agent.kept_from == len(written), "everything is durable"
        shop.restart()
        assert await shop.everything() == written

    play(story)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.binary(min_size=1, max_size=20)), min_size=1, max_size=12), st.booleans()
)
def test_every_gap_is_marked_with_its_size(chunks: list[tuple[int, bytes]], restarted: bool) -> None:
    async def story(shop: Shop) -> None:
        offset, lost, expected = 0, [], []
        for gap, data in chunks:
            offset += gap
            ack = await shop.book.append(OUT, offset, data, gap=True)
            offset += len(data)
            assert ack.received == offset
            lost += [gap] if gap else []
            expected.append(data)
        if restarted:
            await shop.book.close()
            shop.restart()
        found, marks, place = [], [], 0
        async for _, piece, missing in shop.reading().pieces(follow=False):
            assert piece.offset == place + missing
            place = piece.end
            found.append(piece.data)
            marks += [missing] if missing else []
        assert b"".join(found) == b"".join(expected)
        assert marks == lost
        raw = await shop.everything()
        assert raw.count(b"bytes of out are lost]") == len(lost)

    play(story)


def test_a_chunk_above_the_end_is_asked_for_not_taken() -> None:
    async def story(shop: Shop) -> None:
        assert (await shop.book.append(OUT, 0, b"abc")).received == 3
        assert (await shop.book.append(OUT, 10, b"xyz")).received == 3
        assert (await shop.book.append(OUT, 2, b"cde")).received == 5
        assert await shop.everything() == b"abcde"

    play(story)


def test_a_line_is_durable_after_a_moment_and_much_of_it_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOG_FLUSH_S", 0.05)

    async def story(shop: Shop) -> None:
        await shop.book.append(OUT, 0, b"one line\n")
        await until(lambda: bool(shop.objects.paths()))
        assert shop.objects.paths() == ("jobs/j1/log/a1/0/out/0000000000000000.zst",)
        assert (await shop.book.append(OUT, 9, b"")).durable == 9
        monkeypatch.setattr(limits, "LOG_FLUSH_S", 60.0)
        for part in range(3):
            await shop.book.append(OUT, 9 + part * (1 << 19), b"x" * (1 << 19))
        await until(lambda: len(shop.objects.paths()) >= 2)

    play(story)


def test_two_servers_that_take_the_same_stream_lose_nothing() -> None:
    async def story(one: Shop) -> None:
        two = Shop(one.objects)
        written = bytes(range(200))
        await one.book.append(OUT, 0, written[:50])  # held by one, not stored
        await two.book.append(OUT, 0, written[:120])
        await two.book.close()
        await one.book.close()  # finds the name taken, by more than it has
        ack = await one.book.append(OUT, 120, written[120:])
        assert ack.received == 200
        await one.book.close()
        assert await two.everything() == written
        two.restart()

    play(story)


def test_a_name_taken_by_fewer_bytes_loses_none_of_ours() -> None:
    async def story(one: Shop) -> None:
        two = Shop(one.objects)
        written = bytes(range(200))
        await two.book.append(OUT, 0, written[:120])  # held by two, not stored
        await one.book.append(OUT, 0, written[:50])
        await one.book.close()
        await two.book.close()
        assert (await two.book.append(OUT, 120, b"")).durable == 120
        one.restart()
        two.restart()
        assert await one.everything() == written[:120]

    play(story)


def test_what_another_server_stored_is_noticed_when_a_chunk_does_not_fit() -> None:
    async def story(one: Shop) -> None:
        two = Shop(one.objects)
        await one.book.append(OUT, 0, b"abc")
        await two.book.append(OUT, 0, b"abcdef")
        await two.book.close()
        assert (await one.book.append(OUT, 6, b"ghi")).received == 9
        await one.book.close()
        assert await two.everything() == b"abcdefghi"
        two.restart()

    play(story)


def test_a_stream_at_its_cap_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOG_BYTES_MAX", 100)
    monkeypatch.setattr(limits, "LOG_MARK_BYTES_MAX", 20)

    async def story(shop: Shop) -> None:
        await shop.book.append(OUT, 0, b"x" * 110)
        with pytest.raises(Full, match="100 bytes of out are kept"):
            await shop.book.append(OUT, 110, b"y" * 11)
        # What was dropped does not count: the end of a flood can still be kept, with its gap.
        await shop.book.append(OUT, 10**12, b"z" * 10, gap=True)
        await shop.book.close()
        shop.restart()
        with pytest.raises(Full):
            await shop.book.append(OUT, 10**12 + 10, b"y" * 200)
        assert (await shop.everything()).endswith(b"bytes of out are lost]\n" + b"z" * 10)

    play(story)


def test_a_bucket_that_is_away_makes_the_agent_wait_not_our_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOG_PENDING_BYTES_MAX", 1000)
    monkeypatch.setattr(limits, "LOG_FLUSH_S", 60.0)

    async def story(shop: Shop) -> None:
        shop.objects.faults = Broken(before=3)
        sent, refused = 0, 0
        while sent < 5000:
            try:
                sent = (await shop.book.append(OUT, sent, b"x" * 500)).received
            except Slow:
                refused += 1
        assert refused == 3
        assert await shop.everything() == b"x" * 5000

    play(story)


def test_memory_stays_bounded_and_readers_go_on_from_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOG_MEMORY_BYTES_MAX", 40_000)
    monkeypatch.setattr(limits, "LOG_KEPT_BYTES", 10_000)
    monkeypatch.setattr(limits, "LOG_OBJECT_BYTES", 4_000)
    monkeypatch.setattr(limits, "LOG_PIECE_BYTES", 1_500)

    async def story(shop: Shop) -> None:
        written = {Stream("j1", "a1", rank, "out"): bytearray() for rank in range(8)}
        slow = shop.reading(Wanted(rank=3))
        reader = slow.pieces(follow=True)
        got = bytearray()
        for turn in range(20):
            for stream, so_far in list(written.items()):
                data = f"{stream.rank} {turn} ".encode() * 150
                await shop.book.append(stream, len(so_far), data)
                written[stream] = so_far + data
            if turn % 4 == 0:
                got += (await anext(reader))[1].data
            if turn % 5 == 0:
                await shop.book.close()
        await shop.book.close()
        assert shop.book._cost <= 40_000
        shop.end()
        async for _, piece, lost in reader:
            assert lost == 0
            got += piece.data
        assert got == written[Stream("j1", "a1", 3, "out")]

    play(story)


def test_an_object_that_is_no_log_is_an_error_not_a_guess() -> None:
    async def story(shop: Shop) -> None:
        await shop.objects.put(OUT.path(0), b"not a log")
        with pytest.raises(ObjectsError, match="not a piece of a log"):
            await shop.book.append(OUT, 0, b"abc")

    play(story)


def test_a_fault_while_reading_is_not_remembered() -> None:
    async def story(shop: Shop) -> None:
        await shop.book.append(OUT, 0, b"abc")
        await shop.book.close()
        whole = shop.objects.peek(OUT.path(0))
        assert whole is not None
        await shop.objects.put(OUT.path(0), whole.data[:-2])
        shop.restart()
        with pytest.raises(ObjectsError):
            await shop.everything()
        await shop.objects.put(OUT.path(0), whole.data)
        assert await shop.everything() == b"abc"

    play(story)


@pytest.mark.parametrize("path", ["jobs/j/log/a/0/out/x.zst", "jobs/j/log/a/0/tty/0.zst", "jobs/j/log/a", "a/b"])
def test_other_objects_are_not_taken_for_logs(path: str) -> None:
    assert logbook.parse_path(path) is None
