"""Routes of agents: join, the long poll, and what to launch. Whoever else serves agents asks here whose attempt it is.

A sync is taken in by `controller.agents` and answered from committed rows; when there is nothing to do it is parked at
the bells of its slice. A credential opens only its own host, and an attempt only to the hosts of the slices that hold
it; a closed one still takes late logs and artifacts for a while. Secrets are read here, for the one host that is about
to run the job, and go nowhere else. It must not decide what should run.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from typing import Final

import msgspec

from penstock.controller.jobs import NotFound
from penstock.controller.reports import answer, rank_of, unwelcome
from penstock.controller.verbs import Outdated
from penstock.domain import catalogue, limits
from penstock.domain.custody import SyncReply, SyncRequest
from penstock.domain.lifecycle import LIVE_ATTEMPT_STATES
from penstock.domain.nouns import Attempt, Command, Job, Role, Slice, Snippet
from penstock.ports.store import Reader, StoreError
from penstock.server.auth import host_credential, join_token_fits
from penstock.server.bells import Bells, Woken
from penstock.server.routing import AgentHost, Call, Refusal, Route
from penstock.server.service import Service
from penstock.server.solving import solvers
from penstock.wire.agent import AgentSync, Join, Joined, LaunchSpec, Orders
from penstock.wire.api import CommandRequest, SnippetRequest

logger = logging.getLogger(__name__)

#: Where gangs of the local provider meet: above what systems give out, below what they connect from by default.
_PORTS: Final = range(20_000, 32_768)
_ANCESTORS_MAX: Final = 1_000  #: jobs a resumed job is followed back through
SAVE_APART_S: Final = 1.0  #: checkpoints of one host that are closer count as one
_REPEATS_KEPT: Final = 50_000  #: hosts whose last orders are remembered


class Desk:
    """The bells of one server, and what each host was told last."""

    def __init__(self, service: Service) -> None:
        self.bells = Bells(service.store, service.clock, lambda: service.controller.cursor)
        self._following: asyncio.Task[None] | None = None
        self._told: dict[tuple[str, int], tuple[SyncReply, float]] = {}
        self._addresses: dict[str, str] = {}  #: slice -> where its first host is, as that host says
        service.controller.on_tick(self.bells.ticked)
        solvers(service).ring = lambda slice: self.bells.ring(slice, 0)

    def follow(self) -> None:
        """Start to follow the log, once more if a fault ended it: without bells orders would wait for the next poll."""
        if self._following is not None and not self._following.done():
            return
        if self._following is not None and not self._following.cancelled():
            logger.error("following the log failed; it starts anew", exc_info=self._following.exception())
        self._following = asyncio.create_task(self.bells.run())

    async def close(self) -> None:
        """End the wait of whoever is parked, and stop following the log."""
        self.bells.hush()
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait((self._following,))

    def note_address(self, slice: str, host: int, address: str) -> None:
        if host == 0 and address and self._addresses.get(slice) != address:
            self._addresses[slice] = address
            if len(self._addresses) > _REPEATS_KEPT:
                del self._addresses[next(iter(self._addresses))]

    def address(self, slice: str) -> str:
        """Where the first host of a slice is; empty when it did not say so to this server yet."""
        return self._addresses.get(slice, "")

    def repeated(self, request: SyncRequest, reply: SyncReply, now: float) -> float:
        """How long to wait before these orders are given: nothing, unless this host was just told the same."""
        told, at = self._told.get((request.slice, request.host), (None, 0.0))
        return max(0.0, at + limits.SYNC_REPEAT_S - now) if told == reply else 0.0

    def tell(self, request: SyncRequest, reply: SyncReply, now: float) -> SyncReply:
        key = (request.slice, request.host)
        self._told.pop(key, None)
        if not quiet(reply):
            self._told[key] = (reply, now)
            if len(self._told) > _REPEATS_KEPT:
                del self._told[next(iter(self._told))]
        return reply


def _desk(service: Service) -> Desk:
    return service.part(Desk)


def bells(service: Service) -> Bells:
    """The bells of this server, following the log from now on. `wiring` may set their `on_drop`."""
    desk = _desk(service)
    desk.follow()
    return desk.bells


# --- joining ---
async def join(service: Service, call: Call) -> Joined:
    """A host's first call: the slice's token for the host's own credential."""
    wanted = call.body
    assert isinstance(wanted, Join)
    if not join_token_fits(service.key, wanted.slice, wanted.token):
        raise Refusal("unauthenticated", "token: is not the join token of this slice", field="token")
    slice = await service.store.read(_slice, wanted.slice)
    host = AgentHost(wanted.slice, wanted.host, wanted.incarnation)
    refusal = unwelcome(slice, _request(host, wanted.provider_id))
    if slice is None or refusal:
        raise Refusal("forbidden", f"slice {wanted.slice}, host {wanted.host}: {refusal}")
    if slice.joined and slice.joined[wanted.host] is not None:
        # It has its credential since its first sync. Whoever comes with the token now found it somewhere (ADR 0030).
        detail = f"slice {wanted.slice}, host {wanted.host}: has joined before; its join token is spent"
        raise Refusal("forbidden", detail, field="token", advice="call with the credential that the host was given")
    shared = slice.provider == "local" and service.settings.root.startswith("file://")
    return Joined(credential=host_credential(service.key, host), root=service.settings.root if shared else None)


