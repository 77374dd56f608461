"""The metadata server of one emulated host: what a machine of Compute Engine can ask about itself.

`vm_hosts` has one per host, at the host's own address. Values are those that Cloud TPU's images and JAX read;
`preempted` and `maintenance-event` change when the cloud gives notice, and whoever waits for the change is answered
then. It must not answer without the header that keeps browsers and redirects out, as the real one does not.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from penstock.emulator.http_words import query_of
from penstock.emulator.tpu_hosts import HostSpec, Notice
from penstock.emulator.tpu_nodes import PORT

ROOT: Final = "/computeMetadata/v1"
FLAVOR: Final = "Metadata-Flavor"
TOKEN_S: Final = 3599
WAIT_S_MAX: Final = 3600.0
_HEAD_BYTES_MAX: Final = 64 * 1024
_BODY_BYTES_MAX: Final = 1 << 20


class Told(NamedTuple):
    """An answer: status, text, and whether it is JSON."""

    status: int
    text: str
    json: bool = False


class Metadata:
    """What one host is told."""

    def __init__(self, spec: HostSpec, hostname: str) -> None:
        self._spec = spec
        self.address = spec.addresses[spec.index]
        self._hostname = hostname
        self._metadata = dict(spec.metadata)
        self._preempted = "FALSE"
        self._maintenance = "NONE"
        self._changed = asyncio.Event()
        self.guest: dict[str, str] = {}  #: what the host has published, as `namespace/key`

    def notify(self, notice: Notice) -> None:
        if notice == "preempted":
            self._preempted = "TRUE"
        else:
            self._maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
        self._wake()

    def restarted(self) -> None:
        """Maintenance is over when the host comes up again."""
        self._maintenance = "NONE"
        self._wake()

    def describe(self, metadata: Mapping[str, str]) -> None:
        self._metadata = dict(metadata)
        self._wake()

    def tree(self) -> dict[str, Any]:
        """Everything there is, as nested tables."""
        spec = self._spec
        network: dict[str, Any] = {"ip": self.address, "network": "projects/0/networks/default"}
        if spec.external_address:
            network["access-configs"] = {"0": {"external-ip": self.address}}
        instance = {
            "attributes": {**self._metadata, **self._of_tpu()},
            "hostname": f"{self._hostname}.{spec.zone}.c.{spec.project}.internal",
            "id": str(int(hashlib.sha256(spec.incarnation.encode()).hexdigest()[:15], 16)),
            "machine-type": "projects/0/machineTypes/tpu-emulated",
            "maintenance-event": self._maintenance,
            "name": self._hostname,
            "network-interfaces": {"0": network},
            "preempted": self._preempted,
            "scheduling": {"preemptible": "TRUE" if spec.spot else "FALSE"},
            "service-accounts": {name: self._account() for name in {"default", spec.service_account}},
            "zone": f"projects/0/zones/{spec.zone}",
        }
        project = {"project-id": spec.project, "numeric-project-id": "0", "attributes": {}}
        return {"instance": instance, "project": project}

    def _account(self) -> dict[str, str]:
        token = {"access_token": f"emulated-{self._spec.incarnation}", "expires_in": TOKEN_S, "token_type": "Bearer"}
        return {
            "email": self._spec.service_account,
            "scopes": "https://www.googleapis.com/auth/cloud-platform\n",
            "token": msgspec.json.encode(token).decode(),
        }

    def _of_tpu(self) -> dict[str, str]:
        """What the service adds to a node's own metadata. JAX reads the third part of an endpoint, and `tpu-env`."""
        spec = self._spec
        facts = {
            "ACCELERATOR_TYPE": spec.accelerator_type,
            "CONSUMER_PROJECT_ID": spec.project,
            "NODE_ID": spec.node,
            "PREEMPTIBLE": "true" if spec.spot else "false",
            "TOPOLOGY": spec.topology,
            "WORKER_ID": str(spec.index),
            "ZONE": spec.zone,
        }
        if spec.slices > 1:
            facts |= {
                "MEGASCALE_COORDINATOR_ADDRESS": spec.coordinator,
                "MEGASCALE_NUM_SLICES": str(spec.slices),
                "MEGASCALE_SLICE_ID": str(spec.slice),
            }
        return {
            "accelerator-type": spec.accelerator_type,
            "agent-worker-number": str(spec.index),
            "instance-id": spec.node,
            "tpu-env": "".join(f"{name}: '{value}'\n" for name, value in facts.items()),
            "worker-network-endpoints": ",".join(f"unknown:{PORT}:{address}" for address in spec.addresses),
        }

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Told:
        parts = urlsplit(target)
        path, query = unquote(parts.path), query_of(parts.query)
        if not path.startswith(ROOT):
            return Told(200, "computeMetadata/\n") if path in ("", "/") else Told(404, "not found")
        if headers.get(FLAVOR.lower()) != "Google":
            return Told(403, f"the header {FLAVOR}: Google is missing")
        inner = [part for part in path.removeprefix(ROOT).split("/") if part]
        if inner[:2] == ["instance", "guest-attributes"]:
            return self._guest(method, "/".join(inner[2:]), body)
        if method != "GET":
            return Told(405, "only guest attributes can be written")
        told = self._look(inner, query)
        if query.get("wait_for_change", "").lower() == "true":
            told = await self._after_change(inner, query, told)
        return told

    async def _after_change(self, inner: list[str], query: Mapping[str, str], told: Told) -> Told:
        known, wait_s = query.get("last_etag", ""), WAIT_S_MAX
        if known and known != etag(told):
            return told
        if query.get("timeout_sec", "").isdigit():
            wait_s = min(float(query["timeout_sec"]), WAIT_S_MAX)
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    await self._changed.wait()
                    now = self._look(inner, query)
                    if now != told:
                        return now
        except TimeoutError:
            return self._look(inner, query)

    def _look(self, inner: list[str], query: Mapping[str, str]) -> Told:
        found: Any = self.tree()
        for part in inner:
            found = found.get(part) if isinstance(found, dict) else None
            if found is None:
                return Told(404, f"there is no {'/'.join(inner)}")
        if not isinstance(found, dict):
            return Told(200, found)
        if query.get("recursive", "").lower() == "true":
            return Told(200, msgspec.json.encode(found).decode(), json=True)
        return Told(
            200, "".join(f"{name}/\n" if isinstance(found[name], dict) else f"{name}\n" for name in sorted(found))
        )

    def _guest(self, method: str, path: str, body: bytes) -> Told:
        match method:
            case "PUT":
                self.guest[path] = body.decode(errors="replace")
                return Told(200, "")
            case "DELETE":
                self.guest.pop(path, None)
                return Told(200, "")
            case _:
                return Told(200, self.guest[path]) if path in self.guest else Told(404, f"there is no {path}")


def etag(told: Told) -> str:
    return hashlib.sha256(told.text.encode()).hexdigest()[:16]


async def serve_metadata(metadata: Metadata, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, until its caller goes away."""
    try:
        while (request := await _read(reader)) is not None:
            told = await metadata.answer(*request)
            content = told.text.encode()
            kind = "application/json" if told.json else "application/text"
            head = (
                f"HTTP/1.1 {told.status} {'OK' if told.status == 200 else 'No'}\r\n{FLAVOR}: Google\r\n"
                f"Server: Metadata Server for VM\r\nETag: {etag(told)}\r\nContent-Type: {kind}\r\n"
                f"Content-Length: {len(content)}\r\n\r\n"
            )
            writer.write(head.encode() + content)
            await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        pass  # a caller that breaks off or talks nonsense concerns nobody else
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], bytes] | None:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as ended:
        if not ended.partial:
            return None
        raise
    first, *lines = raw.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name
    }
    size = int(headers.get("content-length", "0"))
    if len(raw) > _HEAD_BYTES_MAX or not 0 <= size <= _BODY_BYTES_MAX:
        raise ValueError(f"{len(raw)} bytes of headers, {size} of body")
    return method, target, headers, await reader.readexactly(size)
