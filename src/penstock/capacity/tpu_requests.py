"""Turns a slice into the bodies the Cloud TPU API takes, and the API's nodes back into what a provider shows.

Called by `capacity.tpu_vm` alone; pure, so that what is sent can be read in a test. Whose a node is, and which creation
made it, stands in its labels: a name alone proves nothing, because anybody may use it again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from penstock.capacity.startup import SCRIPT_KEY, is_ours
from penstock.domain import cloud
from penstock.domain.catalogue import find
from penstock.domain.cloud import CloudWish
from penstock.domain.nouns import Slice
from penstock.ports import capacity
from penstock.ports.capacity import Address, Existing, Seen

#: Labels of everything we make: the installation, and the one creation.
OWNER_LABEL: Final = "penstock"
MACHINE_LABEL: Final = "penstock-machine"
#: Labels of what we adopted: the slice that it is, and whether it stays when we let it go.
SLICE_LABEL: Final = "penstock-slice"
KEEP_LABEL: Final = "penstock-keep"
_OUR_LABELS: Final = (OWNER_LABEL, MACHINE_LABEL, SLICE_LABEL, KEEP_LABEL)
MACHINE_KEY: Final = "penstock-machine"  #: the same creation, where the machine itself can read it

#: The API counts and spells otherwise than people do.
_API_PREFIX: Final = {"v5e": "v5litepod"}

_NODE_STATES: Final[Mapping[str, str]] = {
    "CREATING": capacity.CREATING,
    "READY": capacity.READY,
    "RESTARTING": capacity.REPAIRING,
    "REIMAGING": capacity.REPAIRING,
    "REPAIRING": capacity.REPAIRING,
    "STARTING": capacity.REPAIRING,
    "DELETING": capacity.DELETING,
    "HIDING": capacity.DELETING,
    "PREEMPTED": capacity.PREEMPTED,
    "TERMINATED": capacity.PREEMPTED,
    "STOPPED": capacity.FAILED,
    "STOPPING": capacity.FAILED,
    "HIDDEN": capacity.FAILED,
    "UNHIDING": capacity.REPAIRING,
}
_QUEUED_STATES: Final[Mapping[str, str]] = {
    "CREATING": capacity.CREATING,
    "ACCEPTED": capacity.CREATING,
    "WAITING_FOR_RESOURCES": capacity.CREATING,
    "PROVISIONING": capacity.CREATING,
    "ACTIVE": capacity.CREATING,  # the node itself says when it is ready
    "DELETING": capacity.DELETING,
    "FAILED": capacity.FAILED,
    "SUSPENDING": capacity.PREEMPTED,
    "SUSPENDED": capacity.PREEMPTED,
}


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator says once for all pools: `[tpu_vm]` of the settings."""

    runtime_version: str = ""
    network: str = "default"
    subnetwork: str = ""
    service_account: str = ""


def accelerator_type(name: str) -> str:
    """The API's word for a catalogue name: `v5e-8` is `v5litepod-8`."""
    generation, dash, size = name.partition("-")
    return f"{_API_PREFIX.get(generation, generation)}{dash}{size}"


def is_queued(wish: CloudWish) -> bool:
    """Whether this kind of capacity can only be had, or is wanted, by a queued resource."""
    return wish.in_line


def version(wish: CloudWish) -> str:
    """The API that knows the fields: flex-start exists in the alpha one alone."""
    return "v2alpha1" if wish.kind == cloud.FLEX_START else "v2"


def node_body(
    wanted: Slice, label: str, machine: str, metadata: Mapping[str, str], defaults: Defaults, *, project: str
) -> dict[str, Any]:
    """A node as the API wants it, inside a queued resource or by itself."""
    wish = wanted.cloud or CloudWish(kind=cloud.SPOT if wanted.spot else cloud.ON_DEMAND)
    known = find(wanted.accelerator)
    network = {"network": wish.network or defaults.network, "enableExternalIps": wish.external_ip}
    if subnetwork := wish.subnetwork or defaults.subnetwork:
        network["subnetwork"] = subnetwork
    body: dict[str, Any] = {
        "acceleratorType": accelerator_type(wanted.accelerator),
        "runtimeVersion": wish.runtime_version or defaults.runtime_version or known.runtime_version,
        "labels": {OWNER_LABEL: label, MACHINE_LABEL: machine, "penstock-pool": _label(wanted.pool)},
        "metadata": {MACHINE_KEY: machine, **metadata},
        "networkConfig": network,
        "schedulingConfig": {
            "spot": wish.kind == cloud.SPOT,
            "preemptible": wish.kind == cloud.PREEMPTIBLE,
            "reserved": wish.kind == cloud.RESERVED,
        },
    }
    if account := wish.service_account or defaults.service_account:
        body["serviceAccount"] = {"email": account, "scope": ["https://www.googleapis.com/auth/cloud-platform"]}
    if wish.tags:
        body["tags"] = list(wish.tags)
    if wish.disks:
        home = f"projects/{project}/zones/{wanted.zone}/disks/"
        body["dataDisks"] = [
            {"sourceDisk": disk if "/" in disk else home + disk, "mode": "READ_ONLY"} for disk in wish.disks
        ]
    return body


