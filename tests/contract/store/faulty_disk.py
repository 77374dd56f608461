"""A disk that fails on command: an SQLite file layer that counts syncs and writes and breaks the chosen one."""

from __future__ import annotations

from typing import Any

import apsw
from typing_extensions import override


class FaultyDisk(apsw.VFS):
    """Registered under `name` while it lives. Counting starts when it is armed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fail_sync = 0  #: the sync to fail, counted from now; 0: none
        self.fail_writes = range(0)  #: the writes that find the disk full
        self.syncs = 0
        self.writes = 0
        self.fired = 0
        super().__init__(name, "")

    def arm(self, *, sync: int = 0, writes: range = range(0)) -> None:
        self.syncs = self.writes = self.fired = 0
        self.fail_sync, self.fail_writes = sync, writes

    @override
    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return _File(self, name, flags)


class _File(apsw.VFSFile):
    def __init__(self, disk: FaultyDisk, name: Any, flags: list[int]) -> None:
        self._disk = disk
        super().__init__("", name, flags)

    @override
    def xSync(self, flags: int) -> None:
        self._disk.syncs += 1
        if self._disk.syncs == self._disk.fail_sync:
            self._disk.fired += 1
            raise apsw.IOError("sync failed, as asked")
        super().xSync(flags)

    @override
    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.writes += 1
        if self._disk.writes in self._disk.fail_writes:
            self._disk.fired += 1
            raise apsw.FullError("disk full, as asked")
        super().xWrite(data, offset)
