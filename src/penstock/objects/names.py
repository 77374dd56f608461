"""Which names objects may have: the same ones in a directory and in every bucket, so that a root can be moved.

The adapters call it before anything else. It must not know where objects are kept.
"""

from __future__ import annotations

from typing import Final

from penstock.domain.admission import BadInput

_PATH_BYTES_MAX: Final = 1024
_PART_BYTES_MAX: Final = 255


def parts_of(path: str) -> list[str]:
    """A path's names, or a refusal of what could mean another place."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise BadInput("path", path, "is not a plain relative path", "use names separated by single slashes")
    if "\0" in path or "\\" in path:
        raise BadInput("path", path, "has a character that no object may have in its name", "leave it out")
    if len(path.encode()) > _PATH_BYTES_MAX or any(len(part.encode()) > _PART_BYTES_MAX for part in parts):
        rule = f"is longer than {_PATH_BYTES_MAX} bytes, or one of its names than {_PART_BYTES_MAX}"
        raise BadInput("path", path, rule, "shorten it")
    return parts
