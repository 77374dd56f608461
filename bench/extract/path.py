"""The product's worker with everything but the model: how many gigabytes a second its own processor work allows.

`python bench/extract/path.py [--root FOLDER] [--gigabytes G] [--sites K] [--width D] [--objects BYTES] [--from
ready|text] [--device TOKENS] [--cores N] [--settings JSON] [--verify]`, with this folder and src on PYTHONPATH. Claims,
leases, layout, hashes, files, commits, seal and sweep are the product's; a stand-in for the engine hands over ready
arrays of the 0.5B shape as fast as they are taken. `ready` leaves reading, tokenising and packing out, too; with `text`
they are the product's. `--device TOKENS` (with `text`) is a device of so many tokens a second behind the product's
engine, with its queue and its steps under way: two processors and 112,500 tokens stand in the same proportion as an
H200's 16 and its 900,000, and a smaller width leaves time for more of them. Prints one line of JSON; `gb_per_cpu_s` is
of this process, without those that tokenise; `share` is of the device's rate, `idle_s` how long the device had nothing
to do between its first step and its last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corpus
import ml_dtypes
import msgspec
import numpy as np
from typing_extensions import override

from penstock.extract import compute, fit, work
from penstock.extract.calls import Calls
from penstock.extract.content import Reading
from penstock.extract.engine import Engine, Queue
from penstock.extract.layout import Piece
from penstock.extract.plan import RunPlan, make_plan, publish
from penstock.extract.source import Source, SourceSpec
from penstock.extract.tokens import Rules, Tokenizer
from penstock.extract.verify import verify
from penstock.extract.worker import Settings, Worker
from penstock.objects.addresses import open_address

ROWS = 32
SITES = ("resid_post.6", "resid_post.12", "resid_post.18")
READY = 4  #: batches of results that the stand-in hands out in turn


class StandIn:
    """As the engine, for whoever asks it to run batches."""

    def __init__(self, sites: Iterable[str], width: int) -> None:
        self.shape = (ROWS, corpus.WIDTH)
        self.small = ROWS // fit.SMALLER
        rng = np.random.default_rng(0)
        # Bits of numbers between 0.5 and 2, of either sign.
        self.ready = [
            {
                site: (rng.integers(0, 1 << 8, (ROWS, corpus.WIDTH, width), np.uint16) + np.uint16(0x3F00)).view(
                    ml_dtypes.bfloat16
                )
                for site in sites
            }
            for _ in range(READY)
        ]

    def run(self, batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
        for number, _ in enumerate(batches):
            yield self.ready[number % READY]


class Due:
    """A result that arrives at its time."""

    sharding = SimpleNamespace(memory_kind="")

    def __init__(self, values: Any, at: float) -> None:
        self._values, self._at = values, at

    def block_until_ready(self) -> None:
        time.sleep(max(0.0, self._at - time.monotonic()))

    def __array__(self, dtype: object = None, copy: object = None) -> Any:
        return self._values


class Paced(Engine):
    """The product's engine over a device that takes its steps one after the other, each its time."""

    def __init__(self, sites: Iterable[str], width: int, tokens_s: float) -> None:
        made = StandIn(sites, width)
        self.shape, self.small, self._ready = made.shape, made.small, made.ready
        self._in_flight = fit.IN_FLIGHT
        self._queue = Queue(fit.IN_FLIGHT)
        self._tokens_s = tokens_s
        self._turn = threading.Lock()
        self._steps_made = 0
        self._free_at = 0.0
        self.first_at = 0.0
        self.idle_s = 0.0  #: after its first step

    @override
    def _start(self, batch: Any) -> Any:
        with self._turn:
            now = time.monotonic()
            if self._steps_made:
                self.idle_s += max(0.0, now - self._free_at)
            else:
                self.first_at = now
            self._free_at = max(self._free_at, now) + batch.tokens.size / self._tokens_s
            self._steps_made += 1
            found, rows = self._ready[self._steps_made % READY], len(batch.tokens)
            return {site: Due(values[:rows], self._free_at) for site, values in found.items()}


class FromText(compute.ModelCompute):
    """The product's own, but for the model."""

    width = 0
    device: float | None = None  #: tokens a second; None: ready at once

    @override
    def _begin(self) -> Any:
        sites = self._plan.sites
        return StandIn(sites, self.width) if self.device is None else Paced(sites, self.width, self.device)


