"""What a step takes of a GPU's memory, against the estimate by which rows are chosen; and too little memory.

`python bench/extract/fits.py`, on a machine with an NVIDIA GPU and JAX; about a minute. Cases of 7B and 0.5B shapes
run in processes of their own, each with a share of the GPU's memory: `room` chooses rows and `prepare` makes the step,
as a worker does, and then the highest use that JAX counted is set beside the estimate. `forced` gives `prepare` four
times the rows that were chosen, so that memory does run out and rows are halved; `refused` has room for nothing.
Weights are ones: drawing random ones would take more memory than a step does. Prints a table; exits with 1 when an
estimate is more than a quarter off or a case does not end as it should. `--tiny` shows on any machine that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
OFF = 0.25
GIB = 2**30
STEPS = 4  #: that are run after the rehearsal, with as many under way as a worker has
#: name: shape, sites, share of the GPU's memory
CASES = {
    "0.5b": ("0.5b", "resid_post:6,12,18", 0.75),
    "7b": ("7b", "resid_post:7,14,21", 0.75),
    "7b all": ("7b", "resid_post:all", 0.2),
    "7b all forced": ("7b", "resid_post:all", 0.2),
    "7b all refused": ("7b", "resid_post:all", 0.08),
}


def case(name: str, tiny: bool) -> dict[str, Any]:
    import corpus
    import jax
    import jax.numpy as jnp
    import ours

    from penstock.extract.capture import arrange
    from penstock.extract.engine import prepare, room
    from penstock.extract.fit import small_rows, step_rows
    from penstock.extract.parameters import Parameter
    from penstock.extract.shapes import parse_sites
    from penstock.extract.weights import assemble

    which, text, _ = CASES[name]
    config, width = ours.SHAPES[which], corpus.WIDTH
    if tiny:
        config, width, text = ours.shape(100, 64, 128, 8, 4, 2, 16), 128, "resid_post:1,3"
    sites = parse_sites(text, len(config.layers))
    device = jax.devices()[0]
    wished = step_rows("gpu", corpus.WIDTH)
    found = room(config, sites, [device], dtype="bfloat16", rows=wished, width=width)
    told: dict[str, Any] = {"limit": found.limit, "wished": wished, "chosen": found.rows}
    if name.endswith("refused"):
        return told | {"possible": found.possible, "said": [str(found.refusal())]}

    def make(tensor: Parameter, layers: Sequence[int] | None) -> jax.Array:
        return jnp.ones((*(() if layers is None else (len(layers),)), *tensor.shape), jnp.bfloat16)

    rows = min(wished, 4 * found.rows) if name.endswith("forced") else found.rows
    began = time.perf_counter()
    engine = prepare(
        config,
        sites,
        assemble(config, arrange(config, sites), make),
        dtype="bfloat16",
        rows=rows,
        width=width,
        small=small_rows(device.platform, rows, 1),
        segments_max=corpus.SEGMENTS,
    )
    prepared = time.perf_counter() - began
    docs = [doc[:width] for doc in corpus.tokens(config.vocab, 1024)]
    places = corpus.pack([len(doc) for doc in docs], width, corpus.SEGMENTS, len(docs))
    given = list(corpus.batches(docs, places, engine.shape[0], width))[:STEPS]
    steps = sum(1 for _ in engine.run(batch for batch, _ in given))
    taken = room(config, sites, [device], dtype="bfloat16", rows=engine.shape[0], width=width)
    stats = device.memory_stats() or {}
    return told | {
        "asked": rows,
        "rows": engine.shape[0],
        "small": engine.small,
        "steps": steps,
        "estimate": taken.memory_wished.total,
        "peak": stats.get("peak_bytes_in_use"),
        "prepared_s": prepared,
        "said": list(engine.said),
    }


def wrong(name: str, told: dict[str, Any]) -> str:
    """What is not as it should be."""
    if name.endswith("refused"):
        return "was possible" if told["possible"] else ""
    if name.endswith("forced"):
        # How far memory was short is the matter here; what was tried before counts in the highest use.
        return "" if told["rows"] < told["asked"] else "rows were not halved"
    if "all" in name and told["chosen"] >= told["wished"]:
        return "rows were not reduced"
    off = told["estimate"] / told["peak"] - 1
    return f"the estimate is {off:+.0%} off" if abs(off) > OFF else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if given.case is not None:
        print(json.dumps(case(given.case, given.tiny)))
        return 0
    path = os.pathsep.join((str(HERE.parent), str(HERE.parents[2] / "src"), os.environ.get("PYTHONPATH", "")))
    print(f"{'case':<15} {'limit':>7} {'rows':>9} {'estimate':>9} {'peak':>7} {'ratio':>6} {'made in':>8}  (GiB, s)")
    bad = 0
    for name, (_, _, share) in CASES.items():
        environment = os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_MEM_FRACTION": str(share)}
        words = [sys.executable, str(HERE), "--case", name, *(["--tiny"] if given.tiny else [])]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            print(f"{name:<15} failed: {done.stderr.strip()[-2000:]}")
            bad += 1
            continue
        told = json.loads(done.stdout.splitlines()[-1])
        sizes = [told.get(key) for key in ("limit", "estimate", "peak")]
        limit, estimate, peak = ("-" if size is None else f"{size / GIB:.2f}" for size in sizes)
        ratio = f"{sizes[1] / sizes[2]:.2f}" if sizes[1] and sizes[2] else "-"
        rows = f"{told.get('asked', told['wished'])}->{told.get('rows', 0)}"
        seconds = f"{told.get('prepared_s', 0):.1f}"
        said = "" if given.tiny else wrong(name, told)
        figures = f"{limit:>7} {rows:>9} {estimate:>9} {peak:>7} {ratio:>6} {seconds:>8}"
        print(f"{name:<15} {figures}  {said or 'as it should be'}", flush=True)
        for line in told["said"]:
            print(f"    {line}")
        bad += bool(said)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
