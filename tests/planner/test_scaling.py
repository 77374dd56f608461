"""What scaling does to each kind of slice and pool on its way in, at rest, and on its way out."""

from __future__ import annotations

import msgspec
import pytest

from penstock.domain import limits
from penstock.domain.cloud import CloudWish
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Quota, Team, Zone
from penstock.planner.actions import Action, Ask, Bury, Create, Delete, Drain, Intend, Release
from penstock.planner.scaling import settle
from penstock.planner.slices import leaving
from penstock.planner.snapshot import Mute, Snapshot, Witness
from tests.planner.live import (
    CREATING,
    INTENDED,
    NOW,
    add_running,
    add_slice,
    back_off,
    change_attempt,
    change_slice,
    pool_with,
    world,
)

DENIED = {("fake", "a"): Mute(seconds=4.0, said="no", denied=True)}
HUNG = {("fake", "a"): Mute(seconds=20.0)}
NEVER_MADE = "nothing was ever made of it: no create of it was sent that was not refused"


def settled(snapshot: Snapshot, *keep: str) -> list[Action]:
    return settle(snapshot, NOW, set(keep))


def released(snapshot: Snapshot, *keep: str) -> list[str]:
    actions = settled(snapshot, *keep)
    assert all(isinstance(action, Release) for action in actions), actions
    return [action.slice for action in actions if isinstance(action, Release)]


# --- slices on their way in ---
def test_an_intended_slice_is_created() -> None:
    snapshot = world()
    add_slice(snapshot, "s", **INTENDED)
    assert settled(snapshot) == [Create("s")]


@pytest.mark.parametrize("case", ["busy", "maintenance", "short back-off"])
def test_an_intended_slice_waits(case: str) -> None:
    snapshot = world()
    add_slice(snapshot, "s", **INTENDED)
    snapshot.maintenance = case == "maintenance"
    snapshot.witness = Witness(busy={"s"} if case == "busy" else set())
    if case == "short back-off":
        back_off(snapshot, "a", limits.ZONE_BACKOFF_FIRST_S)
    assert settled(snapshot) == []


def test_an_intended_slice_goes_elsewhere_when_its_zone_turned_dry() -> None:
    snapshot = world()
    add_slice(snapshot, "s", **INTENDED)
    back_off(snapshot, "a", limits.ZONE_BACKOFF_FIRST_S + 1)
    assert released(snapshot) == ["s"]


@pytest.mark.parametrize("mute", [DENIED, HUNG])
def test_nothing_is_asked_for_where_nothing_can_be_seen(mute: dict[tuple[str, str], Mute]) -> None:
    """What may have been made already is waited for; what surely was not is let go, and its zone chosen anew."""
    snapshot = world(pool_with(min=1, max=2, zones=("a",)))
    snapshot.witness = Witness(mute=mute)
    assert settled(snapshot) == []
    add_slice(snapshot, "s", **INTENDED)
    assert settled(snapshot) == []
    snapshot.witness = Witness(mute=mute, unmade={"s"})
    assert released(snapshot) == ["s"]
    snapshot.witness = Witness(unmade={"s"})
    assert settled(snapshot) == [Create("s")]


@pytest.mark.parametrize("state", [INTENDED, CREATING])
def test_a_slice_that_never_gets_ready_is_given_up(state: dict[str, object]) -> None:
    snapshot = world()
    add_slice(snapshot, "s", **state)
    change_slice(snapshot, "s", intended_at=NOW - limits.CREATE_TIMEOUT_S)
    assert released(snapshot) == ["s"]


@pytest.mark.parametrize(
    ("usual_s", "wish", "patience_s"),
    [
        (5.0, None, limits.CREATE_TIMEOUT_LEAST_S),
        (90.0, None, 900.0),
        (500.0, None, limits.CREATE_TIMEOUT_S),
        (None, None, limits.CREATE_TIMEOUT_S),
        (5.0, CloudWish(queued=True), limits.CREATE_TIMEOUT_S),
        (5.0, CloudWish(kind="flex-start", wait_s=7200.0), 7200.0 + limits.ZONE_BACKOFF_FIRST_S),
    ],
)
def test_patience_is_learned_but_not_for_a_place_in_a_line(
    usual_s: float | None, wish: CloudWish | None, patience_s: float
) -> None:
    snapshot = world()
    snapshot.put_zone(Zone(provider="fake", zone="a", accelerator="v4-8", spot=False, tries=1, ready_s=usual_s))
    add_slice(snapshot, "s", **{**CREATING, "cloud": wish, "asked_at": NOW - patience_s + 1, "intended_at": 0.0})
    assert released(snapshot) == []
    change_slice(snapshot, "s", asked_at=NOW - patience_s)
    assert released(snapshot) == ["s"]