class FromReady:
    """Documents of the corpus' lengths, packed beforehand."""

    def __init__(self, sites: tuple[str, ...], width: int, documents: int) -> None:
        self.engine = StandIn(sites, width)
        self.lengths = corpus.lengths(documents)

    def __call__(self, plan: RunPlan, unit: Any) -> Iterator[Piece]:
        row, column, found = 0, 0, self.engine.ready[0]
        for at in range(unit.start, unit.stop):
            length = self.lengths[at]
            if column + length > corpus.WIDTH:
                row, column = (row + 1) % ROWS, 0
            here = slice(column, column + length)
            column += length
            yield Piece(
                at, f"doc-{at}", np.arange(length, dtype=np.int32), {s: found[s][row, here] for s in plan.sites}
            )


def text_plan(folder: Path, documents: int, unit_rows: int, sites: tuple[str, ...]) -> RunPlan:
    corpus.write_text(folder, documents)
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"nothing")
    reading = Reading(column="text", id="id")
    made = work.Work(
        model=str(model),
        files=work.fingerprints(str(model)),
        tokenizer=str(folder),
        tokenizer_sha256=Tokenizer.open(str(folder)).fingerprint,
        source=Source.open(SourceSpec(data=(str(folder / "corpus.jsonl"),), reading=reading)),
        rules=Rules(width=corpus.WIDTH),
    )
    return make_plan(rows=documents, unit_rows=unit_rows, sites=sites, dtype="bfloat16", work=msgspec.to_builtins(made))


async def once(root: Path, plan: RunPlan, compute_: Any, more: dict[str, Any]) -> dict[str, float]:
    objects, _ = open_address("root", str(root), os.environ)
    calls = Calls(objects, random.Random(1))
    await publish(calls, plan)
    settings = Settings(worker="bench", code="bench", **more)
    worker = Worker(calls, plan, compute_, settings, rng=random.Random(1), steady=time.monotonic)
    began, used = time.monotonic(), cpu_s()
    await worker.work()
    found = {"seconds": time.monotonic() - began, "cpu_s": cpu_s() - used}
    device = getattr(compute_, "_engine", None)
    if isinstance(device, Paced):
        found |= {
            "first_step_s": device.first_at - began,
            "idle_s": device.idle_s,
            "after_last_step_s": time.monotonic() - device._free_at,
        }
    return found


def cpu_s() -> float:
    """Of this process and its threads."""
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm/penstock-path"))
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--objects", type=int, default=1 << 30, help="bytes of one object, which make a unit's size")
    parser.add_argument("--from", dest="source", choices=("ready", "text"), default="ready")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--cores", type=int, default=0)
    parser.add_argument("--settings", default="{}", help="more of the worker's settings, as JSON")
    parser.add_argument("--device", type=float, help="tokens a second")
    parser.add_argument("--verify", action="store_true")
    given = parser.parse_args()
    if given.cores:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: given.cores]))
    sites = tuple(f"resid_post.{layer}" for layer in range(given.sites))
    documents = int(given.gigabytes * 1e9 / (given.sites * given.width * 2 * 400))
    unit_rows = min(documents, int(given.objects / (given.width * 2 * 400)))
    shutil.rmtree(given.root, ignore_errors=True)
    given.root.mkdir(parents=True)
    FromText.device, FromText.width = given.device, given.width
    if given.source == "ready":
        plan = make_plan(rows=documents, unit_rows=unit_rows, sites=sites, dtype="bfloat16", work={"bench": "path"})
        made: Any = FromReady(sites, given.width, documents)
    else:
        plan = text_plan(given.root / "in", documents, unit_rows, sites)
        made = FromText(plan, compute.Settings(processes=given.processes), lambda _: None)
    out = given.root / "out"
    found = asyncio.run(once(out, plan, made, json.loads(given.settings)))
    if given.source == "text":
        made._feeder.__exit__()
    size = sum(path.stat().st_size for path in out.rglob("*.safetensors")) / 1e9
    result = found | {
        "gb": size,
        "gb_s": size / found["seconds"],
        "gb_per_cpu_s": size / found["cpu_s"],
        "tokens_s": size * 1e9 / (given.sites * given.width * 2) / found["seconds"],
        "units": len(plan.units),
        "cores": len(os.sched_getaffinity(0)),
    }
    if given.device:
        result["share"] = result["tokens_s"] / given.device
    if given.verify:
        began = time.perf_counter()
        objects, _ = open_address("root", str(out), os.environ)
        checked = asyncio.run(verify(Calls(objects, random.Random(1)), plan))
        if checked.problems:
            raise SystemExit(f"{checked.problems[:3]}")
        result["verified_gb_s"] = size / (time.perf_counter() - began)
    shutil.rmtree(given.root)
    print(json.dumps({key: round(value, 3) for key, value in result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
