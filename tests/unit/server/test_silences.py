"""What people are told of slices that do not speak, and of attempts that were given up for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.domain import limits
from penstock.domain.endings import end_of
from penstock.domain.lifecycle import AttemptState, Cause, SliceState
from penstock.domain.nouns import Attempt, Bound, Exit, Save, Slice, StopOrder
from penstock.server.silences import silence, troubles
from tests.unit.server.test_views import a_job

SLICE = Slice(
    id="s1",
    team="lab",
    pool="p",
    provider="tpu_vm",
    zone="us-central1-a",
    accelerator="v5e-8",
    chips=8,
    hosts=1,
    intended_at=0.0,
    state=SliceState.READY,
    provider_state="READY",
    ready_at=1.0,
)
RUNNING = Attempt(
    id="a1",
    job="j1",
    replica=0,
    fence=3,
    team="lab",
    queue="q",
    chips=8,
    slices=(Bound("s1", "vm"),),
    hosts=1,
    created_at=0.0,
    timeout_s=9.0,
    state=AttemptState.RUNNING,
)
JOB: Any = SimpleNamespace(id="j1")
TOLD = "its agent has not called for 21 s; the provider says READY"


def service(silent_s: float, slice: Slice = SLICE) -> Any:
    snapshot = SimpleNamespace(
        witness=SimpleNamespace(silent={slice.id: silent_s} if silent_s else {}, mute={}),
        slices={slice.id: slice},
        attempts_of={"j1": {0: RUNNING}},
    )
    return SimpleNamespace(controller=SimpleNamespace(snapshot=snapshot))


@pytest.mark.parametrize(("silent_s", "told"), [(0.0, ""), (limits.SILENCE_S - 0.1, ""), (21.0, TOLD)])
def test_a_slice_that_is_silent_for_long_is_told_of(silent_s: float, told: str) -> None:
    assert silence(service(silent_s), SLICE) == told
    wanted = (f"slice s1: {told}; the job goes on elsewhere when that lasts",) if told else ()
    assert troubles(service(silent_s), JOB, (RUNNING,)) == wanted


def test_a_slice_that_never_spoke_is_not_silent() -> None:
    coming = msgspec.structs.replace(SLICE, ready_at=None, state=SliceState.CREATING)
    assert silence(service(21.0, coming), coming) == ""


@pytest.mark.parametrize("state", [SliceState.DELETING, SliceState.PREEMPTED, SliceState.FAILED])
def test_of_a_slice_that_leaves_nobody_expects_a_word(state: SliceState) -> None:
    leaving = msgspec.structs.replace(SLICE, state=state, why="the provider took it away")
    assert silence(service(21.0, leaving), leaving) == ""


def test_of_many_hosts_it_is_one_or_more() -> None:
    gang = msgspec.structs.replace(SLICE, hosts=4)
    assert silence(service(21.0, gang), gang).startswith("one of its agents, or more, have not called for 21 s")


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (Cause.LOST, ("attempt 3 was lost: silent; fenced; the job resumed (stage 1)",)),
        (Cause.PREEMPTED, ("attempt 3 was preempted: silent; fenced; the job resumed (stage 1)",)),
        (Cause.INFRA, ("attempt 3 was ended by its surroundings: silent; fenced; the job resumed (stage 1)",)),
        (Cause.USER_ERROR, ()),
    ],
)
def test_why_it_no_longer_runs_where_it_ran_is_told_while_it_runs_elsewhere(
    cause: Cause, told: tuple[str, ...]
) -> None:
    lost = msgspec.structs.replace(RUNNING, state=AttemptState.CLOSED, cause=cause, evidence=("silent", "fenced"))
    again = msgspec.structs.replace(RUNNING, id="a2", fence=4, stage=1)
    assert troubles(service(0.0), JOB, (lost, again)) == told


def test_a_notice_is_told_of_while_the_job_saves_and_after() -> None:
    at = "1970-01-01 00:16:40 UTC"
    order = StopOrder("notice", 1000.0, "slice s1 was preempted with notice")
    saving = msgspec.structs.replace(RUNNING, started_at=1.0, stop=order)
    job = a_job()
    live = service(0.0)
    live.controller.snapshot.attempts_of["j1"] = {0: saving}
    assert troubles(live, job, (saving,)) == (
        f"attempt 3 stops: slice s1 was preempted with notice at {at}; the job resumes",
    )
    cause, evidence = end_of(msgspec.structs.replace(saving, exits=(Exit(host=0, signal=15, notice=True),)), False)
    closed = msgspec.structs.replace(
        saving, state=AttemptState.CLOSED, cause=cause, evidence=evidence, saves=(Save(host=0, at=900.0),)
    )
    live.controller.snapshot.attempts_of = {}
    (line,) = troubles(live, job, (closed,))
    assert line == f"attempt 3 was preempted: {evidence[0]}; the job resumes from its newest checkpoint"
    assert evidence == (f"slice s1 was preempted with notice at {at}",)
