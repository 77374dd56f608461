"""Requests and replies of the HTTP API that people, the SDK and the CLI use.

`server` decodes and answers these, `client` sends and reads them; the OpenAPI page is made from them. Nouns of the
domain are not sent as they are: what a field is called here stays, whatever rows look like. Unknown fields of a request
are refused with their name. It must not check values: that is `domain.admission`, behind the command.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.domain.cloud import CloudWish
from penstock.domain.transfers import Transfer
from penstock.wire.cost import JobCost
from penstock.wire.inventory import BudgetRequest, BudgetView, ReservationView

Name = Annotated[str, Meta(min_length=1, max_length=253)]
Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class SnippetRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="snippet"):
    """Python source. `variables` (JSON values) are in scope; what it leaves in `result` is the result."""

    code: str
    variables: dict[str, object] = {}
    isolation: Literal["fork", "inline"] = "fork"
    setup: str = ""  #: shell command that makes its environment; once per host and text


class CommandRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="command"):
    """A command in a frozen working directory; `setup` runs first and is cached by `environment`."""

    argv: Annotated[tuple[str, ...], Meta(min_length=1, max_length=10_000)]
    snapshot: Hash | None = None
    setup: str = ""


class JobRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One job to be run. What is left out takes the server's default (team and user: the caller's own).

    `user` is whom the job counts for; only administrators may name another than themselves.
    """

    payload: SnippetRequest | CommandRequest
    on: tuple[str, ...] = ()  #: accelerators, best first; empty: the server's default
    pool: str | None = None
    slice: str | None = None  #: only this slice
    zones: tuple[str, ...] = ()
    spot: bool | None = None
    slices: Annotated[int, Meta(ge=1)] = 1
    memory_bytes: int | None = None
    team: str | None = None
    user: str | None = None
    queue: str | None = None
    name: str = ""
    replicas_min: Annotated[int, Meta(ge=1)] = 1
    replicas_max: Annotated[int, Meta(ge=1)] = 1
    rule: str = "pre"
    max_retries: int | None = None  #: failures of its own that are tried again
    priority: int = 0
    timeout_s: float | None = None
    expected_s: float | None = None
    after: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    note: str = ""
    env: dict[str, str] = {}
    secrets: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    idempotency_key: str | None = None
    array: str | None = None  #: set by the client for the members of one array: "<array id>/<index>"
    at_most: Annotated[int, Meta(ge=1)] | None = None  #: so many members of its array may be under way at once


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Many jobs, all taken or none."""

    jobs: Annotated[tuple[JobRequest, ...], Meta(min_length=1, max_length=10_000)]


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """A job was taken in, now (`created`) or by an earlier call with the same key."""

    id: str
    state: str
    created: bool


class BatchAccepted(msgspec.Struct, frozen=True):
    jobs: tuple[Accepted, ...]


class ErrorView(msgspec.Struct, frozen=True, kw_only=True):
    """How a payload failed, in its own words."""

    type: str
    message: str
    traceback: str = ""


class AttemptView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    replica: int
    fence: int
    stage: int
    state: str
    slices: tuple[str, ...]
    hosts: int
    created_at: float
    started_at: float | None = None
    closed_at: float | None = None
    cause: str | None = None
    evidence: tuple[str, ...] = ()
    then: str = ""  #: how the job goes on, where its capacity was taken away
    exit_code: int | None = None
    copied: Transfer | None = None  #: a checkpoint that was brought from another region first


class ProgressView(msgspec.Struct, frozen=True, kw_only=True):
    """What the payload last said about itself (`penstock.payload.progress`, `saving`)."""

    done: float
    total: float | None = None
    metrics: dict[str, float] = {}
    at: float = 0.0
    save_s: float | None = None  #: how long one of its saves holds it up


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as people see it. Lists leave `attempts`, `command` and `error` out."""

    id: str
    name: str
    team: str
    queue: str
    user: str
    state: str
    kind: str  #: snippet, command or task
    on: tuple[str, ...]
    slices: int
    created_at: float
    version: int
    priority: int = 0
    tags: tuple[str, ...] = ()
    note: str = ""
    command: str = ""
    snapshot: str | None = None
    cause: str | None = None
    reason: str = ""
    exit_code: int | None = None
    stage: int = 0
    slice: str | None = None  #: of the latest attempt
    started_at: float | None = None
    finished_at: float | None = None
    parent: str | None = None
    cancel_requested: bool = False
    progress: ProgressView | None = None
    error: ErrorView | None = None
    cost_usd: float | None = None
    used: JobCost | None = None  #: lists leave it out
    attempts: tuple[AttemptView, ...] = ()


class JobPage(msgspec.Struct, frozen=True):
    """`next` is the cursor of the page after this one; None at the end."""

    jobs: tuple[JobView, ...]
    next: str | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The one shape of `exec`, `run --wait`, `show --json` and `result`."""

    id: str
    state: str
    cause: str | None
    exit_code: int | None
    result: object = None
    note: str = ""  #: why `result` is a repr
    error: ErrorView | None = None
    stage: int = 0
    attempts: int = 0
    slice: str | None = None
    started_at: float | None = None
    finished_at: float | None = None


class CancelReply(msgspec.Struct, frozen=True):
    id: str
    answer: str  #: "cancelled", "cancelling", "already finished"


class EditRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    priority: int | None = None
    tags: tuple[str, ...] | None = None


class AgainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Resume or rerun, perhaps elsewhere."""

    on: tuple[str, ...] = ()
    idempotency_key: str | None = None


