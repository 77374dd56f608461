"""Small worlds for planner tests: a snapshot from a few words of TOML or Python, and a round's answer in words.

`test_cases`, `test_oracle` and `test_plan` build with it. Every field has a default, so that a case says only what it
is about; docs/explanation/planning.md shows the language. It must not repeat any rule of the planner.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.domain.lifecycle import AttemptState, Cause, JobState, SliceState
from penstock.domain.nouns import (
    Attempt,
    Bound,
    Chain,
    Job,
    JobSpec,
    Pool,
    Queue,
    Quota,
    Replicas,
    Reservation,
    Resources,
    Slice,
    StopOrder,
    Team,
    Zone,
)
from penstock.planner.actions import Finish, Place, Release, Stop
from penstock.planner.admission import Admission
from penstock.planner.snapshot import Snapshot

Row = Mapping[str, Any]
NOW = 1000.0
CHIPS = {"v5e-4": 4, "v5e-8": 8, "v5e-16": 16, "v5p-8": 4, "v4-8": 4}


class Build:
    """One case's snapshot. With `shuffle`, everything that has no order of its own is put in another order."""

    def __init__(self, case: Row, shuffle: random.Random | None = None) -> None:
        self.snapshot = Snapshot()
        self.snapshot.maintenance = case.get("maintenance", False)
        self._shuffle = shuffle
        rows = {key: [_row(one, key) for one in case.get(key, [])] for key in KEYS}
        rows["pools"] = rows["pools"] or [{"name": "p"}]
        self._pools = {row["name"]: row for row in rows["pools"]}
        self._counts: dict[str, int] = {}
        held = [slice for row in rows["running"] for slice in row["on"]]
        for row in (*rows["slices"], *(_row(one, "slices") for one in held)):
            pool = row.get("pool", "p")
            self._counts[pool] = self._counts.get(pool, 0) + 1
        for row in self._mixed(_teams(rows)):
            self.snapshot.put_team(Team(name=row["name"], chip_limit=row.get("limit")))
        for row in self._mixed(rows["pools"]):
            self.snapshot.put_pool(self._pool(row))
        for row in self._mixed(_queues(rows)):
            self.snapshot.put_queue(_queue(row))
        for row in self._mixed(rows["zones"]):
            self.snapshot.put_zone(self._zone(row))
        for provider, limit in case.get("providers", {}).items():
            self.snapshot.put_quota(Quota(scope="provider", name=provider, limit_chips=limit))
        for row in self._mixed(rows["slices"]):
            self.snapshot.put_slice(self._slice(row, None))
        self._run(self._mixed(rows["running"]))
        self._wait(rows["jobs"])
        self.snapshot.witness.silent = dict(case.get("silent", {}))

    def _mixed(self, rows: Sequence[Row]) -> list[Row]:
        mixed = list(rows)
        if self._shuffle is not None:
            self._shuffle.shuffle(mixed)
        return mixed

    def _pool(self, row: Row) -> Pool:
        accelerator = row.get("accelerator", "v5e-8")
        return Pool(
            name=row["name"],
            team=row.get("team", "t"),
            teams=tuple(row.get("teams", ())),
            provider=row.get("provider", "fake"),
            accelerator=accelerator,
            chips=CHIPS[accelerator],
            hosts=1,
            zones=tuple(row.get("zones", ["a"])),
            min=row.get("min", 0),
            max=row.get("max", max(1, self._counts.get(row["name"], 0))),
            spot=row.get("spot", False),
            per_zone=row.get("per_zone"),
            deleted=row.get("deleted", False),
            reserved=_claim(row),
        )

    def _zone(self, row: Row) -> Zone:
        pool = self.snapshot.pools[row.get("pool", "p")]
        return Zone(
            provider=pool.provider,
            zone=row["zone"],
            accelerator=pool.accelerator,
            spot=pool.spot,
            backoff_until=row["until"],
            streak=1,
        )

    def _slice(self, row: Row, attempt: str | None) -> Slice:
        pool = self.snapshot.pools[row.get("pool", "p")]
        state = SliceState(row.get("state", "ready"))
        ready = state is SliceState.READY
        return Slice(
            id=row["id"],
            team=row.get("team", pool.team),
            pool=pool.name,
            provider=pool.provider,
            zone=row.get("zone", pool.zones[0]),
            accelerator=pool.accelerator,
            chips=pool.chips,
            hosts=pool.hosts,
            spot=pool.spot,
            intended_at=0.0,
            state=state,
            provider_id="1" if ready else None,
            ready_at=10.0 if ready else None,
            idle_since=row.get("idle", 900.0) if ready and attempt is None else None,
            warm=row.get("warm", ""),
            dirty=row.get("dirty", False),
            race=row.get("race"),
            attempt=attempt,
            reserved=_claim(row),
        )

    def _run(self, rows: Sequence[Row]) -> None:
        """Running attempts; several rows of one job are its replicas."""
        for row in rows:
            job, replica = row["job"], row.get("replica", 0)
            queue = self.snapshot.queues[row.get("queue", "q")].queue
            slices = [self._slice(_row(one, "slices"), f"{job}/{replica}") for one in row["on"]]
            for slice in slices:
                self.snapshot.put_slice(slice)
            self.snapshot.put_attempt(
                Attempt(
                    id=f"{job}/{replica}",
                    job=job,
                    replica=replica,
                    fence=1,
                    team=queue.team,
                    queue=queue.name,
                    chips=sum(slice.chips for slice in slices),
                    slices=tuple(Bound(slice.id, "1") for slice in slices),
                    hosts=len(slices),
                    created_at=row.get("since", 500.0),
                    timeout_s=row.get("timeout", 1000.0),
                    state=AttemptState.RUNNING,
                    band=row.get("band", queue.band),
                    borrowed=row.get("borrowed", False),
                    stop=StopOrder(row["stopping"], NOW) if "stopping" in row else None,
                    usd_per_chip_hour=row.get("price"),
                    holding=tuple(row.get("holding", ())),
                )
            )
        for id in sorted({row["job"] for row in rows}):
            mine = sorted((row for row in rows if row["job"] == id), key=lambda row: int(row.get("replica", 0)))
            live = [Chain(replica=row.get("replica", 0), fence=1, attempts=1, live=True) for row in mine]
            chains = [*live, *(_chain(row) for row in mine[0].get("chains", []))]
            if "gang" not in mine[0]:
                mine[0] = {**mine[0], "gang": len(mine[0]["on"])}
            self.snapshot.put_job(self._job({**mine[0], "id": id}, JobState.RUNNING, chains))

    def _wait(self, rows: Sequence[Row]) -> None:
        for row in self._mixed(rows):
            chains = [_chain(one) for one in row.get("chains", [])]
            if row.get("returning"):
                chains = [_chain({"until": row.get("until", 0.0), "cause": row.get("cause", "preempted")})]
            job = self._job(row, JobState.QUEUED, chains)
            if chains:
                self.snapshot.put_job(job)
            else:
                view = self.snapshot.queues[job.spec.queue]
                view.waiting.append(job)
                view.waiting.sort(key=lambda one: (-one.priority, one.id))  # as the store's window is
                view.waiting_total += 1

    def _job(self, row: Row, state: JobState, chains: Sequence[Chain]) -> Job:
        queue = self.snapshot.queues[row.get("queue", "q")].queue
        accelerators = row.get("accelerators", [row.get("accelerator", "v5e-8")])
        least, most = row.get("replicas", [1, 1])
        return Job(
            id=row["id"],
            spec=JobSpec(
                team=queue.team,
                queue=queue.name,
                user=row.get("user", ""),
                resources=Resources(
                    accelerators=tuple(accelerators),
                    chips=CHIPS[accelerators[0]],
                    slices=row.get("gang", 1),
                    pool=row.get("pool"),
                    slice=row.get("slice"),
                    zones=tuple(row.get("zones", ())),
                    spot=row.get("spot"),
                ),
                replicas=Replicas(least, most),
                timeout_s=row.get("timeout", 1000.0),
                expected_s=row.get("expected"),
                environment=row.get("environment", ""),
            ),
            state=state,
            created_at=row.get("created", 600.0),
            updated_at=row.get("updated", row.get("created", 600.0)),
            priority=row.get("priority", 0),
            chains=tuple(chains),
            open_units=row.get("open_units"),
            cancel_at=row.get("cancelled"),
        )


