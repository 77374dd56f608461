"""Emulators as processes: which storage they have, which clock, which world. `tpu emulator` calls it."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.domain.admission import BadInput
from penstock.emulator.facts import Fact, check_on_emulator, known_facts
from penstock.emulator.gcs import GcsEmulator
from penstock.emulator.google import GoogleEmulator, TpuEmulator
from penstock.emulator.http_words import Refused
from penstock.emulator.serving import serve
from penstock.emulator.tpu_hosts import Hosts, NoHosts
from penstock.emulator.tpu_world import World, read_world
from penstock.emulator.vm_hosts import Logins, NoMachines, VmHosts
from penstock.wiring.clock import SystemClock

Ready = Callable[[str], None]


def run_gcs(buckets: Iterable[str], port: int, directory: Path | None, ready: Ready) -> None:
    """Emulate Cloud Storage until told to stop."""
    serve(_gcs(buckets, directory), port, ready)


def run_google(
    buckets: Iterable[str],
    port: int,
    directory: Path | None,
    world: Path | None,
    *,
    machines: bool,
    ready: Ready,
    logins: tuple[Path, int] | None = None,
) -> None:
    """Emulate Cloud TPU and Cloud Storage at one address until told to stop, with hosts that run or without.

    `logins` are a file of public keys and the port at which hosts can be logged in to with them.
    """
    script, gcs = _world(world), _gcs(buckets, directory)
    # The HTTP server passes the signal on once it has ended; dying of it would leave the hosts' disks behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix="penstock-hosts-", ignore_cleanup_errors=True) as disks:
        hosts: Hosts = _machines(Path(disks), logins) if machines else NoHosts()
        try:
            serve(GoogleEmulator(TpuEmulator(script, SystemClock().now, hosts), gcs), port, ready)
        finally:
            hosts.close()


def _machines(disks: Path, logins: tuple[Path, int] | None) -> VmHosts:
    try:
        return VmHosts(disks, Logins(logins[0].read_text(), logins[1]) if logins is not None else None)
    except NoMachines as error:
        raise BadInput("hosts", "here", "cannot be run", str(error)) from error


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
