"""The routes about what people set, and about the server itself: pools, queues, slices, secrets, maintenance, health.

Administrators set what is their team's, operators everything. Names of pools and queues are shared by all teams, so a
name that another team has is refused without a word about it (S17). Secret values come in here and never go out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final

import msgspec

from penstock.controller.jobs import NotFound
from penstock.domain import admission, catalogue, cloud_admission, limits
from penstock.domain.admission import BadInput
from penstock.domain.cloud import ON_DEMAND, SPOT, CloudWish
from penstock.domain.nouns import Attempt, Job, Pool, Principal, Queue, Role, Slice
from penstock.planner.budgets import spent
from penstock.ports.store import Reader
from penstock.server.arrivals import coming
from penstock.server.inventory import reservation_view
from penstock.server.routing import Call, Parameter, Raw, Refusal, Route
from penstock.server.secret_files import NAME_PATTERN
from penstock.server.service import Service
from penstock.server.silences import silence
from penstock.server.submission import usable
from penstock.server.views import as_fleet, pool_of, pool_view, queue_of, queue_view, slice_view
from penstock.wire.api import (
    Health,
    Maintenance,
    PoolPage,
    PoolRequest,
    PoolView,
    PreemptRequest,
    QueuePage,
    QueueRequest,
    QueueView,
    SecretPage,
    SecretRequest,
    ServerView,
    SlicePage,
)

audit = logging.getLogger("penstock.audit")


def _team(user: Principal, wanted: str | None) -> str:
    if wanted is None or wanted == user.team:
        return user.team
    if user.role is not Role.OPERATOR:
        raise Refusal("forbidden", f"team: {wanted!r} is not the team of {user.name}", field="team")
    admission.check_name("team", wanted)
    return wanted


def _taken(kind: str, name: str) -> Refusal:
    return Refusal("conflict", f"{kind}: the name {name!r} cannot be used here", field="name", advice="choose another")


# --- pools ---
class _Pools(msgspec.Struct, frozen=True):
    pools: list[Pool]
    slices: Counter[str]


def _read_pools(reader: Reader, team: str | None) -> _Pools:
    pools = [pool for pool in reader.pools() if not pool.deleted and (team is None or usable(pool, team))]
    slices = [slice for slice in reader.live_slices() if team is None or slice.team == team]
    return _Pools(pools, Counter(slice.pool for slice in slices))


def _read_pool(reader: Reader, name: str) -> Pool | None:
    return reader.pool(name)


async def list_pools(service: Service, call: Call) -> PoolPage:
    """The pools a team may use."""
    found = await service.store.read(_read_pools, call.walls)
    return PoolPage(tuple(pool_view(pool, found.slices[pool.name]) for pool in found.pools))


async def get_pool(service: Service, call: Call) -> PoolView:
    """One pool."""
    found = await service.store.read(_read_pools, call.walls)
    for pool in found.pools:
        if pool.name == call.params["name"]:
            return pool_view(pool, found.slices[pool.name])
    raise NotFound("pool", call.params["name"])


async def put_pool(service: Service, call: Call) -> PoolView:
    """Make a pool, or change how many slices it has."""
    name, request = call.params["name"], call.given(PoolRequest)
    team = _team(call.user, request.team)
    if request.provider not in service.settings.providers:
        known = ", ".join(service.settings.providers)
        said = f"provider: {request.provider!r} is not one of {known}"
        cure = (
            "give the server its settings ([tpu_vm], docs/howto/cloud-tpu.md)" if request.provider == "tpu_vm" else None
        )
        raise Refusal("not_found", said, field="provider", advice=cure)
    for field, value in (("min", request.min), ("max", request.max)):
        admission.check_number(field, value, 0, limits.POOL_SLICES_MAX)
    if request.min > request.max:
        raise Refusal("conflict", f"min: {request.min} is more than max {request.max}", field="min")
    if request.per_zone is not None:
        admission.check_number("per_zone", request.per_zone, 0, limits.POOL_SLICES_MAX)
        if request.per_zone * len(request.zones) > limits.POOL_SLICES_MAX:
            detail = f"per_zone: {request.per_zone} in {len(request.zones)} zones is more than a pool may have"
            raise Refusal("conflict", detail, field="per_zone", advice=f"it may have {limits.POOL_SLICES_MAX}")
    if request.race is not None:
        admission.check_number("race", request.race, 1, limits.RACE_ZONES_MAX)
    for zone in request.zones:
        admission.check_name("zones", zone)
    if request.cloud is not None:
        cloud_admission.check(request.cloud)
    old = await service.store.read(_read_pool, name)
    if old is not None and old.team != team:
        raise _taken("pool", name)
    wanted = admission.normal_pool(pool_of(name, request, team, old))
    if wanted.per_zone is not None and (request.race or 1) > 1:
        detail = f"race: {request.race} zones at once: a fleet has a fixed count in each zone"
        raise Refusal("conflict", detail, field="race", advice="leave it out, or make a pool")
    wanted = _at_its_provider(service, wanted, old)
    try:
        saved = await service.commands(call.user).put_pool(wanted)
    except BadInput as error:
        if error.field == "team":
            raise _taken("pool", name) from error
        raise Refusal("conflict", str(error), field=error.field) from error
    found = await service.store.read(_read_pools, call.walls)
    return pool_view(saved, found.slices[name])


def _at_its_provider(service: Service, pool: Pool, old: Pool | None) -> Pool:
    """What only a cloud understands: zones by pattern, and how capacity is bought."""
    if pool.provider == "local":
        if pool.cloud is not None:
            raise Refusal("conflict", "cloud: local slices are made on this machine", field="cloud", advice="drop it")
        return pool
    wish = pool.cloud
    if wish is None and old is not None and not old.deleted and pool.spot == old.spot:
        wish = old.cloud
    wish = wish or CloudWish()
    if pool.spot and wish.kind == ON_DEMAND:
        wish = msgspec.structs.replace(wish, kind=SPOT)
    try:
        cloud_admission.check_together(wish)
        if pool.spot and not wish.spot:
            raise BadInput("spot", True, f"contradicts cloud.kind {wish.kind}", "leave one out")
        row = catalogue.find(pool.accelerator)
        if pool.provider not in row.providers:
            advice = f"it has {', '.join(row.providers)}"
            raise BadInput("provider", pool.provider, f"does not offer {row.name}", advice)
        zones = cloud_admission.resolve_zones(pool.zones, row, service.settings.cloud_zones)
    except BadInput as error:
        raise Refusal("conflict", str(error), field=error.field) from error
    return admission.normal_pool(as_fleet(msgspec.structs.replace(pool, cloud=wish, spot=wish.spot, zones=zones)))


async def delete_pool(service: Service, call: Call) -> None:
    """Make no more slices of a pool; those that exist finish their work and go."""
    name = call.params["name"]
    old = await service.store.read(_read_pool, name)
    if old is None or old.deleted or call.walls not in (None, old.team):
        raise NotFound("pool", name)
    await service.commands(call.user).delete_pool(name)


# --- queues ---
class _Queues(msgspec.Struct, frozen=True):
    queues: list[Queue]
    waiting: dict[str, int]
    live: list[Attempt]  #: what they have used is not charged yet

    def view(self, queue: Queue, now: float) -> QueueView:
        mine = [attempt for attempt in self.live if attempt.queue == queue.name]
        return queue_view(queue, self.waiting.get(queue.name, 0), spent(queue, mine, now))


def _read_queues(reader: Reader, team: str | None) -> _Queues:
    queues = [queue for queue in reader.queues() if not queue.deleted and team in (None, queue.team)]
    live = reader.live_attempts() if any(queue.budget is not None for queue in queues) else []
    return _Queues(queues, reader.waiting_counts(), live)


def _read_queue(reader: Reader, name: str) -> Queue | None:
    return reader.queue(name)


async def list_queues(service: Service, call: Call) -> QueuePage:
    """The queues of a team, and how many jobs wait in each."""
    found = await service.store.read(_read_queues, call.walls)
    return QueuePage(tuple(found.view(queue, service.clock.now()) for queue in found.queues))


async def get_queue(service: Service, call: Call) -> QueueView:
    """One queue."""
    found = await service.store.read(_read_queues, call.walls)
    for queue in found.queues:
        if queue.name == call.params["name"]:
            return found.view(queue, service.clock.now())
    raise NotFound("queue", call.params["name"])


async def put_queue(service: Service, call: Call) -> QueueView:
    """Make a queue, or change its share."""
    name, request = call.params["name"], call.given(QueueRequest)
    team = _team(call.user, request.team)
    old = await service.store.read(_read_queue, name)
    if old is not None and old.team != team:
        raise _taken("queue", name)
    wanted = queue_of(name, request, team)
    admission.check_queue(wanted)
    try:
        saved = await service.commands(call.user).put_queue(wanted)
    except BadInput as error:
        if error.field == "team":
            raise _taken("queue", name) from error
        raise
    found = await service.store.read(_read_queues, team)
    return found.view(saved, service.clock.now())


async def delete_queue(service: Service, call: Call) -> None:
    """Take a queue away. Refused while a job is in it that has not ended."""
    name = call.params["name"]
    old = await service.store.read(_read_queue, name)
    if old is None or old.deleted or call.walls not in (None, old.team):
        raise NotFound("queue", name)
    await service.found_fitting(service.commands(call.user).delete_queue(name))


# --- slices ---
class _Slices(msgspec.Struct, frozen=True):
    slices: list[Slice]
    jobs: dict[str, Job]  #: by the attempt that holds a slice
    attempts: dict[str, Attempt]
    pools: dict[str, Pool]


def _read_slices(reader: Reader, team: str | None) -> _Slices:
    slices = [slice for slice in reader.live_slices() if team in (None, slice.team)]
    held = [slice.attempt for slice in slices if slice.attempt is not None]
    attempts = reader.attempts(held)
    jobs = {job.id: job for job in reader.jobs(sorted({attempt.job for attempt in attempts}))}
    return _Slices(
        slices,
        {attempt.id: jobs[attempt.job] for attempt in attempts if attempt.job in jobs},
        {attempt.id: attempt for attempt in attempts},
        {pool.name: pool for pool in reader.pools()},
    )


async def list_slices(service: Service, call: Call) -> SlicePage:
    """The slices of a team that are not gone."""
    found = await service.store.read(_read_slices, call.walls)
    now = service.clock.now()
    views = []
    for one in found.slices:
        arriving, slow_since = coming(service, one)
        view = slice_view(
            one,
            found.jobs.get(one.attempt or ""),
            arriving,
            held=found.attempts.get(one.attempt or ""),
            reserved=reservation_view(one, found.pools.get(one.pool), now),
            slow_since=slow_since,
            silence=silence(service, one),
        )
        views.append(view)
    return SlicePage(tuple(views))


async def preempt(service: Service, call: Call) -> None:
    """Take a local slice away as a cloud would, to see what survives it."""
    id = call.params["id"]
    found = await service.store.read(_read_slices, call.walls)
    meant = [slice for slice in found.slices if slice.id == id] or [
        slice for slice in found.slices if slice.id.startswith(id)
    ]
    if not meant:
        raise NotFound("slice", id)
    if len(meant) > 1:
        raise Refusal("ambiguous", f"id: {id!r} may mean {meant[0].id} or {meant[1].id}", field="id")
    (slice,) = meant
    if slice.provider != "local" or service.preempt is None:
        detail = f"id: {slice.id} is of provider {slice.provider}; only local slices can be taken away"
        raise Refusal("conflict", detail, field="id")
    audit.info("%s/%s preempts slice %s", call.user.team, call.user.name, slice.id)
    await service.preempt(slice.id, call.given(PreemptRequest).notice_s)


# --- secrets ---
async def list_secrets(service: Service, call: Call) -> SecretPage:
    """The names of a team's secrets; values never leave."""
    return SecretPage(service.secrets.names(call.user.team))


