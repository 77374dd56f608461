"""Checks what a pool asks of a cloud, before anything is stored: options, mounts, and zones by name or pattern.

Called where pools are set. Words end up in request bodies and, for mounts, in a shell script that root runs on every
host: they are held to plain letters here, once, and quoted there again.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

from penstock.domain.admission import BadInput
from penstock.domain.catalogue import Accelerator
from penstock.domain.cloud import FLEX_START, FLEX_START_LIFE_S_MAX, KINDS, MOUNT_KINDS, RESERVED, CloudWish, Mount

#: What the API's description states too.
WORD_PATTERN: Final = "^[A-Za-z0-9][A-Za-z0-9._@:/-]{0,254}$"
PATH_PATTERN: Final = "^(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,60}){1,8}$"
TAG_PATTERN: Final = "^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"
LIST_MAX: Final = 32  #: tags, disks or mounts of one pool
LIFE_S: Final = (600.0, FLEX_START_LIFE_S_MAX)
WAIT_S: Final = (60.0, 30 * 24 * 3600.0)
_ZONE: Final = re.compile(r"[a-z]+-[a-z]+[0-9]+-[a-z]")
_WILD: Final = ("*", "?", "[")


def check(wish: CloudWish) -> None:
    """Refuse words that no provider could take, with the field and the rule."""
    if wish.kind not in KINDS:
        raise BadInput("cloud.kind", wish.kind, "is no way to buy capacity", f"take one of {', '.join(KINDS)}")
    if wish.life_s is not None and not LIFE_S[0] <= wish.life_s <= LIFE_S[1]:
        raise BadInput("cloud.life_s", wish.life_s, "is not between 10 minutes and 7 days", "correct it")
    if wish.wait_s is not None and not WAIT_S[0] <= wish.wait_s <= WAIT_S[1]:
        raise BadInput("cloud.wait_s", wish.wait_s, "is not between a minute and 30 days", "correct it")
    for field in ("reservation", "runtime_version", "network", "subnetwork", "service_account"):
        word = getattr(wish, field)
        if word and not _matches(WORD_PATTERN, word):
            raise BadInput(f"cloud.{field}", word, "is not a resource name", "copy it from the cloud's own list")
    for field in ("tags", "disks", "mounts"):
        if len(getattr(wish, field)) > LIST_MAX:
            raise BadInput(f"cloud.{field}", len(getattr(wish, field)), f"is more than {LIST_MAX}", "leave some out")
    for tag in wish.tags:
        if not _matches(TAG_PATTERN, tag):
            raise BadInput("cloud.tags", tag, "is not a network tag", "use lower-case letters, digits and dashes")
    for disk in wish.disks:
        if not _matches(WORD_PATTERN, disk):
            raise BadInput("cloud.disks", disk, "is not a disk's name", "copy it from the cloud's own list")
    for mount in wish.mounts:
        _check_mount(mount)


def check_together(wish: CloudWish) -> None:
    """Refuse options that are right by themselves and contradict each other."""
    if wish.reservation and wish.kind != RESERVED:
        raise BadInput("cloud.reservation", wish.reservation, f"goes only with kind {RESERVED}", "leave one out")
    if wish.life_s is not None and wish.kind != FLEX_START:
        raise BadInput("cloud.life_s", wish.life_s, f"goes only with kind {FLEX_START}", "leave one out")
    paths = [mount.path for mount in wish.mounts]
    if len(set(paths)) != len(paths):
        raise BadInput("cloud.mounts", sorted(paths), "has two mounts at one path", "give each its own")


def resolve_zones(wanted: Sequence[str], accelerator: Accelerator, allowed: Iterable[str]) -> tuple[str, ...]:
    """The zones that names and patterns mean for an accelerator, as they are named first.

    Patterns choose among the zones that the catalogue knows. A zone by its name may be newer than the catalogue.
    """
    patterns = tuple(allowed)
    offered = sorted(zone for zone in accelerator.zones or () if _allowed(zone, patterns))
    found: dict[str, None] = {}
    for word in wanted:
        if any(sign in word for sign in _WILD):
            fitting = [zone for zone in offered if fnmatchcase(zone, word)]
            if not fitting:
                raise BadInput("zones", word, f"fits no zone of {accelerator.name}", _there_are(offered))
            found.update(dict.fromkeys(fitting))
        else:
            _check_zone(word, accelerator, offered, patterns)
            found[word] = None
    return tuple(found)


def _check_zone(zone: str, accelerator: Accelerator, offered: Sequence[str], allowed: Sequence[str]) -> None:
    if _ZONE.fullmatch(zone) is None:
        raise BadInput("zones", zone, "is no zone of the cloud", _there_are(offered))
    if not _allowed(zone, allowed):
        raise BadInput("zones", zone, "is not among the zones that this server may use", f"see {', '.join(allowed)}")
    if zone not in (accelerator.zones or ()):
        near = difflib.get_close_matches(zone, offered, 1, cutoff=0.9)
        if near and _place(zone) != _place(near[0]):  # a new number or letter is a new zone, a new word a mistake
            raise BadInput("zones", zone, f"is not known to have {accelerator.name}", f"did you mean {near[0]}?")


def _place(zone: str) -> str:
    return zone.rstrip("abcdefghijklmnopqrstuvwxyz").rstrip("-0123456789")


def _allowed(zone: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(zone, pattern) for pattern in patterns)


def _there_are(offered: Sequence[str]) -> str:
    return f"there are {', '.join(offered)}" if offered else "none is known; name zones such as us-central1-a"


def _check_mount(mount: Mount) -> None:
    """Its words stand in a shell script that root runs on every host."""
    if mount.kind not in MOUNT_KINDS:
        raise BadInput("cloud.mounts", mount.kind, "is no kind of mount", f"take one of {', '.join(MOUNT_KINDS)}")
    if not _matches(WORD_PATTERN, mount.source):
        raise BadInput("cloud.mounts", mount.source, "is no address of a mount", "write HOST:/EXPORT, BUCKET or DISK")
    if not _matches(PATH_PATTERN, mount.path):
        raise BadInput("cloud.mounts", mount.path, "is not an absolute path of plain letters", "such as /mnt/data")


def _matches(pattern: str, word: str) -> bool:
    return re.search(pattern, word) is not None and not word.endswith("\n")
