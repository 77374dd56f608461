"""Workers, requeues and sweeps on one run in every order that chance finds: nothing that counts is ever lost.

The code is the product's: workers with their claims, commits and seals, `requeue` and `sweep`. Every object call waits
until it is chosen among all that wait, so a seed is one interleaving: the actor of the highest rank goes on, and ranks
change now and then, so that one may stand still between two calls while others do much. The clock is the number of
calls: leases run out in the middle of the work. Some actors are killed, some answers lost. What counts is read from the
bucket's bytes, by code that knows nothing of `penstock.extract`, at each delete and at the end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from penstock.extract.calls import Calls
from penstock.extract.plan import RunPlan, publish
from penstock.extract.seal import sweep
from penstock.extract.verify import requeue, verify
from penstock.extract.worker import Settings, Worker
from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import ObjectsError
from tests.process.extraction import cheap_compute, cheap_plan, check

T = TypeVar("T")

PLAN = cheap_plan(rows=11, unit_rows=6)
PIECES = {unit.id: list(cheap_compute()(PLAN, unit)) for unit in PLAN.units}
SEEDS, MORE_SEEDS = 120, 800
LEASE = 40.0  #: in calls of all actors: about as long as a unit takes when others are at work
CHANGES = 0.1  #: of all turns: then whoever would go on gets the lowest rank
LIVES, REQUEUES, SWEEPS = 2, 4, 5
LOSES = 0.01  #: of all answers
CALLS_MAX = 20_000  #: more than any of these stories takes


class Turns:
    """One call at a time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.calls = 0
        self._ranks: dict[str, float] = {}
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    async def turn(self, name: str) -> None:
        mine = asyncio.get_running_loop().create_future()
        self._ranks.setdefault(name, self.rng.random())
        self._waiting.append((name, mine))
        await mine

    def _rank(self, waiting: tuple[str, object]) -> float:
        return self._ranks[waiting[0]]

    async def give(self, tasks: list[asyncio.Task[None]], doomed: asyncio.Task[None] | None, at: int) -> None:
        """Until all tasks have ended; `doomed` is killed after so many calls."""
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if doomed is not None and self.calls == at:
                doomed.cancel()
            self._waiting = [(name, each) for name, each in self._waiting if not each.done()]
            if self._waiting:
                if self.rng.random() < CHANGES:
                    self._ranks[max(self._waiting, key=self._rank)[0]] = -self.calls
                next_ = max(self._waiting, key=self._rank)
                self._waiting.remove(next_)
                next_[1].set_result(None)
                self.calls += 1
                assert self.calls < CALLS_MAX, "they never come to an end"


class Hook:
    """Between an actor and the bucket."""

    def __init__(self, turns: Turns, name: str) -> None:
        self._turns = turns
        self._name = name

    async def before(self, verb: str, path: str) -> None:
        await self._turns.turn(self._name)

    async def after(self, verb: str, path: str) -> None:
        if self._turns.rng.random() < LOSES:
            raise ObjectsError(f"{verb} {path}: the answer was lost")


