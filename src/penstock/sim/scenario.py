"""What one seed asks of the system: teams, queues, pools, a mix of jobs and how each of them behaves.

`sim.seed` builds one per seed. Small on purpose (a dozen slices, some forty jobs) and mixed on purpose:
gangs, elastic replicas, jobs with outputs, failing, poisonous and impossible ones, several bands, quotas and
a shared pool.
"""

from __future__ import annotations

import random

import msgspec

from penstock.domain import catalogue
from penstock.domain.ledger import Plan as ShardPlan
from penstock.domain.ledger import Unit
from penstock.domain.nouns import Command, JobSpec, Member, Pool, Queue, Replicas, Resources, Rule, Task, Team
from penstock.sim.processes import Behaviour
from penstock.sim.workers import Extraction, replica_of

ZONES = ("zone-a", "zone-b", "zone-c")


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One job to submit: when, by whom, and how its processes will behave."""

    at_s: float
    spec: JobSpec
    key: str | None
    nature: str  #: "well", "fails", "flaky", "oom", "hangs", "stubborn", "polite", "poison", "extract", "impossible"
    duration_s: float
    cancel_after_s: float | None = None


class Scenario(msgspec.Struct, kw_only=True):
    teams: list[Team]
    queues: list[Queue]
    pools: list[Pool]
    jobs: list[JobPlan]
    provider_chips: int | None
    extractions: dict[str, Extraction] = {}

    def plain_job(self) -> JobPlan:
        """A job that simply runs: what bursts are made of."""
        return next((plan for plan in self.jobs if plan.nature == "well"), self.jobs[0])


def build(rng: random.Random, fault_s: float) -> Scenario:
    """The scenario of one seed; everything is drawn from `rng`."""
    teams = [Team(name="red", chip_limit=rng.choice([None, 24, 40])), Team(name="blue")]
    queues = _queues(rng)
    pools = _pools(rng)
    scenario = Scenario(teams=teams, queues=queues, pools=pools, jobs=[], provider_chips=rng.choice([None, 40, 64]))
    for number in range(rng.randint(24, 44)):
        scenario.jobs.append(_job(rng, number, queues, fault_s))
    for number in range(rng.randint(1, 2)):
        scenario.jobs.append(_extraction(rng, number, scenario, fault_s))
    calm = rng.choice([queue for queue in queues if queue.team == "red"])
    for number in range(rng.randint(10, 16)):
        scenario.jobs.append(_calm_job(rng, number, calm, fault_s))
    scenario.jobs.extend(_array(rng, calm, fault_s))
    scenario.jobs.sort(key=lambda job: job.at_s)
    return scenario


def _queues(rng: random.Random) -> list[Queue]:
    quota = rng.choice([None, None, 32, 64])
    borrow = None if quota is None else rng.choice([0, 16, 64])
    return [
        Queue(name="red-train", team="red", weight=2.0, quota_chips=quota, borrow_chips=borrow),
        Queue(name="red-batch", team="red", quota_chips=quota, borrow_chips=borrow, band=rng.choice([0, 0, -1])),
        Queue(name="blue", team="blue"),
        Queue(name="urgent", team="blue", band=1),
    ]


def _pools(rng: random.Random) -> list[Pool]:
    def pool(name: str, accelerator: str, **more: object) -> Pool:
        row = catalogue.find(accelerator)
        fields = {"provider": "fake", "chips": row.chips, "hosts": row.hosts, **more}
        return msgspec.convert({"name": name, "accelerator": row.name, **fields}, Pool)

    return [
        pool(
            "red-small", "v5e-8", team="red", zones=ZONES, min=rng.choice([0, 0, 1]), max=rng.randint(3, 6),
            spot=True, idle_s=rng.choice([60.0, 300.0]), race=rng.choice([1, 1, 2]),
        ),
        pool(
            "red-large", "v5e-16", team="red", zones=ZONES[:2], max=rng.randint(2, 4), spot=True, idle_s=120.0
        ),
        pool(
            "shared", "v4-8", team="blue", teams=("red",), zones=ZONES, max=rng.randint(3, 6),
            spot=rng.random() < 0.7, idle_s=rng.choice([60.0, 300.0]), race=rng.choice([1, 2, 3]),
        ),
        pool("blue-fleet", "v6e-8", team="blue", zones=ZONES[1:], max=2, min=0, per_zone=1, idle_s=600.0),
    ]  # fmt: skip


_NATURES = (
    "well",
    "well",
    "well",
    "well",
    "well",
    "fails",
    "flaky",
    "oom",
    "hangs",
    "stubborn",
    "polite",
    "poison",
    "impossible",
)
_FITS = {"red-train": ("v5e-8", "v5e-16", "v4-8"), "red-batch": ("v5e-8", "v4-8"), "blue": ("v4-8", "v6e-8"),
         "urgent": ("v4-8", "v6e-8")}  # fmt: skip


def _job(rng: random.Random, number: int, queues: list[Queue], fault_s: float) -> JobPlan:
    queue = rng.choice(queues)
    nature = rng.choice(_NATURES)
    accelerator = rng.choice(_FITS[queue.name]) if nature != "impossible" else "v5p-8"
    slices = 2 if nature == "well" and accelerator != "v6e-8" and rng.random() < 0.2 else 1
    duration_s = rng.uniform(20.0, 400.0)
    spec = JobSpec(
        team=queue.team,
        queue=queue.name,
        resources=Resources(accelerators=(accelerator,), chips=catalogue.find(accelerator).chips, slices=slices),
        payload=Command(("python", "train.py")),
        name=f"{nature}-{number}",
        rule=Rule(
            preset=rng.choice(["pre", "pre", "pre", "rerun", "reapply", "pass", "resume"]),
            failure_budget=rng.choice([0, 0, 1, 2]),
            infra_budget=rng.choice([3, 20, 100]),
        ),
        priority=rng.choice([0, 0, 0, 10]),
        timeout_s=600.0 if nature == "hangs" else 3600.0,
        expected_s=duration_s if rng.random() < 0.3 else None,
        outputs=("result.json",) if rng.random() < 0.7 else (),
        environment=rng.choice(["", "env-a", "env-b"]),
    )
    return JobPlan(
        at_s=rng.uniform(0.0, fault_s * 0.8),
        spec=spec,
        key=f"key-{number}" if rng.random() < 0.8 else None,
        nature=nature,
        duration_s=duration_s,
        cancel_after_s=rng.uniform(0.0, 500.0) if rng.random() < 0.3 else None,
    )


def _calm_job(rng: random.Random, number: int, queue: Queue, fault_s: float) -> JobPlan:
    """Work that comes once the faults have stopped: gangs and short jobs on few slices, told how long they run.

    What liveness demands is judged on these: free capacity is used, shares are fair, and nobody delays a gang.
    """
    duration_s = rng.choice([60.0, 150.0, 400.0, 900.0])
    slices = rng.choice([1, 1, 2, 3])
    spec = JobSpec(
        team=queue.team,
        queue=queue.name,
        resources=Resources(accelerators=("v5e-8",), chips=8, slices=slices),
        payload=Command(("python", "train.py")),
        name=f"calm-{number}",
        timeout_s=duration_s + 120.0,
        expected_s=duration_s if rng.random() < 0.5 else None,
    )
    at_s = fault_s + rng.uniform(1000.0, 1150.0)  # most of what the faults left has ended by then
    return JobPlan(at_s=at_s, spec=spec, key=f"calm-{number}", nature="well", duration_s=duration_s)


def _array(rng: random.Random, queue: Queue, fault_s: float) -> list[JobPlan]:
    """A family of short jobs of which few may run at once; some fail, some are cancelled, some come late."""
    at_most = rng.randint(1, 3)
    begin_s = rng.choice([rng.uniform(0.0, fault_s * 0.5), fault_s + 1000.0])
    plans = []
    for index in range(rng.randint(4, 9)):
        spec = JobSpec(
            team=queue.team,
            queue=queue.name,
            resources=Resources(accelerators=("v5e-8", "v4-8"), chips=8),
            payload=Command(("python", "train.py")),
            name=f"sweep[{index}]",
            priority=rng.choice([0, 0, 10]),
            timeout_s=900.0,
            member=Member(array="sweep", index=index, at_most=at_most),
        )
        plans.append(
            JobPlan(
                at_s=begin_s + rng.choice([0.0, rng.uniform(0.0, 150.0)]),
                spec=spec,
                key=f"sweep-{index}",
                nature=rng.choice(["well", "well", "well", "fails", "polite"]),
                duration_s=rng.uniform(10.0, 90.0),
                cancel_after_s=rng.uniform(0.0, 200.0) if rng.random() < 0.2 else None,
            )
        )
    return plans


def _extraction(rng: random.Random, number: int, scenario: Scenario, fault_s: float) -> JobPlan:
    units = rng.randint(3, 8)
    rows = 10
    plan = ShardPlan(
        run=f"run-{number}",
        rows=units * rows,
        units=tuple(Unit(f"u{n:03d}", n * rows, (n + 1) * rows) for n in range(units)),
    )
    scenario.extractions[plan.run] = Extraction(
        plan=plan, unit_s=rng.uniform(10.0, 60.0), lease_s=rng.choice([20.0, 60.0, 120.0])
    )
    spec = JobSpec(
        team="red",
        queue="red-batch",
        resources=Resources(accelerators=("v5e-8", "v4-8"), chips=8),
        payload=Task("extract", {"run": plan.run}),
        name=plan.run,
        replicas=Replicas(1, rng.randint(2, 4)),
        rule=Rule(preset="pre", failure_budget=2, infra_budget=100),
        timeout_s=7200.0,
    )
    return JobPlan(
        at_s=rng.uniform(0.0, fault_s * 0.3), spec=spec, key=f"run-{number}", nature="extract", duration_s=0.0
    )


def behave(plan: JobPlan, scenario: Scenario, rng: random.Random, rank: int, tries: int) -> Behaviour:
    """How one process of a job behaves on its `tries`-th attempt."""
    outputs = plan.spec.outputs if rank == 0 else ()
    duration_s = plan.duration_s
    match plan.nature:
        case "fails":
            return Behaviour(
                duration_s=duration_s / 4, code=1, log_tail="Traceback (most recent call last):\nValueError: x"
            )
        case "flaky" if tries < 2:
            return Behaviour(duration_s=duration_s / 2, code=1, log_tail="ValueError: bad luck")
        case "oom":
            return Behaviour(duration_s=duration_s / 3, code=None, signal=9, oom_killed=True)
        case "hangs":
            return Behaviour(duration_s=1e9, ignores_term=rank == 0)
        case "stubborn":
            return Behaviour(duration_s=duration_s, ignores_term=True, outputs=outputs)
        case "polite":
            return Behaviour(duration_s=duration_s, outputs=outputs, stop_code=0, stop_s=rng.uniform(0.2, 10.0))
        case "poison":
            return Behaviour(duration_s=5.0, code=None, agent="device_busy")
        case "extract":
            assert isinstance(plan.spec.payload, Task)
            extraction = scenario.extractions[str(plan.spec.payload.arguments["run"])]
            return Behaviour(work=replica_of(extraction, rng), stop_s=rng.uniform(0.5, 3.0))
        case _:
            return Behaviour(duration_s=duration_s, outputs=outputs, stop_s=rng.uniform(0.2, 10.0))
