"""The end of a run: the manifest that readers read, the run-level index, and the sweep of what no commit names.

Any worker that finds no open unit seals, and all of them come to the same bytes under the same names. The manifest is
written only when every committed object is there in its full size.

Units may be requeued at any moment meanwhile. Nothing that counts is lost, because commits are never removed: `requeue`
makes one void, and the unit's next commit, its next edition, has another name (`domain.ledger`).
- Sweeping lists data first and reads voids and commits afterwards. An attempt whose data were listed was begun before,
  in an edition that was open by then; if the edition that counts when the voids are read has a commit, so has every one
  before it, for ever. So an attempt that none of them names has lost, whatever is requeued from then on, and data of an
  attempt that is begun later are not in the list. Units without a commit are left alone: there anybody may still win.
  A lease of the next edition may go with the old ones, which costs double work and nothing else.
- A manifest counts only as long as none of the commits it names is void; one that is void stays so. So a manifest that
  was written too late is known as such by everybody, and whoever meets it may remove it. What a sweep removes no
  manifest that counts can name: it names the editions that count, and the sweep spares these.
- What has the hash of its bytes as its name, and other bytes, was damaged by a power cut and is written again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from penstock.domain import ledger
from penstock.domain.ledger import DataObject, Incomplete
from penstock.extract import refused
from penstock.extract.calls import Calls
from penstock.extract.claims import clocks_of_run, leases_of_run
from penstock.extract.layout import INDEX, UnitCommit, decode_commit, object_of, read_index, shared_ids, write_table
from penstock.extract.plan import RunPlan
from penstock.ports.objects import Damaged

READS_AT_ONCE: Final = 32


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run in numbers. Means are weighted by the rows they were taken over."""

    documents: int
    empty: int
    truncated: int  #: documents of which tokens were dropped
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
    refused: DataObject | None = None  #: JSON lines about rows that gave nothing; None: there are none, or it is older
    shared_ids: int = 0  #: ids that name several input rows of which something is stored
    facts: RunFacts
    plan: RunPlan


class Reopened(Incomplete):
    """A unit was requeued meanwhile: the run is not whole until it is made again."""


class Records(NamedTuple):
    """Commits that count, by unit; and of those that cannot be read, what is wrong."""

    commits: dict[str, UnitCommit]
    broken: dict[str, str]


class FoundManifest(NamedTuple):
    """A manifest in the bucket; None: its bytes are not those of its name."""

    path: str
    manifest: RunManifest | None
    stale: bool


def index_prefix(run: str) -> str:
    return f"runs/{run}/index/"


def data_prefix(run: str) -> str:
    return f"runs/{run}/data/"


async def read_commits(calls: Calls, plan: RunPlan) -> dict[str, UnitCommit]:
    """Every commit that counts, by unit; raises `Incomplete` if one cannot be read."""
    return _whole(await read_records(calls, plan))


async def read_records(calls: Calls, plan: RunPlan) -> Records:
    """Every commit that counts, and every one that cannot be read."""
    editions = ledger.editions(plan.run, await calls.list(ledger.commits_prefix(plan.run)))
    return await _read_editions(calls, plan, editions)


async def _read_editions(calls: Calls, plan: RunPlan, editions: ledger.Editions) -> Records:
    return await read_some_records(calls, plan.run, [(unit, editions.of(unit)) for unit in sorted(editions.committed)])


def _whole(records: Records) -> dict[str, UnitCommit]:
    if records.broken:
        raise Incomplete("; ".join(records.broken.values()))
    return records.commits


async def read_some_records(calls: Calls, run: str, wanted: Iterable[tuple[str, int]]) -> Records:
    """Those of the units and editions."""
    places = asyncio.Semaphore(READS_AT_ONCE)
    records = Records({}, {})

    async def one(unit: str, edition: int) -> None:
        async with places:
            stored = await calls.read(ledger.commit_path(run, unit, edition))
        if stored is None:
            return
        try:
            records.commits[unit] = decode_commit(stored.data)
        except Damaged:
            again = f"`tpu extract requeue {unit}` has it made again"
            records.broken[unit] = f"{unit}: its commit cannot be read ({len(stored.data)} bytes); {again}"

    await asyncio.gather(*(one(unit, edition) for unit, edition in wanted))
    return records


