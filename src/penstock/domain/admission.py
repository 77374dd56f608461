"""Checks what users ask for before it becomes a noun: every refusal names field, value, rule and what to do.

Called by `controller.commands` for each submit, pool and queue. Pure. It must not look at what exists (a missing queue
is the verb's business); it only knows what can never be right.
"""

from __future__ import annotations

import hashlib
import math

import msgspec
from typing_extensions import override

from penstock.domain import catalogue, limits
from penstock.domain.budgets import LIMIT_MAX
from penstock.domain.nouns import JobSpec, Pool, Queue, Snippet
from penstock.domain.policies import PRESETS

_ENCODER = msgspec.json.Encoder(order="deterministic")


class BadInput(ValueError):
    """One line for people: field, value, rule, what to do."""

    def __init__(self, field: str, value: object, rule: str, fix: str = "") -> None:
        shown = repr(value)
        if len(shown) > 60:
            shown = shown[:57] + "…"
        super().__init__(f"{field}: {shown} {rule}" + (f"; {fix}" if fix else ""))
        self.field = field

    @override
    def __reduce__(self) -> tuple[object, ...]:
        # By its line: the value may be of any kind, and what another process raises comes back whole.
        return _bad_input, (type(self), str(self), self.field)


def _bad_input(kind: type[BadInput], line: str, field: str) -> BadInput:
    found = kind.__new__(kind, line)
    found.field = field
    return found


def body_hash(spec: JobSpec) -> str:
    """The identity of a spec: the same key with another hash is a conflict."""
    body = _ENCODER.encode(spec)
    if spec.member is None:
        # Left out, so that a key of before there were members still finds its job.
        body = body.removesuffix(b',"member":null}') + b"}"
    return hashlib.sha256(body).hexdigest()


def check_name(field: str, value: str, *, empty: bool = False) -> None:
    """Names may hold any printable text: they are never paths, shell words or SQL. Control characters are refused."""
    if not value and not empty:
        raise BadInput(field, value, "is empty", "give a name")
    if len(value) > limits.NAME_CHARACTERS_MAX:
        raise BadInput(field, value, f"is longer than {limits.NAME_CHARACTERS_MAX} characters", "shorten it")
    if not value.isprintable() and value:
        raise BadInput(field, value, "has control or invisible characters", "remove them")


def check_number(field: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise BadInput(field, value, f"is not between {low:g} and {high:g}")


def _accelerator(field: str, value: str) -> catalogue.Accelerator:
    try:
        return catalogue.find(value)
    except catalogue.UnknownAccelerator as error:
        raise BadInput(field, value, f"is not a known accelerator: {error}") from error


def check_outputs(outputs: tuple[str, ...]) -> None:
    """Outputs become parts of object paths: plain relative names only."""
    if len(set(outputs)) != len(outputs):
        raise BadInput("outputs", outputs, "names an output twice")
    for name in outputs:
        check_name("outputs", name)
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise BadInput("outputs", name, "is not a plain relative name", "use a name such as metrics/loss.json")


def normal_spec(spec: JobSpec) -> JobSpec:
    """The checked spec with canonical accelerator names and their chips."""
    check_name("team", spec.team)
    check_name("queue", spec.queue)
    check_name("name", spec.name, empty=True)
    check_name("user", spec.user, empty=True)
    check_number("priority", spec.priority, -limits.PRIORITY_MAX, limits.PRIORITY_MAX)
    check_number("timeout_s", spec.timeout_s, 1, limits.TIMEOUT_S_MAX)
    if spec.expected_s is not None:
        check_number("expected_s", spec.expected_s, 0, spec.timeout_s)
    check_number("resources.slices", spec.resources.slices, 1, limits.GANG_SLICES_MAX)
    check_number("replicas.max", spec.replicas.max, 1, limits.REPLICAS_MAX)
    check_number("replicas.min", spec.replicas.min, 1, spec.replicas.max)
    check_number("rule.failure_budget", spec.rule.failure_budget, 0, 10_000)
    check_number("rule.infra_budget", spec.rule.infra_budget, 0, 10_000)
    if spec.rule.preset not in PRESETS:
        raise BadInput("rule.preset", spec.rule.preset, f"is not one of {', '.join(sorted(PRESETS))}")
    if len(spec.tags) > limits.TAGS_MAX:
        raise BadInput("tags", len(spec.tags), f"tags are more than {limits.TAGS_MAX}")
    for tag in spec.tags:
        check_name("tags", tag)
    if spec.member is not None:
        check_name("array", spec.member.array)
        if spec.member.at_most is not None:
            check_number("at_most", spec.member.at_most, 1, limits.ARRAY_MEMBERS_MAX)
    check_outputs(spec.outputs)
    if isinstance(spec.payload, Snippet) and len(spec.payload.code.encode()) > limits.CODE_BYTES_MAX:
        raise BadInput("payload.code", f"{len(spec.payload.code)} characters", "is over 1 MiB", "use a snapshot")
    if not spec.resources.accelerators:
        raise BadInput("resources.accelerators", (), "is empty", "name one, such as v5e-8")
    found = [_accelerator("resources.accelerators", name) for name in spec.resources.accelerators]
    resources = msgspec.structs.replace(
        spec.resources, accelerators=tuple(row.name for row in found), chips=found[0].chips
    )
    return msgspec.structs.replace(spec, resources=resources)


def normal_pool(pool: Pool) -> Pool:
    """The checked pool with its accelerator's canonical name, chips and hosts."""
    check_name("name", pool.name)
    check_name("team", pool.team)
    check_number("max", pool.max, 0, limits.POOL_SLICES_MAX)
    check_number("min", pool.min, 0, pool.max)
    check_number("idle_s", pool.idle_s, 0, 365 * 24 * 3600)
    check_number("race", pool.race, 1, limits.RACE_ZONES_MAX)
    if not pool.zones:
        raise BadInput("zones", pool.zones, "is empty", "name at least one zone")
    if len(set(pool.zones)) != len(pool.zones):
        raise BadInput("zones", pool.zones, "names a zone twice")
    if pool.per_zone is not None:
        check_number("per_zone", pool.per_zone, 0, pool.max)
        if pool.per_zone * len(pool.zones) > pool.max:
            raise BadInput("per_zone", pool.per_zone, f"in {len(pool.zones)} zones is more than max {pool.max}")
    row = _accelerator("accelerator", pool.accelerator)
    return msgspec.structs.replace(
        pool,
        accelerator=row.name,
        chips=row.chips,
        hosts=row.hosts,
        usd_per_chip_hour=row.usd_per_chip_hour_spot if pool.spot else row.usd_per_chip_hour,
    )


def check_queue(queue: Queue) -> None:
    check_name("name", queue.name)
    check_name("team", queue.team)
    check_number("weight", queue.weight, 0.001, 1e6)
    check_number("band", queue.band, -100, 100)
    for field, value in (("quota_chips", queue.quota_chips), ("borrow_chips", queue.borrow_chips)):
        if value is not None:
            check_number(field, value, 0, 10_000_000)
    if queue.budget is not None:
        check_number("budget.limit", queue.budget.limit, 0, LIMIT_MAX)
