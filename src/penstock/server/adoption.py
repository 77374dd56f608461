"""The route that takes over a TPU that exists: a slice and a pool of its own in the store, our labels on the machine.

`tpu adopt` calls it, then runs the script of the answer on every host. The slice is committed before the label is set,
so that nothing ever bears our label without belonging to something. Only operators may: what has no label of ours has
no team, and with `own` it is deleted one day.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Final

import msgspec

from penstock.controller.jobs import NotFound
from penstock.domain import admission, catalogue, limits
from penstock.domain.cloud import ON_DEMAND, SPOT, CloudWish
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Pool, Role, Slice
from penstock.ports.capacity import CapacityError, Existing, PermissionDenied
from penstock.ports.store import Reader
from penstock.server.routing import Call, Refusal, Route
from penstock.server.service import Adopter, Service
from penstock.wire.capacity import AdoptReply, AdoptRequest

audit = logging.getLogger("penstock.audit")
_CLOUD: Final = "tpu_vm"


class _Known(msgspec.Struct, frozen=True):
    pool: Pool | None
    slice: Slice | None  #: what the machine is already
    held: bool  #: the pool has slices


def _read(reader: Reader, pool: str, slice: str | None) -> _Known:
    held = any(each.pool == pool and each.state is not SliceState.DELETING for each in reader.live_slices())
    return _Known(reader.pool(pool), reader.slice(slice) if slice is not None else None, held)


async def adopt(service: Service, call: Call) -> AdoptReply:
    """Take over a TPU that exists; asked again for one that is on its way to be ours, the same answer is given."""
    request = call.given(AdoptRequest)
    admission.check_name("name", request.name)
    admission.check_name("zone", request.zone)
    adopter = service.adopter
    if adopter is None:
        raise Refusal("conflict", "name: this server has no cloud", field="name", advice="set [tpu_vm] project")
    found = await _find(adopter, request)
    known = await service.store.read(_read, request.name, found.slice)
    slice = known.slice if known.slice is not None and known.slice.state is SliceState.CREATING else None
    if slice is None:
        slice = await _take(service, call, adopter, found, known)
    try:
        script = adopter.script(slice)
    except CapacityError as error:
        raise Refusal("unavailable", f"slice {slice.id}: {error}") from error
    return AdoptReply(slice=slice.id, pool=slice.pool, hosts=slice.hosts, script=script, returns=not found.script)


async def _find(adopter: Adopter, request: AdoptRequest) -> Existing:
    try:
        async with asyncio.timeout(limits.CALL_TIMEOUT_S):
            found = await adopter.inspect(request.name, request.zone)
    except (CapacityError, TimeoutError) as error:
        raise _unanswered(request.name, error) from error
    if found is None:
        raise NotFound("TPU", f"{request.name} in {request.zone}")
    if found.state != "READY":
        raise Refusal("conflict", f"name: {found.name} is {found.state}, not READY", field="name", advice="wait for it")
    if found.owner is not None and found.slice is None:
        detail = f"name: {found.name} bears the label of an installation of Penstock ({found.owner})"
        raise Refusal("conflict", detail, field="name", advice="it is cared for already")
    return found


async def _take(service: Service, call: Call, adopter: Adopter, found: Existing, known: _Known) -> Slice:
    """Commit the slice, then label the machine."""
    if known.slice is not None and known.slice.state is SliceState.READY:
        raise Refusal("conflict", f"name: {found.name} is slice {known.slice.id} already", field="name")
    if known.held or (known.pool is not None and not (known.pool.deleted or known.pool.adopted)):
        detail = f"name: there is a pool {found.name!r} already"
        raise Refusal("conflict", detail, field="name", advice=f"`tpu pools rm {found.name}` first")
    try:
        row = catalogue.find(found.accelerator)
    except catalogue.UnknownAccelerator as error:
        detail = f"name: {found.name} is a {found.accelerator!r}, which is not in the catalogue"
        raise Refusal("conflict", detail, field="name") from error
    pool = Pool(
        name=found.name,
        team=call.user.team,
        provider=_CLOUD,
        accelerator=row.name,
        chips=row.chips,
        hosts=row.hosts,
        zones=(found.zone,),
        max=1,
        spot=found.spot,
        cloud=CloudWish(kind=SPOT if found.spot else ON_DEMAND),
        adopted=True,
    )
    own = call.given(AdoptRequest).own
    audit.info("%s/%s adopts TPU %s", call.user.team, call.user.name, found.name)
    slice = await service.found_fitting(service.commands(call.user).adopt(pool, secrets.token_hex(8)))
    try:
        async with asyncio.timeout(limits.CALL_TIMEOUT_S):
            await adopter.take(found, slice, own=own)
    except (CapacityError, TimeoutError) as error:
        # Its slice will be found to be absent, and buried; the pool goes now, so that the name is free.
        await service.commands(call.user).delete_pool(pool.name)
        raise _unanswered(found.name, error) from error
    return slice


def _unanswered(name: str, error: Exception) -> Refusal:
    code = "conflict" if isinstance(error, PermissionDenied) else "unavailable"
    return Refusal(code, f"TPU {name}: {str(error) or 'no answer in time'}")


ROUTES: Final = (Route("POST", "/v1/adopt", adopt, takes=AdoptRequest, gives=AdoptReply, role=Role.OPERATOR),)
