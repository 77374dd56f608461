"""Which fields a request to the Cloud TPU API may have, by version; what Google's front end refuses before the service
sees it.

`tpu_service` checks every body here, `gke_service` those of its own tables. The tables follow the generated clients of
the Cloud SDK 528, so a field that only v2alpha1 has is refused in v2 as the real API would. Enums may come as names or
numbers, as in protobuf's JSON, and are names afterwards. It knows nothing of what a field is for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from penstock.emulator.tpu_words import bad_argument, camel, snake

#: A field's kind: a word, an enum's values by number, a message, or a list of one of these.
Kind = str | tuple[str, ...] | dict[str, Any] | list[Any]

_INTEGER: Final = re.compile(r"-?\d{1,19}")
_TYPES_V2 = ("TYPE_UNSPECIFIED", "", "V2", "", "V3", "", "", "V4", "", "V5LITE_POD", "V5P", "V6E")
_TYPES = (*_TYPES_V2, "TPU7X", "V6EA")
_MODELS = ("PROVISIONING_MODEL_UNSPECIFIED", "STANDARD", "SPOT", "RESERVATION_BOUND", "FLEX_START")
_NETWORK: Final = {
    "canIpForward": "bool",
    "enableExternalIps": "bool",
    "network": "string",
    "queueCount": "integer",
    "subnetwork": "string",
}
_DISK: Final = {"mode": ("DISK_MODE_UNSPECIFIED", "READ_WRITE", "READ_ONLY"), "sourceDisk": "string"}
#: Fields that the service itself fills in; clients that update send them back, and they are ignored.
OUTPUT_ONLY: Final = frozenset({
    "apiVersion", "createTime", "health", "healthDescription", "id", "multisliceNode", "name", "networkEndpoints",
    "queuedResource", "state", "symptoms", "upcomingMaintenance",
})  # fmt: skip

_NODE_V2: Final[dict[str, Kind]] = {
    **dict.fromkeys(OUTPUT_ONLY, "any"),
    "acceleratorConfig": {"type": _TYPES_V2, "topology": "string"},
    "acceleratorType": "string",
    "cidrBlock": "string",
    "dataDisks": [_DISK],
    "description": "string",
    "labels": "map",
    "metadata": "map",
    "networkConfig": _NETWORK,
    "networkConfigs": [_NETWORK],
    "runtimeVersion": "string",
    "schedulingConfig": {"preemptible": "bool", "reserved": "bool", "spot": "bool"},
    "serviceAccount": {"email": "string", "scope": ["string"]},
    "shieldedInstanceConfig": {"enableSecureBoot": "bool"},
    "tags": ["string"],
}
_NODE_V2ALPHA1: Final[dict[str, Kind]] = {
    **_NODE_V2,
    "acceleratorConfig": {"type": _TYPES, "topology": "string"},
    "autocheckpointEnabled": "bool",
    "bootDiskConfig": {
        "customerEncryptionKey": {"kmsKeyName": "string"},
        "diskSizeGb": "integer",
        "enableConfidentialCompute": "bool",
        "provisionedIops": "integer",
        "provisionedThroughput": "integer",
        "sourceImage": "string",
    },
    "dataDisks": [{**_DISK, "workerIds": ["string"]}],
    "schedulingConfig": {
        "preemptible": "bool",
        "provisioningModel": _MODELS[:4],
        "reservationName": "string",
        "reserved": "bool",
        "spot": "bool",
        "terminationTimestamp": "string",
    },
}
_POLICY: Final[dict[str, Kind]] = {
    "validAfterDuration": "string",
    "validAfterTime": "string",
    "validInterval": {"startTime": "string", "endTime": "string"},
    "validUntilDuration": "string",
    "validUntilTime": "string",
}
_QUEUED_V2: Final[dict[str, Kind]] = {
    "createTime": "any",
    "guaranteed": {"minDuration": "string"},
    "name": "any",
    "queueingPolicy": _POLICY,
    "reservationName": "string",
    "spot": {},
    "state": "any",
    "tpu": {
        "nodeSpec": [
            {
                "multisliceParams": {"nodeCount": "integer", "nodeIdPrefix": "string"},
                "node": _NODE_V2,
                "nodeId": "string",
                "parent": "string",
            }
        ]
    },
}
_WORKLOADS = ("WORKLOAD_TYPE_UNSPECIFIED", "THROUGHPUT_OPTIMIZED", "AVAILABILITY_OPTIMIZED")
_QUEUED_V2ALPHA1: Final[dict[str, Kind]] = {
    **_QUEUED_V2,
    "bestEffort": {},
    "guaranteed": {"minDuration": "string", "reserved": "bool"},
    "provisioningModel": _MODELS,
    "runDuration": {"maxRunDuration": "string", "terminationTime": "string"},
    "tpu": {
        "nodeSpec": [
            {
                "multiNodeParams": {"nodeCount": "integer", "nodeIdPrefix": "string", "workloadType": _WORKLOADS},
                "node": _NODE_V2ALPHA1,
                "nodeId": "string",
                "parent": "string",
            }
        ]
    },
    "trafficConfig": "any",
}
_GUEST: Final[dict[str, Kind]] = {"queryPath": "string", "workerIds": ["string"]}

#: By the request's field for its body, and version.
BODIES: Final[Mapping[tuple[str, str], dict[str, Kind]]] = {
    ("node", "v2"): _NODE_V2,
    ("node", "v2alpha1"): _NODE_V2ALPHA1,
    ("queued_resource", "v2"): _QUEUED_V2,
    ("queued_resource", "v2alpha1"): _QUEUED_V2ALPHA1,
    ("guest_attributes", "v2"): _GUEST,
    ("guest_attributes", "v2alpha1"): _GUEST,
    ("maintenance", "v2alpha1"): {"workerIds": ["string"]},
    ("maintenance_of_queued", "v2alpha1"): {"nodeNames": ["string"]},
}


def checked(body: Any, what: str, version: str) -> dict[str, Any]:
    """The body with names of fields as the API shows them and without null; refused if a field is not known."""
    return message(body, BODIES[what, version], what)


def message(value: Any, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same for a message whose fields the caller knows."""
    if not isinstance(value, dict):
        raise _invalid(where, "a message", value)
    found: dict[str, Any] = {}
    for name, part in value.items():
        known = name if name in fields else camel(name)
        if known not in fields:
            text = f"Invalid JSON payload received. Unknown name \"{name}\" at '{where}': Cannot find field."
            raise bad_argument(text, where)
        if part is not None:
            found[known] = _value(part, fields[known], f"{where}.{snake(known)}")
    return found


def _value(value: Any, kind: Kind, where: str) -> Any:
    match kind:
        case dict():
            return message(value, kind, where)
        case list():
            if not isinstance(value, list):
                raise _invalid(where, "a list", value)
            return [_value(each, kind[0], f"{where}[{index}]") for index, each in enumerate(value)]
        case tuple():
            return _enum(value, kind, where)
        case "map":
            fine = isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
        case "bool":
            fine = isinstance(value, bool)
        case "integer":
            if isinstance(value, str) and _INTEGER.fullmatch(value):
                return int(value)
            fine = isinstance(value, int) and not isinstance(value, bool)
        case "string":
            fine = isinstance(value, str)
        case _:
            fine = True
    if not fine:
        raise _invalid(where, str(kind), value)
    return value


def _enum(value: Any, names: tuple[str, ...], where: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names) and names[value]:
        return names[value]
    if isinstance(value, str) and value and value in names:
        return value
    raise _invalid(where, "enum", value)


def _invalid(where: str, kind: str, value: Any) -> Exception:
    return bad_argument(f"Invalid value at '{where}' ({kind}), {str(value)[:60]!r}", where)