def _label(text: str) -> str:
    """A word as labels may be: 63 lower-case letters, digits, dashes and underscores."""
    return re.sub(r"[^a-z0-9_-]", "-", text.lower())[:63]


def queued_body(wanted: Slice, parent: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """A queued resource of one node, both under the slice's name."""
    wish = wanted.cloud or CloudWish()
    inner = dict(node)
    scheduling = inner.pop("schedulingConfig")
    body: dict[str, Any] = {"tpu": {"nodeSpec": [{"parent": parent, "nodeId": wanted.id, "node": inner}]}}
    if scheduling["spot"] or scheduling["preemptible"]:
        body["spot"] = {}
    elif wish.kind == cloud.RESERVED:
        body["guaranteed"] = {}
        inner["schedulingConfig"] = {"reserved": True}
        if wish.reservation:
            body["reservationName"] = wish.reservation
    elif wish.kind == cloud.FLEX_START:
        body["provisioningModel"] = "FLEX_START"
        body["runDuration"] = {"maxRunDuration": f"{wish.life_s or cloud.FLEX_START_LIFE_S_MAX:.0f}s"}
    if wish.wait_s is not None:
        body["queueingPolicy"] = {"validUntilDuration": f"{wish.wait_s:.0f}s"}
    return body


def seen_node(node: Mapping[str, Any], zone: str) -> Seen:
    """A node as the controller wants to see it. A state nobody knows yet is no reason to throw the slice away."""
    labels = node.get("labels") or {}
    said = str(node.get("state", "UNKNOWN"))
    detail = "; ".join(
        str(node[key]) for key in ("healthDescription", "health") if node.get(key) not in (None, "HEALTHY")
    )
    return Seen(
        name=str(node["name"]).rpartition("/")[2],
        zone=zone,
        provider_id=str(labels.get(MACHINE_LABEL) or node.get("id") or node.get("createTime") or "?"),
        state=_NODE_STATES.get(said, capacity.REPAIRING),
        label=labels.get(OWNER_LABEL),
        detail=detail if said == "READY" else f"{said}{': ' if detail else ''}{detail}",
    )


def host_addresses(node: Mapping[str, Any]) -> tuple[Address, ...]:
    """Where a node's hosts are."""
    return tuple(
        Address(str(one.get("ipAddress") or ""), str((one.get("accessConfig") or {}).get("externalIp") or ""))
        for one in node.get("networkEndpoints") or ()
    )


def adopted_labels(node: Mapping[str, Any], owner: str, slice: str, machine: str, *, own: bool) -> dict[str, str]:
    """The labels of a node that becomes ours, beside those it has. With `own` it goes when we let it go."""
    ours = {OWNER_LABEL: owner, MACHINE_LABEL: machine, SLICE_LABEL: slice}
    return {**without_ours(node), **ours, **({} if own else {KEEP_LABEL: "yes"})}


def without_ours(node: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in (node.get("labels") or {}).items() if key not in _OUR_LABELS}


def without_our_script(node: Mapping[str, Any]) -> dict[str, str]:
    """A node's metadata as its owner left it."""
    return {
        key: str(value)
        for key, value in (node.get("metadata") or {}).items()
        if key != SCRIPT_KEY or not is_ours(str(value))
    }


def existing(node: Mapping[str, Any], zone: str) -> Existing:
    """A node as somebody who wants to adopt it sees it."""
    labels, bought = node.get("labels") or {}, node.get("schedulingConfig") or {}
    script = str((node.get("metadata") or {}).get(SCRIPT_KEY) or "")
    return Existing(
        name=str(node["name"]).rpartition("/")[2],
        zone=zone,
        accelerator=str(node.get("acceleratorType") or ""),
        state=str(node.get("state", "UNKNOWN")),
        spot=bool(bought.get("spot") or bought.get("preemptible")),
        owner=labels.get(OWNER_LABEL),
        slice=labels.get(SLICE_LABEL),
        script=bool(script) and not is_ours(script),
    )


def seen_queued(queued: Mapping[str, Any], zone: str) -> Seen | None:
    """A queued resource of ours before its node exists, or after it is gone; None when it is none of our shape."""
    specs = (queued.get("tpu") or {}).get("nodeSpec") or []
    if len(specs) != 1:
        return None
    labels = (specs[0].get("node") or {}).get("labels") or {}
    state = queued.get("state") or {}
    said = str(state.get("state", "CREATING"))
    failed = (state.get("failedData") or {}).get("error") or {}
    return Seen(
        name=str(queued["name"]).rpartition("/")[2],
        zone=zone,
        provider_id=str(labels.get(MACHINE_LABEL) or queued.get("createTime") or "?"),
        state=_QUEUED_STATES.get(said, capacity.CREATING),
        label=labels.get(OWNER_LABEL),
        detail=str(failed.get("message") or said),
    )
