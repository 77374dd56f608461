"""`tpu solve` from end to end: local hosts and emulated machines of a cloud that are really broken, and mended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.capacity import processes
from penstock.capacity.slice_files import SliceFiles
from penstock.wire.solving import SolveView
from tests.process.shop import Shop
from tests.process.test_tpu_vm import scene_at

HOLD = "import signal; signal.pause()"
OLD_S = 7200


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path / "home")
    shop.open()
    yield shop
    shop.end()


def solve(shop: Shop, *words: str) -> tuple[int, SolveView]:
    done = shop.command("solve", *words, "--json")
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, msgspec.json.decode(done.stdout, type=SolveView)


def verdicts(view: SolveView, host: int = 0) -> dict[str, str]:
    """What is not well."""
    return {each.check: each.verdict for each in view.hosts[host].findings if each.verdict != "well"}


def bad_environment(environments: Path, name: str) -> Path:
    """What a set-up would leave that asked for versions that do not fit."""
    site = environments / name / "venv/lib/python3.11/site-packages"
    for package, wants in (("jax-0.8.1", "Requires-Dist: jaxlib<=0.8.1,>=0.8.1\n"), ("jaxlib-0.7.0", "")):
        (site / f"{package}.dist-info").mkdir(parents=True)
        (site / f"{package}.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\n{wants}\n")
    (environments / name / "ready").touch()
    return environments / name


def free_slice(shop: Shop) -> str:
    job = shop.submit("say('here')")
    assert shop.ended(job)["state"] == "succeeded"
    return str(shop.view(job)["slice"])


def test_a_hanging_agent_is_started_anew_and_its_payload_goes_on(shop: Shop) -> None:
    job = shop.submit("say('on'); gate('go'); say('done')", "the-mark")
    shop.says(job, b"on")
    slice = str(shop.view(job)["slice"])
    done = shop.command("solve", slice)
    assert (done.returncode, done.stdout.splitlines()[-1].endswith(b"all is well")) == (0, True), done
    (agent,) = SliceFiles(shop.home.slices).agents(slice)
    before = shop.payloads("the-mark")
    processes.send(agent.process, signal.SIGSTOP)
    code, view = solve(shop, slice)
    assert (code, view.well) == (0, True)
    assert verdicts(view) == {"agent": "fixed"}
    assert not agent.process.alive
    assert shop.payloads("the-mark") == before
    shop.open_gate(job, "go")
    assert shop.ended(job)["state"] == "succeeded"
    assert len(shop.view(job)["attempts"]) == 1


def test_a_slice_that_cannot_be_mended_twice_is_replaced(shop: Shop) -> None:
    slice = free_slice(shop)
    home = bad_environment(shop.home.path / "cache/environments", "bad")
    # Somebody works in the environment, so that it cannot go.
    with subprocess.Popen([sys.executable, "-c", HOLD], env={**os.environ, "VIRTUAL_ENV": str(home / "venv")}) as user:
        code, view = solve(shop, slice, "--dry-run")
        assert (code, verdicts(view), view.failures) == (1, {"jax": "found"}, 0)
        code, view = solve(shop, slice)
        assert (code, verdicts(view), view.failures, view.quarantined) == (1, {"jax": "unfixed"}, 1, "")
        shown = shop.command("solve", slice[:12])
        assert shown.returncode == 1
        assert b"the slice is given up and replaced" in shown.stdout
        user.kill()
    left = {each["id"]: each["state"] for each in shop.call("GET", "/v1/slices")[1]["slices"]}
    assert left.get(slice, "gone") in ("deleting", "gone")
    told = shop.command("events", "--json").stdout.decode()
    assert "`tpu solve` failed 2 times: host 0, jax" in told
    other = free_slice(shop)
    assert other != slice
    code, view = solve(shop, other)
    assert (code, verdicts(view)) == (0, {"jax": "fixed"})
    assert not home.exists()
    assert shop.command("solve", slice).returncode in (5, 6), "it is going or gone"


def inside(pid: int, script: str) -> None:
    """Run a script on an emulated host as its root would."""
    argv = ["nsenter", "-t", str(pid), "-m", "-p", "-n", "/bin/sh", "-ec", script]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_an_emulated_host_that_is_broken_all_over_is_mended(tmp_path: Path) -> None:
    with scene_at(tmp_path, '"msgspec"') as scene:
        scene.pool("one", "us-central1-a")
        job = scene.shop.submit("say('here')", on="v5e-8", pool="one")
        assert scene.shop.ended(job)["state"] == "succeeded"
        slice = str(scene.shop.view(job)["slice"])

        def agents() -> list[processes.Process]:
            found = processes.with_arguments("-m", "penstock.agent")
            return [each for each in found if f"\0{slice}\0".encode() in words(each.pid)]

        code, view = solve(scene.shop, slice)
        assert (code, verdicts(view)) == (0, {})
        pid = agents()[-1].pid
        stamp = f"@{int(time.time()) - OLD_S}"  # noqa: TID251 (the host has the same clock)
        inside(
            pid,
            f"""
            touch /dev/accel0 /tmp/libtpu_lockfile
            setsid -f sh -c 'exec 9</dev/accel0; exec sleep 987654' >/dev/null 2>&1 </dev/null
            mkdir -p /var/lib/penstock/host/cache
            mount -t tmpfs -o size=4m none /var/lib/penstock/host/cache
            mkdir -p /var/lib/penstock/host/cache/blobs/aa
            head -c 4100000 /dev/zero >/var/lib/penstock/host/cache/blobs/aa/old
            touch -d {stamp} /var/lib/penstock/host/cache/blobs/aa/old
            """,
        )
        code, view = solve(scene.shop, slice, "--dry-run")
        assert (code, verdicts(view)) == (1, {"device": "found", "lock_file": "found", "disk": "found"})
        (device,) = (each for each in view.hosts[0].findings if each.check == "device")
        assert "sleep 987654" in device.evidence
        assert len(processes.with_arguments("sleep", "987654")) == 1
        code, view = solve(scene.shop, slice)
        assert (code, verdicts(view)) == (0, {"device": "fixed", "lock_file": "fixed", "disk": "fixed"})
        assert processes.with_arguments("sleep", "987654") == []
        # The startup script brings an agent back that ended.
        for agent in agents():
            if b"\0-m\0penstock.agent\0" in words(agent.pid) and b"/agent\0" not in words(agent.pid):
                processes.send(agent, signal.SIGKILL)
        code, view = solve(scene.shop, slice)
        assert (code, view.well) == (0, True)
        assert scene.shop.ended(scene.shop.submit("say('again')", on="v5e-8", pool="one"))["state"] == "succeeded"


def words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it ended meanwhile