@pytest.mark.parametrize("state", [INTENDED, CREATING])
def test_what_others_took_says_nothing_of_one_whose_request_has_no_date(state: dict[str, object]) -> None:
    """One still waits for its turn. The other is a row of an older version, which must outlive the upgrade."""
    snapshot = world()
    snapshot.put_zone(Zone(provider="fake", zone="a", accelerator="v4-8", spot=False, tries=1, ready_s=5.0))
    add_slice(snapshot, "s", **{**state, "intended_at": NOW - limits.CREATE_TIMEOUT_S + 1})
    assert not any(isinstance(action, Release) for action in settled(snapshot))
    change_slice(snapshot, "s", intended_at=NOW - limits.CREATE_TIMEOUT_S)
    assert released(snapshot) == ["s"]


@pytest.mark.parametrize("tried", [False, True])
def test_a_zone_is_blamed_for_an_intent_only_if_it_was_asked(tried: bool) -> None:
    snapshot = world()
    add_slice(snapshot, "s", **{**INTENDED, "intended_at": NOW - limits.CREATE_TIMEOUT_S})
    snapshot.witness = Witness(tried={"s": 100.0} if tried else {})
    (action,) = settled(snapshot)
    assert isinstance(action, Release)
    assert action.useless is tried


@pytest.mark.parametrize("adopted", [False, True])
def test_a_slice_whose_agents_do_not_join_is_given_up(adopted: bool) -> None:
    """That a person could not set up what was adopted says nothing of its zone."""
    snapshot = world(pool_with(adopted=adopted))
    add_slice(snapshot, "s", **CREATING)
    change_slice(snapshot, "s", provider_state="READY")
    snapshot.witness = Witness(unjoined={"s": limits.JOIN_TIMEOUT_S - 1})
    assert settled(snapshot) == []
    snapshot.witness.unjoined["s"] += 1
    (action,) = settled(snapshot)
    assert action == Release("s", "its agents did not all join within 300 s", useless=not adopted)


def test_a_creating_slice_is_waited_for() -> None:
    snapshot = world()
    add_slice(snapshot, "s", **CREATING)
    assert settled(snapshot) == []


# --- slices on their way out ---
@pytest.mark.parametrize(
    "changes",
    [
        {"state": SliceState.PREEMPTED},
        {"state": SliceState.FAILED},
        {"state": SliceState.DRAINING},
        {"dirty": True},
    ],
)
def test_a_slice_of_no_use_is_released_once_its_attempt_closed(changes: dict[str, object]) -> None:
    snapshot = world()
    add_running(snapshot, "x", ("s",))
    change_slice(snapshot, "s", **changes)
    assert settled(snapshot) == []
    change_attempt(snapshot, "x", state="closed")
    change_slice(snapshot, "s", attempt=None)
    assert released(snapshot) == ["s"]


@pytest.mark.parametrize("state", [SliceState.INTENDED, SliceState.CREATING, SliceState.READY])
def test_a_deleted_pool_lets_everything_go(state: SliceState) -> None:
    snapshot = world(pool_with(deleted=True, min=1))
    add_slice(snapshot, "s", state=state)
    add_running(snapshot, "x", ("busy",))
    assert released(snapshot, "s") == ["s"]


def test_a_slice_of_an_unknown_pool_is_let_go() -> None:
    snapshot = world()
    add_slice(snapshot, "s", pool="lost")
    assert released(snapshot) == ["s"]


@pytest.mark.parametrize(
    ("witness", "expected"),
    [
        (Witness(), [Delete("s")]),
        (Witness(busy={"s"}), []),
        (Witness(deletes={"s": limits.DELETE_RETRY_S - 1}), []),
        (Witness(deletes={"s": limits.DELETE_RETRY_S}), [Delete("s")]),
        (Witness(deletes={"s": limits.DELETE_RETRY_S}, absent={"s": 30.0}), []),
        (Witness(absent={"s": 30.0}), [Delete("s")]),
        (Witness(absent={"s": 30.0}, missing={"s"}, deletes={"s": 1.0}), []),
        (Witness(absent={"s": 60.0}), [Ask("s", "deleted and absent from listings")]),
        (Witness(absent={"s": 60.0}, asked={"s": 1.0}), []),
        (Witness(absent={"s": 60.0}, busy={"s"}), []),
        (
            Witness(absent={"s": 60.0}, denied={"s"}),
            [Bury("s", ("absent from complete listings 60 s apart", "a direct get found nothing"))],
        ),
        (Witness(denied={"s"}, deletes={"s": 1.0}), []),
        (Witness(unmade={"s"}), [Bury("s", (NEVER_MADE,))]),
        (Witness(unmade={"s"}, mute=DENIED), [Bury("s", (NEVER_MADE,))]),
        (Witness(unmade={"s"}, busy={"s"}), []),
        (Witness(mute=DENIED), [Delete("s")]),
    ],
)
def test_a_deleting_slice_is_deleted_until_its_absence_is_proven(witness: Witness, expected: list[Action]) -> None:
    snapshot = world()
    add_slice(snapshot, "s", state=SliceState.DELETING, idle_since=None)
    snapshot.witness = witness
    assert settled(snapshot) == expected


