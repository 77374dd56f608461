"""Routes of hosts that are on their way: the agent bundle they fetch, and what they say of their set-up.

A cloud host calls them from its startup script, before it can join, with the join token of its slice. Progress is kept
in memory, for people; that a set-up failed goes to the store, because the slice is replaced for it. It must not tell a
host anything that another team's host may not know: the bundle holds code and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import msgspec

from penstock.controller.jobs import NotFound
from penstock.controller.reports import unwelcome
from penstock.controller.slices import fail_setup
from penstock.controller.verbs import Outdated
from penstock.domain import limits
from penstock.domain.custody import SyncRequest
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Job, Slice, Zone, untried
from penstock.planner.slices import slow_since, zone_known
from penstock.planner.zones import mute_advice, muteness
from penstock.ports.store import Reader
from penstock.server.auth import belongs, joins
from penstock.server.routing import ID_PATTERN, Call, Parameter, Raw, Refusal, Route
from penstock.server.service import Service

STEPS: Final = ("fetching", "unpacking", "starting", "failed")
LOG_BYTES_MAX: Final = 16 << 10
_LOG_LINES: Final = 20
_LOG_CHARACTERS: Final = 4_000
_SLICES_KEPT: Final = 10_000  #: whose progress is remembered: more than can be on their way at once
_PIECE_BYTES: Final = 1 << 20
_COMING: Final = (SliceState.INTENDED, SliceState.CREATING)


class Arrival(msgspec.Struct, frozen=True):
    """The last step that a host told of."""

    step: str
    at: float


class Arrivals:
    """How far the hosts of slices that are coming are, as far as they told this server."""

    def __init__(self, service: Service) -> None:
        self._clock = service.clock
        self._slices: dict[str, dict[int, Arrival]] = {}

    def note(self, slice: str, host: int, step: str) -> None:
        hosts = self._slices.setdefault(slice, {})
        hosts[host] = Arrival(step, self._clock.now())
        if len(self._slices) > _SLICES_KEPT:
            del self._slices[next(iter(self._slices))]

    def tell(self, slice: Slice) -> str:
        """In one line what the hosts of a slice are doing; nothing when it is not coming, or nobody said a word."""
        if slice.state not in _COMING:
            self._slices.pop(slice.id, None)
            return ""
        said = self._slices.get(slice.id, {})
        joined = [index for index, life in enumerate(slice.joined) if life is not None]
        doing: dict[str, list[int]] = {"joined": joined} if joined else {}
        for host, arrival in sorted(said.items()):
            if host not in joined:
                doing.setdefault(arrival.step, []).append(host)
        if slice.hosts == 1:
            return next(iter(doing), "")
        return ", ".join(f"{len(hosts)} of {slice.hosts} hosts {step}" for step, hosts in doing.items())


def arrivals(service: Service) -> Arrivals:
    return service.part(Arrivals)


def coming(service: Service, slice: Slice) -> tuple[str, float | None]:
    """In one line how far a slice is that is being made, and since when it takes longer than others did there."""
    doing = arrivals(service).tell(slice)
    slow, since = _slow(service, slice)
    return (f"{doing or _state(slice)}{slow}" if slow else doing), since


def _state(slice: Slice) -> str:
    return (slice.provider_state or "asked for").lower()


def _slow(service: Service, slice: Slice) -> tuple[str, float | None]:
    snapshot, now = service.controller.snapshot, service.clock.now()
    since = slow_since(snapshot, slice, now)
    if since is None:
        return "", None
    usual_s = zone_known(snapshot, slice).ready_s
    usual = "none was ever ready there" if usual_s is None else f"others took {usual_s:.0f} s there"
    rivals = snapshot.races.get(slice.race or "", {}).values()
    beside = sorted(rival.zone for rival in rivals if rival.id != slice.id and rival.state in _COMING)
    asked = f", asked in {' and '.join(beside)} as well" if beside else ""
    return f"; unusually slow for {max(0.0, now - since):.0f} s: {usual}{asked}", since


#: Reasons of waiting that slices on their way explain further.
CAPACITY_CODES: Final = frozenset(
    {"creating_slices", "waiting_for_capacity", "zone_backoff", "zone_mute", "pool_at_max"}
)
_DETAILS_MAX: Final = 8


def capacity_details(service: Service, job: Job, said: str) -> tuple[str, ...]:
    """How far slices are that a waiting job could use, and what zones said when they last gave none.

    What a zone said is left out where the reason (`said`) has it already, with the time of the next try: providers
    are wordy. A zone that is left alone because set-up fails there is told of all the same, with the cure.
    """
    snapshot, now = service.controller.snapshot, service.clock.now()
    resources, team = job.spec.resources, job.spec.team
    pools = {
        pool.name: pool
        for pool in snapshot.pools.values()
        if not pool.deleted and pool.accelerator in resources.accelerators and team in (pool.team, *pool.teams)
    }
    lines = []
    for slice in snapshot.unsettled.values():
        if slice.pool in pools and slice.state in _COMING:
            doing = arrivals(service).tell(slice) or _state(slice)
            age_s = max(0.0, now - slice.intended_at)
            slow, _ = _slow(service, slice)
            lines.append(f"slice {slice.id} in {slice.zone}: {doing}, asked for {age_s:.0f} s ago{slow}")
    for pool in pools.values():
        for name in pool.zones:
            mute = snapshot.witness.mute.get((pool.provider, name))
            if mute is not None:
                lines.append(f"{muteness(name, mute)}; {mute_advice(mute)}")
            zone = snapshot.zones.get(untried(pool, name).id)
            if zone is None or not zone.why or pool.provider == "local":
                continue
            told = zone.why.rstrip(". ")
            if told not in said or zone.broken >= limits.SETUP_FAILURES_MAX:
                lines.append(f"zone {name}: {told}{_rests(zone, now)}")
    return tuple(dict.fromkeys(lines))[:_DETAILS_MAX]


def _rests(zone: Zone, now: float) -> str:
    left_s = zone.backoff_until - now
    if left_s <= 0:
        return ""
    quarantined = zone.broken >= limits.SETUP_FAILURES_MAX
    cure = f" after {zone.broken} slices in a row; change the pool to try sooner" if quarantined else ""
    return f" (left alone for {left_s:.0f} s{cure})"


async def arriving(service: Service, call: Call) -> None:
    """How far a host's set-up is; with step `failed` the body is the end of its log, and its slice is replaced."""
    body = call.body
    assert isinstance(body, bytes)
    id, step = call.query["slice"], call.query["step"]
    slice = await _slice_of(service, call)
    host = int(call.query["host"])
    # The incarnation is the agent's, and there is none yet: whoever joined here before is asked again when one joins.
    life = slice.joined[host] if host < len(slice.joined) else None
    request = SyncRequest(slice=id, provider_id=call.query["machine"], host=host, incarnation=life or "")
    refusal = unwelcome(slice, request)
    if refusal:
        raise Refusal("forbidden", f"slice {id}, host {host}: {refusal}")
    arrivals(service).note(id, host, step)
    if step == "failed":
        with contextlib.suppress(Outdated):  # another host of the slice was faster
            await service.store.transact(fail_setup, id, host, call.query["machine"], _last_lines(body))


