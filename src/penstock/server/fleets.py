"""The routes about slices as people handle them: hosts and addresses, replacing one, repairing a pool, odds of zones.

`tpu fleet`, `tpu zones`, `tpu ssh`, `tpu restart` call them. What is broken is replaced by the controller without being
asked; these only make it look at once, or say what somebody knows better. They must not call a provider by themselves,
but to ask where hosts are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

import msgspec

from penstock.controller.jobs import NotFound
from penstock.domain import limits
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Job, Pool, Role, Slice, Zone, untried
from penstock.domain.places import has
from penstock.planner.snapshot import Mute
from penstock.planner.zones import mute_advice, muteness, odds
from penstock.ports.capacity import Address, CapacityError
from penstock.ports.store import Reader
from penstock.server.routing import Call, Parameter, Refusal, Route
from penstock.server.service import Service
from penstock.server.submission import usable
from penstock.wire.capacity import (
    HostPage,
    HostView,
    RecreateReply,
    ReplaceReply,
    ReplaceRequest,
    ZonePage,
    ZoneView,
)

audit = logging.getLogger("penstock.audit")

#: A slice is also known by its place in a fleet, which has dashes.
SLICE_ID: Final = (Parameter("id", "An id, enough of it, or a place in a fleet.", pattern="^[0-9a-z-]{1,80}$"),)
_COMING: Final = (SliceState.INTENDED, SliceState.CREATING)
_STAYING: Final = (*_COMING, SliceState.READY)


# --- one slice ---
def _read_slices(reader: Reader, team: str | None) -> list[Slice]:
    return [slice for slice in reader.live_slices() if team in (None, slice.team)]


def _read_job_on(reader: Reader, attempt: str) -> Job | None:
    found = reader.attempt(attempt)
    return reader.job(found.job) if found is not None else None


async def find_slice(service: Service, call: Call) -> Slice:
    """The slice that an id, the beginning of one, or a place in a fleet means to the caller."""
    word = call.params["id"]
    slices = await service.store.read(_read_slices, call.walls)
    staying = [slice for slice in slices if slice.title == word and slice.state in _STAYING]
    meant = (
        [slice for slice in slices if slice.id == word]
        or staying
        or [slice for slice in slices if slice.title == word]
        or [slice for slice in slices if slice.id.startswith(word)]
    )
    if not meant:
        raise NotFound("slice", word)
    if len(meant) > 1:
        raise Refusal("ambiguous", f"id: {word!r} may mean {meant[0].id} or {meant[1].id}", field="id")
    return meant[0]


async def list_hosts(service: Service, call: Call) -> HostPage:
    """The hosts of a slice and where they are; their provider is asked, so the answer is as new as can be."""
    slice = await find_slice(service, call)
    ask = service.addresses.get(slice.provider)
    if ask is None:
        return HostPage(tuple(HostView(index=index) for index in range(slice.hosts)))
    mute = service.controller.snapshot.witness.mute.get((slice.provider, slice.zone))
    if mute is not None:
        return _last_known(service, slice, f"{muteness(slice.zone, mute)}; {mute_advice(mute)}")
    try:
        async with asyncio.timeout(limits.HOSTS_ASK_S):
            found = await ask(slice.id, slice.zone)
    except TimeoutError:
        told = f"the API of zone {slice.zone} did not answer within {limits.HOSTS_ASK_S:.0f} s; try again"
        return _last_known(service, slice, told)
    except CapacityError as error:
        return _last_known(service, slice, f"the API of zone {slice.zone} refused: {error}")
    return HostPage(
        tuple(HostView(index=index, inside=at.inside, outside=at.outside) for index, at in enumerate(found))
    )


def _last_known(service: Service, slice: Slice, trouble: str) -> HostPage:
    """Hosts as they were last seen, of a provider that cannot be asked now: most of them are still there."""
    remembered = service.known_addresses.get(slice.provider)
    known = remembered(slice.id, slice.zone) if remembered is not None else ()
    places = [*known, *[Address("")] * (slice.hosts - len(known))]
    return HostPage(
        tuple(
            HostView(index=index, inside=at.inside, outside=at.outside, trouble=trouble)
            for index, at in enumerate(places)
        )
    )


async def replace_slice(service: Service, call: Call) -> ReplaceReply:
    """Let a slice go for another one. A job on it ends first, or with `now` goes on elsewhere from its checkpoint."""
    slice = await find_slice(service, call)
    now = call.given(ReplaceRequest).now
    audit.info("%s/%s replaces slice %s", call.user.team, call.user.name, slice.id)
    saved = await service.commands(call.user).replace_slice(slice.id, f"{call.user.name} wants another", now=now)
    job = await service.store.read(_read_job_on, saved.attempt) if saved.attempt is not None else None
    return ReplaceReply(id=saved.id, state=saved.state.value, job=job.id if job is not None else None)


# --- one pool ---
class _Standing(msgspec.Struct, frozen=True):
    pool: Pool | None
    slices: list[Slice]


def _read_standing(reader: Reader, name: str) -> _Standing:
    return _Standing(reader.pool(name), [slice for slice in reader.live_slices() if slice.pool == name])


async def recreate(service: Service, call: Call) -> RecreateReply:
    """Replace what is broken in a pool, now: all its zones are looked at, and those that rest are tried again."""
    name = call.params["name"]
    found = await service.store.read(_read_standing, name)
    pool = found.pool
    if pool is None or pool.deleted or call.walls not in (None, pool.team):
        raise NotFound("pool", name)
    audit.info("%s/%s recreates pool %s", call.user.team, call.user.name, name)
    retried = await service.commands(call.user).recreate(name)
    for zone in sorted({*pool.zones, *(slice.zone for slice in found.slices)}):
        service.controller.look(pool.provider, zone)
    return RecreateReply(
        pool=name,
        wanted=pool.always,
        ready=sum(slice.state is SliceState.READY for slice in found.slices),
        coming=sum(slice.state in _COMING for slice in found.slices),
        broken=_broken(pool, found.slices),
        retried=retried,
    )


def _broken(pool: Pool, slices: list[Slice]) -> tuple[str, ...]:
    """What waits to be replaced, each once: of a place that was lost again before its first slice was gone, two leave.

    Not a place that has a ready slice by now, nor one that its fleet does not have any more.
    """
    whole = {slice.title for slice in slices if slice.state is SliceState.READY}
    lost = (slice for slice in slices if slice.state not in _STAYING and slice.title not in whole)
    kept = (slice for slice in lost if slice.number is None or has(pool, slice.zone, slice.number))
    return tuple(dict.fromkeys(slice.title for slice in kept))


# --- zones ---
class _Known(msgspec.Struct, frozen=True):
    pools: list[Pool]
    zones: dict[str, Zone]


def _read_zones(reader: Reader, team: str | None) -> _Known:
    pools = [pool for pool in reader.pools() if not pool.deleted and (team is None or usable(pool, team))]
    return _Known(pools, {zone.id: zone for zone in reader.zones()})


async def list_zones(service: Service, call: Call) -> ZonePage:
    """What was learned of each zone that a pool of the team names: odds, times, price, and how long it rests."""
    known = await service.store.read(_read_zones, call.walls)
    now, mute = service.clock.now(), service.controller.snapshot.witness.mute
    views: dict[str, ZoneView] = {}
    for pool in known.pools:
        for name in pool.zones:
            fresh = untried(pool, name)
            silent = mute.get((pool.provider, name))
            views.setdefault(fresh.id, _zone_view(known.zones.get(fresh.id, fresh), pool, now, silent))
    return ZonePage(tuple(_in_order(views.values())))


def _zone_view(zone: Zone, pool: Pool, now: float, mute: Mute | None) -> ZoneView:
    price = pool.usd_per_chip_hour
    return ZoneView(
        provider=zone.provider,
        zone=zone.zone,
        accelerator=zone.accelerator,
        spot=zone.spot,
        kind=zone.bought,
        odds=round(odds(zone, now), 3),
        tries=zone.tries,
        ready_s=zone.ready_s,
        life_s=zone.life_s,
        usd_per_hour=0.0 if zone.provider == "local" else None if price is None else round(price * pool.chips, 4),
        rests_s=round(max(0.0, zone.backoff_until - now), 1),
        refusals=zone.streak,
        why=zone.why,
        tried_at=zone.tried_at or None,
        silent_s=0.0 if mute is None else round(mute.seconds, 1),
        silent_since=None if mute is None else now - mute.seconds,
        denied=mute is not None and mute.denied,
        said="" if mute is None else mute.said,
    )


def _in_order(views: Iterable[ZoneView]) -> list[ZoneView]:
    """By kind, and of each kind the most promising first."""
    return sorted(views, key=lambda one: (one.accelerator, one.kind, -one.odds, one.zone))


ROUTES: Final = (
    Route("GET", "/v1/slices/{id}/hosts", list_hosts, gives=HostPage, path_rules=SLICE_ID),
    Route(
        "POST",
        "/v1/slices/{id}/replace",
        replace_slice,
        takes=ReplaceRequest,
        gives=ReplaceReply,
        role=Role.ADMIN,
        body_optional=True,
        path_rules=SLICE_ID,
    ),
    Route("POST", "/v1/pools/{name}/recreate", recreate, gives=RecreateReply, role=Role.ADMIN),
    Route("GET", "/v1/zones", list_zones, gives=ZonePage),
)
