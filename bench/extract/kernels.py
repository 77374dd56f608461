"""Every attention kernel of the package on the GPU at hand, against the definition in float32.

`python bench/extract/kernels.py FOLDER`, with src on PYTHONPATH; `h200.py` calls it. CPU tests hold the Pallas kernel
to the definition in its interpreter, and can not run cuDNN's at all: this runs each as `attention.choose` would give it
out, for head sizes, groups, windows and soft caps of the families, on packed rows with padding. A kernel's error may be
1.5 times what the definition itself has in the same half precision. Exits with 1 when one is further off, or not
finite.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import corpus
import jax
import jax.numpy as jnp
import numpy as np

from penstock.extract import attention, attention_cudnn, attention_pallas
from penstock.extract.attention import Attention, Mask

ROWS = 8


class Case(NamedTuple):
    kernel: str
    heads: int
    kv_heads: int
    size: int
    window: int | None = None
    soft_cap: float | None = None
    dtype: str = "bfloat16"


CASES = (
    Case("pallas", 14, 2, 64),
    Case("pallas", 28, 4, 128),
    Case("pallas", 8, 8, 128, dtype="float16"),
    Case("pallas", 16, 8, 128, 1024),
    Case("pallas", 8, 4, 256, 512, 50.0),
    Case("pallas", 8, 4, 256, None, 50.0),
    Case("cudnn-ragged", 16, 16, 80),
    Case("cudnn-ragged", 14, 2, 96),
    Case("cudnn-ragged", 14, 2, 64),
    Case("cudnn-ragged", 28, 4, 128, dtype="float16"),
    Case("cudnn-bias", 16, 16, 80, 300),
    Case("cudnn-bias", 14, 2, 96, 1024),
    Case("cudnn-bias", 28, 4, 128),
)


def made(case: Case) -> Attention:
    if case.kernel == "pallas":
        return Attention("pallas", "", attention_pallas.firsts, attention_pallas.attend)
    if case.kernel == "cudnn-ragged":
        documents = functools.partial(attention_cudnn.ragged, segments_max=corpus.SEGMENTS)
        return Attention("cudnn-ragged", "", documents, attention_cudnn.attend_ragged)
    hidden = functools.partial(attention_cudnn.biases, windows=(case.window,))
    return Attention("cudnn-bias", "", hidden, attention_cudnn.attend_biased)


def measure(case: Case, segments: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(case.size + case.heads), 3)
    shape = (*segments.shape, case.heads, case.size)
    few = (*segments.shape, case.kv_heads, case.size)
    q, k, v = (jax.random.normal(key, size, case.dtype) for key, size in zip(keys, (shape, few, few), strict=True))
    mask = Mask(case.size**-0.5, window=case.window, soft_cap=case.soft_cap)

    def through(way: Attention) -> Any:
        return jax.jit(lambda q, k, v, segments: way(q, k, v, way.segments(segments), mask))

    with jax.default_matmul_precision("highest"):
        whole = through(attention.plain())(*(each.astype(jnp.float32) for each in (q, k, v)), segments)
    real = np.asarray(segments) > 0
    reference = np.asarray(whole)[real]

    def error(found: jax.Array) -> float:
        return float(np.linalg.norm(np.asarray(found, np.float32)[real] - reference) / np.linalg.norm(reference))

    kernel = through(made(case))
    found = kernel(q, k, v, segments)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready([kernel(q, k, v, segments) for _ in range(10)])
        seconds.append((time.perf_counter() - started) / 10)
    ours, definition = error(found), error(through(attention.plain())(q, k, v, segments))
    finite = bool(np.isfinite(np.asarray(found, np.float32)).all())
    return case._asdict() | {
        "error": ours,
        "definition": definition,
        "finite": finite,
        "ms": statistics.median(seconds) * 1e3,
        "holds": finite and ours <= 1.5 * definition,
    }


def main() -> int:
    (batch, _), *_ = corpus.packed(corpus.tokens(1000, 300), ROWS)
    batch.segments[0, -700:] = 0  # a row that is padded for more than a block
    segments = jnp.asarray(batch.segments)
    found = []
    for case in CASES:
        found.append(measure(case, segments))
        print({key: value for key, value in found[-1].items() if value is not None}, flush=True)
    (Path(sys.argv[1]) / "kernels.json").write_text(json.dumps({"cases": found, "jax": jax.__version__}))
    return 0 if all(each["holds"] for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
