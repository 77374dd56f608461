"""An emulated host as one finds it from outside: its files, its mounts, its clock; and the ways to break it for real.

`test_solve` breaks one and has it mended. What is asserted is read here, from the kernel's tables and the host's own
disk, never from what `tpu solve` says. It must not mend anything.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import time
import zipfile
from pathlib import Path

from penstock.capacity import processes
from tests.missing import missing
from tests.process.test_tpu_vm import Scene

#: The clock of a whole host. The kernel has one for all of this machine, and time namespaces leave it alone: so every
#: program of the host asks this library, by /etc/ld.so.preload, which adds what a file says, and sets that file when
#: somebody sets the clock. Times of files, which the kernel stamps, stay right.
CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *offset(void) {
    static volatile long long *found, none;
    if (!found) {
        int writable = 1, file = open("/opt/clock/offset", O_RDWR | O_CLOEXEC);
        if (file < 0) { writable = 0; file = open("/opt/clock/offset", O_RDONLY | O_CLOEXEC); }
        if (file < 0) return &none;
        void *at = mmap(0, 8, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, file, 0);
        close(file);
        if (at == MAP_FAILED) return &none;
        found = at;
    }
    return found;
}

static long long real(clockid_t id) {
    struct timespec now;
    syscall(SYS_clock_gettime, id, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    if (id != CLOCK_REALTIME && id != CLOCK_REALTIME_COARSE) return syscall(SYS_clock_gettime, id, now);
    long long shown = real(id) + *offset();
    now->tv_sec = shown / 1000000000LL;
    now->tv_nsec = shown % 1000000000LL;
    return 0;
}

int clock_settime(clockid_t id, const struct timespec *wanted) {
    if (id != CLOCK_REALTIME) return syscall(SYS_clock_settime, id, wanted);
    *offset() = wanted->tv_sec * 1000000000LL + wanted->tv_nsec - real(id);
    return 0;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec shown;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &shown);
    now->tv_sec = shown.tv_sec;
    now->tv_usec = shown.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into) {
    struct timespec shown;
    clock_gettime(CLOCK_REALTIME, &shown);
    if (into) *into = shown.tv_sec;
    return shown.tv_sec;
}
"""


class BrokenHost:
    """The first host of a slice."""

    def __init__(self, scene: Scene, slice: str) -> None:
        self.slice = slice
        self.disk = Path(scene.nodes()[slice]["hosts"][0]["disk"])
        self.state = self.disk / "var/lib/penstock"

    def agents(self) -> list[processes.Process]:
        """The agent itself, not the script that keeps it running; none while that starts it again."""
        found = processes.with_arguments("-m", "penstock.agent")
        mine = [(each, words) for each in found if f"\0{self.slice}\0".encode() in (words := _words(each.pid))]
        return [each for each, words in mine if b"/penstock/agent\0" not in words]

    @property
    def agent(self) -> processes.Process:
        return self.agents()[-1]

    def run(self, script: str) -> str:
        """What a script prints that the host's root runs; it must succeed."""
        argv = ["nsenter", "-t", str(self.agent.pid), "-m", "-p", "-n", "-u", "/bin/sh", "-ec", script]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, (script, done.stdout, done.stderr)
        return done.stdout

    # --- what is true ---
    def mounted(self, path: str) -> str:
        """The file system at a path by the kernel's own table; nothing where none is."""
        for line in Path(f"/proc/{self.agent.pid}/mounts").read_text().splitlines():
            _, at, kind, *_ = line.split()
            if at == path:
                return kind
        return ""

    def file(self, path: str) -> Path:
        """A file as the host sees it, mounts and all."""
        return Path(f"/proc/{self.agent.pid}/root{path}")

    def clock_off_s(self) -> float:
        return float(self.run("date +%s.%N")) - time.time()  # noqa: TID251 (the machine's clock is what it is held to)

    def packages(self, folder: Path) -> set[str]:
        """What is installed of jax and its kin, by the folders that installers leave."""
        return {path.name.removesuffix(".dist-info") for path in folder.glob("*.dist-info") if _of_jax(path.name)}

    @property
    def environment(self) -> Path:
        """Where the packages of the only environment of jobs are."""
        (found,) = (self.state / "host/cache/environments").glob("*/venv/lib/python3*/site-packages")
        return found

    @property
    def bundle(self) -> Path:
        """Where the packages of the agent's own Python are."""
        (found,) = self.state.glob("bundle-*/lib/python3*/site-packages")
        return found

    # --- what breaks it ---
    def give_clock(self, folder: Path) -> None:
        """A clock of its own for every program that starts from now on; it is right at first."""
        if shutil.which("cc") is None:
            missing("a C compiler: a host's clock is a small library")
        (folder / "clock.c").write_text(CLOCK)
        place = self.disk / "opt/clock"
        place.mkdir()
        words = ["cc", "-shared", "-fPIC", "-O1", "-o", str(place / "clock.so"), str(folder / "clock.c")]
        subprocess.run(words, check=True)
        (place / "offset").write_bytes(bytes(8))
        (self.disk / "etc/ld.so.preload").write_text("/opt/clock/clock.so\n")

    def shift_clock(self, seconds: int) -> None:
        with (self.disk / "opt/clock/offset").open("r+b") as file:  # in place: programs have it mapped
            file.write(struct.pack("q", seconds * 10**9))

    def install(self, packages: Path, *wheels: Path) -> None:
        """Real pip of the Python that has these packages, as somebody runs it who knows better than requirements do."""
        drop = self.disk / "root/wheels"
        drop.mkdir(exist_ok=True)
        for wheel in wheels:
            shutil.copy(wheel, drop)
        names = " ".join(f"/root/wheels/{wheel.name}" for wheel in wheels)
        python = Path("/") / packages.parents[2].relative_to(self.disk) / "bin/python"
        self.run(f"{python} -m pip install --quiet --no-index --no-deps --disable-pip-version-check {names}")


def image(folder: Path, content: dict[str, str]) -> Path:
    """An ext4 file system with these files in it, as a disk's image."""
    if shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists():
        missing("mkfs.ext4 and loop devices: disks of emulated hosts are made of them")
    source, file = folder / "on-the-disk", folder / "disk.img"
    source.mkdir()
    for name, text in content.items():
        (source / name).write_text(text)
    file.touch()
    with file.open("r+b") as whole:
        whole.truncate(4 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-d", str(source), str(file)], check=True)
    return file


def wheel(folder: Path, name: str, version: str, *wants: str) -> Path:
    """A package with nothing in it but what it is called and what it asks for."""
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        f"{about}/METADATA": "".join(
            f"{line}\n" for line in ("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *_asked(wants))
        ),
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{about}/RECORD"))
    file = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as packed:
        for path, text in files.items():
            packed.writestr(path, text)
    return file


def _asked(wants: tuple[str, ...]) -> list[str]:
    return [f"Requires-Dist: {want}" for want in wants]


def _of_jax(name: str) -> bool:
    return name.startswith(("jax-", "jaxlib-", "libtpu-"))


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it ended meanwhile
