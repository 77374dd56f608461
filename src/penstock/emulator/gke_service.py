"""The emulated Container API's methods for clusters, node pools and operations, and what is refused.

`gke_rest` finds the method of a request. Clusters are those of the world script and cannot be made or changed; pools
can be made, shown and deleted. TPU pools are checked against the catalogue: a machine type that a zone does not have,
a topology that the machine does not form, a count that is no whole slice. No capacity is asked and no node started.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from penstock.domain.admission import BadInput
from penstock.domain.catalogue import Accelerator, UnknownAccelerator, all_accelerators, find
from penstock.emulator.gke_pools import DEFAULT_MACHINE, Cluster, Operation, Pool
from penstock.emulator.gke_schema import CREATE_POOL, OUTPUT_ONLY
from penstock.emulator.gke_words import GkeRefusal, below, invalid, is_location, is_zone, no_such, region_of, taken
from penstock.emulator.timeline import Timeline
from penstock.emulator.tpu_nodes import Books
from penstock.emulator.tpu_schema import message
from penstock.emulator.tpu_world import Geography, World, drawn

#: Operations that a cluster may have under way at once.
CONCURRENT_MAX: Final = 5
KEPT_MAX: Final = 10_000  #: operations that are remembered; the oldest are forgotten first
_POOL_ID: Final = re.compile(r"[a-z](?:[-a-z0-9]{0,38}[a-z0-9])?")
_TPU_MACHINE: Final = re.compile(r"(?:ct\d\w*|tpu\d\w*)-\w+-\d+t")
#: How an operation's kind is told to whoever must wait for it.
_DOING: Final = {"CREATE_NODE_POOL": "creating", "DELETE_NODE_POOL": "deleting"}


class GkeCall(NamedTuple):
    """One request, read."""

    project: str
    location: str  #: "-": every one
    cluster: str
    id: str  #: of a pool or an operation
    body: Any


class Kubernetes:
    """Kubernetes Engine, as far as one can ask for node pools."""

    def __init__(self, world: World, timeline: Timeline, geography: Geography, books: Books) -> None:
        self._delays = world.delays
        self._seed = world.seed
        self._timeline = timeline
        self._books = books
        self._rng = random.Random(f"{world.seed}/gke")
        self._operations: dict[str, Operation] = {}
        zones = geography.zones()
        self._clusters: dict[str, Cluster] = {}
        for rule in world.clusters:
            there = [rule.location] if is_zone(rule.location) else _zones_of(rule.location, zones)
            cluster = Cluster(rule, there, timeline.now)
            if not is_location(rule.location):
                value = f"clusters {rule.name} location {rule.location!r}"
                raise BadInput("world", value, "is no zone and no region", "such as us-central1-a or us-central1")
            if cluster.name in self._clusters:
                raise BadInput("world", f"clusters {rule.name}", f"is in {rule.location} twice", "give it another name")
            self._clusters[cluster.name] = cluster
        own = {rule.location for rule in world.clusters}
        self._locations = {*zones, *(region_of(zone) for zone in zones), *own}

    def known(self, location: str) -> bool:
        return location in self._locations

    # --- clusters and operations ---

    def list_clusters(self, call: GkeCall) -> dict[str, Any]:
        return _listed("clusters", call, self._clusters.values())

    def get_cluster(self, call: GkeCall) -> dict[str, Any]:
        return self._cluster(call).shown()

    def list_operations(self, call: GkeCall) -> dict[str, Any]:
        return _listed("operations", call, self._operations.values())

    def get_operation(self, call: GkeCall) -> dict[str, Any]:
        found = self._operations.get(call.id)
        if found is None or (found.project, found.location) != (call.project, call.location):
            raise no_such(f"{below(call.project, call.location)}/operations/{call.id}")
        return found.shown()

    # --- node pools ---

    def list_pools(self, call: GkeCall) -> dict[str, Any]:
        found = [each.shown() for each in self._cluster(call).pools.values()]
        return {"nodePools": found} if found else {}

    def get_pool(self, call: GkeCall) -> dict[str, Any]:
        return self._pool(call).shown()

    def create_pool(self, call: GkeCall) -> dict[str, Any]:
        cluster = self._cluster(call)
        asked = message(call.body, CREATE_POOL, "create_node_pool_request").get("nodePool")
        if asked is None:
            raise invalid("Node_pool must be specified.")
        spec = {name: value for name, value in asked.items() if name not in OUTPUT_ONLY}
        if not _POOL_ID.fullmatch(spec.get("name", "")):
            raise invalid(f'Invalid value for field "node_pool.name": "{spec.get("name", "")}".')
        _check_machines(spec, spec.get("locations") or cluster.zones)
        _check_kind(spec)
        if spec["name"] in cluster.pools:
            raise taken(cluster.pools[spec["name"]].name)
        self._check_concurrency(cluster)
        target = f"{cluster.name}/nodePools/{spec['name']}"
        operation = self._begin("CREATE_NODE_POOL", cluster, target)
        pool = cluster.pools[spec["name"]] = Pool(cluster, spec, operation)
        self._record(pool)

        def done() -> None:
            pool.operation, pool.status = None, "RUNNING"
            self._record(pool)

        self._go(operation, drawn(self._delays.pool_create, self._chance(target)), done)
        return operation.shown()

    def delete_pool(self, call: GkeCall) -> dict[str, Any]:
        pool = self._pool(call)
        if pool.operation is not None:
            text = f"is currently {_DOING[pool.operation.kind]} a node pool for cluster {pool.cluster.id}"
            raise GkeRefusal(
                "FAILED_PRECONDITION",
                f"Operation {pool.operation.name} {text}. Please wait and try again once it is done.",
            )
        self._check_concurrency(pool.cluster)
        operation = self._begin("DELETE_NODE_POOL", pool.cluster, pool.name)
        pool.operation, pool.status = operation, "STOPPING"
        self._record(pool)

        def done() -> None:
            del pool.cluster.pools[call.id]
            pool.status = "gone"
            self._record(pool)

        self._go(operation, drawn(self._delays.pool_delete, self._chance(pool.name)), done)
        return operation.shown()

    # --- how it is done ---

    def _cluster(self, call: GkeCall) -> Cluster:
        name = f"{below(call.project, call.location)}/clusters/{call.cluster}"
        if name not in self._clusters:
            raise no_such(name)
        return self._clusters[name]

    def _pool(self, call: GkeCall) -> Pool:
        cluster = self._cluster(call)
        if call.id not in cluster.pools:
            raise no_such(f"{cluster.name}/nodePools/{call.id}")
        return cluster.pools[call.id]

    def _check_concurrency(self, cluster: Cluster) -> None:
        if sum(pool.operation is not None for pool in cluster.pools.values()) >= CONCURRENT_MAX:
            raise GkeRefusal(
                "RESOURCE_EXHAUSTED",
                f'Too many operations: cluster "{cluster.id}" hits the concurrent operations quota {CONCURRENT_MAX}, '
                "please try again later.",
            )

    def _begin(self, kind: str, cluster: Cluster, target: str) -> Operation:
        mark = uuid.UUID(int=self._rng.getrandbits(128), version=4)
        name = f"operation-{int(self._timeline.now * 1000)}-{mark}"
        operation = Operation(name, kind, cluster.project, cluster.location, target, self._timeline.now)
        self._operations[name] = operation
        if len(self._operations) > KEPT_MAX:
            del self._operations[next(iter(self._operations))]
        return operation

    def _go(self, operation: Operation, seconds: float, done: Callable[[], None]) -> None:
        """Let an operation wait, run and end."""

        def end() -> None:
            operation.end(self._timeline.now)
            done()

        def run() -> None:
            operation.run()
            self._timeline.after(seconds, end)

        self._timeline.after(drawn(self._delays.pool_pending, self._chance(operation.name)), run)

    def _chance(self, name: str) -> random.Random:
        return random.Random(f"{self._seed}/{name}")

    def _record(self, pool: Pool) -> None:
        self._books.record(self._timeline.now, f"pool.{pool.status}", pool.name, pool.cluster.location)


def _zones_of(region: str, zones: list[str]) -> list[str]:
    return [zone for zone in zones if region_of(zone) == region]


def _check_machines(spec: dict[str, Any], zones: list[str]) -> None:
    """Refuse TPU machines that a zone does not have, and shapes that they do not form."""
    machine = spec.get("config", {}).get("machineType", DEFAULT_MACHINE)
    topology = spec.get("placementPolicy", {}).get("tpuTopology", "")
    if not _TPU_MACHINE.fullmatch(machine):
        if topology:
            raise invalid(f'Machine type "{machine}" has no TPUs: TPU topology {topology} cannot be specified.')
        return
    known = [each for each in all_accelerators() if each.gke_machine_type == machine]
    for zone in zones:
        if not any(each.zones is None or zone in each.zones for each in known):
            raise invalid(f'Invalid machine type "{machine}" in zone "{zone}": GCE_NOT_FOUND')
    if topology:
        _check_slice(spec, machine, topology)


def _check_slice(spec: dict[str, Any], machine: str, topology: str) -> None:
    try:
        shape: Accelerator = find(f"{machine}:{topology}")
    except UnknownAccelerator as error:
        raise invalid(f'Invalid TPU topology "{topology}" for machine type "{machine}".') from error
    if shape.hosts == 1:
        raise invalid(
            "TPU topology can't be specified with single-host TPU slice pool; please remove the tpu_topology from the "
            "node pool creation request if the node pool is intented to run with single-host TPU slice nodes."
        )
    scaling = spec.get("autoscaling", {})
    if scaling.get("enabled"):
        word, count = "Maximum node count", scaling.get("maxNodeCount", 0)
    else:
        word, count = "Node count", spec.get("initialNodeCount", 0) or shape.hosts
    if count != shape.hosts:
        raise invalid(f"{word} {count} is not a valid size of TPU pod slice with topology {topology}")


def _check_kind(spec: dict[str, Any]) -> None:
    config = spec.get("config", {})
    kinds = [kind for kind in ("spot", "preemptible", "flexStart") if config.get(kind)]
    if len(kinds) > 1:
        raise invalid(f"Node pool cannot be both {kinds[0]} and {kinds[1]}.")


def _listed(field: str, call: GkeCall, known: Iterable[Cluster | Operation]) -> dict[str, Any]:
    """Those of the project and location that were asked for; nothing at all where there are none, as the API has it."""
    found = [each.shown() for each in known if each.project == call.project and call.location in ("-", each.location)]
    return {field: found} if found else {}
