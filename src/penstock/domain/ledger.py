"""The extraction ledger's rules (design §10): who may work on a unit, whose commit counts, when a run is whole.

Workers, in production and in the simulator, perform these over any bucket; the control plane is not needed
for correctness. Safety rests on one thing only: the commit record of a unit is made by create-if-absent, so
the first writer wins. Leases merely keep two workers from doing the same work; they are judged by one clock,
the one that the caller's two readings come from, never by comparing clocks of two machines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

LEASE_DIGITS = 6  #: leases of one unit sort by name up to a million take-overs
BLOCK_BYTES = 8 << 20
#: Before the checksum of an object that was hashed by blocks; a checksum without a kind is the SHA-256 of all bytes.
BLOCKS_KIND = "sha256-of-8MiB-sha256:"


# --- where things lie ---


def plan_path(run: str) -> str:
    return f"runs/{run}/plan.json"


def leases_prefix(run: str, unit: str) -> str:
    return f"runs/{run}/leases/{unit}/"


def lease_path(run: str, unit: str, number: int) -> str:
    return f"{leases_prefix(run, unit)}{number:0{LEASE_DIGITS}d}"


def lease_number(path: str) -> int:
    return int(path.rpartition("/")[2])


def data_path(run: str, unit: str, attempt: str, name: str) -> str:
    """Data lie under the attempt's name: nobody else ever writes there, so nothing can be overwritten."""
    return f"runs/{run}/data/{unit}/{attempt}/{name}"


def commits_prefix(run: str) -> str:
    return f"runs/{run}/commits/"


def commit_path(run: str, unit: str) -> str:
    return f"{commits_prefix(run)}{unit}"


def manifest_prefix(run: str) -> str:
    return f"runs/{run}/manifest/"


def manifest_path(run: str, manifest: Manifest) -> str:
    """The name is the content's hash: whoever writes it, there is one manifest."""
    return f"{manifest_prefix(run)}{checksum(encode(manifest))}"


# --- what is written there ---


class Unit(msgspec.Struct, frozen=True):
    """One piece of the input: rows `start` up to, not including, `stop`."""

    id: str
    start: int
    stop: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one run, fixed before anyone begins."""

    run: str
    rows: int
    units: tuple[Unit, ...]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Who works on a unit now."""

    unit: str
    attempt: str
    fence: int


class DataObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object of a committed unit, as the store has confirmed it."""

    path: str
    generation: int
    checksum: str


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit's result: the objects of the attempt that came first."""

    unit: str
    attempt: str
    fence: int
    start: int
    stop: int
    objects: tuple[DataObject, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What readers read: every unit of the plan, once, in the plan's order."""

    run: str
    rows: int
    units: tuple[Commit, ...]


Record = Plan | Lease | Commit | Manifest


def encode(record: Record) -> bytes:
    """The bytes of a record: equal records, equal bytes."""
    return msgspec.json.encode(record)


def decode_plan(data: bytes) -> Plan:
    return msgspec.json.decode(data, type=Plan)


def decode_lease(data: bytes) -> Lease:
    return msgspec.json.decode(data, type=Lease)


def decode_commit(data: bytes) -> Commit:
    return msgspec.json.decode(data, type=Commit)


def decode_manifest(data: bytes) -> Manifest:
    return msgspec.json.decode(data, type=Manifest)


def checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def checksum_of_blocks(digests: Iterable[bytes]) -> str:
    """The checksum of a large object, from the SHA-256 of each of its blocks of `BLOCK_BYTES`, the last one shorter.

    Blocks can be hashed in any order and by several threads, and before the object's first bytes are known (ADR 0039).
    """
    return BLOCKS_KIND + hashlib.sha256(b"".join(digests)).hexdigest()


def matches(data: bytes, named: str) -> bool:
    """Whether bytes have the checksum that a record names, of whichever kind it is."""
    if not named.startswith(BLOCKS_KIND):
        return checksum(data) == named
    whole = memoryview(data)
    blocks = (whole[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES))
    return checksum_of_blocks(hashlib.sha256(block).digest() for block in blocks) == named


def split(run: str, rows: int, unit_rows: int) -> Plan:
    """A plan of units of `unit_rows` rows; the last may be shorter."""
    if rows < 0 or unit_rows < 1:
        raise ValueError(f"rows {rows} and unit_rows {unit_rows}: rows must be 0 or more, unit_rows 1 or more")
    starts = range(0, rows, unit_rows)
    units = tuple(Unit(f"u{number:06d}", start, min(start + unit_rows, rows)) for number, start in enumerate(starts))
    return Plan(run=run, rows=rows, units=units)


# --- claiming ---


class SeenLease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease as the caller knows it. `since` is a reading of the clock that `now` is read from.

    Either the store's own stamp of the object and the store's time, or the moment this worker first saw the lease
    and its own steady clock: then it waits a little longer than needed, and never too short.
    """

    number: int
    since: float


def next_lease(existing: Iterable[SeenLease], now: float, lease_s: float) -> int | None:
    """The number to claim with create-if-absent; None while the newest lease holds."""
    newest = max(existing, key=lambda lease: lease.number, default=None)
    if newest is None:
        return 0
    if now - newest.since < lease_s:
        return None
    return newest.number + 1


# --- deciding who won a create-if-absent ---


class Put(StrEnum):
    """How a create-if-absent ended for its caller."""

    CREATED = "created"
    TAKEN = "taken"  #: somebody was first: another, or an earlier try of one's own whose reply was lost
    UNKNOWN = "unknown"  #: no answer: it may or may not be there


class Verdict(StrEnum):
    WON = "won"
    LOST = "lost"
    AGAIN = "again"  #: nothing is there: put it again


def settle(put: Put, holder: str | None, own: str) -> Verdict:
    """Whether this attempt's record is the one that counts.

    `holder` is the attempt named by the record as read back after the put (None: there is no record). Without an
    answer of success only the record itself can tell.
    """
    if put is Put.CREATED:
        return Verdict.WON
    if holder is None:
        return Verdict.AGAIN
    return Verdict.WON if holder == own else Verdict.LOST


# --- the whole ---


class Incomplete(ValueError):
    """The commits do not make the planned run."""


def open_units(plan: Plan, committed: Iterable[str]) -> tuple[Unit, ...]:
    """Units of the plan that have no commit record yet, in order. `committed` are unit ids."""
    done = frozenset(committed)
    return tuple(unit for unit in plan.units if unit.id not in done)


def assemble(plan: Plan, commits: Mapping[str, Commit]) -> Manifest:
    """The manifest of a finished run; raises `Incomplete` and names what is wrong."""
    missing = [unit.id for unit in open_units(plan, commits)]
    if missing:
        raise Incomplete(f"{plan.run}: no commit for {', '.join(missing[:8])}")
    manifest = Manifest(run=plan.run, rows=plan.rows, units=tuple(commits[unit.id] for unit in plan.units))
    problems = verify(plan, manifest)
    if problems:
        raise Incomplete(f"{plan.run}: {'; '.join(problems[:8])}")
    return manifest


def verify(plan: Plan, manifest: Manifest, stored: Mapping[str, tuple[int, str]] | None = None) -> tuple[str, ...]:
    """What is wrong with a manifest; empty when nothing is.

    `stored` maps paths to (generation, checksum) as the bucket has them; without it only the records are compared.
    """
    problems: list[str] = []
    if (manifest.run, manifest.rows) != (plan.run, plan.rows):
        problems.append(f"the manifest is of {manifest.run} with {manifest.rows} rows")
    planned = {unit.id: unit for unit in plan.units}
    named: set[str] = set()
    for commit in manifest.units:
        if commit.unit in named:
            problems.append(f"{commit.unit} is named twice")
        named.add(commit.unit)
        problems.extend(_unit_problems(plan.run, planned.get(commit.unit), commit, stored))
    problems.extend(f"{unit.id} is missing" for unit in plan.units if unit.id not in named)
    problems.extend(_range_problems(plan.rows, manifest.units))
    return tuple(problems)


def _unit_problems(
    run: str, unit: Unit | None, commit: Commit, stored: Mapping[str, tuple[int, str]] | None
) -> Iterable[str]:
    if unit is None:
        yield f"{commit.unit} is not in the plan"
    elif (commit.start, commit.stop) != (unit.start, unit.stop):
        yield f"{commit.unit} covers rows {commit.start}:{commit.stop} instead of {unit.start}:{unit.stop}"
    for data in commit.objects:
        if not data.path.startswith(data_path(run, commit.unit, commit.attempt, "")):
            yield f"{commit.unit} names {data.path}, which is not of its attempt {commit.attempt}"
        if stored is not None and stored.get(data.path) != (data.generation, data.checksum):
            yield f"{data.path} is not in the bucket as it was committed"


def _range_problems(rows: int, commits: Iterable[Commit]) -> Iterable[str]:
    """Ranges must be disjoint and cover all rows."""
    reached = 0
    for commit in sorted(commits, key=lambda commit: (commit.start, commit.stop)):
        if commit.start < reached:
            yield f"{commit.unit} overlaps rows before {reached}"
        elif commit.start > reached:
            yield f"rows {reached}:{commit.start} are missing"
        reached = max(reached, commit.stop)
    if reached != rows:
        yield f"the ranges end at row {reached} of {rows}"
