"""From text to disk: tokenise in processes, pack, run, hash and write, all at once; then read back and verify.

`ours.py disk` calls `run`. Rows of text come through the product's `feed`, batches go through its engine, and the
results leave as one safetensors file per site and unit of 1,024 documents (730 MB), hashed and written by threads
straight from page-locked memory. The clock starts with the first tokenised document and stops when the last file is
hashed, written and closed (not synced: the kernel writes on while there is memory). Then each file is read back and its
hash compared, on a clock of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import corpus
import numpy as np

from penstock.extract import feed, packing
from penstock.extract.content import Reading
from penstock.extract.shapes import parse_sites
from penstock.extract.source import Source, SourceSpec
from penstock.extract.tokens import Rules

UNIT = 1024  #: documents, packed together
PROCESSES = 8
WRITERS = 6
LANES = 4  #: units whose files are hashed at once, one thread for each file
CHECKERS = 12
BATCHES_HELD = 12  #: results in page-locked memory that are not written yet
HEADER = 512  #: bytes; a safetensors header may end in spaces
BLOCK = 8 << 20


@dataclass
class File:
    """One site of one unit; its rows are known before the first of them is computed."""

    path: Path
    rows: int
    width: int
    fd: int = -1
    at: int = HEADER
    digest: Any = field(default_factory=hashlib.sha256)

    def open(self) -> None:
        size = self.rows * self.width * 2
        facts = {"acts": {"dtype": "BF16", "shape": [self.rows, self.width], "data_offsets": [0, size]}}
        header = (HEADER - 8).to_bytes(8, "little") + json.dumps(facts).encode().ljust(HEADER - 8)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.pwrite(self.fd, header, 0)
        self.digest.update(header)

    def hash(self, parts: Sequence[Any]) -> None:
        for part in parts:
            self.digest.update(part)

    def verify(self) -> int:
        """Read all of it back; the number of bytes."""
        digest, room, at = hashlib.sha256(), memoryview(bytearray(BLOCK)), 0
        while got := os.preadv(self.fd, [room], at):
            digest.update(room[:got])
            at += got
        os.close(self.fd)
        if at != HEADER + self.rows * self.width * 2 or digest.digest() != self.digest.digest():
            raise SystemExit(f"{self.path}: {at} bytes, {self.rows} rows: not what was computed")
        return at


def write(fd: int, offset: int, parts: list[Any]) -> None:
    """All parts, one after another, at their place; the list is used up."""
    while parts:
        done = os.pwritev(fd, parts[:64], offset)
        offset += done
        while parts and done >= len(parts[0]):
            done -= len(parts.pop(0))
        if done:
            parts[0] = parts[0][done:]


class Row(NamedTuple):
    """What a row of a batch holds: its unit, that unit's tokens in all, and its own."""

    unit: int
    total: int
    used: int


class Store:
    """Where results go: files by unit and site, threads that hash and write, and how many results may wait."""

    def __init__(self, folder: Path, sites: list[str], width: int) -> None:
        self.folder, self.sites, self.width = folder, sites, width
        self.files: dict[tuple[int, str], File] = {}
        self.writers = ThreadPoolExecutor(WRITERS, "write")
        # A file is hashed in order: always by the same thread.
        self.lanes = [ThreadPoolExecutor(1, "hash") for _ in range(LANES * len(sites))]
        self.room = threading.Semaphore(BATCHES_HELD)
        self.waited_s = 0.0
        self.pending: list[Future[None]] = []

    def take(self, found: dict[str, Any], rows: list[Row]) -> None:
        began = time.perf_counter()
        self.room.acquire()
        self.waited_s += time.perf_counter() - began
        futures: list[Future[None]] = []
        for number, (site, values) in enumerate(found.items()):
            flat = values.view(np.uint8)
            for unit, total in dict.fromkeys((row.unit, row.total) for row in rows):
                parts = [memoryview(flat[n, : row.used].reshape(-1)) for n, row in enumerate(rows) if row.unit == unit]
                file = self.file(unit, total, site)
                at, file.at = file.at, file.at + sum(len(part) for part in parts)
                futures.append(self.lanes[unit % LANES * len(self.sites) + number].submit(file.hash, tuple(parts)))
                futures.append(self.writers.submit(write, file.fd, at, parts))
        self.pending += futures
        left = len(futures)
        lock = threading.Lock()

        def done(_: Future[None]) -> None:
            nonlocal left
            with lock:
                left -= 1
                if not left:
                    self.room.release()

        for future in futures:
            future.add_done_callback(done)

    def file(self, unit: int, total: int, site: str) -> File:
        if (unit, site) not in self.files:
            self.files[unit, site] = File(self.folder / f"{site}.{unit}.safetensors", total, self.width)
            self.files[unit, site].open()
        return self.files[unit, site]

    def finish(self) -> None:
        for future in self.pending:
            future.result()

    def verify(self) -> float:
        """Gigabytes per second, read back by all checkers."""
        began = time.perf_counter()
        with ThreadPoolExecutor(CHECKERS) as threads:
            size = sum(threads.map(File.verify, self.files.values()))
        return size / (time.perf_counter() - began) / 1e9


