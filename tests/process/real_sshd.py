"""One real sshd at an address of this machine's own, behind a door that can be jammed: for tests of ways over ssh.

`Door` passes connections on; jammed, it drops what comes without a word, as a network does whose cable was cut.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.process.machine import until

SSHD = "/usr/sbin/sshd"


class Door:
    """Passes connections on to another port of the same address."""

    def __init__(self, address: str, target: int) -> None:
        self._target = (address, target)
        self._listener = socket.create_server((address, 0))
        self.port: int = self._listener.getsockname()[1]
        self._jammed: set[socket.socket] = set()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._serve, daemon=True).start()

    def jam(self) -> None:
        """What is connected now hears nothing more and is told nothing; new connections pass."""
        self._jammed |= self._open

    def close(self) -> None:
        self._listener.close()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed at the end
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._open |= {near, far}
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if one not in self._jammed:
                    other.sendall(data)
            if one not in self._jammed:
                other.shutdown(socket.SHUT_RDWR)


class RealSshd:
    """An sshd with a key of its own, which `keys` may enter as root."""

    def __init__(self, folder: Path, public: Path) -> None:
        self.address = f"127.{64 + os.getpid() % 64}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
        self._folder = folder
        self._public = public
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()
        Path("/run/sshd").mkdir(exist_ok=True)
        with socket.create_server((self.address, 0)) as free:
            self.port: int = free.getsockname()[1]

    def start(self, *, key: str = "first", more: str = "") -> None:
        """Up, with the host key of this name, which is made where there is none yet."""
        path = self._folder / key
        if not path.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
        config = self._folder / "config"
        config.write_text(
            f"ListenAddress {self.address}\nPort {self.port}\nHostKey {path}\nUsePAM no\nPidFile none\nStrictModes no\n"
            f"PermitRootLogin prohibit-password\nAuthorizedKeysFile {self._public}\n"
            f"GatewayPorts clientspecified\n{more}"
        )
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(config)], stderr=log)
        until(self._answers)

    def stop(self) -> None:
        if self._process is not None:
            with self._process:
                self._process.kill()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.address, self.port)) as line:
            return line.recv(4) == b"SSH-"
        return False


@contextlib.contextmanager
def real_sshd(folder: Path, public: Path) -> Iterator[RealSshd]:
    sshd = RealSshd(folder, public)
    try:
        yield sshd
    finally:
        sshd.stop()
