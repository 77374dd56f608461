"""The checks of `tpu solve`, each against something that is really broken, and whole afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.agent import solving, solving_jax
from penstock.agent.solving import CHECKS, solve
from penstock.agent.surroundings import CannotFix, Surroundings, Trouble
from penstock.domain.cloud import Mount
from penstock.wire.solving import Finding
from tests.missing import missing, need_root

ROOT = Path(__file__).parents[3]
#: Opens files, says so, and waits; deaf to SIGTERM if told so. Its last arguments are not looked at.
HOLD = """
import os, signal, sys
if sys.argv[1] == "deaf": signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = open(sys.argv[2], "rb")
open(sys.argv[3], "w").write(str(os.getpid()))
signal.pause()
"""


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    """Arguments of a host whose devices and lock file are a test's own."""
    for name in ("state", "cache", "dev/vfio"):
        (tmp_path / name).mkdir(parents=True)
    return {
        "state": tmp_path / "state",
        "cache": tmp_path / "cache",
        "dev": tmp_path / "dev",
        "lock_file": tmp_path / "libtpu_lockfile",
        "ours_alone": True,
    }


def found(name: str, place: Mapping[str, Any], *, dry_run: bool = False, busy: bool = False) -> Finding:
    """What one check says."""
    chosen = [check for check in CHECKS if check.name == name]
    (finding,) = solve(Surroundings(**place), dry_run=dry_run, busy=busy, checks=chosen)
    return finding


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Holders:
    """Processes that hold a file and are nobody's children."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pids: list[int] = []

    def __call__(self, path: Path, *, deaf: bool = False, **variables: str) -> int:
        said = self._folder / f"pid-{len(self.pids)}"
        subprocess.run(
            ["setsid", "-f", sys.executable, "-c", HOLD, "deaf" if deaf else "hears", str(path), str(said)],
            env={**os.environ, **variables},
            check=True,
        )
        until = time.monotonic() + 20
        while not (said.exists() and said.read_text()):
            assert time.monotonic() < until
            time.sleep(0.01)
        self.pids.append(int(said.read_text()))
        return self.pids[-1]


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Holders]:
    holders = Holders(tmp_path)
    yield holders
    for pid in holders.pids:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


# --- devices ---
@pytest.mark.parametrize("device", ["accel0", "vfio/0"])
@pytest.mark.parametrize("deaf", [False, True])
def test_a_stale_process_lets_the_device_go(place: dict[str, Any], hold: Holders, device: str, deaf: bool) -> None:
    path = place["dev"] / device
    path.touch()
    assert found("device", place).verdict == "well"
    pid = hold(path, deaf=deaf)
    seen = found("device", place, dry_run=True)
    assert (seen.verdict, seen.safe) == ("found", False)
    assert f"{path} is held by process {pid}: {sys.executable}" in seen.evidence
    assert found("device", place, busy=True).verdict == "waits"
    assert alive(pid)
    done = found("device", place)
    assert (done.verdict, done.fix) == ("fixed", f"end process {pid}")
    assert not alive(pid)


def test_a_job_that_runs_keeps_its_device(place: dict[str, Any], hold: Holders) -> None:
    path = place["dev"] / "accel0"
    path.touch()
    pid = hold(path, PENSTOCK_ATTEMPT="a1", PENSTOCK_OUTPUT_DIR=str(place["state"] / "a1"))
    assert found("device", {**place, "attempts": frozenset({"a1"})}).verdict == "well"
    assert alive(pid)
    left_over = found("device", {**place, "attempts": frozenset({"a2"}), "ours_alone": False})
    assert left_over.verdict == "fixed", "what an attempt of ours left is ours to end on any machine"
    assert not alive(pid)


def test_on_a_shared_machine_strangers_are_told_of_and_left_alone(place: dict[str, Any], hold: Holders) -> None:
    path = place["dev"] / "accel0"
    path.touch()
    others = hold(path, PENSTOCK_ATTEMPT="a9", PENSTOCK_OUTPUT_DIR="/elsewhere/a9")
    assert found("device", {**place, "ours_alone": False}).verdict == "well", "another agent of this machine has it"
    stranger = hold(path)
    said = found("device", {**place, "ours_alone": False})
    assert (said.verdict, f"process {stranger}" in said.evidence) == ("unfixed", True)
    assert f"process {others}" not in said.evidence
    assert alive(stranger)
    assert alive(others)


def test_a_lock_file_goes_when_nobody_has_it_open(place: dict[str, Any], hold: Holders) -> None:
    path = place["lock_file"]
    assert found("lock_file", place).verdict == "well"
    path.touch()
    pid = hold(path)
    assert found("lock_file", place).verdict == "well"
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < until
    assert found("lock_file", place, dry_run=True).verdict == "found"
    assert path.exists()
    assert found("lock_file", place, busy=True).verdict == "fixed"
    assert not path.exists()


# --- disk ---
@pytest.fixture
def small_disk(place: dict[str, Any]) -> Iterator[Path]:
    """The cache is a file system of four megabytes."""
    need_root("a file system of its own")
    cache: Path = place["cache"]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(cache)], check=True)
    yield cache
    subprocess.run(["umount", "-l", str(cache)], check=True)


def fill(path: Path, size: int, age_s: float = 0.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    stamp = time.time() - age_s  # noqa: TID251 (files have the machine's time)
    os.utime(path, (stamp, stamp))


def here(place: dict[str, Any], small_disk: Path) -> dict[str, Any]:
    """Only the small disk counts: this machine's own may be full."""
    return {**place, "state": small_disk / "state", "ours_alone": False}


