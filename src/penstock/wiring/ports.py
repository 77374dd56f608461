"""Opens the port that a server or an emulator listens on; when that cannot be, says in one line who has it.

`wiring.serve` and `wiring.emulators` call it. Who holds a port is read from /proc: processes of others may not be seen,
and then they are not named. It must not signal anybody.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from penstock.wiring.home import Unusable

_PROC: Final = Path("/proc")
_LISTENING: Final = "0A"
_WORDS_SHOWN: Final = 60  #: characters of a command line


def open_port(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes any that is free. `Unusable` in one line if there is none to be had."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Unusable(_why_not(host, port, error)) from error
    listener.set_inheritable(False)
    return listener


def _why_not(host: str, port: int, error: OSError) -> str:
    cure = "choose another with --port; 0 takes any that is free"
    if error.errno != errno.EADDRINUSE:
        if error.errno != errno.EACCES:
            cure = "name an address of this machine with --host, such as 127.0.0.1"
        return f"cannot listen on {host} port {port}: {error.strerror}; {cure}"
    holder = next(holders(port), None)
    if holder is None:
        return f"port {port} of {host} is in use; stop what uses it, or {cure}"
    pid, words = holder
    return f"port {port} of {host} is in use by process {pid} ({words}); stop it, or {cure}"


def holders(port: int) -> Iterator[tuple[int, str]]:
    """Processes that listen on a port of this machine, as far as we may see: pid and what was called."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    if not sockets:
        return
    for folder in _PROC.iterdir():
        if folder.name.isdecimal() and _has_open(folder / "fd", sockets):
            yield int(folder.name), _called(folder)


def _listening(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # a machine without IPv6 has no such file
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _has_open(folder: Path, sockets: set[str]) -> bool:
    try:
        return any(_target(link) in sockets for link in folder.iterdir())
    except OSError:
        return False  # it ended, or belongs to somebody else


def _target(link: Path) -> str:
    with contextlib.suppress(FileNotFoundError):  # closed while we looked
        return str(link.readlink())
    return ""


def _called(folder: Path) -> str:
    """A command line as its user would know it: `tpu emulator --port 9090`, without where its Python is."""
    try:
        words = (folder / "cmdline").read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
    except OSError:
        words = [""]
    if Path(words[0]).name.startswith("python") and len(words) > 1 and not words[1].startswith("-"):
        del words[0]
    plain = "".join(letter if letter.isprintable() else "?" for letter in " ".join([Path(words[0]).name, *words[1:]]))
    return plain if len(plain) <= _WORDS_SHOWN else f"{plain[:_WORDS_SHOWN]}…"
