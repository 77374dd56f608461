"""What every handler may use: the controller, the store, the objects, who is who, and this server's settings.

`wiring` builds one per server process and hands it to `server.app.make`; tests build their own. State that a module of
`server` keeps for itself (live logs, feeds, bells) hangs here by `part`, so that nothing is global. It must not answer
requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from penstock.controller.commands import Commands
from penstock.controller.jobs import NotFound
from penstock.controller.loop import Controller
from penstock.domain.admission import BadInput
from penstock.domain.ids import IdMaker
from penstock.domain.nouns import Job, Principal, Queue, Role, Slice, Team
from penstock.domain.retention import Retention
from penstock.ports.capacity import Address, Existing
from penstock.ports.clock import Clock
from penstock.ports.objects import Stock
from penstock.ports.store import Reader, Store
from penstock.server.auth import Tokens
from penstock.server.regions import Regions, Root
from penstock.server.routing import Call, Refusal
from penstock.server.secret_files import SecretFiles
from penstock.wire.api import CleanedView, ProgressView

T = TypeVar("T")

PROGRESS_KEPT: Final = 20_000  #: attempts whose last word is remembered: more than can live at once
_JOB_ID_CHARACTERS: Final = 17
_LAST: Final = "\U0010ffff"  #: sorts after every character of an id


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one installation chose. `local_pools` is the embedded default: a pool is made for whoever needs one."""

    version: str
    store: str  #: as `tpu` shows it: an address without a password
    root: str
    started_at: float
    default_on: tuple[str, ...] = ("v5e-1",)
    default_queue: str = "default"  #: of each team that has one of this name or of its own
    local_pools: bool = False
    local_slices: int = 4  #: the most slices of one pool that was made by itself
    providers: tuple[str, ...] = ("local",)
    cloud_zones: tuple[str, ...] = ("*",)  #: patterns of zones that pools of a cloud may choose from
    retention: Retention = field(default_factory=Retention)


class Adopter(Protocol):
    """A cloud, as far as things in it can be adopted."""

    def check(self) -> None:
        """Raises `CapacityError` where no host can be made ours now."""

    async def inspect(self, name: str, zone: str) -> Existing | None: ...
    async def take(self, found: Existing, slice: Slice, *, own: bool) -> None: ...
    def script(self, slice: Slice) -> str: ...


