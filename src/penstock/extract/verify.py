"""Whether a run in a bucket is what its records say, byte by byte; and having one unit made again.

`tpu extract verify` and `requeue` call it. Every committed object is read and hashed again, shapes are compared with
the commit, the index must name each input row of the unit and cover its vectors without overlap, and the hash over rows
and tokens must come out the same. Bytes are judged by their hash alone: a copy of a run, in which every object is
another write, is as good as the run. Blocks are read and hashed many at a time, and not more than that are in memory.
It reads; only `requeue` changes anything, and only records.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from penstock.domain import ledger
from penstock.domain.admission import BadInput
from penstock.domain.ledger import BLOCK_BYTES, DataObject
from penstock.extract import tensors
from penstock.extract.calls import Calls
from penstock.extract.claims import leases_of_run
from penstock.extract.layout import INDEX, TOKENS, VALUES, UnitCommit, object_of, read_index, rows_hash, shared_ids
from penstock.extract.plan import RunPlan
from penstock.extract.seal import (
    Records,
    RunManifest,
    data_prefix,
    drop_stale_manifests,
    find_manifests,
    read_records,
    read_some_records,
)
from penstock.ports.objects import Damaged

BLOCKS_AT_ONCE: Final = 32  #: of 8 MiB: what is in memory of large objects
UNITS_AT_ONCE: Final = 4  #: tokens and indexes of so many are in memory
NAMED_AT_MOST: Final = 8  #: units, in one line


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at and what is wrong with it."""

    run: str
    sealed: bool
    units: int
    committed: int
    objects: int
    bytes: int
    rows_sha256: str
    open: tuple[str, ...]  #: units without a commit
    garbage: int  #: data objects that no commit names
    shared_ids: int = 0  #: ids that several input rows have: such a document is read with its row
    problems: tuple[str, ...]
    damaged: tuple[str, ...]  #: units to have made again


async def verify(calls: Calls, plan: RunPlan, *, so_far: bool = False) -> Checked:
    """Look at all there is; `problems` is empty when the run is whole and sealed, and all of it as it should be.

    With `so_far` units that are not committed yet, and a manifest that is not written yet, are none.
    """
    records = await read_records(calls, plan)
    commits = records.commits
    stored = {kept.path: kept.size for kept in await calls.survey(data_prefix(plan.run))}
    look = _Look(calls, stored)
    places = asyncio.Semaphore(UNITS_AT_ONCE)

    async def one(commit: UnitCommit) -> tuple[str, list[str]]:
        async with places:
            return commit.unit, await look.unit_problems(plan, commit)

    found = dict(await asyncio.gather(*(one(commit) for commit in commits.values())))
    found |= {unit: [wrong] for unit, wrong in records.broken.items()}
    problems = [problem for unit in sorted(found) for problem in found[unit]]
    manifests = await find_manifests(calls, plan.run)
    sealed = next((each.manifest for each in manifests if each.manifest is not None and not each.stale), None)
    problems += [f"{each.path} is damaged; the next worker writes it again" for each in manifests if not each.manifest]
    missing = tuple(unit.id for unit in ledger.open_units(plan, commits) if unit.id not in records.broken)
    if not so_far:
        problems += _unfinished(plan, missing, sealed)
    shared = 0
    if sealed is not None:
        wrong, shared = await _manifest_problems(calls, plan, records, sealed)
        problems += wrong
    named = {data.path for commit in commits.values() for data in commit.objects}
    ordered = [commits[unit.id].facts.rows_sha256 for unit in plan.units if unit.id in commits]
    return Checked(
        run=plan.run,
        sealed=sealed is not None,
        units=len(plan.units),
        committed=len(commits),
        objects=len(named),
        bytes=sum(sum(commit.facts.sizes) for commit in commits.values()),
        rows_sha256=ledger.checksum(msgspec.json.encode(ordered)),
        open=missing,
        garbage=sum(path not in named for path in stored),
        shared_ids=shared,
        problems=tuple(problems),
        damaged=tuple(sorted(unit for unit, wrong in found.items() if wrong)),
    )


def _unfinished(plan: RunPlan, missing: tuple[str, ...], sealed: RunManifest | None) -> Iterator[str]:
    if missing:
        some = ", ".join(missing[:NAMED_AT_MOST]) + (", …" if len(missing) > NAMED_AT_MOST else "")
        yield f"{len(missing)} of {len(plan.units)} units have no commit: {some}"
    elif sealed is None:
        yield "there is no manifest of these commits; the next worker writes it"


