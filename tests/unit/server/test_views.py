"""Nouns as people see them: what an exit code, a cost and a moment of a job are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.domain.lifecycle import AttemptState, Cause, JobState
from penstock.domain.nouns import (
    Attempt,
    Bound,
    Chain,
    Command,
    Exit,
    Job,
    JobSpec,
    Pool,
    Resources,
    Rule,
    Save,
    Slice,
    Snippet,
    StopOrder,
    Task,
)
from penstock.server import views
from penstock.wire.api import ProgressView


def an_attempt(id: str = "a1", fence: int = 1, **changes: Any) -> Attempt:
    wanted: dict[str, Any] = {
        "id": id, "job": "j1", "replica": 0, "fence": fence, "team": "lab", "queue": "q", "chips": 8,
        "slices": (Bound("s1", "vm"),), "hosts": 1, "created_at": 100.0, "timeout_s": 60.0, **changes,
    }  # fmt: skip
    return Attempt(**wanted)


def a_slice(id: str = "s1", pool: str = "p", provider: str = "tpu_vm", chips: int = 8) -> Slice:
    return Slice(
        id=id, team="lab", pool=pool, provider=provider, zone="z", accelerator="v5e-8", chips=chips, hosts=1,
        intended_at=0.0,
    )  # fmt: skip


def a_pool(price: float | None) -> Pool:
    return Pool(
        name="p", team="lab", provider="tpu_vm", accelerator="v5e-8", chips=8, hosts=1, zones=("z",),
        usd_per_chip_hour=price,
    )  # fmt: skip


def a_job(**changes: Any) -> Job:
    payload = changes.pop("payload", Snippet("x = 1"))
    spec = JobSpec(team="lab", queue="q", resources=Resources(accelerators=("v5e-8",), chips=8), payload=payload)
    return Job(id="j1", spec=spec, state=JobState.RUNNING, created_at=1.0, **changes)


@pytest.mark.parametrize(
    ("exits", "code"),
    [
        ((), None),
        ((Exit(host=0, code=0),), 0),
        ((Exit(host=0, code=0), Exit(host=1, code=3)), 3),
        ((Exit(host=1, code=3), Exit(host=0, code=1)), 3),
        ((Exit(host=0, signal=9),), 137),
        ((Exit(host=0, agent="timeout"),), None),
        ((Exit(host=0, agent="process_lost"), Exit(host=1, code=5)), 5),
        ((Exit(host=0, code=0, agent="timeout"),), 0),
    ],
)
def test_the_exit_code_is_that_of_the_first_failure(exits: tuple[Exit, ...], code: int | None) -> None:
    assert views.exit_code(exits) == code


def test_a_cost_is_slice_time_times_price() -> None:
    closed = an_attempt(state=AttemptState.CLOSED, closed_at=100.0 + 1800)
    live = an_attempt("a2", 2, created_at=2000.0, slices=(Bound("s1", "vm"), Bound("s2", "vm")))
    slices = {"s1": a_slice(), "s2": a_slice("s2")}
    pools = {"p": a_pool(1.2)}
    assert views.cost_usd([closed], slices, pools, now=9999.0) == pytest.approx(0.5 * 8 * 1.2)
    assert views.cost_usd([closed, live], slices, pools, now=2000.0 + 3600) == pytest.approx(4.8 + 2 * 8 * 1.2)


def test_a_cost_that_is_not_known_is_not_guessed() -> None:
    attempt = an_attempt(closed_at=200.0, state=AttemptState.CLOSED)
    assert views.cost_usd([attempt], {"s1": a_slice()}, {"p": a_pool(None)}, 300.0) is None
    assert views.cost_usd([attempt], {"s1": a_slice()}, {}, 300.0) is None
    assert views.cost_usd([attempt], {}, {"p": a_pool(1.0)}, 300.0) is None


def test_the_machine_at_hand_costs_nothing() -> None:
    attempt = an_attempt(closed_at=200.0, state=AttemptState.CLOSED)
    assert views.cost_usd([attempt], {"s1": a_slice(provider="local")}, {"p": a_pool(1.0)}, 300.0) == 0.0


def test_a_job_shows_its_latest_attempt_and_its_first_start() -> None:
    first = an_attempt(
        state=AttemptState.CLOSED, started_at=110.0, closed_at=150.0, cause=Cause.PREEMPTED, evidence=("gone",)
    )
    second = an_attempt("a2", 2, stage=1, started_at=160.0, slices=(Bound("s2", "vm"),), exits=(Exit(host=0, code=4),))
    job = a_job(chains=(Chain(replica=0, fence=2, stage=1, live=True),), cancel_at=170.0)
    progress = {"a1": ProgressView(done=5, at=120.0), "a2": ProgressView(done=7, total=10, at=165.0)}
    view = views.job_view(job, [first, second], "snippet", progress=progress, cost_usd=1.5, whole=True)
    assert (view.slice, view.started_at, view.stage, view.exit_code) == ("s2", 110.0, 1, 4)
    assert view.progress is not None
    assert view.progress.done == 7
    assert view.cancel_requested
    assert view.cost_usd == 1.5
    assert [(one.id, one.state, one.cause) for one in view.attempts] == [
        ("a1", "closed", "preempted"),
        ("a2", "assigned", None),
    ]
    short = views.job_view(job, [first, second], "snippet", progress={}, cost_usd=None)
    assert (short.attempts, short.command, short.slice) == ((), "", "s2")


@pytest.mark.parametrize(
    ("payload", "kind", "shown"),
    [
        (Snippet("x = 1"), "snippet", "x = 1"),
        (Command(("python", "a b.py", "$X")), "command", "python 'a b.py' '$X'"),
        (Task("extract"), "task", "extract"),
        (Snippet("x" * 5000), "snippet", "x" * 1999 + "…"),
    ],
)
def test_what_a_job_runs_is_shown_as_one_would_type_it(payload: Any, kind: str, shown: str) -> None:
    job = a_job(payload=payload)
    assert views.payload_kind(job) == kind
    assert views.job_view(job, [], kind, progress={}, cost_usd=None, whole=True).command == shown


@pytest.mark.parametrize(
    ("state", "reason", "sentence"),
    [
        (JobState.SUCCEEDED, "succeeded", "It has succeeded."),
        (JobState.CANCELLED, "cancelled by its user", "It was cancelled by its user."),
        (JobState.CANCELLED, "cancelled", "It was cancelled."),
        (JobState.CANCELLED, "j7, which it waits for, failed", "It was cancelled: j7, which it waits for, failed."),
        (JobState.FAILED, "No pool can run it.", "It has failed: No pool can run it."),
        (JobState.FAILED, "", "It has failed."),
    ],
)
def test_an_ending_is_one_sentence(state: JobState, reason: str, sentence: str) -> None:
    spec = JobSpec(team="lab", queue="q", resources=Resources(accelerators=("v5e-8",), chips=8))
    job = Job(id="j1", spec=spec, state=state, created_at=1.0, reason=reason)
    assert views.ending(job) == sentence
    shown = views.job_view(job, [], "command", progress={}, cost_usd=None).reason
    assert shown == ("" if reason in ("succeeded", "cancelled") else reason)


LOST: dict[str, Any] = {"state": AttemptState.CLOSED, "cause": Cause.PREEMPTED, "started_at": 101.0, "closed_at": 200.0}


@pytest.mark.parametrize(
    ("attempts", "changes", "preset", "then"),
    [
        ((an_attempt(**LOST),), {}, "pre", "the job resumes"),
        (
            (an_attempt(**LOST, saves=(Save(host=0, at=150.0),)),),
            {},
            "pre",
            "the job resumes from its newest checkpoint",
        ),
        ((an_attempt(**{**LOST, "started_at": None}),), {}, "pre", "the job starts again"),
        ((an_attempt(**{**LOST, "cause": Cause.INFRA}),), {}, "rerun", "the job starts again"),
        ((an_attempt(**LOST),), {}, "pass", ""),
        ((an_attempt(**LOST),), {"cancel_at": 5.0}, "pre", ""),
        ((an_attempt(**LOST), an_attempt("a2", 2, stage=1)), {}, "pre", "the job resumed (stage 1)"),
        ((an_attempt(**LOST), an_attempt("a2", 2)), {}, "pre", "the job started again"),
        ((an_attempt(**LOST), an_attempt("a2", 2, stage=1, replica=1)), {}, "pre", "the job resumes"),
        ((an_attempt(**{**LOST, "cause": Cause.OOM}),), {}, "pre", ""),
        ((an_attempt(started_at=101.0),), {}, "pre", ""),
        ((an_attempt(started_at=101.0, stop=StopOrder("reclaimed", 150.0)),), {}, "pre", ""),
        ((an_attempt(started_at=101.0, stop=StopOrder("notice", 150.0, "x")),), {}, "pre", "the job resumes"),
    ],
)
def test_how_a_job_goes_on_is_told_with_the_attempt_that_lost_its_place(
    attempts: tuple[Attempt, ...], changes: dict[str, Any], preset: str, then: str
) -> None:
    job = a_job(**changes)
    job = msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, rule=Rule(preset=preset)))
    assert views.goes_on(job, attempts[0], attempts) == then


def test_an_attempt_that_is_being_stopped_tells_why_before_it_has_ended() -> None:
    stopping = an_attempt(stop=StopOrder("notice", 0.0, "slice s1 was preempted with notice"), started_at=1.0)
    view = views.attempt_view(a_job(), stopping, (stopping,))
    assert view.evidence == ("slice s1 was preempted with notice at 1970-01-01 00:00:00 UTC",)
    assert view.then == "the job resumes"
