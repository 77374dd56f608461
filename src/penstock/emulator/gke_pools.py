"""Clusters and node pools of the emulated Kubernetes Engine as they are, and the operations that change pools.

`gke_service` makes and moves them; here is what each one shows. No node is ever started: a pool is a state and a count.
"""

from __future__ import annotations

from typing import Any, Final

from penstock.emulator.gke_words import LINKS, below
from penstock.emulator.tpu_words import stamp
from penstock.emulator.tpu_world import ClusterRule

#: Any would do; clients compare the versions of a cluster and its pools.
VERSION: Final = "1.33.5-gke.1080000"
DEFAULT_MACHINE: Final = "e2-medium"
_COMPUTE: Final = "https://www.googleapis.com/compute/v1/"
_CONFIG: Final[dict[str, Any]] = {
    "machineType": DEFAULT_MACHINE,
    "diskSizeGb": 100,
    "diskType": "pd-balanced",
    "imageType": "COS_CONTAINERD",
    "metadata": {"disable-legacy-endpoints": "true"},
    "serviceAccount": "default",
    "shieldedInstanceConfig": {"enableIntegrityMonitoring": True},
}


class Operation:
    """One operation: PENDING, RUNNING, DONE. It is not one of google.longrunning."""

    def __init__(self, name: str, kind: str, project: str, location: str, target: str, now: float) -> None:
        self.name = name
        self.kind = kind
        self.project = project
        self.location = location
        self.target = target
        self.status = "PENDING"
        self._started_at = now
        self._ended_at: float | None = None

    def run(self) -> None:
        self.status = "RUNNING"

    def end(self, now: float) -> None:
        self.status, self._ended_at = "DONE", now

    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "name": self.name,
            "operationType": self.kind,
            "status": self.status,
            "location": self.location,
            "zone": self.location,
            "selfLink": f"{LINKS}{below(self.project, self.location)}/operations/{self.name}",
            "targetLink": LINKS + self.target,
            "startTime": stamp(self._started_at),
        }
        return found if self._ended_at is None else {**found, "endTime": stamp(self._ended_at)}


class Pool:
    """A node pool; `operation` is what is being done to it, if anything."""

    def __init__(self, cluster: Cluster, spec: dict[str, Any], operation: Operation) -> None:
        self.cluster = cluster
        self.spec = spec
        self.status = "PROVISIONING"
        self.operation: Operation | None = operation

    @property
    def name(self) -> str:
        return f"{self.cluster.name}/nodePools/{self.spec['name']}"

    @property
    def locations(self) -> list[str]:
        return self.spec.get("locations") or self.cluster.zones

    @property
    def nodes(self) -> int:
        """As many as would run: `initialNodeCount` counts those of one zone."""
        return 0 if self.status != "RUNNING" else int(self.spec.get("initialNodeCount", 0)) * len(self.locations)

    def shown(self) -> dict[str, Any]:
        id_ = self.spec["name"]
        found: dict[str, Any] = {
            **self.spec,
            "config": {**_CONFIG, **self.spec.get("config", {})},
            "etag": f"{id_}-{self.status.lower()}",
            "locations": self.locations,
            "maxPodsConstraint": {"maxPodsPerNode": "110"},
            "podIpv4CidrSize": 24,
            "selfLink": LINKS + self.name,
            "status": self.status,
            "upgradeSettings": {"strategy": "SURGE", **self.spec.get("upgradeSettings", {})},
            "version": self.spec.get("version", VERSION),
        }
        if self.status != "PROVISIONING":
            group = f"instanceGroupManagers/gke-{self.cluster.id}-{id_}-grp"
            place = f"{_COMPUTE}projects/{self.cluster.project}/zones"
            found["instanceGroupUrls"] = [f"{place}/{zone}/{group}" for zone in self.locations]
        return found


class Cluster:
    """A cluster, with its pools by id. It is always RUNNING."""

    def __init__(self, rule: ClusterRule, zones: list[str], now: float) -> None:
        self.id = rule.name
        self.project = rule.project
        self.location = rule.location
        self.zones = zones
        self.pools: dict[str, Pool] = {}
        self._created_at = now

    @property
    def name(self) -> str:
        return f"{below(self.project, self.location)}/clusters/{self.id}"

    def shown(self) -> dict[str, Any]:
        pools = list(self.pools.values())
        found: dict[str, Any] = {
            "name": self.id,
            "location": self.location,
            "zone": self.location,
            "locations": self.zones,
            "status": "RUNNING",
            "createTime": stamp(self._created_at),
            "currentMasterVersion": VERSION,
            "currentNodeVersion": VERSION,
            "initialClusterVersion": VERSION,
            "endpoint": "127.0.0.1",
            "network": "default",
            "subnetwork": "default",
            "selfLink": LINKS + self.name,
        }
        if pools:
            found["nodePools"] = [each.shown() for each in pools]
            found["currentNodeCount"] = sum(each.nodes for each in pools)
        return found