def _request(host: AgentHost, provider_id: str) -> SyncRequest:
    return SyncRequest(slice=host.slice, provider_id=provider_id, host=host.host, incarnation=host.incarnation)


def _slice(reader: Reader, id: str) -> Slice | None:
    return reader.slice(id)


# --- the long poll ---
async def sync(service: Service, call: Call) -> Orders:
    """Take in what a host observes, and answer what it should do: at once if there is anything, else when there is."""
    body = call.body
    assert isinstance(body, AgentSync)
    request = body.request
    if call.agent != (request.slice, request.host, request.incarnation):
        raise Refusal("forbidden", "request: is of another host than the credential", field="request")
    _hand_on_progress(service, body)
    if body.saved:
        await _note_saves(service, body)
    _desk(service).note_address(request.slice, request.host, body.address)
    solving = solvers(service)
    solving.heard(request.slice, request.host)
    desk, bells_, clock = _desk(service), bells(service), service.clock
    began, stops = clock.steady(), service.stopping.is_set()
    until = began + min(body.wait_s, limits.SYNC_S)
    rung, stale = bells_.rung(request.slice), bells_.stale(request.slice, request.host)
    reply = await service.controller.agents.sync(request)
    if stale and quiet(reply):
        # The controller's memory may be a tick behind the order we were rung for.
        reply = await _committed(service, request)
    bells_.answered(request.slice, request.host, rung)
    while True:
        now = clock.steady()
        rest = until - now
        if solving.due(request.slice, request.host):
            rest = 0.0
        elif not quiet(reply):
            rest = min(rest, _patience(desk, request, reply, now, began)) if reply.welcome else 0.0
        if stops and quiet(reply):
            # Its report is taken in. An answer would only bring it back at once, for as long as this server drains.
            raise Refusal("unavailable", "the server stops", retry_after_s=1.0)
        if rest <= 0 or service.stopping.is_set():
            orders = await _with_spec(service, call.agent, desk.tell(request, reply, now))
            order = solving.take(request.slice, request.host) if reply.welcome else None
            return orders if order is None else msgspec.structs.replace(orders, solve=order)
        woken = await bells_.park(request.slice, rung, rest, call.request.receive)
        if woken is Woken.DROPPED:
            return _orders_of(reply)
        if woken is Woken.RUNG:
            rung = bells_.rung(request.slice)
            reply = await _committed(service, request)
            bells_.answered(request.slice, request.host, rung)


def _patience(desk: Desk, request: SyncRequest, reply: SyncReply, now: float, began: float) -> float:
    """How long orders may wait: what is only to be forgotten waits a moment for the next launch to come along."""
    only_forget = reply.launch is None and not (reply.stop or reply.kill)
    return max(desk.repeated(request, reply, now), began + limits.SYNC_REPEAT_S - now if only_forget else 0.0)


def quiet(reply: SyncReply) -> bool:
    """Whether a reply asks for nothing."""
    return reply.welcome and reply.launch is None and not (reply.stop or reply.kill or reply.forget)


async def _with_spec(service: Service, host: AgentHost, reply: SyncReply) -> Orders:
    """The reply, and with an order to launch what the host would ask for next: one call less before a snippet runs."""
    if reply.launch is None:
        return _orders_of(reply)
    try:
        return _orders_of(reply, await _spec(service, host, reply.launch.attempt))
    except (Refusal, NotFound):
        return _orders_of(reply)  # it asks, and is told why


def _orders_of(reply: SyncReply, spec: LaunchSpec | None = None) -> Orders:
    return Orders(**msgspec.structs.asdict(reply), spec=spec)


async def _committed(service: Service, request: SyncRequest) -> SyncReply:
    """The orders as they are committed now. A host that could not be taken in before is reported again."""
    joined, reply = await service.store.read(_orders, request)
    return reply if joined else await service.controller.agents.sync(request)


def _orders(reader: Reader, request: SyncRequest) -> tuple[bool, SyncReply]:
    slice = reader.slice(request.slice)
    if slice is None:
        return False, SyncReply(welcome=False, why="no such slice")
    joined = bool(slice.joined) and request.host < slice.hosts and slice.joined[request.host] is not None
    return joined, answer(reader, slice, request)


