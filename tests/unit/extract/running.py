"""Runs Penstock's model over the documents of `reference` in both layouts, and judges it against Hugging Face's values.

Both kinds of parity test use it, so that golden and live values are compared in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import numpy.typing as npt

from penstock.extract.attention import plain
from penstock.extract.config import ModelConfig, load_config
from penstock.extract.fused import fuse
from penstock.extract.model import make_step
from penstock.extract.shapes import PackedBatch, Site
from penstock.extract.weights import load_weights
from tests.unit.extract.reference import Floats, all_sites, error, packed, padded, rows_of, worst_token

WHOLE_ERROR_MAX: Final = 1e-5  #: of any token in float32
ROUNDED_ERROR_MAX: Final = 1.5  #: in bfloat16, times Hugging Face's own

QUICKLY: Final = {"xla_backend_optimization_level": 0}  #: compiled in half the time; the arithmetic is the same

Docs = Sequence[npt.NDArray[np.int32]]
Layout = Callable[[Docs], tuple[PackedBatch, list[tuple[int, int]]]]

LAYOUTS: Final[dict[str, Layout]] = {"padded": padded, "packed": packed}


class Running:
    """One model compiled for some sites; the layouts and other weights of the same shapes share the program."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        *,
        sites: Sequence[Site] | None = None,
        config: ModelConfig | None = None,
        options: Mapping[str, Any] | None = None,
        fused: bool = False,
    ) -> None:
        """`fused`: with the projections joined as the engine joins them where there is no mesh."""
        self.config = config or load_config(str(folder))
        self.sites = tuple(sites or all_sites(len(self.config.layers)))
        self.dtype = dtype
        step = make_step(self.config, self.sites, attention=plain(), dtype=dtype)
        self.step = jax.jit(step, compiler_options=dict(options or {}))
        self.fused = fused
        self.load(folder, self.config)

    def load(self, folder: Path, config: ModelConfig | None = None) -> None:
        """Another model of the same shapes; the program, which knows nothing of heads, stays."""
        self.config = config or load_config(str(folder))
        params = load_weights(str(folder), self.config, self.sites, self.dtype)
        self.params = fuse(params) if self.fused else params

    def __call__(self, docs: Docs, layout: str) -> dict[str, Floats]:
        """By site name, the vectors of all documents one after another."""
        batch, places = LAYOUTS[layout](docs)
        found = self.step(self.params, batch.tokens, batch.positions, batch.segments)
        assert all(str(value.dtype) == self.dtype for value in found.values())
        return {name: rows_of(np.asarray(value), places) for name, value in found.items()}


def check_whole(ours: Mapping[str, Floats], theirs: Mapping[str, Floats]) -> None:
    off = {name: worst_token(values, theirs[name]) for name, values in ours.items()}
    wrong = {name: each for name, each in off.items() if not each <= WHOLE_ERROR_MAX}
    assert not wrong, f"off by more than {WHOLE_ERROR_MAX}: {wrong}"


def check_rounded(ours: Mapping[str, Floats], theirs: Mapping[str, Floats], allowed: Mapping[str, float]) -> None:
    """`theirs` is in float32, `allowed` is how far Hugging Face's own bfloat16 is from it."""
    off = {name: error(values, theirs[name]) for name, values in ours.items()}
    wrong = {name: (each, allowed[name]) for name, each in off.items() if not each <= ROUNDED_ERROR_MAX * allowed[name]}
    assert not wrong, f"off by more than {ROUNDED_ERROR_MAX} times Hugging Face's own error: {wrong}"
