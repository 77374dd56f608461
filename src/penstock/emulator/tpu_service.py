"""The methods of the emulated Cloud TPU API: what each call on a resource does.

`tpu_rest` finds the method of a request and words its answer. Here a call is checked, an operation begun, and the rest
left to the cloud and the queue. A method returns what the API answers, as plain JSON.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from penstock.emulator.tpu_admission import Admission, Shape
from penstock.emulator.tpu_cloud import Cloud
from penstock.emulator.tpu_faults import TpuFault
from penstock.emulator.tpu_nodes import Node
from penstock.emulator.tpu_operations import KEPT_MAX, Operation, Operations
from penstock.emulator.tpu_queued import Queue, QueuedResource, Wanted
from penstock.emulator.tpu_schema import OUTPUT_ONLY, checked
from penstock.emulator.tpu_words import (
    TpuRefusal,
    already_exists,
    bad_argument,
    camel,
    not_found,
    seconds_of,
    stamp,
    time_of,
)
from penstock.emulator.tpu_world import GENERATIONS, Geography, drawn

#: What an update may change; disks are what `gcloud … attach-disk` sends.
_UPDATABLE: Final = ("description", "tags", "labels", "metadata", "networkConfig.enableExternalIps", "dataDisks")
#: A request is only for these tiers; more than one is an error.
_TIERS: Final = ("spot", "guaranteed", "bestEffort")


class Call(NamedTuple):
    """One request, read: whom it is about, and what it says."""

    version: str
    method: str  #: `nodes.create`
    project: str
    zone: str  #: "-": every zone
    id: str
    query: dict[str, str]
    body: Any

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"

    @property
    def collection(self) -> str:
        return self.method.partition(".")[0]

    @property
    def name(self) -> str:
        return f"{self.parent}/{self.collection}/{self.id}"


class Service:
    """Cloud TPU, as far as one can ask for it."""

    def __init__(self, cloud: Cloud, queue: Queue, operations: Operations, geography: Geography) -> None:
        self.cloud = cloud
        self.queue = queue
        self.operations = operations
        self.geography = geography
        self.admission = Admission(cloud, queue, geography)
        self._requests: dict[tuple[str, str, str], str] = {}  #: method, project, request id -> operation

    # --- nodes ---

    def node(self, call: Call) -> Node:
        found = self.cloud.books.nodes.get(call.name)
        if found is None:
            raise not_found(call.name)
        return found

    def create_node(self, call: Call, fault: TpuFault | None) -> dict[str, Any]:
        if (before := self._repeated(call)) is not None:
            return before
        self.admission.rate()
        node_id = self.admission.identifier(call.query.get("nodeId", ""), "node_id")
        name = f"{call.parent}/nodes/{node_id}"
        body = checked(call.body, "node", call.version)
        shape = self.admission.node(call.zone, body)
        if name in self.cloud.books.nodes:
            raise already_exists(name)
        self.admission.quota(call.project, call.zone, shape, shape.accelerator.chips, queued=False)
        node = self._made(call, name, body, shape)
        operation = self._begin(call, name, "create", "Node", node)
        lacking = self.cloud.lacking(node)
        if lacking is not None:
            self.cloud.refuse_late(node, lacking, operation.end)
        else:
            self.cloud.bring_up(node, operation.end, fault=fault.kind if fault else "")
        return operation.shown()

    def _made(self, call: Call, name: str, body: dict[str, Any], shape: Shape) -> Node:
        api = call.version.upper().replace("ALPHA", "_ALPHA")
        spec = _filled(body)
        return self.cloud.make(
            name, spec, shape.accelerator, shape.type, spot=shape.spot, reserved=shape.reserved, api=api
        )

    def delete_node(self, call: Call) -> dict[str, Any]:
        if (before := self._repeated(call)) is not None:
            return before
        node = self.node(call)
        operation = self._begin(call, node.name, "delete", "Empty", None)
        self.cloud.delete(node, operation.end)
        return operation.shown()

    def update_node(self, call: Call) -> dict[str, Any]:
        node = self.node(call)
        body = checked(call.body, "node", call.version)
        fields = [camel(each.strip()) for each in call.query.get("updateMask", "").split(",") if each.strip()]
        if not fields:
            raise bad_argument("update_mask is required.", "update_mask")
        changes: dict[str, Any] = {}
        for field in fields:
            if field not in _UPDATABLE:
                raise bad_argument(f"Field '{field}' in update_mask cannot be updated.", "update_mask")
            if field == "networkConfig.enableExternalIps":
                outside = body.get("networkConfig", {}).get("enableExternalIps", False)
                changes["networkConfig"] = {**node.spec.get("networkConfig", {}), "enableExternalIps": outside}
            else:
                empty: Any = {} if field in ("labels", "metadata") else "" if field == "description" else []
                changes[field] = body.get(field, empty)
        operation = self._begin(call, node.name, "update", "Node", node)

        def update() -> None:
            self.cloud.describe(node, changes)
            operation.end(None)

        self.cloud.timeline.after(0.0, update)
        return operation.shown()

    def stop_node(self, call: Call) -> dict[str, Any]:
        node = self.node(call)
        if len(node.hosts) > 1:
            raise TpuRefusal("FAILED_PRECONDITION", f"Node '{node.name}' has several hosts and cannot be stopped.")
        if node.state != "READY":
            raise TpuRefusal("FAILED_PRECONDITION", f"Node '{node.name}' is in state {node.state}, not READY.")
        operation = self._begin(call, node.name, "stop", "Node", node)
        self.cloud.stop(node, operation.end)
        return operation.shown()

    def start_node(self, call: Call) -> dict[str, Any]:
        node = self.node(call)
        if node.state != "STOPPED":
            raise TpuRefusal("FAILED_PRECONDITION", f"Node '{node.name}' is in state {node.state}, not STOPPED.")
        operation = self._begin(call, node.name, "start", "Node", node)
        self.cloud.start(node, operation.end)
        return operation.shown()

    def guest_attributes(self, call: Call) -> dict[str, Any]:
        node = self.node(call)
        body = checked(call.body or {}, "guest_attributes", call.version)
        asked = body.get("queryPath", "")
        found = []
        for index in self._workers(node, body.get("workerIds", [])):
            items = [
                {"namespace": path.partition("/")[0], "key": path.partition("/")[2], "value": value}
                for path, value in sorted(self.cloud.guest_attributes(node, index).items())
                if path.startswith(asked.strip("/"))
            ]
            found.append({"queryPath": asked, "queryValue": {"items": items}})
        return {"guestAttributes": found}

    def simulate_maintenance(self, call: Call) -> dict[str, Any]:
        node = self.node(call)
        body = checked(call.body or {}, "maintenance", call.version)
        self._workers(node, body.get("workerIds", []))
        operation = self._begin(call, node.name, "simulateMaintenanceEvent", "Node", node)
        self._maintain(node)
        self.cloud.timeline.after(0.0, lambda: operation.end(None))
        return operation.shown()

    def perform_maintenance(self, call: Call) -> dict[str, Any]:
        node = self.node(call)
        if node.maintenance is None:
            raise TpuRefusal("FAILED_PRECONDITION", f"Node '{node.name}' has no upcoming maintenance.")
        operation = self._begin(call, node.name, "performMaintenance", "Node", node)
        self.cloud.maintain(node, drawn(self.cloud.world.delays.maintenance, self.cloud.rng))
        self.cloud.timeline.after(0.0, lambda: operation.end(None))
        return operation.shown()

    def _maintain(self, node: Node) -> None:
        delays = self.cloud.world.delays
        notice = self.cloud.delay(node, delays.maintenance_notice)
        self.cloud.maintain(node, self.cloud.delay(node, delays.maintenance), notice)

    def _workers(self, node: Node, asked: list[str]) -> list[int]:
        for each in asked:
            if not each.isdigit() or int(each) >= len(node.hosts):
                raise bad_argument(f"Worker ID '{each}' is not one of the node's {len(node.hosts)}", "worker_ids")
        return [int(each) for each in asked] or list(range(len(node.hosts)))

    # --- queued resources ---

    def queued(self, call: Call) -> QueuedResource:
        found = self.queue.all.get(call.name)
        if found is None:
            raise not_found(call.name)
        return found

    def create_queued(self, call: Call) -> dict[str, Any]:
        if (before := self._repeated(call)) is not None:
            return before
        self.admission.rate()
        queued_id = self.admission.identifier(call.query.get("queuedResourceId", ""), "queued_resource_id")
        name = f"{call.parent}/queuedResources/{queued_id}"
        body = checked(call.body, "queued_resource", call.version)
        if name in self.queue.all:
            raise already_exists(name)
        if len([tier for tier in _TIERS if tier in body]) > 1:
            raise bad_argument("Only one of spot, guaranteed and best_effort can be specified.", "queued_resource.tier")
        model = body.get("provisioningModel", "STANDARD")
        spot = "spot" in body or "bestEffort" in body or model == "SPOT"
        wanted, shapes = self._wanted(call, body, queued_id, spot)
        api = call.version.upper().replace("ALPHA", "_ALPHA")
        queued = QueuedResource(name, body, wanted, self.cloud.timeline.now, api)
        queued.spot = spot or shapes[0].spot
        queued.reserved = _reserved(body, shapes[0], model)
        self._timing(queued, body, model, call.zone)
        shape = shapes[0]._replace(spot=queued.spot, reserved=queued.reserved)
        self.admission.quota(call.project, call.zone, shape, queued.chips, queued=True)
        operation = self._begin(call, name, "create", "QueuedResource", queued)
        self.queue.add(queued, operation)
        return operation.shown()

    def _wanted(self, call: Call, body: dict[str, Any], queued_id: str, spot: bool) -> tuple[list[Wanted], list[Shape]]:
        """All nodes that a request stands for."""
        specs = body.get("tpu", {}).get("nodeSpec", [])
        if not specs:
            raise bad_argument("tpu.node_spec is required.", "queued_resource.tpu.node_spec")
        named: list[tuple[str, dict[str, Any], Shape]] = []
        for spec in specs:
            where = "queued_resource.tpu.node_spec"
            if spec.get("parent") != call.parent:
                raise bad_argument(f"parent must be '{call.parent}'", f"{where}.parent")
            many = spec.get("multisliceParams") or spec.get("multiNodeParams")
            if bool(many) == bool(spec.get("nodeId")):
                raise bad_argument("Exactly one of node_id and the parameters of a multislice is required.", where)
            if many and many.get("nodeCount", 0) <= 1:
                raise bad_argument("node_count must be greater than 1.", f"{where}.node_count")
            prefix = many.get("nodeIdPrefix") or queued_id if many else ""
            ids = [f"{prefix}-{index}" for index in range(many["nodeCount"])] if many else [spec["nodeId"]]
            node = _filled(spec.get("node", {}))
            shape = self.admission.node(call.zone, spec.get("node", {}), spot=spot)
            for each in ids:
                name = f"{call.parent}/nodes/{self.admission.identifier(each, 'node_id')}"
                if name in self.cloud.books.nodes or any(name == other for other, _, _ in named):
                    raise already_exists(name)
                named.append((name, node, shape))
        wanted = [
            Wanted(name, node, shape.accelerator, shape.type, index, len(named))
            for index, (name, node, shape) in enumerate(named)
        ]
        return wanted, [shape for _, _, shape in named]

    def _timing(self, queued: QueuedResource, body: dict[str, Any], model: str, zone: str) -> None:
        policy = body.get("queueingPolicy", {})
        if len(policy) > 1:
            raise bad_argument("Only one field of queueing_policy can be specified.", "queueing_policy")
        now, interval = self.cloud.timeline.now, policy.get("validInterval", {})
        if text := interval.get("startTime") or policy.get("validAfterTime"):
            queued.valid_after = time_of(text, "queueing_policy.valid_after_time")
        if text := interval.get("endTime") or policy.get("validUntilTime"):
            queued.valid_until = time_of(text, "queueing_policy.valid_until_time")
        if text := policy.get("validAfterDuration"):
            queued.valid_after = now + seconds_of(text, "queueing_policy.valid_after_duration")
        if text := policy.get("validUntilDuration"):
            queued.valid_until = now + seconds_of(text, "queueing_policy.valid_until_duration")
        if queued.valid_until is not None and queued.valid_until <= max(now, queued.valid_after or now):
            raise bad_argument("The end of the interval is not after its start, or has passed.", "queueing_policy")
        if model != "FLEX_START":
            return
        kind = queued.wanted[0].type
        if not self.geography.rule(zone).flex_start:
            queued.flaw = TpuRefusal(
                "INVALID_ARGUMENT",
                f'FLEX_START provisioning model is not supported for accelerator type "{kind}" in location "{zone}"',
            )
        run = body.get("runDuration", {}).get("maxRunDuration")
        if run is None:
            raise bad_argument("max_run_duration is required for FLEX_START.", "run_duration.max_run_duration")
        queued.run_s = seconds_of(run, "run_duration.max_run_duration")

    def delete_queued(self, call: Call) -> dict[str, Any]:
        if (before := self._repeated(call)) is not None:
            return before
        queued = self.queued(call)
        operation = self._begin(call, queued.name, "delete", "Empty", None)
        try:
            self.queue.delete(queued, operation, force=call.query.get("force", "").lower() == "true")
        except TpuRefusal:
            self.operations.forget(operation.name)
            self._requests.pop((call.method, call.project, call.query.get("requestId", "")), None)
            raise
        return operation.shown()

    def reset_queued(self, call: Call) -> dict[str, Any]:
        queued = self.queued(call)
        operation = self._begin(call, queued.name, "reset", "QueuedResource", queued)
        try:
            self.queue.reset(queued, operation)
        except TpuRefusal:
            self.operations.forget(operation.name)
            raise
        return operation.shown()

    def maintain_queued(self, call: Call) -> dict[str, Any]:
        queued = self.queued(call)
        body = checked(call.body or {}, "maintenance_of_queued", call.version)
        operation = self._begin(call, queued.name, "performMaintenance", "QueuedResource", queued)
        names = body.get("nodeNames", [])
        for node in self.queue.nodes_of(queued):
            if not names or node.name in names or node.id in names:
                self._maintain(node)
        self.cloud.timeline.after(0.0, lambda: operation.end(None))
        return operation.shown()

    # --- what can be had ---

    def accelerator_types(self, parent: str, zone: str) -> list[dict[str, Any]]:
        return [
            {
                "name": f"{parent}/acceleratorTypes/{kind}",
                "type": kind,
                "acceleratorConfigs": [{"type": GENERATIONS[each.generation], "topology": each.topology}],
            }
            for kind, each in sorted(self.geography.offered(zone).items())
        ]

    def runtime_versions(self, parent: str) -> list[dict[str, Any]]:
        versions = self.geography.runtime_versions()
        return [{"name": f"{parent}/runtimeVersions/{each}", "version": each} for each in versions]

    def locations(self, project: str) -> list[dict[str, Any]]:
        return [
            {
                "name": f"projects/{project}/locations/{zone}",
                "locationId": zone,
                "labels": {"cloud.googleapis.com/region": zone.rpartition("-")[0]},
            }
            for zone in self.geography.zones()
        ]

    def reservations(self, parent: str, zone: str) -> list[dict[str, Any]]:
        begin = self.cloud.timeline.begin
        return [
            {
                "name": f"{parent}/reservations/{each.name}",
                "state": "ACTIVE",
                "standard": {
                    "size": each.chips,
                    "capacityUnits": "CHIPS",
                    "resourceType": each.type,
                    "interval": {"startTime": stamp(begin), "endTime": stamp(begin + 365 * 86_400)},
                    "usage": {"total": str(self.cloud.reserved_in_use(each))},
                },
            }
            for each in self.cloud.world.reservations
            if fnmatchcase(each.zone, zone)
        ]

    # --- operations ---

    def _begin(self, call: Call, target: str, verb: str, kind: str, what: Node | QueuedResource | None) -> Operation:
        operation = self.operations.begin(target, verb, call.version, kind, what.shown if what else dict)
        if request_id := call.query.get("requestId", ""):
            self._requests[call.method, call.project, request_id] = operation.name
            if len(self._requests) > KEPT_MAX:
                del self._requests[next(iter(self._requests))]
        return operation

    def _repeated(self, call: Call) -> dict[str, Any] | None:
        """The operation that an earlier request with the same id has begun."""
        begun = self._requests.get((call.method, call.project, call.query.get("requestId", "")))
        return self.operations.get(begun).shown() if begun else None


def _filled(body: dict[str, Any]) -> dict[str, Any]:
    """A node's body with what the service fills in by itself."""
    spec = {name: value for name, value in body.items() if name not in OUTPUT_ONLY and name != "acceleratorConfig"}
    account = {"email": "", **spec.get("serviceAccount", {})}
    if not account["email"]:
        account["email"] = "000000000000-compute@developer.gserviceaccount.com"
    if not account.get("scope"):
        account["scope"] = ["https://www.googleapis.com/auth/cloud-platform"]
    network = {"network": "default", "subnetwork": "default", **spec.get("networkConfig", {})}
    return {**spec, "serviceAccount": account, "networkConfig": network}


def _reserved(body: dict[str, Any], shape: Shape, model: str) -> str | None:
    """The reservation that a request is for: its name, "" for any, None for none."""
    if body.get("reservationName"):
        return str(body["reservationName"]).rpartition("/")[2]
    if body.get("guaranteed", {}).get("reserved") or model == "RESERVATION_BOUND":
        return shape.reserved or ""
    return shape.reserved
