"""The accelerator catalogue: every TPU slice by name, with its shape, hosts, machine, zones and price.

Decides what a name such as `v5e-16`, or a GKE pair such as `tpu-v5p-slice 2x2x4`, exactly means. Planner,
store, providers and command line all ask here; none of them may work out chips or hosts from a name by
itself. Every shape has one canonical name, so that a stored name always gives the same shape back. It does
no I/O, and builds its tables on the first question, not on import.
"""

from functools import cache, lru_cache
from typing import Final

import msgspec

from penstock.domain.catalogue_names import (
    GRAMMAR,
    Request,
    UnknownAccelerator,
    chips_in,
    family_of,
    host_sizes,
    nearest_sizes,
    nearest_words,
    normalise,
    parse,
    parse_pair,
    spell,
    suffix_of,
    unknown_prefix,
)
from penstock.domain.catalogue_table import (
    CUBE_EDGE_CHIPS,
    FAMILIES,
    LONGEST_ROW_OF_CUBES,
    PRICES,
    ZONES,
    Family,
    PriceFact,
    Source,
    ZoneFact,
    default_topologies,
)

__all__ = [
    "Accelerator",
    "Gap",
    "SourcedFact",
    "UnknownAccelerator",
    "aliases",
    "all_accelerators",
    "family",
    "find",
    "find_gke",
    "gaps",
    "generations",
    "is_family",
    "sources",
]

_REMEMBERED_NAMES: Final = 4096
"""Resolved spellings kept in memory: more than people use, and a bound against a flood of odd ones."""


class Accelerator(msgspec.Struct, frozen=True):
    """One TPU slice shape. The fields are the keys of `tpu catalog --json`."""

    name: str
    generation: str
    topology: str
    chips: int
    cores: int
    jax_devices: int
    hosts: int
    chips_per_host: int
    gke_accelerator: str | None
    gke_machine_type: str | None
    runtime_version: str | None
    providers: tuple[str, ...]
    zones: tuple[str, ...] | None
    usd_per_chip_hour: float | None
    usd_per_chip_hour_spot: float | None


class Gap(msgspec.Struct, frozen=True):
    """A fact the catalogue does not have for some accelerators of a generation, and why."""

    generation: str
    field: str
    names: tuple[str, ...]
    reason: str


class SourcedFact(msgspec.Struct, frozen=True):
    """Where the zones or the price of an accelerator were read; a price is that of one region."""

    generation: str
    fact: str
    region: str | None
    source: Source


def generations() -> tuple[str, ...]:
    """Return the generations, oldest first."""
    return tuple(known.generation for known in FAMILIES)


@cache
def all_accelerators() -> tuple[Accelerator, ...]:
    """Return every size of every generation, with the shape its name stands for."""
    return tuple(accelerator for known in FAMILIES for accelerator in _members(known.generation))


@cache
def _members(generation: str) -> tuple[Accelerator, ...]:
    known = _family_of_generation(generation)
    return tuple(
        _build(known, topology, chips_per_host)
        for topology in default_topologies(known)
        for chips_per_host in host_sizes(known, chips_in(topology))
    )


@cache
def _default_topology(generation: str) -> dict[int, str]:
    """Return the default topology by number of chips."""
    return {accelerator.chips: accelerator.topology for accelerator in _members(generation)}


def is_family(text: str) -> bool:
    """Say whether the text stands for a whole generation: `v5e`, `v5litepod`, `tpu-v5p-slice`."""
    return family_of(text) is not None


def family(generation: str) -> tuple[Accelerator, ...]:
    """Return the accelerators of one generation, smallest first."""
    known = family_of(generation)
    if known is None:
        names = generations()
        nearest = nearest_words(generation, names) or names
        raise UnknownAccelerator(generation, "no such generation", nearest)
    return _members(known.generation)


def find(name: str) -> Accelerator:
    """Return the accelerator a user means by any spelling of the grammar.

    >>> find("v5litepod-16").name, find("tpu-v5p-slice 2x2x4").name
    ('v5e-16', 'v5p-32')
    """
    return _resolve_text(normalise(name))


