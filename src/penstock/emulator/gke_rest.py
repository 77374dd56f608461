"""The Container API (v1) as REST: which request is which method.

`google` calls it with every request that names clusters, or operations under v1, which Cloud TPU does not have there.
What a method does is `gke_service`'s. Requests of v1beta1 and v1alpha1 are known as such and refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from penstock.emulator.gke_service import GkeCall, Kubernetes
from penstock.emulator.http_words import Answer, Request, as_json
from penstock.emulator.tpu_words import TpuRefusal, bad_argument, camel

PATH: Final = re.compile(
    r"/(v1|v1beta1|v1alpha1)/projects/([^/]+)/locations/([^/:]+)/"
    r"(?:clusters(?:/([^/:]+)(/nodePools(?:/([^/:]+))?)?)?|(operations)(?:/([^/:]+))?)"
)
#: What every method understands: standard parameters, and the deprecated ones that stand in names today.
_PARAMETERS: Final = frozenset({
    "alt", "$alt", "access_token", "callback", "fields", "key", "oauthToken", "prettyPrint", "quotaUser", "uploadType",
    "uploadProtocol", "$.xgafv", "clusterId", "nodePoolId", "operationId", "projectId", "zone",
})  # fmt: skip


class GkeRest:
    """Answers requests."""

    def __init__(self, service: Kubernetes) -> None:
        self._service = service
        #: (HTTP method, collection, with an id) -> what it does
        self._methods: dict[tuple[str, str, bool], Callable[[GkeCall], dict[str, Any]]] = {
            ("GET", "clusters", False): service.list_clusters,
            ("GET", "clusters", True): service.get_cluster,
            ("GET", "nodePools", False): service.list_pools,
            ("POST", "nodePools", False): service.create_pool,
            ("GET", "nodePools", True): service.get_pool,
            ("DELETE", "nodePools", True): service.delete_pool,
            ("GET", "operations", False): service.list_operations,
            ("GET", "operations", True): service.get_operation,
        }

    def answer(self, request: Request) -> Answer:
        try:
            return as_json(self._perform(request))
        except TpuRefusal as refusal:
            return refusal.answer()

    def _perform(self, request: Request) -> dict[str, Any]:
        found = PATH.fullmatch(request.path)
        if found is None:
            raise _no_method(request)
        version, project, location, cluster, pools, pool, operations, operation = (
            unquote(each or "") for each in found.groups()
        )
        collection = "operations" if operations else "nodePools" if pools else "clusters"
        named = {"operations": operation, "nodePools": pool, "clusters": cluster}[collection]
        method = self._methods.get((request.method, collection, bool(named)))
        if method is None or version != "v1":
            raise _no_method(request)
        for name in request.query:
            if name not in _PARAMETERS and camel(name) not in _PARAMETERS:
                raise bad_argument(
                    f'Invalid JSON payload received. Unknown name "{name}": Cannot bind query parameter.'
                )
        everywhere = location == "-" and not named and not pools
        if not everywhere and not self._service.known(location):
            raise _no_location(project, location)
        body = _decoded(request.body) if request.method == "POST" else None
        return method(GkeCall(project, location, cluster, pool or operation, body))


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body or b"{}")
    except msgspec.DecodeError as error:
        raise bad_argument(f"Invalid JSON payload received. {error}") from error


def _no_location(project: str, location: str) -> TpuRefusal:
    info = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": "LOCATION_POLICY_VIOLATED",
        "domain": "googleapis.com",
        "metadata": {"consumer": f"projects/{project}", "location": location, "service": "container.googleapis.com"},
    }
    message = f"Permission denied on 'locations/{location}' (or it may not exist)."
    return TpuRefusal("PERMISSION_DENIED", message, details=[info])


def _no_method(request: Request) -> TpuRefusal:
    return TpuRefusal("NOT_FOUND", f"Method not found: {request.method} {request.path}")
