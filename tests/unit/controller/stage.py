"""A store, a clock and a few actors on which the controller's verbs are tried, without planner or provider.

Tests get a `Stage` from the fixture in `conftest.py`. When one ends, its counters are summed again from its rows, its
events are judged by the rules of `domain.invariants`, and its projection is compared with a rebuild.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from penstock.controller import attempts, slices
from penstock.controller.attempts import Placement
from penstock.controller.commands import Commands
from penstock.controller.projection import Projection
from penstock.controller.reports import hear
from penstock.domain.custody import Held, Phase, SyncReply, SyncRequest
from penstock.domain.ids import IdMaker
from penstock.domain.invariants import safety_capacity, safety_clients, safety_jobs
from penstock.domain.invariants.history import History
from penstock.domain.invariants.indexed import Indexed
from penstock.domain.lifecycle import LIVE_ATTEMPT_STATES, Cause
from penstock.domain.nouns import (
    Attempt,
    Event,
    Exit,
    Job,
    JobSpec,
    Pool,
    Queue,
    Resources,
    Slice,
    Team,
)
from penstock.planner.snapshot import QueueView, Snapshot
from penstock.ports.capacity import READY, Seen
from penstock.ports.store import Reader, Transaction
from penstock.store.doctor import sums
from penstock.store.sqlite import SqliteStore

T = TypeVar("T")
P = ParamSpec("P")
START = 1_000_000.0


class HandClock:
    """Both clocks stand still until the test moves them."""

    def __init__(self) -> None:
        self.time = START
        self.steady_s = 0.0

    def now(self) -> float:
        return self.time

    def steady(self) -> float:
        return self.steady_s

    def advance(self, seconds: float) -> None:
        self.time += seconds
        self.steady_s += seconds

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)


class Stage:
    """Team `lab` with queue `main`, and pools of one-host (`small`, 8 chips) and four-host (`big`, 16 chips) slices."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self._runner = asyncio.Runner()
        self.store = SqliteStore.inline(self.clock)
        self.ids = IdMaker(lambda: 0)
        self.commands = Commands(self.store.bound(actor="api"), self.clock, self.ids)
        self.projection = Projection(self.store)
        self.wait(self.commands.put_team(Team(name="lab")))
        self.wait(self.commands.put_queue(Queue(name="main", team="lab")))
        self.pool("small", "v5e-8")
        self.pool("big", "v5e-16")

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(call)

    def do(self, verb: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.wait(self.store.transact(verb, *args, **kwargs))

    def look(self, query: Callable[[Reader], T]) -> T:
        return self.wait(self.store.read(query))

    # --- what exists ---
    def pool(self, name: str, accelerator: str = "v5e-8", **changes: Any) -> Pool:
        wanted: dict[str, Any] = {"max": 1000, "zones": ("z1", "z2"), "team": "lab", "provider": "fake", **changes}
        return self.wait(self.commands.put_pool(Pool(name=name, accelerator=accelerator, chips=0, hosts=0, **wanted)))

    def submit(self, key: str | None = None, **changes: Any) -> str:
        return self.wait(self.commands.submit(self.spec(**changes), key)).id

    def spec(
        self, accelerator: str = "v5e-8", gang: int = 1, team: str = "lab", queue: str = "main", **changes: Any
    ) -> JobSpec:
        resources = Resources(accelerators=(accelerator,), chips=0, slices=gang)
        return JobSpec(team=team, queue=queue, resources=resources, **changes)

    def job(self, id: str) -> Job:
        found = self.look(lambda reader: reader.job(id))
        assert found is not None
        return found

    def attempt(self, id: str) -> Attempt:
        found = self.look(lambda reader: reader.attempt(id))
        assert found is not None
        return found

    def slice(self, id: str) -> Slice:
        found = self.look(lambda reader: reader.slice(id))
        assert found is not None
        return found

    def used(self, scope: str, name: str) -> int:
        quota = self.look(lambda reader: reader.quota(scope, name))
        return 0 if quota is None else quota.used_chips

    def events(self, id: str | None = None, kind: str = "") -> list[Event]:
        found = self.look(lambda reader: reader.events(0, 1_000_000))
        return [each for each in found if id in (None, each.id) and each.kind.startswith(kind)]

    def kinds(self, id: str) -> list[str]:
        return [each.kind for each in self.events(id)]

    # --- slices ---
    def intend(self, pool: str = "small", team: str = "lab", zones: Sequence[str] = ("z1",)) -> list[str]:
        now = self.clock.now()
        race = self.ids.make("race", now) if len(zones) > 1 else None
        wanted = [(self.ids.make("slice", now), zone) for zone in zones]
        self.do(slices.intend, pool, team, wanted, race)
        return [id for id, _ in wanted]

    def see(self, id: str, state: str = READY, provider_id: str | None = None) -> None:
        slice = self.slice(id)
        self.do(slices.observe, [seen(id, state, zone=slice.zone, provider_id=provider_id or f"vm-{id}")])

    def ready(self, pool: str = "small", team: str = "lab", zone: str = "z1") -> str:
        (id,) = self.intend(pool, team, (zone,))
        self.see(id)
        for host in range(self.slice(id).hosts):
            assert self.sync(id, host).welcome
        return id

    def drop(self, id: str) -> None:
        """Let a slice go and prove that it is gone."""
        self.do(slices.release, id, "test")
        self.do(slices.bury, id, ("test",))

    # --- attempts ---
    def place(self, job: str, *on: str, replica: int = 0, **changes: Any) -> str:
        if "chips" not in changes:
            changes["chips"] = sum(self.slice(id).chips for id in on)
        attempt = self.ids.make("attempt", self.clock.now())
        wanted: dict[str, Any] = {"band": 0, "borrowed": False, "backfilled": False, **changes}
        self.do(attempts.place_one, Placement(attempt=attempt, job=job, replica=replica, slices=on, **wanted))
        return attempt

    def started(self, pool: str = "small", **changes: Any) -> tuple[str, str, str]:
        """A running job: its id, its attempt's and its slice's."""
        job = self.submit(accelerator="v5e-8" if pool == "small" else "v5e-16", **changes)
        slice = self.ready(pool)
        return job, self.start(job, slice), slice

    def start(self, job: str, slice: str, replica: int = 0) -> str:
        """Place one replica on one slice and let all its hosts run."""
        attempt = self.place(job, slice, replica=replica)
        for host in range(self.slice(slice).hosts):
            self.report(slice, attempt, host, Phase.RUNNING)
        return attempt

    def sync(self, slice: str, host: int = 0, *held: Held, **changes: Any) -> SyncReply:
        return self.do(hear, request(slice, host, *held, **changes))

    def report(self, slice: str, attempt: str, host: int = 0, phase: Phase = Phase.EXITED, **said: Any) -> SyncReply:
        return self.sync(slice, host, held(self.attempt(attempt), phase, **said))

    def end(self, slice: str, attempt: str, code: int = 0, **said: Any) -> None:
        """All hosts of a one-slice attempt exit alike."""
        for host in range(self.slice(slice).hosts):
            self.report(slice, attempt, host, exit=Exit(host=host, code=code), **said)

    def close(self, attempt: str, cause: Cause = Cause.PREEMPTED, clean: bool = False) -> None:
        self.do(attempts.close, attempt, cause, ("test",), clean)

    # --- what must hold whatever happened ---
    def check(self) -> None:
        self.check_counters()
        self.check_rules()
        self.check_projection()

    def finish(self) -> None:
        self.wait(self.store.close())
        self._runner.close()

    def check_counters(self) -> None:
        live_slices = self.look(lambda reader: reader.live_slices())
        live = self.look(lambda reader: reader.live_attempts())
        must: Counter[tuple[str, str]] = Counter()
        must.update(sums(live_slices, live))
        for attempt in live:
            must["cohort", attempt.team] = sum(each.chips for each in live if each.team == attempt.team)
        quotas = self.look(lambda reader: reader.quotas())
        say = {(quota.scope, quota.name): quota.used_chips for quota in quotas if quota.used_chips}
        assert say == {counter: chips for counter, chips in must.items() if chips}

    def check_rules(self) -> None:
        history = Indexed(History(events=self.events()))
        for rule in (
            safety_jobs.s3_legal_transitions,
            safety_jobs.s4_terminal_absorbs,
            safety_jobs.s5_one_live_attempt,
            safety_jobs.s15_budgets_apart,
            safety_jobs.s16_one_effective_leader,
            safety_capacity.s10_one_user_per_slice,
            safety_capacity.s12_quota,
            safety_clients.s2_idempotent_submit,
            safety_clients.s13_cancel_wins,
        ):
            finding = rule(history)
            assert not finding.violations, finding.violations
        for attempt in self.look(lambda reader: reader.live_attempts()):
            assert attempt.state in LIVE_ATTEMPT_STATES
            assert self.job(attempt.job).chain(attempt.replica).live

    def check_projection(self) -> None:
        fresh = Projection(self.store)
        self.wait(fresh.catch_up())
        self.wait(self.projection.catch_up())
        kept, made = portrait(self.projection.snapshot), portrait(fresh.snapshot)
        for name in made:
            assert kept[name] == made[name], f"{name} differs"
        assert self.projection.cursor == fresh.cursor


def portrait(snapshot: Snapshot) -> dict[str, object]:
    """Every field of a snapshot but the witness, without what is empty: an absent key and a zero mean the same."""
    return {name: plain(value) for name, value in vars(snapshot).items() if name != "witness"}


def plain(value: object) -> object:
    if isinstance(value, QueueView):
        return plain(vars(value))
    if isinstance(value, dict):
        parts = {key: plain(each) for key, each in value.items()}
        return {key: each for key, each in parts.items() if each not in ({}, 0, None, ())}
    if isinstance(value, list):
        return tuple(plain(each) for each in value)
    return round(value, 3) if isinstance(value, float) else value


def seen(id: str, state: str = READY, zone: str = "z1", provider_id: str = "vm", label: str = "ours") -> Seen:
    return Seen(name=id, zone=zone, provider_id=provider_id, state=state, label=label)


def request(slice: str, host: int = 0, *holds: Held, **changes: Any) -> SyncRequest:
    made = SyncRequest(slice=slice, provider_id=f"vm-{slice}", host=host, incarnation=f"host-{host}", held=tuple(holds))
    return msgspec.structs.replace(made, **changes)


def held(attempt: Attempt, phase: Phase = Phase.RUNNING, **said: Any) -> Held:
    return Held(attempt=attempt.id, fence=attempt.fence, phase=phase, **said)
