"""When an agent gives up its children: the fence it read, and two silences that must both be long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain import limits
from penstock.domain.custody import Keep, custody, fence_path, staging_path

LONG = limits.CUSTODY_S
SECONDS = st.floats(0, 1e6)


@pytest.mark.parametrize(
    ("fence_seen", "server_s", "bucket_s", "keep"),
    [
        (None, 0, 0, Keep.GO_ON),
        (4, 0, 0, Keep.GO_ON),
        (3, 0, 0, Keep.GO_ON),  # an old object: nobody has written ours
        (5, 0, 0, Keep.STOP),
        (None, LONG, 0, Keep.GO_ON),
        (4, 10 * LONG, LONG - 1, Keep.GO_ON),
        (4, LONG - 1, 10 * LONG, Keep.GO_ON),
        (4, LONG, LONG, Keep.STOP),
        (None, LONG, LONG, Keep.STOP),
    ],
)
def test_who_goes_on(fence_seen: int | None, server_s: float, bucket_s: float, keep: Keep) -> None:
    assert custody(4, fence_seen, server_s, bucket_s) is keep


@given(st.integers(1, 100), st.integers(1, 100), SECONDS, SECONDS)
def test_a_higher_fence_always_stops(own: int, more: int, server_s: float, bucket_s: float) -> None:
    assert custody(own, own + more, server_s, bucket_s) is Keep.STOP


@given(st.one_of(st.none(), st.integers(1, 9)), SECONDS, SECONDS)
def test_one_that_answers_is_enough(fence_seen: int | None, server_s: float, bucket_s: float) -> None:
    if min(server_s, bucket_s) < LONG:
        assert custody(9, fence_seen, server_s, bucket_s) is Keep.GO_ON


def test_paths_keep_replicas_and_fences_apart() -> None:
    paths = {fence_path("j1", replica) for replica in range(20)}
    assert len(paths) == 20
    staged = {staging_path("j1", fence, output) for fence in range(20) for output in ("a", "b")}
    assert len(staged) == 40
    assert not paths & staged
    assert all(path.startswith("jobs/j1/") for path in paths | staged)