async def _manifest_problems(
    calls: Calls, plan: RunPlan, records: Records, sealed: RunManifest
) -> tuple[list[str], int]:
    """What is wrong with the manifest and what it names beside units; and how many ids several rows have."""
    problems = list(ledger.verify(plan, sealed))
    others = {commit.unit for commit in sealed.units if records.commits.get(commit.unit) != commit}
    if sealed.plan != plan or not others <= records.broken.keys():
        problems.append("the manifest names other commits, or another plan, than the bucket holds")
    index, wrong = await _read_hashed(calls, "the run's index", sealed.index)
    problems += wrong
    if sealed.refused is not None:
        problems += (await _read_hashed(calls, "the list of refused rows", sealed.refused))[1]
    return problems, 0 if wrong else shared_ids(read_index(index))


class _Look:
    """Hashes objects of a run, as many blocks at once as may be in memory."""

    def __init__(self, calls: Calls, sizes: Mapping[str, int]) -> None:
        self._calls = calls
        self._sizes = sizes
        self._places = asyncio.Semaphore(BLOCKS_AT_ONCE)

    async def unit_problems(self, plan: RunPlan, commit: UnitCommit) -> list[str]:
        """What is wrong with one committed unit."""
        planned = {unit.id: unit for unit in plan.units}.get(commit.unit)
        if planned is None or (planned.start, planned.stop) != (commit.start, commit.stop):
            return [f"{commit.unit}: the plan has no such unit with rows {commit.start}:{commit.stop}"]
        names = (TOKENS, INDEX, *(f"{site}.safetensors" for site in plan.sites))
        try:
            objects = {name: object_of(commit, name) for name in names}
        except ledger.Incomplete as error:
            return [str(error)]
        looked = await asyncio.gather(*(self._content(commit.unit, name, data) for name, data in objects.items()))
        problems = [problem for _, wrong in looked for problem in wrong]
        if problems:
            return problems
        contents = {name: content for name, (content, _) in zip(names, looked, strict=True)}
        try:
            return list(await asyncio.to_thread(lambda: list(_content_problems(plan, commit, contents))))
        except Damaged as error:
            return [f"{commit.unit}: {error}"]

    async def _content(self, unit: str, name: str, data: DataObject) -> tuple[bytes, list[str]]:
        """Of a site only its beginning, with the header: the rest is hashed and forgotten."""
        if data.path not in self._sizes:
            return b"", [f"{unit}: {data.path} is gone"]
        if name in (TOKENS, INDEX):
            return await _read_hashed(self._calls, unit, data)
        beginning = bytearray()
        try:
            same = await self._matches(data, self._sizes[data.path], beginning)
        except Damaged as error:
            return b"", [f"{unit}: {error}"]
        return bytes(beginning), [] if same else [f"{unit}: {data.path} has other bytes than were committed"]

    async def _matches(self, data: DataObject, size: int, beginning: bytearray) -> bool:
        starts = range(0, size, BLOCK_BYTES)
        if kind := ledger.kind_of(data.checksum):
            digests = await asyncio.gather(*(self._digest(data.path, start, beginning, kind) for start in starts))
            return ledger.checksum_of_blocks(digests, kind) == data.checksum
        whole = hashlib.sha256()
        for start in starts:
            async with self._places:
                await asyncio.to_thread(whole.update, await self._block(data.path, start, beginning))
        return whole.hexdigest() == data.checksum

    async def _digest(self, path: str, start: int, beginning: bytearray, kind: str) -> bytes:
        async with self._places:
            block = await self._block(path, start, beginning)
            found = ledger.block_hash(kind)
            await asyncio.to_thread(found.update, block)
            return found.digest()

    async def _block(self, path: str, start: int, beginning: bytearray) -> bytes:
        block = await self._calls.read_range(path, start, start + BLOCK_BYTES)
        if block is None:
            raise Damaged(f"{path} is gone")
        if not start:
            beginning += block[: tensors.LENGTH_BYTES + tensors.HEADER_BYTES_MAX]
        return block