def test_a_full_disk_is_freed_of_our_caches_and_of_nothing_else(place: dict[str, Any], small_disk: Path) -> None:
    host = here(place, small_disk)
    host["state"].mkdir()
    users = small_disk / "results.bin"
    fill(users, 1_000_000, age_s=10_000)
    fresh, old = small_disk / "blobs/aa/fresh", small_disk / "blobs/aa/old"
    fill(fresh, 900_000)
    fill(old, 2_000_000, age_s=7200)
    assert found("disk", host).verdict == "well"
    fill(small_disk / "packages/uv/wheel", 250_000, age_s=7200)
    seen = found("disk", host, dry_run=True)
    assert seen.verdict == "found"
    assert f"{small_disk / 'blobs'} 3 MB" in seen.evidence
    done = found("disk", host, busy=True)
    assert done.verdict == "fixed", done
    assert not (small_disk / "packages/uv/wheel").exists(), "what is cheapest to get again goes first"
    assert old.exists(), "and no more than needed"
    fill(small_disk / "packages/uv/wheel", 250_000)  # just used: it stays
    assert found("disk", host).verdict == "fixed"
    assert (old.exists(), fresh.exists(), users.exists()) == (False, True, True)


def test_a_disk_that_others_filled_is_named(place: dict[str, Any], small_disk: Path) -> None:
    host = here(place, small_disk)
    host["state"].mkdir()
    fill(small_disk / "somebodys.tar", 4_100_000, age_s=10_000)
    said = found("disk", host)
    assert said.verdict == "unfixed"
    assert f"{small_disk / 'somebodys.tar'} 4 MB" in said.evidence
    assert "nothing of ours is left to remove" in said.evidence
    assert (small_disk / "somebodys.tar").exists()


