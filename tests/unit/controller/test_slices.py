"""Slices from intent to tombstone: what is counted when, what providers show, what zones learn, what is swept."""

from __future__ import annotations

import pytest

from penstock.controller import execute, slices
from penstock.controller.verbs import Outdated
from penstock.domain import limits
from penstock.domain.cloud import KINDS, CloudWish
from penstock.domain.lifecycle import Cause, SliceState
from penstock.domain.nouns import Slice, Team, Zone
from penstock.planner import zones
from penstock.ports.capacity import CREATING, DELETING, FAILED, PREEMPTED, READY, REPAIRING
from penstock.ports.store import QuotaFull, Transaction
from tests.unit.controller.stage import Stage, seen


def used(stage: Stage) -> tuple[int, int, int]:
    return stage.used("team", "lab"), stage.used("pool", "small"), stage.used("provider", "fake")


def zone(stage: Stage, name: str = "z1", kind: str = "on-demand") -> Zone | None:
    return stage.look(lambda reader: reader.zone(f"fake/{name}/v5e-8/{kind}"))


# --- intents and limits ---
def test_an_intent_is_a_row_before_anything_exists(stage: Stage) -> None:
    (id,) = stage.intend()
    made = stage.slice(id)
    assert (made.state, made.provider_id, made.chips, made.hosts) == (SliceState.INTENDED, None, 8, 1)
    (event,) = stage.events(id)
    assert event.body == {
        "pool": "small",
        "team": "lab",
        "provider": "fake",
        "zone": "z1",
        "accelerator": "v5e-8",
        "chips": 8,
        "hosts": 1,
        "race": None,
        "number": None,
        "spot": False,
    }
    assert used(stage) == (8, 8, 8)


def limit_team(stage: Stage, chips: int) -> None:
    stage.wait(stage.commands.put_team(Team(name="lab", chip_limit=chips)))


@pytest.mark.parametrize("scope", ["team", "pool", "provider"])
def test_no_limit_is_passed_and_a_refusal_leaves_nothing_behind(stage: Stage, scope: str) -> None:
    """Other decisions of the same tick go on: what the refused one had reserved must be given back."""
    match scope:
        case "team":
            limit_team(stage, 16)
        case "pool":
            stage.pool("small", max=2)
        case _:
            stage.wait(stage.commands.limit_provider("fake", 16))
    wishes = [execute.Wish(pool="small", team="lab", wanted=((f"s{number}", "z1"),), race=None) for number in range(3)]
    (left,) = stage.do(execute.carry_out, wishes)
    assert "16 of 16 chips used, 8 more asked" in left
    assert used(stage) == (16, 16, 16)
    stage.check_counters()


def test_a_lowered_limit_blocks_new_ones_only(stage: Stage) -> None:
    stage.ready()
    limit_team(stage, 0)
    with pytest.raises(QuotaFull):
        stage.intend()
    assert used(stage) == (8, 8, 8)


def test_a_race_counts_once_for_team_and_pool_and_each_for_the_provider(stage: Stage) -> None:
    limit_team(stage, 8)
    first, second, third = stage.intend(zones=("z1", "z2", "z3"))
    assert used(stage) == (8, 8, 24)
    stage.do(slices.release, first, "lost the race")
    stage.see(second, PREEMPTED)
    assert used(stage) == (8, 8, 24)
    stage.do(slices.release, third, "lost the race")
    assert used(stage) == (0, 0, 24)
    for id in (first, third):
        stage.do(slices.bury, id, ("test",))
    assert used(stage) == (0, 0, 8)


def test_a_slice_that_joins_late_counts_with_the_slow_one_it_races(stage: Stage) -> None:
    limit_team(stage, 8)
    (slow,) = stage.intend()
    stage.see(slow, CREATING)
    stage.do(slices.intend, "small", "lab", [("s2", "z2")], "r1", beside=slow)
    stage.do(slices.intend, "small", "lab", [("s3", "z3")], "r2", beside=slow)
    assert {stage.slice(id).race for id in (slow, "s2", "s3")} == {"r1"}
    assert used(stage) == (8, 8, 24)
    stage.do(slices.release, slow, "lost the race")
    assert used(stage) == (8, 8, 24)
    for id in ("s2", "s3"):
        stage.do(slices.release, id, "lost the race")
    assert used(stage) == (0, 0, 24)
    with pytest.raises(Outdated, match="there is nothing to race"):
        stage.do(slices.intend, "small", "lab", [("s4", "z2")], "r3", beside=slow)


