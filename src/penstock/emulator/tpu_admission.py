"""What the emulated Cloud TPU API checks before it takes a request for nodes in: place, shape, version, rights, quota.

`tpu_service` calls it for nodes and queued resources alike. Whether there is room is not known here: the service finds
that out later, and says so in the operation.
"""

from __future__ import annotations

import random
from collections import deque
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from penstock.domain.catalogue import Accelerator
from penstock.emulator.tpu_cloud import Cloud
from penstock.emulator.tpu_queued import Queue
from penstock.emulator.tpu_words import RESOURCE_ID, TpuRefusal, bad_argument, error_id
from penstock.emulator.tpu_world import Geography, Quota, matching

LABEL_CHARACTERS_MAX: Final = 63
LABELS_MAX: Final = 64
METADATA_BYTES_MAX: Final = 256 * 1024  #: of one value: Compute Engine's limit for a startup script
#: How quotas are named: what stands before and after "Preemptible".
_QUOTAS: Final = {
    "v2": ("TPUV2s", ""),
    "v3": ("TPUV3s", ""),
    "v4": ("TPUV4s", "Pod"),
    "v5e": ("TPUV5s", "Litepod"),
    "v5p": ("TPUV5P", ""),
    "v6e": ("TPUV6E", ""),
}


class Shape(NamedTuple):
    """What a node's body asks for."""

    type: str
    accelerator: Accelerator
    spot: bool
    reserved: str | None  #: name of a reservation, "" any; None: not from one


