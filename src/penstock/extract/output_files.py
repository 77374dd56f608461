"""Files that commands write for users: whole or not there at all, and never over what is there unless told so.

`tpu dataset split` and `tpu dataset grids` write through it, to directories of this machine only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from penstock.domain.admission import BadInput


class Growing:
    """A file on its way: counts its lines and hashes its bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.lines = 0

    def line(self, data: bytes) -> None:
        self._file.write(data)
        self._file.write(b"\n")
        self._digest.update(data)
        self._digest.update(b"\n")
        self.lines += 1

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def local_path(field: str, address: str) -> Path:
    """A place on this machine; a bucket's address is refused before it becomes a directory called `gs:`."""
    if "://" in address:
        fix = "write to a directory here, then copy it with your cloud's own tool"
        raise BadInput(field, address, "is not on this machine", fix)
    return Path(address).expanduser()


@contextlib.contextmanager
def new_files(paths: list[Path], *, replace: bool) -> Iterator[list[Growing]]:
    """Files under hidden names, which get their own when the block ends well, and go when it does not."""
    taken = [path for path in paths if path.exists()]
    if taken and not replace:
        raise BadInput("out", str(taken[0]), "is there already", "choose another place, or say --replace")
    hidden = [path.with_name(f".{path.name}.part") for path in paths]
    with contextlib.ExitStack() as stack:
        for each in hidden:
            each.parent.mkdir(parents=True, exist_ok=True)
            stack.callback(each.unlink, missing_ok=True)
        files = [stack.enter_context(each.open("wb", buffering=1 << 20)) for each in hidden]
        yield [Growing(file) for file in files]
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        for each, path in zip(hidden, paths, strict=True):
            each.replace(path)
