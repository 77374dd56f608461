"""How a reader gets at rows: mapped from a directory's files, or fetched from a bucket by ranges of bytes.

`reader` uses it and nobody else. It has plain calls that any thread may make: an event loop of its own, in a thread of
its own, speaks to the bucket. Rows that are mapped are not copied until somebody uses them. It must not write.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from penstock.extract import tensors
from penstock.extract.calls import Calls
from penstock.extract.tensors import Array, Tensor
from penstock.objects.directory import DirectoryObjects
from penstock.ports.objects import Damaged

T = TypeVar("T")

#: Enough for any header of ours; one request then finds a tensor.
BEGINNING_BYTES: Final = 4096
MAPS_MAX: Final = 256
ADVISED_BYTES: Final = 1 << 20  #: for less, a fault fetches enough


class Closed(ValueError):
    """Reading from a run that was closed, as `open` files say it."""

    def __init__(self) -> None:
        super().__init__("the run is closed; read it, and use iterators over it, inside of its `with`")


class Loop:
    """An event loop in a daemon thread, for callers that have none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-extract-reader", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self.closed = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self.closed:
                work.close()
                raise Closed
            answer = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return answer.result()
        except CancelledError as error:
            raise Closed from error

    def close(self) -> None:
        """Those who wait for an answer get an error instead: nobody would ever give them one."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Rows:
    """Rows of tensors in safetensors objects of one root."""

    def __init__(self, calls: Calls, loop: Loop) -> None:
        self._calls = calls
        self._loop = loop
        self._root = calls.objects.root if isinstance(calls.objects, DirectoryObjects) else None
        self._map = lru_cache(MAPS_MAX)(_map)
        self._tensors: dict[str, dict[str, Tensor]] = {}

    def read(self, path: str, name: str, start: int, stop: int) -> Array:
        """Rows `start` to `stop` of a tensor. Those of a directory are a view of the file."""
        if self._loop.closed:
            raise Closed
        tensor = self._tensor(path, name)
        if not 0 <= start <= stop <= tensor.shape[0]:
            raise IndexError(f"{path}: rows {start}:{stop} of {tensor.shape[0]}")
        low, high = tensor.start + start * tensor.row_bytes, tensor.start + stop * tensor.row_bytes
        if low == high:
            return np.zeros((0, *tensor.shape[1:]), tensors.dtype_of(tensor.dtype))
        if self._root is not None:
            raw: Any = _mapped(self._map(self._root / path), low, high)
        else:
            raw = self._loop.run(self._calls.read_range(path, low, high))
        if raw is None or len(raw) != high - low:
            raise Damaged(f"{path}: rows {start}:{stop} are not there; `tpu extract verify` tells what is missing")
        flat: Array = np.frombuffer(raw, np.uint8)
        return flat.view(tensors.dtype_of(tensor.dtype)).reshape(stop - start, *tensor.shape[1:])

    def _tensor(self, path: str, name: str) -> Tensor:
        found = self._tensors.get(path)
        if found is None:
            beginning = self._loop.run(self._calls.read_range(path, 0, BEGINNING_BYTES)) or b""
            stop = tensors.header_stop(beginning, path)
            if stop > len(beginning):
                beginning = self._loop.run(self._calls.read_range(path, 0, stop)) or b""
            found = self._tensors[path] = tensors.decode_header(beginning, path)[0]
        if name not in found:
            raise Damaged(f"{path}: has no tensor {name}")
        return found[name]


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _mapped(whole: mmap.mmap, low: int, high: int) -> memoryview:
    """Bytes of a file. The kernel is told what is wanted: a fault alone would fetch a few pages of it at a time."""
    page = low // mmap.PAGESIZE * mmap.PAGESIZE
    if high - low >= ADVISED_BYTES and high <= len(whole):
        whole.madvise(mmap.MADV_WILLNEED, page, high - page)
    return memoryview(whole)[low:high]
