"""The nouns of design §2 as frozen structs: one shape for domain, wire and rows.

Every layer passes these around; only the controller's verbs make changed copies. Constructors of msgspec do not
validate: what comes from outside is checked by `domain.admission` before it becomes one of these. Frozen trees cannot
form cycles, so the collector need not look at them (`gc=False`): with 10,000 slices it took 80 ms to do so.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

from penstock.domain import limits
from penstock.domain.budgets import Budget, Spent
from penstock.domain.cloud import ON_DEMAND, SPOT, CloudWish, bought
from penstock.domain.lifecycle import TERMINAL_JOB_STATES, AttemptState, Cause, JobState, SliceState
from penstock.domain.transfers import Transfer


class Role(StrEnum):
    VIEWER = "viewer"
    SUBMITTER = "submitter"
    ADMIN = "admin"
    OPERATOR = "operator"
    AGENT = "agent"


class Team(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The trust domain: slices are shared inside it, never across."""

    name: str
    version: int = 0
    chip_limit: int | None = None


class Principal(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Who acts: a user, service or agent of one team, with a role."""

    name: str
    team: str
    role: Role


class Queue(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Where jobs wait. `quota_chips` is what the queue owns; up to `borrow_chips` more may be lent by idle peers."""

    name: str
    team: str
    version: int = 0
    weight: float = 1.0
    quota_chips: int | None = None
    borrow_chips: int | None = None
    band: int = 0
    paused: bool = False
    used_chip_s: float = 0.0  #: decayed chip-seconds of closed attempts, as of `used_at`
    used_at: float = 0.0
    deleted: bool = False  #: nothing is in it and nothing may come; its past use is kept for when it is made again
    budget: Budget | None = None  #: when it is spent, nothing new starts
    spent: tuple[Spent, ...] = ()  #: by closed attempts in the current day, week and month


class Reservation(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One user's claim on a slice or a pool: meanwhile only that user's jobs start there. It ends by itself."""

    user: str
    since: float
    until: float
    note: str = ""


class Pool(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A named wish for slices. With `per_zone` it is a fleet: a fixed count in each zone."""

    name: str
    team: str
    provider: str
    accelerator: str
    chips: int
    hosts: int
    zones: tuple[str, ...]
    version: int = 0
    min: int = 0
    max: int = 1
    spot: bool = False
    idle_s: float = 600.0
    race: int = 1  #: zones asked at once for one slice; the first to be ready is kept
    per_zone: int | None = None
    places: tuple[tuple[int, ...], ...] = ()  #: of a fleet, for each of `zones`: the numbers its slices there have
    teams: tuple[str, ...] = ()  #: other teams that may use it
    usd_per_chip_hour: float | None = None
    cloud: CloudWish | None = None  #: how its slices are bought and made, where a cloud makes them
    deleted: bool = False
    adopted: bool = False  #: it holds what somebody else made: nothing is made for it, and idleness is no reason to go
    reserved: Reservation | None = None  #: all its slices; may be over

    @property
    def always(self) -> int:
        """Slices it keeps whether anybody wants them or not."""
        return self.min if self.per_zone is None else self.per_zone * len(self.zones)


class Secret(msgspec.Struct, frozen=True, gc=False):
    """A name only: the value is resolved on the host and never stored."""

    name: str


class Snippet(msgspec.Struct, frozen=True, gc=False, tag="snippet"):
    code: str
    variables: dict[str, object] = {}
    isolation: str = "fork"  #: "fork": a process of its own; "inline": one trusted interpreter for many
    setup: str = ""  #: makes the environment it runs in, once per host


class Command(msgspec.Struct, frozen=True, gc=False, tag="command"):
    argv: tuple[str, ...]
    snapshot: str | None = None
    setup: str = ""  #: runs before the command, once per environment and host


class Task(msgspec.Struct, frozen=True, gc=False, tag="task"):
    """A built-in task, such as an extraction."""

    name: str
    arguments: dict[str, object] = {}


Payload = Snippet | Command | Task


class Resources(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What one attempt needs: a gang of `slices` equal slices, of the first accelerator that can be had."""

    accelerators: tuple[str, ...]
    chips: int  #: of one slice of the first accelerator: what quota is checked with before placement
    slices: int = 1
    pool: str | None = None
    slice: str | None = None
    zones: tuple[str, ...] = ()
    spot: bool | None = None
    memory_bytes: int | None = None


class Replicas(msgspec.Struct, frozen=True, gc=False):
    """How many copies of a job may run at once."""

    min: int = 1
    max: int = 1


class Rule(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How a job goes on after a failure: a preset's name and the budgets."""

    preset: str = "pre"
    failure_budget: int = limits.FAILURE_BUDGET_DEFAULT
    infra_budget: int = limits.INFRA_BUDGET_DEFAULT


class Member(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A job's place in an array: jobs submitted as one family, of which `at_most` may be under way at once."""

    array: str
    index: int
    at_most: int | None = None


class Throttle(NamedTuple):
    """What the members that share a limit are counted under, and the limit."""

    array: str
    at_most: int


class JobSpec(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a user asked for; never changed after submit."""

    team: str
    queue: str
    resources: Resources
    payload: Payload = Command(())  #: light reads leave it out: planning never looks at it
    name: str = ""
    user: str = ""
    replicas: Replicas = Replicas()
    rule: Rule = Rule()
    priority: int = 0
    timeout_s: float = limits.TIMEOUT_S_DEFAULT
    expected_s: float | None = None  #: how long the user thinks it runs; only backfill uses it, the timeout binds
    after: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    note: str = ""
    env: dict[str, str] = {}
    secrets: tuple[Secret, ...] = ()
    outputs: tuple[str, ...] = ()
    environment: str = ""  #: hash of the set-up; a slice that ran it before is warm
    member: Member | None = None

    @property
    def throttle(self) -> Throttle | None:
        """The limit of its array, if it has one."""
        if self.member is None or self.member.at_most is None:
            return None
        return Throttle(f"{self.team}/{self.member.array}", self.member.at_most)


class Chain(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The attempts of one replica so far: its fence, stage and what it spent of the budgets."""

    replica: int
    fence: int
    stage: int = 0
    attempts: int = 0
    failures: int = 0
    losses: int = 0
    quick_losses: int = 0  #: losses in a row that came soon after the start; the poison breaker counts them
    not_before: float = 0.0
    live: bool = False
    done: bool = False
    last_cause: Cause | None = None
    freed_at: float | None = None  #: when its last attempt closed; its next wait is counted from here


class Job(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A job's spec and where it stands. `fence` is the highest fence ever issued for any replica."""

    id: str
    spec: JobSpec
    state: JobState
    created_at: float
    version: int = 0
    updated_at: float = 0.0
    key: str | None = None
    body_hash: str = ""
    priority: int = 0
    tags: tuple[str, ...] = ()
    fence: int = 0
    cancel_at: float | None = None
    chains: tuple[Chain, ...] = ()
    outputs: tuple[str, ...] = ()  #: committed ones
    open_units: int | None = None  #: work units still open, as the payload last said; None: not that kind of job
    blocked: int = 0  #: jobs of `spec.after` that have not finished well yet
    held: bool = False  #: nothing blocks it, but as many of its array are under way as may be
    cause: Cause | None = None
    reason: str = ""
    finished_at: float | None = None
    parent: str | None = None
    stage: int = 0  #: of the first attempt: more than 0 when the job resumes another

    @property
    def live_chains(self) -> tuple[Chain, ...]:
        return tuple(chain for chain in self.chains if chain.live)

    @property
    def waiting(self) -> bool:
        """Among the heads of its queue: never placed, not blocked, not held, not cancelled."""
        free = self.blocked == 0 and not self.held and self.cancel_at is None
        return self.state is JobState.QUEUED and not self.chains and free

    @property
    def under_way(self) -> bool:
        """Whether it takes one of the places of its array: in the queue, placed, or between two attempts."""
        return self.state not in TERMINAL_JOB_STATES and self.blocked == 0 and not self.held

    def chain(self, replica: int) -> Chain:
        """The chain of one replica; a fresh one if it was never placed."""
        for chain in self.chains:
            if chain.replica == replica:
                return chain
        return Chain(replica=replica, fence=0, stage=self.stage)


class Bound(msgspec.Struct, frozen=True, gc=False):
    """A slice as an attempt holds it: the incarnation, not only the name."""

    slice: str
    provider_id: str


class Exit(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How the process of one host ended, in typed facts."""

    host: int
    code: int | None = None
    signal: int | None = None
    oom_killed: bool = False
    agent: str | None = None  #: the agent's own word: "timeout", "device_busy", "process_lost", "stopped", …
    slice_state: str | None = None
    notice: bool = False
    log_tail: str = ""

    @property
    def well(self) -> bool:
        return self.code == 0 and self.signal is None and not self.oom_killed and self.agent is None


class StopOrder(msgspec.Struct, frozen=True, gc=False):
    """The agents were asked to stop an attempt."""

    why: str  #: "cancelled", "reclaimed", "timeout", "gang", "replica", "drained", "notice"
    at: float
    said: str = ""  #: for people, where there is more to say: which slice is leaving, and why


class Save(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What the server knows of one host's checkpoints: when the newest was whole in the bucket."""

    host: int
    at: float
    count: int = 1
    cost_s: float | None = None  #: how long one held the payload up, as it said itself (`payload.saving`)


class Attempt(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One try to run one replica of a job on its gang."""

    id: str
    job: str
    replica: int
    fence: int
    team: str
    queue: str
    chips: int
    slices: tuple[Bound, ...]
    hosts: int  #: of the whole gang: the world size
    created_at: float
    timeout_s: float
    state: AttemptState = AttemptState.ASSIGNED
    version: int = 0
    stage: int = 0
    band: int = 0
    borrowed: bool = False
    launched: tuple[int, ...] = ()
    started: tuple[int, ...] = ()
    started_at: float | None = None
    exits: tuple[Exit, ...] = ()
    outputs: tuple[str, ...] = ()  #: complete in staging, as its hosts said
    stop: StopOrder | None = None
    fencing_at: float | None = None
    fenced_at: float | None = None
    cause: Cause | None = None
    evidence: tuple[str, ...] = ()
    closed_at: float | None = None
    # For the ledger, as they were when it was placed:
    user: str = ""
    zone: str = ""
    usd_per_chip_hour: float | None = None  #: None: unknown
    waited_s: float = 0.0  #: how long its replica had waited for it
    saves: tuple[Save, ...] = ()
    holding: tuple[int, ...] = ()  #: hosts whose payload has a unit of work in hand, as it last said
    copied: Transfer | None = None  #: what had to be brought from another region before it went on

    @property
    def saved_at(self) -> float | None:
        """Since when its newest checkpoint is whole: of a gang, when the last of the hosts that save had it."""
        return min((save.at for save in self.saves), default=None)


class Slice(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Accelerator capacity that comes and goes as a whole. Its id is its name at the provider, never reused."""

    id: str
    team: str
    pool: str
    provider: str
    zone: str
    accelerator: str
    chips: int
    hosts: int
    intended_at: float
    spot: bool = False
    cloud: CloudWish | None = None  #: as its pool said when it was intended
    race: str | None = None
    state: SliceState = SliceState.INTENDED
    version: int = 0
    provider_id: str | None = None
    provider_state: str | None = None
    joined: tuple[str | None, ...] = ()  #: incarnation of the agent on each host
    attempt: str | None = None
    ready_at: float | None = None
    idle_since: float | None = None
    warm: str = ""  #: environment it ran last
    dirty: bool = False  #: a process of a closed attempt may still live here: never reused
    why: str = ""  #: why it is leaving
    deleting_at: float | None = None
    gone_at: float | None = None
    usd_per_chip_hour: float | None = None  #: as its pool said when it was intended; None: unknown
    up_at: float | None = None  #: when the provider first said READY: from then on it exists, and costs
    reserved: Reservation | None = None  #: may be over
    number: int | None = None  #: in a fleet: its place in its zone, which goes on to whoever replaces it
    asked_at: float | None = None  #: when the provider took the request; intents may wait for their turn before
    lost_at: float | None = None  #: when it was known that the platform takes it: a loss is counted once

    @property
    def title(self) -> str:
        """What people call it: ids are never used twice, a place in a fleet is."""
        return self.id if self.number is None else f"tpu-{self.zone}-{self.number}"

    @property
    def begun_at(self) -> float:
        """Since when its provider, or its turn to ask it, is waited for."""
        return self.intended_at if self.asked_at is None else self.asked_at

    @property
    def usable(self) -> bool:
        return self.state is SliceState.READY and self.attempt is None and not self.dirty


class Zone(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What history says of one kind of capacity in one zone: how often it is granted, how soon, how long it lives."""

    provider: str
    zone: str
    accelerator: str
    spot: bool
    kind: str = ""  #: how it is bought; empty in rows of before more than spot and on-demand were told apart
    version: int = 0
    grants: float = 0.0  #: decayed counts
    refusals: float = 0.0
    tries: int = 0
    ready_s: float | None = None  #: smoothed time from the request to ready
    life_s: float | None = None  #: smoothed time from ready to preemption
    losses: float = 0.0
    backoff_until: float = 0.0
    streak: int = 0  #: refusals in a row
    broken: int = 0  #: slices in a row that came and could not be set up
    tried_at: float = 0.0
    why: str = ""  #: what the provider said when it last refused

    @property
    def bought(self) -> str:
        return self.kind or (SPOT if self.spot else ON_DEMAND)

    @property
    def id(self) -> str:
        return f"{self.provider}/{self.zone}/{self.accelerator}/{self.bought}"


def untried(it: Pool | Slice, zone: str) -> Zone:
    """What is known of its kind of capacity in a zone where it was never asked for: nothing, but under which id."""
    kind = bought(it.spot, it.cloud)
    return Zone(provider=it.provider, zone=zone, accelerator=it.accelerator, spot=it.spot, kind=kind)


class Quota(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A counter with a limit: chips of a team, pool, provider or queue. The store keeps `used` with each change."""

    scope: str  #: "team", "pool", "provider", "queue", or "cohort": all queues of a team
    name: str
    limit_chips: int | None = None
    used_chips: int = 0
    version: int = 0

    @property
    def id(self) -> str:
        return f"{self.scope}/{self.name}"


class Control(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Switches of the whole installation."""

    version: int = 0
    maintenance: bool = False  #: stop creating and placing, keep cleaning

    @property
    def id(self) -> str:
        return "control"


class Leader(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Who may perform effects: the holder of the highest epoch."""

    epoch: int
    holder: str
    version: int = 0
    renewed: int = 0  #: counts renewals; a standby watches it change instead of comparing clocks

    @property
    def id(self) -> str:
        return "leader"


class Event(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One line of the append-only log. `seq` is commit order and the only order; `at` is for people."""

    seq: int
    at: float
    kind: str
    entity: str
    id: str
    version: int
    actor: str
    epoch: int = 0
    fence: int = 0
    body: dict[str, object] = {}
