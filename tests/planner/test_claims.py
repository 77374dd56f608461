"""A reserved slice or pool serves its holder's jobs and nobody else's, is not let go meanwhile, and ends by itself."""

from __future__ import annotations

import random
from typing import Any

from penstock.domain.nouns import Reservation
from penstock.planner import reasons
from penstock.planner.actions import Release
from penstock.planner.admission import admit
from penstock.planner.plan import plan
from tests.planner.world import NOW, Build, Row, in_words

OVER = Reservation(user="ann", since=0.0, until=NOW)


def placed(case: Row) -> list[str]:
    return in_words(admit(Build(case).snapshot, NOW))["place"]


def test_others_do_not_start_on_a_reserved_slice() -> None:
    case = {"slices": [{"id": "s1", "reserved": "ann"}], "jobs": [{"id": "j1", "user": "bob"}]}
    assert placed(case) == []
    case["jobs"][0]["user"] = "ann"
    assert placed(case) == ["j1: s1"]


def test_its_holder_takes_it_before_what_all_share() -> None:
    slices = [{"id": "s1"}, {"id": "s2", "reserved": "ann"}]
    assert placed({"slices": slices, "jobs": [{"id": "j1", "user": "ann"}]}) == ["j1: s2"]
    jobs = [{"id": "j1", "user": "bob"}, {"id": "j2", "user": "ann"}]
    assert placed({"slices": slices, "jobs": jobs}) == ["j1: s1", "j2: s2"]


def test_a_job_behind_hopeless_ones_still_finds_its_users_slice() -> None:
    jobs = [{"id": f"j{number}", "user": "bob"} for number in range(5)] + [{"id": "j9", "user": "ann"}]
    case = {"slices": [{"id": "s1", "reserved": "ann"}], "jobs": jobs}
    assert placed(case) == ["j9: s1 backfilled"]  # it overtook others of its queue


def test_a_gang_fills_up_its_users_slices_with_free_ones() -> None:
    slices = [{"id": "s1"}, {"id": "s2", "reserved": "ann"}, {"id": "s3", "reserved": "bob"}]
    assert placed({"slices": slices, "jobs": [{"id": "j1", "gang": 2, "user": "ann"}]}) == ["j1: s1 s2"]
    assert placed({"slices": slices, "jobs": [{"id": "j1", "gang": 3, "user": "ann"}]}) == []


def test_a_reservation_ends_by_itself() -> None:
    case = {"slices": [{"id": "s1", "reserved": OVER}], "jobs": [{"id": "j1", "user": "bob"}]}
    assert placed(case) == ["j1: s1"]


def test_a_job_that_names_the_slice_gets_it_only_if_its_user_holds_it() -> None:
    case = {"slices": [{"id": "s1", "reserved": "ann"}], "jobs": [{"id": "j1", "slice": "s1", "user": "bob"}]}
    assert placed(case) == []
    case["jobs"][0]["user"] = "ann"
    assert placed(case) == ["j1: s1"]


def test_a_reserved_pool_is_its_holders_and_others_wait_without_failing() -> None:
    case: dict[str, Any] = {
        "pools": [{"name": "p", "reserved": "ann", "max": 3}],
        "slices": ["s1"],
        "jobs": [{"id": "j1", "user": "bob", "created": 0.0}],
    }
    snapshot = Build(case).snapshot
    found = plan(snapshot, NOW)
    assert not found.actions  # neither placed, nor made for it, nor failed as infeasible
    why = found.reasons["j1"]
    assert (why.code, why.sentence) == ("reserved", "It needs a v5e-8 slice, and pool p is reserved by ann (demo).")
    case["jobs"][0]["user"] = "ann"
    assert placed(case) == ["j1: s1"]


def test_others_use_another_pool() -> None:
    case = {
        "pools": [{"name": "p", "reserved": "ann"}, {"name": "p2"}],
        "slices": ["s1 p/a", "s2 p2/a"],
        "jobs": [{"id": "j1", "user": "bob"}],
    }
    assert placed(case) == ["j1: s2"]


def test_a_slice_of_ones_own_in_anothers_pool() -> None:
    case = {
        "pools": [{"name": "p", "reserved": "ann"}],
        "slices": [{"id": "s1", "reserved": "bob"}],
        "jobs": [{"id": "j1", "user": "ann"}],
    }
    assert placed(case) == []


def test_an_idle_reserved_slice_is_not_let_go() -> None:
    free = Build({"slices": [{"id": "s1", "idle": 0.0}]}).snapshot
    assert [type(action) for action in plan(free, NOW).actions] == [Release]
    kept = Build({"slices": [{"id": "s1", "idle": 0.0, "reserved": "ann"}]}).snapshot
    assert not plan(kept, NOW).actions


def test_who_waits_beside_a_reserved_slice_is_told_of_the_limit_not_of_the_slice() -> None:
    snapshot = Build({"slices": [{"id": "s1", "reserved": "ann"}], "jobs": [{"id": "j1", "user": "bob"}]}).snapshot
    job = snapshot.queues["q"].waiting[0]
    found = reasons.explain(snapshot, plan(snapshot, NOW).reasons, job, 1, NOW)
    assert found.code == "pool_at_max"


def test_the_order_of_filling_does_not_matter() -> None:
    slices = [{"id": f"s{number}", "reserved": "ann" if number % 2 else "bob"} for number in range(8)] + ["s8", "s9"]
    jobs = [{"id": f"j{number}", "user": "ann" if number % 3 else "bob"} for number in range(9)]
    case = {"slices": slices, "jobs": jobs}
    first = placed(case)
    assert len(first) == 9
    for seed in range(8):
        assert in_words(admit(Build(case, random.Random(seed)).snapshot, NOW))["place"] == first
