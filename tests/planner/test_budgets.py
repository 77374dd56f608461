"""A queue that has spent its budget starts nothing new; what has begun goes on, and `why` says what is the matter."""

from __future__ import annotations

from typing import Any

from penstock.domain.budgets import Budget, Spent, Unit, Window, begins
from penstock.planner import reasons
from penstock.planner.admission import admit
from penstock.planner.plan import plan
from tests.planner.world import NOW, Build, in_words

CHIP_HOURS = Budget(limit=2.0, unit=Unit.CHIP_HOURS)


def book(**changes: Any) -> Spent:
    return Spent(window=Window.MONTH, since=begins(Window.MONTH, NOW), **changes)


def queue(budget: Budget, **changes: Any) -> dict[str, Any]:
    return {"name": "q", "budget": budget, **changes}


def test_below_the_budget_work_starts() -> None:
    case = {"queues": [queue(CHIP_HOURS, spent=(book(chip_s=7199.0),))], "slices": ["s1"], "jobs": [{"id": "j1"}]}
    assert in_words(admit(Build(case).snapshot, NOW))["place"] == ["j1: s1"]


def test_at_the_budget_nothing_new_starts_and_nothing_is_made() -> None:
    case = {
        "queues": [queue(CHIP_HOURS, spent=(book(chip_s=7200.0),))],
        "pools": [{"name": "p", "max": 4}],
        "slices": ["s1"],
        "jobs": [{"id": "j1"}, {"id": "j2", "gang": 2}],
    }
    words = in_words(admit(Build(case).snapshot, NOW))
    assert (words["place"], words["want"], words["finish"]) == ([], [], [])


def test_other_queues_use_what_it_leaves() -> None:
    case = {
        "queues": [queue(CHIP_HOURS, spent=(book(chip_s=9000.0),)), {"name": "rich"}],
        "slices": ["s1"],
        "jobs": [{"id": "j1"}, {"id": "j2", "queue": "rich"}],
    }
    assert in_words(admit(Build(case).snapshot, NOW))["place"] == ["j2: s1"]


def test_what_runs_counts_and_goes_on() -> None:
    # 8 chips for 900 s are two chip-hours, and none of it is charged yet.
    case = {
        "queues": [queue(CHIP_HOURS)],
        "slices": ["s2"],
        "running": [{"job": "j0", "on": ["s1"], "since": 100.0}],
        "jobs": [{"id": "j1"}],
    }
    build = Build(case)
    words = in_words(admit(build.snapshot, NOW))
    assert (words["place"], words["stop"]) == ([], [])
    assert in_words(admit(build.snapshot, NOW - 10.0))["place"] == ["j1: s2"]


def test_a_job_that_had_begun_goes_on_after_a_preemption() -> None:
    case = {
        "queues": [queue(CHIP_HOURS, spent=(book(chip_s=9000.0),))],
        "slices": ["s1"],
        "jobs": [{"id": "j1"}, {"id": "j2", "returning": True}],
    }
    assert in_words(admit(Build(case).snapshot, NOW))["place"] == ["j2: s1"]


def test_no_replicas_are_added_beyond_the_least() -> None:
    case = {
        "queues": [queue(CHIP_HOURS, spent=(book(chip_s=9000.0),))],
        "slices": ["s2"],
        "running": [{"job": "j0", "on": ["s1"], "replicas": [1, 4], "open_units": 9}],
    }
    assert in_words(admit(Build(case).snapshot, NOW))["place"] == []
    free = {**case, "queues": [{"name": "q"}]}
    assert in_words(admit(Build(free).snapshot, NOW))["place"] == ["j0/1: s2"]


def test_dollars_count_at_the_price_of_each_attempt() -> None:
    case = {
        "queues": [queue(Budget(limit=4.0))],
        "slices": ["s2"],
        "running": [{"job": "j0", "on": ["s1"], "since": 100.0, "price": 2.0}],
        "jobs": [{"id": "j1"}],
    }
    assert in_words(admit(Build(case).snapshot, NOW))["place"] == []  # 2 chip-hours at $2
    case["running"][0]["price"] = 1.9  # type: ignore[index]
    assert in_words(admit(Build(case).snapshot, NOW))["place"] == ["j1: s2"]


def test_an_unknown_price_is_not_guessed_and_is_told() -> None:
    budget = Budget(limit=500.0)
    case = {
        "queues": [queue(budget, spent=(book(usd=500.0, unpriced_chip_s=7200.0),))],
        "jobs": [{"id": "j1"}],
    }
    snapshot = Build(case).snapshot
    job = snapshot.queues["q"].waiting[0]
    found = reasons.explain(snapshot, plan(snapshot, NOW).reasons, job, 1, NOW)
    assert found.code == "budget"
    assert found.sentence == (
        "queue q: budget of $500.00 for January 1970 is used up (at least $500.00: 2 chip-hours have no known price)."
    )


def test_why_names_the_queue_the_budget_and_the_month() -> None:
    case = {
        "queues": [queue(Budget(limit=3.0), spent=(book(usd=3.5),))],
        "running": [{"job": "j0", "on": ["s1"], "since": 100.0, "price": 0.0}],
        "jobs": [{"id": "j1"}],
    }
    snapshot = Build(case).snapshot
    job = snapshot.queues["q"].waiting[0]
    found = reasons.explain(snapshot, plan(snapshot, NOW).reasons, job, 1, NOW)
    expected = "queue q: budget of $3.00 for January 1970 is used up ($3.50); what runs goes on."
    assert (found.code, found.sentence) == ("budget", expected)
    assert found.numbers == {"limit": 3.0, "used": 3.5}


def test_what_was_spent_last_month_is_forgotten() -> None:
    old = Spent(window=Window.MONTH, since=begins(Window.MONTH, NOW) - 31 * 86400.0, chip_s=1e9)
    case = {"queues": [queue(CHIP_HOURS, spent=(old,))], "slices": ["s1"], "jobs": [{"id": "j1"}]}
    assert in_words(admit(Build(case).snapshot, NOW))["place"] == ["j1: s1"]
