"""Hosts that cannot reach the server are led to it over ssh: a real sshd on an emulated host without a way out."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.process.machine import until
from tests.process.ssh_keys import Keys, need_sshd
from tests.process.test_tpu_vm import FIRST, scene_at

pytestmark = pytest.mark.slow


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


def test_a_host_without_a_way_to_the_server_is_led_there(tmp_path: Path) -> None:
    need_sshd()
    keys = Keys(tmp_path / "keys")
    emulator = ("--ssh-key", str(keys.public), "--ssh-port", str(keys.port))
    with scene_at(tmp_path, '"msgspec"', *emulator, more=f'tunnel = "{keys.command}"\n') as scene:
        scene.pool("far", FIRST, "--min", "1", kind="v5e-1")
        job = scene.shop.submit("say('ready'); [time.sleep(0.1) for _ in range(80)]; say('done')", on="v5e-1")
        scene.shop.says(job, b"ready")
        slice = scene.slice_of(job)
        (first,) = tunnels(keys)
        os.kill(first, signal.SIGKILL)
        until(lambda: tunnels(keys) not in ([], [first]))
        ended = scene.shop.ended(job)
        assert (ended["state"], len(ended["attempts"])) == ("succeeded", 1), "a way that breaks costs no attempt"
        assert scene.shop.log(job).endswith(b"done\n")
        scene.drop("far")
        until(lambda: not scene.nodes(), 120)
        until(lambda: not tunnels(keys))
        assert slice not in scene.nodes()
