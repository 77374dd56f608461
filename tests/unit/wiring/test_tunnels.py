"""Tunnels: one per host of what there is, again when they break, none for what is gone; with a stand-in for ssh."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.domain.admission import BadInput
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Slice
from penstock.ports.capacity import READY, Address, Transient
from penstock.wiring import tunnels
from penstock.wiring.settings import load_cloud
from penstock.wiring.tunnels import Tunnels


class QuickClock:
    """Waits are short, so that a test need not wait."""

    def now(self) -> float:
        return 0.0

    def steady(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        await asyncio.sleep(0.01)


def slice_of(id: str, **changes: Any) -> Slice:
    known: dict[str, Any] = {"provider": "tpu_vm", "provider_state": READY, "state": SliceState.CREATING, **changes}
    return Slice(id=id, team="t", pool="p", zone="z", accelerator="v4-16", chips=8, hosts=2, intended_at=0.0, **known)


def test_there_is_a_way_to_every_host_for_as_long_as_it_lives(tmp_path: Path) -> None:
    told = tmp_path / "told"
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$$ $*" >>{told}\nexec sleep 1000\n')
    ssh.chmod(0o755)
    slices = [slice_of("s1"), slice_of("s2", provider_state="CREATING"), slice_of("s3", state=SliceState.DELETING)]
    refusals = [Transient("503")]

    async def addresses(name: str, zone: str) -> tuple[Address, ...]:
        assert (name, zone) == ("s1", "z")
        if refusals:
            raise refusals.pop()
        return (Address("10.0.0.1", "34.0.0.1"), Address("10.0.0.2"))

    def lines() -> list[list[str]]:
        return [line.split() for line in told.read_text().splitlines()] if told.exists() else []

    def alive() -> bool:
        return any(Path(f"/proc/{line[0]}").exists() for line in lines())

    async def until(what: Callable[[], bool]) -> None:
        for _ in range(1_000):
            if what():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it did not come to that within 10 s")

    async def story() -> None:
        made = Tunnels(
            f"{ssh} -i key", "http://127.0.0.1:4321", clock=QuickClock(), slices=lambda: slices, addresses=addresses
        )
        running = asyncio.create_task(made.run())
        await until(lambda: len(lines()) == 2)
        assert {line[-1] for line in lines()} == {"34.0.0.1", "10.0.0.2"}
        for line in lines():
            assert line[1:3] == ["-i", "key"]
            assert line[line.index("-R") + 1] == f"127.0.0.1:{tunnels.PORT}:127.0.0.1:4321"
        first = [int(line[0]) for line in lines()]
        os.kill(first[0], signal.SIGKILL)
        await until(lambda: len(lines()) == 3)
        slices.clear()
        await until(lambda: not alive())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(story())


@pytest.mark.parametrize("word", ["telnet", "ssh 'open"])
def test_only_ssh_makes_tunnels(tmp_path: Path, word: str) -> None:
    with pytest.raises(BadInput, match="is not an ssh command"):
        load_cloud({"PENSTOCK_HOME": str(tmp_path), "PENSTOCK_TPU_VM_TUNNEL": word})
    found = load_cloud({"PENSTOCK_HOME": str(tmp_path), "PENSTOCK_TPU_VM_TUNNEL": "/usr/bin/ssh -i k"})
    assert found["tunnel"].value == "/usr/bin/ssh -i k"
