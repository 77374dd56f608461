"""A journey's stage: the words in which a story submits, cancels, sets things up and breaks the world.

A journey is an async function that takes a `Stage`, decorated with `journey`. It runs the production controller in
virtual time; when it is over, the house comes to rest and all rules are checked over the whole history. Clients here
are careful ones: what they saw is recorded, and a submit whose answer was lost is repeated with its key.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from penstock.controller.commands import Commands
from penstock.domain import catalogue
from penstock.domain.admission import body_hash, normal_spec
from penstock.domain.lifecycle import LIVE_ATTEMPT_STATES, TERMINAL_JOB_STATES, Cause, JobState, SliceState
from penstock.domain.nouns import Attempt, Command, Job, JobSpec, Pool, Queue, Replicas, Resources, Rule, Team
from penstock.ports.store import StoreError, Unavailable
from penstock.sim.loop import run
from penstock.sim.points import Crash
from penstock.sim.processes import Behaviour
from tests.journeys.house import Behave, House, Try

__all__ = ["Behaviour", "Stage", "Try", "journey", "play"]

P = ParamSpec("P")
T = TypeVar("T")
TEAM = "lab"
QUEUE = "main"
RETRY_S = 1.0


class NobodyThere(Exception):
    """No controller is up."""


class Stage(House):
    """Team `lab` with queue `main`; pools are the story's own."""

    def __init__(self, controllers: Sequence[str]) -> None:
        super().__init__(controllers)
        self._calls = 0

    # --- operators ---

    async def set_up(self) -> None:
        await self.insist(lambda each: each.put_team(Team(name=TEAM)))
        await self.insist(lambda each: each.put_queue(Queue(name=QUEUE, team=TEAM)))

    async def insist(self, call: Callable[[Commands], Awaitable[T]]) -> T:
        """Repeat a harmless command until a controller has taken it."""
        while True:
            try:
                return await call(self._up())
            except (StoreError, Crash, NobodyThere):
                await self.sleep(RETRY_S)

    def _up(self) -> Commands:
        commands = self.commands()
        if commands is None:
            raise NobodyThere
        return commands

    async def pool(self, name: str = "pool", accelerator: str = "v5e-8", **fields: object) -> Pool:
        """Create or resize a pool; by default spot slices of `v5e-8` in one zone, at most one."""
        row = catalogue.find(accelerator)
        wanted = {
            "name": name, "accelerator": row.name, "team": TEAM, "provider": "fake", "zones": ("zone-a",),
            "spot": True, "chips": row.chips, "hosts": row.hosts, **fields,
        }  # fmt: skip
        pool = msgspec.convert(wanted, Pool)
        return await self.insist(lambda each: each.put_pool(pool))

    async def queue(self, name: str, **fields: object) -> Queue:
        queue = msgspec.convert({"name": name, "team": TEAM, **fields}, Queue)
        return await self.insist(lambda each: each.put_queue(queue))

    # --- users ---

    async def submit(
        self,
        accelerator: str = "v5e-8",
        *,
        behave: Behave | None = None,
        name: str = "",
        key: str | None = None,
        user: str = "user",
        slices: int = 1,
        replicas: tuple[int, int] = (1, 1),
        rule: Rule | None = None,
        **fields: object,
    ) -> str:
        """Submit a job that runs as `behave` says (a minute, by default); repeated until it is known to be taken."""
        name = name or f"job-{len(self.behaviours) + 1}"
        self.behaviours[name] = behave or Behaviour(duration_s=60.0, start_s=1.0)
        row = catalogue.find(accelerator)
        plain = JobSpec(
            team=TEAM,
            queue=QUEUE,
            resources=Resources(accelerators=(row.name,), chips=row.chips, slices=slices),
            payload=Command(("python", "train.py")),
            name=name,
            replicas=Replicas(*replicas),
            rule=rule or Rule(),
        )
        spec = msgspec.structs.replace(plain, **fields)
        return await self.submit_spec(spec, key or f"key of {name}", user)

    async def submit_spec(self, spec: JobSpec, key: str, user: str = "user") -> str:
        facts = {"key": key, "body_hash": body_hash(normal_spec(spec)), "team": spec.team}
        while True:
            call = self._invoke("submit", user, **facts)
            try:
                answer = await self._up().submit(spec, key)
            except Unavailable:
                self._note("submit.fail", user, call, error="unavailable", **facts)
            except (Crash, StoreError, NobodyThere):
                self._note("submit.unknown", user, call, **facts)
            else:
                self._note("submit.ok", user, call, job=answer.id, version=answer.version, **facts)
                return answer.id
            await self.sleep(RETRY_S)

    async def cancel(self, job: str, user: str = "user") -> str:
        """Cancel and answer what the user was told."""
        while True:
            call = self._invoke("cancel", user, job=job)
            try:
                answer = (await self._up().cancel(job))[0]
            except Unavailable:
                self._note("cancel.fail", user, call, job=job, error="unavailable")
            except (Crash, StoreError, NobodyThere):
                self._note("cancel.unknown", user, call, job=job)
            else:
                self._note("cancel.ok", user, call, job=job, answer=answer.answer, version=answer.version)
                return answer.answer
            await self.sleep(RETRY_S)

    async def read(self, job: str, user: str = "user") -> Job | None:
        call = self._invoke("read", user, job=job)
        try:
            found = await self._up().job(job)
        except Unavailable:
            self._note("read.fail", user, call, job=job, error="unavailable")
            return None
        facts: dict[str, object] = {"found": found is not None}
        if found is not None:
            facts |= {"version": found.version, "state": found.state.value}
        self._note("read.ok", user, call, job=job, **facts)
        return found

    def _invoke(self, what: str, user: str, **facts: object) -> int:
        self._calls += 1
        self.recorder.client(f"{what}.invoke", user, call=self._calls, **facts)
        return self._calls

    def _note(self, kind: str, user: str, call: int, **facts: object) -> None:
        self.recorder.client(kind, user, call=call, **facts)

    # --- what a story waits for ---

    def running(self, job: str) -> bool:
        """Its processes run now, not only by an earlier attempt's word."""
        return self.job(job).state is JobState.RUNNING

    def over(self, *jobs: str) -> bool:
        return all(self.job(job).state in TERMINAL_JOB_STATES for job in jobs)

    def live_attempt(self, job: str) -> Attempt:
        live = [each for each in self.attempts(job) if each.state in LIVE_ATTEMPT_STATES]
        assert len(live) == 1, f"{job} has {len(live)} live attempts"
        return live[0]

    def slices_of(self, job: str) -> list[str]:
        """Names of the slices the job's live attempt holds."""
        return [bound.slice for bound in self.live_attempt(job).slices]

    def causes(self, job: str) -> list[Cause | None]:
        """Why each attempt ended, oldest first; None for one that lives."""
        return [attempt.cause for attempt in self.attempts(job)]

    async def until_running(self, *jobs: str, within_s: float = 120.0) -> float:
        return await self.until(lambda: all(self.running(job) for job in jobs), within_s, f"{jobs} running")

    async def until_over(self, *jobs: str, within_s: float = 600.0) -> float:
        return await self.until(lambda: self.over(*jobs), within_s, f"the end of {jobs}")

    async def succeeds(self, *jobs: str, within_s: float = 600.0) -> None:
        await self.until_over(*jobs, within_s=within_s)
        for job in jobs:
            found = self.job(job)
            assert found.state is JobState.SUCCEEDED, f"{found.state}: {found.reason}\n{self.tell()}"

    async def until_gone(self, *slices: str, within_s: float = 600.0) -> float:
        gone = SliceState.GONE
        return await self.until(
            lambda: all(self.slice(id).state is gone for id in slices), within_s, "the end of slices"
        )