def test_what_a_zone_takes_is_counted_from_the_request(stage: Stage) -> None:
    (slice,) = stage.intend()
    stage.clock.advance(100.0)  # its turn to be asked for came late
    stage.see(slice, CREATING)
    stage.clock.advance(30.0)
    stage.see(slice, READY)
    assert stage.sync(slice).welcome
    (zone,) = stage.look(lambda reader: reader.zones())
    assert zone.ready_s == 30.0


def test_a_race_that_does_not_fit_the_provider_keeps_what_does(stage: Stage) -> None:
    stage.wait(stage.commands.limit_provider("fake", 8))
    wish = execute.Wish(pool="small", team="lab", wanted=(("s1", "z1"), ("s2", "z2")), race="r1")
    assert len(stage.do(execute.carry_out, [wish])) == 1
    assert used(stage) == (8, 8, 8)


def test_a_pool_makes_no_slices_for_strangers_when_deleted_or_in_maintenance(stage: Stage) -> None:
    stage.wait(stage.commands.put_team(Team(name="other")))
    with pytest.raises(Outdated, match="team other may not use pool small"):
        stage.intend(team="other")
    stage.wait(stage.commands.set_maintenance(True))
    with pytest.raises(Outdated, match="makes no slices now"):
        stage.intend()
    stage.wait(stage.commands.set_maintenance(False))
    stage.wait(stage.commands.delete_pool("small"))
    for pool in ("small", "none"):
        with pytest.raises(Outdated, match="makes no slices now"):
            stage.intend(pool)


# --- what providers show ---
@pytest.mark.parametrize("state", [PREEMPTED, FAILED, DELETING])
def test_a_slice_seen_broken_stops_counting_at_once_but_not_for_the_provider(stage: Stage, state: str) -> None:
    slice = stage.ready()
    stage.see(slice, state)
    broken = SliceState.PREEMPTED if state == PREEMPTED else SliceState.FAILED
    assert (stage.slice(slice).state, stage.slice(slice).provider_state) == (broken, state)
    assert used(stage) == (0, 0, 8)
    stage.drop(slice)
    assert used(stage) == (0, 0, 0)


def test_seeing_the_same_again_is_no_event(stage: Stage) -> None:
    slice = stage.ready()
    before = stage.look(lambda reader: reader.last_seq())
    stage.see(slice, READY)
    assert stage.look(lambda reader: reader.last_seq()) == before
    stage.see(slice, REPAIRING)
    assert (stage.slice(slice).state, stage.slice(slice).provider_state) == (SliceState.READY, REPAIRING)


def test_another_machine_under_the_same_name_is_not_ours(stage: Stage) -> None:
    slice = stage.ready()
    stage.see(slice, READY, provider_id="vm-new")
    after = stage.slice(slice)
    assert (after.state, after.provider_id) == (SliceState.FAILED, f"vm-{slice}")


def test_a_slice_on_its_way_out_is_only_noted(stage: Stage) -> None:
    (slice,) = stage.intend()
    stage.do(slices.release, slice, "changed our mind")
    stage.see(slice, CREATING)  # the create had got through
    after = stage.slice(slice)
    assert (after.state, after.provider_id, after.provider_state) == (SliceState.DELETING, f"vm-{slice}", CREATING)
    stage.see(slice, READY)
    assert stage.slice(slice).state is SliceState.DELETING


def test_what_nobody_knows_is_not_observed(stage: Stage) -> None:
    before = stage.look(lambda reader: reader.last_seq())
    stage.do(slices.observe, [seen("s-none")])
    assert stage.look(lambda reader: reader.last_seq()) == before


# --- what zones learn ---
def test_a_grant_a_loss_and_a_refusal_are_learned(stage: Stage) -> None:
    (id,) = stage.intend()
    stage.clock.advance(40)
    stage.see(id)
    stage.sync(id)
    granted = zone(stage)
    assert granted is not None
    assert (granted.grants, granted.ready_s, granted.tries) == (1.0, 40.0, 1)
    stage.clock.advance(500)
    stage.see(id, PREEMPTED)
    lost = zone(stage)
    assert lost is not None
    assert (lost.losses, lost.life_s) == (1.0, 500.0)
    (dry,) = stage.intend()
    stage.do(slices.refuse, dry, "stockout", None)
    refused = zone(stage)
    assert refused is not None
    assert (refused.streak, refused.why) == (1, "stockout")
    assert refused.backoff_until > stage.clock.now()
    assert (stage.slice(dry).state, stage.slice(dry).why) == (SliceState.DELETING, "stockout")


