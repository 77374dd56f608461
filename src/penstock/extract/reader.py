"""Reading a finished run: by document and position, by ranges of rows, and in shuffled mini-batches for training.

`penstock.extract.open(address)` gives a `Run`. It trusts the manifest and reads nothing else than what it names, so a
run that is not sealed cannot be read. Neither jax nor torch is needed; the iterators for them are in `iterators`. Bytes
of a range are not checked against the checksum of their object, which `tpu extract verify` does for all of them.
"""

from __future__ import annotations

import os
import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from penstock.domain import ledger
from penstock.domain.admission import BadInput
from penstock.extract import plan as plans
from penstock.extract import refused as refusals
from penstock.extract.calls import Calls
from penstock.extract.layout import TOKENS, VALUES, object_of, read_index
from penstock.extract.reading import Loop, Rows
from penstock.extract.seal import RunManifest, find_manifest
from penstock.extract.source import Refused
from penstock.extract.tensors import Array, dtype_of
from penstock.objects.addresses import Use, open_address
from penstock.ports.objects import Damaged

#: A reader has somebody waiting: it gives up sooner than a worker.
PATIENCE_S = 60.0
SHOWN_ROWS = 5  #: of those that have one name


class Stretch(NamedTuple):
    """Vectors of one document that lie together: rows `start` to `stop` of a unit."""

    unit: int
    start: int
    stop: int
    position: int  #: of the first
    input_row: int


class Block(NamedTuple):
    """Consecutive rows of one unit."""

    unit: int
    start: int
    stop: int


def open(address: str, environment: Mapping[str, str] = os.environ) -> Run:  # noqa: A001 (as gzip.open and the like)
    """A sealed run at `…/runs/ID`, or the only run under a root: a directory, gs:// or s3://."""
    root, run = plans.parse_address(address)
    objects, _ = open_address("run", root, environment, use=Use.READ)
    calls = Calls(objects, random.Random(), PATIENCE_S)
    loop = Loop()
    try:
        return Run(calls, loop, run if run is not None else loop.run(plans.only_run(calls, root)))
    except BaseException:
        loop.close()
        raise