async def fetch_bundle(service: Service, call: Call) -> Raw:
    """The archive a host becomes ours with: Python, agent, and what jobs may import; also for one that mends itself."""
    await _slice_of(service, call, belongs)
    sha256 = call.params["sha256"]
    path = service.bundle(sha256) if service.bundle is not None else None
    if path is None:
        raise NotFound("bundle", sha256)
    size = (await asyncio.to_thread(path.stat)).st_size
    return Raw(_pieces(path), "application/gzip", {"content-length": str(size)})


async def _slice_of(service: Service, call: Call, is_host: Callable[[bytes, str, str | None], bool] = joins) -> Slice:
    """The slice of the query, if the caller is a host of it."""
    id = call.query["slice"]
    if not is_host(service.key, id, call.headers.get("authorization")):
        raise Refusal("unauthenticated", "the token is not the join token of this slice", field="slice")
    slice = await service.store.read(_read_slice, id)
    if slice is None:
        raise NotFound("slice", id)
    return slice


def _read_slice(reader: Reader, id: str) -> Slice | None:
    return reader.slice(id)


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(path.open, "rb")
    try:
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield piece
    finally:
        file.close()


def _last_lines(body: bytes) -> str:
    """The end of a log as people may see it: no control characters, and not much of it."""
    lines = body.decode("utf-8", "replace").splitlines()[-_LOG_LINES:]
    text = "\n".join("".join(letter if letter.isprintable() else " " for letter in line).rstrip() for line in lines)
    return text[-_LOG_CHARACTERS:]


_SLICE: Final = Parameter("slice", "The slice the host belongs to.", required=True, pattern=ID_PATTERN)

ROUTES: Final = (
    Route("GET", "/v1/agent/bundle/{sha256}", fetch_bundle, gives="bytes", role=None, joins=True, query=(_SLICE,)),
    Route(
        "POST",
        "/v1/agent/arriving",
        arriving,
        takes=bytes,
        role=None,
        joins=True,
        status=204,
        body_max=LOG_BYTES_MAX,
        body_optional=True,  # only a failure has a log
        query=(
            _SLICE,
            Parameter("host", "Index of the host in its slice.", "integer", True, 0, limits.SLICE_HOSTS_MAX - 1),
            Parameter(
                "machine",
                "Which creation of the slice the host belongs to.",
                required=True,
                longest=128,
                shape="printable",
            ),
            Parameter("step", "How far it is.", required=True, choices=STEPS),
        ),
    ),
)