class Feeder(threading.Thread):
    """Reads passages, packs a unit of them, and keeps batches ready; a batch may hold rows of two units."""

    def __init__(self, source: Source, tokenizer: str, rows: int, documents: int) -> None:
        super().__init__(daemon=True)
        self.ready: queue.Queue[tuple[Any, list[Row]] | None] = queue.Queue(8)
        self.order = feed.Order(source=source, rules=Rules(width=corpus.WIDTH), tokenizer=tokenizer)
        self.rows, self.documents, self.tokens = rows, documents, 0
        self.started_at = self.first_batch_at = 0.0
        self.failed: Exception | None = None

    def run(self) -> None:
        try:
            held: list[tuple[int, int, list[Any]]] = []
            for unit, documents in enumerate(self.units()):
                lengths = [len(each) for each in documents]
                packed = packing.pack(lengths, corpus.WIDTH, corpus.SEGMENTS, UNIT)
                held += [(unit, sum(lengths), [documents[at] for at in row]) for row in packed]
                while len(held) >= self.rows:
                    self.put(held[: self.rows])
                    held = held[self.rows :]
            if held:
                self.put(held)
        except Exception as error:  # noqa: BLE001 (told by the reader of the queue)
            self.failed = error
        self.ready.put(None)

    def units(self) -> Iterator[list[Any]]:
        held: list[Any] = []
        for passage in feed.passages(self.order, 0, self.documents, processes=PROCESSES):
            self.started_at = self.started_at or time.perf_counter()
            held.append(passage.tokens)
            self.tokens += len(passage.tokens)
            if len(held) == UNIT:
                yield held
                held = []
        if held:
            yield held

    def put(self, rows: list[tuple[int, int, list[Any]]]) -> None:
        documents = [each for _, _, row in rows for each in row]
        numbers = iter(range(len(documents)))
        places = [[next(numbers) for _ in row] for _, _, row in rows]
        ((batch, _),) = packing.batches(documents, places, self.rows, corpus.WIDTH)
        self.first_batch_at = self.first_batch_at or time.perf_counter()
        self.ready.put((batch, [Row(unit, total, sum(len(each) for each in row)) for unit, total, row in rows]))

    def batches(self, rows: queue.Queue[list[Row]]) -> Iterator[Any]:
        while (given := self.ready.get()) is not None:
            rows.put(given[1])
            yield given[0]
        if self.failed is not None:
            raise self.failed


def write_speed(folder: Path, gigabytes: int = 6) -> dict[str, float]:
    """What the disk takes from as many threads of plain writes, and until it is on the disk."""
    block = np.random.default_rng(0).integers(0, 255, 64 << 20, np.uint8)
    paths = [folder / f"plain.{n}" for n in range(WRITERS)]

    def fill(path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(gigabytes * 16 // WRITERS):
                file.write(block)

    began = time.perf_counter()
    with ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(fill, paths))
    cached = time.perf_counter() - began
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    synced = time.perf_counter() - began
    written = sum(path.stat().st_size for path in paths) / 1e9
    for path in paths:
        path.unlink()
    return {"disk_cached_gb_s": written / cached, "disk_synced_gb_s": written / synced}


def run(folder: Path) -> dict[str, Any]:
    import ours

    text, where = folder / "text", folder / "store"
    corpus.write_text(text, 3 * corpus.DOCUMENTS)
    source = Source.open(SourceSpec(data=(str(text / "corpus.jsonl"),), reading=Reading(column="text", id="id")))
    config, sites = ours.SHAPES["0.5b"], parse_sites(ours.SITES["0.5b"])
    engine = ours.engine_of(config, sites, ours.random_params(config, sites))
    result: dict[str, Any] = {"model": ours.measure(engine, corpus.packed(corpus.tokens(151_000), ours.ROWS))}
    # The first pass makes the pool of page-locked memory grow to what waits for the disk, which takes a second, once.
    passes = (("first", corpus.DOCUMENTS), ("disk", 2 * corpus.DOCUMENTS), ("sustained", 3 * corpus.DOCUMENTS))
    for name, documents in passes:
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        result[name] = once(where, source, documents, text, engine, [site.name for site in sites], config.width)
        print(name, result[name], flush=True)
    shutil.rmtree(where)
    where.mkdir()
    return result | write_speed(where)


def once(
    where: Path, source: Source, documents: int, text: Path, engine: Any, sites: list[str], width: int
) -> dict[str, Any]:
    store = Store(where, sites, width)
    feeder = Feeder(source, str(text), engine.shape[0], documents)
    rows: queue.Queue[list[Row]] = queue.Queue()
    feeder.start()
    for found in engine.run(feeder.batches(rows)):
        store.take(found, rows.get())
    run_done = time.perf_counter()
    store.finish()
    seconds = time.perf_counter() - feeder.started_at
    verified = store.verify()
    check_format(where, store.sites, width, feeder.tokens)
    return {
        "tokens_s": feeder.tokens / seconds,
        "tokens": feeder.tokens,
        "seconds": seconds,
        "run_s": run_done - feeder.started_at,
        "first_batch_s": feeder.first_batch_at - feeder.started_at,
        "writers_full_s": store.waited_s,
        "gb_s": feeder.tokens * width * 2 * len(sites) / seconds / 1e9,
        "verified_gb_s": verified,
        "files": len(store.files),
    }


def check_format(where: Path, sites: list[str], width: int, tokens: int) -> None:
    """The files are what other tools call safetensors, and hold as many rows as tokens were fed."""
    from safetensors import safe_open

    for site in sites:
        rows = 0
        for path in where.glob(f"{site}.*.safetensors"):
            with safe_open(path, "np") as file:
                size = file.get_slice("acts").get_shape()
            rows += size[0]
            if size[1] != width:
                raise SystemExit(f"{path}: {size}")
        if rows != tokens:
            raise SystemExit(f"{site}: {rows} rows for {tokens} tokens")
