"""The store: rows with versions, an append-only event log, and transactions that are plain functions.

Callers hand over whole transaction functions (`transact(verb, …)`); the adapter runs each in one transaction, on its
writer thread or inline under simulation, so a verb must not await or call anything outside. All writers of one
installation take turns: `seq` is commit order, and what a transaction reads cannot change before it commits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from penstock.domain.cost import Hold, Hour
from penstock.domain.nouns import (
    Attempt,
    Control,
    Event,
    Job,
    Leader,
    Pool,
    Queue,
    Quota,
    Slice,
    Team,
    Zone,
)

T = TypeVar("T")
P = ParamSpec("P")
Entity = Job | Attempt | Slice | Pool | Queue | Team | Zone | Quota | Control | Leader
E = TypeVar("E", Job, Attempt, Slice, Pool, Queue, Team, Zone, Quota, Control, Leader)


class StoreError(Exception):
    """Anything the store refuses or fails at."""


class Unavailable(StoreError):
    """The store cannot be reached; nothing was written. Try again later."""


class UnknownOutcome(StoreError):
    """The commit was sent and no answer came: it may have happened. Read before trying again."""


class Conflict(StoreError):
    """Somebody else changed the entity since it was read (compare-and-set lost)."""


class Refused(StoreError):
    """A constraint of the database refused the change: the transition tables would be broken."""


class StaleLeader(StoreError):
    """The effect carries the epoch of a leader that has been replaced."""


class QuotaFull(StoreError):
    """A reservation would exceed the limit in force."""

    def __init__(self, scope: str, name: str, used: int, limit: int, asked: int) -> None:
        super().__init__(f"{scope} {name}: {used} of {limit} chips used, {asked} more asked")
        self.scope, self.name, self.used, self.limit, self.asked = scope, name, used, limit, asked


class Reader(Protocol):
    """Reads of one consistent moment. "Light" jobs come without their payload."""

    def job(self, id: str) -> Job | None:
        """One whole job, payload included."""

    def jobs(self, ids: Sequence[str]) -> list[Job]:
        """Light jobs; missing ids are left out."""

    def payload_kinds(self, ids: Sequence[str]) -> dict[str, str]:
        """What kind of payload each job has ("snippet", "command", "task"), without reading it."""

    def job_by_key(self, team: str, key: str) -> Job | None:
        """The light job of an idempotency key."""

    def jobs_page(self, *, team: str | None, states: Sequence[str], after: str | None, limit: int) -> list[Job]:
        """Light jobs, newest first, below id `after`."""

    def jobs_with_prefix(self, prefix: str, limit: int) -> list[str]:
        """Ids that start with `prefix`: what a shortened id may mean."""

    def snapshots_page(self, after: str, limit: int) -> list[tuple[str, str | None]]:
        """Ids above `after`, in order, each with the snapshot that its payload names."""

    def resumed_by_live(self) -> list[str]:
        """Parents of unfinished jobs: what those may still restore from, or see as their first run."""

    def dependants(self, job: str) -> list[str]:
        """Ids of unfinished jobs that wait for `job` by `spec.after`."""

    def under_way(self, array: str) -> int:
        """How many members of a limited array (`spec.throttle`) take one of its places."""

    def first_held(self, array: str) -> Job | None:
        """The light job that is next to get a place of a limited array: higher priority, then smaller id."""

    def queue_in_use(self, queue: str) -> str | None:
        """The first unfinished job of a queue, if there is any."""

    def heads(self, queues: Sequence[str], limit: int) -> dict[str, list[Job]]:
        """Per queue the first `limit` light jobs that wait and were never placed, best first.

        Best first: higher priority, then smaller id. Jobs that are blocked, held, cancelled or were placed
        before (they have chains) are not among them.
        """

    def waiting_counts(self) -> dict[str, int]:
        """Per queue how many jobs `heads` would list without limit."""

    def waiting_ahead(self, job: Job) -> int:
        """How many of those stand before this job in its queue."""

    def live_jobs(self) -> list[Job]:
        """Light jobs that are not terminal and were placed at least once (they have chains)."""

    def attempt(self, id: str) -> Attempt | None: ...
    def attempts(self, ids: Sequence[str]) -> list[Attempt]: ...
    def live_attempts(self) -> list[Attempt]: ...
    def attempts_of(self, job: str) -> list[Attempt]:
        """All attempts of a job, oldest first."""

    def holds(self, after: tuple[float, str], limit: int) -> list[tuple[tuple[float, str], Hold]]:
        """Closed attempts as the ledger needs them, by (when they closed, id), above `after`; each with its place."""

    def ledger_hours(self, first: int, last: int) -> list[Hour]:
        """What was summed up of forgotten jobs' attempts, of these hours."""

    def slice(self, id: str) -> Slice | None: ...
    def slices(self, ids: Sequence[str]) -> list[Slice]: ...
    def live_slices(self) -> list[Slice]:
        """All slices that are not gone."""

    def race(self, race: str) -> list[Slice]:
        """The slices of a racing set that are not gone."""

    def tombstones(self, since: float) -> list[Slice]:
        """Slices gone since then: their names stay under sweep."""

    def pool(self, name: str) -> Pool | None: ...
    def pools(self) -> list[Pool]:
        """All pools, deleted ones included while they have slices or not."""

    def queue(self, name: str) -> Queue | None: ...
    def queues(self) -> list[Queue]: ...
    def team(self, name: str) -> Team | None: ...
    def teams(self) -> list[Team]: ...
    def zone(self, id: str) -> Zone | None: ...
    def zones(self) -> list[Zone]: ...
    def quota(self, scope: str, name: str) -> Quota | None: ...
    def quotas(self) -> list[Quota]: ...
    def control(self) -> Control: ...
    def leader(self) -> Leader | None: ...

    def events(self, after: int, limit: int) -> list[Event]:
        """Events with `seq > after`, in order."""

    def events_of(self, entity: str, id: str) -> list[Event]: ...
    def last_seq(self) -> int: ...


