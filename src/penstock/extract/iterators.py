"""Mini-batches of a finished run for training: shuffled with a seed, each row once per epoch, at the speed of the disk.

`Run` has no such methods itself, so that reading needs neither torch nor jax; the one that is asked for is imported
when it is. Shuffling is by blocks: blocks of neighbouring rows come in random order, so many of them are read together
that the rows of a batch come from all over the run, and those are mixed. The next blocks are read while the last are
used. `torch_batches` is what SAELens' trainer takes as its data provider: any iterator of tensors [batch, d].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from itertools import count
from typing import Any, Final

import numpy as np

from penstock.domain.admission import BadInput
from penstock.extract.reader import Block, Run
from penstock.extract.tensors import Array, dtype_of

BLOCK_ROWS: Final = 4096  #: read together, so that a request is some megabytes
MIXED_ROWS: Final = 131_072  #: in memory at once, of each site
READS_AT_ONCE: Final = 8


def batches(
    run: Run,
    site: str,
    batch: int,
    *,
    seed: int = 0,
    epochs: int | None = 1,
    mixed_rows: int = MIXED_ROWS,
    block_rows: int = BLOCK_ROWS,
    keep_rest: bool = False,
) -> Iterator[Array]:
    """Arrays [batch, d] of one site. `epochs` None: for ever. Rows that fill no batch come with `keep_rest`."""
    many = joint_batches(
        run, (site,), batch, seed=seed, epochs=epochs, mixed_rows=mixed_rows, block_rows=block_rows, keep_rest=keep_rest
    )
    return (found[site] for found in many)


def joint_batches(
    run: Run,
    sites: Sequence[str],
    batch: int,
    *,
    seed: int = 0,
    epochs: int | None = 1,
    mixed_rows: int = MIXED_ROWS,
    block_rows: int = BLOCK_ROWS,
    keep_rest: bool = False,
) -> Iterator[dict[str, Array]]:
    """As `batches`, of several sites at once: row i of each array is of the same token."""
    if batch < 1 or block_rows < 1 or mixed_rows < 1:
        raise BadInput("batch", batch, "and the rows read and mixed at once must be 1 or more")
    if len(run) < batch and not keep_rest:
        raise BadInput("batch", batch, f"is more than the run's {len(run)} rows", "take a smaller batch")
    return _epochs(run, tuple(sites), batch, seed, epochs, (mixed_rows, block_rows), keep_rest)


def torch_batches(
    run: Run, site: str, batch: int, *, dtype: str = "float32", device: str = "cpu", **options: Any
) -> Iterator[Any]:
    """Tensors [batch, d]; without `epochs` for ever, as trainers expect. `options` are those of `batches`."""
    torch: Any = import_module("torch")  # by name: this package has no torch, its reader's environment has
    options.setdefault("epochs", None)
    kind = getattr(torch, dtype)
    return (_to_torch(torch, found).to(device, kind) for found in batches(run, site, batch, **options))


def jax_batches(run: Run, site: str, batch: int, *, sharding: Any = None, **options: Any) -> Iterator[Any]:
    """jax arrays [batch, d] of the run's type, on the default device or as `sharding` says."""
    import jax

    options.setdefault("epochs", None)
    return (jax.device_put(found, sharding) for found in batches(run, site, batch, **options))


def _to_torch(torch: Any, values: Array) -> Any:
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


class _Room:
    """Rows that are mixed, as bytes [rows, d × size] of each site; used again and again.

    As bytes, because numpy moves values of types that are not its own one at a time; used again, because fresh memory
    costs more than the copy. The first `batch` rows are kept free for those that are left of the group before.
    """

    def __init__(self, run: Run, sites: tuple[str, ...], rows: int, batch: int) -> None:
        size = dtype_of(run.plan.dtype).itemsize
        self._run = run
        self._whole = {site: np.empty((batch + rows, run.width(site) * size), np.uint8) for site in sites}
        self._batch = batch
        self._under_way: list[Future[None]] = []
        self.low = self.high = batch

    def begin(self, threads: ThreadPoolExecutor, group: list[Block]) -> None:
        """Have a group read into the rows after the first `batch`."""
        self.low = self.high = self._batch
        for block in group:
            stop = self.high + block.stop - block.start
            for site, rows in self._whole.items():
                self._under_way.append(threads.submit(_copy, self._run, block, site, rows[self.high : stop]))
            self.high = stop

    def wait(self) -> None:
        for future in self._under_way:
            future.result()
        self._under_way.clear()

    def rows(self, rows: Array) -> dict[str, Array]:
        dtype = dtype_of(self._run.plan.dtype)
        return {site: values.take(rows, axis=0).view(dtype) for site, values in self._whole.items()}

    def keep(self, other: _Room, rows: Array) -> None:
        """Take over rows of another room."""
        self.low = self._batch - len(rows)
        for site, values in self._whole.items():
            values[self.low : self._batch] = other._whole[site].take(rows, axis=0)


def _epochs(
    run: Run,
    sites: tuple[str, ...],
    batch: int,
    seed: int,
    epochs: int | None,
    rows: tuple[int, int],
    keep_rest: bool,
) -> Iterator[dict[str, Array]]:
    mixed_rows, block_rows = rows
    blocks = list(run.blocks(block_rows))
    size = min(mixed_rows + block_rows, len(run))
    room, next_room = (_Room(run, sites, size, batch) for _ in range(2))
    with ThreadPoolExecutor(READS_AT_ONCE, "penstock-extract-batches") as threads:
        for epoch in count() if epochs is None else range(epochs):
            rng = np.random.default_rng([seed, epoch])
            groups = _groups([blocks[at] for at in rng.permutation(len(blocks))], mixed_rows)
            left = np.zeros(0, np.int64)
            group = next(groups, None)
            if group is not None:
                room.begin(threads, group)
            while group is not None:
                group = next(groups, None)
                room.wait()
                order = rng.permutation(room.high - room.low) + room.low
                stop = len(order) // batch * batch
                if group is not None:
                    next_room.begin(threads, group)
                for start in range(0, stop, batch):
                    yield room.rows(order[start : start + batch])
                left = order[stop:]
                if group is not None:
                    next_room.keep(room, left)
                    room, next_room = next_room, room
            if keep_rest and len(left):
                yield room.rows(left)


def _groups(blocks: Iterable[Block], rows: int) -> Iterator[list[Block]]:
    """Blocks that are mixed together: at least so many rows, except at the end."""
    group: list[Block] = []
    size = 0
    for block in blocks:
        group.append(block)
        size += block.stop - block.start
        if size >= rows:
            yield group
            group, size = [], 0
    if group:
        yield group


def _copy(run: Run, block: Block, site: str, to: Array) -> None:
    values = run.block(block, "values", site)
    to[...] = values.view(np.uint8).reshape(len(values), -1)
