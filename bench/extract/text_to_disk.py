"""From text to a sealed run by the product's own worker: read, tokenise, pack, run, hash, write, commit; then re-read.

`ours.py disk` calls `run`. Plan, `ModelCompute` and `Worker` are the product's, with random weights of the true shape
as a Hugging Face directory and units of the size that the product chooses for a large dataset. The clock of a pass
starts when the worker starts (weights loaded, program compiled) and stops when the run is sealed. Afterwards every
object is read back and its checksum compared, on a clock of its own. Roots: the local disk without syncs, also when the
worker waits for each commit; /dev/shm, which is memory; and the disk synced, as the product does it by default, which
the disk itself bounds. Where pyarrow is missing (`arrow` in the result) the index of a unit is JSON, and the run is not
sealed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import corpus
import ml_dtypes
import numpy as np
from typing_extensions import override

from penstock.domain import ledger
from penstock.extract import compute, layout, tensors, work
from penstock.extract import worker as workers
from penstock.extract.calls import Calls
from penstock.extract.config import ModelConfig
from penstock.extract.content import Reading
from penstock.extract.parameters import embedding, final_norm, layer_parameters
from penstock.extract.plan import RunPlan, publish
from penstock.extract.source import Source, SourceSpec
from penstock.extract.tokens import Rules
from penstock.objects.directory import DirectoryObjects

PROCESSES = 8
UNITS = 7  #: about 22 GB with three sites
CHECKERS = 12
WRITERS = 6
ROUNDS = 3  #: of the passes that are compared with a bound or with each other
MEMORY = Path("/dev/shm/penstock-extract")
MEMORY_BYTES = 30 << 30
SECONDS_MAX = 140  #: passes that would begin later are left out, and say so


def make_model(folder: Path, config: ModelConfig) -> None:
    """Random weights of a Qwen2's shape, as a Hugging Face directory."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "model_type": "qwen2",
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.positions_max,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(about))
    drawn = (np.random.default_rng(0).normal(size=1 << 20) * 0.02).astype(ml_dtypes.bfloat16).view(np.uint16)
    ones = np.ones(1, ml_dtypes.bfloat16).view(np.uint16)
    parameters = [("model.", embedding(config)), ("model.", final_norm(config))]
    parameters += [(f"model.layers.{n}.", each) for n in range(len(config.layers)) for each in layer_parameters(config)]
    made = {
        before + source: [np.resize(ones if "norm" in each.name else drawn, each.source_shape).view(ml_dtypes.bfloat16)]
        for before, each in parameters
        for source in each.sources
    }
    (folder / "model.safetensors").write_bytes(tensors.encode(made, {}))