class Scene:
    """A bucket that is looked at whenever something in it is deleted."""

    def __init__(self, seed: int) -> None:
        self.turns = Turns(seed)
        self.wrong: list[str] = []
        self._manifests: dict[str, bytes] = {}
        self.bucket = MemoryObjects(on_change=self._changed, now=lambda: float(self.turns.calls))

    def calls(self, name: str) -> Calls:
        return Calls(self.bucket.by(name, Hook(self.turns, name)), random.Random(name), patience_s=1e9)

    def everything(self) -> dict[str, bytes]:
        return {path: stored.data for path in self.bucket.paths() if (stored := self.bucket.peek(path)) is not None}

    async def worker(self, name: str) -> None:
        settings = Settings(worker=name, lease_s=LEASE, look_s=0, hands=1, code="test")
        rng = random.Random(f"{name} {self.turns.rng.random()}")
        steady: Callable[[], float] = lambda: float(self.turns.calls)  # noqa: E731
        await Worker(self.calls(name), PLAN, lambda _, unit: PIECES[unit.id], settings, rng=rng, steady=steady).work()

    async def crew(self, name: str) -> None:
        """One worker after another."""
        for life in range(LIVES):
            await self.worker(f"{name}{life}")

    async def requeuer(self) -> None:
        calls, rng = self.calls("requeuer"), random.Random(self.turns.rng.random())
        for _ in range(REQUEUES):
            await self.turns.turn("requeuer")
            await requeue(calls, PLAN, rng.choice(PLAN.units).id, force=True)

    async def sweeper(self) -> None:
        for _ in range(SWEEPS):
            await self.turns.turn("sweeper")
            await sweep(self.calls("sweeper"), PLAN)

    def _changed(self, path: str, data: bytes | None, _generation: int, writer: str) -> None:
        kind = path.split("/")[2]
        if kind == "manifest" and data is not None:
            self._manifests[path] = data
        elif kind == "manifest" and commits_that_count(self.everything(), PLAN, self._manifests[path]):
            self.wrong.append(f"call {self.turns.calls}: {writer} deleted a manifest that counts")
        elif kind == "data" and data is None and path in data_that_counts(self.everything(), PLAN):
            self.wrong.append(f"call {self.turns.calls}: {writer} deleted {path}, which a commit that counts names")


def data_that_counts(objects: dict[str, bytes], plan: RunPlan) -> set[str]:
    """Of the commits that are not void."""
    commits = f"runs/{plan.run}/commits/"
    counting = [
        data
        for path, data in objects.items()
        if path.startswith(commits)
        and not path.startswith(f"{commits}void/")
        and path.replace("/commits/", "/commits/void/") not in objects
    ]
    return {each["path"] for data in counting for each in json.loads(data)["objects"]}


def commits_that_count(objects: dict[str, bytes], plan: RunPlan, manifest: bytes) -> bool:
    """Whether they are all that a manifest names."""
    named = {each["path"] for unit in json.loads(manifest)["units"] for each in unit["objects"]}
    return named <= data_that_counts(objects, plan)


async def story(seed: int) -> None:
    scene = Scene(seed)
    turns = scene.turns
    await publish(Calls(scene.bucket, random.Random(1)), PLAN)
    actors = [scene.crew("one"), scene.crew("two"), scene.requeuer(), scene.sweeper()]
    tasks = [asyncio.create_task(actor) for actor in actors]
    doomed = turns.rng.choice([None, *tasks])
    await turns.give(tasks, doomed, turns.rng.randrange(1, 200))
    for task in tasks:
        if task is not doomed or not task.cancelled():
            task.result()
    last = asyncio.create_task(scene.worker("last"))
    await turns.give([last], None, 0)
    last.result()
    assert scene.wrong == []
    check(scene.everything(), PLAN)
    checked = await verify(Calls(scene.bucket, random.Random(1)), PLAN)
    assert (checked.problems, checked.sealed, checked.garbage) == ((), True, 0)


async def inline(work: Callable[..., T], *words: Any, **more: Any) -> T:
    """As `asyncio.to_thread`, without a thread: what happens between two object calls happens at once."""
    return work(*words, **more)


@pytest.mark.parametrize(
    "seeds", [range(SEEDS), pytest.param(range(SEEDS, MORE_SEEDS), marks=pytest.mark.long)], ids=["some", "more"]
)
def test_nothing_that_counts_is_lost_in_any_order(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "to_thread", inline)
    monkeypatch.setattr("penstock.extract.calls.PAUSE_S", (0.0, 0.0))
    monkeypatch.setattr(logging.getLogger("penstock.extract.calls"), "disabled", True)  # it tells of each lost answer
    for seed in seeds:
        try:
            asyncio.run(story(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
