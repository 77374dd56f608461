"""The provider port over the in-memory cloud, told per call what to do wrong.

The executor and the observer of a simulated controller call `FakeCapacity` as they would a real provider;
the injected `Faults` decide how an answer differs from the truth in `capacity.fakecloud`. Every call is
recorded when it takes effect, before its reply can be late or lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

from penstock.capacity.fakecloud import STALE_S_MAX, FakeCloud, Fault, FaultKind
from penstock.domain.invariants.history import Recorder
from penstock.domain.nouns import Slice
from penstock.ports.capacity import (
    CapacityError,
    Listing,
    PermissionDenied,
    QuotaExceeded,
    RateLimited,
    Seen,
    Stockout,
    Transient,
)


class Faults(Protocol):
    """Decides the fate of one provider call: `verb` is create, get, list (`name` is then the zone) or delete.

    Both may sleep (a slow way there or back) and may raise any `CapacityError`: before the effect, or after
    it as a lost reply.
    """

    async def before(self, verb: str, name: str) -> Fault | None: ...

    async def after(self, verb: str, name: str) -> None: ...


class ScriptedFaults:
    """Addressed faults: the n-th call of a verb, on one name or on any."""

    def __init__(self) -> None:
        self._script: list[tuple[str, str | None, list[Fault | None]]] = []

    def add(
        self, verb: str, fault: Fault, *, name: str | None = None, after: int = 0, times: int = 1
    ) -> ScriptedFaults:
        """Strike `times` matching calls in a row, once `after` of them have passed."""
        self._script.append((verb, name, [*[None] * after, *[fault] * times]))
        return self

    async def before(self, verb: str, name: str) -> Fault | None:
        for scripted_verb, scripted_name, todo in self._script:
            if scripted_verb == verb and scripted_name in (None, name) and todo:
                fault = todo.pop(0)
                if fault is not None:
                    return fault
        return None

    async def after(self, verb: str, name: str) -> None:
        """Nothing: lost and slow replies are scripted with `LOST_REPLY` and `SLOW`."""


_ERRORS: dict[FaultKind, Callable[[Fault, str], CapacityError]] = {
    FaultKind.STOCKOUT: lambda _, name: Stockout(f"no capacity for {name}"),
    FaultKind.QUOTA: lambda _, name: QuotaExceeded(f"quota exceeded for {name}"),
    FaultKind.RATE_LIMIT: lambda fault, _: RateLimited("too many requests", fault.seconds or None),
    FaultKind.TRANSIENT: lambda _, name: Transient(f"the backend did not take the call for {name}"),
    FaultKind.PERMISSION: lambda _, name: PermissionDenied(f"not allowed on {name}"),
}


class FakeCapacity:
    """One provider's port over a `FakeCloud`; implements `ports.capacity.Capacity`."""

    def __init__(
        self,
        cloud: FakeCloud,
        *,
        name: str = "fake",
        label: str = "penstock",
        faults: Faults | None = None,
        recorder: Recorder | None = None,
        latency_s: tuple[float, float] = (0.0, 0.0),
        rng: random.Random | None = None,
    ) -> None:
        """`latency_s` is drawn per call from `rng` and spent half before, half after the effect."""
        self.cloud = cloud
        self._name = name
        self._label = label
        self.faults = faults
        self._recorder = recorder
        self._latency_s = latency_s
        self._rng = rng or random.Random(0)

    @property
    def name(self) -> str:
        return self._name

    async def create(self, wanted: Slice) -> Seen:
        fault = await self._enter("create", wanted.id, wanted.zone)
        if fault is not None and fault.kind is FaultKind.LATE_CREATE:
            loop = asyncio.get_running_loop()
            loop.call_later(fault.seconds, self.cloud.land, wanted, self._name, self._label)
            self._record("create", wanted.id, wanted.zone, "lost_reply")
            raise Transient(f"no answer to the create of {wanted.id}")
        try:
            vm = self.cloud.create(wanted, self._name, self._label, fault)
        except CapacityError as error:
            self._record("create", wanted.id, wanted.zone, type(error).__name__)
            raise
        seen = vm.seen
        await self._leave("create", wanted.id, wanted.zone, fault, vm.provider_id)
        return seen

    async def list(self, zone: str) -> Listing:
        fault = await self._enter("list", zone, zone)
        kind = fault.kind if fault is not None else None
        age_s = min(fault.seconds, STALE_S_MAX) if fault is not None and kind is FaultKind.STALE_LIST else 0.0
        shown, complete = self.cloud.listing(zone, self._name, age_s), True
        if kind is FaultKind.PARTIAL_PAGE:
            shown, complete = shown[: len(shown) // 2], False
        elif kind is FaultKind.UNREACHABLE:
            shown, complete = (), False
        elif kind is FaultKind.EMPTY_PAGE:
            shown = ()
        elif kind is FaultKind.ITEM_MISSING and shown:
            left_out = self._rng.randrange(len(shown))
            shown = (*shown[:left_out], *shown[left_out + 1 :])
        await self._leave("list", zone, zone, fault)
        return Listing(zone=zone, slices=shown, complete=complete)

    async def get(self, name: str, zone: str) -> Seen | None:
        fault = await self._enter("get", name, zone)
        vm = self.cloud.vm(name)
        seen = vm.seen if vm is not None and (vm.provider, vm.zone) == (self._name, zone) else None
        await self._leave("get", name, zone, fault, seen.provider_id if seen else None)
        return seen

    async def delete(self, name: str, zone: str) -> None:
        fault = await self._enter("delete", name, zone)
        kind = fault.kind if fault is not None else None
        vm = None
        if kind is not FaultKind.DELETE_IGNORED:
            slow = fault.seconds if fault is not None and kind is FaultKind.SLOW_DELETE else None
            vm = self.cloud.delete(name, self._name, slow)
        await self._leave("delete", name, zone, fault, vm.provider_id if vm else None)

    async def _enter(self, verb: str, name: str, zone: str) -> Fault | None:
        try:
            await self._travel()
            fault = await self.faults.before(verb, name) if self.faults is not None else None
            if fault is not None and (error := _ERRORS.get(fault.kind)) is not None:
                raise error(fault, name)
        except CapacityError as error:
            self._record(verb, name, zone, type(error).__name__)
            raise
        return fault

    async def _leave(
        self, verb: str, name: str, zone: str, fault: Fault | None, provider_id: str | None = None
    ) -> None:
        """The effect has happened: record it now, before the reply can be late or lost."""
        lost = fault is not None and fault.kind is FaultKind.LOST_REPLY
        self._record(verb, name, zone, "lost_reply" if lost else "ok", provider_id)
        if lost:
            raise Transient(f"no answer to the {verb} of {name}")
        if fault is not None and fault.kind is FaultKind.SLOW:
            await asyncio.sleep(fault.seconds)
        if self.faults is not None:
            await self.faults.after(verb, name)
        await self._travel()

    async def _travel(self) -> None:
        if self._latency_s[1] > 0:
            await asyncio.sleep(self._rng.uniform(*self._latency_s) / 2)

    def _record(self, verb: str, name: str, zone: str, outcome: str, provider_id: str | None = None) -> None:
        if self._recorder is not None:
            self._recorder.world(
                "provider.call",
                name,
                verb=verb,
                outcome=outcome,
                zone=zone,
                provider=self._name,
                provider_id=provider_id,
            )