async def requeue(calls: Calls, plan: RunPlan, unit: str, *, force: bool = False) -> str:
    """Have a unit made again: at once if somebody's lease holds it up, and anew if what was committed is damaged."""
    run = plan.run
    if unit not in {each.id for each in plan.units}:
        raise BadInput("unit", unit, "is not in the plan", f"units are {plan.units[0].id} to {plan.units[-1].id}")
    editions = ledger.editions(run, await calls.list(ledger.commits_prefix(run)))
    committed, edition = unit in editions.committed, editions.of(unit)
    if committed:
        if not force and not await _is_damaged(calls, plan, unit, edition):
            raise BadInput("unit", unit, "is committed and sound", "give --force to have it made again all the same")
        # The commit stays and counts no more: `seal` says why. From here on no manifest that names it counts either.
        await calls.create(ledger.void_path(run, unit, edition), b"")
        await drop_stale_manifests(calls, run)
    leases = [path for path in await calls.list(leases_of_run(run)) if path.split("/")[3] == unit]
    for path in leases:
        await calls.delete(path)
    if committed:
        return f"{unit}: its commit is void; the next free worker makes it again"
    return f"{unit}: {len(leases)} leases are removed; the next free worker takes it"


async def _is_damaged(calls: Calls, plan: RunPlan, unit: str, edition: int) -> bool:
    commit = (await read_some_records(calls, plan.run, [(unit, edition)])).commits.get(unit)
    if commit is None:
        return True
    stored = await calls.survey(ledger.data_path(plan.run, unit, commit.attempt, ""))
    return bool(await _Look(calls, {kept.path: kept.size for kept in stored}).unit_problems(plan, commit))


def _content_problems(plan: RunPlan, commit: UnitCommit, contents: dict[str, bytes]) -> Iterator[str]:
    unit, facts = commit.unit, commit.facts
    tokens = tensors.view(contents[TOKENS], "tokens", TOKENS)
    positions = tensors.view(contents[TOKENS], "positions", TOKENS)
    for site in plan.sites:
        found, metadata = tensors.decode_header(contents[f"{site}.safetensors"], site)
        shape = found[VALUES].shape if VALUES in found else ()
        if shape[:1] != (facts.tokens,) or found[VALUES].dtype != plan.dtype:
            yield f"{unit}: {site} has shape {shape} for {facts.tokens} tokens"
        if (metadata.get("run"), metadata.get("unit"), metadata.get("site")) != (plan.run, unit, site):
            yield f"{unit}: {site} says that it belongs to {metadata}"
    if len(tokens) != facts.tokens or len(positions) != facts.tokens:
        yield f"{unit}: {len(tokens)} tokens and {len(positions)} positions instead of {facts.tokens}"
        return
    index = read_index(contents[INDEX])
    yield from _index_problems(commit, index)
    columns = zip(*(index[name].to_pylist() for name in ("row", "document", "start", "count")), strict=True)
    again = rows_hash(
        (row, document, positions[start : start + count], tokens[start : start + count])
        for row, document, start, count in columns
    )
    if again != facts.rows_sha256:
        yield f"{unit}: the hash of its rows and tokens is {again[:12]}… instead of {facts.rows_sha256[:12]}…"


def _index_problems(commit: UnitCommit, index: Any) -> Iterator[str]:
    rows = set(index["row"].to_pylist())
    if rows != set(range(commit.start, commit.stop)):
        yield f"{commit.unit}: its index names {len(rows)} input rows, not exactly {commit.start}:{commit.stop}"
    starts, counts = (index[name].to_numpy().astype(np.int64) for name in ("start", "count"))
    order = np.argsort(starts[counts > 0])
    starts, counts = starts[counts > 0][order], counts[counts > 0][order]
    expected = np.cumsum(counts) - counts
    if not np.array_equal(starts, expected) or int(counts.sum()) != commit.facts.tokens:
        yield f"{commit.unit}: its documents overlap, or do not cover its {commit.facts.tokens} rows"


async def _read_hashed(calls: Calls, unit: str, data: DataObject) -> tuple[bytes, list[str]]:
    try:
        stored = await calls.read(data.path)
    except Damaged as error:
        return b"", [f"{unit}: {error}"]
    if stored is None:
        return b"", [f"{unit}: {data.path} is gone"]
    if not await asyncio.to_thread(ledger.matches, stored.data, data.checksum):
        return b"", [f"{unit}: {data.path} has other bytes than were committed"]
    return stored.data, []
