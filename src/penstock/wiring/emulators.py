"""Emulators as processes: which storage they have, which clock, which world. `tpu emulator` calls it."""

from __future__ import annotations

import ipaddress
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from penstock.domain.admission import BadInput
from penstock.emulator.facts import Fact, check_on_emulator, known_facts
from penstock.emulator.gcs import GcsEmulator
from penstock.emulator.google import GoogleEmulator, TpuEmulator
from penstock.emulator.http_words import Refused
from penstock.emulator.serving import serve
from penstock.emulator.tpu_hosts import Hosts, NoHosts
from penstock.emulator.tpu_world import World, read_world
from penstock.emulator.vm_hosts import Logins, NoMachines, Outside, VmHosts
from penstock.wiring.clock import SystemClock
from penstock.wiring.ports import open_port

Ready = Callable[[str], None]
HERE: Final = "127.0.0.1"


def run_gcs(buckets: Iterable[str], port: int, directory: Path | None, ready: Ready) -> None:
    """Emulate Cloud Storage until told to stop."""
    gcs = _gcs(buckets, directory)
    with open_port(HERE, port) as listener:
        serve(gcs, listener, ready)


def run_google(
    buckets: Iterable[str],
    port: int,
    directory: Path | None,
    world: Path | None,
    *,
    machines: bool,
    ready: Ready,
    logins: tuple[Path, int] | None = None,
    disks: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Emulate Cloud TPU, Kubernetes Engine and Cloud Storage at one address until told to stop, with hosts or without.

    `logins` are a file of public keys and the port at which hosts can be logged in to with them. `disks`
    are files by the names under which nodes attach them, `names` IPv4 addresses that hosts can look up.
    """
    script, gcs = _world(world), _gcs(buckets, directory)
    outside = Outside({name: Path(file) for name, file in (disks or {}).items()}, _addresses(names or {}))
    # The HTTP server passes the signal on once it has ended; dying of it would leave the hosts' disks behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with (
        open_port(HERE, port) as listener,
        tempfile.TemporaryDirectory(prefix="penstock-hosts-", ignore_cleanup_errors=True) as roots,
    ):
        hosts: Hosts = _machines(Path(roots), logins, outside) if machines else NoHosts()
        try:
            serve(GoogleEmulator(TpuEmulator(script, SystemClock().now, hosts), gcs), listener, ready)
        finally:
            hosts.close()


def _machines(roots: Path, logins: tuple[Path, int] | None, outside: Outside) -> VmHosts:
    try:
        return VmHosts(roots, Logins(logins[0].read_text(), logins[1]) if logins is not None else None, outside)
    except NoMachines as error:
        raise BadInput("hosts", "here", "cannot be run", str(error)) from error


def _addresses(names: Mapping[str, str]) -> Mapping[str, str]:
    for name, address in names.items():
        try:
            ipaddress.IPv4Address(address)
        except ValueError as error:
            raise BadInput(f"name {name}", address, "is no IPv4 address", "such as 127.0.0.1") from error
    return names


def facts() -> dict[str, Fact]:
    """What is known of the emulated APIs, by name."""
    return known_facts()


def check_fact(fact: Fact) -> list[str]:
    """How an emulator differs from what is known; nothing if it does not."""
    return check_on_emulator(fact)


def _gcs(buckets: Iterable[str], directory: Path | None) -> GcsEmulator:
    try:
        return GcsEmulator(buckets, SystemClock().now, directory=directory)
    except Refused as error:
        rule = "3 to 63 of a-z, 0-9, '-', '_' and '.', with a letter or digit at both ends"
        raise BadInput("bucket", str(error), "cannot be made", f"a name is {rule}") from error


def _world(path: Path | None) -> World:
    if path is None:
        return World()
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("world", str(path), f"cannot be read: {error}", "name a TOML file") from error
    return read_world(text, str(path))
