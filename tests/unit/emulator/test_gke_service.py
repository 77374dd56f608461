"""Node pools of the emulated Kubernetes Engine: what becomes of them over time, in zones and regions.

Requests that are refused, and how, are rows of facts.toml.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.domain.admission import BadInput
from penstock.domain.catalogue import find
from tests.unit.emulator.tpu_world_by_hand import ByHand

POOLS = "clusters/c1/nodePools"
EVERYWHERE = "/v1/projects/p1/locations/-"
TPUS: dict[str, Any] = {
    "config": {"machineType": "ct5lp-hightpu-4t"},
    "placementPolicy": {"tpuTopology": "4x4"},
    "initialNodeCount": 4,
}


def world(**parts: Any) -> ByHand:
    clusters = [{"name": "c1", "location": "us-central1-a"}, {"name": "c2", "location": "us-west4"}]
    return ByHand(clusters=[*clusters, {"name": "c3", "location": "us-west4", "project": "other"}], **parts)


def create(there: ByHand, name: str, status: int = 200, at: str = POOLS, **spec: Any) -> Any:
    return there.call("POST", at, {"nodePool": {"name": name, **spec}}, version="v1", status=status)


def pool(there: ByHand, name: str) -> Any:
    return there.call("GET", f"{POOLS}/{name}", version="v1")


def status_of(there: ByHand, operation: Any) -> str:
    return str(there.call("GET", f"operations/{operation['name']}", version="v1")["status"])


def test_a_pool_comes_and_goes_with_its_operations() -> None:
    there = world(delays={"pool_pending": 2.0, "pool_create": 10.0, "pool_delete": 5.0})
    made = create(there, "np1", **TPUS)
    seen = []
    for seconds in (1, 2, 10):
        there.wait(seconds)
        seen.append((status_of(there, made), pool(there, "np1")["status"]))
    assert seen == [("PENDING", "PROVISIONING"), ("RUNNING", "PROVISIONING"), ("DONE", "RUNNING")]
    assert there.call("GET", "clusters/c1", version="v1")["currentNodeCount"] == 4
    deleted = there.call("DELETE", f"{POOLS}/np1", version="v1")
    there.call("DELETE", f"{POOLS}/np1", version="v1", status=400)
    there.wait(8)
    assert status_of(there, deleted) == "DONE"
    there.call("GET", f"{POOLS}/np1", version="v1", status=404)
    assert there.history("np1") == ["pool.PROVISIONING", "pool.RUNNING", "pool.STOPPING", "pool.gone"]
    assert create(there, "np1", **TPUS)["status"] == "PENDING", "a name is free again"


def test_clusters_and_operations_belong_to_a_project_and_a_location() -> None:
    there = world()
    assert [each["name"] for each in there.call("GET", f"{EVERYWHERE}/clusters")["clusters"]] == ["c1", "c2"]
    regional = "/v1/projects/p1/locations/us-west4"
    assert [each["name"] for each in there.call("GET", f"{regional}/clusters")["clusters"]] == ["c2"]
    made = create(there, "np1", at=f"{regional}/clusters/c2/nodePools")
    assert made["targetLink"].endswith("/projects/p1/locations/us-west4/clusters/c2/nodePools/np1")
    assert there.call("GET", "operations", version="v1") == {}
    assert [each["name"] for each in there.call("GET", f"{EVERYWHERE}/operations")["operations"]] == [made["name"]]
    there.call("GET", f"operations/{made['name']}", version="v1", status=404)
    there.call("GET", "/v1/projects/other/locations/us-central1-a/clusters/c1", status=404)
    there.call("GET", f"{EVERYWHERE}/clusters/c1", status=403)


def test_a_regional_pool_counts_its_nodes_in_each_zone() -> None:
    there = world()
    regional = "/v1/projects/p1/locations/us-west4/clusters/c2"
    create(there, "np1", at=f"{regional}/nodePools", initialNodeCount=2, locations=["us-west4-a", "us-west4-b"])
    there.wait(1)
    assert there.call("GET", regional)["currentNodeCount"] == 4
    assert len(there.call("GET", f"{regional}/nodePools/np1")["instanceGroupUrls"]) == 2


@pytest.mark.parametrize("kind", ["v4-16", "v5e-16", "v5e-8-4t", "v5p-16", "v6e-16", "tpu7x-16"])
def test_every_generation_has_pools_of_its_machines(kind: str) -> None:
    known = find(kind)
    assert known.zones is not None
    zone = known.zones[0]
    there = ByHand(clusters=[{"name": "c1", "location": zone}])
    at = f"/v1/projects/p1/locations/{zone}/clusters/c1/nodePools"
    spec: dict[str, Any] = {
        "config": {"machineType": known.gke_machine_type},
        "placementPolicy": {"tpuTopology": known.topology},
    }
    create(there, "np1", at=at, **spec, initialNodeCount=known.hosts)
    create(there, "np2", at=at, **spec, initialNodeCount=known.hosts + 1, status=400)
    create(there, "np3", at=at, **spec, autoscaling={"enabled": True, "maxNodeCount": known.hosts})


def test_single_hosts_may_be_many() -> None:
    there = world()
    create(there, "np1", config={"machineType": "ct5lp-hightpu-8t"}, initialNodeCount=7)
    create(there, "np2", config={"machineType": "ct5lp-hightpu-3t"}, status=400)
    create(there, "np3", config={"machineType": "e2-medium"}, placementPolicy={"tpuTopology": "4x4"}, status=400)
    create(there, "np4", config={"machineType": "e2-medium"})


@pytest.mark.parametrize(
    ("clusters", "says"),
    [
        ([{"name": "c1", "location": "mars"}], "is no zone and no region"),
        ([{"name": "c1", "location": "us-west4"}, {"name": "c1", "location": "us-west4"}], "is in us-west4 twice"),
    ],
)
def test_a_script_with_clusters_that_cannot_be_is_refused(clusters: list[dict[str, str]], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        ByHand(clusters=clusters)


def test_what_is_not_of_the_api_is_refused() -> None:
    there = world()
    there.call("POST", POOLS, {"parent": "p"}, version="v1", status=400)
    there.call("POST", POOLS, ["x"], version="v1", status=400)
    there.call("GET", f"{POOLS}?colour=red", version="v1", status=400)
    there.call("PUT", POOLS, {}, version="v1", status=404)
    there.call("DELETE", "clusters/c1", version="v1", status=404)
    there.call("POST", "operations/operation-1:cancel", {}, version="v1", status=404)
    assert "us-central1-a" in str(there.call("GET", "/v1/projects/p1/locations")), "Cloud TPU's v1 is there still"
