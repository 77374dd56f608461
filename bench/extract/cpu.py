"""Extraction on a CPU: two workers, each pinned to a core, against one of them.

`python bench/extract/cpu.py [--seconds S] [--shared]`. A worker is a process that runs the product's engine over packed
batches of a small model on one core; they share nothing. One on each core, then two. Rates are per second of the clock
and, for machines that others use at the same time, per second of CPU time that a worker was given. Prints one line of
JSON; exits with 1 under 1.8 times by the clock, with `--shared` by CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

BOUND = 1.8
ROWS, WIDTH = 4, 256


def work(core: int, seconds: float) -> None:
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
    sys.stdin.readline()
    began, used, tokens = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        for _found in engine.run(batch for batch, _ in given):
            pass
        tokens += sum(len(doc) for doc in docs)
    print(tokens / (time.perf_counter() - began), tokens / (time.process_time() - used), flush=True)


def rates(cores: list[int], seconds: float) -> list[float]:
    """Tokens/s by the clock and by CPU time of workers on these cores, started together once all are compiled."""
    here = Path(__file__).resolve()
    path = os.pathsep.join((str(here.parent), str(here.parents[2] / "src")))
    command = [sys.executable, str(here), "--seconds", str(seconds), "--core"]
    workers = [
        subprocess.Popen(
            [*command, str(core)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        )
        for core in cores
    ]
    for worker in workers:
        assert worker.stdout is not None
        if worker.stdout.readline() != "ready\n":
            raise SystemExit("a worker did not start")
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    said = [worker.communicate()[0].split() for worker in workers]
    return [sum(float(words[which]) for words in said) for which in (0, 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--core", type=int)
    given = parser.parse_args()
    if given.core is not None:
        work(given.core, given.seconds)
        return 0
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("this needs two cores")
    alone = [rates([core], given.seconds) for core in cores]
    both = rates(cores, given.seconds)
    # Two workers should do what each core does alone: their mean is what one worker does.
    times = [both[which] * len(alone) / sum(each[which] for each in alone) for which in (0, 1)]
    found = {"alone": alone, "both": both, "times": times[0], "times_by_cpu": times[1], "bound": BOUND}
    print(json.dumps(found))
    return 0 if times[1 if given.shared else 0] >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