KEYS = ("teams", "pools", "queues", "zones", "slices", "running", "jobs")


def _row(one: str | Row, key: str) -> Row:
    """A bare word is an id; for slices `id zone` or `id pool/zone`."""
    if not isinstance(one, str):
        return one
    name = {"teams": "name", "pools": "name", "queues": "name"}.get(key, "id")
    id, _, where = one.partition(" ")
    pool, slash, zone = where.rpartition("/")
    return {name: id, **({"zone": zone} if zone else {}), **({"pool": pool} if slash else {})}


def _chain(row: Row) -> Chain:
    return Chain(
        replica=row.get("replica", 0),
        fence=1,
        attempts=1,
        not_before=row.get("until", 0.0),
        done=row.get("done", False),
        last_cause=Cause(row.get("cause", "preempted")),
    )


def _teams(rows: Mapping[str, list[Row]]) -> list[Row]:
    named = [row["name"] for row in rows["teams"]]
    used = [row.get("team", "t") for row in (*rows["pools"], *rows["queues"], *rows["slices"])]
    used += [team for row in rows["pools"] for team in row.get("teams", [])]
    return [*rows["teams"], *({"name": name} for name in dict.fromkeys([*used, "t"]) if name not in named)]


def _queues(rows: Mapping[str, list[Row]]) -> list[Row]:
    named = [row["name"] for row in rows["queues"]]
    used = dict.fromkeys(row.get("queue", "q") for row in (*rows["jobs"], *rows["running"]))
    return [*rows["queues"], *({"name": name} for name in used if name not in named)]