def find_gke(accelerator: str, topology: str, chips_per_host: int | None = None) -> Accelerator:
    """Return the accelerator of a GKE node selector, with the chips one pod asks for where that is known.

    Only the 8-chip slice of v5e and v6e has two host sizes; without `chips_per_host` it is one host of 8.
    """
    asked = f"{accelerator} {topology}"
    request = parse_pair(accelerator, topology)
    if request is None or parse(asked) is None:
        raise _not_understood(asked)
    said = request.chips_per_host
    if chips_per_host is not None and said is not None and chips_per_host != said:
        nearest = (_resolve(asked, request).name,)
        rule = f"the machine type has {said} chips per host, not {chips_per_host}"
        raise UnknownAccelerator(asked, rule, nearest)
    return _resolve(asked, msgspec.structs.replace(request, chips_per_host=chips_per_host or said))


def aliases(accelerator: Accelerator) -> tuple[str, ...]:
    """Return the other spellings `find` takes for this accelerator."""
    known = _family_of_generation(accelerator.generation)
    size = suffix_of(known, accelerator.chips)
    default_host = host_sizes(known, accelerator.chips)[0] == accelerator.chips_per_host
    default_shape = _default_topology(known.generation)[accelerator.chips] == accelerator.topology
    host = "" if default_host else f"-{accelerator.chips_per_host}t"
    spelt: list[str] = []
    for prefix in known.spellings:
        if default_shape:
            spelt.append(f"{prefix}-{size}{host}")
        spelt.append(f"{prefix}-{accelerator.topology}{host}")
    if accelerator.gke_accelerator is not None and default_host:
        spelt.append(f"{accelerator.gke_accelerator}:{accelerator.topology}")
    if accelerator.gke_machine_type is not None:
        spelt.append(f"{accelerator.gke_machine_type}:{accelerator.topology}")
    return tuple(spelling for spelling in spelt if spelling != accelerator.name)


def gaps() -> tuple[Gap, ...]:
    """Return the zones and prices that are null, grouped by generation, with the reason."""
    found: list[Gap] = []
    for known in FAMILIES:
        members = _members(known.generation)
        for field in ("zones", "usd_per_chip_hour", "usd_per_chip_hour_spot"):
            empty = [accelerator for accelerator in members if getattr(accelerator, field) is None]
            by_reason: dict[str, list[str]] = {}
            for accelerator in empty:
                fact = _zone_fact if field == "zones" else _price_fact
                by_reason.setdefault(fact(known, accelerator.name).source.note, []).append(accelerator.name)
            found.extend(Gap(known.generation, field, tuple(names), reason) for reason, names in by_reason.items())
    return tuple(found)


def sources(accelerator: Accelerator) -> tuple[SourcedFact, ...]:
    """Return where its zones and its price were read, and on which day; what is null is in `gaps`."""
    known = _family_of_generation(accelerator.generation)
    zones = _zone_fact(known, accelerator.name)
    price = _price_fact(known, accelerator.name)
    found: list[SourcedFact] = []
    if zones.zones is not None:
        found.append(SourcedFact(known.generation, "zones", None, zones.source))
    if price.on_demand is not None or price.spot is not None:
        found.append(SourcedFact(known.generation, "price", price.region, price.source))
    return tuple(found)


@lru_cache(maxsize=_REMEMBERED_NAMES)
def _resolve_text(text: str) -> Accelerator:
    request = parse(text)
    if request is None:
        raise _not_understood(text)
    return _resolve(text, request)


def _resolve(text: str, request: Request) -> Accelerator:
    known = request.family
    topology = request.topology if request.topology is not None else _topology_of_size(text, request)
    if not _has_shape(known, topology):
        nearest = _names_near(known, suffix_of(known, chips_in(topology)))
        raise UnknownAccelerator(text, f"{known.generation} has no slice of topology {topology}", nearest)
    possible = host_sizes(known, chips_in(topology))
    chips_per_host = request.chips_per_host or possible[0]
    if chips_per_host not in possible:
        nearest = tuple(_build(known, topology, size).name for size in possible)
        sizes = " or ".join(str(size) for size in sorted(possible))
        rule = f"{known.generation} {topology} has {sizes} chips per host, not {chips_per_host}"
        raise UnknownAccelerator(text, rule, nearest)
    return _build(known, topology, chips_per_host)


