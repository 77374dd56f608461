"""Whole plans, and the reasons people read: recovery, admission, growth and settling together.

The cases check admission alone; here the parts meet: what one plans the next must not undo, and every job that is not
running has a reason with a known code, a sentence and, where something would help, advice.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.domain import limits
from penstock.domain.lifecycle import JobState
from penstock.domain.nouns import Job, Member
from penstock.planner.actions import Intend, Place, Plan, Release, Stop
from penstock.planner.plan import plan
from penstock.planner.reasons import CODES, explain, reason
from penstock.planner.snapshot import Snapshot
from tests.planner.world import NOW, Build


def planned(**case: Any) -> tuple[Snapshot, Plan]:
    snapshot = Build(case).snapshot
    return snapshot, plan(snapshot, NOW)


def of_kind(made: Plan, *kinds: type) -> list[Any]:
    return [action for action in made.actions if isinstance(action, kinds)]


def waiting(snapshot: Snapshot, id: str) -> Job:
    jobs = [job for view in snapshot.queues.values() for job in (*view.waiting, *view.returning.values())]
    return next(job for job in (*jobs, *snapshot.jobs.values()) if job.id == id)


def why(snapshot: Snapshot, made: Plan, id: str, position: int = 1) -> str:
    found = explain(snapshot, made.reasons, waiting(snapshot, id), position, NOW)
    assert found.sentence.endswith(".") or ":" in found.sentence
    assert found.code in CODES
    return found.code


def test_a_slice_that_is_placed_on_is_not_let_go_as_idle() -> None:
    """Idle for an hour, and the job that needs it comes in the same tick (incident 12)."""
    _, made = planned(slices=[{"id": "s1", "idle": 10.0}], jobs=[{"id": "j1"}])
    assert [action.slices for action in of_kind(made, Place)] == [("s1",)]
    assert of_kind(made, Release) == []


def test_a_slice_kept_for_a_gang_is_not_let_go_as_idle() -> None:
    case = {"pools": [{"name": "p", "max": 2}], "slices": [{"id": "s1", "idle": 10.0}]}
    _, alone = planned(**case)
    assert [action.slice for action in of_kind(alone, Release)] == ["s1"]
    _, made = planned(**case, jobs=[{"id": "g1", "gang": 2}])
    assert of_kind(made, Release) == []
    assert [(action.pool, action.zones) for action in of_kind(made, Intend)] == [("p", ("a",))]


def test_what_is_given_back_for_a_waiting_job_is_given_back_once() -> None:
    pools = [{"name": "p", "teams": ["u"], "max": 1}]
    _, made = planned(pools=pools, slices=[{"id": "s1", "team": "u", "idle": 10.0}], jobs=[{"id": "j1"}])
    assert [action.slice for action in of_kind(made, Release)] == ["s1"]


def test_a_slice_recovery_lets_go_is_not_placed_on() -> None:
    """Silent for long and denied by the provider: whatever recovery does about it, nothing starts there."""
    snapshot = Build({"slices": ["s1"], "jobs": [{"id": "j1"}]}).snapshot
    snapshot.witness.silent = {"s1": 500.0}
    snapshot.witness.absent = {"s1": 500.0}
    snapshot.witness.denied = {"s1"}
    assert of_kind(plan(snapshot, NOW), Place) == []


def test_maintenance_starts_and_makes_nothing() -> None:
    _, made = planned(
        maintenance=True,
        pools=[{"name": "p", "max": 9, "min": 3}],
        slices=["s1", {"id": "s2", "dirty": True}],
        queues=[{"name": "x", "band": 1}, "y"],
        running=[{"job": "r1", "queue": "y", "on": ["s3"]}],
        jobs=[{"id": "j1", "queue": "x"}, {"id": "j2", "queue": "x", "gang": 4}],
    )
    assert of_kind(made, Place, Intend, Stop) == []
    assert [action.slice for action in of_kind(made, Release)] == ["s2"], "what cleans goes on"


def test_growth_says_why_slices_are_not_made() -> None:
    snapshot, made = planned(
        pools=[{"name": "p", "max": 2}], zones=[{"zone": "a", "until": NOW + 40}], jobs=[{"id": "j1"}]
    )
    assert of_kind(made, Intend) == []
    found = explain(snapshot, made.reasons, waiting(snapshot, "j1"), 1, NOW)
    assert (found.code, found.numbers["seconds"]) == ("zone_backoff", 40.0)


def test_every_waiting_job_has_a_reason() -> None:
    """One of each kind: those looked at, and those only explained when asked."""
    snapshot, made = planned(
        slices=["s1"],
        queues=[{"name": "p1", "paused": True}, "q", {"name": "x", "quota": 8, "borrow": 0}],
        running=[{"job": "r1", "queue": "x", "on": ["s2"]}],
        jobs=[
            {"id": "a1", "gang": 9},
            {"id": "a2"},
            {"id": "a3"},
            {"id": "a4"},
            {"id": "b1", "queue": "p1"},
            {"id": "c1", "queue": "x"},
            {"id": "d1", "returning": True, "until": NOW + 60, "cause": "infra"},
        ],
    )
    assert [action.job for action in of_kind(made, Place)] == ["a2"]
    codes = {id: why(snapshot, made, id, 2) for id in ("a1", "a3", "a4", "b1", "c1", "d1")}
    assert codes == {
        "a1": "infeasible",
        "a3": "pool_at_max",
        "a4": "behind_head",
        "b1": "paused",
        "c1": "quota",
        "d1": "backoff",
    }
    behind = explain(snapshot, made.reasons, waiting(snapshot, "a4"), 3, NOW)
    assert behind.numbers == {"position": 3}
    assert "a1" in behind.sentence, "it names the first job that waits, and why"


def test_jobs_that_are_starting_or_stopping_say_so() -> None:
    snapshot, made = planned(
        running=[{"job": "r1", "on": ["s1"]}, {"job": "r2", "on": ["s2"], "stopping": "reclaimed"}]
    )
    for id, code in (("r1", "starting"), ("r2", "stopping")):
        snapshot.put_job(msgspec.structs.replace(snapshot.jobs[id], state=JobState.PROVISIONING))
        assert why(snapshot, made, id) == code
    snapshot.put_job(msgspec.structs.replace(snapshot.jobs["r1"], cancel_at=NOW))
    assert why(snapshot, made, "r1") == "stopping"


def test_blocked_and_maintenance_come_before_other_reasons() -> None:
    snapshot, made = planned(maintenance=True, slices=["s1"], jobs=[{"id": "j1"}])
    assert why(snapshot, made, "j1") == "maintenance"
    job = msgspec.structs.replace(waiting(snapshot, "j1"), blocked=2)
    assert explain(snapshot, made.reasons, job, 1, NOW).code == "blocked"


def test_a_held_member_of_an_array_says_how_many_run() -> None:
    snapshot, made = planned(
        slices=["s1"],
        running=[{"job": "r1", "on": ["s2"]}, {"job": "r2", "on": ["s3"]}, {"job": "r3", "on": ["s4"]}],
        jobs=[{"id": "j1"}],
    )
    member = Member(array="sweep", index=7, at_most=2)

    def joined(job: Job, **changes: Any) -> Job:
        return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, member=member), **changes)

    held = joined(waiting(snapshot, "j1"), held=True)
    assert not held.waiting
    for count, running in ((1, "1 of 2 running, 1 about to"), (2, "2 of 2 running")):
        snapshot.put_job(joined(snapshot.jobs[f"r{count}"], state=JobState.RUNNING))
        found = explain(snapshot, made.reasons, held, 1, NOW)
        assert found.code == "array_full"
        assert found.sentence == f"Array sweep: {running}; it is let in when one of them ends."
        assert found.numbers == {"running": count, "at_most": 2}


@pytest.mark.parametrize(
    ("case", "advice"),
    [
        (
            {
                "pools": [{"name": "p"}, {"name": "v", "accelerator": "v4-8"}],
                "running": [{"job": "r1", "on": ["s1"]}],
                "slices": ["v1 v/a"],
                "jobs": [{"id": "j1"}],
            },
            "accept v4-8 as well: 1 slice of v4-8 is idle now",
        ),
        (
            {
                "pools": [{"name": "p", "zones": ["a", "b"], "min": 2}],
                "running": [{"job": "r1", "on": ["s1 a"]}],
                "slices": ["s2 b"],
                "jobs": [{"id": "j1", "zones": ["a"]}],
            },
            "allow zone b: 1 slice of v5e-8 is idle there now",
        ),
        (
            {"running": [{"job": "r1", "on": ["s1"]}], "jobs": [{"id": "j1"}]},
            "raise the maximum of pool p",
        ),
        (
            {
                "queues": [{"name": "q", "quota": 8, "borrow": 0}],
                "running": [{"job": "r1", "on": ["s1"]}],
                "slices": ["s2"],
                "jobs": [{"id": "j1"}],
            },
            "let queue q borrow, or raise its quota by 8 chips",
        ),
    ],
)
def test_advice_is_the_cheapest_change_that_would_help(case: dict[str, Any], advice: str) -> None:
    snapshot, made = planned(**case)
    assert explain(snapshot, made.reasons, waiting(snapshot, "j1"), 1, NOW).advice == advice


def test_codes_are_checked_where_they_are_made() -> None:
    with pytest.raises(KeyError, match="nonsense is not in the table"):
        reason("nonsense", "…")


def test_only_the_window_of_a_queue_is_looked_at() -> None:
    count = limits.WINDOW_JOBS + 5
    snapshot, made = planned(
        slices=[f"s{number:03}" for number in range(count)], jobs=[{"id": f"j{number:03}"} for number in range(count)]
    )
    assert len(of_kind(made, Place)) == limits.WINDOW_JOBS
    assert why(snapshot, made, f"j{count - 1:03}", count) == "behind_head"


def test_a_plan_with_nothing_to_do_is_empty() -> None:
    _, made = planned(running=[{"job": "r1", "on": ["s1"]}], jobs=[{"id": "j1"}])
    assert made.actions == ()
    _, again = planned(running=[{"job": "r1", "on": ["s1"]}], jobs=[{"id": "j1"}])
    assert again == made
