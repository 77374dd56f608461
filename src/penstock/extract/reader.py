"""Reading a finished run: by document and position, by ranges of rows, and in shuffled mini-batches for training.

`penstock.extract.open(address)` gives a `Run`. It trusts the manifest and reads nothing else than what it names, so a
run that is not sealed cannot be read. Neither jax nor torch is needed; the iterators for them are in `iterators`. Bytes
of a range are not checked against the checksum of their object, which `tpu extract verify` does for all of them.
"""

from __future__ import annotations

import builtins
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
from penstock.extract.calls import Calls
from penstock.extract.layout import TOKENS, VALUES, read_index
from penstock.extract.reading import Loop, Rows
from penstock.extract.seal import RunManifest, find_manifest, object_of
from penstock.extract.tensors import Array, dtype_of
from penstock.objects.addresses import open_address
from penstock.ports.objects import Damaged

#: A reader has somebody waiting: it gives up sooner than a worker.
PATIENCE_S = 60.0


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
    objects, _ = open_address("run", root, environment)
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
        return list(dict.fromkeys(self._index["document"].to_pylist()))

    def width(self, site: str) -> int:
        return self.manifest.facts.widths[self._known(site)]

    def stretches(self, document: str) -> list[Stretch]:
        """Where a document's vectors lie, by position; a document in windows has several."""
        names = self._index["document"]
        at = bisect_left(range(len(names)), document, key=lambda row: names[row].as_py())
        found: builtins.list[Stretch] = []
        while at < len(names) and names[at].as_py() == document:
            row = {name: self._index[name][at].as_py() for name in ("unit", "start", "count", "position", "row")}
            at += 1
            if row["count"]:
                stop = row["start"] + row["count"]
                found.append(Stretch(row["unit"], row["start"], stop, row["position"], row["row"]))
        if not found:
            raise KeyError(f"{document!r}: no document of this run, or one of which nothing is stored")
        return found

    def positions(self, document: str) -> NDArray[np.int32]:
        """The document's positions that have a vector, stretch after stretch."""
        return self._of_tokens(document, "positions")

    def tokens(self, document: str) -> NDArray[np.int32]:
        """The token ids of these positions."""
        return self._of_tokens(document, "tokens")

    def values(self, document: str, site: str) -> Array:
        """Their vectors, [n, d]."""
        name = f"{self._known(site)}.safetensors"
        return np.concatenate([self._read(name, VALUES, *stretch[:3]) for stretch in self.stretches(document)])

    def vector(self, document: str, position: int, site: str) -> Array:
        """The vector of one position, [d]; of windows that overlap, the first one's."""
        for stretch in self.stretches(document):
            there = self._read(TOKENS, "positions", *stretch[:3])
            at = int(np.searchsorted(there, position))
            if at < len(there) and there[at] == position:
                row = stretch.start + at
                found: Array = self._read(f"{self._known(site)}.safetensors", VALUES, stretch.unit, row, row + 1)[0]
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

    def _of_tokens(self, document: str, name: str) -> NDArray[np.int32]:
        return np.concatenate([self._read(TOKENS, name, *stretch[:3]) for stretch in self.stretches(document)])

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
