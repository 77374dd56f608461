"""An emulated Cloud TPU whose time passes by hand, and what its hosts were told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
from typing_extensions import override

from penstock.emulator.google import TpuEmulator
from penstock.emulator.http_words import Answer, Request, query_of
from penstock.emulator.tpu_hosts import HostSpec, NoHosts, Notice
from penstock.emulator.tpu_world import World

BEGIN = 1_800_000_000.0
ZONE = "us-central1-a"
NODE: dict[str, Any] = {"acceleratorType": "v5litepod-8", "runtimeVersion": "v2-alpha-tpuv5-lite"}
POD = {**NODE, "acceleratorType": "v5litepod-16"}
SPOT = {**NODE, "schedulingConfig": {"spot": True}}


class ToldHosts(NoHosts):
    """Remembers every call but the questions."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str]] = []
        self.specs: dict[str, HostSpec] = {}

    @override
    def start(self, spec: HostSpec) -> None:
        self.told.append(("start", spec.incarnation))
        self.specs[spec.incarnation] = spec

    @override
    def stop(self, incarnation: str) -> None:
        self.told.append(("stop", incarnation))

    @override
    def discard(self, incarnation: str) -> None:
        self.told.append(("discard", incarnation))

    @override
    def notify(self, incarnation: str, notice: Notice, seconds: float) -> None:
        self.told.append((f"{notice} in {seconds:g}", incarnation))

    @override
    def describe(self, incarnation: str, metadata: Mapping[str, str]) -> None:
        self.told.append((f"describe {dict(metadata)}", incarnation))

    @override
    def guest_attributes(self, incarnation: str) -> Mapping[str, str]:
        return {"hostkeys/ssh-rsa": f"key of {incarnation}", "other/x": "y"}

    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.told]


class ByHand:
    """The emulator, called without a server."""

    def __init__(self, world: World | None = None, **parts: Any) -> None:
        self.now = BEGIN
        self.hosts = ToldHosts()
        self.slept: list[float] = []
        self.emulator = TpuEmulator(
            world or msgspec.convert(parts, World), lambda: self.now, self.hosts, sleep=self._sleep
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def send(self, method: str, target: str, content: object = None, version: str = "v2") -> Answer | None:
        """A path without a slash in front is below the zone."""
        path = target if target.startswith("/") else f"/{version}/projects/p1/locations/{ZONE}/{target}"
        parts = urlsplit(path)
        body = b"" if content is None else msgspec.json.encode(content)
        request = Request(method, parts.path, query_of(parts.query), {}, body)
        return asyncio.run(self.emulator.answer(request))

    def call(self, method: str, target: str, content: object = None, *, version: str = "v2", status: int = 200) -> Any:
        answer = self.send(method, target, content, version)
        assert answer is not None
        assert answer.status == status, answer
        return msgspec.json.decode(answer.body or b"null")

    def control(self, method: str, what: str, content: object = None, status: int = 200) -> Any:
        return self.call(method, f"/_emulator/tpu/{what}", content, status=status)

    def create(self, name: str, body: object = NODE) -> dict[str, Any]:
        return dict(self.call("POST", f"nodes?nodeId={name}", body))

    def node(self, name: str) -> dict[str, Any]:
        return dict(self.call("GET", f"nodes/{name}"))

    def states(self) -> dict[str, str]:
        found = self.call("GET", "/v2/projects/p1/locations/-/nodes").get("nodes", [])
        return {each["name"].rpartition("/")[2]: each["state"] for each in found}

    def operation(self, begun: dict[str, Any]) -> dict[str, Any]:
        return dict(self.call("GET", f"/v2/{begun['name']}"))

    def history(self, name: str) -> list[str]:
        return [each["what"] for each in self.control("GET", "history") if each["name"].endswith(f"/{name}")]

    def true_node(self, name: str) -> dict[str, Any]:
        return next(each for each in self.control("GET", "nodes") if each["name"].endswith(f"/{name}"))

    def wait(self, seconds: float) -> None:
        self.now += seconds
