"""Makes a dynamically linked program find its libraries beside itself, wherever it is unpacked.

`wiring.bundle` calls it on copies, never on the originals. It rewrites the search path that the linker left in a 64-bit
ELF file, in place: the new one must not be longer. A file without a search path is left as it is.
"""

from __future__ import annotations

import struct
from typing import Final

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 0, 5, 15, 29
_HEADER: Final = struct.Struct("<4sBBB9xHHIQQQIHHHHHH")
_PROGRAM: Final = struct.Struct("<IIQQQQQQ")
_ENTRY: Final = struct.Struct("<qQ")


class NotRelocatable(Exception):
    """The file holds a search path too short to be replaced."""


def is_elf(data: bytes) -> bool:
    """A 64-bit little-endian ELF file."""
    return data[:6] == b"\x7fELF\x02\x01"


def relocate(data: bytes, path: str) -> bytes:
    """The file with `path` as its search path, which then also serves the libraries that it loads."""
    if not is_elf(data):
        return data
    segments = list(_segments(data))
    dynamic = next(((offset, size) for kind, offset, _, size in segments if kind == _PT_DYNAMIC), None)
    if dynamic is None:
        return data
    patched = bytearray(data)
    entries = [(at, *_ENTRY.unpack_from(data, at)) for at in range(dynamic[0], dynamic[0] + dynamic[1], _ENTRY.size)]
    strings = next((value for _, tag, value in entries if tag == _DT_STRTAB), None)
    for at, tag, value in entries:
        if tag == _DT_NULL:
            break
        if tag in (_DT_RPATH, _DT_RUNPATH) and strings is not None:
            start = _file_offset(segments, strings) + value
            end = data.index(b"\0", start)
            if end - start < len(path):
                raise NotRelocatable(f"its search path {data[start:end].decode(errors='replace')!r} is too short")
            patched[start:end] = path.encode().ljust(end - start, b"\0")
            # The older tag: a search path under the newer one would not serve what a library needs in its turn.
            _ENTRY.pack_into(patched, at, _DT_RPATH, value)
    return bytes(patched)


def _segments(data: bytes) -> list[tuple[int, int, int, int]]:
    """Kind, offset in the file, address and size of each segment."""
    header = _HEADER.unpack_from(data)
    table, size, count = header[8], header[12], header[13]
    found = []
    for index in range(count):
        kind, _, offset, address, _, held, _, _ = _PROGRAM.unpack_from(data, table + index * size)
        found.append((kind, offset, address, held))
    return found


def _file_offset(segments: list[tuple[int, int, int, int]], address: int) -> int:
    for kind, offset, start, held in segments:
        if kind == _PT_LOAD and start <= address < start + held:
            return offset + address - start
    raise NotRelocatable("its tables are not where they say")
