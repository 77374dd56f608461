"""What `--on` means: an accelerator, a list of them, a pattern, a pool or a slice.

`tpu run`, `exec`, `resume` and `rerun` call `resolve`. The grammar is explicit (no guessing from parts of names):
`v5e-8` and other spellings of the catalogue; `v4-8,v5e-8`, best first; `v5e-*`, matched against what the pools offer;
`pool:NAME`, `slice:ID`, or the bare name of one where it is no accelerator. A name that means nothing is refused with
what there is.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

import click

if TYPE_CHECKING:
    from penstock.client.client import Client

SHOWN_POOLS = 8  #: names in an error line


class Target(NamedTuple):
    """Where a job may run; nothing set means the server's default."""

    on: tuple[str, ...] = ()
    pool: str | None = None
    slice: str | None = None


def resolve(text: str, client: Client) -> Target:
    """The target `text` names."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        return Target()
    if len(parts) == 1:
        kind, colon, name = parts[0].partition(":")
        if colon and kind in ("pool", "slice"):
            return Target(pool=name) if kind == "pool" else Target(slice=_slice(name, client))
        single = _accelerators(parts[0], client)
        return Target(on=single) if single else _named(parts[0], client)
    found: list[str] = []
    for part in parts:
        accelerators = _accelerators(part, client)
        if not accelerators:
            raise _unknown(part, client)
        found.extend(accelerators)
    return Target(on=tuple(dict.fromkeys(found)))


def _accelerators(text: str, client: Client) -> tuple[str, ...]:
    from penstock.domain import catalogue

    if any(character in text for character in "*?["):
        offered = {pool.accelerator for pool in client.pools()}
        matched = [catalogue.find(name) for name in offered if fnmatchcase(name, text)]
        # The smallest that fits the pattern is the quickest to get.
        return tuple(row.name for row in sorted(matched, key=lambda row: (row.chips, row.name)))
    try:
        return (catalogue.find(text).name,)
    except catalogue.UnknownAccelerator:
        return ()


def _named(text: str, client: Client) -> Target:
    """A bare name that is no accelerator: a pool, else a slice."""
    if any(pool.name == text for pool in client.pools()):
        return Target(pool=text)
    slices = _slices(text, client)
    if len(slices) == 1:
        return Target(slice=slices[0])
    raise _unknown(text, client)


def _slices(text: str, client: Client) -> list[str]:
    """Slices with this id, this place in a fleet (`tpu-us-central1-a-0`), or an id that begins so."""
    slices = client.slices()
    placed = [slice.id for slice in slices if slice.title == text and slice.state in ("ready", "creating", "intended")]
    return placed or [slice.id for slice in slices if slice.id.startswith(text)]


def _slice(text: str, client: Client) -> str:
    found = _slices(text, client)
    if text in found or len(found) == 1:
        return text if text in found else found[0]
    what = f"means {len(found)} slices" if found else "is no slice"
    raise click.BadParameter(f"{text!r} {what}; `tpu slices` lists them", param_hint="--on")


def _unknown(text: str, client: Client) -> click.BadParameter:
    from penstock.domain import catalogue

    pools = [pool.name for pool in client.pools()]
    known = f"pools: {', '.join(pools[:SHOWN_POOLS])}" if pools else "there is no pool"
    try:
        catalogue.find(text)
        why = f"{text!r} is in no pool"
    except catalogue.UnknownAccelerator as error:
        why = str(error)
    return click.BadParameter(f"{why}; no pool or slice has that name either ({known})", param_hint="--on")
