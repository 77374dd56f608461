"""`tpu solve` from end to end: local hosts and emulated machines of a cloud that are really broken, and mended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.agent.solving_system import CLOCK_OFF_S
from penstock.agent.surroundings import PLATFORM_ADDRESS
from penstock.capacity import processes
from penstock.capacity.slice_files import SliceFiles
from penstock.wire.solving import SolveView
from tests.process.broken_host import BrokenHost, image, wheel
from tests.process.machine import until
from tests.process.shop import Shop
from tests.process.test_tpu_vm import Scene, scene_at

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
    """What is not well, but for the agent: one that a busy machine keeps waiting is started anew."""
    ill = {each.check: each.verdict for each in view.hosts[host].findings if each.verdict != "well"}
    return {check: verdict for check, verdict in ill.items() if check != "agent"}


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
    assert verdicts(view) == {}
    assert [each.verdict for each in view.hosts[0].findings if each.check == "agent"] == ["fixed"]
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


# --- a cloud's host, broken in every way ---
ZONE = "us-central1-a"
NAME = "penstock.internal"
READY_S = 300.0  #: for a job that needs a new host first; a quiet machine needs ten
HELLO = "the same on every host\n"
WORK = """
import importlib.metadata, pathlib
print(pathlib.Path("/mnt/data/hello").read_text(), importlib.metadata.version("libtpu"))
"""
JAX_WANTS = ("jaxlib<=0.8.1,>=0.8.1", 'libtpu==0.0.24.*; extra == "tpu"')
FITTING = {"jax-0.8.1", "jaxlib-0.8.1", "libtpu-0.0.24.1"}


def free_port() -> int:
    """One below those that the kernel gives out by itself, so that nobody is given it meanwhile."""
    for port in range(20_000 + os.getpid() % 5_000, 32_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@contextlib.contextmanager
def cloud(folder: Path) -> Iterator[Scene]:
    """A cloud with a disk that has a file on it, whose hosts know the server by its name alone."""
    port = free_port()
    words = ("--disk", f"data={image(folder, {'hello': HELLO})}", "--name", f"{NAME}=127.0.0.1")
    more = f'agents_url = "http://{NAME}:{port}"\n[server]\nport = {port}\n'
    with scene_at(folder, '"msgspec", "pip"', *words, more=more) as scene:
        scene.pool("one", ZONE, "--spot", "--max", "2", "--disk", "data", "--mount", "disk:data:/mnt/data")
        yield scene


def project(desk: Path) -> None:
    """Work that brings its packages along, and reads the disk."""
    (desk / "wheels").mkdir()
    made = (
        wheel(desk / "wheels", "jax", "0.8.1", *JAX_WANTS),
        wheel(desk / "wheels", "jaxlib", "0.8.1"),
        wheel(desk / "wheels", "libtpu", "0.0.24.1"),
    )
    (desk / "requirements.txt").write_text("".join(f"./wheels/{each.name}\n" for each in made))
    (desk / "work.py").write_text(WORK)


def work(scene: Scene) -> BrokenHost:
    """The work done on a slice of the pool, and the host it ran on."""
    sent = scene.shop.command("run", "--detach", "--on", "pool:one", "--", "python", "work.py")
    assert sent.returncode == 0, sent.stderr
    job = sent.stdout.decode().split()[-1]
    assert scene.shop.ended(job, READY_S)["state"] == "succeeded", scene.shop.everything(job)
    assert scene.shop.log(job).decode().splitlines()[-2:] == [HELLO.strip(), " 0.0.24.1"]
    return BrokenHost(scene, str(scene.shop.view(job)["slice"]))


def replacement(scene: Scene) -> BrokenHost:
    """Where a job runs next, which finds the disk's file."""
    job = scene.shop.submit("say(open('/mnt/data/hello').read())", on="v5e-8", pool="one")
    assert scene.shop.ended(job, READY_S)["state"] == "succeeded", scene.shop.everything(job)
    assert scene.shop.log(job).decode().startswith(HELLO)
    host = BrokenHost(scene, str(scene.shop.view(job)["slice"]))
    assert (host.mounted("/mnt/data"), host.file("/mnt/data/hello").read_text()) == ("ext4", HELLO)
    return host


def devices_lock_and_disk(shop: Shop, host: BrokenHost) -> None:
    stamp = f"@{int(time.time()) - OLD_S}"  # noqa: TID251 (the host has the same clock)
    cache = "/var/lib/penstock/host/cache"
    words = [f"{10**7 + os.getpid()}.{number}" for number in range(2)]  # by which its processes are known here

    def holders() -> list[int]:
        return [len(processes.with_arguments("sleep", word)) for word in words]

    host.run(f"""
        mkdir -p /dev/vfio
        touch /dev/accel0 /dev/vfio/0 /tmp/libtpu_lockfile
        setsid -f sh -c 'exec 9</dev/accel0; exec sleep {words[0]}' >/dev/null 2>&1 </dev/null
        setsid -f sh -c 'exec 9</dev/vfio/0; exec sleep {words[1]}' >/dev/null 2>&1 </dev/null
        mount -t tmpfs -o size=4m none {cache}
        mkdir -p {cache}/blobs/aa
        head -c 4100000 /dev/zero >{cache}/blobs/aa/old
        touch -d {stamp} {cache}/blobs/aa/old
    """)
    until(lambda: holders() == [1, 1])
    code, view = solve(shop, host.slice, "--dry-run")
    assert (code, verdicts(view)) == (1, {"device": "found", "lock_file": "found", "disk": "found"})
    (device,) = (each for each in view.hosts[0].findings if each.check == "device")
    assert all(f"sleep {word}" in device.evidence for word in words), device
    assert holders() == [1, 1]
    assert host.file("/tmp/libtpu_lockfile").exists()
    assert host.file(f"{cache}/blobs/aa/old").exists()
    code, view = solve(shop, host.slice)
    assert (code, verdicts(view)) == (0, {"device": "fixed", "lock_file": "fixed", "disk": "fixed"})
    assert holders() == [0, 0]
    assert not host.file("/tmp/libtpu_lockfile").exists()
    assert not host.file(f"{cache}/blobs/aa/old").exists()
    host.run(f"umount {cache}; rm -r /dev/accel0 /dev/vfio")


