"""Presets, budgets, back-off and the poison breaker: what follows when an attempt has closed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain import limits
from penstock.domain.lifecycle import FAILURE_CAUSES, INFRASTRUCTURE_CAUSES, Cause
from penstock.domain.nouns import Chain, Rule
from penstock.domain.policies import FRESH_SLICE_PRESETS, PRESETS, Decision, Go, backoff_s, decide

NOW = 1000.0
LONG = 2 * limits.POISON_RUN_S
RICH = {"failure_budget": 10, "infra_budget": 10}


def close(
    cause: Cause, *, preset: str = "pre", ran_s: float = LONG, chain: Chain | None = None, budget: int = 10
) -> Decision:
    before = chain or Chain(replica=0, fence=1, stage=3, live=True)
    rule = Rule(preset=preset, failure_budget=budget, infra_budget=budget)
    return decide(rule, before, cause, ran_s, NOW, "a1/1")


#: The older tool's rules: for "preempted" and for "grpc" (here infra and lost), with its "reapply" a new slice and a
#: resume, its "pass" a stop.
OLD_RULES = {
    "pre": (Go.RESUME, Go.RESUME),
    "pass": (Go.STOP, Go.STOP),
    "reapply": (Go.RESUME, Go.RESUME),
    "rerun": (Go.RESUME, Go.RERUN),
    "resume": (Go.STOP, Go.RESUME),
}


def test_the_old_names_mean_what_they_meant() -> None:
    assert set(PRESETS) == set(OLD_RULES)
    for name, (preempted, grpc) in OLD_RULES.items():
        on = PRESETS[name].on
        assert (on[Cause.PREEMPTED], on[Cause.INFRA], on[Cause.LOST]) == (preempted, grpc, grpc), name
    assert {"reapply", "rerun"} == FRESH_SLICE_PRESETS


def test_every_preset_says_something_of_every_cause_that_can_be_retried() -> None:
    for preset in PRESETS.values():
        assert set(preset.on) == FAILURE_CAUSES | INFRASTRUCTURE_CAUSES
        assert preset.summary


def test_a_resume_is_one_stage_further_and_a_rerun_starts_at_none() -> None:
    assert close(Cause.INFRA).chain.stage == 4
    assert close(Cause.INFRA, preset="rerun").chain.stage == 0
    assert close(Cause.INFRA, preset="pass").chain.stage == 3


def test_success_and_cancel_end_the_chain_and_cost_nothing() -> None:
    done = close(Cause.SUCCEEDED)
    assert (done.go, done.chain.done, done.chain.live, done.reason) == (Go.STOP, True, False, "succeeded")
    gone = close(Cause.CANCELLED)
    assert (gone.go, gone.chain.done, gone.chain.live) == (Go.STOP, False, False)
    for decision in (done, gone):
        assert (decision.chain.failures, decision.chain.losses) == (0, 0)


@pytest.mark.parametrize("cause", sorted(FAILURE_CAUSES | INFRASTRUCTURE_CAUSES))
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_budget_is_the_number_of_retries(cause: Cause, budget: int) -> None:
    chain: Chain | None = None
    for spent in range(budget + 1):
        decision = close(cause, chain=chain, budget=budget)
        assert decision.go is (Go.STOP if spent == budget else Go.RESUME)
        chain = decision.chain
    assert chain is not None
    assert (chain.failures, chain.losses) == ((budget + 1, 0) if cause in FAILURE_CAUSES else (0, budget + 1))
    assert f"budget of {budget} spent" in decision.reason  # type: ignore[possibly-undefined]


def test_user_failures_are_not_retried_by_default() -> None:
    for cause in FAILURE_CAUSES:
        assert decide(Rule(), Chain(replica=0, fence=1), cause, LONG, NOW, "s").go is Go.STOP
    for cause in INFRASTRUCTURE_CAUSES:
        assert decide(Rule(), Chain(replica=0, fence=1), cause, LONG, NOW, "s").go is Go.RESUME


def test_a_preemption_does_not_wait_and_everything_else_does() -> None:
    assert close(Cause.PREEMPTED).chain.not_before == NOW
    for cause in (Cause.INFRA, Cause.LOST, Cause.USER_ERROR):
        assert close(cause).chain.not_before > NOW


@given(st.integers(0, 10_000), st.text())
def test_back_off_is_between_half_and_all_of_its_doubling(streak: int, salt: str) -> None:
    full = min(limits.BACKOFF_MAX_S, limits.BACKOFF_FIRST_S * 2 ** min(streak, 30))
    assert full / 2 <= backoff_s(streak, salt) <= full
    assert backoff_s(streak, salt) == backoff_s(streak, salt)


def test_back_off_differs_between_jobs() -> None:
    assert len({backoff_s(3, f"a{number}/1") for number in range(100)}) > 90


def test_quick_losses_in_a_row_end_the_job_and_a_long_run_forgives() -> None:
    chain = Chain(replica=0, fence=1, quick_losses=limits.POISON_LOSSES - 1)
    stopped = close(Cause.LOST, ran_s=5, chain=chain)
    assert (stopped.go, stopped.chain.quick_losses) == (Go.STOP, limits.POISON_LOSSES)
    assert "the job breaks its slices" in stopped.reason
    forgiven = close(Cause.LOST, ran_s=limits.POISON_RUN_S, chain=chain)
    assert (forgiven.go, forgiven.chain.quick_losses) == (Go.RESUME, 0)
    own = close(Cause.USER_ERROR, ran_s=5, chain=chain)
    assert own.chain.quick_losses == 0


def test_preemptions_alone_never_look_like_poison() -> None:
    chain = Chain(replica=0, fence=1)
    rule = Rule(infra_budget=100)
    for _ in range(3 * limits.POISON_LOSSES):
        decision = decide(rule, chain, Cause.PREEMPTED, 1.0, NOW, "s")
        assert decision.go is Go.RESUME
        chain = decision.chain


@given(
    st.sampled_from(sorted(PRESETS)),
    st.lists(st.tuples(st.sampled_from(sorted(set(Cause) - {Cause.SUCCEEDED})), st.floats(0, 1e4)), max_size=40),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_no_sequence_outlives_its_budgets(
    preset: str, ends: list[tuple[Cause, float]], failure_budget: int, infra_budget: int
) -> None:
    rule = Rule(preset=preset, failure_budget=failure_budget, infra_budget=infra_budget)
    chain = Chain(replica=0, fence=1)
    attempts = 0
    for cause, ran_s in ends:
        attempts += 1
        decision = decide(rule, chain, cause, ran_s, NOW, f"a{attempts}")
        chain = decision.chain
        assert chain.failures + chain.losses == attempts - (cause is Cause.CANCELLED)
        if decision.go is Go.STOP:
            break
        assert chain.not_before >= NOW
    assert attempts <= 1 + failure_budget + infra_budget
    assert chain.fence == 1  # fences are the controller's business
