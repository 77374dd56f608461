"""CRC32C: the published check value, and the fast way against the plain one."""

from __future__ import annotations

import random

import pytest

from penstock.emulator.crc32c import crc32c


def plainly(data: bytes) -> int:
    state = 0xFFFF_FFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFF_FFFF


def test_the_published_values() -> None:
    assert crc32c(b"") == 0
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, appendix B.4
    assert crc32c(b"\xff" * 32) == 0x62A8AB43


@pytest.mark.parametrize("size", [1, 1000, (1 << 18) - 1, 1 << 18, (1 << 18) + 16_385])
def test_lanes_give_what_single_bytes_give(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert crc32c(data) == plainly(data)
