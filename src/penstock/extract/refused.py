"""Rows of a run that gave nothing: where they stand in the data, and why nothing was stored of them.

`tpu extract refused` and `Run.refused` ask, of a run that goes on as well as of one that is sealed; `seal` writes the
same as a side file. All of it comes from the units' own indexes, where such a row is an entry without vectors. It must
not read the data itself: what is listed is what the worker saw.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from penstock.domain import ledger
from penstock.domain.ledger import Incomplete
from penstock.extract.calls import Calls
from penstock.extract.layout import INDEX, UnitCommit, object_of, read_index
from penstock.extract.source import Refused

READS_AT_ONCE: Final = 32


def listed(index: Any) -> list[Refused]:
    """The rows of a unit's index that have no vectors, in the order of the rows."""
    import pyarrow.compute as pc

    empty = index.filter(pc.equal(index["count"], 0)).to_pylist()
    return [
        Refused(
            file=entry["file"],
            line=entry["offset"] + 1,
            row=entry["row"],
            id=None if entry["document"] == f"row {entry['row']}" else entry["document"],
            reason=entry["note"],
            excerpt=entry.get("excerpt", ""),  # runs of before it was kept have none
        )
        for entry in empty
    ]


def as_lines(found: Iterable[Refused]) -> bytes:
    """As JSON lines, the form of every side file."""
    return b"".join(msgspec.json.encode(each) + b"\n" for each in found)


async def of_units(calls: Calls, commits: Iterable[UnitCommit]) -> list[Refused]:
    """Of all units that have such rows, in the order they are given."""
    places = asyncio.Semaphore(READS_AT_ONCE)

    async def one(commit: UnitCommit) -> list[Refused]:
        async with places:
            data = object_of(commit, INDEX)
            stored = await calls.read(data.path)
        if stored is None or not ledger.matches(stored.data, data.checksum):
            raise Incomplete(f"{commit.unit}: {data.path} is not as it was committed; `tpu extract verify` says more")
        return listed(read_index(stored.data))

    found = await asyncio.gather(*(one(commit) for commit in commits if commit.facts.empty))
    return [each for unit in found for each in unit]
