"""Queued resources in the emulated Cloud TPU: waiting in order, whole gangs, validity, tiers, deletion."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.unit.emulator.tpu_world_by_hand import BEGIN, NODE, ZONE, ByHand

PARENT = f"projects/p1/locations/{ZONE}"


def wish(name: str, *, node: dict[str, Any] = NODE, **more: Any) -> dict[str, Any]:
    return {"tpu": {"nodeSpec": [{"parent": PARENT, "nodeId": name, "node": node}]}, **more}


def gang(prefix: str, count: int, **more: Any) -> dict[str, Any]:
    params = {"nodeCount": count, "nodeIdPrefix": prefix}
    return {"tpu": {"nodeSpec": [{"parent": PARENT, "multisliceParams": params, "node": NODE}]}, **more}


def ask(world: ByHand, name: str, body: dict[str, Any], version: str = "v2", status: int = 200) -> Any:
    return world.call("POST", f"queuedResources?queuedResourceId={name}", body, version=version, status=status)


def state(world: ByHand, name: str) -> str:
    return str(world.call("GET", f"queuedResources/{name}")["state"]["state"])


def test_it_goes_through_every_state_in_order() -> None:
    delays = {"accept": 5.0, "provision": 10.0, "create": 20.0, "suspend": 7.0, "delete": 3.0}
    world = ByHand(delays=delays, capacity=[{"chips": 0}, {"chips": 8, "at_s": 100.0}])
    begun = ask(world, "q", wish("n", spot={}))
    assert (state(world, "q"), world.operation(begun)["done"]) == ("CREATING", False)
    world.wait(5)
    assert (state(world, "q"), world.operation(begun)["done"]) == ("WAITING_FOR_RESOURCES", True)
    world.wait(95)
    assert (state(world, "q"), world.states()) == ("PROVISIONING", {"n": "CREATING"})
    world.wait(30)
    assert (state(world, "q"), world.states()) == ("ACTIVE", {"n": "READY"})
    world.control("POST", "happen", [{"what": "preempt"}])
    assert (state(world, "q"), world.states()) == ("SUSPENDING", {"n": "PREEMPTED"})
    world.wait(8)
    assert (state(world, "q"), world.states()) == ("SUSPENDED", {})
    world.call("DELETE", "queuedResources/q")
    assert state(world, "q") == "DELETING"
    world.wait(4)
    world.call("GET", "queuedResources/q", status=404)
    assert [each for each in world.history("q") if each.startswith("queued.")] == [
        "queued.CREATING", "queued.WAITING_FOR_RESOURCES", "queued.PROVISIONING", "queued.ACTIVE", "queued.SUSPENDING",
        "queued.SUSPENDED", "queued.DELETING", "queued.gone",
    ]  # fmt: skip


def test_requests_are_filled_in_their_order_and_gangs_whole() -> None:
    world = ByHand(capacity=[{"chips": 16}])
    ask(world, "big", gang("g", 3))
    ask(world, "small", wish("s"))
    assert (state(world, "big"), state(world, "small")) == ("WAITING_FOR_RESOURCES",) * 2
    assert world.states() == {}, "what is behind does not overtake"
    world.control("POST", "capacity", [{"chips": 32}], status=204)
    assert (state(world, "big"), state(world, "small")) == ("ACTIVE", "ACTIVE")
    specs = sorted((spec.node, spec.slice, spec.slices) for spec in world.hosts.specs.values())
    assert specs == [("g-0", 0, 3), ("g-1", 1, 3), ("g-2", 2, 3), ("s", 0, 1)]
    first = world.node("g-0")["networkEndpoints"][0]["ipAddress"]
    assert {spec.coordinator for spec in world.hosts.specs.values() if spec.slices > 1} == {first}


def test_room_that_a_node_leaves_goes_to_who_waits() -> None:
    world = ByHand(capacity=[{"chips": 8}])
    world.create("n1")
    ask(world, "q", wish("n2"))
    assert state(world, "q") == "WAITING_FOR_RESOURCES"
    world.call("DELETE", "nodes/n1")
    assert (state(world, "q"), world.states()) == ("ACTIVE", {"n2": "READY"})


def test_losing_one_slice_suspends_the_whole_gang() -> None:
    world = ByHand()
    ask(world, "q", gang("g", 2, spot={}))
    assert world.states() == {"g-0": "READY", "g-1": "READY"}
    world.control("POST", "happen", [{"what": "preempt", "name": "g-1"}])
    assert (state(world, "q"), world.states()) == ("SUSPENDED", {})
    assert world.hosts.verbs().count("stop") == 2


def test_a_world_can_leave_the_nodes_of_a_suspended_request() -> None:
    world = ByHand(suspended_keeps_nodes=True)
    ask(world, "q", wish("n", spot={}))
    world.states()
    world.control("POST", "happen", [{"what": "preempt"}])
    assert (state(world, "q"), world.states()) == ("SUSPENDED", {"n": "PREEMPTED"})


@pytest.mark.parametrize("kind", ["duration", "time", "interval"])
def test_a_request_is_valid_only_for_its_time(kind: str) -> None:
    def at(seconds: float) -> str:
        return datetime.fromtimestamp(BEGIN + seconds, UTC).isoformat().replace("+00:00", "Z")

    policies: dict[str, dict[str, Any]] = {
        "duration": {"validUntilDuration": "60s"},
        "time": {"validUntilTime": at(60)},
        "interval": {"validInterval": {"startTime": at(30), "endTime": at(60)}},
    }
    world = ByHand(capacity=[{"chips": 0}])
    ask(world, "q", wish("n", queueingPolicy=policies[kind]))
    world.wait(59)
    assert state(world, "q") == "WAITING_FOR_RESOURCES"
    world.wait(2)
    assert state(world, "q") == "FAILED"
    world.control("POST", "capacity", [{"chips": 8}], status=204)
    assert (state(world, "q"), world.states()) == ("FAILED", {})
    world.call("DELETE", "queuedResources/q")
    world.call("GET", "queuedResources/q", status=404)


def test_nothing_comes_before_valid_after() -> None:
    world = ByHand()
    ask(world, "q", wish("n", queueingPolicy={"validAfterDuration": "100s"}))
    world.wait(99)
    assert state(world, "q") == "WAITING_FOR_RESOURCES"
    world.wait(2)
    assert state(world, "q") == "ACTIVE"


def test_flex_start_ends_its_nodes_when_their_time_is_up() -> None:
    world = ByHand(delays={"suspend": 10.0})
    body = wish("n", provisioningModel="FLEX_START", runDuration={"maxRunDuration": "600s"})
    ask(world, "q", body, version="v2alpha1")
    assert state(world, "q") == "ACTIVE"
    assert world.node("n")["schedulingConfig"]["terminationTimestamp"].endswith("Z")
    world.wait(599)
    assert world.states() == {"n": "READY"}
    world.wait(2)
    assert (state(world, "q"), world.states()) == ("SUSPENDING", {"n": "TERMINATED"})
    ask(world, "r", wish("m", provisioningModel="FLEX_START"), version="v2alpha1", status=400)


@pytest.mark.parametrize(
    ("version", "more", "node"),
    [
        ("v2alpha1", {"guaranteed": {"reserved": True}}, NODE),
        ("v2alpha1", {"provisioningModel": "RESERVATION_BOUND"}, NODE),
        ("v2", {"reservationName": f"{PARENT}/reservations/r1"}, NODE),
        ("v2", {}, {**NODE, "schedulingConfig": {"reserved": True}}),
    ],
)
def test_reserved_requests_take_from_a_reservation(version: str, more: dict[str, Any], node: dict[str, Any]) -> None:
    reservation = {"name": "r1", "zone": ZONE, "type": "v5litepod-*", "chips": 8}
    world = ByHand(capacity=[{"chips": 0}], quotas=[{"chips": 0}], reservations=[reservation])
    ask(world, "a", wish("a", node=node, **more), version=version)
    ask(world, "b", wish("b", node=node, **more), version=version)
    assert (state(world, "a"), state(world, "b")) == ("ACTIVE", "WAITING_FOR_RESOURCES")
    world.call("DELETE", "queuedResources/a?force=true")
    assert state(world, "b") == "ACTIVE"


@pytest.mark.parametrize("version", ["v2", "v2alpha1"])
def test_several_specs_are_several_nodes(version: str) -> None:
    world = ByHand()
    specs = [{"parent": PARENT, "nodeId": name, "node": NODE} for name in "ab"]
    ask(world, "q", {"tpu": {"nodeSpec": specs}}, version=version)
    assert world.states() == {"a": "READY", "b": "READY"}


def test_a_reset_restarts_the_machines_of_an_active_request() -> None:
    world = ByHand()
    ask(world, "q", wish("n"))
    world.states()
    begun = world.call("POST", "queuedResources/q:reset", {})
    assert world.operation(begun)["done"]
    assert world.hosts.verbs() == ["start", "stop", "start"]


def test_a_repeated_request_id_does_nothing_again() -> None:
    world = ByHand()
    first = world.call("POST", "queuedResources?queuedResourceId=q&requestId=1", wish("n"))
    again = world.call("POST", "queuedResources?queuedResourceId=q&requestId=1", wish("n"))
    assert again["name"] == first["name"]
    ask(world, "q", wish("n"), status=409)
    world.states()
    gone = world.call("DELETE", "queuedResources/q?force=true&requestId=2")
    world.states()
    assert world.call("DELETE", "queuedResources/q?force=true&requestId=2")["name"] == gone["name"]
    world.call("DELETE", "queuedResources/q?force=true", status=404)


def test_a_refused_delete_leaves_no_operation_behind() -> None:
    world = ByHand()
    ask(world, "q", wish("n"))
    world.states()
    before = len(world.call("GET", "operations")["operations"])
    world.call("DELETE", "queuedResources/q?requestId=3", status=400)
    assert len(world.call("GET", "operations")["operations"]) == before
    world.call("DELETE", "queuedResources/q?force=true&requestId=3")
