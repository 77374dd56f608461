"""Left alone, a world comes to rest: no job is started, stopped and started again for ever (reliability L8).

A toy executor performs each round's answer at once (an attempt that is told to stop is gone, a slice that is wanted is
there) and nothing ends by itself, so that any turning in circles is the planner's own: a reclaimed job that borrows its
slice back, an extra that is added and taken again, a slice that is given back and made again.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.domain.lifecycle import AttemptState, JobState, SliceState
from penstock.domain.nouns import Attempt, Bound, Chain, Job, Slice
from penstock.planner.actions import Finish, Place, Release, Stop, Want
from penstock.planner.admission import Admission, admit
from penstock.planner.snapshot import Snapshot
from tests.planner.world import NOW, Build

ROUNDS = 60
STILL = 3


class Toy:
    """Performs what a round decided."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.now = NOW
        self._made = 0

    def perform(self, admission: Admission) -> bool:
        """True when anything changed."""
        for action in admission.actions:
            match action:
                case Place():
                    self._place(action)
                case Stop():
                    self._stop(action.attempt)
                case Release():
                    slice = self.snapshot.slices[action.slice]
                    assert slice.usable, "only idle slices are given back"
                    self.snapshot.put_slice(msgspec.structs.replace(slice, state=SliceState.GONE))
                case Finish():
                    self._forget(action.job)
                case _:
                    raise AssertionError(action)
        made = [self._make(want) for want in admission.wants]
        self.now += 5.0
        return bool(admission.actions) or any(made)

    def _job(self, id: str) -> Job:
        known = self.snapshot.jobs.get(id)
        if known is not None:
            return known
        return next(job for view in self.snapshot.queues.values() for job in view.waiting if job.id == id)

    def _forget(self, id: str) -> None:
        for view in self.snapshot.queues.values():
            view.waiting = [job for job in view.waiting if job.id != id]
        self.snapshot.drop_job(id)

    def _place(self, place: Place) -> None:
        job = self._job(place.job)
        chain = job.chain(place.replica)
        assert not chain.live, "one live attempt per job and replica"
        self._forget(job.id)
        id = f"{job.id}/{place.replica}/{chain.fence + 1}"
        for name in place.slices:
            slice = self.snapshot.slices[name]
            assert slice.usable
            assert slice.team == job.spec.team
            self.snapshot.put_slice(msgspec.structs.replace(slice, attempt=id, idle_since=None))
        live = Chain(replica=place.replica, fence=chain.fence + 1, live=True)
        chains = (*(one for one in job.chains if one.replica != place.replica), live)
        self.snapshot.put_job(msgspec.structs.replace(job, state=JobState.RUNNING, chains=chains))
        self.snapshot.put_attempt(
            Attempt(
                id=id,
                job=job.id,
                replica=place.replica,
                fence=live.fence,
                team=job.spec.team,
                queue=job.spec.queue,
                chips=place.chips,
                slices=tuple(Bound(name, "1") for name in place.slices),
                hosts=len(place.slices),
                created_at=self.now,
                timeout_s=job.spec.timeout_s,
                state=AttemptState.RUNNING,
                band=place.band,
                borrowed=place.borrowed,
            )
        )

    def _stop(self, id: str) -> None:
        attempt = self.snapshot.attempts[id]
        self.snapshot.put_attempt(msgspec.structs.replace(attempt, state=AttemptState.CLOSED))
        for bound in attempt.slices:
            slice = self.snapshot.slices[bound.slice]
            self.snapshot.put_slice(msgspec.structs.replace(slice, attempt=None, idle_since=self.now))
        job = self.snapshot.jobs[attempt.job]
        chains = tuple(
            msgspec.structs.replace(one, live=False) if one.replica == attempt.replica else one for one in job.chains
        )
        state = JobState.RUNNING if any(one.live for one in chains) else JobState.QUEUED
        self.snapshot.put_job(msgspec.structs.replace(job, state=state, chains=chains))

    def _make(self, want: Want) -> bool:
        """Make the slices wanted, as far as the limits allow: admission says that it counted them."""
        pool = self.snapshot.pools[want.pools[0]]
        zone = want.zones[0] if want.zones else pool.zones[0]
        for _ in range(want.slices):
            for scope in (("pool", pool.name), ("team", want.team)):
                free = self.snapshot.free_chips(*scope)
                assert free is None or free >= pool.chips, f"{want} was asked for beyond the limit of {scope}"
            self._made += 1
            self.snapshot.put_slice(
                Slice(
                    id=f"m{self._made:03}",
                    team=want.team,
                    pool=pool.name,
                    provider=pool.provider,
                    zone=zone,
                    accelerator=pool.accelerator,
                    chips=pool.chips,
                    hosts=1,
                    intended_at=self.now,
                    state=SliceState.READY,
                    provider_id="1",
                    ready_at=self.now,
                    idle_since=self.now,
                )
            )
        return True


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    pools = [
        {
            "name": name,
            "accelerator": accelerator,
            "zones": ["a", "b"],
            "max": draw(st.integers(1, 4)),
            "teams": draw(st.sampled_from(([], ["u"]))),
        }
        for name, accelerator in (("p", "v5e-8"), ("v", "v5p-8"))
    ]
    queues = [
        {
            "name": name,
            "team": team,
            "band": draw(st.integers(0, 2)),
            "weight": draw(st.sampled_from((1.0, 3.0))),
            **draw(
                st.sampled_from(
                    ({}, {"quota": 8}, {"quota": 16}, {"quota": 8, "borrow": 8}, {"quota": 16, "borrow": 0})
                )
            ),
        }
        for name, team in (("x", "t"), ("y", "t"), ("z", "t"), ("w", "u"))
    ]
    jobs = []
    for number in range(draw(st.integers(1, 10))):
        least = draw(st.integers(1, 2))
        jobs.append(
            {
                "id": f"j{number}",
                "queue": draw(st.sampled_from("xyzw")),
                "gang": draw(st.sampled_from((1, 1, 1, 2, 3))),
                "accelerators": draw(st.sampled_from((["v5e-8"], ["v5p-8"], ["v5p-8", "v5e-8"]))),
                "zones": draw(st.sampled_from(([], [], ["a"], ["b"]))),
                "timeout": draw(st.sampled_from((10.0, 100.0, 5000.0))),
                "replicas": draw(st.sampled_from(([1, 1], [1, 1], [1, 3], [least, 4]))),
                "created": 999.0,
            }
        )
    limit = draw(st.sampled_from((None, 16, 24)))
    teams = [] if limit is None else [{"name": "t", "limit": limit}]
    return {"pools": pools, "queues": queues, "jobs": jobs, "teams": teams}


@settings(max_examples=max(800, settings().max_examples))
@given(worlds())
def test_comes_to_rest(world: dict[str, Any]) -> None:
    toy = Toy(Build(world).snapshot)
    still = 0
    for _ in range(ROUNDS):
        still = 0 if toy.perform(admit(toy.snapshot, toy.now)) else still + 1
        if still == STILL:
            return
    raise AssertionError(f"still busy after {ROUNDS} rounds: {admit(toy.snapshot, toy.now).actions}")
