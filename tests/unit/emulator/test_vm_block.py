"""Images as block devices: they show what is in the file, cannot be written, and go with whoever made them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.emulator.vm_block import BlockDevice, NoDevice
from tests.missing import missing, need_root
from tests.process.machine import until


def test_an_image_is_a_device_for_as_long_as_it_is_wanted(tmp_path: Path) -> None:
    need_root("a block device")
    if not Path("/dev/loop-control").exists():
        missing("loop devices: disks of emulated hosts are made of them")
    image = tmp_path / "image"
    image.write_bytes(b"here" + bytes(1 << 20))
    device = BlockDevice(image)
    backing = Path("/sys/block") / Path(device.path).name / "loop/backing_file"
    assert backing.read_text().strip() == str(image)
    descriptor = os.open(device.path, os.O_RDONLY)
    assert os.read(descriptor, 4) == b"here"
    os.close(descriptor)
    descriptor = os.open(device.path, os.O_WRONLY)
    with pytest.raises(PermissionError):
        os.write(descriptor, bytes(512))
    os.close(descriptor)
    assert image.read_bytes()[:4] == b"here"
    device.close()
    until(lambda: _text(backing) != str(image))  # some kernels, and who looks at every new device, take a moment


def _text(file: Path) -> str:
    """What it says; nothing where it is gone."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def test_an_image_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoDevice, match="no-such-image cannot be a disk here: No such file or directory"):
        BlockDevice(tmp_path / "no-such-image")
