"""Cost, budgets and reservations with a real server, agents and jobs: a checkpoint is noticed, a loss is counted, a
spent budget and somebody else's reservation keep new work waiting, and both end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.shop import Shop, soon

pytestmark = pytest.mark.slow

SAVES_ONCE = """
if os.environ["PENSTOCK_STAGE"] == "0":
    folder = os.environ["PENSTOCK_CHECKPOINT_DIR"]
    gate("go.tmp")  # a temporary name: no checkpoint
    time.sleep(1.2)
    os.mkdir(folder + "/1.tmp")
    os.rename(folder + "/1.tmp", folder + "/1")
    say("saved")
    time.sleep(600)
"""


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with Shop(tmp_path / "home") as shop:
        yield shop


def kinds(shop: Shop, id: str) -> list[str]:
    done = shop.command("events", id, "--json")
    return [json.loads(line)["kind"] for line in done.stdout.splitlines()]


def test_what_ran_after_the_checkpoint_is_lost_and_the_rest_is_not(shop: Shop) -> None:
    shop.open()
    id = shop.submit(SAVES_ONCE)
    soon(lambda: shop.view(id)["state"] == "running")  # useful is what comes after this and before the checkpoint
    shop.open_gate(id, "go.tmp")
    soon(lambda: "attempt.saved" in kinds(shop, id))
    place = shop.view(id)["slice"]
    assert shop.command("local", "preempt", place).returncode == 0
    assert shop.ended(id)["state"] == "succeeded"
    found = shop.told("cost", id)
    row = found["row"]
    assert (found["saves"], found["losses"], row["attempts"]) == (1, 1, 2)
    assert row["lost_chip_s"] > 0.5  # it rested for two seconds before it counted
    assert row["useful_chip_s"] > 0.5
    assert row["unknown_chip_s"] == pytest.approx(0.0, abs=1e-6)
    assert found["save_every_s"] is None
    assert "payload.saving" in found["advice"]
    for by in ("job", "user", "queue", "zone"):
        page = shop.told("cost", "--by", by)
        total = page["total"]
        parts = sum(total[f"{part}_chip_s"] for part in ("useful", "lost", "unknown", "setup", "idle"))
        assert total["chip_s"] == pytest.approx(parts)
        assert total["usd"] == 0.0  # this machine's own capacity
        assert sum(each["chip_s"] for each in page["rows"]) == pytest.approx(total["chip_s"])


def test_a_spent_budget_and_a_reservation_keep_new_work_waiting(shop: Shop) -> None:
    shop.open()
    first = shop.submit("say('one')")
    assert shop.ended(first)["state"] == "succeeded"
    assert shop.command("queues", "set", "default", "--budget", "0.000001chip-hours/month").returncode == 0
    second = shop.submit("say('two')")
    soon(lambda: shop.told("why", second)["code"] == "budget")
    assert shop.command("queues", "set", "default", "--no", "budget").returncode == 0
    assert shop.ended(second)["state"] == "succeeded"

    (pool,) = {each["pool"] for each in shop.told("slices")}
    assert shop.command("reserve", f"pool:{pool}", "--for", "bob", "--until", "1h", "--note", "demo").returncode == 0
    held = [each for each in shop.told("find", "v5") if each["state"] == "ready"]
    assert held
    assert {(each["reserved"]["user"], each["reserved"]["note"]) for each in held} == {("bob", "demo")}
    assert shop.told("find", "--free") == []
    third = shop.submit("say('three')")
    soon(lambda: shop.told("why", third)["code"] == "reserved")
    assert shop.command("release", f"pool:{pool}").returncode == 0
    assert shop.ended(third)["state"] == "succeeded"
