"""Tunnels: one per host of what there is, again when they break, none for what is gone; with a stand-in for ssh."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.domain.admission import BadInput
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Slice
from penstock.ports.capacity import READY, Address, CapacityError, Transient
from penstock.wiring import tunnels
from penstock.wiring.settings import load_cloud
from penstock.wiring.tunnels import Tunnels


class QuickClock:
    """Waits are short, so that a test need not wait."""

    def now(self) -> float:
        return 0.0

    def steady(self) -> float:
        return time.monotonic() * 1000

    async def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        await asyncio.sleep(0.01)


def slice_of(id: str, **changes: Any) -> Slice:
    known: dict[str, Any] = {"provider": "tpu_vm", "provider_state": READY, "state": SliceState.CREATING, **changes}
    return Slice(id=id, team="t", pool="p", zone="z", accelerator="v4-16", chips=8, hosts=2, intended_at=0.0, **known)


class Ways:
    """Tunnels with a stand-in for ssh, which writes down how it was called."""

    def __init__(self, folder: Path, does: str, slices: list[Slice], hosts: list[Address]) -> None:
        self._told = folder / "told"
        self.slices, self.hosts = slices, hosts
        self.refusals: list[CapacityError] = [Transient("503")]
        self.noted: set[tuple[str, int, str]] = set()
        self.keys = folder / "host keys"
        ssh = folder / "ssh"
        # One write a call: two of them at once would else mix their lines.
        ssh.write_text(f'#!/bin/sh\necho "$$ $*" >>{self._told}\n{does}\n')
        ssh.chmod(0o755)
        self._made = Tunnels(
            f"{ssh} -i key",
            "http://127.0.0.1:4321",
            clock=QuickClock(),
            directory=self.keys,
            slices=lambda: self.slices,
            addresses=self._addresses,
            noted=lambda *words: self.noted.add(words),
        )

    async def _addresses(self, name: str, zone: str) -> tuple[Address, ...]:
        assert (name, zone) == ("s1", "z")
        if self.refusals:
            raise self.refusals.pop()
        return tuple(self.hosts)

    def lines(self) -> list[list[str]]:
        told = self._told.read_text().splitlines() if self._told.exists() else []
        return [line.split() for line in told]

    def targets(self) -> set[str]:
        return {line[line.index("--") - 1] for line in self.lines()}

    def alive(self) -> bool:
        return any(Path(f"/proc/{line[0]}").exists() for line in self.lines())

    async def until(self, what: Callable[[], bool]) -> None:
        for _ in range(6_000):
            if what():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"it did not come to that within a minute: {self.lines()}")

    def play(self, story: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            running = asyncio.create_task(self._made.run())
            try:
                await story()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        asyncio.run(run())


TWO = [Address("10.0.0.1", "34.0.0.1"), Address("10.0.0.2")]


def test_there_is_a_way_to_every_host_for_as_long_as_it_lives(tmp_path: Path) -> None:
    slices = [slice_of("s1"), slice_of("s2", provider_state="CREATING"), slice_of("s3", state=SliceState.DELETING)]
    ways = Ways(tmp_path, "echo up; exec sleep 1000", slices, list(TWO))

    async def story() -> None:
        await ways.until(lambda: len(ways.lines()) == 2)
        assert ways.targets() == {"34.0.0.1", "10.0.0.2"}
        for line in ways.lines():
            assert line[1:3] == ["-i", "key"]
            assert line[line.index("-R") + 1] == f"127.0.0.1:{tunnels.PORT}:127.0.0.1:4321"
            ways.keys.joinpath("s1-0").touch()
        os.kill(int(ways.lines()[0][0]), signal.SIGKILL)
        await ways.until(lambda: len(ways.lines()) == 3)
        ways.slices.clear()
        await ways.until(lambda: not ways.alive() and not list(ways.keys.iterdir()))

    ways.play(story)


GREETS = {
    "a line": "echo 'Welcome to this image'",
    "no whole line": "printf 'What is '",
    "much": "yes welcome | head -c 20000",
    "the word in pieces": "printf u; sleep 0.1; printf 'p '",
}


@pytest.mark.parametrize("greeting", GREETS.values(), ids=GREETS.keys())
def test_what_a_shell_says_first_keeps_no_place_among_those_that_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, greeting: str
) -> None:
    monkeypatch.setattr(tunnels, "AT_ONCE", 1)
    # What it is told to run, but for the watching: that would outlive this stand-in.
    does = f'{greeting}; for word; do :; done; sh -c "${{word%%while*}}\'"; exec sleep 1000'
    ways = Ways(tmp_path, does, [slice_of("s1")], list(TWO))

    async def story() -> None:
        await ways.until(lambda: ways.targets() == {"34.0.0.1", "10.0.0.2"})

    ways.play(story)


@pytest.mark.parametrize("does", ["exec sleep 1000", "exec yes"])
def test_a_shell_that_does_not_come_to_the_point_is_given_up_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    monkeypatch.setattr(tunnels, "AT_ONCE", 1)
    monkeypatch.setattr(tunnels, "_UP_S", 0.5)
    ways = Ways(tmp_path, does, [slice_of("s1")], list(TWO))

    async def story() -> None:
        await ways.until(lambda: len(ways.noted) == 2)
        assert all("startup files" in why for _, _, why in ways.noted)

    ways.play(story)


def test_hosts_are_looked_for_again_where_they_were_not_found(tmp_path: Path) -> None:
    """A node that was stopped and started has other addresses; one that vanishes from a listing keeps those it had."""
    ways = Ways(tmp_path, "echo 'ssh: connect to host x: No route to host' >&2; exit 255", [slice_of("s1")], list(TWO))

    async def story() -> None:
        await ways.until(lambda: ways.targets() == {"34.0.0.1", "10.0.0.2"})
        await ways.until(lambda: len(ways.noted) == 2)
        assert {why for _, _, why in ways.noted} == {"not reached by ssh: ssh: connect to host x: No route to host"}
        ways.hosts.clear()
        before = len(ways.lines())
        await ways.until(lambda: len(ways.lines()) > before + 4)
        ways.hosts[:] = [Address("10.0.0.1", "34.0.0.9"), Address("10.0.0.2")]
        await ways.until(lambda: "34.0.0.9" in ways.targets())

    ways.play(story)


def test_an_ssh_that_cannot_be_run_is_no_reason_to_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ways = Ways(tmp_path, "", [slice_of("s1")], list(TWO))
    (tmp_path / "ssh").chmod(0o644)

    async def story() -> None:
        await ways.until(lambda: len(caplog.messages) >= 2)
        (tmp_path / "ssh").chmod(0o755)
        await ways.until(lambda: len(ways.lines()) >= 2)

    ways.play(story)
    assert sum("cannot be run" in line for line in caplog.messages) == 2, "one line for each host and reason"


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("", "ssh ended with exit code 255"),
        ("Warning: x\nroot@h: Permission denied (publickey).\n", "the host refuses the key (root@h: Permission denied"),
        (
            "@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "another key than",
        ),
        (
            "No ED25519 host key is known for h and you have requested strict checking.\nHost key verification failed.",
            "the host's key is not known",
        ),
        ("Error: remote port forwarding failed for listen port 7353", "port 7353 of the host cannot be had"),
        ("debug\nssh: connect to host h port 22: Connection refused\n", "ssh: connect to host h port 22: Connection"),
    ],
)
def test_what_ssh_says_becomes_one_line(said: str, meant: str) -> None:
    told = tunnels.plainly(said, 255)
    assert meant in told
    assert "\n" not in told


@pytest.mark.parametrize("word", ["telnet", "ssh 'open"])
def test_only_ssh_makes_tunnels(tmp_path: Path, word: str) -> None:
    with pytest.raises(BadInput, match="is not an ssh command"):
        load_cloud({"PENSTOCK_HOME": str(tmp_path), "PENSTOCK_TPU_VM_TUNNEL": word})
    found = load_cloud({"PENSTOCK_HOME": str(tmp_path), "PENSTOCK_TPU_VM_TUNNEL": "/usr/bin/ssh -i k"})
    assert found["tunnel"].value == "/usr/bin/ssh -i k"
