"""Mini-batches of a finished run for training: shuffled with a seed, each row once per epoch, at the speed of the disk.

`Run` has no such methods itself, so that reading needs neither torch nor jax; the one that is asked for is imported
when it is. Shuffling is by blocks: an epoch is all blocks of neighbouring rows in random order, cut into parts of so
many rows that the rows of a batch come from all over the run, and each part is mixed. What a batch holds follows from
seed, epoch, part and sizes alone, so that a trainer can go on at any batch. The next part is read, and the next batches
are gathered, while the last are used. `torch_batches` is what SAELens' trainer takes as its data provider: any iterator
of tensors [batch, d].
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.domain.admission import BadInput
from penstock.extract.reader import Block, Run
from penstock.extract.tensors import Array, dtype_of

BLOCK_ROWS: Final = 4096  #: read together, so that a request is some megabytes
MIXED_ROWS: Final = 131_072  #: in memory at once, of each site
READS_AT_ONCE: Final = 8
GATHERS_AT_ONCE: Final = 2
GATHERED_AHEAD: Final = 3  #: batches
KEPT: Final = 16  #: pieces of memory, to be used again
ALIGNED_BYTES: Final = 64


def batches(
    run: Run,
    site: str,
    batch: int,
    *,
    seed: int = 0,
    epochs: int | None = 1,
    skip: int = 0,
    mixed_rows: int = MIXED_ROWS,
    block_rows: int = BLOCK_ROWS,
    keep_rest: bool = False,
) -> Iterator[Array]:
    """Arrays [batch, d] of one site. `epochs` None: for ever. Rows that fill no batch come with `keep_rest`.

    `skip` leaves out so many batches at the beginning, without reading them: a trainer that had n goes on with n.
    """
    order = _order(
        run,
        batch,
        seed=seed,
        epochs=epochs,
        skip=skip,
        mixed_rows=mixed_rows,
        block_rows=block_rows,
        keep_rest=keep_rest,
    )
    return _read(run, (site,), order, lambda found, _: found[site])


def joint_batches(
    run: Run,
    sites: Sequence[str],
    batch: int,
    *,
    seed: int = 0,
    epochs: int | None = 1,
    skip: int = 0,
    mixed_rows: int = MIXED_ROWS,
    block_rows: int = BLOCK_ROWS,
    keep_rest: bool = False,
) -> Iterator[dict[str, Array]]:
    """As `batches`, of several sites at once: row i of each array is of the same token."""
    order = _order(
        run,
        batch,
        seed=seed,
        epochs=epochs,
        skip=skip,
        mixed_rows=mixed_rows,
        block_rows=block_rows,
        keep_rest=keep_rest,
    )
    return _read(run, tuple(sites), order, lambda found, _: found)


def torch_batches(
    run: Run, site: str, batch: int, *, dtype: str = "float32", device: str = "cpu", **options: Any
) -> Iterator[Any]:
    """Tensors [batch, d]; without `epochs` for ever, as trainers expect. `options` are those of `batches`."""
    torch: Any = import_module("torch")  # by name: this package has no torch, its reader's environment has
    kind = getattr(torch, dtype)

    def finish(found: dict[str, Array], memory: _Memory) -> Any:
        values = _to_torch(torch, found[site])
        if kind is not torch.float32 or values.dtype is kind or torch.device(device).type != "cpu":
            return values  # to the device as it is: fewer bytes go there, and it converts faster
        wide = torch.from_numpy(memory.get(4 * values.numel()).view(np.float32)).view(values.shape)
        return wide.copy_(values)

    options.setdefault("epochs", None)
    order = _order(run, batch, **options)
    return (each.to(device).to(kind) for each in _read(run, (site,), order, finish))


def jax_batches(run: Run, site: str, batch: int, *, sharding: Any = None, **options: Any) -> Iterator[Any]:
    """jax arrays [batch, d] of the run's type, on the default device or as `sharding` says."""
    import jax

    options.setdefault("epochs", None)
    return (jax.device_put(found, sharding) for found in batches(run, site, batch, **options))


def _to_torch(torch: Any, values: Array) -> Any:
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


class _Part(NamedTuple):
    """Rows that are in memory together: where they lie, and which of them make each batch."""

    blocks: list[Block]
    batches: list[NDArray[np.int64]]


