"""Bugs on purpose: each replaces a function of the production code by a wrong one, and a named rule must notice.

Only the simulator's tests and `tpu sim check --bug` switch one on, for the time of one seed. None of them raises by
itself: what fails is the rule, or the checker is blind. Patching from here keeps every switch out of production code;
where the database itself would refuse what a bug does, its constraint is taken out as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

Undo = Callable[[], None]


class Bug(msgspec.Struct, frozen=True):
    """A planted bug: what is wrong, and which rules may catch it."""

    name: str
    what: str
    rules: tuple[str, ...]
    plant: Callable[[], list[Undo]]


BUGS: dict[str, Bug] = {}


def bug(name: str, what: str, *rules: str) -> Callable[[Callable[[], list[Undo]]], Callable[[], list[Undo]]]:
    """Register a bug under its name, with the rules that should catch it."""

    def register(plant: Callable[[], list[Undo]]) -> Callable[[], list[Undo]]:
        BUGS[name] = Bug(name, what, rules, plant)
        return plant

    return register


def swap(owner: Any, name: str, wrong: Any) -> Undo:
    """Replace an attribute; the answer puts it back."""
    right = getattr(owner, name)
    setattr(owner, name, wrong)
    return lambda: setattr(owner, name, right)


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """With this bug in the code (none: as it is)."""
    if name is not None and name not in BUGS:
        raise KeyError(f"bug: {name!r} is not one of {', '.join(sorted(BUGS))}")
    undos = BUGS[name].plant() if name is not None else []
    try:
        yield
    finally:
        for undo in reversed(undos):
            undo()