async def put_secret(service: Service, call: Call) -> None:
    """Set a secret."""
    user, name = call.user, call.params["name"]
    await asyncio.to_thread(service.secrets.put, user.team, name, call.given(SecretRequest).value)
    audit.info("%s/%s sets secret %s", user.team, user.name, name)


async def delete_secret(service: Service, call: Call) -> None:
    """Forget a secret."""
    user, name = call.user, call.params["name"]
    if not await asyncio.to_thread(service.secrets.delete, user.team, name):
        raise NotFound("secret", name)
    audit.info("%s/%s deletes secret %s", user.team, user.name, name)


# --- the server ---
async def set_maintenance(service: Service, call: Call) -> Maintenance:
    """Let nothing new start, or go on as usual."""
    wanted = call.given(Maintenance)
    await service.commands(call.user).set_maintenance(wanted.on)
    return wanted


async def get_server(service: Service, call: Call) -> ServerView:
    """Who answers, and whom it takes the caller for."""
    user, settings = call.user, service.settings
    return ServerView(
        version=settings.version,
        api="v1",
        leading=service.controller.leading,
        store=settings.store,
        root=settings.root,
        principal=user.name,
        team=user.team,
        role=user.role.value,
        started_at=settings.started_at,
    )


def _read_nothing(reader: Reader) -> int:
    return reader.last_seq()