def lives(stage: Stage, kind: str = "spot") -> list[float]:
    """How long slices had lived, each time their zone was taught a loss."""
    learned = [each for each in stage.events(f"fake/z1/v5e-8/{kind}") if each.body["outcome"] == "lost"]
    return [float(str(each.body["life_s"])) for each in learned]


def spot(stage: Stage) -> str:
    """A spot slice that has worked for 500 s."""
    stage.pool("spot", spot=True)
    slice = stage.ready("spot")
    stage.clock.advance(500)
    return slice


@pytest.mark.parametrize("later", ["seen", "seen late", "vanished", "nothing"])
def test_a_loss_that_was_announced_counts_once_whatever_is_seen_of_it_later(stage: Stage, later: str) -> None:
    slice = spot(stage)
    stage.sync(slice, notice=True)
    stage.clock.advance(30)
    stage.sync(slice, notice=True)
    if later == "seen":
        stage.see(slice, PREEMPTED)
    stage.do(slices.release, slice, "notice", vanished=later == "vanished")
    if later == "seen late":
        stage.see(slice, PREEMPTED)
    assert lives(stage) == [500.0]
    known = zone(stage, kind="spot")
    assert known is not None
    assert (known.life_s, known.losses) == (500.0, 1.0)
    (lost,) = stage.events(slice, "slice.lost")
    assert lost.body == {"why": "the platform gave notice", "life_s": 500.0}


def test_a_loss_without_a_word_counts_once(stage: Stage) -> None:
    slice = spot(stage)
    stage.see(slice, PREEMPTED)
    stage.do(slices.release, slice, "the provider took it away", vanished=True)
    assert lives(stage) == [500.0]
    assert [each.body["why"] for each in stage.events(slice, "slice.lost")] == ["the provider preempted it"]


def test_a_spot_slice_that_its_provider_does_not_know_was_lost_and_another_was_not(stage: Stage) -> None:
    """Somebody with rights deletes an on-demand slice; of spot ones nobody need have."""
    stage.do(slices.release, spot(stage), "vanished", vanished=True)
    assert lives(stage) == [500.0]
    mine = stage.ready()
    stage.do(slices.release, mine, "vanished", vanished=True)
    assert lives(stage, "on-demand") == []
    (never,) = stage.intend("spot")
    stage.do(slices.release, never, "vanished", vanished=True)
    assert lives(stage) == [500.0], "what was never ready had no life"


@pytest.mark.parametrize("dirty", [True, False])
def test_a_silent_slice_that_is_seen_preempted_only_later_was_lost_and_one_let_go_of_was_not(
    stage: Stage, dirty: bool
) -> None:
    slice = spot(stage)
    if dirty:
        attempt = stage.start(stage.submit(), slice)
        stage.close(attempt, Cause.LOST)
    stage.do(slices.release, slice, "silent" if dirty else "idle")
    stage.clock.advance(100)
    stage.see(slice, PREEMPTED)
    assert lives(stage) == ([500.0] if dirty else [])


def test_maintenance_that_ends_a_slice_is_a_loss_too(stage: Stage) -> None:
    """Hosts say no more than that they are taken away; on-demand ones are for maintenance only."""
    slice = stage.ready()
    stage.clock.advance(70)
    stage.sync(slice, notice=True)
    assert lives(stage, "on-demand") == [70.0]


@pytest.mark.parametrize("kind", ["on-demand", "spot", "preemptible", "reserved", "flex-start"])
def test_a_kind_that_is_out_of_stock_holds_up_no_other_of_its_zone(stage: Stage, kind: str) -> None:
    for each in KINDS:
        wish = CloudWish(kind=each, reservation="r" if each == "reserved" else "")
        stage.pool(each, provider="tpu_vm", spot=wish.spot, cloud=wish)
    (dry,) = stage.intend(kind)
    stage.do(slices.refuse, dry, "no more capacity", None)
    known = stage.look(lambda reader: reader.zones())
    assert [(each.id, each.streak, each.spot) for each in known] == [
        (f"tpu_vm/z1/v5e-8/{kind}", 1, kind in ("spot", "preemptible"))
    ]
    stage.wait(stage.projection.catch_up())
    snapshot = stage.projection.snapshot
    resting = [each for each in KINDS if zones.open_at(snapshot, snapshot.pools[each], "z1") > stage.clock.now()]
    assert resting == [kind]


