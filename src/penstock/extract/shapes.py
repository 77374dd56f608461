"""The words that every part of extraction shares: a site (where in the model a vector is read) and a packed batch.

The command line and the plan name sites as text, the model returns one array per site, the store names objects after
them. Everything here is plain data over numpy: it must not import jax, so that a finished run can be read without it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from penstock.domain.admission import BadInput

Ints = npt.NDArray[np.int32]

LAYERS_MAX: Final = 1024  #: no decoder has as many; a range typed wrongly must not become a million sites
SITES_MAX: Final = 4096


class Kind(StrEnum):
    """What is read. `resid_pre` and `resid_post` are the residual stream before and after a block; `attn_out` and
    `mlp_out` are what attention and MLP add to it (after a post-norm, where the family has one); `head_out` holds the
    heads' values one after another, before the output projection; `embed` is what block 0 gets; `final_norm` is what
    the language-model head gets.
    """

    RESID_PRE = "resid_pre"
    RESID_POST = "resid_post"
    ATTN_OUT = "attn_out"
    MLP_OUT = "mlp_out"
    HEAD_OUT = "head_out"
    FINAL_NORM = "final_norm"
    EMBED = "embed"


#: Kinds of which a model has one, not one per layer.
WITHOUT_LAYER: Final = frozenset({Kind.FINAL_NORM, Kind.EMBED})


class Site(msgspec.Struct, frozen=True, gc=False, order=True):
    """One place in the model; `layer` counts from 0 and is None for `final_norm` and `embed`."""

    kind: Kind
    layer: int | None = None

    @override
    def __str__(self) -> str:
        return self.kind if self.layer is None else f"{self.kind}:{self.layer}"

    @property
    def name(self) -> str:
        """As object names and results have it."""
        return str(self).replace(":", ".")


class PackedBatch(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Rows that hold several documents each, all arrays int32 [rows, width].

    `positions` restart at 0 with each document. `segments` number a row's documents from 1 on; 0 is padding. A token
    sees the tokens of its own segment and row only.
    """

    tokens: Ints
    positions: Ints
    segments: Ints


def parse_sites(text: str, layers: int | None = None) -> tuple[Site, ...]:
    """Sites of "resid_post:10,12,20;attn_out:0-5;final_norm", in the order of the text, each once.

    `layers` is how many the model has: it is needed for `all`, and layers beyond it are refused.
    """
    found: dict[Site, None] = {}
    for part in text.split(";"):
        word, colon, list_of_layers = part.strip().partition(":")
        try:
            kind = Kind(word)
        except ValueError:
            raise BadInput("sites", part, "is no site", f"use KIND:LAYERS with a kind of {', '.join(Kind)}") from None
        if kind in WITHOUT_LAYER:
            if colon:
                raise BadInput("sites", part, "has layers, but a model has one such place", f"write {kind}")
            found[Site(kind)] = None
            continue
        if not colon:
            raise BadInput("sites", part, "has no layers", f"write {kind}:0, {kind}:0-5 or {kind}:all")
        for item in list_of_layers.split(","):
            found.update((Site(kind, layer), None) for layer in _layers(item.strip(), part, layers))
    if len(found) > SITES_MAX:
        raise BadInput("sites", text, f"are {len(found)} sites, more than {SITES_MAX}", "ask for fewer layers")
    return tuple(found)


def _layers(item: str, part: str, layers: int | None) -> range:
    end = LAYERS_MAX if layers is None else layers
    if item == "all":
        if layers is None:
            raise BadInput("sites", part, "says all, and how many layers the model has is not known here", "name them")
        return range(layers)
    low, dash, high = item.partition("-")
    if not (low.isascii() and low.isdecimal() and (not dash or (high.isascii() and high.isdecimal()))):
        raise BadInput("sites", part, f"has {item!r} for a layer", "use numbers from 0, ranges as 0-5, or all")
    first, last = int(low), int(high if dash else low)
    if last < first:
        raise BadInput("sites", part, f"has the range {item}, which ends before it begins", f"write {last}-{first}")
    if last >= end:
        raise BadInput("sites", part, f"has layer {last}, and the layers are 0 to {end - 1}", "name an earlier layer")
    return range(first, last + 1)
