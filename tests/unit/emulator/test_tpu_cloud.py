"""What becomes of nodes and their hosts in the emulated Cloud TPU: capacity, preemption, maintenance, other hosts."""

from __future__ import annotations

import pytest

from penstock.domain.catalogue import all_accelerators, find
from penstock.emulator.tpu_world import api_type
from tests.unit.emulator.tpu_world_by_hand import NODE, POD, SPOT, ZONE, ByHand

HOSTS_MAX = 64  #: hosts of a larger slice are the same, and a thousand of them only take time
TYPES = [api_type(each) for each in all_accelerators() if "tpu_vm" in each.providers and each.hosts <= HOSTS_MAX]


def test_hosts_are_started_stopped_and_discarded_with_their_node() -> None:
    world = ByHand(delays={"create": 10.0, "delete": 5.0})
    world.create("n1", {**POD, "metadata": {"startup-script": "echo"}, "serviceAccount": {"email": "a@b"}})
    assert world.hosts.told == []
    world.wait(11)
    assert world.states() == {"n1": "READY"}
    assert world.hosts.verbs() == ["start"] * 4
    specs = list(world.hosts.specs.values())
    assert [(spec.index, spec.hosts, spec.devices) for spec in specs] == [(index, 4, 4) for index in range(4)]
    assert {spec.metadata["startup-script"] for spec in specs} == {"echo"}
    assert specs[0].addresses == tuple(each["ipAddress"] for each in world.node("n1")["networkEndpoints"])
    world.call("DELETE", "nodes/n1")
    assert world.hosts.verbs() == ["start"] * 4, "a node that is being deleted still runs"
    world.wait(6)
    assert world.states() == {}
    assert sorted(world.hosts.verbs()[4:]) == ["discard"] * 4 + ["stop"] * 4


@pytest.mark.parametrize("kind", TYPES)
def test_the_hosts_of_every_type_show_the_catalogues_number_of_devices(kind: str) -> None:
    world = ByHand(zones={ZONE: {"types": [kind]}})
    world.create("n1", {**NODE, "acceleratorType": kind})
    assert world.states() == {"n1": "READY"}
    shown = [spec.devices for spec in world.hosts.specs.values()]
    known = find(kind)
    assert (len(shown), len(set(shown)), sum(shown)) == (known.hosts, 1, known.jax_devices)


def test_jax_shows_the_cores_of_v2_and_v3_and_the_chips_of_the_others() -> None:
    types = ["v2-8", "v3-8", "v3-32", "v4-8", "v5litepod-8", "v5p-8", "v6e-8"]
    world = ByHand(zones={ZONE: {"types": types}})
    for kind in types:
        world.create(kind, {**NODE, "acceleratorType": kind})
    assert set(world.states().values()) == {"READY"}
    shown = {spec.node: spec.devices for spec in world.hosts.specs.values()}
    assert shown == {"v2-8": 8, "v3-8": 8, "v3-32": 8, "v4-8": 4, "v5litepod-8": 8, "v5p-8": 4, "v6e-8": 8}


def test_capacity_over_time_decides_who_gets_chips() -> None:
    capacity = [{"chips": 8, "type": "v5litepod-*"}, {"chips": 16, "type": "v5litepod-*", "at_s": 100.0}]
    world = ByHand(capacity=capacity)
    first, second = world.create("n1"), world.create("n2")
    assert "response" in world.operation(first)
    assert world.operation(second)["error"]["code"] == 8
    assert world.states() == {"n1": "READY"}
    world.wait(100)
    world.create("n2")
    assert world.states() == {"n1": "READY", "n2": "READY"}


def test_less_capacity_takes_the_newest_spot_nodes_away() -> None:
    world = ByHand()
    for name, body in (("old", SPOT), ("firm", NODE), ("new", SPOT)):
        world.create(name, body)
        world.wait(1)
    world.states()
    world.control("POST", "capacity", [{"chips": 16}], status=204)
    assert world.states() == {"old": "READY", "firm": "READY", "new": "PREEMPTED"}
    world.control("POST", "capacity", [{"chips": 0}], status=204)
    assert world.states() == {"old": "PREEMPTED", "firm": "READY", "new": "PREEMPTED"}