class Transaction(Reader, Protocol):
    """Reads and writes of one transaction. Each `add` and `save` writes one row and appends one event."""

    @property
    def at(self) -> float:
        """The time the caller gave: stamps of this transaction."""

    def add(self, entity: E, kind: str, *, fence: int = 0, body: Mapping[str, object] | None = None) -> E:
        """Insert a new entity at version 1 and return it. A duplicate id or key raises `Refused`."""

    def save(self, entity: E, kind: str, *, fence: int = 0, body: Mapping[str, object] | None = None) -> E:
        """Write a changed entity: its `version` is the one that was read; the copy returned has one more.

        Raises `Conflict` when the row has another version by now. For entities with a life cycle the new state must
        be what `lifecycle.step(kind, old state)` says, else `IllegalTransition`. The payload of a job is never
        rewritten, so a light job may be saved.
        """

    def reserve(self, scope: str, name: str, chips: int) -> None:
        """Add `chips` to a counter; raises `QuotaFull` past its limit. Negative frees and never fails.

        A counter that does not exist is made with no limit.
        """

    def elect(self, holder: str) -> Leader:
        """Take the lead: epoch + 1, with an event. The caller has seen the old leader's term run out."""

    def renew(self, epoch: int) -> None:
        """Count one renewal of this epoch, without an event; raises `StaleLeader`."""

    def purge(self, job: Job) -> None:
        """Delete a terminal job's rows; the event `job.purged` stays."""

    def sum_up(self, hours: Sequence[Hour]) -> None:
        """Add to the sums of these hours, without an event: what is summed up is about to be purged."""

    def forget_events(self, up_to: int) -> int:
        """Delete events with `seq <= up_to` (retention); answers how many."""


Verb = Callable[Concatenate[Transaction, P], T]


class Store(Protocol):
    async def transact(self, verb: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `verb(tx, *args, **kwargs)` in one transaction and answer its result once it is durable."""

    async def read(self, query: Callable[Concatenate[Reader, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a read-only function on one consistent moment, at least as new as this caller's last commit."""

    def bound(self, *, actor: str, epoch: int = 0) -> Store:
        """The same store, whose events carry this actor and whose transactions commit only under this epoch.

        With epoch 0 (commands, agent reports) no leadership is asked for.
        """

    async def wait(self, after: int, timeout_s: float) -> None:
        """Return when the log may have grown past `after`, or after `timeout_s`; early returns are harmless."""

    async def close(self) -> None: ...
