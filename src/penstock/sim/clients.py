"""The users of a simulated installation: they submit, cancel, read and now and then set things, and note what they saw.

Each call is recorded with its outcome: ok, fail, or unknown when the process behind it died or its answer was lost.
An unknown submit is repeated with the same key until it is known, as a careful client would.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec

from penstock.controller.commands import Commands
from penstock.controller.jobs import KeyReused, NotFound
from penstock.domain.admission import BadInput, body_hash, normal_spec
from penstock.domain.budgets import Budget
from penstock.domain.invariants.history import Recorder
from penstock.domain.nouns import JobSpec, Pool, Queue, Reservation, Team
from penstock.ports.store import StoreError, Unavailable
from penstock.sim.points import Crash
from penstock.sim.scenario import JobPlan, Scenario

T = TypeVar("T")


class NobodyThere(Exception):
    """No controller is up."""


class Clients:
    """All users of one seed; `commands` answers whichever controller is up now."""

    def __init__(
        self,
        scenario: Scenario,
        recorder: Recorder,
        rng: random.Random,
        commands: Callable[[], Commands | None],
        submitted: Callable[[str, JobPlan], None],
    ) -> None:
        self._scenario = scenario
        self._recorder = recorder
        self._rng = rng
        self._commands = commands
        self._submitted = submitted
        self._calls = 0
        self._extra_pools: list[str] = []
        self.jobs: list[str] = []

    async def set_up(self) -> None:
        """Teams, queues and pools exist before the first job; repeated until each is taken."""
        for team in self._scenario.teams:
            await self._insist(partial(_put_team, team))
        for queue in self._scenario.queues:
            await self._insist(partial(_put_queue, queue))
        for pool in self._scenario.pools:
            await self._insist(partial(_put_pool, pool))
        chips = self._scenario.provider_chips
        await self._insist(lambda each: each.limit_provider("fake", chips))
        await self._insist(lambda each: each.set_maintenance(False))
        for name in self._extra_pools:
            await self._insist(partial(_delete_pool, name))

    async def _insist(self, call: Callable[[Commands], Awaitable[T]]) -> T:
        while True:
            try:
                return await call(self._up())
            except (StoreError, Crash, NobodyThere):
                await asyncio.sleep(1.0)

    def _up(self) -> Commands:
        commands = self._commands()
        if commands is None:
            raise NobodyThere
        return commands

    async def submit(self, plan: JobPlan) -> None:
        """One user's job from submit to its end or cancel."""
        await asyncio.sleep(max(0.0, plan.at_s - asyncio.get_running_loop().time()))
        client = f"user-{self._rng.randrange(4)}"
        job = await self._submit(client, plan)
        if job is None:
            return
        if plan.cancel_after_s is not None:
            await asyncio.sleep(plan.cancel_after_s)
            await self._cancel(client, job)

    async def _submit(self, client: str, plan: JobPlan) -> str | None:
        digest = body_hash(normal_spec(plan.spec))
        facts = {"key": plan.key, "body_hash": digest, "team": plan.spec.team}
        for _ in range(200):
            call = self._invoke("submit", client, **facts)
            try:
                answer = await self._up().submit(plan.spec, plan.key)
            except KeyReused:
                self._end("submit.fail", client, call, error="conflict", **facts)
                return None
            except Unavailable:
                self._end("submit.fail", client, call, error="unavailable", **facts)
            except (Crash, NobodyThere, StoreError):
                self._end("submit.unknown", client, call, **facts)
                if plan.key is None:
                    return None  # it may or may not exist: without a key nobody can tell
            else:
                self._end("submit.ok", client, call, job=answer.id, version=answer.version, **facts)
                if answer.id not in self.jobs:
                    self.jobs.append(answer.id)
                self._submitted(answer.id, plan)
                return answer.id
            await asyncio.sleep(self._rng.uniform(0.5, 5.0))
        return None

    async def _cancel(self, client: str, job: str) -> None:
        for _ in range(200):
            call = self._invoke("cancel", client, job=job)
            try:
                answer = (await self._up().cancel(job))[0]
            except Unavailable:
                self._end("cancel.fail", client, call, job=job, error="unavailable")
            except NotFound:
                self._end("cancel.fail", client, call, job=job, error="not found")
                return
            except (Crash, NobodyThere, StoreError):
                self._end("cancel.unknown", client, call, job=job)
            else:
                self._end("cancel.ok", client, call, job=job, answer=answer.answer, version=answer.version)
                return
            await asyncio.sleep(self._rng.uniform(0.5, 5.0))

    async def meddle(self, until_s: float) -> None:
        """Reads, edits, key reuse, bursts and operators' changes at random, until the first phase ends."""
        loop = asyncio.get_running_loop()
        actions = (
            self._read,
            self._read,
            self._read,
            self._edit,
            self._reuse_key,
            self._operate,
            self._burst,
            self._again,
        )
        while loop.time() < until_s:
            await asyncio.sleep(self._rng.expovariate(1 / 20.0))
            try:
                await self._rng.choice(actions)()
            except (Crash, NobodyThere, StoreError):
                continue  # an outcome that nobody needs to know

    async def _read(self) -> None:
        if self.jobs:
            await self.read(f"user-{self._rng.randrange(4)}", self._rng.choice(self.jobs))

    async def read(self, client: str, id: str) -> None:
        call = self._invoke("read", client, job=id)
        try:
            job = await self._up().job(id)
        except Unavailable:
            self._end("read.fail", client, call, job=id, error="unavailable")
        except (Crash, NobodyThere, StoreError):
            self._end("read.unknown", client, call, job=id)
        else:
            if job is None:
                self._end("read.ok", client, call, job=id, found=False)
            else:
                self._end("read.ok", client, call, job=id, found=True, version=job.version, state=job.state.value)

    async def _edit(self) -> None:
        if not self.jobs:
            return
        job = self._rng.choice(self.jobs)
        try:
            if self._rng.random() < 0.5:
                await self._up().set_priority(job, self._rng.randint(-5, 20))
            else:
                await self._up().tag(job, ("seen", f"n{self._rng.randrange(9)}"))
        except (BadInput, NotFound):
            return

    async def _reuse_key(self) -> None:
        """The same key with another body must be refused; with the same body it is the same job."""
        known = [plan for plan in self._scenario.jobs if plan.key is not None and plan.nature == "well"]
        if not known:
            return
        plan = self._rng.choice(known)
        if plan.at_s > asyncio.get_running_loop().time():
            return
        other = self._rng.random() < 0.5
        spec = plan.spec if not other else _renamed(plan)
        digest = body_hash(normal_spec(spec))
        facts = {"key": plan.key, "body_hash": digest, "team": spec.team}
        call = self._invoke("submit", "user-9", **facts)
        try:
            answer = await self._up().submit(spec, plan.key)
        except KeyReused:
            self._end("submit.fail", "user-9", call, error="conflict", **facts)
        except Unavailable:
            self._end("submit.fail", "user-9", call, error="unavailable", **facts)
        except (Crash, NobodyThere, StoreError):
            self._end("submit.unknown", "user-9", call, **facts)
        else:
            self._end("submit.ok", "user-9", call, job=answer.id, version=answer.version, **facts)
            if answer.id not in self.jobs:
                self.jobs.append(answer.id)
                self._submitted(answer.id, plan)

    async def _operate(self) -> None:
        """What an operator does now and then; everything is put back at heal."""
        match self._rng.randrange(6):
            case 0:
                await self._up().set_maintenance(True)
                await asyncio.sleep(self._rng.uniform(5.0, 60.0))
                await self._insist(lambda each: each.set_maintenance(False))
            case 1:
                pool = self._rng.choice(self._scenario.pools)
                if pool.per_zone is None:
                    await self._up().put_pool(_resized(pool, self._rng.randint(max(1, pool.min), 6)))
            case 2:
                await self._restrict(self._rng.choice(self._scenario.queues))
            case 3:
                await self._up().purge(self.jobs[:20], 0.0)
            case 4:
                extra = _resized(self._scenario.pools[0], 1, name=f"extra-{self._rng.randrange(3)}")
                self._extra_pools.append(extra.name)
                await self._up().put_pool(extra)
                await asyncio.sleep(self._rng.uniform(1.0, 200.0))
                await self._insist(partial(_delete_pool, extra.name))
            case _:
                await self._up().put_team(self._rng.choice(self._scenario.teams))

    async def _restrict(self, queue: Queue) -> None:
        """A queue as it was, or for a while without a budget to spend; or a pool that one user keeps to himself."""
        now = asyncio.get_running_loop().time()
        turn, spell_s = int(now) % 3, 5.0 + now % 50.0  # not drawn: the other faults of a seed stay where they are
        if turn == 1:
            await self._up().put_queue(msgspec.structs.replace(queue, budget=Budget(limit=0.0)))
            await asyncio.sleep(spell_s)
        elif turn == 2:
            pool = self._scenario.pools[0].name
            claim = Reservation(user="one", since=now, until=now + 3600.0)
            await self._up().reserve_pool(pool, claim, None)
            await asyncio.sleep(spell_s)
            await self._insist(partial(_release_pool, pool))
        await self._insist(partial(_put_queue, queue))

    async def _burst(self) -> None:
        """W2 in small: a batch of short jobs at once, and all of them cancelled at once soon after."""
        if self._rng.random() > 0.15:
            return
        plan = self._scenario.plain_job()
        self._recorder.world("fault", "W2", what="burst")
        answers = await self._up().submit_many([(_renamed(plan), None)] * 40)
        for answer in answers:
            self.jobs.append(answer.id)
            self._submitted(answer.id, plan)
        await asyncio.sleep(self._rng.uniform(0.0, 60.0))
        await self._insist(lambda each: each.cancel(*[answer.id for answer in answers]))

    async def _again(self) -> None:
        if self.jobs:
            job = self._rng.choice(self.jobs)
            try:
                answer = await (self._up().resume if self._rng.random() < 0.5 else self._up().rerun)(job)
            except (BadInput, NotFound):
                return
            self.jobs.append(answer.id)

    def _invoke(self, what: str, client: str, **facts: object) -> int:
        self._calls += 1
        self._recorder.client(f"{what}.invoke", client, call=self._calls, **facts)
        return self._calls

    def _end(self, kind: str, client: str, call: int, **facts: object) -> None:
        self._recorder.client(kind, client, call=call, **facts)


async def _put_team(team: Team, commands: Commands) -> None:
    await commands.put_team(team)


async def _put_queue(queue: Queue, commands: Commands) -> None:
    await commands.put_queue(queue)


async def _release_pool(name: str, commands: Commands) -> None:
    await commands.reserve_pool(name, None, None)


async def _put_pool(pool: Pool, commands: Commands) -> None:
    await commands.put_pool(pool)


async def _delete_pool(name: str, commands: Commands) -> None:
    with contextlib.suppress(NotFound):  # making it may have failed
        await commands.delete_pool(name)


def _renamed(plan: JobPlan) -> JobSpec:
    return msgspec.structs.replace(plan.spec, name="another", after=())


def _resized(pool: Pool, slices: int, name: str | None = None) -> Pool:
    return msgspec.structs.replace(pool, max=max(slices, pool.min), name=name or pool.name)