@pytest.mark.parametrize(
    ("state", "undo", "shown"),
    [
        ("CREATING", False, "PREEMPTED"),
        ("READY", False, "PREEMPTED"),
        ("DELETING", False, "DELETING"),
        ("DELETING", True, "PREEMPTED"),
    ],
)
def test_a_node_can_be_preempted_in_any_state(state: str, undo: bool, shown: str) -> None:
    rule = {"state": state, "after_s": 5.0, "undo_delete": undo}
    world = ByHand(delays={"create": 10.0, "delete": 10.0}, preemptions=[rule])
    begun = world.create("n1", SPOT)
    if state == "DELETING":
        world.wait(11)
        world.call("DELETE", "nodes/n1")
    elif state == "READY":
        world.wait(10)
        assert world.states() == {"n1": "READY"}
    world.wait(6)
    assert world.states() == {"n1": shown}
    assert not any(host["up"] for host in world.true_node("n1")["hosts"])
    if state == "CREATING":
        world.wait(10)
        assert world.operation(begun)["error"]["code"] == 13
    if state == "DELETING" and not undo:
        world.wait(10)
        assert world.states() == {}


def test_a_notice_comes_before_the_end_and_only_spot_nodes_are_taken() -> None:
    world = ByHand(preemptions=[{"at_s": 100.0, "notice_s": 30.0, "most": 1}])
    world.create("a", SPOT)
    world.create("b", SPOT)
    world.create("firm")
    world.wait(101)
    assert set(world.states().values()) == {"READY"}
    assert "preempted in 30" in world.hosts.verbs()
    world.wait(30)
    assert world.states() == {"a": "PREEMPTED", "b": "READY", "firm": "READY"}
    assert world.history("a")[-3:] == ["host.down", "node.preempted", "node.PREEMPTED"]


def test_a_rate_is_drawn_by_seed_and_name_not_by_the_order_of_calls() -> None:
    def lives(order: str, seed: int) -> dict[str, float]:
        world = ByHand(seed=seed, preemptions=[{"per_hour": 6.0}])
        for name in order:
            world.create(name, SPOT)
        world.states()
        world.wait(36_000)
        events = world.control("GET", "history")
        return {each["name"][-1]: each["t"] for each in events if each["what"] == "node.preempted"}

    assert lives("abc", 1) == lives("cab", 1)
    assert lives("abc", 1) != lives("abc", 2)
    assert 0 < sum(lives("abcdefgh", 3).values()) / 8 < 1800, "six an hour are one in ten minutes"


def test_maintenance_tells_first_and_brings_the_same_machines_back() -> None:
    world = ByHand(delays={"maintenance_notice": 30.0, "maintenance": 60.0})
    world.create("n1")
    before = world.true_node("n1")["hosts"][0]["incarnation"]
    world.call("POST", "nodes/n1:simulateMaintenanceEvent", {}, version="v2alpha1")
    assert world.node("n1")["upcomingMaintenance"]["maintenanceStatus"] == "PENDING"
    assert "maintenance in 30" in world.hosts.verbs()
    world.wait(31)
    assert (world.node("n1")["state"], world.node("n1")["health"]) == ("REPAIRING", "UNHEALTHY_MAINTENANCE")
    world.wait(60)
    assert "upcomingMaintenance" not in world.node("n1")
    assert world.node("n1")["state"] == "READY"
    assert world.true_node("n1")["hosts"][0] == {**world.true_node("n1")["hosts"][0], "incarnation": before, "up": True}
    assert world.hosts.verbs() == ["start", "maintenance in 30", "stop", "start"]


def test_hosts_can_be_missing_replaced_or_dead_while_the_service_says_ready() -> None:
    world = ByHand(faults=[{"kind": "short_of_hosts", "name": "short"}, {"kind": "hostless", "name": "dead"}])
    for name in ("short", "dead", "whole"):
        world.create(name, POD)
    assert set(world.states().values()) == {"READY"}
    up = {name: [host["up"] for host in world.true_node(name)["hosts"]] for name in ("short", "dead", "whole")}
    assert up == {"short": [True, True, True, False], "dead": [False] * 4, "whole": [True] * 4}
    old = world.true_node("whole")["hosts"][2]
    world.control("POST", "happen", [{"what": "replace_host", "name": "whole", "host": 2}])
    new = world.true_node("whole")["hosts"][2]
    assert new["up"]
    assert (new["incarnation"], new["address"]) != (old["incarnation"], old["address"])
    assert world.node("whole")["networkEndpoints"][2]["ipAddress"] == new["address"]
    world.control("POST", "happen", [{"what": "die_unseen", "name": "whole"}])
    assert world.node("whole")["state"] == "READY"
    assert not any(host["up"] for host in world.true_node("whole")["hosts"])
    world.control("POST", "happen", [{"what": "start_host", "name": "short", "host": 3}])
    assert all(host["up"] for host in world.true_node("short")["hosts"])
    world.control("POST", "happen", [{"what": "stop_host", "name": "short", "host": 0}])
    assert [host["up"] for host in world.true_node("short")["hosts"]] == [False, True, True, True]


