"""Whether a run in a bucket is what its records say, byte by byte; and having one unit made again.

`tpu extract verify` and `requeue` call it. Every committed object is read and hashed again, shapes are compared with
the commit, the index must name each input row of the unit and cover its vectors without overlap, and the hash over rows
and tokens must come out the same. It reads; only `requeue` removes, and only records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np

from penstock.domain import ledger
from penstock.domain.admission import BadInput
from penstock.domain.ledger import DataObject
from penstock.extract import tensors
from penstock.extract.calls import Calls
from penstock.extract.claims import leases_of_run
from penstock.extract.layout import INDEX, TOKENS, VALUES, UnitCommit, read_index, rows_hash
from penstock.extract.plan import RunPlan
from penstock.extract.seal import data_prefix, find_manifest, object_of, read_commits
from penstock.ports.objects import Damaged

UNITS_AT_ONCE: Final = 2  #: whole objects are in memory while they are hashed


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at and what is wrong with it."""

    run: str
    sealed: bool
    units: int
    committed: int
    objects: int
    bytes: int
    rows_sha256: str
    garbage: int  #: data objects that no commit names
    problems: tuple[str, ...]
    damaged: tuple[str, ...]  #: units to have made again


async def verify(calls: Calls, plan: RunPlan) -> Checked:
    """Look at all there is; `problems` is empty when the run, as far as it has come, is as it should be."""
    commits = await read_commits(calls, plan)
    places = asyncio.Semaphore(UNITS_AT_ONCE)

    async def one(commit: UnitCommit) -> tuple[str, list[str]]:
        async with places:
            return commit.unit, await unit_problems(calls, plan, commit)

    found = dict(await asyncio.gather(*(one(commit) for commit in commits.values())))
    problems = [problem for unit in sorted(found) for problem in found[unit]]
    sealed = await find_manifest(calls, plan.run)
    if sealed is not None:
        problems.extend(ledger.verify(plan, sealed))
        if sealed.plan != plan or {commit.unit: commit for commit in sealed.units} != commits:
            problems.append("the manifest names other commits, or another plan, than the bucket holds")
        problems.extend(await _hash_problem(calls, "the run's index", sealed.index))
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
        garbage=sum(path not in named for path in await calls.list(data_prefix(plan.run))),
        problems=tuple(problems),
        damaged=tuple(sorted(unit for unit, wrong in found.items() if wrong)),
    )


async def unit_problems(calls: Calls, plan: RunPlan, commit: UnitCommit) -> list[str]:
    """What is wrong with one committed unit."""
    planned = {unit.id: unit for unit in plan.units}.get(commit.unit)
    if planned is None or (planned.start, planned.stop) != (commit.start, commit.stop):
        return [f"{commit.unit}: the plan has no such unit with rows {commit.start}:{commit.stop}"]
    problems: list[str] = []
    contents: dict[str, bytes] = {}
    for name in (TOKENS, INDEX, *(f"{site}.safetensors" for site in plan.sites)):
        try:
            data = object_of(commit, name)
        except ledger.Incomplete as error:
            problems.append(str(error))
            continue
        stored, wrong = await _read_hashed(calls, commit.unit, data)
        problems.extend(wrong)
        if not wrong:
            # Of a site only the header is looked at from here on.
            contents[name] = stored if name in (TOKENS, INDEX) else stored[: tensors.header_stop(stored, data.path)]
    if problems:
        return problems
    try:
        return list(await asyncio.to_thread(lambda: list(_content_problems(plan, commit, contents))))
    except Damaged as error:
        return [f"{commit.unit}: {error}"]


async def requeue(calls: Calls, plan: RunPlan, unit: str, *, force: bool = False) -> str:
    """Have a unit made again: at once if somebody's lease holds it up, and anew if what was committed is damaged."""
    if unit not in {each.id for each in plan.units}:
        raise BadInput("unit", unit, "is not in the plan", f"units are {plan.units[0].id} to {plan.units[-1].id}")
    commit = (await read_commits(calls, plan)).get(unit)
    if commit is not None:
        wrong = await unit_problems(calls, plan, commit)
        if not wrong and not force:
            raise BadInput("unit", unit, "is committed and sound", "give --force to have it made again all the same")
        # First the manifest: from here on the run is not whole, and must not look so.
        for path in await calls.list(ledger.manifest_prefix(plan.run)):
            await calls.delete(path)
        await calls.delete(ledger.commit_path(plan.run, unit))
    leases = [path for path in await calls.list(leases_of_run(plan.run)) if path.split("/")[3] == unit]
    for path in leases:
        await calls.delete(path)
    if commit is not None:
        return f"{unit}: its commit is removed; the next free worker makes it again"
    return f"{unit}: {len(leases)} leases are removed; the next free worker takes it"


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
    if stored.generation != data.generation:
        return b"", [f"{unit}: {data.path} is not the write that was committed"]
    if not await asyncio.to_thread(ledger.matches, stored.data, data.checksum):
        return b"", [f"{unit}: {data.path} has other bytes than were committed"]
    return stored.data, []


async def _hash_problem(calls: Calls, what: str, data: DataObject) -> list[str]:
    return (await _read_hashed(calls, what, data))[1]
