"""The Cloud TPU API as REST: which request is which method, pages, and what faults do to a call.

`google` calls it with every request under /v1, /v2 and /v2alpha1 that names a project. v1 has only locations and
types, which is all that today's clients ask there. What a method does is `tpu_service`'s.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from penstock.emulator.http_words import Answer, Refused, Request, as_json, name_of, token_of
from penstock.emulator.tpu_faults import TpuFault, TpuFaults
from penstock.emulator.tpu_service import Call, Service
from penstock.emulator.tpu_words import TpuRefusal, bad_argument, camel, not_found

PATH: Final = re.compile(
    r"/(v1|v2|v2alpha1)/projects/([^/]+)/locations(?:/([^/:]+)(?:/(\w+)(?:/([^/:]+))?)?(?::(\w+))?)?"
)
#: What every method understands besides its own.
_STANDARD: Final = frozenset({
    "alt", "$alt", "access_token", "callback", "fields", "key", "oauthToken", "prettyPrint", "quotaUser", "uploadType",
    "uploadProtocol", "$.xgafv", "accessToken",
})  # fmt: skip
_PAGED: Final = frozenset({"pageSize", "pageToken"})
_FILTERED: Final = _PAGED | {"filter", "orderBy"}
_BOTH: Final = ("v2", "v2alpha1")
_ALPHA: Final = ("v2alpha1",)
#: (HTTP method, collection, with an id, verb) -> method, parameters in v2 and v2alpha1, versions that have it.
_METHODS: Final[dict[tuple[str, str, bool, str], tuple[str, frozenset[str], tuple[str, ...]]]] = {
    ("GET", "", False, ""): ("locations.list", _FILTERED | {"extraLocationTypes"}, ("v1", *_BOTH)),
    ("GET", "", True, ""): ("locations.get", frozenset(), ("v1", *_BOTH)),
    ("POST", "", True, "generateServiceIdentity"): ("locations.generateServiceIdentity", frozenset(), _BOTH),
    ("POST", "nodes", False, ""): ("nodes.create", frozenset({"nodeId"}), _BOTH),
    ("GET", "nodes", False, ""): ("nodes.list", _PAGED, _BOTH),
    ("GET", "nodes", True, ""): ("nodes.get", frozenset(), _BOTH),
    ("DELETE", "nodes", True, ""): ("nodes.delete", frozenset(), _BOTH),
    ("PATCH", "nodes", True, ""): ("nodes.patch", frozenset({"updateMask"}), _BOTH),
    ("POST", "nodes", True, "stop"): ("nodes.stop", frozenset(), _BOTH),
    ("POST", "nodes", True, "start"): ("nodes.start", frozenset(), _BOTH),
    ("POST", "nodes", True, "getGuestAttributes"): ("nodes.getGuestAttributes", frozenset(), _BOTH),
    ("POST", "nodes", True, "simulateMaintenanceEvent"): ("nodes.simulateMaintenanceEvent", frozenset(), _ALPHA),
    ("POST", "nodes", True, "performMaintenance"): ("nodes.performMaintenance", frozenset(), _ALPHA),
    ("POST", "queuedResources", False, ""): (
        "queuedResources.create",
        frozenset({"queuedResourceId", "requestId"}),
        _BOTH,
    ),
    ("GET", "queuedResources", False, ""): ("queuedResources.list", _PAGED, _BOTH),
    ("GET", "queuedResources", True, ""): ("queuedResources.get", frozenset(), _BOTH),
    ("DELETE", "queuedResources", True, ""): ("queuedResources.delete", frozenset({"force", "requestId"}), _BOTH),
    ("POST", "queuedResources", True, "reset"): ("queuedResources.reset", frozenset(), _BOTH),
    ("POST", "queuedResources", True, "performMaintenanceQueuedResource"): (
        "queuedResources.performMaintenance",
        frozenset(),
        _ALPHA,
    ),
    ("GET", "acceleratorTypes", False, ""): ("acceleratorTypes.list", _FILTERED, ("v1", *_BOTH)),
    ("GET", "acceleratorTypes", True, ""): ("acceleratorTypes.get", frozenset(), ("v1", *_BOTH)),
    ("GET", "runtimeVersions", False, ""): ("runtimeVersions.list", _FILTERED, _BOTH),
    ("GET", "runtimeVersions", True, ""): ("runtimeVersions.get", frozenset(), _BOTH),
    ("GET", "reservations", False, ""): ("reservations.list", _PAGED, _ALPHA),
    ("GET", "operations", False, ""): ("operations.list", _PAGED | {"filter"}, _BOTH),
    ("GET", "operations", True, ""): ("operations.get", frozenset(), _BOTH),
    ("DELETE", "operations", True, ""): ("operations.delete", frozenset(), _BOTH),
    ("POST", "operations", True, "cancel"): ("operations.cancel", frozenset(), _BOTH),
}
#: Only v2alpha1 knows a request's id here.
_ALPHA_IDS: Final = ("nodes.create", "nodes.delete")


class Hangs(Exception):
    """No answer is to be given, ever."""


class Rest:
    """Answers requests."""

    def __init__(self, service: Service, faults: TpuFaults, sleep: Callable[[float], Any] = asyncio.sleep) -> None:
        self._service = service
        self._faults = faults
        self._sleep = sleep
        self._timeline = service.cloud.timeline
        self._methods = self._table()
        #: minute, method, zone, status (0: no answer) -> calls
        self._made: Counter[tuple[int, str, str, int]] = Counter()

    def calls(self) -> list[dict[str, Any]]:
        """How often what was called, by minute of the emulator's life."""
        words = ("minute", "method", "zone", "status")
        return [{**dict(zip(words, key, strict=True)), "calls": count} for key, count in sorted(self._made.items())]

    async def answer(self, request: Request) -> Answer | None:
        """The answer, or None when the connection is to break instead; `Hangs` when it is to stay open."""
        try:
            call = self._read(request)
        except TpuRefusal as refusal:
            return refusal.answer()
        minute, status = int((self._timeline.now - self._timeline.begin) // 60), 0
        try:
            answer = await self._answer(call)
            status = answer.status if answer is not None else 0
            return answer
        finally:
            self._made[minute, call.method, call.zone, status] += 1

    async def _answer(self, call: Call) -> Answer | None:
        try:
            age_s = self._timeline.now - self._timeline.begin
            named = call.id or call.query.get("nodeId", "") or call.query.get("queuedResourceId", "")
            fault = self._faults.strike(call.method, call.zone, named, age_s)
            return as_json(self._perform(call, None)) if fault is None else await self._suffer(call, fault)
        except TpuRefusal as refusal:
            return refusal.answer()

    async def _suffer(self, call: Call, fault: TpuFault) -> Answer | None:
        match fault.kind:
            case "refuse":
                raise fault.refusal()
            case "cut":
                return None
            case "hang":
                raise Hangs
            case "slow":
                await self._sleep(fault.seconds)
                self._timeline.catch_up()
            case "late":
                self._timeline.after(fault.seconds, lambda: self._land(call))
                raise fault.refusal()
            case _:
                pass
        answer = as_json(self._perform(call, fault))
        if fault.kind == "lose":
            return None
        if fault.kind == "refuse_after":
            raise fault.refusal()
        return answer

    def _land(self, call: Call) -> None:
        """A create that was on its way long: it lands unless it is refused by now."""
        try:
            self._perform(call, None)
        except TpuRefusal as refused:
            books = self._service.cloud.books
            books.record(self._timeline.now, "late.refused", call.name, call.zone, why=refused.status)

    def _read(self, request: Request) -> Call:
        found = PATH.fullmatch(request.path)
        if found is None:
            raise _no_method(request)
        version, project, zone, collection, named, verb = (unquote(each or "") for each in found.groups())
        collection = collection if zone else ""
        known = _METHODS.get((request.method, collection, bool(named if collection else zone), verb))
        if known is None or version not in known[2]:
            raise _no_method(request)
        method, allowed, _ = known
        query = {_plain(name): value for name, value in request.query.items()}
        if method in _ALPHA_IDS and version == "v2alpha1":
            allowed = allowed | {"requestId"}
        for name in query:
            if name not in allowed and name not in _STANDARD:
                raise bad_argument(
                    f'Invalid JSON payload received. Unknown name "{name}": Cannot bind query parameter. '
                    f"Field '{name}' could not be found in request message."
                )
        if zone and not (zone == "-" and method.endswith(".list")):
            self._service.admission.zone(project, zone)
        body = _decoded(request.body) if request.method in ("POST", "PATCH") else None
        return Call(version, method, project, zone, named, query, body)

    def _perform(self, call: Call, fault: TpuFault | None) -> dict[str, Any]:
        return self._methods[call.method](call, fault)

    def _table(self) -> dict[str, Callable[[Call, TpuFault | None], dict[str, Any]]]:
        service, operations = self._service, self._service.operations

        def cancel(call: Call) -> dict[str, Any]:
            operations.get(call.name).cancel_requested = True  # it goes on all the same: cancelling is best effort
            return {}

        def forget(call: Call) -> dict[str, Any]:
            operations.forget(call.name)
            return {}

        def identity(call: Call) -> dict[str, Any]:
            return {"identity": {"email": f"service-{call.project}@cloud-tpu.iam.gserviceaccount.com"}}

        plain: dict[str, Callable[[Call], dict[str, Any]]] = {
            "locations.get": lambda call: _one(service.locations(call.project), call.parent),
            "locations.generateServiceIdentity": identity,
            "nodes.get": lambda call: service.node(call).shown(),
            "nodes.delete": service.delete_node,
            "nodes.patch": service.update_node,
            "nodes.stop": service.stop_node,
            "nodes.start": service.start_node,
            "nodes.getGuestAttributes": service.guest_attributes,
            "nodes.simulateMaintenanceEvent": service.simulate_maintenance,
            "nodes.performMaintenance": service.perform_maintenance,
            "queuedResources.create": service.create_queued,
            "queuedResources.get": lambda call: service.queued(call).shown(),
            "queuedResources.delete": service.delete_queued,
            "queuedResources.reset": service.reset_queued,
            "queuedResources.performMaintenance": service.maintain_queued,
            "acceleratorTypes.get": lambda call: _one(service.accelerator_types(call.parent, call.zone), call.name),
            "runtimeVersions.get": lambda call: _one(service.runtime_versions(call.parent), call.name),
            "operations.get": lambda call: operations.get(call.name).shown(),
            "operations.delete": forget,
            "operations.cancel": cancel,
        }
        table = {name: _faultless(method) for name, method in plain.items()}
        table["nodes.create"] = service.create_node
        listings = ("locations", "nodes", "queuedResources", "acceleratorTypes", "runtimeVersions", "reservations")
        for collection in (*listings, "operations"):
            table[f"{collection}.list"] = self._list
        return table

    # --- listings ---

    def _list(self, call: Call, fault: TpuFault | None) -> dict[str, Any]:
        whole = sorted(self._items(call, fault), key=lambda item: str(item["name"]))
        unreachable: list[str] = []
        if fault is not None and fault.kind == "hide":
            whole = [item for item in whole if not fnmatchcase(item["name"].rpartition("/")[2], fault.hidden)]
        if fault is not None and fault.kind == "unreachable":
            if call.zone != "-":
                raise TpuRefusal("UNAVAILABLE", f"The location {call.zone} could not be reached.")
            zones = [zone for zone in self._service.geography.zones() if fnmatchcase(zone, fault.zone)]
            unreachable = [f"projects/{call.project}/locations/{zone}" for zone in zones]
            whole = [item for item in whole if item["name"].split("/")[3] not in zones]
        size = self._page_size(call, fault)
        try:
            after = name_of(call.query.get("pageToken", ""))
        except Refused as error:
            raise bad_argument(str(error), "page_token") from error
        rest = [item for item in whole if item["name"] > after]
        page: dict[str, Any] = {call.collection: rest[:size]} if rest else {}
        if len(rest) > size:
            page["nextPageToken"] = token_of(rest[size - 1]["name"])
        if unreachable:
            page["unreachable"] = unreachable
        return page

    def _page_size(self, call: Call, fault: TpuFault | None) -> int:
        text = call.query.get("pageSize", "") or "0"
        if not text.isascii() or not text.isdigit():
            raise bad_argument(f"Invalid value at 'page_size' (TYPE_INT32), {text!r}", "page_size")
        most = self._service.cloud.world.page_size
        size = min(int(text) or most, most)
        return min(size, fault.most) if fault is not None and fault.kind == "short" else size

    def _items(self, call: Call, fault: TpuFault | None) -> list[dict[str, Any]]:
        service = self._service
        zones = service.geography.zones() if call.zone == "-" else [call.zone]
        match call.collection:
            case "locations":
                return service.locations(call.project)
            case "nodes":
                age_s = fault.seconds if fault is not None and fault.kind == "stale" else 0.0
                return service.cloud.books.listing(call.project, call.zone, age_s, self._timeline.now)
            case "queuedResources":
                there = service.queue.all.values()
                return [each.shown() for each in there if each.project == call.project and each.zone in zones]
            case "operations":
                parents = [f"projects/{call.project}/locations/{zone}" for zone in zones]
                return [each for parent in parents for each in service.operations.listing(parent)]
            case _:
                return [each for zone in zones for each in self._offered(call, zone)]

    def _offered(self, call: Call, zone: str) -> list[dict[str, Any]]:
        parent = f"projects/{call.project}/locations/{zone}"
        match call.collection:
            case "acceleratorTypes":
                return self._service.accelerator_types(parent, zone)
            case "runtimeVersions":
                return self._service.runtime_versions(parent)
            case _:
                return self._service.reservations(parent, zone)


def _faultless(method: Callable[[Call], dict[str, Any]]) -> Callable[[Call, TpuFault | None], dict[str, Any]]:
    """A method for which a fault makes no difference beyond what happens to its answer."""
    return lambda call, _: method(call)


def _one(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    found = next((item for item in items if item["name"] == name), None)
    if found is None:
        raise not_found(name)
    return found


def _plain(name: str) -> str:
    return name if name.startswith("$") else camel(name)


def _decoded(body: bytes) -> Any:
    if not body:
        return {}
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise bad_argument(f"Invalid JSON payload received. {error}") from error


def _no_method(request: Request) -> TpuRefusal:
    return TpuRefusal("NOT_FOUND", f"Method not found: {request.method} {request.path}")
