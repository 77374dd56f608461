"""Which slice a word on the command line means, and whether somebody really wants what cannot be undone.

Commands about single slices call `meant`; commands that delete call `confirm`. Slices are known by their id, by enough
of it, or by their place in a fleet (`tpu-us-central1-a-0`), which their successor takes over.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from penstock.cli.talk import Refused
from penstock.cli.terminal import safe

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.wire.api import SliceView

NOT_FOUND, AMBIGUOUS = 5, 2
_STAYING = ("intended", "creating", "ready")


def meant(client: Client, word: str) -> SliceView:
    """The slice that `word` means."""
    slices = client.slices()
    titled = [each for each in slices if each.title == word]
    found = (
        [each for each in slices if each.id == word]
        or [each for each in titled if each.state in _STAYING]
        or titled
        or [each for each in slices if each.id.startswith(word)]
    )
    if not found:
        raise Refused(safe(f"slice: there is no {word!r}; `tpu slices` lists them"), NOT_FOUND)
    if len(found) > 1:
        raise Refused(safe(f"slice: {word!r} may mean {found[0].id} or {found[1].id}"), AMBIGUOUS)
    return found[0]


def confirm(question: str, yes: bool) -> None:
    """Ask, unless `yes`. Where nobody can answer, nothing is done."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{safe(question)} Nobody is here to answer: add --yes")
    click.confirm(safe(question), abort=True, err=True)