@pytest.mark.parametrize("state", [CREATING, dict[str, object]()])
def test_a_slice_that_vanished_is_asked_about_and_then_released(state: dict[str, object]) -> None:
    snapshot = world()
    add_slice(snapshot, "s", **state)
    snapshot.witness = Witness(absent={"s": 59.0})
    assert settled(snapshot) == []
    snapshot.witness = Witness(absent={"s": 60.0})
    assert settled(snapshot) == [Ask("s", "absent from listings")]
    snapshot.witness = Witness(absent={"s": 60.0}, denied={"s"})
    assert released(snapshot) == ["s"]


@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize("changes", [{"dirty": True}, {"state": SliceState.DRAINING}, dict[str, object]()])
def test_what_its_provider_denies_was_not_let_go_by_us(changes: dict[str, object], missing: bool) -> None:
    """Whoever commits the release then counts it as a loss."""
    snapshot = world()
    add_slice(snapshot, "s", **changes)
    snapshot.witness = Witness(missing={"s"} if missing else set())
    if not changes and missing:
        snapshot.witness = Witness(absent={"s": 60.0}, missing={"s"}, denied={"s"})
    found = [action.vanished for action in settled(snapshot) if isinstance(action, Release)]
    assert found == ([missing] if changes or missing else [])


@pytest.mark.parametrize("resting", ["spot", "reserved"])
def test_only_the_back_off_of_its_own_kind_holds_an_intended_slice(resting: str) -> None:
    """Its pool may have been changed to another kind since."""
    snapshot = world(pool_with(cloud=CloudWish(kind="flex-start")))
    add_slice(snapshot, "s", cloud=CloudWish(kind="reserved"), **INTENDED)
    dry = Zone(provider="fake", zone="a", accelerator="v4-8", spot=resting == "spot", kind=resting)
    snapshot.put_zone(msgspec.structs.replace(dry, backoff_until=NOW + 5.0))
    assert settled(snapshot) == ([] if resting == "reserved" else [Create("s")])


def test_an_intended_slice_may_be_absent() -> None:
    snapshot = world()
    add_slice(snapshot, "s", **INTENDED)
    snapshot.witness = Witness(absent={"s": 500.0}, denied={"s"})
    assert settled(snapshot) == [Create("s")]


def test_a_held_slice_that_vanished_is_not_released() -> None:
    snapshot = world()
    add_running(snapshot, "x", ("s",))
    snapshot.witness = Witness(absent={"s": 60.0}, denied={"s"})
    assert settled(snapshot) == []


# --- idle slices ---
def test_the_longest_idle_go_first_and_the_minimum_stays() -> None:
    snapshot = world(pool_with(min=2, idle_s=600.0))
    for name, idle in (("s1", 700.0), ("s2", 900.0), ("s3", 800.0), ("s4", 10.0)):
        add_slice(snapshot, name, idle_since=NOW - idle)
    assert released(snapshot) == ["s2", "s3"]


def test_incident_12_a_slice_that_waiting_jobs_could_use_is_kept() -> None:
    snapshot = world()
    add_slice(snapshot, "s1", idle_since=NOW - 5000.0)
    add_slice(snapshot, "s2", idle_since=NOW - 5000.0)
    assert released(snapshot, "s1") == ["s2"]


@pytest.mark.parametrize(("idle", "gone"), [(599.0, []), (600.0, ["s"])])
def test_idle_time_is_the_pools(idle: float, gone: list[str]) -> None:
    snapshot = world(pool_with(idle_s=600.0))
    add_slice(snapshot, "s", idle_since=NOW - idle)
    assert released(snapshot) == gone