class Run:
    """A sealed run. Rows are numbered over the whole run, unit after unit in the plan's order."""

    def __init__(self, calls: Calls, loop: Loop, run: str) -> None:
        self._loop = loop
        self._calls = calls
        self._rows = Rows(calls, loop)
        found = loop.run(find_manifest(calls, run))
        if found is None:
            raise BadInput("run", run, "is not sealed: units are open", "look at `tpu extract status`, run workers")
        self.manifest: RunManifest = found
        self.plan = found.plan
        self.sites = found.plan.sites
        self._index = self._read_index(calls)
        counts = [commit.facts.tokens for commit in found.units]
        #: Row of the run at which each unit begins, and behind the last one the number of rows.
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the thread that speaks to the bucket."""
        self._loop.close()

    @property
    def documents(self) -> Sequence[str]:
        """Names of the documents that have vectors, sorted."""
        import pyarrow.compute as pc

        stored = self._index.filter(pc.greater(self._index["count"], 0))
        return list(dict.fromkeys(stored["document"].to_pylist()))

    def refused(self) -> list[Refused]:
        """The input rows that gave nothing: where they stand in the data, and why."""
        return self._loop.run(refusals.of_units(self._calls, self.manifest.units))

    def width(self, site: str) -> int:
        return self.manifest.facts.widths[self._known(site)]

    def rows(self, document: str) -> list[int]:
        """The input rows that have this name: one, unless the data's ids are not unique."""
        return sorted({stretch.input_row for stretch in self._found(document)})

    def stretches(self, document: str, row: int | None = None) -> list[Stretch]:
        """Where a document's vectors lie, by position; a document in windows has several.

        `row` is the input row, for a name that several of them have. Without it such a name is refused.
        """
        found = self._found(document)
        rows = sorted({stretch.input_row for stretch in found})
        if row is None and len(rows) > 1:
            shown = f"{', '.join(map(str, rows[:SHOWN_ROWS]))}{', …' if len(rows) > SHOWN_ROWS else ''}"
            raise BadInput("document", document, f"names {len(rows)} input rows: {shown}", f"give row={rows[0]}")
        if row is not None and row not in rows:
            raise KeyError(f"{document!r}: is not input row {row}; it is {rows[0]}")
        return found if row is None else [stretch for stretch in found if stretch.input_row == row]

    def positions(self, document: str, row: int | None = None) -> NDArray[np.int32]:
        """The document's positions that have a vector, stretch after stretch."""
        return self._of_tokens(document, "positions", row)

    def tokens(self, document: str, row: int | None = None) -> NDArray[np.int32]:
        """The token ids of these positions."""
        return self._of_tokens(document, "tokens", row)

    def values(self, document: str, site: str, row: int | None = None) -> Array:
        """Their vectors, [n, d]."""
        name = f"{self._known(site)}.safetensors"
        return np.concatenate([self._read(name, VALUES, *stretch[:3]) for stretch in self.stretches(document, row)])

    def vector(self, document: str, position: int, site: str, row: int | None = None) -> Array:
        """The vector of one position, [d]."""
        for stretch in self.stretches(document, row):
            there = self._read(TOKENS, "positions", *stretch[:3])
            at = int(np.searchsorted(there, position))
            if at < len(there) and there[at] == position:
                at += stretch.start
                found: Array = self._read(f"{self._known(site)}.safetensors", VALUES, stretch.unit, at, at + 1)[0]
                return found
        raise KeyError(f"{document!r} has no vector at position {position}")

    def block(self, block: Block, name: str, site: str | None = None) -> Array:
        """Rows of a unit: of a site (`values`), or their `tokens` or `positions`."""
        if site is not None:
            return self._read(f"{self._known(site)}.safetensors", VALUES, *block)
        return self._read(TOKENS, name, *block)

    def blocks(self, rows: int) -> Iterator[Block]:
        """All rows in pieces of at most `rows`, none over the end of a unit."""
        for unit, commit in enumerate(self.manifest.units):
            for start in range(0, commit.facts.tokens, rows):
                yield Block(unit, start, min(start + rows, commit.facts.tokens))

    def slice(self, start: int, stop: int, site: str) -> Array:
        """Rows of the whole run, [n, d]."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start}:{stop} of {len(self)}")
        found = [np.zeros((0, self.width(site)), dtype_of(self.plan.dtype))]
        for unit in range(int(np.searchsorted(self.starts, start, side="right")) - 1, len(self.starts) - 1):
            low, high = int(self.starts[unit]), int(self.starts[unit + 1])
            if low >= stop:
                break
            if max(start, low) < min(stop, high):
                found.append(self.block(Block(unit, max(start, low) - low, min(stop, high) - low), "values", site))
        return np.concatenate(found)

    def _found(self, document: str) -> list[Stretch]:
        names = self._index["document"]
        at = bisect_left(range(len(names)), document, key=lambda row: names[row].as_py())
        found: list[Stretch] = []
        while at < len(names) and names[at].as_py() == document:
            entry = {name: self._index[name][at].as_py() for name in ("unit", "start", "count", "position", "row")}
            at += 1
            if entry["count"]:
                stop = entry["start"] + entry["count"]
                found.append(Stretch(entry["unit"], entry["start"], stop, entry["position"], entry["row"]))
        if not found:
            raise KeyError(f"{document!r}: no document of this run, or one of which nothing is stored")
        return found

    def _of_tokens(self, document: str, name: str, row: int | None) -> NDArray[np.int32]:
        return np.concatenate([self._read(TOKENS, name, *stretch[:3]) for stretch in self.stretches(document, row)])

    def _read(self, object_name: str, tensor: str, unit: int, start: int, stop: int) -> Array:
        path = object_of(self.manifest.units[unit], object_name).path
        return self._rows.read(path, tensor, start, stop)

    def _known(self, site: str) -> str:
        name = site.replace(":", ".")
        if name not in self.sites:
            raise BadInput("site", site, "is not in this run", f"it has {', '.join(self.sites)}")
        return name

    def _read_index(self, calls: Calls) -> Any:
        data = self.manifest.index
        stored = self._loop.run(calls.read(data.path))
        if stored is None or not ledger.matches(stored.data, data.checksum):
            raise Damaged(f"{data.path}: the run's index is not as the manifest says")
        return read_index(stored.data)
