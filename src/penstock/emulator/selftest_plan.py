"""Which rows of facts can be shown in a real project, what they may cost there, and where reality must be waited for.

`selftest` asks before it sends anything. A row whose world has to be made (no capacity, a quota, a fault) cannot be
shown in a world that nobody can make. Costs are the most there can be: every node a row may make, for all the time it
may live, at the catalogue's price.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from penstock.domain.catalogue import UnknownAccelerator, find
from penstock.emulator.facts import Fact, Step, body_of

#: Keys of a row's world that reality has of its own.
_OF_ITS_OWN: Final = frozenset({"delays"})


class Planned(msgspec.Struct, frozen=True):
    """One row before it is probed: why it cannot be (empty: it can), and the most it may cost."""

    fact: str
    skipped: str
    most_usd: float


class Costs:
    """Money, by the catalogue."""

    def __init__(self, minutes: float) -> None:
        self._minutes = minutes

    def known(self, fact: Fact) -> bool:
        return all(price is not None for price in _prices(fact))

    def per_hour(self, fact: Fact) -> float:
        """If everything the row may make is there at once."""
        return sum(price or 0.0 for price in _prices(fact))

    def most(self, fact: Fact) -> float:
        return self.per_hour(fact) * self._minutes / 60


def unsuited(name: str, fact: Fact, minutes: float, lonely: bool, costs: Costs) -> str:
    """Why a row cannot be probed in a real project; empty when it can. `lonely`: there are no nodes but ours."""
    if not name.startswith("tpu."):
        return "is not about the Cloud TPU API"
    if fact.source == "chosen":
        return "is the emulator's own choice"
    lacking = sorted(set(fact.world) - _OF_ITS_OWN)
    if lacking:
        return f"needs a world with {', '.join(lacking)} of its own"
    waits_s = sum(step.after_s for step in (*fact.before, fact.probe))
    if waits_s > max(120.0, minutes * 60):
        return f"takes {waits_s / 60:.0f} minutes"
    if not lonely and fact.probe.call.startswith("GET ") and _lists(fact.probe):
        return "needs a project without other nodes"
    if not costs.known(fact):
        return "the catalogue has no price for what it makes"
    return ""


def settled_before(fact: Fact) -> list[bool]:
    """Before which of its steps all that was begun is over in the row's own world: there reality is waited for."""
    steps = (*fact.before, fact.probe)
    delays = fact.world.get("delays", {})
    found = []
    for at in range(len(steps)):
        passed_s, settled = 0.0, True
        for earlier in range(at - 1, -1, -1):
            passed_s += steps[earlier + 1].after_s
            settled = settled and passed_s >= _takes_s(steps[earlier], delays)
        found.append(settled)
    return found


def _takes_s(step: Step, delays: dict[str, Any]) -> float:
    method, _, target = step.call.partition(" ")
    if method == "DELETE":
        return _longest(delays.get("delete", 0.0))
    if method != "POST":
        return 0.0
    for word, names in (
        (":stop", ("stop",)),
        (":start", ("start",)),
        (":simulateMaintenanceEvent", ("maintenance_notice",)),
        ("queuedResourceId=", ("accept", "provision", "create")),
        ("nodeId=", ("create",)),
    ):
        if word in target:
            return sum(_longest(delays.get(name, 0.0)) for name in names)
    return 0.0


def _longest(delay: Any) -> float:
    return float(max(delay) if isinstance(delay, list | tuple) else delay)


def _lists(step: Step) -> bool:
    target = step.call.partition(" ")[2].partition("?")[0]
    return target in ("nodes", "queuedResources") or target.endswith("/locations/-/nodes")


def _prices(fact: Fact) -> Iterator[float | None]:
    """Dollars an hour of each node that a row may make, also by a request that should be refused."""
    for step in (*fact.before, fact.probe):
        if not step.call.startswith("POST ") or ("nodeId=" not in step.call and "queuedResourceId=" not in step.call):
            continue
        body = body_of(step)
        if not isinstance(body, dict):
            continue
        spot = "spot" in body or bool((body.get("schedulingConfig") or {}).get("spot"))
        if "acceleratorType" in body:
            yield _price(body["acceleratorType"], spot)
        for spec in (body.get("tpu") or {}).get("nodeSpec") or ():
            count = (spec.get("multisliceParams") or {}).get("nodeCount", 1)
            price = _price(spec["node"]["acceleratorType"], spot)
            yield None if price is None else price * count


def _price(kind: str, spot: bool) -> float | None:
    try:
        row = find(kind)
    except UnknownAccelerator:
        return None
    per_chip = row.usd_per_chip_hour  # spot without a price of its own is never dearer
    if spot and row.usd_per_chip_hour_spot is not None:
        per_chip = row.usd_per_chip_hour_spot
    return None if per_chip is None else per_chip * row.chips
