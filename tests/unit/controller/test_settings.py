"""Teams, queues, pools, provider limits and maintenance: what may change, and the counters behind each limit."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.controller.jobs import NotFound
from penstock.domain.admission import BadInput
from penstock.domain.nouns import Pool, Queue, Team
from tests.unit.controller.stage import Stage


def limit(stage: Stage, scope: str, name: str) -> int | None:
    quota = stage.look(lambda reader: reader.quota(scope, name))
    assert quota is not None
    return quota.limit_chips


def test_a_team_is_made_and_changed(stage: Stage) -> None:
    made = stage.wait(stage.commands.put_team(Team(name="new", chip_limit=64)))
    changed = stage.wait(stage.commands.put_team(Team(name="new", chip_limit=32)))
    assert (made.version, changed.version, limit(stage, "team", "new")) == (1, 2, 32)
    assert [event.kind for event in stage.events("new")] == ["team.created", "team.edited"]
    stage.wait(stage.commands.put_team(Team(name="new")))
    assert limit(stage, "team", "new") is None


def test_a_limit_keeps_what_is_used(stage: Stage) -> None:
    stage.ready()
    stage.wait(stage.commands.put_team(Team(name="lab", chip_limit=4)))
    assert (stage.used("team", "lab"), limit(stage, "team", "lab")) == (8, 4)


def put_queue(stage: Stage, name: str = "main", **changes: Any) -> Queue:
    return stage.wait(stage.commands.put_queue(Queue(name=name, team="lab", **changes)))


def test_a_changed_queue_keeps_what_it_has_used(stage: Stage) -> None:
    _, attempt, _ = stage.started()
    stage.clock.advance(10)
    stage.close(attempt)
    changed = put_queue(stage, weight=3.0, used_chip_s=0.0)
    assert (changed.weight, changed.used_chip_s) == (3.0, 80.0)


@pytest.mark.parametrize(
    ("quota", "borrow", "ceiling"), [(None, None, None), (8, None, None), (8, 0, 8), (8, 16, 24), (None, 5, None)]
)
def test_a_queues_ceiling_is_quota_and_loan(
    stage: Stage, quota: int | None, borrow: int | None, ceiling: int | None
) -> None:
    put_queue(stage, quota_chips=quota, borrow_chips=borrow)
    assert limit(stage, "queue", "main") == ceiling


def test_a_teams_queues_together_have_the_sum_of_their_quotas(stage: Stage) -> None:
    put_queue(stage, quota_chips=8)
    assert limit(stage, "cohort", "lab") == 8
    put_queue(stage, "second", quota_chips=16)
    assert limit(stage, "cohort", "lab") == 24
    put_queue(stage, "third")
    assert limit(stage, "cohort", "lab") is None
    put_queue(stage, "third", quota_chips=0)
    assert limit(stage, "cohort", "lab") == 24


def test_a_queue_needs_its_team_and_keeps_it(stage: Stage) -> None:
    with pytest.raises(NotFound, match="team 'none' does not exist"):
        stage.wait(stage.commands.put_queue(Queue(name="main", team="none")))
    stage.wait(stage.commands.put_team(Team(name="other")))
    with pytest.raises(BadInput, match=r"team: 'other' cannot change: queue main belongs to lab"):
        stage.wait(stage.commands.put_queue(Queue(name="main", team="other")))


def test_a_pool_has_its_accelerators_shape_and_a_limit(stage: Stage) -> None:
    made = stage.pool("p", "v5litepod-16", max=3)
    assert (made.accelerator, made.chips, made.hosts, limit(stage, "pool", "p")) == ("v5e-16", 16, 4, 48)
    resized = stage.pool("p", "v5e-16", max=5, min=1)
    assert (resized.version, resized.min, limit(stage, "pool", "p")) == (2, 1, 80)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"accelerator": "v5e-8"}, "accelerator"), ({"provider": "gke"}, "provider"), ({"spot": True}, "spot")],
)
def test_what_slices_of_a_pool_are_never_changes(stage: Stage, changes: dict[str, Any], field: str) -> None:
    stage.pool("p", "v5e-16", max=3)
    wanted: dict[str, Any] = {"accelerator": "v5e-16", "max": 9, **changes}
    with pytest.raises(BadInput, match=rf"{field}: .* cannot change: pool p has .*; make a new pool"):
        stage.pool("p", **wanted)
    assert limit(stage, "pool", "p") == 48


def test_a_pool_needs_all_its_teams(stage: Stage) -> None:
    with pytest.raises(NotFound, match="team 'none' does not exist"):
        stage.pool("p", teams=("none",))


def test_a_deleted_pool_makes_no_more_and_keeps_its_slices(stage: Stage) -> None:
    slice = stage.ready()
    gone: Pool = stage.wait(stage.commands.delete_pool("small"))
    assert (gone.deleted, gone.max, limit(stage, "pool", "small")) == (True, 0, 0)
    assert stage.slice(slice).usable
    assert stage.wait(stage.commands.delete_pool("small")).version == gone.version
    with pytest.raises(NotFound):
        stage.wait(stage.commands.delete_pool("none"))


def test_a_fleets_places_are_stored_with_it(stage: Stage) -> None:
    first = stage.pool("f", per_zone=2, zones=("a", "b"), max=4)
    second = stage.pool("g", per_zone=1, zones=("a",), max=1)
    assert (first.places, second.places) == (((0, 1), (0, 1)), ((2,),))
    assert stage.pool("f", per_zone=3, zones=("a",), max=3).places == ((0, 1, 3),)
    assert stage.pool("f", per_zone=1, zones=("a",), max=1).places == ((0,),)
    stored = stage.look(lambda reader: reader.pool("f"))
    assert stored is not None
    assert stored.places == ((0,),)
    assert stage.wait(stage.commands.delete_pool("f")).places == ()
    assert stage.pool("h", per_zone=1, zones=("a",), max=1).places == ((0,),), "nothing of f is left to be seen"


def test_a_provider_limit_is_set_and_lifted(stage: Stage) -> None:
    stage.wait(stage.commands.limit_provider("fake", 64))
    assert limit(stage, "provider", "fake") == 64
    stage.wait(stage.commands.limit_provider("fake", None))
    assert limit(stage, "provider", "fake") is None
    with pytest.raises(BadInput, match=r"chips: -1 is not between 0 and"):
        stage.wait(stage.commands.limit_provider("fake", -1))


def test_maintenance_is_one_event_per_change(stage: Stage) -> None:
    for on in (True, True, False, False):
        stage.wait(stage.commands.set_maintenance(on))
    assert [event.body["maintenance"] for event in stage.events(kind="control.edited")] == [True, False]


# --- queues that go ---
def test_a_queue_goes_when_no_job_of_it_is_left_and_can_come_back(stage: Stage) -> None:
    put_queue(stage, quota_chips=8)
    put_queue(stage, "spare", quota_chips=24)
    assert limit(stage, "cohort", "lab") == 32
    job = stage.submit(queue="spare")
    with pytest.raises(BadInput) as caught:
        stage.wait(stage.commands.delete_queue("spare"))
    rule = f"is in use by {job}, which has not ended; wait for its jobs, or cancel them"
    assert str(caught.value) == f"queue: 'spare' {rule}"
    stage.wait(stage.commands.cancel(job))
    assert stage.wait(stage.commands.delete_queue("spare")).deleted
    assert limit(stage, "cohort", "lab") == 8, "its quota went with it"
    for command in (stage.commands.delete_queue("spare"), stage.commands.delete_queue("never")):
        with pytest.raises(NotFound):
            stage.wait(command)
    with pytest.raises(NotFound):
        stage.submit(queue="spare")
    assert stage.events("spare")[-1].kind == "queue.deleted"
    stage.check_projection()
    assert not put_queue(stage, "spare", quota_chips=2).deleted
    assert limit(stage, "cohort", "lab") == 10
    assert stage.job(stage.submit(queue="spare")).waiting