async def find_manifest(calls: Calls, run: str) -> RunManifest | None:
    """The manifest, if the run is sealed. Two can only differ in how their index was written, not in what they name."""
    for found in await find_manifests(calls, run):
        if found.manifest is not None and not found.stale:
            return found.manifest
    return None


async def drop_stale_manifests(calls: Calls, run: str) -> None:
    """Remove those that name a commit which is void."""
    for found in await find_manifests(calls, run):
        if found.stale:
            await calls.delete(found.path)


async def seal(calls: Calls, plan: RunPlan) -> RunManifest:
    """Write the manifest unless it is there; raises `Incomplete` and names the units that are not whole."""
    there = await find_manifests(calls, plan.run)
    sound = [
        each for each in there if each.manifest and not each.stale and await _has_whole_files(calls, each.manifest)
    ]
    if sound:
        path, manifest = sound[0].path, sound[0].manifest
    else:
        manifest = await _assemble(calls, plan)
        path = ledger.manifest_path(plan.run, manifest)
        write = calls.put if any(each.path == path for each in there) else calls.create
        await write(path, ledger.encode(manifest))
    for each in there:
        if each.path != path and each not in sound:
            await calls.delete(each.path)
    assert manifest is not None
    if not sound and _is_stale(manifest, await _voids(calls, plan.run)):
        await calls.delete(path)
        raise Reopened(f"{plan.run}: a unit was requeued while the manifest was written")
    return manifest


async def _assemble(calls: Calls, plan: RunPlan) -> RunManifest:
    editions = ledger.editions(plan.run, await calls.list(ledger.commits_prefix(plan.run)))
    try:
        return await _assemble_editions(calls, plan, editions)
    except Incomplete as error:
        # What a requeue made void others may have made again and swept meanwhile: then nothing is damaged.
        voids = await _voids(calls, plan.run)
        again = [unit.id for unit in plan.units if voids.of(unit.id) > editions.of(unit.id)]
        if again:
            raise Reopened(f"{plan.run}: requeued while it was sealed: {', '.join(again[:8])}") from error
        raise


async def _assemble_editions(calls: Calls, plan: RunPlan, editions: ledger.Editions) -> RunManifest:
    commits = _whole(await _read_editions(calls, plan, editions))
    missing = ledger.open_units(plan, commits)
    if missing:
        raise Reopened(f"{plan.run}: no commit for {', '.join(unit.id for unit in missing[:8])}")
    whole = ledger.assemble(plan, commits)
    await _check_objects(calls, plan.run, commits)
    tables = await _read_indexes(calls, plan, commits)
    index, shared = await _write_index(calls, plan, tables)
    return RunManifest(
        run=whole.run,
        rows=whole.rows,
        units=tuple(commits[unit.id] for unit in plan.units),
        index=index,
        refused=await _write_refused(calls, plan, tables),
        shared_ids=shared,
        facts=summary(plan, commits),
        plan=plan,
    )


async def find_manifests(calls: Calls, run: str) -> list[FoundManifest]:
    """The voids are listed last: a manifest that is not stale by then was right when it was read."""
    read: list[tuple[str, RunManifest | None]] = []
    for path in await calls.list(ledger.manifest_prefix(run)):
        stored = await calls.read(path)
        if stored is not None:
            whole = ledger.checksum(stored.data) == path.rpartition("/")[2]
            read.append((path, msgspec.json.decode(stored.data, type=RunManifest) if whole else None))
    voids = await _voids(calls, run) if read else ledger.editions(run, ())
    return [FoundManifest(path, found, found is not None and _is_stale(found, voids)) for path, found in read]


async def _voids(calls: Calls, run: str) -> ledger.Editions:
    return ledger.editions(run, await calls.list(ledger.voids_prefix(run)))


