"""Checkpoints of another region: copied once, whole or not at all, and said how much and for how much."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.domain.catalogue_egress import egress_usd
from penstock.domain.nouns import Attempt, Pool, Rule
from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import ObjectsError
from penstock.server import checkpoints, jobs, transfers
from penstock.server.cleaning import Cleaner, Wanted, wanted_by
from penstock.server.regions import Root
from penstock.server.routing import Refusal
from penstock.wire.agent import Restorable, Saved, SavedFile
from penstock.wire.problems import KINDS
from tests.unit.server.log_shop import until
from tests.unit.server.plant import USER, Host, Plant, plant
from tests.unit.server.test_checkpoints import commit, name_of, put

HERE, THERE = "us-central1", "europe-west4"
REST_S = 600.0  #: longer than a job rests between two attempts
ONE, TWO = b"1" * 300, b"2" * 500


class Watched:
    """A bucket's faults: every call is written down, and one kind of call can be refused or held up."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.refused: tuple[str, str] = ("", "")
        self.left = 10**9  #: effects of that kind that still come about
        self.held: asyncio.Event | None = None
        self.waiting = 0  #: calls that are held up now

    async def before(self, verb: str, path: str) -> None:
        self.calls.append((verb, path))
        if self.held is not None and verb == "put_new":
            self.waiting += 1
            try:
                await self.held.wait()
            finally:
                self.waiting -= 1
        if self.refused[0] == verb and self.refused[1] in path:
            if self.left == 0:
                raise ObjectsError("refused")
            self.left -= 1

    async def after(self, verb: str, path: str) -> None:
        pass

    def of(self, verb: str, what: str) -> list[str]:
        return [path for called, path in self.calls if called == verb and what in path]


