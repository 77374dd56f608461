"""Which fields a request for a node pool may have in the Container API's v1: a table for `tpu_schema`'s rules.

`gke_service` checks bodies with it. It follows the generated client of the Cloud SDK 528; fields that change nothing
in the emulator are taken as they come and shown again. It knows nothing of what a field is for.
"""

from __future__ import annotations

from typing import Final

from penstock.emulator.tpu_schema import Kind

_AFFINITY = ("UNSPECIFIED", "NO_RESERVATION", "ANY_RESERVATION", "SPECIFIC_RESERVATION")
_EFFECTS = ("EFFECT_UNSPECIFIED", "NO_SCHEDULE", "PREFER_NO_SCHEDULE", "NO_EXECUTE")
_POLICIES = ("LOCATION_POLICY_UNSPECIFIED", "BALANCED", "ANY")
_STRATEGIES = (
    "NODE_POOL_UPDATE_STRATEGY_UNSPECIFIED", "ROLLING", "BLUE_GREEN", "SURGE", "QUEUED_PROVISIONING", "SHORT_LIVED",
)  # fmt: skip
_CONFIG: Final[dict[str, Kind]] = {
    **dict.fromkeys(
        (
            "accelerators", "advancedMachineFeatures", "bootDisk", "confidentialNodes", "containerdConfig",
            "effectiveCgroupMode", "ephemeralStorageLocalSsdConfig", "fastSocket", "gcfsConfig", "gpuDirectConfig",
            "gvnic", "kubeletConfig", "linuxNodeConfig", "localNvmeSsdBlockConfig", "localSsdEncryptionMode",
            "loggingConfig", "nodeImageConfig", "resourceManagerTags", "sandboxConfig",
            "secondaryBootDiskUpdateStrategy", "secondaryBootDisks", "soleTenantConfig", "windowsNodeConfig",
            "workloadMetadataConfig",
        ),
        "any",
    ),
    "bootDiskKmsKey": "string",
    "diskSizeGb": "integer",
    "diskType": "string",
    "enableConfidentialStorage": "bool",
    "flexStart": "bool",
    "imageType": "string",
    "labels": "map",
    "localSsdCount": "integer",
    "machineType": "string",
    "maxRunDuration": "string",
    "metadata": "map",
    "minCpuPlatform": "string",
    "nodeGroup": "string",
    "oauthScopes": ["string"],
    "preemptible": "bool",
    "reservationAffinity": {"consumeReservationType": _AFFINITY, "key": "string", "values": ["string"]},
    "resourceLabels": "map",
    "serviceAccount": "string",
    "shieldedInstanceConfig": {"enableIntegrityMonitoring": "bool", "enableSecureBoot": "bool"},
    "spot": "bool",
    "storagePools": ["string"],
    "tags": ["string"],
    "taints": [{"effect": _EFFECTS, "key": "string", "value": "string"}],
}  # fmt: skip
#: Fields of a pool that the service itself fills in.
OUTPUT_ONLY: Final = frozenset({
    "conditions", "etag", "instanceGroupUrls", "podIpv4CidrSize", "selfLink", "status", "statusMessage", "updateInfo",
})  # fmt: skip
_POOL: Final[dict[str, Kind]] = {
    **dict.fromkeys(OUTPUT_ONLY, "any"),
    **dict.fromkeys(("autopilotConfig", "networkConfig"), "any"),
    "autoscaling": {
        "autoprovisioned": "bool",
        "enabled": "bool",
        "locationPolicy": _POLICIES,
        "maxNodeCount": "integer",
        "minNodeCount": "integer",
        "totalMaxNodeCount": "integer",
        "totalMinNodeCount": "integer",
    },
    "bestEffortProvisioning": {"enabled": "bool", "minProvisionNodes": "integer"},
    "config": _CONFIG,
    "initialNodeCount": "integer",
    "locations": ["string"],
    "management": {"autoRepair": "bool", "autoUpgrade": "bool", "upgradeOptions": "any"},
    "maxPodsConstraint": {"maxPodsPerNode": "integer"},
    "name": "string",
    "placementPolicy": {"policyName": "string", "tpuTopology": "string", "type": ("TYPE_UNSPECIFIED", "COMPACT")},
    "queuedProvisioning": {"enabled": "bool"},
    "upgradeSettings": {
        "blueGreenSettings": "any",
        "maxSurge": "integer",
        "maxUnavailable": "integer",
        "rollingSettings": "any",
        "strategy": _STRATEGIES,
    },
    "version": "string",
}
CREATE_POOL: Final[dict[str, Kind]] = {
    "clusterId": "string",
    "nodePool": _POOL,
    "parent": "string",
    "projectId": "string",
    "zone": "string",
}