def _is_stale(manifest: RunManifest, voids: ledger.Editions) -> bool:
    return any(voids.of(commit.unit) > commit.edition for commit in manifest.units)


async def _has_whole_files(calls: Calls, manifest: RunManifest) -> bool:
    for data in (manifest.index, manifest.refused):
        if data is not None:
            stored = await calls.read(data.path)
            if stored is None or not ledger.matches(stored.data, data.checksum):
                return False
    return True


async def sweep(calls: Calls, plan: RunPlan) -> int:
    """Remove data that no commit names, of units that have one, and leases that nobody needs; how many objects went."""
    stored = await calls.list(data_prefix(plan.run))
    leases = await calls.list(leases_of_run(plan.run))
    commits = (await read_records(calls, plan)).commits  # after the lists: see above
    named = {data.path for commit in commits.values() for data in commit.objects}
    gone = 0
    for path in stored:
        if path not in named and path.split("/")[3] in commits:
            await calls.delete(path)
            gone += 1
    for path in leases:
        if path.split("/")[3] in commits:
            await calls.delete(path)
            gone += 1
    if not ledger.open_units(plan, commits):
        for path in await calls.list(clocks_of_run(plan.run)):
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


async def _check_objects(calls: Calls, run: str, commits: Mapping[str, UnitCommit]) -> None:
    sizes = {kept.path: kept.size for kept in await calls.survey(data_prefix(run))}
    for commit in commits.values():
        for data, size in zip(commit.objects, commit.facts.sizes, strict=True):
            if sizes.get(data.path) != size:
                raise Incomplete(
                    f"{commit.unit}: {data.path} has {sizes.get(data.path, 'no')} bytes instead of {size};"
                    f" `tpu extract requeue {commit.unit}` has it made again"
                )


async def _read_indexes(calls: Calls, plan: RunPlan, commits: Mapping[str, UnitCommit]) -> list[Any]:
    """The units' own, in the plan's order."""
    places = asyncio.Semaphore(READS_AT_ONCE)

    async def one(unit: str) -> Any:
        async with places:
            data = object_of(commits[unit], INDEX)
            stored = await calls.read(data.path)
            if stored is None or not ledger.matches(stored.data, data.checksum):
                raise Incomplete(
                    f"{unit}: {data.path} is not as it was committed; `tpu extract requeue {unit}` has it made again"
                )
            return read_index(stored.data)

    if not plan.units:
        raise Incomplete(f"{plan.run}: its plan has no unit")
    return list(await asyncio.gather(*(one(unit.id) for unit in plan.units)))


async def _write_index(calls: Calls, plan: RunPlan, tables: list[Any]) -> tuple[DataObject, int]:
    """All units' documents, sorted by name and position; and how many names several input rows have."""
    import pyarrow as pa

    columns = ["document", "row", "start", "count", "position"]
    numbered = [
        table.select(columns).append_column("unit", pa.array([at] * len(table), pa.int32()))
        for at, table in enumerate(tables)
    ]
    joined = pa.concat_tables(numbered)
    data = write_table(joined.sort_by([(name, "ascending") for name in ("document", "row", "position")]))
    return await _keep(calls, plan, data, "arrow"), shared_ids(joined)


async def _write_refused(calls: Calls, plan: RunPlan, tables: list[Any]) -> DataObject | None:
    """The side file of rows that gave nothing, if there are any."""
    data = refused.as_lines(each for table in tables for each in refused.listed(table))
    return await _keep(calls, plan, data, "refused.jsonl") if data else None


async def _keep(calls: Calls, plan: RunPlan, data: bytes, ending: str) -> DataObject:
    """Under the name of the content's hash, so that it does not matter who writes it, or how often."""
    checksum = ledger.checksum(data)
    path = f"{index_prefix(plan.run)}{checksum}.{ending}"
    await calls.create(path, data)
    stored = await calls.read(path)
    if stored is None or stored.data != data:
        await calls.put(path, data)
    # Which write of it lies there does not matter, and all who seal come to the same manifest.
    return DataObject(path=path, generation=0, checksum=checksum)
