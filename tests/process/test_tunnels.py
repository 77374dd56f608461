"""Hosts that cannot reach the server are led to it over ssh: real sshds, on this machine and on emulated hosts.

What breaks a way, and what is said of one that cannot be made, is tried with an sshd alone. The long test has two hosts
without a way out, and kills everything that a way hangs on: ssh, the server, a host.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Slice
from penstock.ports.capacity import READY, Address
from penstock.wiring.clock import SystemClock
from penstock.wiring.tunnels import PORT, Tunnels
from tests.missing import need_root
from tests.process.machine import until
from tests.process.real_sshd import Door, RealSshd, real_sshd
from tests.process.ssh_keys import Keys, need_sshd
from tests.process.test_tpu_vm import scene_at

pytestmark = pytest.mark.slow

SLICE = Slice(
    id="s1", team="t", pool="p", zone="z", accelerator="v5e-8", chips=8, hosts=1, intended_at=0.0,
    provider="tpu_vm", provider_state=READY, state=SliceState.CREATING,
)  # fmt: skip


class Led:
    """Ways to one real sshd, and a server behind them that says a word to whoever calls."""

    def __init__(self, folder: Path, sshd: RealSshd, command: str, *, silent_s: int = 60) -> None:
        self.sshd = sshd
        self.noted: list[str] = []
        self.slices = [SLICE]
        self.keys = folder / "host-keys"
        self._command = command
        self._silent_s = silent_s

    def play(self, story: Callable[[], Awaitable[None]]) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert reader
            writer.write(b"here")
            writer.close()

        async def addresses(slice: str, zone: str) -> tuple[Address, ...]:
            assert (slice, zone) == ("s1", "z")
            return (Address(self.sshd.address),)

        async def run() -> None:
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            made = Tunnels(
                self._command,
                f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",
                clock=SystemClock(),
                directory=self.keys,
                slices=lambda: self.slices,
                addresses=addresses,
                noted=lambda slice, host, why: self.noted.append(f"{slice}/{host}: {why}"),
                shared_loopback=True,
                silent_s=self._silent_s,
            )
            running = asyncio.create_task(made.run())
            try:
                await story()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                server.close()

        asyncio.run(run())

    async def until(self, what: Callable[[], bool]) -> None:
        await asyncio.to_thread(until, what)

    def leads(self) -> bool:
        """Whether the host's end of the way leads to the server."""
        try:
            with socket.create_connection((self.sshd.address, PORT), 5) as line:
                return line.recv(4) == b"here"
        except OSError:
            return False

    async def refused(self, what: str) -> None:
        """It was said why, in one line."""
        await self.until(lambda: any(what in line for line in self.noted))
        assert all(line.startswith("s1/0: not reached by ssh: ") and "\n" not in line for line in self.noted)


@pytest.fixture
def sshd(tmp_path: Path) -> Any:
    need_sshd()
    need_root("an sshd that lets root in")
    with real_sshd(tmp_path / "sshd", Keys(tmp_path / "keys").public) as sshd:
        yield sshd


def ssh(folder: Path, port: int, more: str = "", key: str = "key") -> str:
    return f"ssh -F none -i {folder / 'keys' / key} -o IdentitiesOnly=yes -l root -p {port} {more}"


