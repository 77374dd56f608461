"""Rows of facts moved to another place: a project, a zone and names of somebody's own, and a label on what is made.

`facts.toml` speaks of project p1, its usual zone and nodes called n1 and n2. `tpu cloud selftest` sends the same probes
to a real project, where such a node may be somebody's: there every name begins with the run's own prefix. It must not
change what a row says about behaviour.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from penstock.emulator.facts import DEFAULT_ZONE, PROJECT, Expected, Fact, Step, body_of

LABEL: Final = "penstock-selftest"
PREFIX: Final = "penstock-selftest-"
_NAMES: Final = re.compile(
    r"(?:(?<=nodes/)|(?<=nodeId=))(?:n1|n2|qn|np)(?![0-9a-z])"
    r"|(?:(?<=queuedResources/)|(?<=queuedResourceId=))q1(?![0-9a-z])"
)


class Place(msgspec.Struct, frozen=True):
    """Where probes go, and the word that tells one run's things from another's."""

    project: str
    zone: str
    run: str

    @property
    def prefix(self) -> str:
        return f"{PREFIX}{self.run}-"


def moved(fact: Fact, place: Place) -> Fact:
    """The row as it is at a place. Rows about a certain other zone stay there."""
    usual = fact.zone == DEFAULT_ZONE

    def text(words: str) -> str:
        words = words.replace(f"projects/{PROJECT}", f"projects/{place.project}")
        if usual:
            words = words.replace(DEFAULT_ZONE, place.zone)
        return _NAMES.sub(lambda found: place.prefix + found[0], words)

    def content(value: Any, key: str = "") -> Any:
        match value:
            case dict():
                inner = {name: content(each, name) for name, each in value.items()}
                if "acceleratorType" in inner:
                    inner["labels"] = {**inner.get("labels", {}), LABEL: place.run}
                return inner
            case list():
                return [content(each) for each in value]
            case str() if key in ("nodeId", "nodeIdPrefix"):
                return place.prefix + value
            case str():
                return text(value)
            case _:
                return value

    def step(one: Step) -> Step:
        body = body_of(one)
        return msgspec.structs.replace(one, call=text(one.call), body=content(body))

    def expected(value: Any) -> Any:
        match value:
            case dict():
                return {name: expected(each) for name, each in value.items()}
            case list():
                return [expected(each) for each in value]
            case str():
                return text(value)
            case _:
                return value

    return msgspec.structs.replace(
        fact,
        zone=place.zone if usual else fact.zone,
        probe=step(fact.probe),
        before=tuple(step(each) for each in fact.before),
        expect=Expected(
            status=fact.expect.status,
            reason=fact.expect.reason,
            message=text(fact.expect.message),
            body=expected(fact.expect.body),
            headers=fact.expect.headers,
        ),
    )