def _hand_on_progress(service: Service, body: AgentSync) -> None:
    """Keep what payloads last said of themselves; a host can speak only for what its slice holds."""
    for id, said in body.progress.items():
        attempt = service.controller.snapshot.attempts.get(id)
        if attempt is not None and any(bound.slice == body.request.slice for bound in attempt.slices):
            service.note_progress(id, msgspec.structs.replace(said, at=service.clock.now()))


async def _note_saves(service: Service, body: AgentSync) -> None:
    """For the cost ledger, before an end that may come with the same words closes the attempt."""
    for id, ago_s in body.saved.items():
        attempt = service.controller.snapshot.attempts.get(id)
        if attempt is None or all(bound.slice != body.request.slice for bound in attempt.slices):
            continue
        host, at = rank_of(attempt, body.request.slice, body.request.host), service.clock.now() - ago_s
        known = max((save.at for save in attempt.saves if save.host == host), default=attempt.created_at)
        # Two clocks that drift apart tell of the same save again, a little later.
        if at > known + SAVE_APART_S:
            said = service.progress.get(id)
            await note_save(service, id, host, said.save_s if said is not None else None, at)


async def note_save(service: Service, attempt: str, host: int, cost_s: float | None, at: float | None = None) -> None:
    """Tell the ledger of a checkpoint. That it cannot be told must cost neither the checkpoint nor the sync."""
    try:
        await service.controller.commands.note_save(attempt, host, cost_s, at)
    except (Outdated, StoreError) as error:
        logger.warning("attempt %s: a checkpoint is not in the ledger: %s", attempt, error)


# --- whose attempt ---
async def bound_attempt(
    service: Service, call: Call, *, late: bool = False, committed: bool = False
) -> tuple[Attempt, int]:
    """The attempt of the path and the calling host's rank in it, if its slice holds it (or, `late`, held it just now).

    What lives is in memory; what memory does not know, or knows otherwise, is read. With `committed` it is always read:
    memory may be a tick behind.
    """
    host, id = call.agent, call.params["attempt"]
    snapshot = service.controller.snapshot
    found: tuple[Attempt | None, Slice | None] = (snapshot.attempts.get(id), snapshot.slices.get(host.slice))
    if committed or found[0] is None or _estranged(found[0], found[1], host):
        found = await service.store.read(_attempt_and_slice, id, host.slice)
    attempt, slice = found
    if attempt is None:
        raise NotFound("attempt", id)
    since = service.clock.now() - limits.LATE_S if late else None
    return attempt, _rank(attempt, slice, host, since)


def _rank(attempt: Attempt, slice: Slice | None, host: AgentHost, since: float | None = None) -> int:
    """The host's rank in the attempt; refused unless its slice holds it, or held it until `since` or later."""
    wrong = _estranged(attempt, slice, host)
    if wrong:
        raise Refusal("forbidden", f"attempt {attempt.id}: {wrong}")
    if attempt.closed_at is not None and (since is None or attempt.closed_at < since):
        raise Refusal("conflict", f"attempt {attempt.id}: is closed", advice="forget it")
    return rank_of(attempt, host.slice, host.host)


def _estranged(attempt: Attempt, slice: Slice | None, host: AgentHost) -> str:
    """Why a host has nothing to do with an attempt; empty when it has."""
    if slice is None or all(bound.slice != slice.id for bound in attempt.slices):
        return f"is not on slice {host.slice}"
    if not (slice.joined and host.host < slice.hosts and slice.joined[host.host] == host.incarnation):
        return "belongs to another incarnation of this host"
    if attempt.state in LIVE_ATTEMPT_STATES and slice.attempt != attempt.id:
        return f"is not what slice {host.slice} holds"
    return ""


def _attempt_and_slice(reader: Reader, attempt: str, slice: str) -> tuple[Attempt | None, Slice | None]:
    return reader.attempt(attempt), reader.slice(slice)


# --- what to launch ---
class _Facts(msgspec.Struct, frozen=True):
    attempt: Attempt
    job: Job
    slice: Slice | None
    restore: tuple[tuple[str, int], ...]
    root: str  #: the job that this one resumes, at the end of the chain


async def launch(service: Service, call: Call) -> LaunchSpec:
    """Everything this host needs to start its part of the attempt, secrets included."""
    return await _spec(service, call.agent, call.params["attempt"])


