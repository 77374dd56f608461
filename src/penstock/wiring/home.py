"""The files of the state directory: who may call, the key, and which server runs here.

`wiring.serve` prepares the directory and says in `server.json` where it listens; `wiring.embedded` reads that to find,
start and stop it. Every file is its owner's only. A pid in a file counts only with the start time beside it, so a stale
one is recognised. One server at a time holds the directory, by a lock that dies with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from penstock.capacity import processes
from penstock.capacity.processes import Process
from penstock.capacity.slice_files import write_private
from penstock.domain.nouns import Role

TEAM: Final = "default"
_KEY_BYTES: Final = 32
_TOKEN_BYTES: Final = 32


class ServerFile(msgspec.Struct, frozen=True):
    """`server.json`: the server that runs here. `pid_started` is in ticks since the boot `boot`."""

    url: str
    pid: int
    pid_started: int
    version: str
    boot: str = ""

    @property
    def process(self) -> Process:
        return Process(self.pid, self.pid_started, self.boot)


class Unusable(ConnectionError):
    """The state directory, or the server in it, cannot be used as it is. One line, with what to do."""


class Home:
    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def log(self) -> Path:
        return self.path / "server.log"

    @property
    def token(self) -> str:
        """The owner's token; `prepare` makes it."""
        return (self.path / "token").read_text("utf-8").strip()

    @property
    def slices(self) -> Path:
        return self.path / "slices"

    # --- what the first run makes ---
    def prepare(self) -> bytes:
        """Make what is missing: directory, key, token and its entry. Answers the key that signs agents' credentials."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            key = self._secret("key", lambda: secrets.token_bytes(_KEY_BYTES).hex())
            token = self._secret("token", lambda: secrets.token_urlsafe(_TOKEN_BYTES))
            self._enter_token(token)
        except Unusable:
            raise
        except OSError as error:
            raise Unusable(f"{error.filename or self.path}: {error.strerror}; set PENSTOCK_HOME elsewhere") from error
        try:
            signing = bytes.fromhex(key)
        except ValueError:
            signing = b""
        if len(signing) != _KEY_BYTES:
            raise Unusable(f"{self.path / 'key'}: is not {2 * _KEY_BYTES} hex digits; restore or remove it")
        return signing

    def _secret(self, name: str, make: Callable[[], str]) -> str:
        """The word in a file of ours; made if there is none, once, however many start at the same time."""
        file = self.path / name
        if not file.exists():
            draft = self.path / f".{name}.{secrets.token_hex(4)}"
            write_private(draft, f"{make()}\n".encode())
            with contextlib.suppress(FileExistsError):
                os.link(draft, file)
            draft.unlink()
        if file.stat().st_mode & 0o077:
            file.chmod(0o600)
        return file.read_text("utf-8").strip()

    def _enter_token(self, token: str) -> None:
        """Have the owner's token among those the server knows, as an operator of team `default`."""
        file = self.path / "tokens.json"
        digest = hashlib.sha256(token.encode()).hexdigest()
        try:
            rows = msgspec.json.decode(file.read_bytes(), type=list[dict[str, object]])
        except FileNotFoundError:
            rows = []
        except msgspec.MsgspecError as error:
            raise Unusable(f"{file}: {error}; mend it, or remove it to start with one token") from error
        if not any(row.get("sha256") == digest for row in rows):
            rows.append({"sha256": digest, "name": _user(), "team": TEAM, "role": Role.OPERATOR.value})
            write_private(file, msgspec.json.format(msgspec.json.encode(rows), indent=2))
        elif file.stat().st_mode & 0o077:
            file.chmod(0o600)

    # --- which server runs here ---
    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Be the one server of this directory."""
        with locked(self.path / "server.lock") as got:
            if not got:
                running = self.server()
                who = f" (pid {running.pid} at {running.url})" if running is not None else ""
                raise Unusable(f"a server runs in {self.path} already{who}; stop it with `tpu down`")
            yield

    def server(self) -> ServerFile | None:
        """The server that runs here now; None when the file is missing, damaged or about a process that is no more."""
        try:
            file = msgspec.json.decode((self.path / "server.json").read_bytes(), type=ServerFile)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return file if file.process.alive else None

    def announce(self, url: str, version: str) -> ServerFile:
        me = processes.find(os.getpid())
        assert me is not None
        said = ServerFile(url=url, pid=me.pid, pid_started=me.started, version=version, boot=me.boot)
        write_private(self.path / "server.json", msgspec.json.encode(said))
        return said

    def withdraw(self, said: ServerFile | None = None) -> None:
        """Remove `server.json`: ours when the server ends, or, without `said`, one that is stale."""
        file = self.path / "server.json"
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            if said is None or msgspec.json.decode(file.read_bytes(), type=ServerFile) == said:
                file.unlink()

    # --- the port agents and people got used to ---
    def last_port(self) -> int:
        try:
            port = int((self.path / "port").read_text("ascii"))
        except (OSError, ValueError):
            return 0
        return port if 1024 <= port <= 65_535 else 0

    def keep_port(self, port: int) -> None:
        if port != self.last_port():
            write_private(self.path / "port", f"{port}\n".encode())


@contextlib.contextmanager
def locked(file: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold a lock file as long as this process lives or the block lasts; whether it was got."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        got = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            got = False
        yield got
    finally:
        os.close(handle)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"  # a container may run users that no file names
