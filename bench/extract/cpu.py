"""Extraction on a CPU: two workers, each pinned to a core, against one of them.

`python bench/extract/cpu.py [--seconds S] [--rounds N] [--shared]`. A worker is a process that runs the product's
engine over packed batches of a small model on one core, to which it and all its threads are pinned before any is made;
they share nothing. In each round one works, then the other, then both: what comes and goes on the machine strikes all
three alike, and the middle one of the rounds' ratios counts. Rates are per second of the clock and, for machines that
others use at the same time, per second of CPU time that a worker was given. Prints one line of JSON; exits with 1 under
1.8 times by the clock, with `--shared` by CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

BOUND = 1.8
ROWS, WIDTH = 4, 256


def work(core: int) -> None:
    os.sched_setaffinity(0, {core})
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    import corpus
    import ours

    from penstock.extract.engine import prepare
    from penstock.extract.packing import batches, pack
    from penstock.extract.shapes import parse_sites

    config, sites = ours.shape(8000, 256, 704, 6, 8, 2, 32), parse_sites("resid_post:1,3,5")
    engine = prepare(
        config, sites, ours.random_params(config, sites, "float32"), dtype="float32", rows=ROWS, width=WIDTH
    )
    docs = [doc[:WIDTH] for doc in corpus.tokens(8000, 64)]
    places = pack([len(doc) for doc in docs], WIDTH, corpus.SEGMENTS, len(docs))
    given = list(batches(docs, places, ROWS, WIDTH))
    for _ in engine.run(batch for batch, _ in given[:2]):
        pass
    print("ready", flush=True)
    for line in sys.stdin:
        seconds = float(line)
        began, used, tokens = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < seconds:
            for _found in engine.run(batch for batch, _ in given):
                pass
            tokens += sum(len(doc) for doc in docs)
        print(tokens / (time.perf_counter() - began), tokens / (time.process_time() - used), flush=True)


class Worker:
    """One pinned process, compiled and waiting to be told for how long to work."""

    def __init__(self, core: int) -> None:
        here = Path(__file__).resolve()
        path = os.pathsep.join((str(here.parent), str(here.parents[2] / "src")))
        self.process = subprocess.Popen(
            [sys.executable, str(here), "--core", str(core)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        )

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def tell(self, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def rates(workers: list[Worker], seconds: float) -> list[float]:
    """Tokens/s by the clock and by CPU time of these workers, working at the same time."""
    for worker in workers:
        worker.tell(seconds)
    said = [worker.said().split() for worker in workers]
    return [sum(float(words[which]) for words in said) for which in (0, 1)]


def round_of(workers: list[Worker], seconds: float) -> dict[str, list[float]]:
    alone = [rates([worker], seconds) for worker in workers]
    both = rates(workers, seconds)
    # Two workers should do what each core does alone: their mean is what one worker does.
    times = [both[which] * len(alone) / sum(each[which] for each in alone) for which in (0, 1)]
    return {"alone": [each[0] for each in alone], "both": both, "times": times}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--core", type=int)
    given = parser.parse_args()
    if given.core is not None:
        work(given.core)
        return 0
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("this needs two cores")
    workers = [Worker(core) for core in cores]
    if [worker.said() for worker in workers] != ["ready\n"] * len(workers):
        raise SystemExit("a worker did not start")
    rounds = [round_of(workers, given.seconds) for _ in range(given.rounds)]
    for worker in workers:
        worker.end()
    by_clock, by_cpu = (statistics.median(each["times"][which] for each in rounds) for which in (0, 1))
    print(json.dumps({"rounds": rounds, "times": by_clock, "times_by_cpu": by_cpu, "bound": BOUND}))
    return 0 if (by_cpu if given.shared else by_clock) >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
