"""The live screen, driven by keys without a terminal: what stands where at 80 and at 140 columns, and what keys do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static
from typing_extensions import override

from penstock.cli import monitor_feed
from penstock.cli.monitor_model import Board
from penstock.cli.monitor_screen import Monitor, Panel, Question
from tests.unit.cli.monitor_desk import Desk, until
from tests.unit.cli.stand_in import chunk, job
from tests.unit.cli.test_monitor_model import NOW, event, queue, said, slice

NARROW, WIDE = (80, 24), (140, 40)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CALM_S", "AWAY_S", "CHOOSING_S"):
        monkeypatch.setattr(monitor_feed, name, 0.01)
    monkeypatch.setattr(monitor_feed, "PROGRESS_S", 0.1)


class Driven(Monitor):
    """There is no terminal to give back; whom `ssh` was called with is kept."""

    def __init__(self, desk: Desk, board: Board) -> None:
        self.went_to: list[str] = []
        super().__init__(board, desk.connect, ssh=self.went_to.append, now=lambda: NOW)

    @override
    @contextmanager
    def suspend(self) -> Iterator[None]:
        yield


class Reader:
    """Whoever sits before the screen."""

    def __init__(self, app: Driven, pilot: Pilot[None], desk: Desk) -> None:
        self.app, self.pilot, self.desk = app, pilot, desk

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    def text(self) -> str:
        """What is on the screen, as plain lines."""
        lines = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in line).rstrip() for line in lines)

    async def sees(self, what: str) -> None:
        try:
            await until(lambda: what in self.text())
        except TimeoutError:
            raise AssertionError(f"{what!r} is not on the screen:\n{self.text()}") from None

    async def misses(self, what: str) -> None:
        try:
            await until(lambda: what not in self.text())
        except TimeoutError:
            raise AssertionError(f"{what!r} is still on the screen:\n{self.text()}") from None


@asynccontextmanager
async def reading(size: tuple[int, int]) -> AsyncIterator[Reader]:
    desk = Desk()
    desk.slices = [slice("s1", job="j1", user="ada"), slice("s2"), slice("s3", "z2", job="j2")]
    desk.jobs = [
        job("j1", name="resnet", created_at=NOW - 90, progress=said(25, samples=1500.0, shards=7.0)),
        job("j2", name="vit", created_at=NOW - 95),
        job("j3", "failed", name="broken", finished_at=NOW - 5),
    ]
    desk.queues = [queue(waiting=4)]
    desk.logs = {"j1": [chunk("log of one\n")], "j2": [chunk("log of two\n")], "j3": [chunk("log of three\n")]}
    desk.events = [event(1, "job.created", "j2")]
    board = Board(NOW - 60)
    board.put_slices(desk.slices)
    board.put_jobs(desk.jobs)
    app = Driven(desk, board)
    async with app.run_test(size=size, notifications=True) as pilot:
        reader = Reader(app, pilot, desk)
        await reader.sees("q leave")
        await reader.sees("log of one")
        yield reader


def play(size: tuple[int, int], story: Callable[[Reader], Awaitable[None]]) -> None:
    async def act() -> None:
        async with reading(size) as reader:
            await story(reader)

    asyncio.run(act())


def test_a_narrow_screen_shows_one_list_and_the_log() -> None:
    async def story(reader: Reader) -> None:
        await reader.sees("3 slices (2 busy, 1 free), 24 chips · jobs: 2 running, 4 queued")
        await reader.sees("all well · 1.5k samples · 7 shards")
        await reader.sees("z1: 1 busy, 1 free")
        await reader.sees("log of one")
        lines = reader.text().splitlines()
        assert all(len(line) <= 80 for line in lines)
        row = next(line for line in lines if line.startswith("s1 "))
        assert row.split() == ["s1", "busy", "resnet", "25%", "1.5k", "7", "2m00s", "-"]
        assert "JOB                NAME" not in reader.text()
        assert any(line.endswith("q leave") for line in lines[-2:])
        await reader.press("2")
        await reader.sees("JOB                NAME")
        assert "SLICE" not in reader.text()
        await reader.press("tab")
        await reader.sees("QUEUE ")
        await reader.press("4")
        await reader.sees("job.created")
        await reader.press("tab")
        await reader.sees("SLICE ")
        await reader.press("shift+tab")
        await reader.sees("job.created")

    play(NARROW, story)


def test_a_wide_screen_shows_all_of_it_and_a_resize_changes_that() -> None:
    async def story(reader: Reader) -> None:
        for what in ("SLICE ", "JOB                NAME", "QUEUE ", "job.created", "log of one"):
            await reader.sees(what)
        await reader.pilot.resize_terminal(*NARROW)
        await reader.misses("job.created")
        await reader.sees("SLICE ")
        assert all(len(line) <= 80 for line in reader.text().splitlines())

    play(WIDE, story)


def test_arrows_choose_whose_log_is_shown() -> None:
    async def story(reader: Reader) -> None:
        await reader.sees("log of one")
        await reader.press("down")  # a free slice
        await reader.misses("log of one")
        assert reader.app.selected is None
        await reader.press("down")  # over the heading of the next zone
        await reader.sees("log of two")
        await reader.sees("log of j2 (vit)")
        reader.desk.logs["j2"].append(chunk("and more\n", offset=11))
        await reader.desk.stir()
        await reader.sees("and more")

    play(NARROW, story)


def test_the_bar_stays_on_its_row_while_others_come_and_go() -> None:
    async def story(reader: Reader) -> None:
        await reader.press("down", "down")
        await reader.sees("log of two")
        reader.desk.slices = [slice("s0"), slice("s00", "z0"), *reader.desk.slices]
        await reader.desk.tell(event(2, "slice.ready", "s0"))
        await reader.sees("z0: 1 free")
        chosen = reader.app.query_one("#slices", Panel).chosen
        assert chosen is not None
        assert chosen.key == "s3"
        assert reader.app.selected == "j2"
        reader.desk.slices[-1] = slice("s3", "z2", state="preempted")
        await reader.desk.tell(event(3, "slice.preempted", "s3"))
        await reader.sees("1 broken")
        assert reader.app.selected == "j2", "the job that lost its slice is what one wants to see"
        await reader.sees("log of two")

    play(NARROW, story)


def test_cancel_asks_first() -> None:
    async def story(reader: Reader) -> None:
        await reader.press("c")
        await reader.sees("Stop j1 (resnet)?")
        await reader.press("n")
        await reader.misses("Stop j1")
        assert reader.desk.done == []
        await reader.press("c")
        await reader.sees("Stop j1 (resnet)?")
        await reader.press("y")
        await reader.sees("j1 cancelling")
        assert reader.desk.done == [("cancel", "j1")]

    play(NARROW, story)


def test_resume_is_for_jobs_that_have_ended() -> None:
    async def story(reader: Reader) -> None:
        await reader.press("r")
        await reader.sees("choose a job that has ended")
        await reader.press("2")
        await reader.sees("JOB                NAME")
        await reader.press("end")
        await reader.sees("log of three")
        await reader.press("c")
        await reader.sees("choose a job that has not ended")
        await reader.press("r")
        await until(lambda: isinstance(reader.app.screen, Question))
        await reader.press("y")
        await reader.sees("j3 goes on as j3x")
        assert reader.desk.done == [("resume", "j3")]

    play(NARROW, story)


def test_ssh_gets_the_slice_of_the_row() -> None:
    async def story(reader: Reader) -> None:
        await reader.sees("log of one")
        await reader.press("s")
        await reader.press("2")
        await reader.sees("JOB                NAME")
        await reader.press("down")
        await reader.sees("log of two")
        await reader.press("s")
        await reader.press("end", "s")
        await reader.sees("choose a slice")
        assert reader.app.went_to == ["s1", "s3"]

    play(NARROW, story)


def test_a_filter_narrows_as_it_is_typed() -> None:
    async def story(reader: Reader) -> None:
        await reader.press("slash")
        await until(lambda: isinstance(reader.app.focused, Input))
        await reader.press(*"z2")
        await reader.misses("z1: ")
        await reader.sees("only: z2")
        await reader.press("enter")
        await until(lambda: isinstance(reader.app.focused, OptionList))
        assert "s1 " not in reader.text()
        await reader.press("escape")
        await reader.sees("z1: 1 busy, 1 free")
        assert "only:" not in reader.text()

    play(NARROW, story)


def test_letters_of_keys_can_be_typed_into_the_filter() -> None:
    async def story(reader: Reader) -> None:
        await reader.press("slash")
        await until(lambda: isinstance(reader.app.focused, Input))
        await reader.press(*"qcrsl1")
        assert reader.app.words == "qcrsl1"
        assert reader.app.is_running
        assert reader.app.went_to == []

    play(NARROW, story)


def test_it_says_that_the_server_is_away_does_nothing_meanwhile_and_recovers() -> None:
    async def story(reader: Reader) -> None:
        await reader.desk.leave()
        await reader.sees("the server does not answer: nobody there")
        await reader.sees("z1: 1 busy, 1 free")
        await reader.press("c")
        await reader.sees("Stop j1 (resnet)?")
        await reader.press("y")
        await reader.sees("does not answer; nothing")
        assert reader.desk.done == []
        reader.desk.slices = [slice("s9", "z9")]
        reader.desk.away = False
        await reader.sees("z9: 1 free")
        await reader.sees("all well")

    play(NARROW, story)


def test_the_log_takes_most_of_the_screen_and_gives_it_back() -> None:
    async def story(reader: Reader) -> None:
        height = reader.app.query_one("#lines", Static).size.height
        await reader.press("l")
        await until(lambda: reader.app.query_one("#lines", Static).size.height > height + 5)
        await reader.press("l")
        await until(lambda: reader.app.query_one("#lines", Static).size.height == height)

    play(NARROW, story)


def test_what_a_job_wrote_is_not_taken_for_markup_or_colours() -> None:
    async def story(reader: Reader) -> None:
        reader.desk.logs["j1"].append(chunk("[red]x[/red] [/] \x1b[2J[b\n", offset=11))
        reader.desk.jobs[0] = job("j1", name="[bold]\x1b[31m[/]", created_at=NOW - 90)
        await reader.desk.stir()
        await reader.desk.tell(event(5, "job.edited", "j1"))
        await reader.sees("[red]x[/red] [/] \\x1b[2J[b")
        await reader.sees("log of j1 ([bold]\\x1b[31m[/])")
        await reader.press("c")
        await reader.sees("Stop j1 ([bold]\\x1b[31m[/])?")

    play(WIDE, story)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_leaving(key: str) -> None:
    async def story(reader: Reader) -> None:
        await reader.press(key)
        await until(lambda: not reader.app.is_running)
        assert reader.app.return_code == 0

    play(NARROW, story)
