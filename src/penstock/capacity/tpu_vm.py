"""Capacity `tpu_vm`: a slice is a Cloud TPU node, asked for directly or by a queued resource, under the slice's name.

The controller calls it through `ports.capacity`; it keeps no truth of its own. A create answers when the request is
taken; the operation behind it is followed in the background (`run`), because a stockout is told there and nowhere else,
and remembered until the slice is deleted. What bears no label of ours is shown as somebody else's and never touched.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from penstock.capacity.startup import SCRIPT_KEY, TOKEN_KEY, needs_token
from penstock.capacity.tpu_requests import (
    KEEP_LABEL,
    OWNER_LABEL,
    SLICE_LABEL,
    Defaults,
    adopted_labels,
    existing,
    host_addresses,
    is_queued,
    node_body,
    queued_body,
    seen_node,
    seen_queued,
    version,
    without_our_script,
    without_ours,
)
from penstock.capacity.tpu_rest import Absent, TpuRest, operation_error
from penstock.domain import limits
from penstock.domain.cloud import CloudWish
from penstock.domain.nouns import Slice
from penstock.ports.capacity import (
    CREATING,
    DELETING,
    FAILED,
    READY,
    Address,
    CapacityError,
    Existing,
    Listing,
    PermissionDenied,
    RateLimited,
    Seen,
    Transient,
)
from penstock.ports.clock import Clock

FOLLOW_EVERY_S: Final = 2.0
#: Operations asked about in one round, those first that were not for longest: ten calls a second, however many create.
FOLLOWED_AT_ONCE: Final = 20
#: A zone that does not answer holds up the round of all for so long.
FOLLOW_CALL_S: Final = 5.0
#: A create whose operation says nothing for so long is left to listings.
FOLLOW_S_MAX: Final = 3600.0
_V2: Final = "v2"

logger = logging.getLogger(__name__)


class _Create(msgspec.Struct):
    """A create that was taken: the operation to follow, and why it failed once that is known."""

    zone: str
    operation: str
    version: str
    machine: str
    since: float
    asked: float  #: when its operation was last asked about
    error: str = ""


class TpuVmCapacity:
    """Implements `ports.capacity.Capacity` for one project."""

    def __init__(
        self,
        rest: TpuRest,
        *,
        label: str,
        clock: Clock,
        metadata: Callable[[Slice], Mapping[str, str]],
        defaults: Defaults | None = None,
        changed: Callable[[str], None] | None = None,
        owner: str | None = None,
    ) -> None:
        """`metadata` is what a slice's machines find at start; `changed` is called with a zone that looks different.

        `owner` is the label that our things bear in the project, where several installations may be at work; the
        controller knows them by `label`.
        """
        self._rest = rest
        self._label = label
        self._owner = owner or label
        self._clock = clock
        self._metadata = metadata
        self._defaults = defaults or Defaults()
        self._changed = changed
        self._creates: dict[str, _Create] = {}  #: by slice, until it is ready, failed and deleted, or old
        self._queued: dict[str, str] = {}  #: slices known to be queued resources -> API version
        self._adopted: dict[str, str] = {}  #: slice -> the node that somebody else made and named
        self._addresses: dict[str, dict[str, tuple[Address, ...]]] = {}  #: zone -> slice -> as last listed
        self.with_token: set[str] = set()  #: slices with a join token that they can do without, as last seen
        self._begun = asyncio.Event()

    @property
    def name(self) -> str:
        return "tpu_vm"

    # --- the port ---
    async def create(self, wanted: Slice) -> Seen:
        wish = wanted.cloud or CloudWish()
        parent = self._rest.zone(wanted.zone)
        machine = secrets.token_hex(8)
        given = self._metadata(wanted)
        node = node_body(wanted, self._owner, machine, given, self._defaults, project=self._rest.project)
        api = version(wish)
        try:
            if is_queued(wish):
                body, kind, query = queued_body(wanted, parent, node), "queuedResources", "queuedResourceId"
                self._queued[wanted.id] = api
            else:
                body, kind, query = node, "nodes", "nodeId"
            operation = await self._rest.call(
                "POST", f"{parent}/{kind}", version=api, query={query: wanted.id}, body=body
            )
        except Absent as error:  # the zone, or the type in this zone
            raise PermissionDenied(str(error)) from error
        now = self._clock.steady()
        self._creates[wanted.id] = _Create(wanted.zone, str(operation.get("name", "")), api, machine, now, now)
        self._begun.set()
        return Seen(
            name=wanted.id, zone=wanted.zone, provider_id=machine, state=CREATING, label=self._label, detail="asked for"
        )

    async def list(self, zone: str) -> Listing:
        parent = self._rest.zone(zone)
        seen: dict[str, Seen] = {}
        complete = True
        hosts: dict[str, tuple[Address, ...]] = {}
        async for page in self._rest.pages(f"{parent}/nodes", "nodes"):
            complete = complete and not page.get("unreachable")
            for node in page.get("nodes", ()):
                it = self._shown(node, zone)
                seen[it.name] = it
                if it.label == self._label:
                    hosts[it.name] = host_addresses(node)
        if complete:
            self._addresses[zone] = hosts
        async for page in self._rest.pages(f"{parent}/queuedResources", "queuedResources", version=_V2):
            complete = complete and not page.get("unreachable")
            for queued in page.get("queuedResources", ()):
                behind = seen_queued(queued, zone)
                if behind is not None:
                    self._queued.setdefault(behind.name, _V2)
                    seen[behind.name] = _merged(self._known(behind), seen.get(behind.name))
        for name, create in self._creates.items():
            if create.zone == zone and create.error and name not in seen:
                seen[name] = self._failed(name, create)
        return Listing(zone=zone, slices=tuple(seen.values()), complete=complete)

    async def get(self, name: str, zone: str) -> Seen | None:
        parent = self._rest.zone(zone)
        node = await self._one(f"{parent}/nodes/{self._adopted.get(name, name)}", _V2)
        queued = await self._one(f"{parent}/queuedResources/{name}", self._queued.get(name, _V2))
        shown = self._shown(node, zone) if node is not None else None
        if queued is not None and (behind := seen_queued(queued, zone)) is not None:
            self._queued.setdefault(name, _V2)
            return _merged(self._known(behind), shown)
        if shown is None and (create := self._creates.get(name)) is not None and create.error:
            return self._failed(name, create)
        return shown

    async def delete(self, name: str, zone: str) -> None:
        """The queued resource first: it holds its node, and would make another."""
        if name in self._adopted:
            await self._let_go(name, zone)
            return
        parent = self._rest.zone(zone)
        self.with_token.discard(name)
        create = self._creates.pop(name, None)
        try:
            if name in self._queued or await self._one(f"{parent}/queuedResources/{name}", _V2) is not None:
                path = f"{parent}/queuedResources/{name}"
                await self._rest.call("DELETE", path, version=self._queued.get(name, _V2), query={"force": "true"})
                self._queued.pop(name, None)
                return
        except Absent:
            self._queued.pop(name, None)
        try:
            await self._rest.call("DELETE", f"{parent}/nodes/{name}")
        except Absent:
            return  # there is nothing, or nothing any more
        except CapacityError:
            if create is not None:
                self._creates[name] = create
            raise

    async def addresses(self, name: str, zone: str) -> tuple[Address, ...]:
        """Where the hosts of a slice are, in the order of their indices; none before the service knows."""
        node = await self._one(f"{self._rest.zone(zone)}/nodes/{self._adopted.get(name, name)}", _V2)
        found = host_addresses(node) if node is not None else ()
        self._addresses.setdefault(zone, {})[name] = found
        return found

    def known_addresses(self, name: str, zone: str) -> tuple[Address, ...]:
        """The same as of the last listing, for when the service cannot be asked."""
        return self._addresses.get(zone, {}).get(name, ())

    async def clear_token(self, name: str, zone: str) -> None:
        """Take the join token out of what the machines of a slice, and whatever runs there, can read."""
        path = f"{self._rest.zone(zone)}/nodes/{self._adopted.get(name, name)}"
        node = await self._one(path, _V2)
        kept = dict((node or {}).get("metadata") or {})
        if _spare_token(kept):
            del kept[TOKEN_KEY]
            await self._rest.call("PATCH", path, query={"updateMask": "metadata"}, body={"metadata": kept})
        self.with_token.discard(name)

    # --- what somebody else made ---
    async def inspect(self, name: str, zone: str) -> Existing | None:
        """A node by its own name, whoever made it; `owner` is the controller's word where it is ours."""
        node = await self._one(f"{self._rest.zone(zone)}/nodes/{name}", _V2)
        if node is None:
            return None
        found = existing(node, zone)
        if found.owner == self._owner:
            return msgspec.structs.replace(found, owner=self._label)
        return msgspec.structs.replace(found, slice=None)  # what others call it is no slice of ours

    async def adopt(self, name: str, zone: str, slice: str, machine: str, *, own: bool, script: str = "") -> None:
        """Label a node as the slice of ours that the store already has; `script` is for its next boot."""
        path = f"{self._rest.zone(zone)}/nodes/{name}"
        node = await self._rest.call("GET", path)
        labels = adopted_labels(node, self._owner, slice, machine, own=own)
        metadata = without_our_script(node)
        if script and SCRIPT_KEY not in metadata:
            metadata[SCRIPT_KEY] = script
        await self._describe(path, labels, metadata)
        self._adopted[slice] = name

    async def _describe(self, path: str, labels: Mapping[str, str], metadata: Mapping[str, str]) -> None:
        body = {"labels": labels, "metadata": metadata}
        await self._rest.call("PATCH", path, query={"updateMask": "labels,metadata"}, body=body)

    async def _let_go(self, slice: str, zone: str) -> None:
        """What was adopted stays, without our labels and script, unless whoever adopted it gave it to us for good."""
        path = f"{self._rest.zone(zone)}/nodes/{self._adopted[slice]}"
        node = await self._one(path, _V2)
        labels = (node or {}).get("labels") or {}
        if node is None or labels.get(OWNER_LABEL) != self._owner or labels.get(SLICE_LABEL) != slice:
            self._adopted.pop(slice)
        elif labels.get(KEEP_LABEL):
            await self._describe(path, without_ours(node), without_our_script(node))
        else:
            await self._rest.call("DELETE", path)

    async def run(self) -> None:
        """Until cancelled: follow the operations of creates, and tell when one has ended."""
        while True:
            open_ones = [name for name, create in self._creates.items() if create.operation and not create.error]
            if not open_ones:
                self._begun.clear()
                await self._begun.wait()
                continue
            open_ones.sort(key=lambda name: self._creates[name].asked)
            rests = await asyncio.gather(*(self._follow(name) for name in open_ones[:FOLLOWED_AT_ONCE]))
            await self._clock.sleep(max(FOLLOW_EVERY_S, *rests))

    # --- parts ---
    def _shown(self, node: Mapping[str, Any], zone: str) -> Seen:
        """A node as the controller knows it: one that was adopted has a name of its own and is known by its slice."""
        seen = self._known(seen_node(node, zone))
        slice = (node.get("labels") or {}).get(SLICE_LABEL)
        if seen.label == self._label:
            known = self.with_token.add if _spare_token(node.get("metadata") or {}) else self.with_token.discard
            known(slice or seen.name)
        if slice is None or seen.label != self._label:
            return seen
        self._adopted[slice] = seen.name
        return msgspec.structs.replace(seen, name=slice)

    def _known(self, seen: Seen) -> Seen:
        """Ours under the controller's word for it. Another installation that chose that word is still not ours."""
        if seen.label == self._owner:
            return msgspec.structs.replace(seen, label=self._label)
        return msgspec.structs.replace(seen, label=None) if seen.label == self._label else seen

    async def _one(self, path: str, api: str) -> dict[str, Any] | None:
        try:
            return await self._rest.call("GET", path, version=api)
        except Absent:
            return None

    async def _follow(self, name: str) -> float:
        """Ask about one create's operation; answers for how long the service wants to be left alone."""
        create = self._creates.get(name)
        if create is None:  # deleted since it was chosen
            return 0.0
        create.asked = self._clock.steady()
        if create.asked - create.since > FOLLOW_S_MAX:
            create.operation = ""
            return 0.0
        try:
            async with asyncio.timeout(FOLLOW_CALL_S):
                operation = await self._rest.call("GET", create.operation, version=create.version)
        except TimeoutError:
            return 0.0
        except Absent:
            create.operation = ""  # forgotten by the service: listings tell the rest
            return 0.0
        except RateLimited as error:
            rest_s = limits.RATE_REST_S if error.retry_after_s is None else error.retry_after_s
            return min(rest_s, limits.RATE_REST_S_MAX)
        except Transient as error:
            logger.info("operation of %s: %s; asking again", name, error)
            return 0.0
        except CapacityError as error:
            logger.warning("operation of %s cannot be read: %s", name, error)
            create.operation = ""
            return 0.0
        if operation.get("done"):
            self._ended(name, create, operation)
        return 0.0

    def _ended(self, name: str, create: _Create, operation: Mapping[str, Any]) -> None:
        create.operation = ""
        failure = operation_error(operation)
        if failure is not None:
            create.error = str(failure)
        elif name not in self._queued:
            self._creates.pop(name, None)
        if self._changed is not None:
            self._changed(create.zone)

    def _failed(self, name: str, create: _Create) -> Seen:
        """What is left of a create that failed: nothing at the provider, but a reason."""
        return Seen(
            name=name,
            zone=create.zone,
            provider_id=create.machine,
            state=FAILED,
            label=self._label,
            detail=create.error,
        )


def _spare_token(metadata: Mapping[str, str]) -> bool:
    """Whether a node has a join token that its hosts can boot again without."""
    return TOKEN_KEY in metadata and not needs_token(metadata.get(SCRIPT_KEY, ""))


def _merged(queued: Seen, node: Seen | None) -> Seen:
    """One slice from its queued resource and its node: the node tells while the request stands."""
    if node is None or queued.state not in (CREATING, READY):
        return queued
    if node.state == DELETING:
        return msgspec.structs.replace(queued, state=DELETING, detail=node.detail)
    return node
