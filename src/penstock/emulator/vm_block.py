"""A disk image as a block device of this machine, read-only, for hosts that a node attaches it to.

`vm_hosts` makes one per image of `tpu emulator --disk` and binds it into hosts. The kernel takes the device away with
the last who has it open, so that an emulator that is killed leaves none behind. It must not write to an image.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import Final

_CONTROL: Final = "/dev/loop-control"
_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_READ_ONLY, _AUTOCLEAR = 1, 4
#: `struct loop_config` of linux/loop.h: the image's descriptor, a block size (0: the usual), `struct loop_info64` with
#: nothing in it but the flags, and room for later.
_CONFIG: Final = struct.Struct("=II 52x I 176x 64x")
_TRIES: Final = 16  #: between asking for a free device and taking it another program may do the same


class NoDevice(Exception):
    """This machine has no loop devices, or the image cannot be read."""


class BlockDevice:
    """One image. `path` is its device for as long as this is open, or something on a host is mounted from it."""

    def __init__(self, image: Path) -> None:
        try:
            with image.open("rb") as file:
                self.path, self._descriptor = _attach(file.fileno())
        except OSError as error:
            raise NoDevice(f"{image} cannot be a disk here: {error.strerror or error}") from error

    def close(self) -> None:
        os.close(self._descriptor)


def _attach(image: int) -> tuple[str, int]:
    control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            path = f"/dev/loop{fcntl.ioctl(control, _GET_FREE)}"
            device = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _CONFIGURE, _CONFIG.pack(image, 0, _READ_ONLY | _AUTOCLEAR))
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:
                    raise
            else:
                return path, device
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no loop device could be had")
