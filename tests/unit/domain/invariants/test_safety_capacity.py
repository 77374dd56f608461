"""Each safety rule of slices holds on a lawful history and breaks on an unlawful one."""

import pytest

from tests.unit.domain.invariants.scribe import LABEL, Scribe


@pytest.fixture
def run() -> Scribe:
    """A gang job on a slice of two hosts, not started yet."""
    scribe = Scribe()
    scribe.queue_created()
    scribe.slice("s1", hosts=2)
    scribe.slice("s2", hosts=2)
    scribe.job("j1")
    scribe.placed("j1", "a1", "s1")
    return scribe


def test_s9_intent_comes_first(run: Scribe) -> None:
    assert run.premises("S9") == 2


def test_s9_create_before_intent(run: Scribe) -> None:
    run.slice_created("s3")
    run.slice_intended("s3")
    assert run.broken("S9") == ["create was called before its intent was committed"]


def test_s9_even_a_failed_call_needs_an_intent(run: Scribe) -> None:
    run.world("provider.call", "s3", verb="create", outcome="Stockout")
    assert len(run.broken("S9")) == 1


@pytest.mark.parametrize("label", ["", "somebody"])
def test_s9_created_without_our_label(run: Scribe, label: str) -> None:
    run.slice_intended("s3")
    run.slice_created("s3", label=label)
    assert run.broken("S9") == [f"created with label {label!r}, which is not ours"]


def test_s9_somebody_else_may_have_taken_the_name(run: Scribe) -> None:
    run.slice_intended("s3")
    run.world("vm.created", "s3", provider_id="vm-other", zone="z1", label="somebody", chips=8, provider="fake")
    run.world("provider.call", "s3", verb="create", outcome="NameTaken", provider_id=None)
    run.commit("slice.deleting", "s3", why="conflict")
    run.commit("slice.gone", "s3", evidence=[])
    assert run.premises("S9") == 3
    assert run.premises("S14") == 1


def test_s10_one_after_the_other(run: Scribe) -> None:
    run.started("a1")
    run.succeeded("a1")
    run.job("j2")
    run.placed("j2", "a2", "s1")
    run.started("a2")
    assert run.premises("S10") == 2


def test_s10_bound_twice(run: Scribe) -> None:
    run.job("j2")
    run.placed("j2", "a2", "s1")
    assert run.broken("S10") == ["bound to a2 while a1 holds it"]


def test_s10_two_attempts_on_one_machine(run: Scribe) -> None:
    run.started("a1")
    run.closed("a1", "lost")
    run.job("j2")
    run.placed("j2", "a2", "s1")
    run.process("a2", "s1", 0)
    assert run.broken("S10") == ["a2 started on vm-s1 while a1 runs there"] * 2


def test_s10_process_on_a_machine_it_never_held(run: Scribe) -> None:
    run.process("a1", "s2")
    assert run.broken("S10") == ["a1 started on vm-s2, which it never held"]


def test_s10_process_on_another_incarnation_of_the_slice(run: Scribe) -> None:
    run.process("a1", "s1", provider_id="vm-s1-again")
    assert run.broken("S10") == ["a1 started on vm-s1-again, which it never held"]


def test_s10_process_of_a_replaced_host(run: Scribe) -> None:
    run.process("a1", "s1", incarnation="stranger")
    assert run.broken("S10") == ["host 0 of incarnation 'stranger' never joined"]


def test_s10_process_of_nobody(run: Scribe) -> None:
    run.world("proc.started", "a9", job="j1", replica=0, fence=1, host=0, slice="s2", provider_id="vm-s2", world_size=1)
    assert "a process of unknown attempt a9 started" in run.broken("S10")


def test_s11_whole_gang(run: Scribe) -> None:
    run.started("a1")
    assert run.premises("S11") == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fence": 7}, "host 0 runs fence 7, not 1"),
        ({"world_size": 1}, "host 0 runs in a world of 1, not 2"),
    ],
)
def test_s11_hosts_that_differ(run: Scribe, changed: dict[str, object], message: str) -> None:
    run.process("a1", "s1", 0, **changed)
    assert run.broken("S11") == [message]