def test_slices_that_are_leaving_do_not_fill_the_minimum() -> None:
    snapshot = world(pool_with(min=1, idle_s=600.0))
    add_slice(snapshot, "s1", idle_since=NOW - 700.0)
    add_slice(snapshot, "s2", dirty=True)
    assert released(snapshot) == ["s2"]
    add_running(snapshot, "x", ("s3",))
    change_slice(snapshot, "s3", state=SliceState.DRAINING)
    assert released(snapshot) == ["s2"]


# --- races ---
def test_a_won_race_lets_the_others_go() -> None:
    snapshot = world()
    add_slice(snapshot, "s1", race="r", **CREATING)
    add_slice(snapshot, "s2", race="r", **INTENDED)
    assert settled(snapshot) == [Create("s2")]
    add_slice(snapshot, "s3", race="r")
    assert released(snapshot) == ["s1", "s2"]


def test_of_two_ready_ones_the_first_or_the_one_in_use_is_kept() -> None:
    snapshot = world()
    add_slice(snapshot, "s1", race="r", ready_at=NOW - 5)
    add_slice(snapshot, "s2", race="r", ready_at=NOW - 9)
    assert released(snapshot, "s1", "s2") == ["s1"]
    add_running(snapshot, "x", ("s1",))
    change_slice(snapshot, "s1", race="r")
    assert released(snapshot) == ["s2"]


def test_a_race_whose_winner_was_lost_goes_on() -> None:
    snapshot = world()
    add_slice(snapshot, "s1", race="r", state=SliceState.PREEMPTED)
    add_slice(snapshot, "s2", race="r", **CREATING)
    assert released(snapshot) == ["s1"]


def test_a_lost_race_does_not_count_for_the_minimum_twice() -> None:
    snapshot = world(pool_with(min=1, idle_s=10.0))
    add_slice(snapshot, "s1", race="r", idle_since=NOW - 50)
    add_slice(snapshot, "s2", race="r", **CREATING)
    assert released(snapshot) == ["s2"]


# --- pools ---
def test_a_pool_below_its_minimum_asks_for_more() -> None:
    snapshot = world(pool_with(min=3))
    add_slice(snapshot, "s1")
    add_running(snapshot, "x", ("s2",))
    change_slice(snapshot, "s2", state=SliceState.DRAINING)
    asked = settled(snapshot)
    assert [(action.pool, action.team) for action in asked if isinstance(action, Intend)] == [("p", "t")] * 2


@pytest.mark.parametrize("case", ["maintenance", "back-off", "team", "provider", "max"])
def test_a_minimum_is_no_reason_to_break_a_limit(case: str) -> None:
    snapshot = world(pool_with(min=1, max=0 if case == "max" else 1))
    snapshot.maintenance = case == "maintenance"
    if case == "back-off":
        for zone in "abc":
            back_off(snapshot, zone, 5.0)
    if case == "team":
        snapshot.put_team(Team(name="t", chip_limit=3))
    if case == "provider":
        snapshot.put_quota(Quota(scope="provider", name="fake", limit_chips=3))
    assert settled(snapshot) == []


def test_a_fleet_has_its_count_in_each_zone() -> None:
    snapshot = world(pool_with(per_zone=2))
    add_slice(snapshot, "s1", zone="a")
    add_slice(snapshot, "s2", zone="b", idle_since=NOW - 9)
    add_slice(snapshot, "s3", zone="b", idle_since=NOW - 8)
    add_slice(snapshot, "s4", zone="b", idle_since=NOW - 7)
    add_slice(snapshot, "s5", zone="left")
    back_off(snapshot, "c", 100.0)
    asked = Intend(pool="p", team="t", zones=("a",), number=0)
    assert settled(snapshot) == [
        Release("s2", "pool p has more than 2 in b"),
        Release("s5", "pool p has more than 0 in left"),
        asked,
    ]


def intended(snapshot: Snapshot) -> list[tuple[str, tuple[str, ...], int | None]]:
    return [(one.pool, one.zones, one.number) for one in settled(snapshot) if isinstance(one, Intend)]


@pytest.mark.parametrize("written", [True, False], ids=["", "made by an earlier release"])
def test_a_place_in_a_fleet_is_taken_over_and_never_shared(written: bool) -> None:
    snapshot = world(pool_with(per_zone=3, places=((0, 1, 2),) * 3 if written else ()))
    second = pool_with(name="q", per_zone=2, zones=("a",), places=((3, 4),) if written else ())
    snapshot.put_pool(second)
    add_slice(snapshot, "s0", zone="a", number=0)
    add_slice(snapshot, "s1", zone="a", number=1, state=SliceState.PREEMPTED)
    add_slice(snapshot, "s2", zone="a", number=2)
    add_slice(snapshot, "s3", zone="b", number=1)
    back_off(snapshot, "c", 100.0)
    assert intended(snapshot) == [
        ("p", ("a",), 1),
        ("p", ("b",), 0),
        ("p", ("b",), 2),
        ("q", ("a",), 3),
        ("q", ("a",), 4),
    ]


