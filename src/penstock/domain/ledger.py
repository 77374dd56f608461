"""The extraction ledger's rules (design §10): who may work on a unit, whose commit counts, when a run is whole.

Workers, in production and in the simulator, perform these over any bucket; the control plane is not needed
for correctness. Safety rests on one thing only: the commit record of a unit is made by create-if-absent, so
the first writer wins, and it is never removed or replaced. To have a unit made again its commit is made void,
by a record beside it, and the next commit gets another name: the unit's next edition. So whoever lost an
edition has lost it for ever. Leases merely keep two workers from doing the same work; they are judged by one
clock, the one that the caller's two readings come from, never by comparing clocks of two machines.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec
from typing_extensions import Buffer

LEASE_DIGITS = 6  #: leases of one unit sort by name up to a million take-overs
BLOCK_BYTES = 8 << 20
#: Before the checksum of what was hashed by blocks; the second kind takes a quarter of the time (ADR 0042). A checksum
#: without a kind is the SHA-256 of all bytes.
BLOCKS_KIND = "sha256-of-8MiB-sha256:"
FAST_KIND = "sha256-of-8MiB-blake3:"


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


def commit_path(run: str, unit: str, edition: int = 0) -> str:
    return f"{commits_prefix(run)}{unit}{f'.{edition}' if edition else ''}"


def voids_prefix(run: str, unit: str = "") -> str:
    return f"{commits_prefix(run)}void/{unit}"


def void_path(run: str, unit: str, edition: int) -> str:
    """Lies there: that commit counts no more, and the unit's next edition may be made."""
    return commit_path(run, f"void/{unit}", edition)


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


class Lease(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who works on a unit now."""

    unit: str
    attempt: str
    fence: int
    lease_s: float = 0.0  #: without a renewal for so long its holder is lost; 0: an older worker, which did not say


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


class BlockHash(Protocol):
    """As the standard library's hashes are."""

    def update(self, data: Buffer, /) -> object: ...
    def digest(self) -> bytes: ...


def kind_of(named: str) -> str:
    """By which kind of block hash a checksum was made; empty: by none."""
    return next((kind for kind in (BLOCKS_KIND, FAST_KIND) if named.startswith(kind)), "")


def block_hash(kind: str) -> BlockHash:
    """To be fed with one block."""
    if kind == BLOCKS_KIND:
        return hashlib.sha256()
    from blake3 import blake3

    return blake3()


def checksum_of_blocks(digests: Iterable[bytes], kind: str = BLOCKS_KIND) -> str:
    """The checksum of a large object, from the hash of each of its blocks of `BLOCK_BYTES`, the last one shorter.

    Blocks can be hashed in any order and by several threads, and before the object's first bytes are known (ADR 0039).
    """
    return kind + hashlib.sha256(b"".join(digests)).hexdigest()


def matches(data: bytes, named: str) -> bool:
    """Whether bytes have the checksum that a record names, of whichever kind it is."""
    kind, whole = kind_of(named), memoryview(data)
    if not kind:
        return checksum(data) == named

    def digest(start: int) -> bytes:
        found = block_hash(kind)
        found.update(whole[start : start + BLOCK_BYTES])
        return found.digest()

    return checksum_of_blocks(map(digest, range(0, len(data), BLOCK_BYTES)), kind) == named


def split(run: str, rows: int, unit_rows: int) -> Plan:
    """A plan of units of `unit_rows` rows; the last may be shorter."""
    if rows < 0 or unit_rows < 1:
        raise ValueError(f"rows {rows} and unit_rows {unit_rows}: rows must be 0 or more, unit_rows 1 or more")
    return cut(run, [min(start + unit_rows, rows) for start in range(0, rows, unit_rows)])


def cut(run: str, stops: Sequence[int]) -> Plan:
    """A plan of units that end at these rows, each where the next begins; the last stop is the number of rows."""
    edges = [0, *stops]
    if any(start >= stop for start, stop in itertools.pairwise(edges)):
        raise ValueError(f"units end at {stops}, which do not rise from 0")
    units = tuple(Unit(f"u{number:06d}", start, stop) for number, (start, stop) in enumerate(itertools.pairwise(edges)))
    return Plan(run=run, rows=edges[-1], units=units)


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


class Editions(msgspec.Struct, frozen=True):
    """Which commits count, as the names under `commits/` tell alone."""

    current: dict[str, int]  #: of units of which a commit is void: the edition that counts, made or not; of others 0
    committed: frozenset[str]  #: units whose edition that counts is there

    def of(self, unit: str) -> int:
        return self.current.get(unit, 0)


def editions(run: str, paths: Iterable[str]) -> Editions:
    """From a listing, or from one of the voids alone. What has another form of name is nobody's commit."""
    made: set[tuple[str, int]] = set()
    current: dict[str, int] = {}
    for path in paths:
        name = path.removeprefix(commits_prefix(run))
        unit, dot, number = name.removeprefix("void/").partition(".")
        if "/" in unit or (dot and not number.isdecimal()):
            continue
        edition = int(number or 0)
        if name.startswith("void/"):
            current[unit] = max(current.get(unit, 0), edition + 1)
        else:
            made.add((unit, edition))
    return Editions(current, frozenset(unit for unit, edition in made if edition == current.get(unit, 0)))


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
