"""Emulated hosts as process groups: each with a root, a home, a name, an address and a metadata server of its own.

Implements `tpu_hosts.Hosts` for `tpu emulator` without `--no-vms`. A host is one bubblewrap in the hosts' network; the
first process inside runs the startup script and waits. Power off is the death of that process and of all others with
it, which the kernel sees to. It decides nothing about nodes, and must not outlive the emulator: when that dies, the
kernel kills every host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from penstock.emulator.tpu_hosts import HostSpec, Notice
from penstock.emulator.vm_block import BlockDevice, NoDevice
from penstock.emulator.vm_disk import BOOT, OWN_NAME, let_in, make_disk, mounts, write_startup_script
from penstock.emulator.vm_metadata import Metadata, serve_metadata
from penstock.emulator.vm_names import NAME_PORT, NAME_SERVER, NameServer
from penstock.emulator.vm_network import HostNetwork, NoNetwork

METADATA_PORT: Final = 80
SSH_PORT: Final = 22
_METADATA_NAMES: Final = ("metadata.google.internal", "metadata")
_DIES_WITHIN_S: Final = 10.0
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SCRIPT_KEY: Final = "startup-script"


class NoMachines(Exception):
    """This machine cannot hold hosts; the text says what is missing and what to do."""


class Logins(NamedTuple):
    """Who may log in to hosts, and at which port of their addresses this machine finds them."""

    keys: str
    port: int


class Outside(NamedTuple):
    """What hosts find outside themselves: images of disks that nodes may attach, and addresses by name."""

    disks: Mapping[str, Path] = {}
    names: Mapping[str, str] = {}


_NOTHING: Final = Outside()


class _Machine:
    """One host: its disk stays while it is off."""

    def __init__(self, disk: Path, metadata: Metadata) -> None:
        self.disk = disk
        self.metadata = metadata
        self.process: subprocess.Popen[bytes] | None = None
        self.wanted = False  #: whether it is to be on: it takes a moment to get there


class VmHosts:
    """All hosts of an emulator. Made before the loop runs, used inside it."""

    def __init__(self, directory: Path, logins: Logins | None = None, outside: Outside = _NOTHING) -> None:
        if logins is not None and (shutil.which("sshd", path=_PATH) is None or shutil.which("ssh-keygen") is None):
            raise NoMachines("hosts can be logged in to only with sshd here; install openssh-server, or drop --ssh-key")
        if os.geteuid() != 0 or shutil.which("bwrap") is None or shutil.which("nsenter") is None:
            raise NoMachines("hosts need root, bubblewrap and nsenter; add --no-vms for the API alone")
        try:
            self._network = HostNetwork()
        except NoNetwork as error:
            raise NoMachines(f"{error}; add --no-vms for the API alone") from error
        try:
            self._devices = {name: BlockDevice(image) for name, image in outside.disks.items()}
        except NoDevice as error:
            raise NoMachines(f"{error}; leave --disk out") from error
        self._names = outside.names
        self._name_server: NameServer | None = None
        self._directory = directory
        self._logins = logins
        self._machines: dict[str, _Machine] = {}
        self._given = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._removing: list[subprocess.Popen[bytes]] = []

    def close(self) -> None:
        """Power everything off and forget it."""
        for incarnation in list(self._machines):
            self.stop(incarnation)
            self.discard(incarnation)
        for removing in self._removing:
            removing.wait()
        self._network.close()
        for device in self._devices.values():
            device.close()

    async def open_way(self, address: str, port: int) -> None:
        """Let hosts reach a server outside, under its name too where it has one."""
        await self._network.open_way(self._names.get(address, address), port)

    # --- what the cloud asks ---

    def address(self, incarnation: str) -> str:
        assert incarnation
        self._given += 1
        return f"127.{16 + (self._given >> 16 & 63)}.{self._given >> 8 & 255}.{self._given & 255}"

    def start(self, spec: HostSpec) -> None:
        machine = self._machines.get(spec.incarnation)
        if machine is None:
            machine = self._machines[spec.incarnation] = self._new(spec)
        machine.wanted = True
        machine.metadata.restarted()
        task = asyncio.get_running_loop().create_task(self._boot(machine, spec))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self, incarnation: str) -> None:
        machine = self._machines.get(incarnation)
        if machine is None:
            return
        machine.wanted = False
        if machine.process is None:
            return
        _power_off(machine.process, machine.disk)
        machine.process = None

    def discard(self, incarnation: str) -> None:
        machine = self._machines.pop(incarnation, None)
        if machine is None:
            return
        self._network.unlisten(machine.metadata.address, METADATA_PORT)
        self._network.close_door(machine.metadata.address)
        # A disk may hold gigabytes: nobody waits for it, but what has ended is asked for its status.
        self._removing = [each for each in self._removing if each.poll() is None]
        self._removing.append(subprocess.Popen(["rm", "-rf", "--", str(machine.disk)]))

    def notify(self, incarnation: str, notice: Notice, seconds: float) -> None:
        assert seconds >= 0
        if incarnation in self._machines:
            self._machines[incarnation].metadata.notify(notice)

    def describe(self, incarnation: str, metadata: Mapping[str, str]) -> None:
        if incarnation in self._machines:
            self._machines[incarnation].metadata.describe(metadata)

    def guest_attributes(self, incarnation: str) -> Mapping[str, str]:
        return self._machines[incarnation].metadata.guest if incarnation in self._machines else {}

    def disk(self, incarnation: str) -> str:
        return str(self._machines[incarnation].disk) if incarnation in self._machines else ""

    # --- how it is done ---

    def _new(self, spec: HostSpec) -> _Machine:
        disk = self._directory / spec.incarnation
        names = dict.fromkeys((*_METADATA_NAMES, OWN_NAME), spec.addresses[spec.index])
        names |= {_hostname(spec, index): address for index, address in enumerate(spec.addresses)}
        make_disk(disk, _hostname(spec, spec.index), names)
        if self._logins is not None:
            let_in(disk, spec.addresses[spec.index], self._logins.keys)
        return _Machine(disk, Metadata(spec, _hostname(spec, spec.index)))

    async def _boot(self, machine: _Machine, spec: HostSpec) -> None:
        address = machine.metadata.address

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serve_metadata(machine.metadata, reader, writer)

        await self._network.listen(address, METADATA_PORT, serve)
        if self._name_server is None:
            self._name_server = NameServer(self._names)
            await self._network.answer_datagrams(NAME_SERVER, NAME_PORT, self._name_server)
        if self._logins is not None:
            await self._network.open_door(address, self._logins.port, SSH_PORT)
        if not machine.wanted or machine.process is not None:
            return  # it went away, or came up, meanwhile
        write_startup_script(machine.disk, spec.metadata.get(SCRIPT_KEY, ""))
        machine.process = self._power_on(machine, spec)

    def _power_on(self, machine: _Machine, spec: HostSpec) -> subprocess.Popen[bytes]:
        network = self._network.descriptor
        environment = {
            "HOME": "/root",
            "PATH": _PATH,
            "GCE_METADATA_HOST": machine.metadata.address,
            "GCE_METADATA_IP": machine.metadata.address,
            # There are no TPUs here: JAX shows as many devices as it would show of the host's chips.
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={spec.devices}",
        }
        attached = {
            number: self._devices[name].path for number, name in enumerate(spec.disks, 1) if name in self._devices
        }
        argv = [
            "nsenter", f"--net=/proc/self/fd/{network}", "bwrap", "--die-with-parent", "--new-session",
            "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", _hostname(spec, spec.index),
            "--cap-add", "ALL", "--clearenv",
            *(word for name, value in environment.items() for word in ("--setenv", name, value)),
            *mounts(machine.disk, attached),
            "--chdir", "/root", BOOT,
        ]  # fmt: skip
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(network,)
        )


def _power_off(process: subprocess.Popen[bytes], disk: Path) -> None:
    """Returns when nothing of the machine runs.

    The process inside dies of its parent's death, a moment later, and not at all if it had only just been started. With
    it, the first in its world, all others die.
    """
    process.kill()
    process.wait(_DIES_WITHIN_S)
    until = time.monotonic() + _DIES_WITHIN_S
    while (left := _inside(disk)) and time.monotonic() < until:
        for each in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.002)


def _inside(disk: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else [b""]
            if words[0].endswith(b"bwrap") and os.fsencode(disk) in b" ".join(words):
                found.append(int(entry.name))
    return found


def _hostname(spec: HostSpec, index: int) -> str:
    return f"t1v-n-{int(spec.node_number) & 0xFFFFFFFF:08x}-w-{index}"
