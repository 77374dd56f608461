"""Which slices growth asks for, where, and the reason it gives when it cannot."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.domain import limits
from penstock.domain.nouns import Quota, Team, Zone
from penstock.planner.actions import Intend, Want
from penstock.planner.scaling import grow, settle
from penstock.planner.snapshot import Mute, Snapshot, Witness
from tests.planner.live import (
    CREATING,
    INTENDED,
    NOW,
    add_slice,
    back_off,
    pool_with,
    want,
    world,
)


def test_each_want_is_asked_for_once() -> None:
    snapshot = world()
    intents, reasons = grow(snapshot, NOW, [want("j1"), want("j2", 2)])
    assert [intent.zones for intent in intents] == [("a",)] * 3
    assert {job: reason.code for job, reason in reasons.items()} == dict.fromkeys(("j1", "j2"), "creating_slices")


def test_what_is_coming_serves_wants_in_order() -> None:
    snapshot = world()
    add_slice(snapshot, "s1", **INTENDED)
    add_slice(snapshot, "s2", race="r", **CREATING)
    add_slice(snapshot, "s3", race="r", zone="b", **CREATING)
    assert grow(snapshot, NOW, [want("j1"), want("j2")])[0] == []
    assert len(grow(snapshot, NOW, [want("j1"), want("j2"), want("j3")])[0]) == 1


@pytest.mark.parametrize("changes", [{"team": "u"}, {"pool": "other"}, {"zone": "b"}])
def test_slices_for_others_serve_no_want(changes: dict[str, object]) -> None:
    snapshot = world()
    snapshot.put_pool(pool_with(name="other"))
    add_slice(snapshot, "s1", **{**INTENDED, **changes})
    assert len(grow(snapshot, NOW, [want(zones=("a",))])[0]) == 1


def test_a_later_pool_that_is_making_the_slice_is_not_doubled() -> None:
    snapshot = world()
    snapshot.put_pool(pool_with(name="spare"))
    add_slice(snapshot, "s1", pool="spare", **CREATING)
    assert grow(snapshot, NOW, [want(pools=("p", "spare"))])[0] == []


def test_the_minimum_that_settle_asks_for_serves_wants_too() -> None:
    snapshot = world(pool_with(min=1, max=2))
    intents, _ = grow(snapshot, NOW, [want("j1"), want("j2")])
    assert len(intents) == 1
    assert len(settle(snapshot, NOW, set())) == 1


def test_a_gang_is_asked_for_in_one_zone() -> None:
    snapshot = world()
    back_off(snapshot, "a", 50.0)
    intents, _ = grow(snapshot, NOW, [want(slices=3, same_zone=True)])
    assert [intent.zones for intent in intents] == [("b",)] * 3


def test_a_gang_goes_on_where_it_began() -> None:
    snapshot = world()
    add_slice(snapshot, "s1", zone="c", **CREATING)
    intents, _ = grow(snapshot, NOW, [want(slices=3, same_zone=True)])
    assert [intent.zones for intent in intents] == [("c",)] * 2
    back_off(snapshot, "c", 50.0)
    intents, reasons = grow(snapshot, NOW, [want(slices=3, same_zone=True)])
    assert (intents, reasons["j"].code) == ([], "zone_backoff")


def test_a_zone_in_back_off_is_explained_by_what_its_provider_said() -> None:
    snapshot = world(pool_with(zones=("a",)))
    back_off(snapshot, "a", 50.0, why="v4-8 is not sold here")
    _, reasons = grow(snapshot, NOW, [want()])
    assert reasons["j"].sentence == "zone a of pool p refused lately: v4-8 is not sold here; the next try is in 50 s"
    assert reasons["j"].advice == "give pool p more zones"
    back_off(snapshot, "a", 50.0, why="Type 'v4-8' is not here (or it may not exist).")
    _, reasons = grow(snapshot, NOW, [want()])
    said = "zone a of pool p refused lately: Type 'v4-8' is not here (or it may not exist); the next try is in 50 s"
    assert reasons["j"].sentence == said
    snapshot = world()
    for zone in "abc":
        back_off(snapshot, zone, 50.0)
    assert "every zone of pool p refused lately; the" in grow(snapshot, NOW, [want()])[1]["j"].sentence


def test_a_gang_that_does_not_fit_is_not_begun() -> None:
    snapshot = world(pool_with(max=3))
    add_slice(snapshot, "s1")
    intents, reasons = grow(snapshot, NOW, [want(slices=3), want("k", 2)])
    assert len(intents) == 2
    assert reasons["j"].code == "pool_at_max"
    assert reasons["j"].numbers == {"held": 1, "max": 3, "wanted": 3}
    assert reasons["j"].advice == "raise the maximum of pool p to 4"


def test_a_race_asks_several_zones_and_skips_dry_ones() -> None:
    snapshot = world(pool_with(race=2))
    assert grow(snapshot, NOW, [want()])[0][0].zones == ("a", "b")
    back_off(snapshot, "b", 10.0)
    assert grow(snapshot, NOW, [want()])[0][0].zones == ("a", "c")


def test_a_race_is_never_wider_than_its_limit() -> None:
    snapshot = world(pool_with(race=9, zones=tuple("abcdefghi")))
    assert len(grow(snapshot, NOW, [want()])[0][0].zones) == limits.RACE_ZONES_MAX


def test_a_race_counts_each_zone_for_the_provider_and_once_for_the_team() -> None:
    snapshot = world(pool_with(race=3))
    snapshot.put_team(Team(name="t", chip_limit=8))
    snapshot.put_quota(Quota(scope="provider", name="fake", limit_chips=16))
    intents, reasons = grow(snapshot, NOW, [want("j1"), want("j2"), want("j3")])
    assert [len(intent.zones) for intent in intents] == [3, 1]
    assert reasons["j3"].code == "team_limit"


def test_a_race_leaves_the_provider_room_for_the_rest_of_the_want() -> None:
    snapshot = world(pool_with(race=3))
    snapshot.put_quota(Quota(scope="provider", name="fake", limit_chips=12))
    intents, _ = grow(snapshot, NOW, [want(slices=2)])
    assert [len(intent.zones) for intent in intents] == [2, 1]


# --- creations that are slow ---
def slow(snapshot: Snapshot, id: str, zone: str = "a", **changes: object) -> None:
    """A creation that should long have been ready, in a zone of which nothing is known."""
    add_slice(snapshot, id, zone=zone, **{**CREATING, "asked_at": NOW - limits.SLOW_UNKNOWN_S, **changes})


def second_tries(snapshot: Snapshot, *wants: Want) -> list[tuple[str | None, tuple[str, ...]]]:
    return [(intent.beside, intent.zones) for intent in grow(snapshot, NOW, wants or [want()])[0]]


def test_a_creation_that_is_slow_is_raced_in_another_zone() -> None:
    snapshot = world()
    slow(snapshot, "s1", asked_at=NOW - limits.SLOW_UNKNOWN_S + 1)
    assert second_tries(snapshot) == []
    slow(snapshot, "s1")
    assert second_tries(snapshot) == [("s1", ("b",))]
    assert second_tries(world()) == [(None, ("a",))], "and only what is on its way is raced"


@pytest.mark.parametrize(("usual_s", "slow_s"), [(10.0, limits.SLOW_LEAST_S), (100.0, 300.0), (500.0, 1500.0)])
def test_what_is_slow_is_told_by_what_others_took_there(usual_s: float, slow_s: float) -> None:
    snapshot = world()
    snapshot.put_zone(Zone(provider="fake", zone="a", accelerator="v4-8", spot=False, tries=1, ready_s=usual_s))
    slow(snapshot, "s1", asked_at=NOW - slow_s + 1)
    assert second_tries(snapshot) == []
    slow(snapshot, "s1", asked_at=NOW - slow_s)
    assert second_tries(snapshot) == [("s1", ("b",))]


def test_time_in_our_own_line_is_not_the_zones() -> None:
    snapshot = world()
    slow(snapshot, "s1", intended_at=NOW - 1000.0, asked_at=NOW - 1.0)
    assert second_tries(snapshot) == []


def test_an_intent_is_slow_from_its_first_try_and_never_before() -> None:
    snapshot = world()
    add_slice(snapshot, "s1", **{**INTENDED, "intended_at": NOW - 1700.0})
    assert second_tries(snapshot) == []
    snapshot.witness = Witness(tried={"s1": limits.SLOW_UNKNOWN_S - 1})
    assert second_tries(snapshot) == []
    snapshot.witness = Witness(tried={"s1": limits.SLOW_UNKNOWN_S})
    assert second_tries(snapshot) == [("s1", ("b",))]


def test_one_zone_more_at_a_time_up_to_the_limit_of_a_race() -> None:
    snapshot = world(pool_with(zones=tuple("abcdef")))
    slow(snapshot, "s1", race="r")
    add_slice(snapshot, "s2", zone="b", race="r", **CREATING)
    assert second_tries(snapshot) == []
    for number, zone in enumerate("bcd", 2):
        slow(snapshot, f"s{number}", zone, race="r")
        following = [("s1", (chr(ord(zone) + 1),))] if number < limits.RACE_ZONES_MAX else []
        assert second_tries(snapshot) == following


def test_a_slow_zone_is_no_second_try_for_another() -> None:
    snapshot = world()
    slow(snapshot, "s1")
    slow(snapshot, "s2", "b")
    assert second_tries(snapshot, want("j1"), want("j2")) == [("s1", ("c",)), ("s2", ("c",))]
    slow(snapshot, "s3", "c")
    assert second_tries(snapshot) == []


@pytest.mark.parametrize("case", ["gang", "zones", "limit", "back-off", "nobody waits", "fleet"])
def test_what_must_not_be_raced(case: str) -> None:
    # A full fleet: whatever is made beside one of its slices is one too many in another zone.
    snapshot = world(pool_with(per_zone=1, max=3) if case == "fleet" else pool_with())
    if case == "fleet":
        add_slice(snapshot, "s2", zone="b", attempt="x")
        add_slice(snapshot, "s3", zone="c", attempt="y")
    slow(snapshot, "s1")
    wants = [want(same_zone=True)] if case == "gang" else [want(zones=("a",))] if case == "zones" else [want()]
    if case == "limit":
        snapshot.put_quota(Quota(scope="provider", name="fake", limit_chips=4))
    if case == "back-off":
        for zone in "bc":
            back_off(snapshot, zone, 10.0)
    assert grow(snapshot, NOW, [] if case == "nobody waits" else wants)[0] == []


def test_a_second_try_needs_room_at_the_provider_alone() -> None:
    """The race counts once for team and pool, and it does already."""
    snapshot = world(pool_with(max=1))
    snapshot.put_team(Team(name="t", chip_limit=4))
    snapshot.put_quota(Quota(scope="provider", name="fake", limit_chips=8))
    slow(snapshot, "s1")
    assert second_tries(snapshot) == [("s1", ("b",))]


# --- large fleets ---
def test_no_more_is_intended_than_can_be_asked_for_soon() -> None:
    snapshot = world(pool_with(per_zone=200, max=600))
    asked = [action.zones for action in settle(snapshot, NOW, set()) if isinstance(action, Intend)]
    assert Counter(asked) == dict.fromkeys((("a",), ("b",), ("c",)), limits.INTENTS_PER_ZONE)
    for number in range(limits.INTENTS_PER_ZONE - 1):
        add_slice(snapshot, f"i{number}", number=number, **INTENDED)
    add_slice(snapshot, "c", number=199, **CREATING)
    asked = [action.zones for action in settle(snapshot, NOW, set()) if isinstance(action, Intend)]
    assert Counter(asked)[("a",)] == 1, "those that were asked for wait for their provider, not for us"
    assert Counter(asked)[("b",)] == limits.INTENTS_PER_ZONE, "a zone that is behind holds up no other"


def test_jobs_that_wait_for_a_fleet_ask_for_nothing_beside_its_places() -> None:
    """More than it may line up is not intended yet; a job that wants one of those must not make one without a place."""
    snapshot = world(pool_with(zones=("a",), per_zone=200, max=200))
    for number in range(limits.INTENTS_PER_ZONE):
        add_slice(snapshot, f"i{number}", number=number, **INTENDED)
    intents, reasons = grow(snapshot, NOW, [want(f"j{number}") for number in range(limits.INTENTS_PER_ZONE + 1)])
    assert intents == []
    assert {reason.code for reason in reasons.values()} == {"creating_slices"}


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("team", "team_limit"),
        ("provider", "provider_limit"),
        ("max", "pool_at_max"),
        ("back-off", "zone_backoff"),
        ("zones", "no_zone"),
        ("deleted", "no_pool"),
        ("maintenance", "maintenance"),
    ],
)
def test_the_reason_for_not_growing(case: str, code: str) -> None:
    snapshot = world(pool_with(max=0 if case == "max" else 9, deleted=case == "deleted"))
    snapshot.maintenance = case == "maintenance"
    if case == "team":
        snapshot.put_team(Team(name="t", chip_limit=3))
    if case == "provider":
        snapshot.put_quota(Quota(scope="provider", name="fake", limit_chips=3))
    if case == "back-off":
        for number, zone in enumerate("abc"):
            back_off(snapshot, zone, 40.0 - number)
    intents, reasons = grow(snapshot, NOW, [want(zones=("elsewhere",) if case == "zones" else ())])
    assert (intents, reasons["j"].code) == ([], code)
    if case == "back-off":
        assert reasons["j"].numbers["seconds"] == 38.0


def test_the_next_pool_is_asked_when_the_first_is_full() -> None:
    snapshot = world(pool_with(max=0))
    snapshot.put_pool(pool_with(name="spare"))
    intents, _ = grow(snapshot, NOW, [want(pools=("p", "spare"))])
    assert [intent.pool for intent in intents] == ["spare"]


def test_waiting_for_a_back_off_is_told_before_a_limit() -> None:
    snapshot = world(pool_with(max=0))
    snapshot.put_pool(pool_with(name="spare", zones=("b",)))
    back_off(snapshot, "b", 7.0)
    assert grow(snapshot, NOW, [want(pools=("p", "spare"))])[1]["j"].code == "zone_backoff"


@pytest.mark.parametrize(
    ("mute", "told"),
    [
        (Mute(seconds=42.0), "the API of zone a has not answered for 42 s"),
        (
            Mute(seconds=42.0, said="no such right", denied=True),
            "the API of zone a has refused for 42 s: no such right",
        ),
    ],
)
def test_zones_that_cannot_be_seen_are_passed_over_and_told_of(mute: Mute, told: str) -> None:
    snapshot = world(pool_with(zones=("a", "b")))
    snapshot.witness = Witness(mute={("fake", "a"): mute})
    (intent,), _ = grow(snapshot, NOW, [want()])
    assert intent.zones == ("b",)
    snapshot.witness = Witness(mute={("fake", "a"): mute, ("fake", "b"): Mute(seconds=1.0, denied=True)})
    intents, reasons = grow(snapshot, NOW, [want()])
    assert (intents, reasons["j"].code) == ([], "zone_mute")
    assert told in reasons["j"].sentence
    assert "and so it is in 1 more" in reasons["j"].sentence
    assert reasons["j"].advice


def test_what_waits_in_a_zone_that_cannot_be_seen_is_slow() -> None:
    """It was perhaps asked for by an earlier server, and is not asked for again there: another zone is."""
    snapshot = world()
    add_slice(snapshot, "s1", **INTENDED)
    snapshot.witness = Witness(mute={("fake", "a"): Mute(seconds=limits.SLOW_UNKNOWN_S - 1)})
    assert second_tries(snapshot) == []
    snapshot.witness = Witness(mute={("fake", "a"): Mute(seconds=limits.SLOW_UNKNOWN_S)})
    assert second_tries(snapshot) == [("s1", ("b",))]
