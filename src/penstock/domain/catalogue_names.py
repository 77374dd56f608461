"""How people write an accelerator, turned into one exact request.

Decides which generation, size or topology and host size a text asks for; `catalogue.py` calls it and then
looks the request up. It reads the whole text by one grammar and never guesses from a part of it: `v5e-128`
must not be read as `v5e-1`.
"""

import re
from collections.abc import Iterable
from functools import cache

import msgspec

from penstock.domain.catalogue_table import EIGHT_CHIP_HOST_GENERATIONS, FAMILIES, Family

SHOWN_CHARACTERS = 60
"""Characters of a refused value that an error repeats; the rest says nothing to a reader."""

_TOPOLOGY = r"[1-9]\d{0,3}(?:x[1-9]\d{0,3}){1,2}"
_BY_NAME = re.compile(
    rf"(?:tpu-)?(?P<prefix>[a-z0-9]+)-(?:(?P<size>[1-9]\d{{0,5}})|(?P<topology>{_TOPOLOGY}))(?:-(?P<host>\d)t)?"
)
_BY_PAIR = re.compile(rf"(?P<label>[a-z0-9]+(?:-[a-z0-9]+)*)(?:\s*:\s*|\s+)(?P<topology>{_TOPOLOGY})")
_MACHINE_TYPE = re.compile(r"(?P<stem>[a-z0-9]+-[a-z]+)-(?P<host>\d)t")

GRAMMAR = (
    "write GENERATION-SIZE (v5e-16), GENERATION-TOPOLOGY (v5p-2x2x4), "
    "or a GKE accelerator or machine type with a topology (tpu-v5p-slice 2x2x4)"
)


class UnknownAccelerator(ValueError):
    """A text that names no accelerator; `nearest` holds valid names close to what was meant."""

    def __init__(self, value: str, rule: str, nearest: tuple[str, ...]) -> None:
        shown = value if len(value) <= SHOWN_CHARACTERS else value[:SHOWN_CHARACTERS] + "…"
        super().__init__(f"accelerator {shown!r}: {rule}; nearest valid names: {', '.join(nearest)}")
        self.value = value
        self.rule = rule
        self.nearest = nearest


class Request(msgspec.Struct, frozen=True):
    """What a text asks for: either `size` or `topology` is set; `chips_per_host` only if it was said."""

    family: Family
    size: int | None
    topology: str | None
    chips_per_host: int | None


@cache
def _prefixes() -> dict[str, Family]:
    return {spelling: family for family in FAMILIES for spelling in family.spellings}


@cache
def _gke_accelerators() -> dict[str, Family]:
    return {family.gke_accelerator: family for family in FAMILIES if family.gke_accelerator is not None}


def _machine(label: str) -> tuple[Family, int] | None:
    """Return the family and the chips per host of a GKE machine type, or None if it is none."""
    match = _MACHINE_TYPE.fullmatch(label)
    if match is None:
        return None
    for family in FAMILIES:
        if family.gke_machine_stem == match["stem"]:
            return family, int(match["host"])
    return None


def normalise(text: str) -> str:
    """Return the text as the grammar reads it: lower case, no space around it."""
    return text.strip().lower()


def family_of(text: str) -> Family | None:
    """Return the family a generation, prefix or GKE accelerator stands for, or None."""
    key = normalise(text)
    return _prefixes().get(key) or _gke_accelerators().get(key)


def parse(text: str) -> Request | None:
    """Read a text by the grammar; None if it is not a sentence of it or names no generation."""
    key = normalise(text)
    by_name = _BY_NAME.fullmatch(key)
    if by_name is not None:
        family = _prefixes().get(by_name["prefix"])
        if family is None:
            return None
        size = int(by_name["size"]) if by_name["size"] else None
        host = int(by_name["host"]) if by_name["host"] else None
        return Request(family, size, by_name["topology"], host)
    by_pair = _BY_PAIR.fullmatch(key)
    if by_pair is not None:
        return parse_pair(by_pair["label"], by_pair["topology"])
    return None


def unknown_prefix(text: str) -> str | None:
    """Return the prefix of a well-formed name whose generation does not exist, or None."""
    by_name = _BY_NAME.fullmatch(normalise(text))
    if by_name is None or by_name["prefix"] in _prefixes():
        return None
    return by_name["prefix"]


def parse_pair(label: str, topology: str) -> Request | None:
    """Read a GKE accelerator or machine type and a topology."""
    family = _gke_accelerators().get(normalise(label))
    if family is not None:
        return Request(family, None, normalise(topology), None)
    machine = _machine(normalise(label))
    if machine is not None:
        return Request(machine[0], None, normalise(topology), machine[1])
    return None


def spell(family: Family, size: int, host_suffix: str = "") -> str:
    """Return the canonical name of a size."""
    return f"{family.spellings[0]}-{size}{host_suffix}"


def chips_in(topology: str) -> int:
    """Return the product of a topology's edges."""
    chips = 1
    for edge in topology.split("x"):
        chips *= int(edge)
    return chips


def suffix_of(family: Family, chips: int) -> int:
    """Return the number users write after the prefix for that many chips."""
    return chips * family.cores_per_chip if family.suffix_counts == "cores" else chips


def host_sizes(family: Family, chips: int) -> tuple[int, ...]:
    """Return the chips per host a slice of that many chips may have, the default first.

    v5e and v6e have 1-, 4- and 8-chip machines, and only the slice of 8 chips leaves a choice: one host of 8
    (what the TPU VM API gives) or two of 4. Everything else is made of 4-chip hosts.
    """
    if family.generation in EIGHT_CHIP_HOST_GENERATIONS:
        if chips == 1:
            return (1,)
        if chips == 8:
            return (8, 4)
    return (4,)


def nearest_sizes(sizes: Iterable[int], wanted: int) -> tuple[int, ...]:
    """Return the largest size below and the smallest size above the one wanted."""
    known = sorted(sizes)
    below = [size for size in known if size < wanted]
    above = [size for size in known if size > wanted]
    return tuple(below[-1:] + above[:1])


def nearest_words(text: str, words: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """Return the words most like the text, best first; none if nothing is alike."""
    from difflib import get_close_matches  # only an error needs it, and it costs start-up time

    return tuple(get_close_matches(normalise(text)[:SHOWN_CHARACTERS], list(words), n=count, cutoff=0.6))
