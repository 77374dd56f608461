"""The projection follows the event log to exactly what a rebuild gives, whatever was committed in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from penstock.controller import attempts, jobs, slices
from penstock.controller.jobs import KeyReused, NotFound
from penstock.controller.projection import Projection
from penstock.controller.verbs import Outdated
from penstock.domain import limits
from penstock.domain.admission import BadInput
from penstock.domain.custody import Phase
from penstock.domain.lifecycle import Cause
from penstock.domain.nouns import Exit, Member, Queue, Replicas, Rule, Team
from penstock.domain.policies import PRESETS
from penstock.ports.capacity import CREATING, DELETING, FAILED, PREEMPTED, READY
from penstock.ports.store import QuotaFull
from tests.unit.controller.stage import Stage, held, portrait, seen

REFUSALS = (Outdated, QuotaFull, BadInput, NotFound, KeyReused)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and pages so small that every edge of them is met."""
    monkeypatch.setattr(limits, "WINDOW_JOBS", 3)
    monkeypatch.setattr(limits, "EVENTS_PER_READ", 5)


def waiting(stage: Stage, queue: str = "main") -> tuple[list[str], int]:
    stage.wait(stage.projection.catch_up())
    view = stage.projection.snapshot.queues[queue]
    return [job.id for job in view.waiting], view.waiting_total


def test_the_window_holds_the_best_jobs_and_counts_the_rest(narrow: None, stage: Stage) -> None:
    made = [stage.submit() for _ in range(5)]
    assert waiting(stage) == (made[:3], 5)
    best = stage.submit(priority=9)
    assert waiting(stage) == ([best, *made[:2]], 6)
    stage.place(made[0], stage.ready())
    assert waiting(stage) == ([best, *made[1:3]], 5)
    stage.wait(stage.commands.cancel(best))
    assert waiting(stage) == (made[1:4], 4)


def test_an_edited_priority_moves_a_job_in_and_out_of_the_window(narrow: None, stage: Stage) -> None:
    made = [stage.submit() for _ in range(5)]
    assert waiting(stage)[0] == made[:3]
    stage.wait(stage.commands.set_priority(made[4], 5))
    assert waiting(stage)[0] == [made[4], *made[:2]]
    stage.wait(stage.commands.set_priority(made[0], -5))
    assert waiting(stage)[0] == [made[4], *made[1:3]]
    assert waiting(stage)[1] == 5


def test_a_job_behind_the_window_does_not_make_it_read_again(narrow: None, stage: Stage) -> None:
    made = [stage.submit() for _ in range(4)]
    waiting(stage)
    window = stage.projection.snapshot.queues["main"].waiting
    last = stage.submit()
    assert waiting(stage) == (made[:3], 5)
    assert stage.projection.snapshot.queues["main"].waiting is window
    stage.wait(stage.commands.cancel(last))
    assert waiting(stage) == (made[:3], 4)


def test_a_blocked_job_is_outside_until_it_is_freed(stage: Stage) -> None:
    first, attempt, slice = stage.started()
    blocked = stage.submit(after=(first,))
    assert waiting(stage) == ([], 0)
    stage.wait(stage.commands.set_priority(blocked, 3))
    assert waiting(stage) == ([], 0)
    stage.end(slice, attempt)
    assert waiting(stage) == ([blocked], 1)


def test_a_job_queued_again_returns_outside_the_window(stage: Stage) -> None:
    job, attempt, _ = stage.started()
    stage.close(attempt, Cause.PREEMPTED)
    assert waiting(stage) == ([], 0)
    view = stage.projection.snapshot.queues["main"]
    assert list(view.returning) == [job]
    stage.wait(stage.commands.cancel(job))
    waiting(stage)
    assert not view.returning


def test_a_purged_job_is_dropped(stage: Stage) -> None:
    job, attempt, slice = stage.started()
    waiting(stage)
    stage.end(slice, attempt)
    stage.clock.advance(limits.RETENTION_S + 1)
    assert stage.wait(stage.commands.purge([job], stage.clock.now() - limits.RETENTION_S)) == 1
    waiting(stage)
    assert job not in stage.projection.snapshot.jobs
    assert attempt not in stage.projection.snapshot.attempts


def test_nothing_new_costs_nothing(stage: Stage) -> None:
    stage.submit()
    waiting(stage)
    snapshot, cursor = stage.projection.snapshot, stage.projection.cursor
    waiting(stage)
    assert (stage.projection.snapshot, stage.projection.cursor) == (snapshot, cursor)


