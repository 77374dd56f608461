"""A key pair and the words of ssh that use it and nothing of this machine's own: for tests of what goes over ssh."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

from tests.missing import missing


def need_sshd() -> None:
    """Skip where there is no sshd; in CI that is a failure, because nothing else proves what these tests prove."""
    if shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin:/bin") is not None and shutil.which("ssh") is not None:
        return
    missing("sshd: what goes over ssh is not checked (install openssh-server)")


class Keys:
    """One user's way onto hosts: `public` lets in, `command` is the ssh that has the key."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        key = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        self.public = folder / "key.pub"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.config = folder / "config"
        self.config.write_text(
            f"IdentityFile {key}\nIdentitiesOnly yes\nPort {self.port}\nUser root\nGlobalKnownHostsFile /dev/null\n"
            f"UserKnownHostsFile {folder / 'known_hosts'}\nLogLevel ERROR\n"
        )
        self.known_hosts = folder / "known_hosts"
        self.command = f"ssh -F {self.config}"
