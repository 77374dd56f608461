"""Places of fleets: kept, given and taken away by number."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain import places
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Pool, Slice

FLEET = Pool(
    name="f", team="t", provider="fake", accelerator="v4-8", chips=4, hosts=1, zones=("a", "b"), max=100, per_zone=2
)


def fleet(**changes: object) -> Pool:
    return msgspec.structs.replace(FLEET, **changes)


def a_slice(number: int | None, **changes: object) -> Slice:
    slice = Slice(
        id=f"s{number}", team="t", pool="f", provider="fake", zone="a", accelerator="v4-8", chips=4, hosts=1,
        intended_at=0.0, number=number, state=SliceState.READY,
    )  # fmt: skip
    return msgspec.structs.replace(slice, **changes)


def test_a_new_fleet_counts_from_nought_in_each_zone() -> None:
    assert places.assign(FLEET, None, [], []) == ((0, 1), (0, 1))


def test_what_another_fleet_has_or_still_shows_is_not_given_again() -> None:
    other = fleet(name="g", zones=("a",), places=((0, 2),))
    seen = [a_slice(3, pool="gone", state=SliceState.DELETING), a_slice(4, pool="gone", state=SliceState.GONE)]
    assert places.assign(fleet(per_zone=3), None, [other, FLEET], seen) == ((1, 4, 5), (0, 1, 2))


def test_a_resize_takes_the_highest_away_and_keeps_the_rest() -> None:
    before = fleet(per_zone=3, places=((1, 4, 5), (0, 1, 2)))
    own = [a_slice(5), a_slice(1, state=SliceState.PREEMPTED)]
    assert places.assign(FLEET, before, [before], own) == ((1, 4), (0, 1))
    assert places.assign(fleet(zones=("b", "c")), before, [before], own) == ((0, 1), (0, 1))
    other = fleet(name="g", zones=("a",), places=((0,),))
    assert places.assign(fleet(per_zone=4), before, [before, other], own) == ((1, 2, 4, 5), (0, 1, 2, 3))


def test_slices_that_stay_give_a_fleet_its_first_places() -> None:
    """A fleet of an earlier release, and one that is made again while slices of it still run their last job."""
    own = [a_slice(7), a_slice(3, state=SliceState.CREATING), a_slice(1, state=SliceState.DELETING), a_slice(None)]
    assert places.assign(fleet(per_zone=3), None, [], own)[0] == (0, 3, 7)


RESIZES = st.lists(st.tuples(st.sampled_from("fgh"), st.integers(0, 5)), max_size=20)


@given(RESIZES)
def test_no_number_is_ever_two_fleets_and_none_changes_hands(resizes: list[tuple[str, int]]) -> None:
    pools: dict[str, Pool] = {}
    for name, per_zone in resizes:
        before = pools.get(name)
        wanted = fleet(name=name, per_zone=per_zone)
        pools[name] = msgspec.structs.replace(wanted, places=places.assign(wanted, before, pools.values(), []))
        for zone in FLEET.zones:
            had, has = places.numbers(before, zone) if before is not None else (), places.numbers(pools[name], zone)
            assert len(has) == per_zone
            assert list(has) == sorted(set(has))
            assert set(had[:per_zone]) <= set(has)
            owners = {pool.name for pool in pools.values() if set(places.numbers(pool, zone)) & set(has)}
            assert owners <= {name}


def test_has() -> None:
    known = fleet(zones=("a",), places=((1, 4, 5),))
    assert [number for number in range(8) if places.has(known, "a", number)] == [1, 4, 5]
    assert not places.has(known, "b", 1)
    assert not places.has(FLEET, "a", 0), "an earlier release wrote none down"
