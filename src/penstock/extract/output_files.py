"""Files that commands write for users: whole or not there at all, and never over what is there unless told so.

`tpu dataset split` and `tpu dataset grids` write through it, to a directory or a bucket (`objects.outputs`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

from penstock.domain.admission import BadInput
from penstock.objects.outputs import folder_and_name, open_folder


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


@contextlib.contextmanager
def new_files(
    folder: str, names: Sequence[str], *, replace: bool, environment: Mapping[str, str] = os.environ
) -> Iterator[list[Growing]]:
    """Files of a folder, which are hidden until the block ends well, and go when it does not.

    The last is named last: a file that sums up the others says that they are there.
    """
    place = open_folder(folder, environment)
    taken = sorted(place.names() & set(names))
    if taken and not replace:
        rule = "is there already"
        raise BadInput("out", f"{folder.rstrip('/')}/{taken[0]}", rule, "choose another place, or say --replace")
    with place.growing() as where:
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context((where / name).open("wb", buffering=1 << 20)) for name in names]
            yield [Growing(file) for file in files]
        if len(names) > 1 and names[-1] in taken:
            place.remove(names[-1])  # what sums up the old ones must not stand beside some of the new
        for name in names:
            place.publish(where / name, name, replace=replace)


@contextlib.contextmanager
def new_file(
    field: str, address: str, *, replace: bool, environment: Mapping[str, str] = os.environ
) -> Iterator[Growing]:
    """One file, by its own address."""
    folder, name = folder_and_name(field, address)
    with new_files(folder, [name], replace=replace, environment=environment) as (file,):
        yield file


def present(folder: str, environment: Mapping[str, str] = os.environ) -> set[str]:
    """Names of the files that are in a folder now."""
    return open_folder(folder, environment).names()


def remove(folder: str, names: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    place = open_folder(folder, environment)
    for name in names:
        place.remove(name)
