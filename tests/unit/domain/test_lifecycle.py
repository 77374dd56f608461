"""The tables of what may follow what: total over their kinds, closed, and without a way back from an end."""

from __future__ import annotations

from enum import StrEnum

import pytest

from penstock.domain import lifecycle
from penstock.domain.lifecycle import (
    AttemptState,
    Cause,
    IllegalTransition,
    JobState,
    SliceState,
    state_pairs,
    step,
)

STATES: dict[str, type[StrEnum]] = {"job": JobState, "attempt": AttemptState, "slice": SliceState}


@pytest.mark.parametrize("entity", STATES)
def test_every_kind_is_named_after_its_entity_and_leads_to_its_states(entity: str) -> None:
    for (state, kind), target in lifecycle.TABLES[entity].items():
        assert kind.startswith(f"{entity}.")
        assert state is None or isinstance(state, STATES[entity])
        assert isinstance(target, STATES[entity])


@pytest.mark.parametrize("entity", STATES)
def test_every_state_is_reached_from_nothing(entity: str) -> None:
    reached: set[StrEnum | None] = {None}
    for _ in STATES[entity]:
        reached |= {target for (state, _), target in lifecycle.TABLES[entity].items() if state in reached}
    assert reached == {None, *STATES[entity]}


@pytest.mark.parametrize("entity", STATES)
def test_only_one_thing_happens_to_what_does_not_exist(entity: str) -> None:
    first = {"job": "job.created", "attempt": "attempt.created", "slice": "slice.intended"}[entity]
    assert [kind for state, kind in lifecycle.TABLES[entity] if state is None] == [first]


@pytest.mark.parametrize(
    ("entity", "ends"),
    [
        ("job", lifecycle.TERMINAL_JOB_STATES),
        ("attempt", frozenset({AttemptState.CLOSED})),
        ("slice", frozenset({SliceState.GONE})),
    ],
)
def test_an_end_is_an_end(entity: str, ends: frozenset[StrEnum]) -> None:
    for (state, _), target in lifecycle.TABLES[entity].items():
        if state in ends:
            assert target is state


def test_a_job_succeeds_only_while_it_runs() -> None:
    assert step("job.succeeded", JobState.RUNNING) is JobState.SUCCEEDED
    for state in (JobState.QUEUED, JobState.PROVISIONING, *lifecycle.TERMINAL_JOB_STATES):
        with pytest.raises(IllegalTransition):
            step("job.succeeded", state)


def test_a_slice_is_gone_only_after_its_delete_was_decided() -> None:
    assert [state for (state, kind) in lifecycle.SLICE_TABLE if kind == "slice.gone"] == [SliceState.DELETING]


def test_only_a_ready_slice_is_bound_and_only_a_created_one_gets_ready() -> None:
    assert [state for (state, kind) in lifecycle.SLICE_TABLE if kind == "slice.bound"] == [SliceState.READY]
    assert [state for (state, kind) in lifecycle.SLICE_TABLE if kind == "slice.ready"] == [SliceState.CREATING]


def test_no_output_is_committed_but_by_a_running_job() -> None:
    kinds = [state for (state, kind) in lifecycle.JOB_TABLE if kind == "job.output_committed"]
    assert kinds == [JobState.RUNNING]


def test_a_refusal_says_what_was_asked_of_what() -> None:
    with pytest.raises(IllegalTransition, match=r"job\.placed is not allowed from state succeeded"):
        step("job.placed", JobState.SUCCEEDED)
    with pytest.raises(IllegalTransition, match="from state nothing"):
        step("slice.ready", None)


def test_unknown_entities_are_not_silently_allowed() -> None:
    with pytest.raises(KeyError):
        step("pool.created", None)


def test_causes_are_the_platforms_or_the_jobs_or_neither() -> None:
    platform, job = lifecycle.INFRASTRUCTURE_CAUSES, lifecycle.FAILURE_CAUSES
    assert not platform & job
    assert set(Cause) - platform - job == {Cause.SUCCEEDED, Cause.CANCELLED}


def test_what_counts_is_billed_and_what_is_broken_does_not_count() -> None:
    assert lifecycle.COUNTED_SLICE_STATES < lifecycle.BILLED_SLICE_STATES
    assert not lifecycle.COUNTED_SLICE_STATES & lifecycle.BROKEN_SLICE_STATES
    assert set(SliceState) - lifecycle.BILLED_SLICE_STATES == {SliceState.GONE}


def test_state_pairs_are_the_table_without_its_kinds() -> None:
    pairs = state_pairs("attempt")
    assert ("launching", "running") in pairs
    assert ("assigned", "running") not in pairs
    assert all(target == "closed" for state, target in pairs if state == "closed")