def test_s11_launched_twice(run: Scribe) -> None:
    run.process("a1", "s1", 0)
    run.process("a1", "s1", 0)
    assert run.broken("S11") == ["launched twice on host 0 of s1"]


def test_s11_gang_half_launched(run: Scribe) -> None:
    run.process("a1", "s1", 0)
    run.commit("attempt.launched", "a1", host=0)
    run.commit("attempt.started", "a1")
    assert run.broken("S11") == ["said to run with 1 of 2 hosts up"]


def test_s11_gang_half_placed(run: Scribe) -> None:
    run.job("j2", slices=2)
    run.placed("j2", "a2", "s2")
    assert run.broken("S11") == ["holds 1 slices of 2"]


def test_s12_within_every_limit() -> None:
    scribe = Scribe()
    scribe.commit("team.created", "red", limit_chips=16)
    scribe.commit("pool.created", "p", limit_chips=16, max=2, team="red")
    scribe.commit("quota.limit_set", "provider/fake", scope="provider", name="fake", limit_chips=24)
    scribe.slice_intended("s1")
    scribe.slice_intended("s2")
    scribe.commit("slice.failed", "s1", why="broken")
    scribe.slice_intended("s3")
    assert scribe.premises("S12") == 3


@pytest.mark.parametrize("scope", ["team", "pool", "provider"])
def test_s12_beyond_one_limit(scope: str) -> None:
    scribe = Scribe()
    name = {"team": "red", "pool": "p", "provider": "fake"}[scope]
    if scope == "provider":
        scribe.commit("quota.limit_set", "provider/fake", scope="provider", name="fake", limit_chips=12)
    else:
        scribe.commit(f"{scope}.created", name, limit_chips=12)
    scribe.slice_intended("s1")
    scribe.slice_intended("s2")
    assert scribe.broken("S12") == [f"{scope} {name} uses 16 chips of 12"]


def test_s12_an_array_runs_no_more_than_it_may(run: Scribe) -> None:
    for number in (1, 2, 3):
        run.job(f"m{number}", array="red/sweep", at_most=2)
    run.slice("s3")
    run.placed("m1", "b1", "s1")
    run.placed("m2", "b2", "s2")
    assert (run.premises("S12"), run.broken("S12")) == (2, [])
    run.closed("b1", "preempted")
    run.placed("m3", "b3", "s1")
    assert run.broken("S12") == []
    run.placed("m1", "b4", "s3")
    assert run.broken("S12") == ["array red/sweep has 3 jobs running, 2 may"]


def test_s12_a_lowered_limit_only_blocks_new_reservations() -> None:
    scribe = Scribe()
    scribe.commit("team.created", "red", limit_chips=16)
    scribe.slice_intended("s1")
    scribe.slice_intended("s2")
    scribe.commit("team.edited", "red", limit_chips=8)
    assert scribe.broken("S12") == []
    scribe.slice_intended("s3")
    assert scribe.broken("S12") == ["team red uses 24 chips of 8"]


def test_s12_a_race_counts_once_but_each_for_the_provider() -> None:
    scribe = Scribe()
    scribe.commit("team.created", "red", limit_chips=16)
    scribe.commit("quota.limit_set", "provider/fake", scope="provider", name="fake", limit_chips=20)
    scribe.slice_intended("s1", race="r1", chips=8)
    scribe.slice_intended("s2", race="r1", chips=12)
    assert scribe.broken("S12") == []
    scribe.commit("slice.deleting", "s2", why="lost the race")
    scribe.slice_intended("s3", chips=8)
    assert scribe.broken("S12") == ["provider fake uses 28 chips of 20"]


def test_s12_a_slice_that_joins_a_race_late_counts_with_the_other() -> None:
    scribe = Scribe()
    scribe.commit("team.created", "red", limit_chips=8)
    scribe.slice_intended("s1", chips=8)
    scribe.commit("slice.raced", "s1", race="r1")
    scribe.slice_intended("s2", race="r1", chips=8)
    assert scribe.broken("S12") == []
    scribe.commit("slice.deleting", "s1", why="lost the race")
    scribe.slice_intended("s3", chips=8)
    assert scribe.broken("S12") == ["team red uses 16 chips of 8"]


