"""The feed of the monitor: lists are read when an event says so, and a server that went away is taken up again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.cli import monitor_feed
from penstock.cli.monitor_feed import Feed
from penstock.cli.monitor_model import Board
from penstock.client.errors import ApiError
from penstock.wire import problems
from tests.unit.cli.monitor_desk import Desk, until
from tests.unit.cli.stand_in import chunk, job
from tests.unit.cli.test_monitor_model import NOW, event, queue, said, slice


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CALM_S", "AWAY_S", "CHOOSING_S"):
        monkeypatch.setattr(monitor_feed, name, 0.01)
    monkeypatch.setattr(monitor_feed, "PROGRESS_S", 0.05)


def play(story: Callable[[Desk, Feed], Awaitable[None]]) -> None:
    async def act() -> None:
        desk = Desk()
        desk.slices, desk.queues = [slice("s1", job="j1")], [queue()]
        desk.jobs = [job("j1"), job("j2", "queued"), job("j3", "failed")]
        feed = Feed(Board(NOW - 60), desk.connect, lambda: None)
        running = asyncio.create_task(feed.run())
        try:
            await until(lambda: feed.client is not None and desk.streams)
            await story(desk, feed)
            assert not running.done(), running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(act())


def test_everything_is_read_once_and_then_only_how_far_jobs_are() -> None:
    async def story(desk: Desk, feed: Feed) -> None:
        assert desk.streams == [{"follow": True, "since": NOW - 60}]
        frame = feed.board.frame(NOW)
        assert [row.id for row in frame.jobs] == ["j1", "j2", "j3"]
        desk.jobs[0] = job("j1", progress=said(50))
        looks = desk.asked["jobs running"]
        await until(lambda: desk.asked["jobs running"] > looks + 3)
        progress = feed.board.frame(NOW).jobs[0].progress
        assert progress is not None
        assert progress.done == 50
        assert {name: desk.asked[name] for name in ("slices", "queues", "jobs queued")} == {
            "slices": 1, "queues": 1, "jobs queued": 1,
        }  # fmt: skip

    play(story)


def test_an_event_has_its_list_read_and_no_other() -> None:
    async def story(desk: Desk, feed: Feed) -> None:
        desk.slices.append(slice("s2"))
        await desk.tell(event(1, "slice.ready", "s2"))
        await until(lambda: feed.board.frame(NOW).totals.slices == 2)
        assert (desk.asked["slices"], desk.asked["queues"], desk.asked["jobs queued"]) == (2, 1, 1)
        desk.jobs[1] = job("j2")
        await desk.tell(event(2, "job.started", "j2"))
        await until(lambda: feed.board.frame(NOW).totals.running == 2)
        assert desk.asked["slices"] == 2

    play(story)


def test_a_flood_of_events_is_read_once() -> None:
    async def story(desk: Desk, feed: Feed) -> None:
        before = desk.asked["jobs queued"]
        await desk.tell(*(event(seq, "job.created", f"j{seq}") for seq in range(1, 2000)))
        await until(lambda: feed.board.last_seq == 1999 and desk.asked["jobs queued"] > before)
        await asyncio.sleep(0.1)
        assert desk.asked["jobs queued"] <= before + 3

    play(story)


def test_a_server_that_goes_away_is_told_and_taken_up_behind_the_last_event() -> None:
    async def story(desk: Desk, feed: Feed) -> None:
        await desk.tell(event(1, "slice.preempted", "s1"))
        await until(lambda: feed.board.last_seq == 1)
        await desk.leave()
        await until(lambda: feed.board.away)
        assert feed.board.away == "the server does not answer: nobody there"
        assert feed.client is None
        assert feed.board.frame(NOW).totals.slices == 1, "what was known stays"
        clients = desk.clients
        desk.slices = [slice("s7"), slice("s8")]
        desk.events.append(event(2, "slice.preempted", "s8"))
        await until(lambda: desk.clients > clients + 1)  # it goes on trying, each time with what holds by then
        desk.away = False
        await until(lambda: not feed.board.away and feed.board.last_seq == 2)
        assert desk.streams[-1] == {"follow": True, "after": 1}
        frame = feed.board.frame(NOW)
        assert (frame.totals.slices, frame.totals.preemptions) == (2, 2)
        assert feed.client is not None

    play(story)


def test_a_refusal_later_on_is_shown_in_its_own_words() -> None:
    async def story(desk: Desk, feed: Feed) -> None:
        desk.refusal = ApiError(problems.problem("unauthenticated", "the token has run out"))
        await until(lambda: feed.board.away)
        assert feed.board.away == "the token has run out"
        desk.refusal = None
        await until(lambda: not feed.board.away)

    play(story)


def test_the_log_follows_the_selection() -> None:
    async def story(desk: Desk, feed: Feed) -> None:
        desk.logs = {"j1": [chunk("one\n")], "j2": [chunk("two\n")]}
        feed.select("j1")
        await until(lambda: feed.board.log.lines() == ("one",))
        desk.logs["j1"].append(chunk("more\n", offset=4))
        await desk.stir()
        await until(lambda: feed.board.log.lines() == ("one", "more"))
        feed.select("j2")
        await until(lambda: feed.board.log.lines() == ("two",))
        desk.logs["j1"].append(chunk("unseen\n", offset=9))
        await desk.stir()
        feed.select("gone")
        await until(lambda: feed.board.log.lines() == ("[job: there is no 'gone']",))
        feed.select(None)
        assert feed.board.log.lines() == ()
        assert desk.asked["logs j1"] == 1
        assert not feed.board.away, "one job that is gone is no reason to think the server is"

    play(story)


def test_a_selection_that_moves_on_at_once_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_feed, "CHOOSING_S", 0.2)

    async def story(desk: Desk, feed: Feed) -> None:
        desk.logs = {f"j{number}": [chunk("x\n")] for number in range(20)}
        for number in range(20):
            feed.select(f"j{number}")
            await asyncio.sleep(0)
        await until(lambda: feed.board.log.lines() == ("x",))
        assert [name for name in desk.asked if name.startswith("logs")] == ["logs j19"]

    play(story)


def test_the_log_comes_back_with_the_server() -> None:
    async def story(desk: Desk, feed: Feed) -> None:
        desk.logs = {"j1": [chunk("one\n")]}
        feed.select("j1")
        await until(lambda: feed.board.log.lines() == ("one",))
        await desk.leave()
        await until(lambda: feed.board.away)
        assert feed.board.log.lines() == ("one",)
        desk.away = False
        desk.logs["j1"].append(chunk("two\n", offset=4))
        await until(lambda: feed.board.log.lines() == ("one", "two"))

    play(story)


def test_with_nothing_running_it_still_notices_that_the_server_is_gone() -> None:
    async def story(desk: Desk, feed: Feed) -> None:
        desk.jobs = []
        await desk.tell(event(1, "job.succeeded", "j1"))
        await until(lambda: desk.asked["server"] > 1)
        await desk.leave()
        await until(lambda: feed.board.away)

    play(story)
