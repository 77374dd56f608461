"""What a history says of one job, attempt, call, machine or process, gathered from its lines.

`Indexed` makes these and the rules read them. Bodies come from stores, simulators and random tests, so the readers
here answer an empty value for anything that is missing or of another type; they never raise and never judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.domain.invariants.history import Record
from penstock.domain.lifecycle import FAILURE_CAUSES, INFRASTRUCTURE_CAUSES
from penstock.domain.nouns import Event

#: Stands for the number of a replica where a fence is raised for all of them.
EVERY_REPLICA: Final = -1
_TERMINAL = frozenset({"job.succeeded", "job.failed", "job.cancelled"})
FAILURES: Final = frozenset(cause.value for cause in FAILURE_CAUSES)
LOSSES: Final = frozenset(cause.value for cause in INFRASTRUCTURE_CAUSES)


def text(body: Mapping[str, object], name: str) -> str:
    value = body.get(name)
    return value if isinstance(value, str) else ""


def whole(body: Mapping[str, object], name: str, missing: int = 0) -> int:
    value = body.get(name)
    return value if isinstance(value, int) else missing


def maybe_whole(body: Mapping[str, object], name: str) -> int | None:
    value = body.get(name)
    return value if isinstance(value, int) else None


def number(body: Mapping[str, object], name: str) -> float | None:
    value = body.get(name)
    return float(value) if isinstance(value, int | float) else None


def items(body: Mapping[str, object], name: str) -> tuple[object, ...]:
    value = body.get(name)
    return tuple(value) if isinstance(value, list | tuple) else ()


def blockers(created: Event) -> int:
    """How many things keep a new job out of its queue: jobs it comes after, and an array without a place for it."""
    return len(set(texts(created.body, "after"))) + bool(created.body.get("held"))


def texts(body: Mapping[str, object], name: str) -> tuple[str, ...]:
    return tuple(value for value in items(body, name) if isinstance(value, str))


def _bound(body: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """The (slice, provider id) pairs of an attempt."""
    return tuple(
        (str(pair[0]), str(pair[1]))
        for pair in items(body, "slices")
        if isinstance(pair, list | tuple) and len(pair) == 2
    )


class JobFacts:
    """One job as committed. Only the first of each milestone counts: more would be a broken rule of its own."""

    __slots__ = ("cancel", "created", "id", "purged", "terminal")

    def __init__(self, id: str) -> None:
        self.id = id
        self.created: Event | None = None
        self.cancel: Event | None = None
        self.terminal: Event | None = None
        self.purged: Event | None = None

    def take(self, event: Event) -> None:
        kind = event.kind
        if kind == "job.created":
            self.created = self.created or event
        elif kind == "job.cancel_requested":
            self.cancel = self.cancel or event
        elif kind in _TERMINAL:
            self.terminal = self.terminal or event
        elif kind == "job.purged":
            self.purged = self.purged or event

    @property
    def body(self) -> Mapping[str, object]:
        return self.created.body if self.created is not None else {}

    @property
    def single(self) -> bool:
        """One slice, one replica: the plain case that liveness rules speak of."""
        return whole(self.body, "slices", 1) == 1 and whole(self.body, "replicas_max", 1) == 1


class AttemptFacts:
    """One attempt as committed."""

    __slots__ = (
        "chips",
        "closed",
        "created",
        "fence",
        "hosts",
        "id",
        "job",
        "queue",
        "replica",
        "slices",
        "team",
    )

    def __init__(self, created: Event) -> None:
        body = created.body
        self.id = created.id
        self.job = text(body, "job")
        self.replica = whole(body, "replica")
        self.fence = created.fence
        self.hosts = whole(body, "hosts")
        self.chips = whole(body, "chips")
        self.queue = text(body, "queue")
        self.team = text(body, "team")
        self.slices = _bound(body)
        self.created = created
        self.closed: Event | None = None

    @property
    def cause(self) -> str:
        return text(self.closed.body, "cause") if self.closed is not None else ""

    def live_at(self, seq: int) -> bool:
        """Whether it was open when `seq` events were committed."""
        return self.created.seq <= seq and (self.closed is None or self.closed.seq > seq)


class Call:
    """One answered call of a client."""

    __slots__ = ("answer", "body", "client", "invoked", "outcome", "verb")

    def __init__(self, verb: str, outcome: str, invoke: Record | None, answer: Record) -> None:
        self.verb = verb
        self.outcome = outcome  #: "ok", "fail" or "unknown"
        self.client = answer.subject
        self.answer = answer
        #: What was sent and when; an answer whose question was not recorded counts as asked at that moment.
        self.invoked = invoke or answer
        self.body = answer.body
        if invoke is not None and not invoke.body.keys() <= answer.body.keys():
            self.body = {**invoke.body, **answer.body}

    def saw(self, earlier: Record) -> bool:
        """Whether the call began after `earlier`, so that it must take it into account."""
        return self.invoked.order > earlier.order


class Pieces:
    """One reading of a log stream: `parts` are [offset, bytes, bytes marked as missing before it]."""

    __slots__ = ("missing", "read", "repeated", "unmarked")

    def __init__(self, body: Mapping[str, object]) -> None:
        self.read = self.missing = 0
        self.unmarked: list[tuple[int, int]] = []
        self.repeated: list[int] = []
        at = 0
        for part in items(body, "parts"):
            if not (isinstance(part, list | tuple) and len(part) == 3 and all(isinstance(n, int) for n in part)):
                continue
            offset, size, missing = part
            if offset < at:
                self.repeated.append(offset)
            elif offset - at != missing:
                self.unmarked.append((at, offset))
            self.read += size
            self.missing += missing
            at = offset + size
        # Dropped by the host, which says so in the stream: the line is not the payload's, the bytes have no offset.
        self.read -= whole(body, "marker_bytes")
        self.missing += whole(body, "host_missing")


class Machine:
    """What truly existed at a provider under one id."""

    __slots__ = ("created", "deleted", "label", "name", "preempted", "provider_id")

    def __init__(self, created: Record) -> None:
        self.name = created.subject
        self.provider_id = text(created.body, "provider_id")
        self.label = text(created.body, "label")
        self.created = created
        self.preempted: Record | None = None
        self.deleted: Record | None = None

    @property
    def lost(self) -> Record | None:
        """When its processes ended, if they did: preempted or deleted, whichever came first."""
        if self.preempted is None or self.deleted is None:
            return self.preempted or self.deleted
        return min(self.preempted, self.deleted, key=lambda record: record.order)

    def exists_before(self, seq: int) -> bool:
        """Whether it was there when the event `seq` was committed. A preempted one still is, until it is deleted."""
        return self.created.seq < seq and (self.deleted is None or self.deleted.seq >= seq)


class Process:
    """One process of an attempt on one host, from the world's process table."""

    __slots__ = (
        "attempt", "exited", "fence", "host", "incarnation", "job", "provider_id", "replica", "slice", "started",
        "world_size",
    )  # fmt: skip

    def __init__(self, started: Record) -> None:
        body = started.body
        self.attempt = started.subject
        self.job = text(body, "job")
        self.replica = whole(body, "replica")
        self.fence = whole(body, "fence")
        self.host = body.get("host")
        self.slice = text(body, "slice")
        self.provider_id = text(body, "provider_id")
        self.world_size = whole(body, "world_size")
        self.incarnation = text(body, "incarnation")
        self.started = started
        self.exited: Record | None = None

    def alive_at(self, order: int) -> bool:
        return self.started.order < order and (self.exited is None or self.exited.order > order)