def test_others_make_hide_break_and_delete_nodes() -> None:
    world = ByHand()
    made = {"what": "create", "name": "foreign", "zone": "us-west4-a", "type": "v5litepod-4", "labels": {"who": "me"}}
    world.control("POST", "happen", [made])
    assert world.states() == {"foreign": "READY"}
    world.control("POST", "happen", [{"what": "hide", "name": "for*"}])
    assert world.states() == {}
    assert world.call("GET", "/v2/projects/p1/locations/us-west4-a/nodes/foreign")["labels"] == {"who": "me"}
    world.control("POST", "happen", [{"what": "show"}, {"what": "fail"}])
    assert world.states() == {"foreign": "REPAIRING"}
    world.control("POST", "happen", [{"what": "delete", "zone": "us-west4-*"}])
    assert world.states() == {}
    refused = world.control("POST", "happen", [{**made, "type": "v6e-8"}], status=400)
    assert "not offered" in refused["error"]["message"]


def test_quota_counts_what_is_on_its_way_out_until_it_is_gone() -> None:
    world = ByHand(quotas=[{"chips": 16}], delays={"delete": 10.0})
    world.create("a")
    world.create("b")
    world.call("POST", "nodes?nodeId=c", NODE, status=429)
    world.call("DELETE", "nodes/a")
    world.call("POST", "nodes?nodeId=c", NODE, status=429)
    world.wait(11)
    world.create("c")
    refused = [each for each in world.control("GET", "history") if each["what"] == "quota.refused"]
    assert [each["detail"] for each in refused] == [{"held": 16, "asked": 8}] * 2


def test_metadata_and_labels_reach_the_hosts_when_they_change() -> None:
    world = ByHand()
    world.create("n1")
    world.wait(1)
    world.call("PATCH", "nodes/n1?updateMask=metadata", {"metadata": {"k": "v"}})
    assert world.node("n1")["metadata"] == {"k": "v"}
    assert "describe {'k': 'v'}" in world.hosts.verbs()


def test_disks_are_attached_to_the_workers_they_are_for_in_order() -> None:
    world = ByHand()
    place = "projects/p1/zones/z/disks"
    disks = [
        {"sourceDisk": f"{place}/all", "mode": "READ_ONLY"},
        {"sourceDisk": f"{place}/second", "mode": "READ_ONLY", "workerIds": ["1"]},
        {"sourceDisk": f"{place}/last", "mode": "READ_ONLY"},
    ]
    world.call("POST", "nodes?nodeId=n1", {**POD, "dataDisks": disks}, version="v2alpha1")
    world.wait(1)
    assert world.states() == {"n1": "READY"}
    assert [spec.disks for spec in world.hosts.specs.values()][:2] == [("all", "last"), ("all", "second", "last")]


def test_guest_attributes_are_those_of_the_workers_asked_for() -> None:
    world = ByHand()
    world.create("n1", POD)
    world.wait(1)
    body = {"queryPath": "hostkeys/", "workerIds": ["2"]}
    found = world.call("POST", "nodes/n1:getGuestAttributes", body)["guestAttributes"]
    items = found[0]["queryValue"]["items"]
    incarnation = world.true_node("n1")["hosts"][2]["incarnation"]
    assert items == [{"namespace": "hostkeys", "key": "ssh-rsa", "value": f"key of {incarnation}"}]
    world.call("POST", "nodes/n1:getGuestAttributes", {"workerIds": ["9"]}, status=400)


def test_a_stopped_node_needs_capacity_to_start_again() -> None:
    world = ByHand(capacity=[{"chips": 8}])
    world.create("n1")
    world.wait(1)
    world.call("POST", "nodes/n1:stop")
    assert world.states() == {"n1": "STOPPED"}
    world.create("n2")
    assert world.states()["n2"] == "READY"
    begun = world.call("POST", "nodes/n1:start")
    assert world.operation(begun)["error"]["code"] == 8
    assert world.states()["n1"] == "STOPPED"
