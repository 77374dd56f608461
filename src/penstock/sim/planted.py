"""How a bug is planted on purpose: a function of the production code is replaced by a wrong one, and put back.

`sim.bugs` registers the bugs; only the simulator's tests and `tpu sim check --bug` switch one on, for the time of one
seed. Patching from here keeps every switch out of production code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

Undo = Callable[[], None]


class Bug(msgspec.Struct, frozen=True):
    """A planted bug: what is wrong, and which rules may catch it."""

    name: str
    what: str
    rules: tuple[str, ...]
    plant: Callable[[], list[Undo]]


REGISTRY: dict[str, Bug] = {}


def bug(name: str, what: str, *rules: str) -> Callable[[Callable[[], list[Undo]]], Callable[[], list[Undo]]]:
    """Register a bug under its name, with the rules that should catch it."""

    def register(plant: Callable[[], list[Undo]]) -> Callable[[], list[Undo]]:
        REGISTRY[name] = Bug(name, what, rules, plant)
        return plant

    return register


def swap(owner: Any, name: str, wrong: Any) -> Undo:
    """Replace an attribute; the answer puts it back."""
    right = getattr(owner, name)
    setattr(owner, name, wrong)
    return lambda: setattr(owner, name, right)
