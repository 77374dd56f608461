"""The seam between the emulated API and what runs on a node's hosts.

`tpu_cloud` calls it when a host comes, goes, or is told that it will go. `NoHosts` is the cloud without machines
(`tpu emulator --no-vms`); processes with a root, an address and a metadata server of their own hang on the same calls.
Nothing here may answer slowly: it is called while a request is being answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

Notice = Literal["preempted", "maintenance"]


class HostSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One machine of a node. `incarnation` names the machine; another one in its place has another."""

    project: str
    zone: str
    node: str  #: the node's id
    node_number: str  #: the service's own number of the node
    index: int
    hosts: int
    incarnation: str
    accelerator_type: str
    topology: str
    devices: int  #: that JAX shows on this host: cores up to v3, chips from v4 on
    spot: bool
    external_address: bool
    metadata: Mapping[str, str]
    service_account: str
    addresses: tuple[str, ...]  #: of all hosts of the node, by index; this one has addresses[index]
    slice: int = 0  #: which node of a multislice
    slices: int = 1
    disks: tuple[str, ...] = ()  #: names of what it has attached beside the one it boots from
    coordinator: str = ""  #: address of the first host of the first slice, where there are several


class Hosts(Protocol):
    """What the cloud does to machines. Calls come in the order in which things happen."""

    def address(self, incarnation: str) -> str:
        """The address that a machine will have, asked once before it starts."""

    def start(self, spec: HostSpec) -> None:
        """Power on; also again after `stop`, with the disk it had."""

    def stop(self, incarnation: str) -> None:
        """Power off at once: nothing on it gets a chance to say good-bye."""

    def discard(self, incarnation: str) -> None:
        """It never comes back; it was stopped before."""

    def notify(self, incarnation: str, notice: Notice, seconds: float) -> None:
        """Its metadata server tells from now on that it will be taken away, or maintained, in so many seconds."""

    def describe(self, incarnation: str, metadata: Mapping[str, str]) -> None:
        """The node's metadata was changed."""

    def guest_attributes(self, incarnation: str) -> Mapping[str, str]:
        """What the machine has published of itself, as `namespace/key`."""

    def disk(self, incarnation: str) -> str:
        """Where a machine's files are, for tests; "" where it has none."""

    async def open_way(self, address: str, port: int) -> None:
        """Let machines reach a server that they could not reach otherwise."""

    def close(self) -> None:
        """The emulator ends."""


class NoHosts:
    """Machines that are nothing but an address."""

    def __init__(self) -> None:
        self._given = 0

    def address(self, incarnation: str) -> str:
        assert incarnation
        self._given += 1
        return f"10.{128 + (self._given >> 16 & 127)}.{self._given >> 8 & 255}.{self._given & 255}"

    def start(self, spec: HostSpec) -> None:
        pass

    def stop(self, incarnation: str) -> None:
        pass

    def discard(self, incarnation: str) -> None:
        pass

    def notify(self, incarnation: str, notice: Notice, seconds: float) -> None:
        pass

    def describe(self, incarnation: str, metadata: Mapping[str, str]) -> None:
        pass

    def guest_attributes(self, incarnation: str) -> Mapping[str, str]:
        assert incarnation
        return {}

    def disk(self, incarnation: str) -> str:
        assert incarnation
        return ""

    async def open_way(self, address: str, port: int) -> None:
        pass

    def close(self) -> None:
        pass
