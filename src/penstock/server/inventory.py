"""The routes of the shared inventory: reserve a slice or a pool, and give it back.

What there is, who uses it and until when is in `GET /v1/slices`, from live rows. Submitters reserve for themselves;
administrators also for others of the team, and may end anybody's reservation. Another team's slices and pools are not
there (S17); a pool that is only lent to the team can be used, not reserved.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, TypeVar

from penstock.controller.inventory import Taken
from penstock.controller.jobs import NotFound
from penstock.domain import admission
from penstock.domain.lifecycle import COUNTED_SLICE_STATES
from penstock.domain.nouns import Pool, Reservation, Role, Slice
from penstock.domain.reservations import in_force
from penstock.ports.store import Reader
from penstock.server.routing import Call, Refusal, Route
from penstock.server.service import Service
from penstock.wire.inventory import ReservationView, ReserveRequest

T = TypeVar("T")


def reservation_view(slice: Slice, pool: Pool | None, now: float) -> ReservationView | None:
    """Who holds a slice: by a claim of its own, else by one on its pool. What is leaving is nobody's any more."""
    if slice.state not in COUNTED_SLICE_STATES:
        return None
    own = in_force(slice.reserved, now)
    claim = own or (in_force(pool.reserved, now) if pool is not None else None)
    if claim is None:
        return None
    of = slice.id if own is not None else f"pool:{slice.pool}"
    return ReservationView(of=of, user=claim.user, since=claim.since, until=claim.until, note=claim.note)


def _view(of: str, claim: Reservation | None) -> ReservationView:
    assert claim is not None
    return ReservationView(of=of, user=claim.user, since=claim.since, until=claim.until, note=claim.note)


def _find_slice(reader: Reader, team: str | None, id: str) -> str:
    """A slice by its id, its title or a unique start of its id."""
    slices = [slice for slice in reader.live_slices() if team in (None, slice.team)]
    meant = [one.id for one in slices if id in (one.id, one.title)] or [
        one.id for one in slices if one.id.startswith(id)
    ]
    if not meant:
        raise NotFound("slice", id)
    if len(meant) > 1:
        raise Refusal("ambiguous", f"id: {id!r} may mean {meant[0]} or {meant[1]}", field="id")
    return meant[0]


def _find_pool(reader: Reader, team: str | None, name: str) -> str:
    pool = reader.pool(name)
    if pool is None or pool.deleted or team not in (None, pool.team):
        raise NotFound("pool", name)
    return name


def _wanted(service: Service, call: Call) -> Reservation:
    request, user, now = call.given(ReserveRequest), call.user, service.clock.now()
    holder = user.name if request.user is None else request.user
    admission.check_name("user", holder)
    if request.note:
        admission.check_name("note", request.note)
    if holder != user.name and user.role is Role.SUBMITTER:
        raise Refusal("forbidden", f"user: {user.name} may reserve only for {user.name}", field="user")
    return Reservation(user=holder, since=now, until=now + request.for_s, note=request.note)


def _own_claims_only(call: Call) -> str | None:
    """Whose claims a caller may replace or end: a submitter's own, an administrator's all."""
    return call.user.name if call.user.role is Role.SUBMITTER else None


async def _untaken(command: Awaitable[T]) -> T:
    try:
        return await command
    except Taken as taken:
        raise Refusal("conflict", str(taken), field="id", advice=f"ask {taken.holder.user}") from taken


async def reserve_slice(service: Service, call: Call) -> ReservationView:
    """Keep a slice for one user's jobs for a time; what runs on it goes on."""
    id = await service.store.read(_find_slice, call.walls, call.params["id"])
    wanted = _wanted(service, call)
    saved = await _untaken(service.commands(call.user).reserve_slice(id, wanted, _own_claims_only(call)))
    return _view(saved.id, saved.reserved)


async def release_slice(service: Service, call: Call) -> None:
    """End the reservation of a slice; nothing happens where there is none."""
    id = await service.store.read(_find_slice, call.walls, call.params["id"])
    await _untaken(service.commands(call.user).reserve_slice(id, None, _own_claims_only(call)))


async def reserve_pool(service: Service, call: Call) -> ReservationView:
    """Keep all slices of a pool, and those it makes, for one user's jobs for a time."""
    name = await service.store.read(_find_pool, call.walls, call.params["name"])
    wanted = _wanted(service, call)
    saved = await _untaken(service.commands(call.user).reserve_pool(name, wanted, _own_claims_only(call)))
    return _view(f"pool:{saved.name}", saved.reserved)


async def release_pool(service: Service, call: Call) -> None:
    """End the reservation of a pool; nothing happens where there is none."""
    name = await service.store.read(_find_pool, call.walls, call.params["name"])
    await _untaken(service.commands(call.user).reserve_pool(name, None, _own_claims_only(call)))


_SLICE: Final = "/v1/slices/{id}/reservation"
_POOL: Final = "/v1/pools/{name}/reservation"

ROUTES: Final = (
    Route(
        "PUT",
        _SLICE,
        reserve_slice,
        takes=ReserveRequest,
        gives=ReservationView,
        role=Role.SUBMITTER,
        body_optional=True,
    ),
    Route("DELETE", _SLICE, release_slice, role=Role.SUBMITTER, status=204),
    Route(
        "PUT", _POOL, reserve_pool, takes=ReserveRequest, gives=ReservationView, role=Role.SUBMITTER, body_optional=True
    ),
    Route("DELETE", _POOL, release_pool, role=Role.SUBMITTER, status=204),
)