class Crowd:
    """How many read from a bucket at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def before(self, verb: str, path: str) -> None:
        if verb == "get":
            self.now += 1
            self.most = max(self.most, self.now)
            for _ in range(20):  # turns in which all who may come do come
                await asyncio.sleep(0)
            self.now -= 1

    async def after(self, verb: str, path: str) -> None:
        pass


class Scene:
    """A job whose first attempt saved in the main root, in Europe, and that goes on where another root is nearer."""

    def __init__(
        self, made: Plant, job: str, host: Host, attempts: tuple[Attempt, Attempt], near: MemoryObjects
    ) -> None:
        self.made, self.job, self.host, self.near = made, job, host, near
        self.first, self.second = attempts

    def ask(self, skip: int = 0) -> Any:
        return checkpoints.restore(self.made.service, self.host.call(self.second, query={"skip": str(skip)}))

    async def piece(self, data: bytes) -> object:
        query = {"job": self.job, "fence": str(self.first.fence), "rank": "0"}
        call = self.host.call(self.second, query=query, sha256=name_of(data))
        return (await checkpoints.get_piece(self.made.service, call)).body

    async def told(self) -> Attempt:
        return await self.made.attempt(self.second.id)

    def copies(self) -> list[str]:
        return [path.rpartition("/")[2] for path in self.near.paths() if "/pieces/" in path]

    def markers(self) -> list[str]:
        return [path for path in self.near.paths() if "/copied/" in path]


def a_list(number: int, *contents: bytes) -> Saved:
    files = [SavedFile(f"f{n}", len(each), 0o600, 1, (name_of(each),)) for n, each in enumerate(contents)]
    return Saved(number=number, files=tuple(files))


def run(story: Any, home: Path, *lists: tuple[bytes, ...], region: str = THERE, watched: Watched | None = None) -> None:
    async def play() -> None:
        async with plant(home) as made:
            zones = (f"{HERE}-a",)
            pool = Pool(
                name="us", team="lab", provider="local", accelerator="v5e-4", chips=0, hosts=0, zones=zones, max=4
            )
            await made.controller.commands.put_pool(pool)
            made.service.root_region = region
            job = await made.submit(on="v5e-4", rule=Rule(failure_budget=9))
            (host,) = await made.hosts("v5e-4")
            first = await host.launched()
            for number, contents in enumerate(lists or ((ONE, TWO),), 1):
                for data in contents:
                    await put(made, host, first, data)
                await commit(made, host, first, a_list(number, *contents))
            await host.exit(first, code=1)
            made.clock.skip(REST_S)
            near = MemoryObjects(faults=watched)
            made.service.region_roots = {HERE: near}
            await story(Scene(made, job, host, (first, await host.launched()), near))

    asyncio.run(play())


def test_it_is_copied_first_and_bytes_and_cost_are_said(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        reply = await scene.ask()
        assert [each.saved for each in reply.found] == [a_list(1, ONE, TWO)]
        assert sorted(scene.copies()) == sorted((name_of(ONE), name_of(TWO)))
        assert len(scene.markers()) == 1
        usd = egress_usd(THERE, HERE, 800)
        assert usd is not None
        copied = (await scene.told()).copied
        assert copied is not None
        assert (copied.source, copied.target, copied.size, copied.usd) == (THERE, HERE, 800, usd)
        assert copied.done_at is not None
        assert copied.done_at >= copied.begun_at
        assert reply.notes == (copied.told,)
        for path in scene.made.objects.paths():  # it is read where it was brought to, and nowhere else
            if "/pieces/" in path:
                await scene.made.objects.delete(path)
        assert await scene.piece(ONE) == ONE
        events = await scene.made.store.read(lambda reader: reader.events(0, 10_000))
        said = [(event.kind, event.body) for event in events if event.kind in ("attempt.copying", "attempt.copied")]
        body = {"source": THERE, "target": HERE, "bytes": 800, "usd": usd}
        assert said == [("attempt.copying", body), ("attempt.copied", body)]
        why = await jobs.why(scene.made.service, scene.made.user_call(scene.job))
        assert f"attempt {scene.second.fence}: {copied.told}" in why.details
        view = await jobs.get_job(scene.made.service, scene.made.user_call(scene.job))
        assert [each.copied for each in view.attempts] == [None, copied]

    run(story, tmp_path)


def test_a_price_that_nobody_knows_is_said_to_be_unknown(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        reply = await scene.ask()
        copied = (await scene.told()).copied
        assert copied is not None
        assert copied.usd is None
        assert "price unknown" in reply.notes[0]
        assert "$" not in reply.notes[0]

    run(story, tmp_path, region="")


def test_what_is_there_is_not_copied_again(tmp_path: Path) -> None:
    watched = Watched()

    async def story(scene: Scene) -> None:
        await scene.ask()
        assert len(watched.of("put_new", "/pieces/")) == 2
        before = len(watched.calls)
        reply = await scene.ask()
        assert reply.notes == ()
        assert len(reply.found) == 1
        assert not [call for call in watched.calls[before:] if call[0] in ("put", "put_new")]
        # Nor by a server that knows nothing of it.
        scene.made.service._parts.pop(transfers.Transfers)
        await scene.ask()
        assert len(watched.of("put_new", "")) == 3  # two pieces and the marker

    run(story, tmp_path, watched=watched)


@pytest.mark.parametrize("effects", [0, 1, 2])
def test_cut_off_anywhere_it_goes_on_and_sends_only_what_is_missing(tmp_path: Path, effects: int) -> None:
    watched = Watched()
    watched.refused, watched.left = ("put_new", ""), effects

    async def story(scene: Scene) -> None:
        with pytest.raises(ObjectsError):  # which is 503 to the host: it asks again
            await scene.ask()
        assert len(scene.copies()) == effects
        assert scene.markers() == [], "without its marker it is no copy"
        scene.made.service._parts.pop(transfers.Transfers)  # the server was killed
        watched.refused, watched.calls = ("", ""), []
        reply = await scene.ask()
        assert [each.saved for each in reply.found] == [a_list(1, ONE, TWO)]
        assert len(watched.of("put_new", "/pieces/")) == 2 - effects
        assert len(scene.markers()) == 1
        copied = (await scene.told()).copied
        assert copied is not None
        assert copied.size == 800

    run(story, tmp_path, watched=watched)


def test_hosts_that_ask_meanwhile_are_told_to_ask_again_and_share_one_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "HOLD_S", 0.01)
    watched = Watched()

    async def story(scene: Scene) -> None:
        watched.held = asyncio.Event()
        for _ in range(3):
            with pytest.raises(Refusal) as caught:
                await scene.ask()
            assert caught.value.problem.code == "copying"
            assert "800 bytes" in caught.value.problem.detail
        await until(lambda: watched.waiting > 0)  # the first byte is about to go
        copied = (await scene.told()).copied
        assert copied is not None
        assert copied.done_at is None, "how much it is was said before the first byte went"
        watched.held.set()
        monkeypatch.setattr(transfers, "HOLD_S", 20.0)
        replies = await asyncio.gather(*(scene.ask() for _ in range(3)))
        assert {len(reply.found) for reply in replies} == {1}
        assert len(watched.of("put_new", "/pieces/")) == 2

    run(story, tmp_path, watched=watched)


def test_a_copy_that_nobody_asks_for_any_more_stops_and_goes_on_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "HOLD_S", 0.01)
    monkeypatch.setattr(transfers, "UNWANTED_S", 0.05)
    watched = Watched()

    async def story(scene: Scene) -> None:
        watched.held = asyncio.Event()
        with pytest.raises(Refusal):
            await scene.ask()
        # However late this goes on, and be the copy stopped by now: nothing but a stop ends the calls that are held.
        copies = transfers.transfers(scene.made.service)
        await until(lambda: not copies._tasks and watched.waiting == 0)
        watched.held.set()
        assert (scene.copies(), scene.markers()) == ([], [])
        monkeypatch.setattr(transfers, "HOLD_S", 20.0)
        monkeypatch.setattr(transfers, "UNWANTED_S", 60.0)
        assert len((await scene.ask()).found) == 1
        assert len(scene.markers()) == 1

    run(story, tmp_path, watched=watched)


def brought(scene: Scene, job: str, source: MemoryObjects, *contents: bytes) -> Any:
    """What `bring` is asked for, without a host that asks."""
    found = (Restorable(job=job, fence=1, rank=0, saved=a_list(1, *contents)),)
    copies = transfers.transfers(scene.made.service)
    return copies.bring(scene.second, found, Root(THERE, source), Root(HERE, scene.near))


def test_pieces_under_way_are_counted_over_all_copies(tmp_path: Path) -> None:
    busy = Crowd()

    async def story(scene: Scene) -> None:
        source = MemoryObjects(faults=busy)
        contents = [b"%d" % number for number in range(transfers.AT_ONCE)]
        jobs = [f"j{number}" for number in range(5)]
        for job in jobs:
            for data in contents:
                await source.put(f"{transfers.checkpoints_of(job, 1)}0/pieces/{name_of(data)}", data)
        await asyncio.gather(*(brought(scene, job, source, *contents) for job in jobs))
        assert len(scene.copies()) == len(jobs) * len(contents)

    run(story, tmp_path)
    assert busy.most == transfers.AT_ONCE


def test_whoever_hears_late_of_a_failure_does_not_forget_the_copy_that_was_begun_since(tmp_path: Path) -> None:
    watched = Watched()
    watched.refused, watched.left = ("put_new", ""), 0

    async def story(scene: Scene) -> None:
        source = MemoryObjects()
        await source.put(f"{transfers.checkpoints_of('j1', 1)}0/pieces/{name_of(ONE)}", ONE)

        async def asks_again() -> object:
            with pytest.raises(ObjectsError):
                await brought(scene, "j1", source, ONE)
            watched.refused = ("", "")
            return await brought(scene, "j1", source, ONE)

        async def is_late() -> object:
            with pytest.raises(ObjectsError):
                await brought(scene, "j1", source, ONE)
            return await brought(scene, "j1", source, ONE)

        first, second = await asyncio.gather(asks_again(), is_late())
        assert first is second, "one copy served both"

    run(story, tmp_path, watched=watched)


def test_a_damaged_one_is_skipped_for_the_one_before(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        prefix = f"jobs/{scene.job}/checkpoints/{scene.first.fence}/0/"
        await scene.made.objects.put(f"{prefix}pieces/{name_of(TWO)}", b"not what was written")
        for _ in range(2):
            reply = await scene.ask()
            assert [each.saved for each in reply.found] == [a_list(1, ONE)]
            assert "is skipped" in reply.notes[0]
            assert "SHA-256" in reply.notes[0]
        assert name_of(TWO) not in scene.copies(), "what is not what its name says is not spread"
        assert (await scene.ask(skip=2)).found == ()

    run(story, tmp_path, (ONE,), (TWO,))


def test_what_the_next_attempt_saves_lies_in_its_own_region(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await put(scene.made, scene.host, scene.second, b"three")
        await commit(scene.made, scene.host, scene.second, a_list(1, b"three"))
        own = f"jobs/{scene.job}/checkpoints/{scene.second.fence}/0/"
        assert [path for path in scene.near.paths() if path.startswith(own)]
        assert not [path for path in scene.made.objects.paths() if path.startswith(own)]
        await scene.host.exit(scene.second, code=1)
        scene.made.clock.skip(REST_S)
        third = await scene.host.launched()
        reply = await checkpoints.restore(scene.made.service, scene.host.call(third))
        assert [(each.fence, each.saved) for each in reply.found] == [(scene.second.fence, a_list(1, b"three"))]
        assert (await scene.made.attempt(third.id)).copied is None

    run(story, tmp_path)


def test_cleaning_reaches_every_root(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await scene.ask()
        await scene.host.exit(scene.second, code=0)
        made = scene.made
        before = {kind: made.clock.now() + 10.0 for kind in wanted_by(made.service.settings.retention, 0.0).before}
        wanted = Wanted(before=before, forget_before=0.0, explicit=True)
        await Cleaner(made.service, made.service.commands(USER), None).part(wanted, "jobs:zzzzzzzzzzzzzzzzzz")
        assert not [path for path in scene.near.paths() if scene.job in path]
        assert not [path for path in made.objects.paths() if f"{scene.job}/checkpoints" in path]

    run(story, tmp_path)


def test_the_word_for_it_is_one_that_older_agents_wait_for() -> None:
    assert KINDS["copying"].status == 503