async def healthz(service: Service, call: Call) -> Health:  # noqa: ARG001 - handlers are all alike
    """Whether the server and its store answer."""
    await service.store.read(_read_nothing)
    return Health(True)


async def describe(service: Service, call: Call) -> Raw:  # noqa: ARG001 - handlers are all alike
    """This description."""
    return Raw(service.description, "application/json")


_SECRET_NAME: Final = (Parameter("name", "A name for an environment variable.", pattern=NAME_PATTERN),)

ROUTES: Final = (
    Route("GET", "/v1/pools", list_pools, gives=PoolPage),
    Route("GET", "/v1/pools/{name}", get_pool, gives=PoolView),
    Route("PUT", "/v1/pools/{name}", put_pool, takes=PoolRequest, gives=PoolView, role=Role.ADMIN),
    Route("DELETE", "/v1/pools/{name}", delete_pool, role=Role.ADMIN, status=204),
    Route("GET", "/v1/queues", list_queues, gives=QueuePage),
    Route("GET", "/v1/queues/{name}", get_queue, gives=QueueView),
    Route("PUT", "/v1/queues/{name}", put_queue, takes=QueueRequest, gives=QueueView, role=Role.ADMIN),
    Route("DELETE", "/v1/queues/{name}", delete_queue, role=Role.ADMIN, status=204),
    Route("GET", "/v1/slices", list_slices, gives=SlicePage),
    Route(
        "POST",
        "/v1/slices/{id}/preempt",
        preempt,
        takes=PreemptRequest,
        role=Role.ADMIN,
        status=204,
        body_optional=True,
    ),
    Route("GET", "/v1/secrets", list_secrets, gives=SecretPage),
    Route(
        "PUT",
        "/v1/secrets/{name}",
        put_secret,
        takes=SecretRequest,
        role=Role.ADMIN,
        status=204,
        path_rules=_SECRET_NAME,
    ),
    Route("DELETE", "/v1/secrets/{name}", delete_secret, role=Role.ADMIN, status=204, path_rules=_SECRET_NAME),
    Route("POST", "/v1/maintenance", set_maintenance, takes=Maintenance, gives=Maintenance, role=Role.OPERATOR),
    Route("GET", "/v1/server", get_server, gives=ServerView),
    Route("GET", "/healthz", healthz, gives=Health, role=None),
    Route("GET", "/v1/openapi.json", describe, gives="document", role=None),
)