@pytest.mark.parametrize("state", [PREEMPTED, FAILED])
def test_a_slice_that_never_got_ready_was_a_refusal(stage: Stage, state: str) -> None:
    """Taken in and then not granted: without a back-off the same zone would be asked again at once, for ever."""
    (id,) = stage.intend()
    stage.see(id, CREATING)
    stage.see(id, state)
    learned = zone(stage)
    assert learned is not None
    assert (learned.streak, learned.grants) == (1, 0.0)
    assert learned.backoff_until > stage.clock.now()


def test_a_failure_later_says_nothing_about_capacity(stage: Stage) -> None:
    stage.see(stage.ready(), FAILED)
    learned = zone(stage)
    assert learned is not None
    assert (learned.streak, learned.grants) == (0, 1.0)


def test_a_late_refusal_is_learned_and_changes_nothing_else(stage: Stage) -> None:
    slice = stage.ready()
    stage.do(slices.refuse, slice, "stockout", 300.0)
    assert stage.slice(slice).state is SliceState.READY
    learned = zone(stage)
    assert learned is not None
    assert learned.streak == 1


@pytest.mark.parametrize("noticed", [True, False])
def test_a_full_quota_is_tried_again_soon_while_something_of_ours_leaves(stage: Stage, noticed: bool) -> None:
    """A fleet as large as its quota: the preempted slice holds its chips until it is deleted, and no longer."""
    taken = stage.ready()
    if noticed:
        stage.do(slices.drain, taken, "notice")
    else:
        stage.see(taken, PREEMPTED)
    (wanted,) = stage.intend()
    stage.do(slices.refuse, wanted, "quota", 300.0, True)
    refused = zone(stage)
    assert refused is not None
    assert 0 < refused.backoff_until - stage.clock.now() <= limits.QUOTA_FREED_S


def test_a_full_quota_with_nothing_on_its_way_out_is_left_alone_for_long(stage: Stage) -> None:
    """What was refused itself never existed: that it is let go frees nothing."""
    stage.ready()
    (wanted,) = stage.intend()
    stage.do(slices.refuse, wanted, "quota", 300.0, True)
    stage.clock.advance(300.0)
    (wanted,) = stage.intend()
    stage.do(slices.refuse, wanted, "quota", 300.0, True)
    refused = zone(stage)
    assert refused is not None
    assert refused.backoff_until - stage.clock.now() >= 150.0


def test_what_leaves_another_zone_frees_no_quota_here(stage: Stage) -> None:
    stage.see(stage.ready(zone="z2"), PREEMPTED)
    (wanted,) = stage.intend()
    stage.do(slices.refuse, wanted, "quota", 300.0, True)
    refused = zone(stage)
    assert refused is not None
    assert refused.backoff_until - stage.clock.now() >= 150.0