def _queue(row: Row) -> Queue:
    return Queue(
        name=row["name"],
        team=row.get("team", "t"),
        weight=row.get("weight", 1.0),
        quota_chips=row.get("quota"),
        borrow_chips=row.get("borrow"),
        band=row.get("band", 0),
        paused=row.get("paused", False),
        used_chip_s=row.get("used", 0.0),
        used_at=row.get("used_at", NOW),
        budget=row.get("budget"),
        spent=row.get("spent", ()),
    )


def _claim(row: Row) -> Reservation | None:
    """`reserved` is a user's name, or a whole reservation."""
    claim = row.get("reserved")
    return Reservation(user=claim, since=0.0, until=NOW + 100.0, note="demo") if isinstance(claim, str) else claim


def in_words(admission: Admission) -> dict[str, list[str]]:
    """A round's answer as short lines, in the order decided: what the cases compare with."""
    words: dict[str, list[str]] = {"place": [], "stop": [], "release": [], "finish": [], "want": []}
    for action in admission.actions:
        match action:
            case Place():
                replica = f"/{action.replica}" if action.replica else ""
                marks = (" borrowed" if action.borrowed else "") + (" backfilled" if action.backfilled else "")
                words["place"].append(f"{action.job}{replica}: {' '.join(sorted(action.slices))}{marks}")
            case Stop():
                words["stop"].append(f"{action.attempt.removesuffix('/0')} {action.why}")
            case Release():
                words["release"].append(action.slice)
            case Finish():
                words["finish"].append(action.job)
            case _:
                raise AssertionError(f"admission never does this: {action}")
    for want in admission.wants:
        zones = f" in {' '.join(want.zones)}" if want.zones else ""
        words["want"].append(f"{want.job}: {want.slices} of {' '.join(want.pools)}{zones}")
    return words