@dataclass(slots=True, kw_only=True)
class Service:
    controller: Controller
    store: Store
    objects: Stock
    clock: Clock
    ids: IdMaker
    tokens: Tokens
    key: bytes = field(repr=False)
    secrets: SecretFiles
    settings: Settings
    #: Takes a slice of the local provider away after a notice of so many seconds; None without that provider.
    preempt: Callable[[str, float], Awaitable[None]] | None = None
    #: Removes what no slice of this machine uses and nothing used since a moment (or counts it: a dry run); answers
    #: what went, and why something stays. None where there are no local slices.
    caches: Callable[[float, bool], Awaitable[tuple[Sequence[CleanedView], str]]] | None = None
    #: Starts the agent of a host anew; its payloads go on. Raises `CapacityError` where the provider cannot do that.
    restart_agent: Callable[[Slice, int], Awaitable[None]] | None = None
    #: The file of the agent bundle with this hash, for hosts of a cloud; None when it is not, or no longer, here.
    bundle: Callable[[str], Path | None] | None = None
    #: Takes over what somebody else made in the cloud; None without one.
    adopter: Adopter | None = None
    #: Provider -> where the hosts of a slice of its are, by name and zone; those who cannot tell are left out.
    addresses: Mapping[str, Callable[[str, str], Awaitable[Sequence[Address]]]] = field(default_factory=dict)
    #: The same without asking: where they were when the provider last told.
    known_addresses: Mapping[str, Callable[[str, str], Sequence[Address]]] = field(default_factory=dict)
    #: Region -> its own root, where that is not the main one; and the region of the main one, "" if nobody said.
    region_roots: Mapping[str, Stock] = field(default_factory=dict)
    root_region: str = ""
    progress: dict[str, ProgressView] = field(default_factory=dict)  #: attempt -> what its payload last said
    stopping: asyncio.Event = field(default_factory=asyncio.Event)  #: set when the process ends: streams and waits end
    description: bytes = b""  #: the OpenAPI page, made with the application
    _parts: dict[Callable[..., Any], Any] = field(default_factory=dict)
    _commands: dict[str, Commands] = field(default_factory=dict)

    def part(self, make: Callable[[Service], T]) -> T:
        """The one object of this kind that belongs to this service; made when first asked for."""
        found = self._parts.get(make)
        if found is None:
            found = self._parts[make] = make(self)
        made: T = found
        return made

    @property
    def regions(self) -> Regions:
        """All roots, by region."""
        return Regions(main=Root(self.root_region, self.objects), others=self.region_roots)

    async def close_parts(self) -> None:
        """Let what hangs here finish: bytes that are only in memory become durable."""
        for part in self._parts.values():
            close = getattr(part, "close", None)
            if close is not None:
                await close()

    def commands(self, principal: Principal) -> Commands:
        """The commands in a principal's name: every event they leave says who asked."""
        actor = f"{principal.team}/{principal.name}"
        found = self._commands.get(actor)
        if found is None:
            found = self._commands[actor] = Commands(self.store.bound(actor=actor), self.clock, self.ids)
        return found

    def note_progress(self, attempt: str, said: ProgressView) -> None:
        self.progress.pop(attempt, None)
        self.progress[attempt] = said
        if len(self.progress) > PROGRESS_KEPT:
            del self.progress[next(iter(self.progress))]

    async def welcome_teams(self) -> None:
        """Give every team that has a token a row and a queue; the embedded default calls it when it starts."""
        for team in self.tokens.teams:
            if await self.store.read(_lacks_queue, team, self.queue_of(team)):
                await self.controller.commands.put_team(Team(name=team))
                await self.controller.commands.put_queue(Queue(name=self.queue_of(team), team=team))

    def queue_of(self, team: str) -> str:
        """The queue of a team whose jobs name none. Queues share one space of names, so it is called like its team."""
        return team if team != "default" else self.settings.default_queue

    # --- what a caller may see ---
    async def find_job(self, call: Call, id: str) -> Job:
        """A whole job by its id or a unique start of it; another team's is not there."""
        found = await self.store.read(read_by_prefix, call.walls, id)
        if isinstance(found, Job):
            return found
        if len(found) > 1:
            raise Refusal(
                "ambiguous",
                f"id: {id!r} may mean {found[0]} or {found[1]}",
                field="id",
                advice="give more of its characters",
            )
        raise NotFound("job", id)

    async def own_job(self, call: Call, id: str) -> Job:
        """The same, if the caller may change it: submitters change their own jobs, administrators the team's."""
        job = await self.find_job(call, id)
        user = call.user
        if user.role is Role.SUBMITTER and job.spec.user != user.name:
            raise Refusal("forbidden", f"job {job.id} is {job.spec.user}'s; {user.name} may change only own jobs")
        return job

    async def found_fitting(self, command: Awaitable[T]) -> T:
        """Await a command whose values were checked before: what it still refuses contradicts what is there."""
        try:
            return await command
        except BadInput as error:
            raise Refusal("conflict", str(error), field=error.field) from error


def read_by_prefix(reader: Reader, team: str | None, id: str) -> Job | list[str]:
    """The job that an id or the start of one means to a team (None: to all), or none or two that it may mean."""
    if len(id) >= _JOB_ID_CHARACTERS:
        job = reader.job(id)
        return job if job is not None and team in (None, job.spec.team) else []
    near = reader.jobs_page(team=team, states=(), after=id + _LAST, limit=2)
    ids = [job.id for job in near if job.id.startswith(id)]
    if len(ids) == 1:
        whole = reader.job(ids[0])
        return whole if whole is not None else []
    return ids


def _lacks_queue(reader: Reader, team: str, queue: str) -> bool:
    return reader.team(team) is None or reader.queue(queue) is None  # one that was deleted stays so
