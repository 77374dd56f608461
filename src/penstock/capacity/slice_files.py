"""What lies on disk about local slices: one directory each, its record, its agents' records, its join token.

`capacity.local` reads and writes slices only through here. A directory appears whole or not at all, a record is
replaced whole, and what cannot be read is an answer, never an error: a server must start over whatever a crash left. It
must not look at processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from penstock.capacity.processes import Process
from penstock.ports.capacity import READY

#: Everything is being killed; shown as ready until nothing runs any more.
STOPPING: Final = "STOPPING"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_HOSTS_MAX: Final = 10_000  #: more than any slice has; a record that says more is damaged


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`slice.json`: what was asked for, and what has been decided about it since."""

    name: str
    provider_id: str
    label: str
    team: str
    accelerator: str
    hosts: int
    created_at: float
    state: str = READY
    detail: str = ""
    preempt_at: float | None = None  #: a notice was given: then it is taken away


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """`host-N.json`: the agent process that was last started for a host, and whom it talks to."""

    process: Process
    server: str
    quick_ends: int = 0  #: starts in a row before this one that ended at once


def is_name(text: str) -> bool:
    """Whether this can be a slice of ours: such a name is no path and no hidden file."""
    return _NAME.fullmatch(text) is not None


class SliceFiles:
    """The directory of all local slices."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, name: str) -> Path:
        return self._folder / name

    def host(self, name: str, host: int) -> Path:
        """The state directory of an agent."""
        return self._folder / name / f"host-{host}"

    def log(self, name: str, host: int) -> Path:
        return self._folder / name / f"host-{host}.log"

    def token(self, name: str) -> Path:
        return self._folder / name / "join"

    def names(self) -> Sequence[str]:
        try:
            entries = sorted(os.scandir(self._folder), key=lambda entry: entry.name)
        except FileNotFoundError:
            return ()
        return [entry.name for entry in entries if is_name(entry.name) and entry.is_dir(follow_symlinks=False)]

    def record(self, name: str) -> Record | str:
        """A slice's record, or why it cannot be read."""
        file = self.of(name) / "slice.json"
        try:
            record = msgspec.json.decode(file.read_bytes(), type=Record)
        except FileNotFoundError:
            return f"{file} is missing"
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            return f"{file} cannot be read: {error}"
        if record.name != name or not 0 < record.hosts <= _HOSTS_MAX:
            return f"{file} is about another slice"
        return record

    def records(self) -> Sequence[Record]:
        """All that can be read."""
        return [record for name in self.names() if isinstance(record := self.record(name), Record)]

    def save(self, record: Record) -> None:
        write_private(self.of(record.name) / "slice.json", msgspec.json.encode(record))

    def agent(self, name: str, host: int) -> Agent | None:
        """The agent that was last started for a host; None when nobody knows: it is then found by its arguments."""
        try:
            return msgspec.json.decode((self.of(name) / f"host-{host}.json").read_bytes(), type=Agent)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def save_agent(self, name: str, host: int, agent: Agent) -> None:
        write_private(self.of(name) / f"host-{host}.json", msgspec.json.encode(agent))

    def agents(self, name: str) -> Sequence[Agent]:
        """Those of all hosts, as far as files tell; also of a slice whose own record is lost."""
        hosts = [int(path.stem[5:]) for path in self.of(name).glob("host-*.json") if path.stem[5:].isdigit()]
        return [agent for host in hosts if (agent := self.agent(name, host)) is not None]

    def write_notice(self, record: Record, notice_s: float) -> None:
        """Tell every agent of a slice that its host will be taken away."""
        for host in range(record.hosts):
            write_private(self.host(record.name, host) / "notice", f"{notice_s:g}\n".encode())

    def make(self, record: Record, join_token: str) -> None:
        """The slice's directory, whole or not at all: made beside its name, then moved there."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._folder / f".new-{record.name}-{secrets.token_hex(4)}"
        draft.mkdir(mode=0o700)
        try:
            write_private(draft / "join", join_token.encode())
            write_private(draft / "slice.json", msgspec.json.encode(record))
            for host in range(record.hosts):
                (draft / f"host-{host}").mkdir(mode=0o700)
            draft.rename(self.of(record.name))
            sync_directory(self._folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def drop(self, name: str) -> Path:
        """Take a slice's directory away from its name; what it held is removed by `remove`."""
        scrap = self._folder / f".gone-{name}-{secrets.token_hex(4)}"
        self.of(name).rename(scrap)
        sync_directory(self._folder)
        return scrap

    def remove_scraps(self) -> None:
        """Remove what a server left that died while it made or dropped a slice."""
        if self._folder.is_dir():
            for scrap in self._folder.iterdir():
                if scrap.name.startswith((".new-", ".gone-")):
                    remove(scrap)


def write_private(path: Path, data: bytes) -> None:
    """Write a file as a whole, for its owner only, and have it on the disk before anybody relies on it."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "wb") as writer:
            writer.write(data)
            writer.flush()
            os.fsync(file)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def last_line(log: Path) -> str:
    try:
        lines = log.read_bytes()[-4096:].decode("utf-8", "replace").strip().splitlines()
    except OSError as error:
        return f"{log}: {error.strerror}"
    return f"{lines[-1]} (see {log})" if lines else f"it said nothing ({log} is empty)"


def remove(scrap: Path) -> None:
    """Remove a tree, also where a payload took the right to do so away; what stays is tried at the next start."""
    for folder, _, _ in os.walk(scrap):
        with contextlib.suppress(OSError):
            Path(folder).chmod(0o700)
    shutil.rmtree(scrap, ignore_errors=True)