def _topology_of_size(text: str, request: Request) -> str:
    known = request.family
    for chips, topology in _default_topology(known.generation).items():
        if suffix_of(known, chips) == request.size:
            return topology
    rule = (
        f"the number after {known.spellings[0]}- counts {known.suffix_counts}, "
        f"and no {known.generation} slice has {request.size}"
    )
    raise UnknownAccelerator(text, rule, _names_near(known, request.size or 0))


def _has_shape(known: Family, topology: str) -> bool:
    """Say whether the family has the shape: a default one, or another box of whole cubes of a known size."""
    defaults = _default_topology(known.generation)
    chips = chips_in(topology)
    if defaults.get(chips) == topology:
        return True
    edges = [int(edge) for edge in topology.split("x")]
    return (
        known.other_shapes
        and chips in defaults
        and len(edges) == 3
        and edges == sorted(edges)
        and all(edge % CUBE_EDGE_CHIPS == 0 for edge in edges)
        and edges[-1] <= LONGEST_ROW_OF_CUBES * CUBE_EDGE_CHIPS
    )


def _names_near(known: Family, wanted: int) -> tuple[str, ...]:
    sizes = [suffix_of(known, chips) for chips in _default_topology(known.generation)]
    if wanted in sizes:
        return (spell(known, wanted),)
    return tuple(spell(known, size) for size in nearest_sizes(sizes, wanted))


def _not_understood(text: str) -> UnknownAccelerator:
    """Build the refusal of a text the grammar cannot read, with the names most like it."""
    known = family_of(text)
    if known is not None:
        smallest = tuple(accelerator.name for accelerator in _members(known.generation)[:3])
        return UnknownAccelerator(text, f"a generation without a size; {GRAMMAR}", smallest)
    meaning = {
        spelling: accelerator.name
        for accelerator in all_accelerators()
        for spelling in (accelerator.name, *aliases(accelerator))
    }
    alike = dict.fromkeys(meaning[spelling] for spelling in nearest_words(text, meaning))
    nearest = tuple(alike) or tuple(_members(generation)[0].name for generation in generations())
    prefix = unknown_prefix(text)
    if prefix is not None:
        rule = f"no TPU generation is called {prefix} (known: {', '.join(generations())})"
        return UnknownAccelerator(text, rule, nearest)
    return UnknownAccelerator(text, GRAMMAR, nearest)


def _family_of_generation(generation: str) -> Family:
    return next(known for known in FAMILIES if known.generation == generation)


def _zone_fact(known: Family, name: str) -> ZoneFact:
    rows = (row for row in ZONES if row.generation == known.generation)
    return next(row for row in rows if not row.names or name in row.names)


def _price_fact(known: Family, name: str) -> PriceFact:
    rows = (row for row in PRICES if row.generation == known.generation)
    return next(row for row in rows if not row.names or name in row.names)


def _build(known: Family, topology: str, chips_per_host: int) -> Accelerator:
    chips = chips_in(topology)
    default_host = host_sizes(known, chips)[0] == chips_per_host
    host_suffix = "" if default_host else f"-{chips_per_host}t"
    if topology in default_topologies(known):
        name = spell(known, suffix_of(known, chips), host_suffix)
    else:
        name = f"{known.spellings[0]}-{topology}{host_suffix}"
    stem = known.gke_machine_stem
    price = _price_fact(known, name)
    return Accelerator(
        name=name,
        generation=known.generation,
        topology=topology,
        chips=chips,
        cores=chips * known.cores_per_chip,
        jax_devices=chips * known.jax_devices_per_chip,
        hosts=chips // chips_per_host,
        chips_per_host=chips_per_host,
        gke_accelerator=known.gke_accelerator,
        gke_machine_type=None if stem is None else f"{stem}-{chips_per_host}t",
        runtime_version=known.runtime_version,
        # the TPU VM API has no way to ask for the smaller hosts of an 8-chip slice
        providers=known.providers if default_host else ("gke",),
        zones=_zone_fact(known, name).zones,
        usd_per_chip_hour=price.on_demand,
        usd_per_chip_hour_spot=price.spot,
    )
