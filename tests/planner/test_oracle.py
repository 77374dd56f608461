"""The planner against a brute-force search, on worlds of at most six jobs and three slices.

"Worse" is lexicographic. Jobs stand in admission order: band, fair share, then place in the queue; the shares of these
worlds lie so far apart that the order does not change during a round. For each job in turn it counts first whether it
starts, then how early its accelerator stands in its list. The search tries every way to give out the idle slices that
keeps the rules: a gang is whole and in one place, quotas hold, no job starts before an earlier one of its queue, and
nothing that starts delays the head of another queue before it. The planner may do better (it backfills inside a queue
too), never worse. The same start times show that what it backfills delays no head.

The searcher knows nothing of buckets, claims or reservations: it tries and compares.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.actions import Place
from penstock.planner.admission import admit
from tests.planner.world import CHIPS, NOW, Build, Row

ACCELERATORS = ("v5e-8", "v5p-8")
ENDS = (1050.0, 1100.0, 1300.0)
EXAMPLES = max(600, settings().max_examples)  # rare worlds matter: in one of a few hundred a gang is split needlessly
BUSY_BAND = 9  # what runs is never taken from


class Place_(NamedTuple):  # noqa: N801 - the planner has a Place of its own
    """Slices for one job, and the rank of their accelerator in its list."""

    slices: tuple[str, ...]
    rank: int


World = dict[str, Any]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    slices: list[World] = []
    running: list[World] = []
    for number in range(draw(st.integers(1, 3))):
        slice = {
            "id": f"s{number}",
            "pool": draw(st.sampled_from(ACCELERATORS)),
            "zone": draw(st.sampled_from("ab")),
        }
        end = draw(st.sampled_from((None, None, *ENDS)))
        if end is None:
            slices.append(slice)
        else:
            running.append({"job": f"r{number}", "queue": "r", "on": [slice], "timeout": end - 500.0})
    queues: list[Row] = [{"name": "r", "band": BUSY_BAND}]
    for number, name in enumerate("xyz"):
        quota = draw(st.sampled_from((None, None, 8, 16)))
        limits = {} if quota is None else {"quota": quota, "borrow": 0}
        queues.append({"name": name, "band": draw(st.integers(0, 1)), "used": number * 1e9, **limits})
    jobs: list[Row] = [
        {
            "id": f"j{number}",
            "queue": draw(st.sampled_from("xyz")),
            "gang": draw(st.sampled_from((1, 1, 2, 3))),
            "accelerators": draw(st.sampled_from((["v5e-8"], ["v5p-8"], ["v5e-8", "v5p-8"], ["v5p-8", "v5e-8"]))),
            "timeout": draw(st.sampled_from((40.0, 100.0, 200.0, 400.0))),
            "priority": draw(st.sampled_from((0, 0, 5))),
        }
        for number in range(draw(st.integers(1, 6)))
    ]
    placed = [(one["pool"], one["zone"]) for one in (*slices, *(row["on"][0] for row in running))]
    pools: list[Row] = []
    for name in ACCELERATORS:
        count = sum(pool == name for pool, _ in placed)
        if count:  # a pool of no slices would have to be allowed to grow
            # A minimum as large as the pool: nothing is given back to make room, which would change the slices.
            pools.append({"name": name, "accelerator": name, "zones": ["a", "b"], "min": count, "max": count})
    # Gangs that no zone could hold as it is wait for slices to be made elsewhere, which the search knows nothing of.
    jobs = [
        job
        for job in jobs
        if all(
            not any(pool == name for pool, _ in placed) or max(placed.count((name, z)) for z in "ab") >= job["gang"]
            for name in job["accelerators"]
        )
    ]
    return {"slices": slices, "running": running, "queues": queues, "jobs": jobs, "pools": pools}


class Search:
    """Everything the rules need, said plainly."""

    def __init__(self, world: World) -> None:
        self.queues = {row["name"]: row for row in world["queues"]}
        self.jobs = sorted(
            (job for job in world["jobs"]),
            key=lambda job: (
                -self.queues[job["queue"]]["band"],
                self.queues[job["queue"]]["used"],
                -job["priority"],
                job["id"],
            ),
        )
        self.slices = {one["id"]: one for one in (*world["slices"], *(r["on"][0] for r in world["running"]))}
        self.free_at = {one["id"]: NOW for one in world["slices"]}
        self.free_at |= {row["on"][0]["id"]: 500.0 + row["timeout"] for row in world["running"]}
        self.jobs = [job for job in self.jobs if self.feasible(job)]

    def groups(self, job: Row) -> Iterator[tuple[int, list[str]]]:
        for rank, accelerator in enumerate(job["accelerators"]):
            for zone in "ab":
                yield (
                    rank,
                    [
                        id
                        for id, one in sorted(self.slices.items())
                        if one["pool"] == accelerator and one["zone"] == zone
                    ],
                )

    def feasible(self, job: Row) -> bool:
        """Pools count over all zones: whether a zone will ever have enough is not known."""
        quota = self.queues[job["queue"]].get("quota")
        return any(
            sum(one["pool"] == accelerator for one in self.slices.values()) >= job["gang"]
            and (quota is None or job["gang"] * CHIPS[accelerator] <= quota)
            for accelerator in job["accelerators"]
        )

    def chips(self, job: Row, place: Place_) -> int:
        return int(job["gang"] * CHIPS[job["accelerators"][place.rank]])

    def within_quota(self, job: Row, rank: int, started: Sequence[tuple[Row, Place_]]) -> bool:
        quota = self.queues[job["queue"]].get("quota")
        used = sum(self.chips(other, place) for other, place in started if other["queue"] == job["queue"])
        return quota is None or used + job["gang"] * CHIPS[job["accelerators"][rank]] <= quota

    def start_time(self, job: Row, started: Sequence[tuple[Row, Place_]]) -> float:
        """When the job could start at the earliest, if nothing but `started` were placed before it."""
        free_at = dict(self.free_at)
        for other, place in started:
            free_at.update(dict.fromkeys(place.slices, NOW + other["timeout"]))
        times = [math.inf]
        for rank, members in self.groups(job):
            ends = sorted(free_at[id] for id in members)
            if len(ends) >= job["gang"] and self.within_quota(job, rank, started):
                times.append(ends[job["gang"] - 1])
        return min(times)

    def delayed(self, outcome: dict[str, Place_]) -> Iterator[tuple[Row, bool]]:
        """Heads that wait and would start later than without what comes after them.

        With each, whether it is the first to wait for its accelerators: where an earlier head keeps slices too, the
        simple start time here says nothing of when a later head could have had them.
        """
        started = [(job, outcome[job["id"]]) for job in self.jobs if job["id"] in outcome]
        heads: list[Row] = []
        for at, job in enumerate(self.jobs):
            if job["id"] in outcome or any(job["queue"] == head["queue"] for head in heads):
                continue
            first = not any(set(job["accelerators"]) & set(head["accelerators"]) for head in heads)
            heads.append(job)
            before = [(one, place) for one, place in started if self.jobs.index(one) < at]
            if not any(self.within_quota(job, rank, before) for rank, _ in self.groups(job)):
                continue  # it waits for quota, not for slices
            slices_only = {**job, "queue": "r"}
            if self.start_time(slices_only, started) > self.start_time(slices_only, before):
                yield job, first

    def outcomes(self, at: int, outcome: dict[str, Place_], closed: frozenset[str]) -> Iterator[dict[str, Place_]]:
        """Every way to go on from job number `at`; queues in `closed` have a job that waits."""
        if at == len(self.jobs):
            if next(self.delayed(outcome), None) is None:
                yield outcome
            return
        job = self.jobs[at]
        if job["queue"] not in closed:
            taken = {id for place in outcome.values() for id in place.slices}
            started = [(one, outcome[one["id"]]) for one in self.jobs if one["id"] in outcome]
            for rank, members in self.groups(job):
                idle = [id for id in members if self.free_at[id] == NOW and id not in taken]
                if self.within_quota(job, rank, started):
                    for chosen in combinations(idle, job["gang"]):
                        yield from self.outcomes(at + 1, {**outcome, job["id"]: Place_(chosen, rank)}, closed)
        yield from self.outcomes(at + 1, outcome, closed | {job["queue"]})

    def value(self, outcome: dict[str, Place_]) -> list[tuple[int, int]]:
        return [(1, -outcome[job["id"]].rank) if job["id"] in outcome else (0, 0) for job in self.jobs]


def planned(world: World, seed: int | None = None) -> dict[str, Place]:
    snapshot = Build(world, None if seed is None else random.Random(seed)).snapshot
    admission = admit(snapshot, NOW)
    return {action.job: action for action in admission.actions if isinstance(action, Place)}


def as_outcome(search: Search, places: dict[str, Place]) -> dict[str, Place_]:
    outcome = {}
    for job in search.jobs:
        if job["id"] in places:
            slices = places[job["id"]].slices
            rank = job["accelerators"].index(search.slices[slices[0]]["pool"])
            outcome[job["id"]] = Place_(slices, rank)
    return outcome


@settings(max_examples=EXAMPLES)
@given(worlds())
def test_never_worse_than_brute_force(world: World) -> None:
    search = Search(world)
    mine = as_outcome(search, planned(world))
    best = max((search.value(one) for one in search.outcomes(0, {}, frozenset())), default=[])
    assert search.value(mine) >= best


@given(worlds())
def test_what_starts_keeps_the_rules(world: World) -> None:
    search = Search(world)
    places = planned(world)
    mine = as_outcome(search, places)
    assert set(mine) == set(places), "an infeasible job was started"
    used: list[str] = []
    started: list[tuple[Row, Place_]] = []
    for job in search.jobs:
        if job["id"] not in mine:
            continue
        place = mine[job["id"]]
        assert len(place.slices) == job["gang"]
        assert any(rank == place.rank and set(place.slices) <= set(group) for rank, group in search.groups(job))
        assert search.within_quota(job, place.rank, started)
        started.append((job, place))
        used.extend(place.slices)
    assert len(used) == len(set(used))
    assert all(search.free_at[id] == NOW for id in used)


@settings(max_examples=EXAMPLES)
@given(worlds())
def test_backfill_never_delays_a_head(world: World) -> None:
    search = Search(world)
    delayed = search.delayed(as_outcome(search, planned(world)))
    assert [job["id"] for job, first in delayed if first] == []


@given(worlds())
def test_the_later_job_never_starts_first_unless_it_backfills(world: World) -> None:
    places = planned(world)
    waits: set[tuple[str, int]] = set()
    for job in sorted(world["jobs"], key=lambda one: one["id"]):
        rank = (job["queue"], job["priority"])
        if job["id"] not in places:
            waits.add(rank)
        elif rank in waits:
            assert places[job["id"]].backfilled, f"{job['id']} passed an earlier job of its queue unmarked"


@given(worlds(), st.integers(0, 2**32 - 1))
def test_the_order_of_insertion_changes_nothing(world: World, seed: int) -> None:
    assert admit(Build(world, random.Random(seed)).snapshot, NOW) == admit(Build(world).snapshot, NOW)
