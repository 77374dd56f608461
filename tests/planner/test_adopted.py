"""What a job is told that waits for a pool which is one adopted TPU: nothing is ever made for such a pool."""

from __future__ import annotations

import msgspec
import pytest

from penstock.domain.nouns import Pool
from penstock.planner.reasons import no_capacity
from tests.planner.live import a_job

POOL = Pool(
    name="mine",
    team="t",
    provider="tpu_vm",
    accelerator="v5e-8",
    chips=8,
    hosts=1,
    zones=("us-a",),
    max=1,
    adopted=True,
)


@pytest.mark.parametrize(
    ("used", "said", "advice"),
    [(8, "that is in use", "wait for it"), (0, "is gone, or was let go", "`tpu adopt mine --zone us-a`")],
)
def test_an_adopted_pool_is_not_told_to_grow(used: int, said: str, advice: str) -> None:
    told = no_capacity(a_job("j1"), "pool_at_max", POOL, used, 8, "")
    assert told.code == "pool_at_max"
    assert said in told.sentence
    assert advice in told.advice
    grown = no_capacity(a_job("j1"), "pool_at_max", msgspec.structs.replace(POOL, adopted=False), used, 8, "")
    assert grown.advice == "raise the maximum of pool mine"