def test_forgotten_events_make_it_start_anew(stage: Stage) -> None:
    stage.submit()
    waiting(stage)
    job, _, _ = stage.started()
    stage.submit()
    stage.do(lambda tx: tx.forget_events(tx.last_seq() - 1))
    stage.wait(stage.projection.catch_up())
    assert list(stage.projection.snapshot.jobs) == [job]
    fresh = Projection(stage.store)
    stage.wait(fresh.catch_up())
    assert portrait(stage.projection.snapshot) == portrait(fresh.snapshot)
    # The log no longer begins at version 1, so the rules of `check` cannot replay it.
    stage.check = stage.check_counters  # type: ignore[method-assign]


def test_a_reset_keeps_the_witness_and_reads_everything(stage: Stage) -> None:
    stage.started()
    waiting(stage)
    witness = stage.projection.snapshot.witness
    before = portrait(stage.projection.snapshot)
    stage.projection.reset()
    waiting(stage)
    assert stage.projection.snapshot.witness is witness
    assert portrait(stage.projection.snapshot) == before


class Walk:
    """A random sequence of everything that may be committed."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage = stage
        self.dice = random.Random(seed)
        self.steps: list[Callable[[], object]] = [
            self.submit, self.submit, self.place, self.place, self.place, self.sync, self.sync, self.sync, self.sync,
            self.intend, self.observe, self.observe, self.join, self.join, self.close, self.stop, self.fence,
            self.cancel, self.edit, self.finish, self.refuse, self.drain, self.release, self.bury, self.sweep,
            self.operate, self.again, self.pass_time,
        ]  # fmt: skip

    def step(self) -> None:
        try:
            self.dice.choice(self.steps)()
        except REFUSALS:
            return

    def one(self, query: Callable[[Any], list[Any]]) -> Any:
        found = self.stage.look(query)
        if not found:
            raise Outdated("nothing there")
        return self.dice.choice(found)

    def any_job(self) -> str:
        """Mostly one that lives."""
        states = ("queued", "provisioning", "running") if self.dice.random() < 0.8 else ()
        return str(self.one(lambda reader: reader.jobs_page(team=None, states=states, after=None, limit=30)).id)

    def slice(self, *states: str) -> Any:
        return self.one(
            lambda reader: [each for each in reader.live_slices() if not states or each.state.value in states]
        )

    def submit(self) -> None:
        dice = self.dice
        changes: dict[str, Any] = {}
        if dice.random() < 0.3:
            changes["replicas"] = Replicas(1, dice.randint(1, 3))
        elif dice.random() < 0.3:
            changes["gang"] = 2
        if dice.random() < 0.3:
            live = self.one(
                lambda reader: reader.jobs_page(team=None, states=("queued", "running"), after=None, limit=9)
            )
            changes["after"] = (live.id,)
        if dice.random() < 0.3:
            changes["member"] = Member(array=dice.choice("ab"), index=0, at_most=dice.randint(1, 3))
        rule = Rule(
            preset=dice.choice(sorted(PRESETS)), failure_budget=dice.randint(0, 2), infra_budget=dice.randint(0, 3)
        )
        self.stage.submit(
            dice.choice((None, None, "a", "b")),
            queue=dice.choice(("main", "second")),
            priority=dice.randint(-2, 2),
            rule=rule,
            **changes,
        )

    def place(self) -> None:
        job = self.stage.job(self.any_job())
        free = self.stage.look(lambda reader: [each.id for each in reader.live_slices() if each.usable])
        on = self.dice.sample(free, min(len(free), job.spec.resources.slices))
        # The lowest replica that is not live, sometimes any: so that several run at once.
        vacant = [index for index in range(job.spec.replicas.max) if not job.chain(index).live]
        replica = vacant[0] if vacant else self.dice.randrange(job.spec.replicas.max)
        self.stage.place(job.id, *on, replica=replica)

    def sync(self) -> None:
        attempt = self.one(lambda reader: reader.live_attempts())
        phase = self.dice.choice(list(Phase))
        exit = None
        if phase is Phase.EXITED:
            exit = Exit(host=0, code=self.dice.choice((0, 0, 0, 1)))
        bound = self.dice.choice(attempt.slices)
        report = held(attempt, phase, exit=exit, open_units=self.dice.choice((None, 0, 1, 2, 3)))
        self.stage.sync(bound.slice, 0, report, notice=self.dice.random() < 0.05)

    def intend(self) -> None:
        self.stage.intend("small", zones=self.dice.choice((("z1",), ("z2",), ("z1", "z2"))))

    def observe(self) -> None:
        state = self.dice.choice((CREATING, READY, READY, READY, READY, READY, PREEMPTED, FAILED, DELETING))
        self.stage.see(self.slice().id, state)

    def join(self) -> None:
        self.stage.see(self.slice("intended", "creating").id, READY)
        incarnation = "host-0" if self.dice.random() < 0.95 else "another"
        self.stage.sync(self.slice("creating").id, 0, incarnation=incarnation)

    def close(self) -> None:
        attempt = self.one(lambda reader: reader.live_attempts())
        causes = [Cause.PREEMPTED, Cause.INFRA, Cause.LOST, Cause.USER_ERROR]
        if self.stage.job(attempt.job).cancel_at is not None:
            causes = [Cause.CANCELLED]
        self.stage.close(attempt.id, self.dice.choice(causes), clean=self.dice.random() < 0.7)

    def stop(self) -> None:
        attempt = self.one(lambda reader: reader.live_attempts())
        self.stage.do(attempts.stop, attempt.id, self.dice.choice(("reclaimed", "timeout", "replica")))

    def fence(self) -> None:
        attempt = self.one(lambda reader: reader.live_attempts())
        self.stage.do(attempts.raise_fence, attempt.id)
        self.stage.do(attempts.fenced, attempt.id)

    def cancel(self) -> None:
        self.stage.wait(self.stage.commands.cancel(self.any_job()))

    def edit(self) -> None:
        self.stage.wait(self.stage.commands.set_priority(self.any_job(), self.dice.randint(-3, 3)))

    def finish(self) -> None:
        if self.dice.random() < 0.2:
            self.stage.do(jobs.finish, self.any_job(), False, "no pool has it")

    def refuse(self) -> None:
        self.stage.do(slices.refuse, self.slice("intended", "creating").id, "stockout", None)

    def drain(self) -> None:
        self.stage.do(slices.drain, self.slice("ready").id, "test")

    def release(self) -> None:
        self.stage.do(slices.release, self.slice("draining", "preempted", "failed", "ready").id, "test")

    def bury(self) -> None:
        self.stage.do(slices.bury, self.slice("deleting").id, ("test",))

    def sweep(self) -> None:
        gone = self.one(lambda reader: reader.tombstones(0))
        self.stage.do(slices.sweep, "fake", seen(gone.id))

    def operate(self) -> None:
        dice, commands = self.dice, self.stage.commands
        match dice.randrange(6):
            case 0:
                chips = dice.choice((None, 8, 64))
                queue = Queue(name="second", team="lab", quota_chips=chips, weight=dice.choice((1.0, 2.0)))
                self.stage.wait(commands.put_queue(queue))
            case 1:
                self.stage.pool("small", max=dice.randint(0, 6))
            case 2:
                self.stage.wait(commands.put_team(Team(name="lab", chip_limit=dice.choice((None, 16, 64)))))
            case 3:
                self.stage.wait(commands.limit_provider("fake", dice.choice((None, 32, 64))))
            case 4:
                self.stage.wait(commands.set_maintenance(dice.random() < 0.1))
            case _:
                self.stage.wait(commands.delete_pool("big"))

    def again(self) -> None:
        call = self.dice.choice((self.stage.commands.resume, self.stage.commands.rerun))
        self.stage.wait(call(self.any_job()))

    def pass_time(self) -> None:
        self.stage.clock.advance(self.dice.choice((1.0, 30.0, 100.0)))


@pytest.mark.parametrize("seed", range(40))
def test_after_any_walk_the_projection_equals_a_rebuild(narrow: None, stage: Stage, seed: int) -> None:
    stage.wait(stage.commands.put_queue(Queue(name="second", team="lab")))
    walk = Walk(stage, seed)
    for number in range(150):
        walk.step()
        if walk.dice.random() < 0.5:
            stage.wait(stage.projection.catch_up())
        if number % 10 == 9:
            stage.check_projection()
            stage.check_counters()


def test_the_walks_go_somewhere(stage: Stage) -> None:
    """The walks above prove nothing if they are all refused at the door."""
    stage.wait(stage.commands.put_queue(Queue(name="second", team="lab")))
    for seed in (1, 2):
        walk = Walk(stage, seed)
        for _ in range(2000):
            walk.step()
    kinds = {event.kind for event in stage.events()}
    assert kinds >= {
        "job.succeeded", "job.failed", "job.cancelled", "job.requeued", "job.replica_closed", "job.unblocked",
        "job.released", "job.fence_raised", "job.progressed", "attempt.started", "attempt.closed", "slice.bound",
        "slice.swept", "slice.preempted", "slice.gone", "zone.learned", "pool.deleted", "control.edited",
    }  # fmt: skip
