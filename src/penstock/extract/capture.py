"""Which layers run, in which pieces, and where each wanted site is read: decided once, before anything is loaded.

`weights` stacks the layers' tensors as the pieces say, `model` walks through them. Layers nobody wants are scanned, so
the program stays small; nothing behind the last wanted place is in any piece. Two ways of keeping what is read:
with few wanted layers each of them is a piece of its own and its values are plain results; with many
(`BUFFERED_FROM`), one scan writes them into slots of a buffer, and the program does not grow with their number. It is
plain arithmetic on layer numbers and must not import jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.domain.admission import BadInput
from penstock.extract.config import LayerKind, ModelConfig
from penstock.extract.shapes import Kind, Site

BUFFERED_FROM: Final = 6  #: wanted layers; below, separate pieces compile as fast and copy less

#: In the order in which a layer computes them; the stream after the block is last.
ORDER: Final = (Kind.HEAD_OUT, Kind.ATTN_OUT, Kind.MLP_OUT, Kind.RESID_POST)


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Layers `first` … that run together: `groups` times the same `period` kinds of layer, scanned if repeated."""

    first: int
    period: int
    groups: int

    @property
    def stop(self) -> int:
        return self.first + self.period * self.groups

    def layer(self, group: int, slot: int) -> int:
        return self.first + group * self.period + slot


class Course(msgspec.Struct, frozen=True, gc=False):
    """`reads` says where each of `sites` is read: the stream before a layer is the one after the layer before it."""

    sites: tuple[Site, ...]
    reads: tuple[Site, ...]
    pieces: tuple[Piece, ...]
    buffered: bool

    @property
    def last(self) -> int:
        """The last layer that runs; -1: none does."""
        return self.pieces[-1].stop - 1 if self.pieces else -1

    @property
    def final_norm(self) -> bool:
        return Site(Kind.FINAL_NORM) in self.reads

    def kinds(self, layer: int) -> tuple[Kind, ...]:
        """What is read in a layer."""
        return tuple(kind for kind in ORDER if Site(kind, layer) in self.reads)

    @property
    def ending(self) -> Kind:
        """What the last layer need not go beyond."""
        return Kind.RESID_POST if self.final_norm else self.kinds(self.last)[-1]


def arrange(config: ModelConfig, sites: Sequence[Site]) -> Course:
    """The way through the model that reads `sites` and does nothing else."""
    if not sites:
        raise BadInput("sites", "", "is empty", "name at least one, as resid_post:0")
    for site in sites:
        if site.layer is not None and not 0 <= site.layer < len(config.layers):
            rule = f"is beyond the model's last layer, {len(config.layers) - 1}"
            raise BadInput("sites", str(site), rule, "name an earlier layer")
    reads = tuple(_read(site) for site in sites)
    wanted = sorted({site.layer for site in reads if site.layer is not None})
    last = len(config.layers) - 1 if Site(Kind.FINAL_NORM) in reads else max(wanted, default=-1)
    buffered = len(wanted) >= BUFFERED_FROM
    # The last layer stands alone in either case: it may end after its attention.
    cuts = [last] if buffered else wanted
    pieces: list[Piece] = []
    at = 0
    for cut in cuts:
        pieces += _pieces(config.layers, at, cut)
        pieces.append(Piece(cut, 1, 1))
        at = cut + 1
    return Course(tuple(sites), reads, (*pieces, *_pieces(config.layers, at, last + 1)), buffered)


def _read(site: Site) -> Site:
    if site.kind is not Kind.RESID_PRE:
        return site
    return Site(Kind.RESID_POST, site.layer - 1) if site.layer else Site(Kind.EMBED)


def _pieces(kinds: Sequence[LayerKind], first: int, stop: int) -> list[Piece]:
    """Layers `first` to `stop` in as few pieces as repeat: Gemma's local and global layers alternate in periods."""
    pieces: list[Piece] = []
    while first < stop:
        count = stop - first
        period = next(each for each in range(1, count + 1) if _repeats(kinds, first, stop, each))
        if period > 1 and count // period < 2:
            # One period is no repetition: as far as the kind stays the same, then.
            alike = next((layer for layer in range(first, stop) if kinds[layer] != kinds[first]), stop)
            pieces.append(Piece(first, 1, alike - first))
        else:
            pieces.append(Piece(first, period, count // period))
        first = pieces[-1].stop
    return pieces


def _repeats(kinds: Sequence[LayerKind], first: int, stop: int, period: int) -> bool:
    return all(kinds[layer] == kinds[layer + period] for layer in range(first, stop - period))
