"""The disk of an emulated host: a bare system, like the image of a TPU VM without a Python of use to anybody.

`vm_hosts` makes one per machine and throws it away with it; it outlives a power cut. Programs are this machine's,
read-only, without /usr/local and without any python3 but 3.10; everything that can be written is the host's own.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.emulator.vm_names import NAME_SERVER

_WRITABLE: Final = ("etc", "home", "mnt", "opt", "root", "srv", "tmp", "var")
_PROGRAMS: Final = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
#: What programs need of /etc: where libraries are, and whom to trust.
_OF_THE_MACHINE: Final = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl", "ca-certificates", "alternatives")
_PYTHON: Final = re.compile(r"python3(\.\d+)?|pypy3.*")
BOOT: Final = "/var/lib/google/boot"
#: Hosts share one loopback; by this name each of them finds its own part of it.
OWN_NAME: Final = "own-loopback"
#: The service runs the script at every boot and keeps the machine up whatever becomes of it.
_BOOT_SCRIPT: Final = """#!/bin/sh
exec >>/var/log/console.log 2>&1
echo "boot"
# A machine sees all of its /proc; bubblewrap leaves parts of it covered, and then nobody could wall a process in here.
mount -t proc proc /proc
if [ -f /etc/ssh/sshd_config ]; then
    mkdir -p /run/sshd
    /usr/sbin/sshd
fi
if [ -s /var/lib/google/startup-script ]; then
    /var/lib/google/startup-script
    echo "the startup script ended with $?"
fi
exec sleep infinity
"""


def make_disk(disk: Path, hostname: str, names: Mapping[str, str]) -> None:
    """A fresh disk; `names` are the addresses that the machine can look up by name."""
    for name in _WRITABLE:
        (disk / name).mkdir(parents=True)
    (disk / "tmp").chmod(0o1777)
    for name in ("var/lib/google", "var/log", "var/tmp", "home/ubuntu"):
        (disk / name).mkdir(parents=True, exist_ok=True)
    (disk / "absent").touch(0o444)
    etc = disk / "etc"
    (etc / "hostname").write_text(hostname + "\n")
    (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in names.items()))
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    (etc / "resolv.conf").write_text(f"nameserver {NAME_SERVER}\n")
    (etc / "passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/usr/sbin/nologin\nubuntu:x:1000:1000::/home/ubuntu:/bin/sh\n"
    )
    (etc / "group").write_text("root:x:0:\nnogroup:x:65534:\nubuntu:x:1000:\n")
    (etc / "os-release").write_text('PRETTY_NAME="an emulated TPU VM"\nID=ubuntu\nVERSION_ID="22.04"\n')
    boot = disk / BOOT[1:]
    boot.write_text(_BOOT_SCRIPT)
    boot.chmod(0o755)


def let_in(disk: Path, address: str, keys: str) -> None:
    """Whoever has one of these keys may log in over ssh, as root or as ubuntu; from the next boot on."""
    etc = disk / "etc"
    with (etc / "passwd").open("a") as users:
        users.write("sshd:x:101:65534::/run/sshd:/usr/sbin/nologin\n")
    (etc / "ssh").mkdir()
    host_key = etc / "ssh" / "host_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host_key)], check=True)
    (etc / "ssh" / "sshd_config").write_text(
        f"ListenAddress {address}\nPort 22\nHostKey /etc/ssh/host_key\nUsePAM no\nPasswordAuthentication no\n"
        "PermitRootLogin prohibit-password\nSubsystem sftp internal-sftp\nPidFile /run/sshd.pid\n"
        "GatewayPorts clientspecified\n"  # to the host's own part of the loopback that all hosts share
    )
    for home, owner in ((disk / "root", 0), (disk / "home" / "ubuntu", 1000)):
        folder = home / ".ssh"
        folder.mkdir(mode=0o700)
        (folder / "authorized_keys").write_text(keys)
        for path in (home, folder, folder / "authorized_keys"):
            os.chown(path, owner, owner)


def write_startup_script(disk: Path, script: str) -> None:
    """The bytes of `metadata.startup-script`, and nothing else, are what runs."""
    path = disk / "var/lib/google/startup-script"
    path.write_text(script)
    path.chmod(0o755)


def mounts(disk: Path, attached: Mapping[int, str]) -> list[str]:
    """bubblewrap's words for a machine on this disk, with more block devices attached, by number: 0 is this disk."""
    words = ["--ro-bind", "/usr", "/usr", "--tmpfs", "/usr/local"]
    for name in _PROGRAMS:
        path = Path("/") / name
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    for found in sorted(Path("/usr/bin").iterdir()):
        if _PYTHON.fullmatch(found.name) and found.name != "python3.10" and not found.is_symlink():
            words += ["--ro-bind", str(disk / "absent"), str(found)]
    for name in _WRITABLE:
        words += ["--bind", str(disk / name), f"/{name}"]
    for name in _OF_THE_MACHINE:
        if (Path("/etc") / name).exists():
            words += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    words += ["--dev", "/dev", "--tmpfs", "/dev/shm"]
    for number, device in attached.items():
        words += ["--dev-bind", device, f"/dev/disk/by-id/google-persistent-disk-{number}"]
    return [*words, "--proc", "/proc", "--tmpfs", "/run"]