def test_of_many_refusals_at_a_time_one_looks_through_all_slices(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def refuse(tx: Transaction, id: str) -> None:
        def live_slices(self: Transaction) -> list[Slice]:
            nonlocal looks
            looks += 1
            return plain(self)

        plain = type(tx).live_slices
        with monkeypatch.context() as patch:
            patch.setattr(type(tx), "live_slices", live_slices)
            slices.refuse(tx, id, "quota", 300.0, True)

    for id in [stage.intend()[0] for _ in range(3)]:
        stage.do(refuse, id)
    assert looks == 1


# --- leaving ---
def test_a_name_that_belongs_to_somebody_else_is_let_go(stage: Stage) -> None:
    (id,) = stage.intend()
    stage.do(slices.disown, id, "the name belongs to somebody else")
    assert stage.slice(id).state is SliceState.DELETING
    ready = stage.ready()
    stage.do(slices.disown, ready, "no")
    assert stage.slice(ready).state is SliceState.READY


def test_a_slice_in_use_is_not_released(stage: Stage) -> None:
    _, attempt, slice = stage.started()
    with pytest.raises(Outdated, match=f"is in use by {attempt}"):
        stage.do(slices.release, slice, "idle")
    stage.close(attempt, Cause.PREEMPTED)
    stage.do(slices.release, slice, "idle")
    gone = stage.slice(slice)
    assert (gone.state, gone.deleting_at, gone.why) == (SliceState.DELETING, stage.clock.now(), "idle")
    assert used(stage) == (0, 0, 8)


def test_only_a_ready_slice_drains(stage: Stage) -> None:
    (intended,) = stage.intend()
    with pytest.raises(Outdated, match="is intended"):
        stage.do(slices.drain, intended, "test")
    ready = stage.ready()
    stage.do(slices.drain, ready, "too many")
    assert (stage.slice(ready).state, stage.slice(ready).why) == (SliceState.DRAINING, "too many")
    assert used(stage) == (16, 16, 16)


def test_only_what_was_released_is_buried_and_only_once(stage: Stage) -> None:
    slice = stage.ready()
    with pytest.raises(Outdated, match="is ready"):
        stage.do(slices.bury, slice, ("x",))
    stage.drop(slice)
    assert (stage.slice(slice).state, stage.slice(slice).gone_at) == (SliceState.GONE, stage.clock.now())
    assert stage.events(slice, "slice.gone")[0].body == {"evidence": ["test"]}
    for verb in (slices.release, slices.bury):
        with pytest.raises(Outdated, match="is gone"):
            stage.do(verb, slice, "again")  # type: ignore[arg-type]
    assert used(stage) == (0, 0, 0)


def test_what_is_unknown_takes_no_orders(stage: Stage) -> None:
    with pytest.raises(Outdated, match="slice s-none is unknown"):
        stage.do(slices.drain, "s-none", "test")


# --- the sweep ---
def test_something_under_a_buried_name_is_deleted_again(stage: Stage) -> None:
    slice = stage.ready()
    stage.drop(slice)
    assert stage.look(lambda reader: [each.id for each in reader.tombstones(0)]) == [slice]
    assert stage.do(slices.sweep, "fake", seen(slice, provider_id="vm-late"))
    assert stage.slice(slice).state is SliceState.GONE
    assert stage.events(slice)[-1].body == {"provider_id": "vm-late"}


@pytest.mark.parametrize("leaving", [False, True])
def test_what_a_live_slice_owns_is_never_swept(stage: Stage, leaving: bool) -> None:
    slice = stage.ready()
    if leaving:
        stage.do(slices.release, slice, "test")
    version = stage.slice(slice).version
    assert not stage.do(slices.sweep, "fake", seen(slice))
    assert stage.slice(slice).version == version


def test_a_name_never_intended_leaves_by_the_usual_way(stage: Stage) -> None:
    """A store restored from an older copy does not know it; it bears our label all the same."""
    assert not stage.do(slices.sweep, "fake", seen("s-lost", provider_id="vm-9"))
    found: Slice = stage.slice("s-lost")
    assert (found.state, found.provider_id, found.why) == (SliceState.DELETING, "vm-9", "nobody intended it")
    assert stage.kinds("s-lost") == ["slice.intended", "slice.creating", "slice.deleting"]
    stage.do(slices.bury, "s-lost", ("test",))
    assert used(stage) == (0, 0, 0)


# --- slices that cannot be used ---
def test_a_slice_nobody_joined_teaches_its_zone_and_one_that_is_not_needed_does_not(stage: Stage) -> None:
    first, second = stage.intend(), stage.intend()
    stage.do(slices.release, first[0], "its agents did not all join within 300 s", True)
    known = zone(stage)
    assert known is not None
    assert (known.streak, known.why) == (1, f"slice {first[0]}: its agents did not all join within 300 s")
    stage.do(slices.release, second[0], "changed our mind")
    assert zone(stage) == known


@pytest.mark.parametrize("asked", [False, True])
def test_a_zone_that_was_never_asked_did_not_refuse(stage: Stage, asked: bool) -> None:
    (id,) = stage.intend()
    if asked:
        stage.see(id, CREATING)
    stage.clock.advance(limits.CREATE_TIMEOUT_S)
    stage.do(slices.release, id, "not ready within 1800 s")
    known = zone(stage)
    assert (known is not None and known.streak == 1) is asked


def test_a_set_up_that_fails_counts_only_while_the_slice_is_coming_and_is_the_same_machine(stage: Stage) -> None:
    (id,) = stage.intend()
    stage.do(slices.observe, [seen(id, CREATING)])
    machine = stage.slice(id).provider_id
    assert machine is not None
    with pytest.raises(Outdated):
        stage.do(slices.fail_setup, id, 0, "another machine", "log")
    stage.do(slices.fail_setup, id, 0, machine, "first\nno space left\n")
    assert stage.slice(id).state is SliceState.FAILED
    assert stage.slice(id).why == "host 0 could not be set up: no space left"
    known = zone(stage)
    assert known is not None
    assert known.broken == 1
    assert "first | no space left" in known.why
    with pytest.raises(Outdated):
        stage.do(slices.fail_setup, id, 0, machine, "again")