def test_s12_provider_chips_are_held_until_gone() -> None:
    scribe = Scribe()
    scribe.commit("quota.limit_set", "provider/fake", scope="provider", name="fake", limit_chips=8)
    scribe.slice("s1")
    scribe.commit("slice.deleting", "s1", why="idle")
    scribe.slice_intended("s2")
    assert scribe.broken("S12") == ["provider fake uses 16 chips of 8"]


def test_s12_quota_and_loan_of_a_queue() -> None:
    scribe = Scribe()
    scribe.queue_created(quota=8, borrow=4)
    scribe.slice("s1")
    scribe.slice("s2")
    scribe.job("j1")
    scribe.job("j2")
    scribe.placed("j1", "a1", "s1")
    assert scribe.premises("S12") == 1
    scribe.placed("j2", "a2", "s2")
    assert scribe.broken("S12") == ["queue default uses 16 chips of 12"]


def test_s14_delete_after_leaving(run: Scribe) -> None:
    run.slice_deleted("s2")
    run.commit("slice.swept", "s2", provider_id="vm-late")
    run.world("provider.call", "s2", verb="delete", outcome="ok")
    assert run.premises("S14") == 3


def test_s14_delete_before_leaving(run: Scribe) -> None:
    run.world("provider.call", "s2", verb="delete", outcome="lost_reply")
    assert run.broken("S14") == ["delete was called before its leaving was committed"]


def test_s14_a_refused_delete_did_nothing(run: Scribe) -> None:
    run.world("provider.call", "s2", verb="delete", outcome="Transient")
    assert run.broken("S14") == []


def test_s14_deleted_under_a_live_attempt(run: Scribe) -> None:
    run.commit("slice.deleting", "s1", why="idle")
    run.world("provider.call", "s1", verb="delete", outcome="ok")
    assert run.broken("S14") == ["deleted under live attempt a1"]


def test_s14_deleting_what_is_not_ours(run: Scribe) -> None:
    run.world("vm.created", "x1", provider_id="vm-x1", zone="z1", label="somebody", chips=8, provider="fake")
    run.world("provider.call", "x1", verb="delete", outcome="ok")
    assert run.broken("S14") == ["deleted, but its label 'somebody' is not ours"]


def test_s14_deleting_an_orphan_of_ours(run: Scribe) -> None:
    run.world("vm.created", "x1", provider_id="vm-x1", zone="z1", label=LABEL, chips=8, provider="fake")
    run.world("provider.call", "x1", verb="delete", outcome="ok")
    assert run.premises("S14") == 1


def test_s14_gone_while_it_exists(run: Scribe) -> None:
    run.commit("slice.deleting", "s2", why="absent")
    run.commit("slice.gone", "s2", evidence=["one listing"])
    assert run.broken("S14") == ["said to be gone while vm-s2 exists"]


def test_s14_a_create_that_lands_after_the_delete_is_the_sweeps_business(run: Scribe) -> None:
    run.slice_intended("s3")
    run.commit("slice.deleting", "s3", why="refused")
    run.slice_created("s3")
    run.commit("slice.gone", "s3", evidence=["absent"])
    assert run.premises("S14") == 1


def test_s14_given_up_for_missing_from_a_listing(run: Scribe) -> None:
    run.started("a1")
    run.closed("a1", "lost", clean=False)
    (message,) = run.broken("S14")
    assert message.startswith("given up as lost while its machines and processes were well")


@pytest.mark.parametrize("ground", ["fenced", "preempted", "exited", "failed"])
def test_s14_given_up_with_grounds(run: Scribe, ground: str) -> None:
    run.started("a1")
    match ground:
        case "fenced":
            run.commit("attempt.fencing", "a1", fence=2)
        case "preempted":
            run.world("vm.preempted", "s1", provider_id="vm-s1")
        case "exited":
            run.exited("a1", 1)
        case _:
            run.commit("slice.failed", "s1", why="a host was replaced")
    run.closed("a1", "lost", clean=False)
    assert run.premises("S14") == 1
