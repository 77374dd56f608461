"""How fast a finished run is read in shuffled mini-batches, beside a plain read of the same files.

`python bench/extract/reader.py [--root FOLDER] [--gigabytes G] [--batch N] [--rounds N] [--cores N] [--ways a,b]`, with
this folder and src on PYTHONPATH. The run is written by the product's worker from ready arrays of the 0.5B shape, one
site. `plain` reads its files one after another into one buffer; the others are the product's iterators, one epoch each.
`cold`: the kernel is first told to forget the files, which a disk obeys and /dev/shm cannot. Rounds take turns between
all ways; prints one line of JSON: medians in GB/s of stored bytes, each as a part of `plain`, and GB per second of
processor time, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import path as writer

from penstock import extract
from penstock.extract.plan import make_plan

SITE = "resid_post.12"
BUFFER_BYTES = 8 << 20
WAYS = ("plain", "numpy", "torch bfloat16", "torch float32", "jax")


def write_run(root: Path, gigabytes: float) -> None:
    documents = int(gigabytes * 1e9 / (writer.WIDTH * 2 * 400))
    unit_rows = min(documents, int(writer.UNIT_BYTES / (writer.WIDTH * 2 * 400)))
    plan = make_plan(rows=documents, unit_rows=unit_rows, sites=(SITE,), dtype="bfloat16", work={"bench": "reader"})
    asyncio.run(writer.once(root, plan, writer.FromReady((SITE,), documents), {}))


def files_of(root: Path) -> list[Path]:
    return sorted(root.rglob(f"{SITE}.safetensors"))


def plain(root: Path) -> int:
    buffer = memoryview(bytearray(BUFFER_BYTES))
    seen = 0
    for each in files_of(root):
        with each.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                seen += count
    return seen


def forget(root: Path) -> None:
    gc.collect()  # what is still mapped is not forgotten
    for each in files_of(root):
        with each.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def epoch(root: Path, way: str, batch: int, seed: int) -> int:
    """One epoch of a way: the stored bytes that it has handed out."""
    kind, _, dtype = way.partition(" ")
    with extract.open(str(root)) as run:
        if kind == "numpy":
            found: Any = extract.batches(run, SITE, batch, seed=seed)
        elif kind == "torch":
            found = extract.torch_batches(run, SITE, batch, dtype=dtype, seed=seed, epochs=1)
        else:
            found = extract.jax_batches(run, SITE, batch, seed=seed, epochs=1)
        rows = 0
        for each in found:
            rows += len(each)
            last = each
        if kind == "jax":
            last.block_until_ready()
        return rows * run.width(SITE) * 2


def measured(work: Callable[[], int]) -> tuple[float, float]:
    """Gigabytes per second of time, and of the processor's."""
    began, used = time.perf_counter(), writer.cpu_s()
    size = work() / 1e9
    return size / (time.perf_counter() - began), size / (writer.cpu_s() - used)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm/penstock-reader"))
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=0)
    parser.add_argument("--ways", default=",".join(WAYS))
    given = parser.parse_args()
    if given.cores:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: given.cores]))
    ways = given.ways.split(",")
    shutil.rmtree(given.root, ignore_errors=True)
    given.root.mkdir(parents=True)
    try:
        write_run(given.root, given.gigabytes)
        os.sync()
        rates: dict[str, dict[str, list[tuple[float, float]]]] = {
            cache: {way: [] for way in ways} for cache in ("cold", "warm")
        }
        for way in ways:
            if way not in ("plain", "numpy"):
                import_module(way.partition(" ")[0])
        for number in range(given.rounds):
            for way in ways:
                for cache, found in rates.items():
                    if cache == "cold":
                        forget(given.root)

                    def work(way: str = way, seed: int = number) -> int:
                        if way == "plain":
                            return plain(given.root)
                        return epoch(given.root, way, given.batch, seed)

                    found[way].append(measured(work))
        size = sum(each.stat().st_size for each in files_of(given.root)) / 1e9
    finally:
        shutil.rmtree(given.root)
    result: dict[str, Any] = {"gb": round(size, 2), "cores": len(os.sched_getaffinity(0)), "batch": given.batch}
    for cache, found in rates.items():
        middle = {way: statistics.median(rate for rate, _ in each) for way, each in found.items()}
        processor = {way: round(statistics.median(rate for _, rate in each), 2) for way, each in found.items()}
        result[cache] = {way: round(rate, 2) for way, rate in middle.items()}
        if "plain" in middle:
            result[f"{cache} of plain"] = {way: round(rate / middle["plain"], 2) for way, rate in middle.items()}
        result[f"{cache} per cpu s"] = processor
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