def journey(
    *, controllers: Sequence[str] = ("a",), proves: Sequence[str] = ()
) -> Callable[[Callable[Concatenate[Stage, P], Coroutine[Any, Any, None]]], Callable[P, None]]:
    """Make a test of a story. `proves` names rules that the story must have put to the test."""

    def made(story: Callable[Concatenate[Stage, P], Coroutine[Any, Any, None]]) -> Callable[P, None]:
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            run(play(lambda stage: story(stage, *args, **kwargs), controllers, proves))

        functools.update_wrapper(test, story)
        del test.__dict__["__wrapped__"]  # pytest would take the stage for a fixture
        signature = inspect.signature(story)
        test.__dict__["__signature__"] = signature.replace(parameters=list(signature.parameters.values())[1:])
        return test

    return made


async def play(
    story: Callable[[Stage], Awaitable[None]], controllers: Sequence[str] = ("a",), proves: Sequence[str] = ()
) -> Stage:
    """One story from its first word to its judgement."""
    stage = Stage(controllers)
    await stage.until(lambda: any(each.leading for each in stage.controllers.values()), 15.0, "a leader")
    await stage.set_up()
    await story(stage)
    await stage.end()
    unproven = [rule for rule in proves if not stage.premises[rule]]
    assert not unproven, f"the story never put {', '.join(unproven)} to the test"
    return stage
