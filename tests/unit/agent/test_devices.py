"""Which accelerators are here, who holds them, and the gate: one at a time, after the device files were closed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.agent import devices
from penstock.agent.devices import Busy, Found, Gate


def _touch(dev: Path, *names: str) -> None:
    for name in names:
        (dev / name).parent.mkdir(parents=True, exist_ok=True)
        (dev / name).touch()


@pytest.mark.parametrize(
    ("names", "kind", "count"),
    [
        (("accel0", "accel1", "accel2", "accel3"), "tpu", 4),
        (("vfio/0", "vfio/1", "vfio/vfio"), "tpu", 2),
        (("accel/accel0",), "tpu", 1),
        (("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps/nvidia-cap1"), "gpu", 2),
        (("accel0", "nvidia0"), "tpu", 1),
        (("null", "nvidiactl", "vfio/vfio"), "cpu", 3),
        ((), "cpu", 3),
    ],
)
def test_what_is_found(tmp_path: Path, names: tuple[str, ...], kind: str, count: int) -> None:
    _touch(tmp_path, *names)
    found = devices.find(tmp_path, cpus=3)
    assert (found.kind, found.count, found.real) == (kind, count, kind != "cpu")
    assert len(found.files) == (count if found.real else 0)


def test_everything_a_payload_needs_is_passed_through(tmp_path: Path) -> None:
    _touch(tmp_path, "nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-caps/nvidia-cap1", "dri/renderD128", "sda", "kvm")
    names = [str(path.relative_to(tmp_path)) for path in devices.device_files(tmp_path)]
    assert names == ["dri/renderD128", "nvidia-caps/nvidia-cap1", "nvidia-uvm", "nvidia0", "nvidiactl"]


class Holder:
    """Another process that has a file open."""

    def __init__(self, path: Path) -> None:
        program = "import sys; file = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"open\n"
        self.pid = self._process.pid

    def let_go(self) -> None:
        self._process.communicate()


@pytest.fixture
def tpu(tmp_path: Path) -> Found:
    _touch(tmp_path, "accel0", "accel1")
    return devices.find(tmp_path)


@pytest.fixture
def holder(tpu: Found) -> Iterator[Holder]:
    held = Holder(tpu.files[1])
    yield held
    held.let_go()


def test_holders_are_named(tpu: Found, holder: Holder) -> None:
    assert holder.pid in devices.holders(tpu.files)
    holder.let_go()
    assert devices.holders(tpu.files) == {}


def test_the_gate_waits_until_the_device_files_are_closed(tpu: Found, holder: Holder, tmp_path: Path) -> None:
    gate = Gate(tpu, tmp_path / "lock")

    async def enter() -> bool:
        async with gate.passage(30.0):
            return devices.holders(tpu.files) == {}

    async def story() -> bool:
        entering = asyncio.create_task(enter())
        done, _ = await asyncio.wait([entering], timeout=0.3)
        assert not done, "it waits while another process holds a device"
        await asyncio.to_thread(holder.let_go)
        return await entering

    assert asyncio.run(story())


def test_patience_has_an_end_and_says_who_holds_the_devices(tpu: Found, holder: Holder, tmp_path: Path) -> None:
    async def enter() -> None:
        async with Gate(tpu, tmp_path / "lock").passage(0.05):
            pytest.fail("nobody may pass")

    with pytest.raises(Busy, match=rf"the tpu devices are held by .*\({holder.pid}\)"):
        asyncio.run(enter())


def test_one_at_a_time_also_over_several_agents(tpu: Found, tmp_path: Path) -> None:
    inside: list[str] = []

    async def use(gate: Gate, name: str) -> None:
        async with gate.passage(30.0):
            assert inside == [], "somebody else is in"
            inside.append(name)
            await asyncio.sleep(0.02)
            inside.remove(name)

    async def story() -> None:
        gates = [Gate(tpu, tmp_path / "lock") for _ in range(3)]
        await asyncio.gather(*(use(gate, f"{at}") for at, gate in enumerate(gates)))

    asyncio.run(story())


def test_daemons_that_always_hold_a_gpu_are_not_waited_for(tmp_path: Path) -> None:
    _touch(tmp_path, "nvidia0")
    found = devices.find(tmp_path)
    daemon = Holder(found.files[0])
    gate = Gate(found, tmp_path / "lock")
    payload = Holder(found.files[0])
    try:
        with pytest.raises(Busy, match=f"({payload.pid})") as refused:
            asyncio.run(gate.closed(0.0))
        assert str(daemon.pid) not in str(refused.value)
        payload.let_go()
        asyncio.run(gate.closed(5.0))
    finally:
        payload.let_go()
        daemon.let_go()


def test_cpus_need_no_gate(tmp_path: Path) -> None:
    async def both() -> bool:
        gate = Gate(Found(kind="cpu", count=2), tmp_path / "lock")
        async with gate.passage(0.0), gate.passage(0.0):  # without any patience
            return True

    assert asyncio.run(both())
    assert not os.path.lexists(tmp_path / "lock")