def dead_agent(shop: Shop, host: BrokenHost, folder: Path) -> None:
    """The startup script brings an agent back that ended; this one has a clock of its host's own."""
    host.give_clock(folder)
    old = host.agent
    processes.send(old, signal.SIGKILL)
    code, view = solve(shop, host.slice)
    assert (code, view.well) == (0, True), view
    assert host.agent != old
    assert abs(host.clock_off_s()) < CLOCK_OFF_S


def mount_clock_names_and_packages(scene: Scene, host: BrokenHost, folder: Path) -> None:
    """All four at once: none of the fixes may need what another one has yet to mend."""
    shop = scene.shop
    environment = host.environment
    host.install(environment, wheel(folder, "libtpu", "0.0.21"))
    host.install(host.bundle, wheel(folder, "jax", "0.8.1", *JAX_WANTS), wheel(folder, "jaxlib", "0.7.0"))
    host.run("umount /mnt/data")
    resolver = host.disk / "etc/resolv.conf"
    resolver.write_text("nameserver 127.0.0.9\noptions timeout:1 attempts:1\n")
    host.shift_clock(3600)

    def broken() -> None:
        assert host.packages(environment) == FITTING - {"libtpu-0.0.24.1"} | {"libtpu-0.0.21"}
        assert host.packages(host.bundle) == {"jax-0.8.1", "jaxlib-0.7.0"}
        assert (host.mounted("/mnt/data"), host.file("/mnt/data/hello").exists()) == ("", False)
        assert "127.0.0.9" in resolver.read_text()
        assert abs(host.clock_off_s() - 3600) < CLOCK_OFF_S
        assert host.run(f"getent hosts {NAME} || echo unknown") == "unknown\n"

    scene.kill()  # and all connections with it: the host has to find the server again, whose name it cannot look up
    scene.serve()
    assert shop.ended(shop.submit("say('found')", on="v5e-8", pool="one"))["state"] == "succeeded"
    broken()
    code, view = solve(shop, host.slice, "--dry-run")
    assert (code, verdicts(view)) == (1, dict.fromkeys(("mount", "clock", "jax", "dns"), "found")), view
    broken()
    code, view = solve(shop, host.slice)
    assert (code, verdicts(view)) == (0, dict.fromkeys(("mount", "clock", "jax", "dns"), "fixed")), view
    assert not environment.exists()
    assert host.packages(host.bundle) == set()
    assert host.mounted("/mnt/data") == "ext4"
    assert host.file("/mnt/data/hello").read_text() == HELLO
    assert resolver.read_text().splitlines()[-1] == f"nameserver {PLATFORM_ADDRESS}"
    assert host.run(f"getent hosts {NAME}").split() == ["127.0.0.1", NAME]
    assert abs(host.clock_off_s()) < CLOCK_OFF_S
    code, view = solve(shop, host.slice)
    assert (code, verdicts(view)) == (0, {})


def disk_that_is_gone(scene: Scene, host: BrokenHost) -> None:
    """What no fix can bring back: after the second try the slice goes, and its pool makes another."""
    host.run("umount /mnt/data; umount /dev/disk/by-id/google-persistent-disk-1")
    code, view = solve(scene.shop, host.slice)
    assert (code, verdicts(view), view.failures, view.quarantined) == (1, {"mount": "unfixed"}, 1, "")
    assert host.slice in scene.nodes(), "once is no reason"
    code, view = solve(scene.shop, host.slice)
    assert (code, verdicts(view), view.failures) == (1, {"mount": "unfixed"}, 2)
    assert "failed 2 times: host 0, mount" in view.quarantined
    until(lambda: host.slice not in scene.nodes(), READY_S)


@pytest.mark.long
def test_a_clouds_host_is_broken_in_every_way_and_mended_lost_and_given_up(tmp_path: Path) -> None:
    """One scene for all of it. A disk is mounted for real, from an image. NFS needs a client in the kernel, which this
    one lacks, and Cloud Storage needs gcsfuse, which Debian lacks: of those the words are tested, and how they fail."""
    with cloud(tmp_path) as scene:
        shop = scene.shop
        project(shop.desk)
        first = work(scene)
        assert (first.mounted("/mnt/data"), first.packages(first.environment)) == ("ext4", FITTING)
        assert solve(shop, first.slice)[0] == 0
        devices_lock_and_disk(shop, first)
        dead_agent(shop, first, tmp_path)
        mount_clock_names_and_packages(scene, first, tmp_path)
        again = work(scene)
        assert (again.slice, again.packages(again.environment)) == (first.slice, FITTING), "made anew, and right"
        scene.happen("preempt", first.slice)
        second = replacement(scene)
        assert second.slice != first.slice
        disk_that_is_gone(scene, second)
        assert replacement(scene).slice not in (first.slice, second.slice)
