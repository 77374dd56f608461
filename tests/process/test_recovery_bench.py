"""What `bench/recovery.py` makes of losses: medians, percentiles, a bound that can be missed, ratios to peers."""

from __future__ import annotations

import pytest

from bench.core import Row
from bench.recovery import PEERS, Loss, loss_rows, p, ratios


def losses(declared: float, again: float, idle: float) -> list[Loss]:
    return [Loss(declared, again + number / 100, idle) for number in range(20)]


def figure(rows: list[Row], what: str) -> Row:
    (found,) = [row for row in rows if row.what.startswith(what)]
    return found


def test_percentiles_are_by_the_nearest_rank() -> None:
    times = [float(number) for number in range(20, 0, -1)]
    assert (p(times, 50), p(times, 95), p(times, 100)) == (11.0, 20.0, 20.0)


@pytest.mark.parametrize(("declared", "kept"), [(0.5, True), (20.0, False)])
def test_a_loss_must_be_declared_before_the_quickest_peer_would(declared: float, kept: bool) -> None:
    rows = list(loss_rows("made anew", False, losses(declared, declared + 4.0, 4.0)))
    assert figure(rows, "declared lost, p95").ok is kept
    assert figure(rows, "runs again, median of 20").measured == pytest.approx(declared + 4.1)


def test_ratios_say_how_long_it_would_have_been_with_a_peers_wait() -> None:
    silent = list(loss_rows("spare", False, losses(0.5, 2.0, 2.0)))
    noticed = list(loss_rows("spare", True, losses(0.1, 2.0, 1.0)))
    told = ratios([*silent, *noticed])
    iris = PEERS["Iris"]
    assert f"spare, no notice: declared lost: SkyPilot {PEERS['SkyPilot'] / 0.5:.0f} ×" in told[0]
    assert f"Iris {(iris + 2.1 - 0.5) / 2.1:.1f} ×" in told[1]
    assert f"Iris {(iris + 1.0) / 1.0:.1f} ×" in told[2]