def test_a_place_stays_its_fleets_while_nobody_is_in_it() -> None:
    """The slice that was in place 1 is gone altogether: what another fleet asks for first must not get its name."""
    snapshot = world(pool_with(name="z", zones=("a",), per_zone=2, places=((0, 1),)))
    snapshot.put_pool(pool_with(name="b", zones=("a",), per_zone=2, places=((2, 3),)))
    add_slice(snapshot, "s0", pool="z", number=0)
    add_slice(snapshot, "s2", pool="b", number=2)
    assert intended(snapshot) == [("b", ("a",), 3), ("z", ("a",), 1)]


def test_a_fleet_made_smaller_loses_its_highest_places_whoever_is_in_them() -> None:
    snapshot = world(pool_with(zones=("a",), per_zone=2, max=2, places=((0, 1),)))
    add_slice(snapshot, "old", number=0, idle_since=NOW - 9)
    add_running(snapshot, "x", ("busy",))
    change_slice(snapshot, "busy", number=2)
    add_slice(snapshot, "new", number=3)
    add_slice(snapshot, "wish", number=4, **INTENDED)
    add_slice(snapshot, "on its way", number=5, **CREATING)
    why = "fleet p was made smaller"
    assert [action for action in settled(snapshot) if not isinstance(action, Intend)] == [
        Drain("busy", why),
        Release("new", why),
        Release("on its way", why),
        Release("wish", why),
    ]


def test_of_two_in_one_place_one_stays() -> None:
    snapshot = world(pool_with(zones=("a",), per_zone=2, max=2, places=((0, 1),)))
    add_slice(snapshot, "s0", number=0)
    add_slice(snapshot, "s1", number=0, **CREATING)
    assert settled(snapshot) == [Release("s1", "pool p has more than 2 in a")]
    change_slice(snapshot, "s1", state=SliceState.DRAINING, attempt="x")
    assert settled(snapshot) == [], "the maximum leaves no room before it is gone"


def test_no_job_starts_in_a_place_that_its_fleet_no_longer_has() -> None:
    snapshot = world(pool_with(zones=("a",), per_zone=1, max=1, places=((0,),)))
    kept, left = add_slice(snapshot, "s0", number=0), add_slice(snapshot, "s1", number=1)
    assert (leaving(snapshot, kept), leaving(snapshot, left)) == (None, "fleet p was made smaller")


def test_a_full_fleet_is_left_alone_however_idle() -> None:
    snapshot = world(pool_with(per_zone=1))
    for zone in "abc":
        add_slice(snapshot, f"s{zone}", zone=zone, idle_since=NOW - 1e6)
    assert settled(snapshot) == []


def test_a_pool_made_smaller_lets_go_of_what_hurts_least() -> None:
    snapshot = world(pool_with(max=5))
    for name in ("i1", "i2"):
        add_slice(snapshot, name, idle_since=NOW - 3)
    add_slice(snapshot, "n", **CREATING)
    for name, age in (("x1", 10.0), ("x2", 30.0), ("x3", 20.0)):
        add_running(snapshot, name, (f"b{name}",), created_at=NOW - age)
    why = "pool p was made smaller"
    assert settled(snapshot) == [Release("n", why)]
    snapshot.put_pool(pool_with(max=4))
    assert settled(snapshot) == [Release("i1", why), Release("n", why)]
    snapshot.put_pool(pool_with(max=1))
    expected = [Drain("bx1", why), Drain("bx3", why), Release("i1", why), Release("i2", why), Release("n", why)]
    assert settled(snapshot) == expected


def test_a_pool_made_smaller_drains_each_slice_once_and_leaves_doubtful_ones() -> None:
    snapshot = world(pool_with(max=1))
    for number in range(3):
        add_running(snapshot, f"x{number}", (f"s{number}",), created_at=NOW - number)
    snapshot.witness = Witness(silent={"s0": 20.0}, absent={"s1": 70.0})
    assert settled(snapshot) == [Drain("s2", "pool p was made smaller")]
    change_slice(snapshot, "s2", state=SliceState.DRAINING)
    snapshot.witness = Witness()
    assert settled(snapshot) == [Drain("s0", "pool p was made smaller")]
    change_slice(snapshot, "s0", state=SliceState.DRAINING)
    assert settled(snapshot) == []
