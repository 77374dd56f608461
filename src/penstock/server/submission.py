"""From requests to checked specs: defaults, what a schema cannot say, and the pool an embedded server makes by itself.

`server.jobs` calls `prepare` for every submit, single or batch, before the command. What can never be right is refused
here or by `domain.admission`; what only contradicts the present state is a conflict. It must not commit jobs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from penstock.controller.jobs import NotFound
from penstock.domain import admission, limits
from penstock.domain.admission import BadInput
from penstock.domain.nouns import Job, JobSpec, Pool, Principal, Role
from penstock.ports.store import Reader
from penstock.server.auth import has_role
from penstock.server.routing import Call, Refusal
from penstock.server.secret_files import check_secret_name
from penstock.server.service import Service, read_by_prefix
from penstock.server.sweeping import refuse_doomed, snapshot_path
from penstock.server.views import spec_of
from penstock.wire.api import CommandRequest, JobRequest

ENV_PATTERN: Final = "^[A-Za-z_][A-Za-z0-9_]{0,127}$"
ARRAY_PATTERN: Final = "^[0-9A-Za-z_-]{1,64}/[0-9]{1,6}$"
_ENV_NAME: Final = re.compile(ENV_PATTERN.removesuffix("$") + r"\Z", re.ASCII)
_ARRAY: Final = re.compile(ARRAY_PATTERN.removesuffix("$") + r"\Z", re.ASCII)


#: What the domain calls a field, and what a request does.
_WIRE_NAMES: Final = {
    "resources.accelerators": "on",
    "resources.slices": "slices",
    "replicas.min": "replicas_min",
    "replicas.max": "replicas_max",
    "rule.preset": "rule",
    "rule.failure_budget": "max_retries",
}


class Facts(msgspec.Struct, frozen=True):
    """What exists that submits of one team refer to: one read for a whole batch."""

    queues: tuple[str, ...]  #: of the team, by name
    pools: tuple[Pool, ...]  #: it may use
    jobs: dict[str, Job | list[str]]  #: what ids and starts of ids mean
    accelerators: dict[str, str] = {}  #: of pools and slices that a job is to run on, by name


async def prepare(service: Service, call: Call, requests: Sequence[JobRequest]) -> list[JobSpec]:
    """The specs of the requests, all checked; one that cannot be refuses them all."""
    user = call.user
    teams = {_team(user, request) for request in requests}
    if len(teams) > 1:
        raise Refusal("conflict", "team: the jobs of one batch are of several teams", advice="send a batch per team")
    (team,) = teams
    facts = await _facts(service, team, requests)
    specs: list[JobSpec] = []
    for index, request in enumerate(requests):
        try:
            check_request(request)
            specs.append(admission.normal_spec(_spec(service, user, team, facts, request)))
        except BadInput as error:
            raise in_wire_words(error, "" if len(requests) == 1 else f"jobs[{index}].") from error
    await _check_references(service, team, requests)
    if service.settings.local_pools:
        await _make_pools(service, team, specs, facts.pools)
    return specs


def in_wire_words(error: BadInput, place: str = "") -> Refusal:
    """A refusal of the domain, with the field called as the request calls it."""
    field = place + _WIRE_NAMES.get(error.field, error.field)
    return Refusal("bad_input", field + str(error).removeprefix(error.field), field=field)


def _team(user: Principal, request: JobRequest) -> str:
    if request.team is None or request.team == user.team:
        return user.team
    if user.role is not Role.OPERATOR:
        raise Refusal(
            "forbidden", f"team: {request.team!r} is not the team of {user.name}", field="team", advice="leave it out"
        )
    return request.team


def _user(user: Principal, request: JobRequest) -> str:
    """Whom a job counts for. A service that takes jobs in for people is an administrator of its team."""
    if request.user is None or request.user == user.name:
        return user.name
    if not has_role(user, Role.ADMIN):
        detail = f"user: {user.name} may not submit for {request.user!r}"
        raise Refusal("forbidden", detail, field="user", advice="leave it out, or use an administrator's token")
    admission.check_name("user", request.user)
    return request.user


def _spec(service: Service, user: Principal, team: str, facts: Facts, request: JobRequest) -> JobSpec:
    queue = request.queue if request.queue is not None else _default_queue(service, team, facts.queues)
    # A pool, and a slice, is of one kind: whoever names it need not name that too.
    there = facts.accelerators.get(request.slice or request.pool or "")
    on = request.on or ((there,) if there is not None else service.settings.default_on)
    spec = spec_of(request, team=team, queue=queue, user=_user(user, request), on=on)
    return msgspec.structs.replace(spec, after=tuple(_meant(facts.jobs[id], id) for id in request.after))


def _default_queue(service: Service, team: str, queues: Sequence[str]) -> str:
    if not queues:
        raise Refusal("not_found", f"queue: team {team!r} has no queue", field="queue", advice="make one first")
    named = service.queue_of(team)
    return named if named in queues else queues[0]


def _meant(found: Job | list[str], id: str) -> str:
    if isinstance(found, Job):
        return found.id
    if found:
        raise Refusal("ambiguous", f"after: {id!r} may mean {found[0]} or {found[1]}", field="after")
    raise NotFound("job", id)


# --- what can never be right ---
def check_request(request: JobRequest) -> None:
    """Rules that `domain.admission` does not know, because rows do not depend on them."""
    _check_count("on", request.on, limits.CHOICES_MAX)
    _check_count("zones", request.zones, limits.CHOICES_MAX)
    _check_count("secrets", request.secrets, limits.CHOICES_MAX)
    _check_count("after", request.after, limits.AFTER_MAX)
    _check_count("outputs", request.outputs, limits.OUTPUTS_MAX)
    for field, name in (("pool", request.pool), ("slice", request.slice), *(("zones", zone) for zone in request.zones)):
        if name is not None:
            admission.check_name(field, name)
    for name in request.secrets:
        check_secret_name(name)
    if request.memory_bytes is not None:
        admission.check_number("memory_bytes", request.memory_bytes, 1 << 20, limits.MEMORY_BYTES_MAX)
    if len(request.note) > limits.NOTE_CHARACTERS_MAX:
        raise BadInput("note", request.note, f"is longer than {limits.NOTE_CHARACTERS_MAX} characters")
    if request.array is not None and _ARRAY.match(request.array) is None:
        raise BadInput("array", request.array, "is not ARRAY/INDEX", "such as sweep-1/7")
    if request.at_most is not None:
        admission.check_number("at_most", request.at_most, 1, limits.ARRAY_MEMBERS_MAX)
    if request.at_most is not None and request.array is None:
        _contradiction("at_most", f"{request.at_most} is for members of an array, and array is not given")
    _check_env(request.env)
    _check_setup(request.payload.setup)
    if isinstance(request.payload, CommandRequest):
        _check_command(request.payload)
    else:
        for name in request.payload.variables:
            if not name.isidentifier():
                raise BadInput("payload.variables", name, "is not a name that Python code could use")
    admission.check_number("replicas_min", request.replicas_min, 1, limits.REPLICAS_MAX)
    if request.replicas_min > request.replicas_max:
        _contradiction("replicas_min", f"{request.replicas_min} is more than replicas_max {request.replicas_max}")
    timeout_s = limits.TIMEOUT_S_DEFAULT if request.timeout_s is None else request.timeout_s
    if request.expected_s is not None:
        admission.check_number("expected_s", request.expected_s, 0, limits.TIMEOUT_S_MAX)
        if request.expected_s > timeout_s:
            _contradiction("expected_s", f"{request.expected_s:g} is more than timeout_s {timeout_s:g}")


def _contradiction(field: str, line: str) -> None:
    raise Refusal("conflict", f"{field}: {line}", field=field, advice="change one of them")


def _check_count(field: str, values: Sequence[str], most: int) -> None:
    if len(values) > most:
        raise BadInput(field, len(values), f"names are more than {most}")


def _check_env(env: Mapping[str, str]) -> None:
    size = 0
    for name, value in env.items():
        if _ENV_NAME.match(name) is None:
            raise BadInput("env", name, "is not a name for a variable", "use letters, digits and _")
        if "\0" in value:
            # The value itself may be a secret: it is not repeated.
            raise BadInput("env", name, "has a value with a NUL character")
        size += len(name) + len(value.encode()) + 2
    if size > limits.ENV_BYTES_MAX:
        raise BadInput("env", f"{size} bytes", f"are more than {limits.ENV_BYTES_MAX}", "put it in a file")


def _check_command(command: CommandRequest) -> None:
    size = 0
    for word in command.argv:
        if "\0" in word:
            raise BadInput("payload.argv", word, "has a NUL character")
        size += len(word.encode()) + 1
    if size > limits.ARGV_BYTES_MAX:
        raise BadInput("payload.argv", f"{size} bytes", f"are more than {limits.ARGV_BYTES_MAX}", "put it in a file")


def _check_setup(setup: str) -> None:
    if len(setup) > limits.SETUP_CHARACTERS_MAX:
        rule = f"are more than {limits.SETUP_CHARACTERS_MAX}"
        raise BadInput("payload.setup", f"{len(setup)} characters", rule, "put it in the snapshot")
    if "\0" in setup:
        raise BadInput("payload.setup", setup, "has a NUL character")


# --- what exists ---
async def _facts(service: Service, team: str, requests: Iterable[JobRequest]) -> Facts:
    after = {id for request in requests for id in request.after[: limits.AFTER_MAX]}
    queues = any(request.queue is None for request in requests)
    places = {request.slice or request.pool or "" for request in requests if not request.on}
    places = {name for name in places if name and name.isprintable()}  # others are refused, but not yet
    if not (after or queues or places or service.settings.local_pools):
        return Facts((), (), {})
    return await service.store.read(_read_facts, team, after, places, service.settings.local_pools)


def _read_facts(reader: Reader, team: str, after: set[str], places: set[str], pools: bool) -> Facts:
    named = [pool for pool in reader.pools() if pool.name in places and usable(pool, team)] if places else []
    slices = [slice for slice in reader.slices(sorted(places)) if slice.team == team] if places else []
    return Facts(
        accelerators={
            **{pool.name: pool.accelerator for pool in named},
            **{slice.id: slice.accelerator for slice in slices},
        },
        queues=tuple(queue.name for queue in reader.queues() if queue.team == team and not queue.deleted),
        pools=tuple(pool for pool in reader.pools() if usable(pool, team)) if pools else (),
        jobs={id: read_by_prefix(reader, team, id) for id in after},
    )


def usable(pool: Pool, team: str) -> bool:
    return not pool.deleted and (pool.team == team or team in pool.teams)


async def _check_references(service: Service, team: str, requests: Iterable[JobRequest]) -> None:
    """Secrets and snapshots are looked up now: their absence would only show on a host, minutes later."""
    for name in {name for request in requests for name in request.secrets}:
        if service.secrets.get(team, name) is None:
            raise Refusal(
                "not_found", f"secrets: {name!r} is not set", field="secrets", advice=f"tpu secret set {name}"
            )
    payloads = [request.payload for request in requests]
    snapshots = {one.snapshot for one in payloads if isinstance(one, CommandRequest) and one.snapshot is not None}
    await refuse_doomed(service, team, snapshots)
    for snapshot in snapshots:
        path = snapshot_path(team, snapshot)
        if path not in await service.objects.list(path):
            raise Refusal("not_found", f"payload.snapshot: {snapshot} was not uploaded", field="payload.snapshot")


# --- the embedded default ---
async def _make_pools(service: Service, team: str, specs: Iterable[JobSpec], pools: Sequence[Pool]) -> None:
    """A pool on this machine for whatever no pool of the team can hold; a larger gang makes one grow."""
    wanted: dict[str, Pool] = {}
    for spec in specs:
        resources = spec.resources
        if resources.pool is not None or resources.slice is not None or resources.zones:
            continue
        if any(_holds(pool, spec) for pool in (*pools, *wanted.values())):
            continue
        accelerator = resources.accelerators[0]
        name = f"local-{accelerator}" if team == "default" else f"local-{team}-{accelerator}"
        wanted[name] = Pool(
            name=name[: limits.NAME_CHARACTERS_MAX],
            team=team,
            provider="local",
            accelerator=accelerator,
            chips=0,
            hosts=0,
            zones=("local",),
            max=max(service.settings.local_slices, resources.slices),
            spot=bool(resources.spot),
        )
    for pool in wanted.values():
        await service.found_fitting(service.controller.commands.put_pool(pool))


def _holds(pool: Pool, spec: JobSpec) -> bool:
    resources = spec.resources
    return (
        pool.accelerator in resources.accelerators
        and resources.spot in (None, pool.spot)
        and pool.max >= resources.slices
    )