def test_what_cannot_be_made_is_told_in_one_line(tmp_path: Path, sshd: RealSshd) -> None:
    """A key that nobody knows; a host's key that is unknown, where that is forbidden, or changed; no forwarding."""
    strange = Keys(tmp_path / "strange")
    sshd.start()
    wrong = Led(tmp_path, sshd, ssh(tmp_path, sshd.port).replace(str(tmp_path / "keys"), str(strange.public.parent)))
    wrong.play(lambda: wrong.refused("the host refuses the key (root@"))
    assert any("ssh -l USER -i KEY" in each for each in wrong.noted)
    wrong.keys.joinpath("s1-0").unlink(missing_ok=True)

    strict = Led(tmp_path, sshd, ssh(tmp_path, sshd.port, "-o StrictHostKeyChecking=yes"))
    strict.play(lambda: strict.refused("the host's key is not known, and ssh is told to demand that"))

    led = Led(tmp_path, sshd, ssh(tmp_path, sshd.port))
    led.play(lambda: led.until(led.leads))
    assert led.keys.joinpath("s1-0").exists(), "the server stops, and the slice stays"
    sshd.stop()
    sshd.start(key="second")
    led.play(lambda: led.refused("the host shows another key than at first"))

    sshd.stop()
    sshd.start(more="AllowTcpForwarding no\n")
    led.noted.clear()

    async def forbidden() -> None:
        await led.refused(f"port {PORT} of the host cannot be had")
        led.slices.clear()
        await led.until(lambda: not led.keys.joinpath("s1-0").exists())

    led.play(forbidden)


@pytest.mark.long
def test_a_peer_that_vanished_silently_does_not_keep_the_port(tmp_path: Path, sshd: RealSshd) -> None:
    """Neither end is told: ssh gives up by itself, and the host must let go of the port for the next one to have it."""
    sshd.start()
    door = Door(sshd.address, sshd.port)
    quick = "-o ServerAliveInterval=1 -o ServerAliveCountMax=2"
    led = Led(tmp_path, sshd, ssh(tmp_path, door.port, quick), silent_s=6)

    async def story() -> None:
        await led.until(led.leads)
        door.jam()
        await led.until(lambda: not led.leads())
        await led.until(led.leads)

    try:
        led.play(story)
    finally:
        door.close()
    assert any("Timeout" in line for line in led.noted), led.noted


def tunnels(keys: Keys) -> list[int]:
    """The ssh processes of the server under test."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            words = (place / "cmdline").read_bytes().split(b"\0") if place.name.isdecimal() else []
        except OSError:
            continue  # it ended meanwhile
        if words and words[0].endswith(b"ssh") and str(keys.config).encode() in words:
            found.append(int(place.name))
    return found


@pytest.mark.long
def test_ways_outlive_ssh_the_server_and_hosts(tmp_path: Path) -> None:
    need_sshd()
    keys = Keys(tmp_path / "keys")
    emulator = ("--ssh-key", str(keys.public), "--ssh-port", str(keys.port))
    with scene_at(tmp_path, '"msgspec"', *emulator, more=f'tunnel = "{keys.command}"\n') as scene:
        shop = scene.shop
        scene.pool("far", "us-central2-b", "--min", "1", kind="v4-16")
        job = shop.submit("for n in range(10**6): say('tick', n); time.sleep(0.2)", on="v4-16")
        shop.says(job, b"tick 1\n", hosts=2)
        slice = scene.slice_of(job)
        assert len(tunnels(keys)) == 2

        first = tunnels(keys)
        os.kill(first[0], signal.SIGKILL)
        until(lambda: len(tunnels(keys)) == 2 and first[0] not in tunnels(keys))

        before = set(tunnels(keys))
        scene.kill()
        until(lambda: not tunnels(keys))  # they end with the server that made them
        scene.serve()
        until(lambda: len(tunnels(keys)) == 2 and not before & set(tunnels(keys)))
        for host in range(2):
            soon_after = len(shop.log(job, host=host))
            until(lambda host=host, size=soon_after: len(shop.log(job, host=host)) > size)  # type: ignore[misc]
        assert len(shop.view(job)["attempts"]) == 1, "ways that break cost no attempt"

        scene.happen("stop_host", slice, host=1)
        scene.happen("start_host", slice, host=1)
        until(lambda: len(shop.view(job)["attempts"]) == 2 and shop.view(job)["state"] == "running", 180)
        assert scene.slice_of(job) == slice, "a host that was rebooted is led to the server again"
        assert scene.cloud.happened(slice).count("host.up") == 3

        shop.command("cancel", job)
        scene.drop("far")
        until(lambda: not scene.nodes(), 120)
        until(lambda: not tunnels(keys))
        until(lambda: not list((shop.home.path / "host-keys").iterdir()))