class _Order:
    """Which rows are in which batch; reads nothing."""

    def __init__(self, blocks: list[Block], batch: int, seed: int, mixed_rows: int, *, keep_rest: bool) -> None:
        self._blocks = blocks
        self._batch = batch
        self._seed = seed
        rows = sum(block.stop - block.start for block in blocks)
        full = rows // batch
        parts = max(1, -(-full * batch // max(mixed_rows, batch)))
        #: Batch with which each part begins, about as many in each; rows that fill no batch are the last part's.
        self._firsts = [full * part // parts for part in range(parts)]
        self._bounds = [first * batch for first in self._firsts] + [rows]
        self._last = rows if keep_rest else full * batch
        self.per_epoch = -(-self._last // batch)
        self.rows_max = max(stop - start for start, stop in zip(self._bounds, self._bounds[1:], strict=False))

    def parts(self, epochs: int | None, skip: int) -> Iterator[_Part]:
        """From batch `skip` on, counted through all epochs."""
        begin, skip = divmod(skip, self.per_epoch)
        for epoch in count(begin) if epochs is None else range(begin, epochs):
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._blocks))
            blocks = [self._blocks[at] for at in order]
            stops = np.cumsum([block.stop - block.start for block in blocks])
            for part in range(bisect_right(self._firsts, skip) - 1, len(self._firsts)):
                yield self._part(epoch, part, blocks, stops, max(0, skip - self._firsts[part]))
            skip = 0

    def _part(self, epoch: int, part: int, blocks: list[Block], stops: NDArray[np.int64], skip: int) -> _Part:
        start, stop = self._bounds[part], self._bounds[part + 1]
        found: list[Block] = []
        for at in range(int(np.searchsorted(stops, start, side="right")), len(blocks)):
            block, before = blocks[at], int(stops[at]) - (blocks[at].stop - blocks[at].start)
            if before >= stop:
                break
            low, high = max(start - before, 0), min(stop - before, block.stop - block.start)
            found.append(block._replace(start=block.start + low, stop=block.start + high))
        # Not 0: numbers at the end that are 0 are the same seed as none.
        mixed = np.random.default_rng([self._seed, epoch, part + 1]).permutation(stop - start)
        last = min(stop, self._last) - start
        return _Part(found, [mixed[at : at + self._batch] for at in range(skip * self._batch, last, self._batch)])


def _order(
    run: Run,
    batch: int,
    *,
    seed: int = 0,
    epochs: int | None = 1,
    skip: int = 0,
    mixed_rows: int = MIXED_ROWS,
    block_rows: int = BLOCK_ROWS,
    keep_rest: bool = False,
) -> tuple[_Order, Iterator[_Part]]:
    if batch < 1 or block_rows < 1 or mixed_rows < 1:
        raise BadInput("batch", batch, "and the rows read and mixed at once must be 1 or more")
    if skip < 0:
        raise BadInput("skip", skip, "is less than 0", "give the number of batches that were used")
    if not len(run) or (len(run) < batch and not keep_rest):
        raise BadInput("batch", batch, f"is more than the run's {len(run)} rows", "take a smaller batch")
    order = _Order(list(run.blocks(block_rows)), batch, seed, mixed_rows, keep_rest=keep_rest)
    return order, order.parts(epochs, skip)


def _references_of_free() -> int:
    """How many references Python counts to what a list alone holds, seen from a loop over the list.

    Interpreters differ: newer ones lend a reference to the call instead of counting one for it.
    """
    for owner in [np.empty(1, np.uint8)]:
        return sys.getrefcount(owner)
    raise AssertionError("the list has one")


class _Memory:
    """Memory of batches that nobody uses any more, for the next ones: fresh memory costs several times the copy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: list[Array] = []
        self._free = _references_of_free()

    def get(self, size: int) -> Array:
        """So many bytes, at an address that every library takes without a copy."""
        with self._lock:
            for owner in self._owners:
                # Every array and tensor over this memory holds its owner, and more often than nobody does.
                if owner.nbytes == size + ALIGNED_BYTES and sys.getrefcount(owner) <= self._free:
                    break
            else:
                owner = np.empty(size + ALIGNED_BYTES, np.uint8)
                if len(self._owners) < KEPT:
                    self._owners.append(owner)
            start = -owner.__array_interface__["data"][0] % ALIGNED_BYTES
            return owner[start : start + size]


#: What becomes of a batch's arrays, by site; in a thread of its own, ahead of who wants it.
Finish = Callable[[dict[str, Array], _Memory], Any]


class _Room:
    """Rows of one part, as bytes [rows, d × size] of each site; used again and again.

    As bytes, because numpy moves values of types that are not its own one at a time; used again, because fresh memory
    costs more than the copy.
    """

    def __init__(self, run: Run, sites: tuple[str, ...], rows: int) -> None:
        self._run = run
        self._dtype = dtype_of(run.plan.dtype)
        self._whole = {site: np.empty((rows, run.width(site) * self._dtype.itemsize), np.uint8) for site in sites}
        self._under_way: list[Future[None]] = []

    def begin(self, threads: ThreadPoolExecutor, blocks: list[Block]) -> None:
        """Have blocks read, one behind another."""
        at = 0
        for block in blocks:
            stop = at + block.stop - block.start
            for site, rows in self._whole.items():
                self._under_way.append(threads.submit(_copy, self._run, block, site, rows[at:stop]))
            at = stop

    def wait(self) -> None:
        for future in self._under_way:
            future.result()
        self._under_way.clear()

    def rows(self, rows: NDArray[np.int64], memory: _Memory) -> dict[str, Array]:
        found = {}
        for site, values in self._whole.items():
            room = memory.get(len(rows) * values.shape[1]).reshape(len(rows), -1)
            # All rows are there; asked to check that, numpy would gather into memory of its own first.
            values.take(rows, axis=0, out=room, mode="clip")
            found[site] = room.view(self._dtype)
        return found


def _copy(run: Run, block: Block, site: str, to: Array) -> None:
    values = run.block(block, "values", site)
    to[...] = values.view(np.uint8).reshape(len(values), -1)


def _read(run: Run, sites: tuple[str, ...], ordered: tuple[_Order, Iterator[_Part]], finish: Finish) -> Iterator[Any]:
    order, parts = ordered
    memory = _Memory()
    room, next_room = (_Room(run, sites, order.rows_max) for _ in range(2))
    readers = ThreadPoolExecutor(READS_AT_ONCE, "penstock-extract-batches")
    gatherers = ThreadPoolExecutor(GATHERS_AT_ONCE, "penstock-extract-gathers")
    try:
        part = next(parts, None)
        if part is not None:
            room.begin(readers, part.blocks)
        while part is not None:
            following = next(parts, None)
            room.wait()
            if following is not None:
                next_room.begin(readers, following.blocks)
            ahead: deque[Future[Any]] = deque()
            for rows in part.batches:
                ahead.append(gatherers.submit(lambda room, rows: finish(room.rows(rows, memory), memory), room, rows))
                if len(ahead) > GATHERED_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
            part, room, next_room = following, next_room, room
    finally:  # also when the caller has had enough
        readers.shutdown(cancel_futures=True)
        gatherers.shutdown(cancel_futures=True)
