"""The routes that take over a TPU that exists: a slice and a pool of its own in the store, our labels on the machine.

`tpu adopt` calls them: it runs the script of the answer on every host, and says where that failed. The slice is
committed before the label is set, so that nothing ever bears our label without belonging to something. Only operators
may: what has no label of ours has no team, and with `own` it is deleted one day.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Final

from penstock.controller.jobs import NotFound
from penstock.domain import admission, catalogue
from penstock.domain.cloud import ON_DEMAND, SPOT, CloudWish
from penstock.domain.lifecycle import COUNTED_SLICE_STATES, SliceState
from penstock.domain.nouns import Pool, Role, Slice
from penstock.ports.capacity import CapacityError, Existing, PermissionDenied
from penstock.ports.store import Reader
from penstock.server.arrivals import arrivals
from penstock.server.fleets import SLICE_ID
from penstock.server.routing import Call, Refusal, Route
from penstock.server.service import Adopter, Service
from penstock.wire.capacity import AdoptReply, AdoptRequest, UnreachedRequest

audit = logging.getLogger("penstock.audit")
_CLOUD: Final = "tpu_vm"
_SAID_CHARACTERS: Final = 300
_ASK_S: Final = 7.0  #: for each of two questions to the provider: whoever asks us waits 15 s for our answer


def _read_slice(reader: Reader, id: str) -> Slice | None:
    return reader.slice(id)


async def adopt(service: Service, call: Call) -> AdoptReply:
    """Take over a TPU that exists; asked again for one that is on its way to be ours, the same answer is given."""
    request = call.given(AdoptRequest)
    admission.check_name("name", request.name)
    admission.check_name("zone", request.zone)
    adopter = service.adopter
    if adopter is None:
        raise Refusal("conflict", "name: this server has no cloud", field="name", advice="set [tpu_vm] project")
    found = await _find(adopter, request)
    known = await service.store.read(_read_slice, found.slice) if found.slice is not None else None
    if known is not None and known.state is SliceState.CREATING:
        slice = known
    elif known is not None and known.state is not SliceState.GONE:
        raise _taken(found, known)
    else:
        slice = await _take(service, call, adopter, found)
    try:
        script = adopter.script(slice)
    except CapacityError as error:
        raise Refusal("unavailable", f"slice {slice.id}: {error}") from error
    return AdoptReply(slice=slice.id, pool=slice.pool, hosts=slice.hosts, script=script, returns=not found.script)


async def unreached(service: Service, call: Call) -> None:
    """Whoever adopts a TPU could not set up some of its hosts: people see why, until it is ready or given up."""
    id = call.params["id"]
    slice = await service.store.read(_read_slice, id)
    if slice is None or slice.state is not SliceState.CREATING:
        raise NotFound("slice", f"{id} that is being adopted")
    told = call.given(UnreachedRequest).hosts
    for host in told:
        if not 0 <= host.index < slice.hosts:
            detail = f"hosts: {host.index} is no host of slice {id}, which has {slice.hosts}"
            raise Refusal("bad_input", detail, field="hosts", advice="the first is 0")
    audit.info("%s/%s tells why hosts of slice %s are not set up", call.user.team, call.user.name, id)
    for host in told:
        arrivals(service).note(id, host.index, f"not set up by {call.user.name}: {_plain(host.said)}")


def _plain(said: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in said)[:_SAID_CHARACTERS]


async def _find(adopter: Adopter, request: AdoptRequest) -> Existing:
    try:
        async with asyncio.timeout(_ASK_S):
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


def _taken(found: Existing, slice: Slice) -> Refusal:
    """It bears our label and is in use, or on its way out: a new label could be taken off with the old one."""
    if slice.state in COUNTED_SLICE_STATES:
        return Refusal("conflict", f"name: {found.name} is slice {slice.id} already", field="name")
    detail = f"name: {found.name} is being let go as slice {slice.id}, which is {slice.state.value}"
    return Refusal("unavailable", detail, field="name", advice="adopt it again in a moment")


async def _take(service: Service, call: Call, adopter: Adopter, found: Existing) -> Slice:
    """Commit the slice, then label the machine. Of two at once the second goes on with the first one's slice."""
    try:
        adopter.check()
    except CapacityError as error:
        raise _unanswered(found.name, error) from error
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
    machine = secrets.token_hex(8)
    slice = await service.found_fitting(service.commands(call.user).adopt(pool, machine))
    first = slice.provider_id == machine
    if first:
        audit.info("%s/%s adopts TPU %s", call.user.team, call.user.name, found.name)
    try:
        async with asyncio.timeout(_ASK_S):
            await adopter.take(found, slice, own=own)
    except (CapacityError, TimeoutError) as error:
        # Refused for good, the name is free at once. Else whoever asks again labels this same slice; if nobody does, it
        # is found to be absent and let go.
        if first and isinstance(error, PermissionDenied):
            await service.commands(call.user).delete_pool(pool.name)
        raise _unanswered(found.name, error) from error
    return slice


def _unanswered(name: str, error: Exception) -> Refusal:
    code = "conflict" if isinstance(error, PermissionDenied) else "unavailable"
    return Refusal(code, f"TPU {name}: {str(error) or 'no answer in time'}")


ROUTES: Final = (
    Route("POST", "/v1/adopt", adopt, takes=AdoptRequest, gives=AdoptReply, role=Role.OPERATOR),
    Route(
        "POST",
        "/v1/slices/{id}/unreached",
        unreached,
        takes=UnreachedRequest,
        role=Role.OPERATOR,
        status=204,
        path_rules=SLICE_ID,
    ),
)
