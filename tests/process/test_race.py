"""A pool that asks several zones at once: the slice that is ready first is kept, the others are deleted.

The real `tpu`, server and emulator with hosts that really boot; one zone takes longer than anybody waits. What was
asked for, and what became of it, is read from the emulator's own history.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest

from tests.process.machine import until
from tests.process.test_tpu_vm import FIRST as QUICK
from tests.process.test_tpu_vm import SECOND as SLOW
from tests.process.test_tpu_vm import Scene, scene_at

WORLD = f"""
[zones.{SLOW}]
create = 86400.0
[delays]
delete = 0.5
"""
GONE_S = 120.0


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("race")
    (folder / "world.toml").write_text(WORLD)
    with scene_at(folder, '"msgspec"', "--world", str(folder / "world.toml")) as scene:
        yield scene


def happened(scene: Scene, zone: str) -> dict[str, list[tuple[float, str]]]:
    """What truly became of each node of a zone: when, and its state."""
    lives: dict[str, list[tuple[float, str]]] = {}
    for each in scene.cloud.control("GET", "history"):
        if each["zone"] == zone and each["what"].startswith("node."):
            name = each["name"].rpartition("/")[2]
            lives.setdefault(name, []).append((each["t"], each["what"].removeprefix("node.")))
    return lives


def states(life: list[tuple[float, str]]) -> list[str]:
    """One after the other; a change within a state is none of it."""
    return [state for state, _ in groupby(state for _, state in life)]


@pytest.mark.long
def test_two_zones_are_asked_at_once_and_the_slower_one_is_let_go(scene: Scene) -> None:
    made = scene.shop.tpu(
        "pool", "create", "race", "--type", "v5e-1", "--zones", f"{SLOW},{QUICK}", "--race", "2", "--idle", "1h"
    )
    assert made.returncode == 0, made.stderr
    assert f"0 to 1 slices of v5e-1 in {SLOW}, {QUICK}, 2 zones at once" in made.stdout
    job = scene.shop.submit("say('here')", on="v5e-1", pool="race")
    assert scene.shop.ended(job)["state"] == "succeeded", scene.shop.everything(job)

    until(lambda: any("gone" in states(life) for life in happened(scene, SLOW).values()), GONE_S)
    ((winner, kept),) = happened(scene, QUICK).items()
    ((loser, let_go),) = happened(scene, SLOW).items()
    assert states(kept) == ["CREATING", "READY"]
    assert states(let_go) == ["CREATING", "DELETING", "gone"]
    ready_at = next(t for t, state in kept if state == "READY")
    assert ready_at < next(t for t, state in let_go if state == "DELETING"), "it was let go because the other was ready"
    events = scene.shop.call("GET", "/v1/events?limit=1000")[1]["events"]
    intended = {each["id"]: each for each in events if each["kind"] == "slice.intended"}
    assert set(intended) == {winner, loser}
    assert len({(each["at"], each["body"]["race"]) for each in intended.values()}) == 1, "both were asked for at once"
    assert set(scene.nodes()) == {winner}
    assert scene.shop.view(job)["slice"] == winner

    def slices() -> list[Any]:
        return list(scene.shop.call("GET", "/v1/slices")[1]["slices"])

    until(lambda: [each["id"] for each in slices() if each["state"] == "ready"] == [winner])
    assert loser not in {each["id"] for each in slices() if each["state"] in ("creating", "ready")}
    (pool,) = json.loads(scene.shop.tpu("pools", "--json").stdout)
    assert (pool["name"], pool["race"], pool["max"]) == ("race", 2, 1)
    scene.drop("race")
    until(lambda: not scene.nodes(), GONE_S)