class Admission:
    """Refuses what the service would refuse."""

    def __init__(self, cloud: Cloud, queue: Queue, geography: Geography) -> None:
        self._cloud = cloud
        self._queue = queue
        self._geography = geography
        self._rng = random.Random(f"{cloud.world.seed}/admission")
        self._creates: deque[float] = deque()

    def zone(self, project: str, zone: str) -> None:
        if zone in self._geography.zones():
            return
        message = f"Permission denied on 'locations/{zone}' (or it may not exist)."
        info = {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": "LOCATION_POLICY_VIOLATED",
            "domain": "googleapis.com",
            "metadata": {"consumer": f"projects/{project}", "location": zone, "service": "tpu.googleapis.com"},
        }
        raise TpuRefusal("PERMISSION_DENIED", message, details=[info])

    def identifier(self, value: str, field: str) -> str:
        if not RESOURCE_ID.fullmatch(value):
            raise bad_argument(
                f"Invalid value for field '{field}': {value!r}; it must match {RESOURCE_ID.pattern}", field
            )
        return value

    def rate(self) -> None:
        """How many creates a project may call for in a minute."""
        most, now = self._cloud.world.create_calls_per_minute, self._cloud.timeline.now
        while self._creates and self._creates[0] <= now - 60:
            self._creates.popleft()
        if most and len(self._creates) >= most:
            raise TpuRefusal(
                "RESOURCE_EXHAUSTED",
                "Quota exceeded for quota metric 'Create requests' and limit 'Maximum number of CreateNode requests "
                "per minute' of service 'tpu.googleapis.com'.",
                retry_after_s=self._cloud.world.retry_after_s,
            )
        self._creates.append(now)

    def node(self, zone: str, body: dict[str, Any], *, spot: bool = False) -> Shape:
        """The shape that a body asks for, once everything but quota is in order."""
        kind, accelerator = self._shape(zone, body)
        self._version(body)
        _labels(body.get("labels", {}))
        for key, value in body.get("metadata", {}).items():
            if len(value.encode()) > METADATA_BYTES_MAX:
                raise bad_argument(f"Value of metadata key '{key}' exceeds {METADATA_BYTES_MAX} bytes", "node.metadata")
        if "networkConfig" in body and "networkConfigs" in body:
            raise bad_argument(
                "Only one of network_config and network_configs can be specified.", "node.network_config"
            )
        scheduling = body.get("schedulingConfig", {})
        model = scheduling.get("provisioningModel", "STANDARD")
        cheap = spot or bool(scheduling.get("spot") or scheduling.get("preemptible") or model == "SPOT")
        reserved = bool(scheduling.get("reserved")) or model == "RESERVATION_BOUND" or bool(_reservation(scheduling))
        if cheap and reserved:
            raise bad_argument("A node cannot be both spot and reserved.", "node.scheduling_config")
        self._rights(zone, kind, cheap)
        return Shape(kind, accelerator, cheap, _reservation(scheduling) if reserved else None)

    def quota(self, project: str, zone: str, shape: Shape, chips: int, *, queued: bool) -> None:
        """Whether the project may hold so many chips more."""
        if shape.reserved is not None:
            return
        for quota in matching(self._cloud.world.quotas, zone, shape.type, shape.spot):
            held = self._held(project, zone, quota)
            if held + chips <= quota.chips:
                continue
            # For checkers: whoever keeps within its quota never gets here.
            self._cloud.books.record(
                self._cloud.timeline.now, "quota.refused", f"projects/{project}", zone, held=held, asked=chips
            )
            before, after = _QUOTAS[shape.accelerator.generation]
            place = f"{quota.per} {zone if quota.per == 'zone' else zone.rpartition('-')[0]}"
            kind = "Preemptible" if shape.spot else ""
            name = f"{before}{kind}{after}PerProjectPer{quota.per.title()}ForTPUAPI"
            text = (
                f"Quota '{name}' exhausted. Limit {quota.chips} in {place}"
                if queued
                else f"Quota limit '{name}' has been exceeded. Limit: {quota.chips} in {place}."
            )
            status = "RESOURCE_EXHAUSTED" if quota.status == 429 else "PERMISSION_DENIED"
            raise TpuRefusal(status, text)

    def _held(self, project: str, zone: str, quota: Quota) -> int:
        """Chips that count: of every node, and of requests that wait or are suspended."""
        region = zone.rpartition("-")[0]

        def counts(where: str, kind: str, spot: bool, owner: str) -> bool:
            near = where == zone if quota.per == "zone" else where.rpartition("-")[0] == region
            meant = quota.spot in (None, spot) and fnmatchcase(kind, quota.type)
            return near and meant and owner == project

        nodes = [
            node.chips
            for node in self._cloud.books.nodes.values()
            if node.queued is None and not node.reserved and counts(node.zone, node.type, node.spot, node.project)
        ]
        requests = [
            each.chips
            for each in self._queue.all.values()
            if each.reserved is None and counts(each.zone, each.wanted[0].type, each.spot, each.project)
        ]
        return sum(nodes) + sum(requests)

    def _shape(self, zone: str, body: dict[str, Any]) -> tuple[str, Accelerator]:
        offered = self._geography.offered(zone)
        if not offered:
            text = f'Cloud TPU received a bad request. The requested zone "{zone}" is not supported.'
            raise TpuRefusal("INVALID_ARGUMENT", f"{text} {error_id(self._rng)}")
        config, named = body.get("acceleratorConfig"), body.get("acceleratorType", "")
        if named and config:
            raise bad_argument(
                "Only one of accelerator_type and accelerator_config can be specified.", "node.accelerator_type"
            )
        if config:
            found = self._geography.by_shape(zone, config.get("type", ""), config.get("topology", ""))
            if found is not None:
                return found
            named = f"{config.get('type', '')}-{config.get('topology', '')}"
        elif named in offered:
            return named, offered[named]
        elif not named:
            raise bad_argument("accelerator_type or accelerator_config is required.", "node.accelerator_type")
        raise TpuRefusal(
            "INVALID_ARGUMENT",
            f'Cloud TPU received a bad request. The requested accelerator configuration for accelerator type, "{named}"'
            f', could not be found in the zonal accelerator configurations for "{zone}".; the accelerator {named} was '
            f"not found in zone {zone} {error_id(self._rng)}",
        )

    def _version(self, body: dict[str, Any]) -> None:
        version = body.get("runtimeVersion", "")
        if not version:
            raise bad_argument("runtime_version is required.", "node.runtime_version")
        if version not in self._geography.runtime_versions():
            raise bad_argument(f"Runtime version '{version}' was not found.", "node.runtime_version")

    def _rights(self, zone: str, kind: str, spot: bool) -> None:
        if next(matching(self._cloud.world.denied, zone, kind, spot), None) is not None:
            raise TpuRefusal(
                "PERMISSION_DENIED",
                f'User does not have permission to submit requests for accelerator type "{kind}" in location {zone}',
            )


def _reservation(scheduling: dict[str, Any]) -> str:
    return str(scheduling.get("reservationName", "")).rpartition("/")[2]


def _labels(labels: dict[str, str]) -> None:
    if len(labels) > LABELS_MAX:
        raise bad_argument(f"A resource can have at most {LABELS_MAX} labels.", "node.labels")
    for key, value in labels.items():
        plain = all(each.islower() or each.isdigit() or each in "_-" or not each.isascii() for each in key + value)
        if not key or not (key[0].islower() or not key[0].isascii()) or not plain:
            raise bad_argument(f"Invalid label '{key}={value}'", "node.labels")
        if max(len(key), len(value)) > LABEL_CHARACTERS_MAX:
            raise bad_argument(f"Label '{key}' exceeds {LABEL_CHARACTERS_MAX} characters", "node.labels")
