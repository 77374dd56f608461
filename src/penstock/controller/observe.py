"""Looks at what providers really hold: lists each zone in turn, notes absences, and sweeps what nobody owns.

The loop calls `start_due` each tick; listings run in the background, each zone by itself, so one dead zone delays no
other. A zone that cannot be listed proves nothing, and that it cannot is noted: nothing new is asked for where nothing
can be seen (ADR 0035). It must not delete what any live slice owns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from penstock.controller.calls import Calls, Pace
from penstock.controller.settings import reopen_zone
from penstock.controller.slices import observe, sweep
from penstock.controller.witness import Evidence
from penstock.domain import limits
from penstock.domain.lifecycle import SliceState
from penstock.planner.snapshot import Snapshot
from penstock.ports.capacity import Capacity, CapacityError, Listing, PermissionDenied, RateLimited, Seen
from penstock.ports.clock import Clock
from penstock.ports.store import Store


class Observer:
    """Listings of all zones that a pool names or a slice is in."""

    def __init__(
        self,
        store: Store,
        capacities: Mapping[str, Capacity],
        clock: Clock,
        evidence: Evidence,
        calls: Calls,
        paces: Mapping[str, Pace],
        label: str,
        snapshot: Callable[[], Snapshot],
    ) -> None:
        self._store = store
        self._capacities = capacities
        self._clock = clock
        self._evidence = evidence
        self._calls = calls
        self._paces = paces
        self._label = label
        self._snapshot = snapshot
        self._listed_at: dict[tuple[str, str], float] = {}
        self._missed: set[tuple[str, str]] = set()  #: zones that changed while they were being listed
        self._strays: dict[str, float] = {}  #: name -> steady time of the first listing that showed it unowned

    def start_due(self) -> None:
        """Start a listing of every zone whose turn it is."""
        now = self._clock.steady()
        zones = self._zones()
        self._evidence.watched(zones)
        for key, settling in sorted(zones.items()):
            if self._paces[key[0]].held("list"):
                self._evidence.put_off(key)
                continue
            every = limits.LIST_EVERY_S / 4 if settling else limits.LIST_EVERY_S
            due = now - self._listed_at.get(key, -limits.LIST_EVERY_S) >= every
            if due and self._calls.start(f"list {key[0]} {key[1]}", partial(self._list, *key)):
                self._listed_at[key] = now

    def look(self, provider: str, zone: str) -> None:
        """List a zone out of turn, because it is known to have changed."""
        key = (provider, zone)
        if self._held(key):
            return
        if self._calls.start(f"list {provider} {zone}", partial(self._list, *key)):
            self._listed_at[key] = self._clock.steady()
        else:
            self._missed.add(key)

    def _held(self, key: tuple[str, str]) -> bool:
        """Whether a zone that changed must not be listed now; it is due as soon as its provider's rest is over."""
        if not self._paces[key[0]].held("list"):
            return False
        self._listed_at.pop(key, None)
        return True

    def _zones(self) -> dict[tuple[str, str], bool]:
        """Every zone to watch, and whether something in it is on its way in or out.

        Zones of deleted pools, and zones a pool no longer names, stay among them: a create may land there late.
        """
        snapshot = self._snapshot()
        zones = {(pool.provider, zone): False for pool in snapshot.pools.values() for zone in pool.zones}
        zones.update({(tried.provider, tried.zone): False for tried in snapshot.zones.values()})
        for slice in snapshot.unsettled.values():
            zones[slice.provider, slice.zone] = True
        return {key: settling for key, settling in zones.items() if key[0] in self._capacities}

    async def _list(self, provider: str, zone: str) -> None:
        while True:
            self._missed.discard((provider, zone))
            await self._list_once(provider, zone)
            if (provider, zone) not in self._missed or self._held((provider, zone)):
                return

    async def _list_once(self, provider: str, zone: str) -> None:
        # Taken before the call: a slice that is younger than the listing cannot be missed by it.
        expected = [
            slice.id
            for slice in self._snapshot().slices.values()
            if slice.provider == provider and slice.zone == zone and slice.state is not SliceState.INTENDED
        ]
        listing = await self._fetch(provider, zone)
        if listing is None:
            return
        ours = {seen.name: seen for seen in listing.slices if seen.label == self._label}
        await self._take_in(ours)
        if listing.complete:
            for id in expected:
                if id not in ours:
                    self._evidence.absent(id)
            await self._sweep(provider, listing, ours)

    async def _fetch(self, provider: str, zone: str) -> Listing | None:
        """One zone's listing; None when it cannot be had, which proves nothing."""
        self._evidence.listing((provider, zone))
        try:
            async with asyncio.timeout(limits.CALL_TIMEOUT_S):
                listing = await self._capacities[provider].list(zone)
        except RateLimited as error:
            self._paces[provider].hold("list", error.retry_after_s)
            self._evidence.put_off((provider, zone))
            return None
        except PermissionDenied as error:
            self._evidence.unlisted((provider, zone), str(error), denied=True)
            return None
        except (CapacityError, TimeoutError) as error:
            self._evidence.unlisted((provider, zone), str(error), denied=False)
            return None
        if self._evidence.listed((provider, zone)):
            await self._store.transact(reopen_zone, provider, zone)
        return listing

    async def _take_in(self, ours: Mapping[str, Seen]) -> None:
        changed = []
        slices = self._snapshot().slices
        for name, seen in ours.items():
            slice = slices.get(name)
            if slice is None:
                continue
            self._evidence.present(name)
            if slice.provider_state != seen.state or slice.provider_id != seen.provider_id:
                changed.append(seen)
        if changed:
            await self._store.transact(observe, changed)

    async def _sweep(self, provider: str, listing: Listing, ours: Mapping[str, Seen]) -> None:
        """Delete what nobody owns, once two complete listings far enough apart have shown it."""
        slices = self._snapshot().slices
        now = self._clock.steady()
        for name in [name for name in self._strays if name in slices]:
            del self._strays[name]
        for name, seen in sorted(ours.items()):
            if name in slices:
                continue
            first = self._strays.setdefault(name, now)
            if now - first < limits.GONE_LISTINGS_APART_S:
                continue
            if self._paces[provider].held("delete"):
                continue  # shown by the next listing, too
            if await self._store.transact(sweep, provider, seen):
                try:
                    async with asyncio.timeout(limits.CALL_TIMEOUT_S):
                        await self._capacities[provider].delete(name, listing.zone)
                except RateLimited as error:
                    self._paces[provider].hold("delete", error.retry_after_s)
                    continue
                except (CapacityError, TimeoutError):
                    continue  # still there at the next listing, and swept again
            self._strays.pop(name, None)
