"""The end of a run: the manifest that readers read, the run-level index, and the sweep of what no commit names.

Any worker that finds no open unit seals, and all of them come to the same bytes under the same names. The manifest is
written only when every committed object is there in its full size. Sweeping is safe at any time, because it touches
only units that have a commit: an attempt without one may still win, however old it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from penstock.domain import ledger
from penstock.domain.ledger import DataObject, Incomplete
from penstock.extract.calls import Calls
from penstock.extract.claims import leases_of_run
from penstock.extract.layout import INDEX, UnitCommit, decode_commit, read_index, write_table
from penstock.extract.plan import RunPlan

READS_AT_ONCE: Final = 32


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run in numbers. Means are weighted by the rows they were taken over."""

    documents: int
    empty: int
    truncated: int
    tokens: int
    bytes: int
    rows_sha256: str  #: of the units' hashes, in the plan's order
    widths: dict[str, int]
    mean_norm: dict[str, float]
    not_finite: dict[str, int]


class RunManifest(ledger.Manifest, frozen=True, kw_only=True):
    """What readers read: commits in the plan's order, the index over all units, the plan itself as provenance."""

    units: tuple[UnitCommit, ...]
    index: DataObject
    facts: RunFacts
    plan: RunPlan


def index_prefix(run: str) -> str:
    return f"runs/{run}/index/"


def data_prefix(run: str) -> str:
    return f"runs/{run}/data/"


async def read_commits(calls: Calls, plan: RunPlan) -> dict[str, UnitCommit]:
    """Every commit there is, by unit."""
    prefix = ledger.commits_prefix(plan.run)
    names = [path.removeprefix(prefix) for path in await calls.list(prefix)]
    return await read_some_commits(calls, plan.run, names)


async def read_some_commits(calls: Calls, run: str, units: list[str]) -> dict[str, UnitCommit]:
    places = asyncio.Semaphore(READS_AT_ONCE)

    async def one(unit: str) -> UnitCommit | None:
        async with places:
            stored = await calls.read(ledger.commit_path(run, unit))
            return None if stored is None else decode_commit(stored.data)

    found = await asyncio.gather(*(one(unit) for unit in units))
    return {commit.unit: commit for commit in found if commit is not None}


async def find_manifest(calls: Calls, run: str) -> RunManifest | None:
    """The manifest, if the run is sealed. Two can only differ in how their index was written, not in what they name."""
    for path in await calls.list(ledger.manifest_prefix(run)):
        stored = await calls.read(path)
        if stored is not None:
            return msgspec.json.decode(stored.data, type=RunManifest)
    return None


async def seal(calls: Calls, plan: RunPlan) -> RunManifest:
    """Write the manifest unless it is there; raises `Incomplete` and names the units that are not whole."""
    there = await find_manifest(calls, plan.run)
    if there is not None:
        return there
    commits = await read_commits(calls, plan)
    whole = ledger.assemble(plan, commits)
    await _check_objects(calls, plan.run, commits)
    index = await _write_index(calls, plan, commits)
    manifest = RunManifest(
        run=whole.run,
        rows=whole.rows,
        units=tuple(commits[unit.id] for unit in plan.units),
        index=index,
        facts=summary(plan, commits),
        plan=plan,
    )
    await calls.create(ledger.manifest_path(plan.run, manifest), ledger.encode(manifest))
    return manifest


async def sweep(calls: Calls, plan: RunPlan) -> int:
    """Remove data that no commit names, of units that have one, and leases that nobody needs; how many objects went."""
    commits = await read_commits(calls, plan)
    named = {data.path for commit in commits.values() for data in commit.objects}
    gone = 0
    for path in await calls.list(data_prefix(plan.run)):
        if path not in named and path.split("/")[3] in commits:
            await calls.delete(path)
            gone += 1
    for path in await calls.list(leases_of_run(plan.run)):
        if path.split("/")[3] in commits:
            await calls.delete(path)
            gone += 1
    if not ledger.open_units(plan, commits):
        for path in await calls.list(f"runs/{plan.run}/clocks/"):
            await calls.delete(path)
            gone += 1
    return gone


def summary(plan: RunPlan, commits: Mapping[str, UnitCommit]) -> RunFacts:
    """The run in numbers, from the commits there are."""
    ordered = [commits[unit.id].facts for unit in plan.units if unit.id in commits]
    of_site = {site: [facts.sites[site] for facts in ordered if facts.tokens] for site in plan.sites}
    sampled = {site: sum(each.sampled for each in found) for site, found in of_site.items()}
    return RunFacts(
        documents=sum(facts.documents for facts in ordered),
        empty=sum(facts.empty for facts in ordered),
        truncated=sum(facts.truncated for facts in ordered),
        tokens=sum(facts.tokens for facts in ordered),
        bytes=sum(sum(facts.sizes) for facts in ordered),
        rows_sha256=ledger.checksum(msgspec.json.encode([facts.rows_sha256 for facts in ordered])),
        widths={site: max((each.width for each in found), default=0) for site, found in of_site.items()},
        mean_norm={
            site: sum(each.mean_norm * each.sampled for each in found) / sampled[site] if sampled[site] else 0.0
            for site, found in of_site.items()
        },
        not_finite={site: sum(each.not_finite for each in found) for site, found in of_site.items()},
    )


def object_of(commit: UnitCommit, name: str) -> DataObject:
    """A commit's object by its name; a damaged try has left its number behind the name."""
    for data in commit.objects:
        stem = data.path.rpartition("/")[2]
        if stem == name or (stem.startswith(f"{name}.") and stem.removeprefix(f"{name}.").isdecimal()):
            return data
    raise Incomplete(f"{commit.unit}: its commit names no {name}")


async def _check_objects(calls: Calls, run: str, commits: Mapping[str, UnitCommit]) -> None:
    sizes = {kept.path: kept.size for kept in await calls.survey(data_prefix(run))}
    for commit in commits.values():
        for data, size in zip(commit.objects, commit.facts.sizes, strict=True):
            if sizes.get(data.path) != size:
                raise Incomplete(
                    f"{commit.unit}: {data.path} has {sizes.get(data.path, 'no')} bytes instead of {size};"
                    f" `tpu extract requeue {commit.unit}` has it made again"
                )


async def _write_index(calls: Calls, plan: RunPlan, commits: Mapping[str, UnitCommit]) -> DataObject:
    """All units' documents, sorted by name and position, under the name of the content's hash."""
    import pyarrow as pa

    places = asyncio.Semaphore(READS_AT_ONCE)

    async def one(unit: str) -> Any:
        async with places:
            data = object_of(commits[unit], INDEX)
            stored = await calls.read(data.path)
            if stored is None or not ledger.matches(stored.data, data.checksum):
                raise Incomplete(f"{unit}: {data.path} is not as it was committed")
            return read_index(stored.data)

    tables = await asyncio.gather(*(one(unit.id) for unit in plan.units))
    columns = ["document", "row", "start", "count", "position"]
    numbered = [
        table.select(columns).append_column("unit", pa.array([at] * len(table), pa.int32()))
        for at, table in enumerate(tables)
    ]
    if not numbered:
        raise Incomplete(f"{plan.run}: its plan has no unit")
    joined = pa.concat_tables(numbered)
    data = write_table(joined.sort_by([(name, "ascending") for name in ("document", "row", "position")]))
    checksum = ledger.checksum(data)
    path = f"{index_prefix(plan.run)}{checksum}.arrow"
    await calls.create(path, data)
    stored = await calls.read(path)
    return DataObject(path=path, generation=0 if stored is None else stored.generation, checksum=checksum)