# --- mounts ---
def test_a_missing_mount_comes_back(place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_root("mounting")
    # What stands in for gcsfuse mounts for real, and leaves something behind that keeps its output open.
    program = tmp_path / "bin/gcsfuse"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nset -e\nsleep 3 &\nfor at in "$@"; do :; done\nmount -t tmpfs "$4" "$at"\n')
    program.chmod(0o755)
    at = tmp_path / "mnt with space"
    host = {**place, "mounts": (Mount("gcs", "bucket", str(at)),)}
    lacking = found("mount", host)
    assert (lacking.verdict, "gcsfuse is not installed" in lacking.evidence) == ("unfixed", True)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert found("mount", host, dry_run=True).verdict == "found"
    assert not os.path.ismount(at)
    try:
        done = found("mount", host, busy=True)
        assert (done.verdict, done.evidence) == ("fixed", f"{at}: nothing is mounted")
        assert os.path.ismount(at)
        assert found("mount", host).verdict == "well"
    finally:
        subprocess.run(["umount", "-l", str(at)], check=False)
    program.write_text("#!/bin/sh\necho 'bucket not found' >&2\nexit 7\n")
    failed = found("mount", host)
    assert failed.verdict == "unfixed"
    assert "ended with 7: bucket not found" in failed.evidence


# --- clock ---
def test_a_clock_that_is_off_is_stepped_to_the_servers(place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no chrony: this machine's clock is everybody's
    host_time = [1_000.0]
    host = {
        **place,
        "server_now": 4_600.0,
        "came_at": 10.0,
        "steady": lambda: 12.0,  # two seconds after the order came
        "now": lambda: host_time[0],
        "set_clock": lambda moment: host_time.__setitem__(0, moment),
    }
    seen = found("clock", host, dry_run=True)
    assert (seen.verdict, seen.evidence) == ("found", "this host's clock is 3602.0 s behind the server's")
    assert found("clock", host, busy=True).verdict == "waits"
    assert found("clock", {**host, "ours_alone": False}).verdict == "unfixed"
    assert found("clock", host).verdict == "fixed"
    assert host_time == [4_602.0]
    host_time[0] += 4.9
    assert found("clock", host).verdict == "well"

    def refused(_: float) -> None:
        raise PermissionError(1, "Operation not permitted")

    host_time[0] += 60
    said = found("clock", {**host, "set_clock": refused})
    assert (said.verdict, "cannot be set: Operation not permitted" in said.evidence) == ("unfixed", True)


# --- versions ---
def install(site: Path, name: str, version: str, *wants: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", *(f"Requires-Dist: {want}" for want in wants)]
    (folder / "METADATA").write_text("\n".join(lines) + "\n\nRequires-Dist: in the text it means nothing\n")


JAX_WANTS = ("jaxlib <=0.8.1,>=0.8.1", 'libtpu==0.0.24.*; extra == "tpu"', "jax-cuda13 ; extra == 'cuda13'")


def test_an_environment_whose_libtpu_does_not_fit_is_made_anew(place: dict[str, Any], hold: Holders) -> None:
    environments = place["cache"] / "environments"
    for name, libtpu in (("good", "0.0.24.1"), ("bad", "0.0.21")):
        site = environments / name / "venv/lib/python3.11/site-packages"
        install(site, "jax", "0.8.1", *JAX_WANTS)
        install(site, "jaxlib", "0.8.1")
        install(site, "libtpu", libtpu)
        (environments / name / "ready").touch()
    seen = found("jax", place, dry_run=True)
    assert seen.verdict == "found"
    assert seen.evidence.endswith("jax 0.8.1 [tpu] asks for libtpu ==0.0.24.*, and 0.0.21 is installed")
    user = hold(environments / "bad/ready", VIRTUAL_ENV=str(environments / "bad/venv"))
    kept = found("jax", place)
    assert (kept.verdict, "environment bad is in use" in kept.evidence) == ("unfixed", True)
    os.kill(user, signal.SIGKILL)
    until = time.monotonic() + 10
    while alive(user):
        assert time.monotonic() < until
    assert found("jax", place).verdict == "fixed"
    assert not (environments / "bad").exists()
    assert (environments / "good").exists()


def test_the_agents_own_python_cannot_be_mended_here(place: dict[str, Any], tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, "jax", "0.8.1", *JAX_WANTS)
    install(site, "jaxlib", "0.7.0")
    install(site, "libtpu", "0.0.24")
    install(site, "libtpu-nightly", "0.1.dev20240617")
    (place["dev"] / "accel0").touch()
    said = found("jax", {**place, "packages": (site,)})
    assert said.verdict == "unfixed"
    assert "asks for jaxlib <=0.8.1,>=0.8.1, and 0.7.0 is installed" in said.evidence
    assert "both libtpu 0.0.24 and libtpu-nightly" in said.evidence
    shutil.rmtree(site / "libtpu-0.0.24.dist-info")
    shutil.rmtree(site / "libtpu_nightly-0.1.dev20240617.dist-info")
    assert "without libtpu, and this host has TPUs" in found("jax", {**place, "packages": (site,)}).evidence


def test_the_agents_own_python_is_put_back_from_its_bundle_once_no_job_uses_it(
    place: dict[str, Any], tmp_path: Path
) -> None:
    site = tmp_path / "site"
    install(site, "jax", "0.8.1", *JAX_WANTS)
    install(site, "jaxlib", "0.7.0")
    bad = place["cache"] / "environments/bad"
    shutil.copytree(site, bad / "venv/lib/python3.11/site-packages")
    (bad / "ready").touch()
    host = {**place, "packages": (site,), "reinstall": lambda: shutil.rmtree(site)}
    seen = found("jax", host, dry_run=True)
    assert seen.fix == "remove environment bad; unpack the agent's own Python anew from its bundle"
    assert site.exists()
    kept = found("jax", {**host, "attempts": frozenset({"a1"})}, busy=True)
    assert (kept.verdict, "is in use" in kept.evidence, site.exists(), bad.exists()) == ("unfixed", True, True, True)
    assert found("jax", host).verdict == "fixed"
    assert (site.exists(), bad.exists()) == (False, False)


@pytest.mark.parametrize(
    ("version", "rules", "fit"),
    [
        ("0.8.1", "<=0.8.1,>=0.8.1", True),
        ("0.8.2", "<=0.8.1,>=0.8.1", False),
        ("0.0.24.1", "==0.0.24.*", True),
        ("0.0.2", "==0.0.24.*", False),
        ("0.10.0", ">=0.9", True),
        ("1.0", "==1.0.0", True),
        ("0.8.1.dev1", "!=0.8.1", False),
        ("1.4.5", "~=1.4.2", True),
        ("1.5.0", "~=1.4.2", False),
        ("2", "<2", False),
        ("2.1", ">2", True),
        ("7", "", True),
    ],
)
def test_rules_of_versions(version: str, rules: str, fit: bool) -> None:
    assert solving_jax.fits(version, rules) == fit


# --- names ---
#: In a network and a view of files of its own: a name server that knows every name, and a bad resolver file.
DNS = """
import os, socket, struct, subprocess, sys, threading
from pathlib import Path
from penstock.agent.solving import CHECKS, solve
from penstock.agent.surroundings import Surroundings

def mount(name, text):
    path = Path(sys.argv[1]) / name
    path.write_text(text)
    subprocess.run(["mount", "--bind", str(path), f"/etc/{name}"], check=True)

subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "none", "/mnt"], check=True)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
Path("/mnt/etc").mkdir()
Path("/mnt/etc/resolv.conf").write_text("nameserver 127.0.0.9\\noptions timeout:1 attempts:1\\n")
mount("nsswitch.conf", "hosts: files dns\\n")
subprocess.run(["mount", "--bind", "/mnt/etc/resolv.conf", "/etc/resolv.conf"], check=True)
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.53", 53))

def answer():
    while True:
        query, caller = server.recvfrom(512)
        end = query.index(b"\\0", 12) + 5
        wanted, = struct.unpack(">H", query[end - 4:end - 2])
        found = b"\\xc0\\x0c" + struct.pack(">HHIH", 1, 1, 60, 4) + bytes((10, 0, 0, 7)) if wanted == 1 else b""
        head = query[:2] + struct.pack(">HHHHH", 0x8180, 1, 1 if found else 0, 0, 0)
        server.sendto(head + query[12:end] + found, caller)

threading.Thread(target=answer, daemon=True).start()
state = Path(sys.argv[1])

def look(dry_run, name_server):
    around = Surroundings(state=state, cache=state, ours_alone=True, names=("penstock.example.org",),
                          resolver=Path("/mnt/etc/resolv.conf"), name_server=name_server, systemd=state / "none")
    done, = solve(around, dry_run=dry_run, busy=True, checks=[each for each in CHECKS if each.name == "dns"])
    print(done.verdict, "|", done.evidence, "|", Path("/mnt/etc/resolv.conf").read_text().splitlines()[-1])

look(True, "127.0.0.53")
look(False, "127.0.0.8")
look(False, "127.0.0.53")
look(False, "127.0.0.53")
"""


def test_a_bad_resolver_file_is_replaced_and_kept_if_that_does_not_help(tmp_path: Path) -> None:
    need_root("a network of its own")
    if shutil.which("ip") is None:
        missing("iproute2: a network of its own")
    done = subprocess.run(
        ["unshare", "-nm", sys.executable, "-c", textwrap.dedent(DNS), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    dry, worse, fixed, again = (line.split(" | ") for line in done.stdout.splitlines())
    assert dry[0] == "found"
    assert "penstock.example.org cannot be looked up" in dry[1]
    assert "127.0.0.9" in dry[1]
    assert worse[0] == "unfixed"
    assert "does not know penstock.example.org either" in worse[1]
    assert worse[2] == "options timeout:1 attempts:1"
    assert (fixed[0], fixed[2]) == ("fixed", "nameserver 127.0.0.53")
    assert again[0] == "well"


def test_names_are_not_mended_on_a_machine_that_is_not_ours(place: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text("nameserver 127.0.0.9\n")
    host = {**place, "ours_alone": False, "names": ("no-such-name.invalid",), "resolver": file}
    assert found("dns", host).verdict == "unfixed"
    assert file.read_text() == "nameserver 127.0.0.9\n"
    assert found("dns", {**place, "names": ("localhost",)}).verdict == "well"


# --- the registry ---
def row(look: Callable[[Surroundings], Trouble | None]) -> solving.Check:
    return solving.Check("x", "", "", "", safe=True, look=look)


def test_a_check_that_fails_hides_no_other(place: dict[str, Any]) -> None:
    def broken(_: Surroundings) -> None:
        raise OSError(5, "Input/output error", "/dev/x")

    def bad_fix(_: Surroundings) -> Trouble:
        def mend() -> None:
            raise CannotFix("it is\nstuck \x1b[31m" + "y" * 5_000)

        return Trouble("bad", "mend it", mend)

    unchanged = row(lambda _: Trouble("bad", "nothing happens", lambda: None))
    around = Surroundings(**place)
    seen = solve(around, dry_run=False, busy=False, checks=[row(broken), row(bad_fix), unchanged, row(lambda _: None)])
    assert [each.verdict for each in seen] == ["unknown", "unfixed", "unfixed", "well"]
    assert "Input/output error" in seen[0].evidence
    assert len(seen[1].evidence) == solving.TEXT_MAX
    assert seen[1].evidence.isprintable()
    assert seen[2].evidence == "bad; after that: bad"


def test_the_page_explains_every_check() -> None:
    page = (ROOT / "docs/howto/solve.md").read_text()
    told = {cells[1].strip(" `"): cells[5].strip() for line in page.splitlines() if len(cells := line.split("|")) == 7}
    told = {name: safe for name, safe in told.items() if re.fullmatch("[a-z_]+", name) and name != "check"}
    assert told.pop("agent") == "yes"
    assert told == {check.name: "yes" if check.safe else "no" for check in CHECKS}


def test_on_this_machine_every_check_can_look(tmp_path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        (tmp_path / "state").mkdir()
    around = Surroundings(state=tmp_path / "state", cache=tmp_path, names=("localhost",))
    seen = solve(around, dry_run=True, busy=False)
    assert [each.check for each in seen] == [check.name for check in CHECKS]
    assert "unknown" not in {each.verdict for each in seen}
