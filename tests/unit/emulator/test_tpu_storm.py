"""Random calls and happenings against the emulated Cloud TPU: its books must stay right whatever comes.

Each seed is a world and a story of its own; a failure names the seed and the step.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.emulator.tpu_nodes import HOLDS_CHIPS
from tests.unit.emulator.tpu_world_by_hand import NODE, POD, SPOT, ZONE, ByHand

SEEDS = 60
STEPS = 80
CHIPS = 48
PREEMPTIONS = [{"per_hour": 60.0}, {"state": "DELETING", "after_s": 1.0, "undo_delete": True, "most": 3}]
PARENT = f"projects/p1/locations/{ZONE}"
#: What a queued resource may become next; what is deleted is gone after DELETING.
NEXT = {
    "CREATING": {"WAITING_FOR_RESOURCES", "FAILED", "DELETING"},
    "WAITING_FOR_RESOURCES": {"PROVISIONING", "FAILED", "DELETING"},
    "PROVISIONING": {"ACTIVE", "SUSPENDING", "DELETING"},
    "ACTIVE": {"SUSPENDING", "DELETING"},
    "SUSPENDING": {"SUSPENDED", "DELETING"},
    "SUSPENDED": {"DELETING"},
    "FAILED": {"DELETING"},
    "DELETING": {"gone"},
    "gone": {"CREATING"},
}


def queued(rng: random.Random, name: str) -> dict[str, Any]:
    params = {"nodeCount": rng.choice([2, 3]), "nodeIdPrefix": name}
    spec: dict[str, Any] = {"parent": PARENT, "node": NODE}
    spec |= {"multisliceParams": params} if rng.random() < 0.5 else {"nodeId": name}
    policy = {"queueingPolicy": {"validUntilDuration": f"{rng.randint(5, 60)}s"}} if rng.random() < 0.5 else {}
    return {"tpu": {"nodeSpec": [spec]}, **({"spot": {}} if rng.random() < 0.7 else {}), **policy}


def step(world: ByHand, rng: random.Random) -> None:
    name, other = f"n{rng.randrange(4)}", f"q{rng.randrange(3)}"
    match rng.randrange(9):
        case 0 | 1:
            world.send("POST", f"nodes?nodeId={name}", rng.choice([NODE, SPOT, POD]))
        case 2:
            world.send("DELETE", f"nodes/{rng.choice([name, other, other + '-0'])}")
        case 3:
            world.send("POST", f"nodes/{name}:{rng.choice(['stop', 'start'])}")
        case 4 | 5:
            world.send("POST", f"queuedResources?queuedResourceId={other}", queued(rng, other))
        case 6:
            world.send("DELETE", f"queuedResources/{other}?force={rng.choice(['true', 'false'])}")
        case 7:
            deeds = ["preempt", "maintain", "stop_host", "start_host", "replace_host", "die_unseen", "fail", "delete"]
            happening = {"what": rng.choice(deeds), "name": rng.choice(["*", name, f"{other}*"]), "seconds": 5.0}
            world.control("POST", "happen", [{**happening, "notice_s": rng.choice([0.0, 3.0])}])
        case _:
            world.wait(rng.choice([0.5, 5.0, 30.0]))


def check(world: ByHand) -> None:
    requests = world.call("GET", "queuedResources").get("queuedResources", [])  # what is due happens first
    books = world.emulator.cloud.books
    nodes = list(books.nodes.values())
    used = sum(chips for _, chips in books.used(ZONE))
    assert used == sum(node.chips for node in nodes if node.state in HOLDS_CHIPS)
    for node in nodes:
        assert node.state in HOLDS_CHIPS or not any(host.up for host in node.hosts), node.name
        assert node.gone_at is None
    ready = sum(node.chips for node in nodes if node.state in ("READY", "REPAIRING"))
    assert ready <= CHIPS, "more is up than there is"
    for each in requests:
        mine = [node for node in nodes if node.queued == each["name"]]
        state = each["state"]["state"]
        assert state not in ("CREATING", "WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED") or not mine, state
        assert state != "ACTIVE" or mine


def check_hosts(world: ByHand) -> None:
    """Machines are started and stopped in turn, and nothing is asked of one that was thrown away."""
    on: dict[str, bool] = {}
    gone: set[str] = set()
    for verb, incarnation in world.hosts.told:
        assert incarnation not in gone
        if verb == "start":
            assert not on.get(incarnation, False)
            on[incarnation] = True
        elif verb == "stop":
            assert on[incarnation]
            on[incarnation] = False
        elif verb == "discard":
            assert not on.get(incarnation, False)
            gone.add(incarnation)


def check_history(world: ByHand) -> None:
    states: dict[str, str] = {}
    for each in world.control("GET", "history"):
        kind, _, state = each["what"].partition(".")
        if kind == "queued":
            assert state in NEXT[states.get(each["name"], "gone")], each
            states[each["name"]] = state


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_books_stay_right(seed: int) -> None:
    rng = random.Random(seed)
    delays = {name: rng.choice([0.0, 2.0, 10.0]) for name in ("create", "stockout", "delete", "provision", "suspend")}
    world = ByHand(seed=seed, capacity=[{"chips": CHIPS}], delays=delays, preemptions=PREEMPTIONS)
    for _ in range(STEPS):
        step(world, rng)
        check(world)
    world.wait(100_000)
    check(world)
    check_hosts(world)
    check_history(world)
    assert all(each["done"] for each in world.call("GET", "operations").get("operations", []))
