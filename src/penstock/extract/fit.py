"""How many rows a step has: as many as fill the device, and no more than its memory is likely to hold.

`engine.room` asks for the device at hand, before weights are loaded; the dry run (`wiring.extraction`) asks for one
that is not there. Both get the same answer from the same arithmetic, `mesh.estimate`. What is found here is where a
worker begins: `engine.prepare` takes fewer rows when memory runs out nevertheless. Results do not depend on rows. It
needs no device and must not import jax.
"""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.domain.admission import BadInput
from penstock.extract.capture import Course
from penstock.extract.config import ModelConfig
from penstock.extract.mesh import SIZES, Memory, MeshShape, estimate

#: Of one device and step, by platform: enough to fill it. A CPU has no use for more than a few rows.
STEP_TOKENS: Final = {"cpu": 4096, "gpu": 65_536, "tpu": 65_536}

#: How many times fewer rows the second program has on an accelerator, for the end of a unit: without it half a step is
#: lost with each unit, which has about nine at the largest size of objects.
SMALLER: Final = 4

#: Steps whose results the host has not taken yet: one computes, one is copied, one waits for the device.
IN_FLIGHT: Final = 3

#: Of a device's memory: an allocator leaves gaps, runtimes keep some for themselves, and an estimate is only that.
USABLE: Final = 0.9

#: Rows of a multiple of so many columns have attention in blocks, which writes no scores (`attention.choose`); on a CPU
#: short ones do not.
BLOCK_COLUMNS: Final = {"cpu": 64, "gpu": 64, "tpu": 128}
SHORT_ON_CPU: Final = 512


class Fit(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A step and what it takes of each device."""

    rows: int  #: of one step, over all devices
    wished: int
    parts: int  #: that rows are cut into
    width: int
    in_flight: int
    memory: Memory
    memory_wished: Memory
    least: int  #: weights and the results of one row: with less, nothing can run
    limit: int | None  #: bytes of each device; None: not known, and nothing is reduced

    @property
    def usable(self) -> int | None:
        return None if self.limit is None else int(USABLE * self.limit)

    @property
    def fits(self) -> bool:
        """By the estimate."""
        return self.usable is None or self.memory.total <= self.usable

    @property
    def possible(self) -> bool:
        """False is certain: what is counted exactly is more than there is."""
        return self.limit is None or self.least <= self.limit

    def refusal(self, why: str = "") -> BadInput:
        """For when not even one row of each part fits; `why` is what the device said, if it was tried."""
        there = "not known" if self.limit is None else f"{self.limit / 2**30:.2f} GiB"
        rule = f"of each device is too little for one row of {self.width} tokens a step, about {self.memory}"
        fix = "cut the model with --mesh fsdp=N or tensor=N, name fewer sites, or plan with a smaller --width"
        return BadInput("memory", there, rule + (f": {why}" if why else ""), fix)


def step_rows(platform: str, width: int) -> int:
    """Of one device, if memory allows."""
    return max(1, STEP_TOKENS.get(platform, STEP_TOKENS["cpu"]) // width)


def small_rows(platform: str, rows: int, parts: int) -> int | None:
    """Of the second program; None: there is none."""
    return None if platform == "cpu" or rows % (SMALLER * parts) else rows // SMALLER


def writes_scores(platform: str, dtype: str, width: int) -> bool:
    """Whether attention is the plain one, for heads of the usual sizes; `attention.choose` knows it of a device."""
    if (platform == "gpu" and SIZES[dtype] != 2) or (platform == "cpu" and width < SHORT_ON_CPU):
        return True
    return platform not in BLOCK_COLUMNS or width % BLOCK_COLUMNS[platform] != 0


def fit(
    config: ModelConfig,
    course: Course,
    *,
    rows: int,
    width: int,
    dtype: str,
    shape: MeshShape,
    limit: int | None,
    scores: bool,
    gated: bool = False,
    in_flight: int = IN_FLIGHT,
) -> Fit:
    """`rows`, or half of them until a step is estimated to fit; one row of each part at the end, fit or not."""
    parts = shape.data * shape.fsdp

    def taken(each: int) -> Memory:
        return estimate(
            config,
            course,
            rows=each * parts,
            width=width,
            dtype=dtype,
            shape=shape,
            in_flight=in_flight,
            scores=scores,
            gated=gated,
        )

    each = rows // parts
    wished = memory = taken(each)
    while limit is not None and memory.total > USABLE * limit and each > 1:
        each //= 2
        memory = taken(each)
    return Fit(
        rows=each * parts,
        wished=rows,
        parts=parts,
        width=width,
        in_flight=in_flight,
        memory=memory,
        memory_wished=wished,
        least=memory.weights + taken(1).results // in_flight,
        limit=limit,
    )
