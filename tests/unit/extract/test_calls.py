"""A store that answers one kind of call and not another: what is said of it, and how long it is waited for."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator

import pytest

from penstock.extract.calls import TOLD_EVERY_S, Calls, Stopped
from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import ObjectsError
from tests.process.extraction import cheap_plan
from tests.unit.extract.cheap import finish, memory, run


class Refusing:
    """Calls with a verb and a kind of path fail so many times; `meanwhile` happens before each of these failures."""

    def __init__(self, verb: str, fails: float, of: str = "") -> None:
        self.left = fails
        self.meanwhile: Callable[[], Awaitable[object]] | None = None
        self._verb = verb
        self._of = of

    async def before(self, verb: str, path: str) -> None:
        if verb == self._verb and self._of in path and self.left > 0:
            self.left -= 1
            if self.meanwhile is not None:
                await self.meanwhile()
            raise ObjectsError(f"{verb} {path}: no room")

    async def after(self, verb: str, path: str) -> None:
        pass


def calls_with(refusing: Refusing, patience_s: float = 600, *, asked: bool = False) -> Calls:
    objects = MemoryObjects().by("one", refusing)
    return Calls(objects, random.Random(1), patience_s=patience_s, should_stop=lambda: asked)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    monkeypatch.setattr("penstock.extract.calls.PAUSE_S", (0.001, 0.01))
    with caplog.at_level(logging.WARNING, "penstock.extract.calls"):
        yield lambda: [record.getMessage() for record in caplog.records]


def test_a_record_that_cannot_be_written_is_told_with_the_words_of_the_store(said: Callable[[], list[str]]) -> None:
    calls = calls_with(Refusing("put_new", float("inf")), patience_s=0.2)
    with pytest.raises(ObjectsError, match=r"^a: could not be stored in 0 s: put_new a: no room$"):
        run(lambda: calls.create_own("a", b"x", "me", lambda _: "me"))
    assert said() == ["trying again, for 0 s at most: put_new a: no room"]


def test_data_that_cannot_be_written_are_told_with_the_words_of_the_store(said: Callable[[], list[str]]) -> None:
    bucket = memory()
    refusing = Refusing("put_new", float("inf"), of="/data/")
    calls = Calls(bucket.by("one", refusing), random.Random(1), patience_s=0.2)
    with pytest.raises(ObjectsError, match=r"/data/\S+: could not be stored in 0 s: put_new \S+/data/\S+: no room$"):
        run(lambda: finish(calls, cheap_plan(rows=5, unit_rows=5)))
    assert [line.rpartition(": ")[2] for line in said()] == ["no room"]


def test_what_others_are_answered_does_not_end_the_outage_of_one(said: Callable[[], list[str]]) -> None:
    refusing = Refusing("put", 10)
    calls = calls_with(refusing)
    refusing.meanwhile = lambda: calls.read("other")
    run(lambda: calls.put("a", b"x"))
    first, last = said()
    assert first == "trying again, for 600 s at most: put a: no room"
    assert last.startswith("the bucket answers again, after ")


def test_a_store_that_fails_now_and_then_is_told_of_once_a_minute(
    said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Refusing("put", 0)
    calls = calls_with(refusing)

    async def stumble() -> None:
        refusing.left = 1
        await calls.put("a", b"x")

    async def story() -> None:
        for _ in range(5):
            await stumble()
        assert [line.partition(",")[0] for line in said()] == ["trying again", "the bucket answers again"]
        pass_time(monkeypatch, TOLD_EVERY_S)
        await stumble()

    run(story)
    assert [line.partition(",")[0] for line in said()] == ["trying again", "the bucket answers again"] * 2


def test_an_outage_that_begins_soon_after_another_is_told_when_it_lasts(
    said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Refusing("put", 1)
    calls = calls_with(refusing)

    async def later() -> None:
        if refusing.left == 1:
            pass_time(monkeypatch, TOLD_EVERY_S)

    async def story() -> None:
        await calls.put("a", b"x")
        refusing.left, refusing.meanwhile = 4, later
        await calls.put("b", b"x")

    run(story)
    assert said()[2] == "trying again, for 600 s at most: put b: no room"
    assert [line.partition(",")[0] for line in said()] == ["trying again", "the bucket answers again"] * 2


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize("verb", ["put", "put_new"])
def test_whoever_is_to_stop_waits_no_longer_because_others_are_answered(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.extract.calls.LAST_PATIENCE_S", 0.05)
    refusing = Refusing(verb, float("inf"))
    calls = calls_with(refusing, patience_s=60, asked=True)
    refusing.meanwhile = lambda: calls.read("other")

    async def write(path: str) -> None:
        if verb == "put":
            await calls.put(path, b"x")
        else:
            await calls.create_own(path, b"x", "me", lambda _: "me")

    with pytest.raises(Stopped):
        run(lambda: write("a"))
    # Once is enough: what ends afterwards does not wait as long again.
    monkeypatch.setattr("penstock.extract.calls.LAST_PATIENCE_S", 600)
    with pytest.raises(Stopped):
        run(lambda: write("b"))


@pytest.mark.usefixtures("said")
def test_a_bucket_that_stumbles_twice_is_waited_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the process was asked to stop long before the second time."""
    refusing = Refusing("put_new", 1)
    calls = calls_with(refusing, asked=True)

    async def story() -> None:
        assert await calls.create_own("a", b"x", "me", lambda _: "me")
        pass_time(monkeypatch, 100)
        refusing.left = 2
        assert await calls.create_own("b", b"x", "me", lambda _: "me")

    run(story)
    assert refusing.left == 0


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """For the loop's clock, at once."""
    loop = asyncio.get_running_loop()
    before = loop.time
    monkeypatch.setattr(loop, "time", lambda: before() + seconds)