class WhyView(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job is not running: a stable code, one sentence, what would help, and where it stands in its queue."""

    id: str
    state: str
    code: str
    sentence: str
    advice: str = ""
    place: int | None = None
    as_of: float = 0.0
    numbers: dict[str, object] = {}
    details: tuple[str, ...] = ()  #: one line each: slices that are being made for it, and what went wrong with others


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    at: float
    kind: str
    id: str
    body: dict[str, object] = {}


class EventPage(msgspec.Struct, frozen=True):
    events: tuple[EventView, ...]
    next: int


class LogChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One `data` of a log stream: bytes of one stream of one host, as text when they are UTF-8, else as base64.

    `dropped` bytes before `offset` are gone for good (a cap, or a host that died with them).
    """

    attempt: str
    rank: int
    stream: str
    offset: int
    text: str = ""
    base64: str = ""
    dropped: int = 0
    at: float = 0.0  #: when the server got it


class ArtifactView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    attempt: str
    fence: int


class ArtifactPage(msgspec.Struct, frozen=True):
    """The artifacts of the attempt that counts: the one that succeeded, else the last."""

    artifacts: tuple[ArtifactView, ...]


class SliceView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    team: str
    pool: str
    provider: str
    zone: str
    accelerator: str
    chips: int
    hosts: int
    state: str
    spot: bool = False
    attempt: str | None = None
    job: str | None = None
    user: str | None = None  #: whose job is on it
    tags: tuple[str, ...] = ()  #: of that job
    made_at: float = 0.0  #: when it was asked for
    ready_at: float | None = None
    idle_since: float | None = None
    why: str = ""
    arriving: str = ""  #: while it is being made: what its hosts are doing, and whether it is unusually slow
    slow_since: float | None = None  #: since when its creation takes longer than others of its kind did in its zone
    title: str = ""  #: what people call it: in a fleet its place, tpu-ZONE-N, which its successor takes over
    held_since: float | None = None  #: by the job on it
    held_until: float | None = None  #: at the latest: when that job has had all its time
    reserved: ReservationView | None = None


class SlicePage(msgspec.Struct, frozen=True):
    slices: tuple[SliceView, ...]


class PoolRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    accelerator: str
    provider: str = "local"
    zones: tuple[str, ...] = ("local",)
    team: str | None = None
    min: int = 0
    max: int = 1
    spot: bool = False
    idle_s: float = 600.0
    cloud: CloudWish | None = None  #: how a cloud makes its slices; left out: as before
    per_zone: int | None = None  #: a fleet: so many in each zone, and `max` follows from it; left out: as before
    race: int | None = None  #: zones asked at once for one slice, the first to be ready kept; left out: as before, or 1


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    team: str
    provider: str
    accelerator: str
    zones: tuple[str, ...]
    min: int
    max: int
    spot: bool
    idle_s: float
    slices: int = 0
    cloud: CloudWish | None = None
    per_zone: int | None = None
    race: int = 1


class PoolPage(msgspec.Struct, frozen=True):
    pools: tuple[PoolView, ...]


class QueueRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    team: str | None = None
    weight: float = 1.0
    quota_chips: int | None = None
    borrow_chips: int | None = None
    band: int = 0
    paused: bool = False
    budget: BudgetRequest | None = None  #: left out: none


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    team: str
    weight: float
    quota_chips: int | None
    borrow_chips: int | None
    band: int
    paused: bool
    waiting: int = 0
    budget: BudgetView | None = None


class QueuePage(msgspec.Struct, frozen=True):
    queues: tuple[QueueView, ...]


class MissingRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which of these blobs does the server not have yet?"""

    blobs: Annotated[tuple[Hash, ...], Meta(max_length=10_000)]


class MissingReply(msgspec.Struct, frozen=True):
    missing: tuple[str, ...]


class SecretRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: Annotated[str, Meta(min_length=1, max_length=65_536)]


class SecretPage(msgspec.Struct, frozen=True):
    names: tuple[str, ...]


class PreemptRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Take a local slice away, as a cloud would: at once, or after a notice of so many seconds."""

    notice_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    """Who answers: `tpu` shows it, and the client checks that it can talk to it."""

    version: str
    api: str
    leading: bool
    store: str
    root: str
    principal: str
    team: str
    role: str
    started_at: float


class CleanRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Remove what jobs left that ended so long ago, a bounded part of it per call; `cursor` is `next` of the last."""

    #: Hosts may send what a job left until a quarter of an hour after its end. None: the server's retention.
    older_than_s: Annotated[float, Meta(ge=900, le=3.2e9)] | None = None
    keep_results: bool = False  #: results and artifacts stay, and so do the jobs they belong to
    dry_run: bool = False
    cursor: Annotated[str, Meta(pattern="^(jobs:[0-9a-z]{1,40}|snapshots|blobs|blobs:on|caches)$")] | None = None


class CleanedView(msgspec.Struct, frozen=True, kw_only=True):
    """How much of one kind went: logs, results, checkpoints, compiled, rows, snapshots, blobs, environments, …"""

    kind: str
    count: int
    bytes: int


class CleanReply(msgspec.Struct, frozen=True, kw_only=True):
    """What this call removed, or would remove; `next` is None when all is done."""

    dry_run: bool
    ended_before: float
    jobs: int  #: that anything of was removed
    removed: tuple[CleanedView, ...]
    notes: tuple[str, ...] = ()  #: what stays, and why
    next: str | None = None


class Maintenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether nothing new may start; what runs goes on either way."""

    on: bool


class Health(msgspec.Struct, frozen=True):
    ok: bool