async def _spec(service: Service, host: AgentHost, id: str) -> LaunchSpec:
    facts = await service.store.read(_facts, id, host.slice)
    if facts is None:
        raise NotFound("attempt", id)
    rank = _rank(facts.attempt, facts.slice, host)
    spec, attempt = facts.job.spec, facts.attempt
    assert facts.slice is not None  # else it had no rank
    accelerator = catalogue.find(facts.slice.accelerator)
    return LaunchSpec(
        attempt=attempt.id,
        job=attempt.job,
        name=spec.name,
        team=spec.team,
        replica=attempt.replica,
        fence=attempt.fence,
        stage=attempt.stage,
        rank=rank,
        world_size=attempt.hosts,
        payload=_payload(facts.job),
        timeout_s=attempt.timeout_s,
        accelerator=facts.slice.accelerator,
        jax_devices=max(1, accelerator.jax_devices // facts.slice.hosts),
        coordinator=coordinator(attempt, facts.slice, _desk(service).address(attempt.slices[0].slice)),
        slices=len(attempt.slices),
        slice_index=rank // (attempt.hosts // len(attempt.slices)),
        environment=spec.environment,
        env=spec.env,
        secrets=await asyncio.to_thread(_secrets, service, facts.job) if spec.secrets else {},
        outputs=spec.outputs,
        memory_bytes=spec.resources.memory_bytes,
        restore=facts.restore,
        wandb_run_id=facts.root,
        stop_grace_s=limits.GRACE_S,
    )


def coordinator(attempt: Attempt, slice: Slice, address: str) -> str | None:
    """Where the processes of a gang meet: at its first host. A single host needs none."""
    if attempt.hosts < 2:
        return None
    port = _PORTS[zlib.crc32(attempt.id.encode()) % len(_PORTS)]
    if slice.provider == "local":
        return f"127.0.0.1:{port}"
    if not address:
        # The first host says so with every sync: at most one is waited for after a server's start.
        raise Refusal("unavailable", "the first host of the gang has not said where it is", retry_after_s=1.0)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _payload(job: Job) -> SnippetRequest | CommandRequest:
    match job.spec.payload:
        case Snippet(code, variables, isolation, setup):
            return SnippetRequest(code, variables, "inline" if isolation == "inline" else "fork", setup)
        case Command(argv, snapshot, setup):
            return CommandRequest(argv, snapshot, setup)
        case task:
            raise Refusal("conflict", f"payload: agents of this release cannot run the task {task.name!r}")


def _secrets(service: Service, job: Job) -> dict[str, str]:
    values = {}
    for secret in job.spec.secrets:
        value = service.secrets.get(job.spec.team, secret.name)
        if value is None:
            advice = f"tpu secret set {secret.name}"
            raise Refusal("conflict", f"secrets: {secret.name!r} has no value", field="secrets", advice=advice)
        values[secret.name] = value
    return values


def _facts(reader: Reader, attempt_id: str, slice_id: str) -> _Facts | None:
    attempt, slice = reader.attempt(attempt_id), reader.slice(slice_id)
    job = reader.job(attempt.job) if attempt is not None else None
    if attempt is None or job is None:
        return None
    line = _line(reader, job)
    return _Facts(attempt, job, slice, _checkpoints(reader, attempt, line), line[-1].id)


def restorable(reader: Reader, attempt_id: str) -> tuple[tuple[str, int], ...]:
    """Which attempts' checkpoints an attempt may read, newest first."""
    attempt = reader.attempt(attempt_id)
    job = reader.job(attempt.job) if attempt is not None else None
    return () if attempt is None or job is None else _checkpoints(reader, attempt, _line(reader, job))


def _line(reader: Reader, job: Job) -> list[Job]:
    """A job, the one it resumes, the one that resumed, and so on; purged ones end it."""
    line = [job]
    while line[-1].parent is not None and len(line) < _ANCESTORS_MAX:
        found = reader.jobs((line[-1].parent,))
        if not found:
            break
        line.append(found[0])
    return line


def _checkpoints(reader: Reader, attempt: Attempt, line: list[Job]) -> tuple[tuple[str, int], ...]:
    """Which attempts' checkpoints may be resumed, newest first: back to the one that started from nothing."""
    found: list[tuple[str, int]] = []
    if attempt.stage == 0:
        return ()
    for job in line:
        for each in reversed(reader.attempts_of(job.id)):
            if each.replica != attempt.replica or (job.id == attempt.job and each.fence >= attempt.fence):
                continue
            found.append((job.id, each.fence))
            if each.stage == 0:
                return tuple(found)
    return tuple(found)


ROUTES: Final = (
    Route("POST", "/v1/agent/join", join, takes=Join, gives=Joined, role=None),
    Route("POST", "/v1/agent/sync", sync, takes=AgentSync, gives=Orders, role=Role.AGENT),
    Route("GET", "/v1/agent/attempts/{attempt}/launch", launch, gives=LaunchSpec, role=Role.AGENT),
)