class Watched:
    """The engine, and how long it waited for batches."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.shape, self.small = engine, engine.shape, engine.small
        self.waited_s = 0.0

    def run(self, batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
        def given() -> Iterator[Any]:
            following = iter(batches)
            while True:
                began = time.perf_counter()
                batch = next(following, None)
                self.waited_s += time.perf_counter() - began
                if batch is None:
                    return
                yield batch

        yield from self.engine.run(given())


class Room(threading.Semaphore):
    """Counts how long whoever computes waited for room among the blocks that are to be written."""

    waited_s = 0.0

    @override
    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        began = time.perf_counter()
        found = super().acquire(blocking, timeout)
        self.waited_s += time.perf_counter() - began
        return found


def without_arrow() -> None:
    """An index of the same facts that needs no pyarrow; what reads it is left out."""

    def make_index(pieces: list[layout.Piece]) -> tuple[bytes, list[int]]:
        order = sorted(range(len(pieces)), key=lambda at: (pieces[at].row, layout.first_position(pieces[at])))
        rows = [(pieces[at].row, pieces[at].document, len(pieces[at].tokens)) for at in order]
        return json.dumps(rows).encode(), order

    async def nothing(*_: object) -> None:
        return None

    vars(layout)["make_index"] = make_index
    vars(workers)["seal"] = nothing


async def once(
    root: Path, plan: RunPlan, made: compute.ModelCompute, *, synced: bool, storing_max: int = workers.STORING_MAX
) -> dict[str, Any]:
    calls = Calls(DirectoryObjects(root, synced=synced), random.Random(1))
    await publish(calls, plan)
    settings = workers.Settings(worker="bench", code="bench", storing_max=storing_max)
    told: list[int] = []
    worker = workers.Worker(
        calls,
        plan,
        made,
        settings,
        rng=random.Random(1),
        steady=time.monotonic,
        report=lambda standing: told.append(standing.tokens),
    )
    room = vars(worker._hands)["_room"] = Room(worker._hands._room._value)
    watched: Any = made._engine
    waited = watched.waited_s
    sealed: list[float] = []
    real = workers.seal

    async def seal(*given: Any) -> Any:
        made = await real(*given)
        sealed.append(time.perf_counter())
        return made

    vars(workers)["seal"] = seal
    began, used = time.perf_counter(), os.times()
    await worker.work()
    spent = os.times()
    vars(workers)["seal"] = real
    seconds = sealed[0] - began
    tokens = told[-1]
    return {
        "tokens_s": tokens / seconds,
        "tokens": tokens,
        "seconds": seconds,
        "waited_for_input_s": watched.waited_s - waited,
        "waited_for_writing_s": room.waited_s,
        "cpu_s": spent.user + spent.system - used.user - used.system,
        "units": len(plan.units),
    }


def verify(root: Path, plan: RunPlan, tokens: int) -> dict[str, float]:
    """Re-read all that was committed; gigabytes per second."""
    commits = [layout.decode_commit((root / ledger.commit_path(plan.run, unit.id)).read_bytes()) for unit in plan.units]
    counted = sum(commit.facts.tokens for commit in commits)
    if counted != tokens:
        raise SystemExit(f"the commits have {counted} tokens instead of {tokens}")

    def one(data: ledger.DataObject) -> int:
        found = (root / data.path).read_bytes()
        if not ledger.matches(found, data.checksum):
            raise SystemExit(f"{data.path}: {len(found)} bytes, and not those that were computed")
        return len(found)

    began = time.perf_counter()
    with ThreadPoolExecutor(CHECKERS) as threads:
        size = sum(threads.map(one, (data for commit in commits for data in commit.objects)))
    return {"gb": size / 1e9, "verified_gb_s": size / (time.perf_counter() - began) / 1e9}


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


def touch_memory(gigabytes: int = 48) -> list[float]:
    """Write so much into memory twice; gigabytes a second.

    A lent machine gets its memory from its host as it touches it: what is the first to do so waits for that.
    """
    if shutil.disk_usage(MEMORY.parent).free < gigabytes << 30:
        return []
    MEMORY.mkdir(exist_ok=True)
    block = np.random.default_rng(0).integers(0, 255, 64 << 20, np.uint8)

    def fill(number: int) -> None:
        with (MEMORY / f"touched.{number}").open("wb", buffering=0) as file:
            for _ in range(gigabytes * 16 // CHECKERS):
                file.write(block)

    speeds = []
    for _ in range(2):
        began = time.perf_counter()
        with ThreadPoolExecutor(CHECKERS) as threads:
            list(threads.map(fill, range(CHECKERS)))
        speeds.append(sum(path.stat().st_size for path in MEMORY.iterdir()) / (time.perf_counter() - began) / 1e9)
        shutil.rmtree(MEMORY)
        MEMORY.mkdir()
    print("memory touched", speeds, "GB/s", flush=True)
    return speeds


def planned(folder: Path, config: ModelConfig, sites: str, units: int, unit_rows: int | None) -> RunPlan:
    """The product's plan of so many units, of the size it gives them when there are many."""
    row = 400 * config.width * 2
    unit_rows = unit_rows or work.choose_unit_rows(1 << 40, row, row * (1 + sites.count(",")))
    text, model = folder / "text", folder / "random"
    corpus.write_text(text, units * unit_rows)
    make_model(model, config)
    source = Source.open(SourceSpec(data=(str(text / "corpus.jsonl"),), reading=Reading(column="text", id="id")))
    wish = work.Wish(
        model=str(model),
        tokenizer=str(text),
        source=source,
        sites=sites,
        rules=Rules(width=corpus.WIDTH),
        unit_rows=unit_rows,
    )
    return work.plan_run(wish).plan


def run(
    folder: Path, shape: ModelConfig | None = None, units: int = UNITS, unit_rows: int | None = None
) -> dict[str, Any]:
    """With another shape and number of units also on a machine without a GPU, where it shows that it works."""
    import ours

    began = time.perf_counter()
    arrow = find_spec("pyarrow") is not None
    if not arrow:
        without_arrow()
    plan = planned(folder, shape or ours.SHAPES["0.5b"], ours.SITES["0.5b"], units, unit_rows)
    said: list[str] = []
    made = compute.ModelCompute(plan, compute.Settings(processes=PROCESSES), said.append)
    engine = made._engine
    result: dict[str, Any] = {"said": said, "arrow": arrow, "prepared_s": time.perf_counter() - began}
    result["touched_gb_s"] = touch_memory()
    documents = corpus.tokens(15_000, min(corpus.DOCUMENTS, plan.rows))
    result["model"] = ours.measure(engine, corpus.packed(documents, engine.shape[0]))
    vars(made)["_engine"] = Watched(engine)
    disk = folder / "store"
    # The first pass makes the pool of page-locked memory grow to what waits to be written, once.
    memory = MEMORY if shutil.disk_usage(MEMORY.parent).free > MEMORY_BYTES else None
    passes = (
        ("first", disk, False, 1),
        *[("disk", disk, False, 1)] * ROUNDS,
        *[("memory", memory, True, 1)] * ROUNDS,
        ("disk-one", disk, False, 0),
        ("synced", disk, True, 1),
    )
    for name, where, synced, storing_max in passes:
        if where is None:
            print(f"{name}: left out, {MEMORY.parent} is too small", flush=True)
            continue
        if time.perf_counter() - began > SECONDS_MAX:
            print(f"{name}: left out after {time.perf_counter() - began:.0f} s", flush=True)
            continue
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir(parents=True)
        os.sync()  # no pass pays for what the one before left to be written
        figures = asyncio.run(once(where, plan, made, synced=synced, storing_max=storing_max))
        if name != "first":
            figures |= verify(where, plan, figures["tokens"])
        result.setdefault(name, []).append(figures)
        print(name, figures, flush=True)
        shutil.rmtree(where)
    disk.mkdir(exist_ok=True)
    made._feeder.__exit__()
    return result | write_speed(disk)
