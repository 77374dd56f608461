"""Every limit and interval of the control plane, with its unit and its reason.

Read by all folders. A number that bounds anything belongs here, not beside its use, so that an operator can find
and question it in one place (`tpu rules --limits` prints this table).
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

N = TypeVar("N", int, float)


class Limit(msgspec.Struct, frozen=True):
    """One row of the table: a number, what it counts, and why it is what it is."""

    name: str
    value: int | float
    unit: str
    reason: str


_rows: list[Limit] = []


def _limit(name: str, value: N, unit: str, reason: str) -> N:
    """Put a number into the table and hand it back, so that code reads a plain constant."""
    _rows.append(Limit(name, value, unit, reason))
    return value


# --- the loop, in seconds ---
TICK_S: Final = _limit("TICK_S", 5.0, "s", "the longest a decision waits when no event wakes the loop earlier")
TICK_LEAST_S: Final = _limit(
    "TICK_LEAST_S", 0.005, "s", "between two ticks: a burst is planned together, and a stale read cannot spin the loop"
)
LEADER_TTL_S: Final = _limit(
    "LEADER_TTL_S", 8.0, "s", "a dead leader is replaced within this plus one poll: at most 10 s"
)
LEADER_RENEW_S: Final = _limit(
    "LEADER_RENEW_S", 2.0, "s", "four renewals fit in one term, so one lost reply costs nothing"
)

# --- agents: silence and custody are two clocks ---
SYNC_S: Final = _limit("SYNC_S", 5.0, "s", "how often an agent syncs when nothing happens")
SILENCE_S: Final = _limit("SILENCE_S", 15.0, "s", "three missed syncs: the server suspects, and asks the provider")
CUSTODY_S: Final = _limit(
    "CUSTODY_S", 600.0, "s", "an agent that reaches neither server nor bucket this long stops its children"
)
FENCE_POLL_S: Final = _limit("FENCE_POLL_S", 5.0, "s", "how often an agent that lost the server reads its fence object")
FENCE_WAIT_S: Final = _limit(
    "FENCE_WAIT_S", 2 * FENCE_POLL_S + 1.0, "s", "two polls and a margin: then no zombie can still believe"
)
GRACE_S: Final = _limit("GRACE_S", 30.0, "s", "between SIGTERM and SIGKILL, the same as a spot VM's notice")
CANCEL_DEADLINE_S: Final = _limit(
    "CANCEL_DEADLINE_S", 50.0, "s", "after this a cancelled job ends even if nobody confirmed the kill (L3: 60 s)"
)

# --- capacity, in seconds ---
CALL_TIMEOUT_S: Final = _limit("CALL_TIMEOUT_S", 30.0, "s", "no provider call is awaited longer")
LIST_EVERY_S: Final = _limit(
    "LIST_EVERY_S", 30.0, "s", "each zone is listed this often; four times as often while it settles"
)
GONE_LISTINGS_APART_S: Final = _limit(
    "GONE_LISTINGS_APART_S", 60.0, "s", "absence is believed after two complete listings this far apart and a get"
)
CREATE_TIMEOUT_S: Final = _limit("CREATE_TIMEOUT_S", 1800.0, "s", "a slice not ready by then is given up")
JOIN_TIMEOUT_S: Final = _limit(
    "JOIN_TIMEOUT_S", 300.0, "s", "a READY slice whose agents have not all joined by then is broken"
)
TOMBSTONE_S: Final = _limit("TOMBSTONE_S", CREATE_TIMEOUT_S + 900.0, "s", "how long a deleted name stays under sweep")
ORPHAN_S: Final = _limit("ORPHAN_S", 900.0, "s", "an unowned slice with our label is deleted within this")
DELETE_RETRY_S: Final = _limit("DELETE_RETRY_S", 20.0, "s", "a delete that has not taken effect is asked for again")
ZONE_BACKOFF_FIRST_S: Final = _limit(
    "ZONE_BACKOFF_FIRST_S", 15.0, "s", "after one stockout: short, because one unlucky try proves little"
)
ZONE_BACKOFF_MAX_S: Final = _limit("ZONE_BACKOFF_MAX_S", 600.0, "s", "a dry zone is still tried six times an hour")
CREATES_PER_MINUTE: Final = _limit(
    "CREATES_PER_MINUTE", 60, "calls/min", "per provider; the Cloud TPU API allows about 91 per project"
)
CALLS_AT_ONCE: Final = _limit("CALLS_AT_ONCE", 32, "calls", "concurrent provider calls per provider")

# --- jobs ---
BATCH_JOBS_MAX: Final = _limit(
    "BATCH_JOBS_MAX", 10_000, "jobs", "one batch submit; larger ones are split by the client"
)
CODE_BYTES_MAX: Final = _limit("CODE_BYTES_MAX", 1 << 20, "bytes", "a snippet; larger programs belong in a snapshot")
REPLICAS_MAX: Final = _limit(
    "REPLICAS_MAX", 1_000, "replicas", "of one job: beyond this the work wants more jobs, not more copies"
)
GANG_SLICES_MAX: Final = _limit(
    "GANG_SLICES_MAX", 256, "slices", "of one attempt: more than the largest multislice in use"
)
PRIORITY_MAX: Final = _limit("PRIORITY_MAX", 1_000, "steps", "priorities run from minus this to this")
NAME_CHARACTERS_MAX: Final = _limit(
    "NAME_CHARACTERS_MAX",
    128,
    "characters",
    "of names, tags and keys: long enough for people, short enough for an index and a table",
)
TAGS_MAX: Final = _limit("TAGS_MAX", 64, "tags", "of one job: tags are for filters, not for storage")
TIMEOUT_S_MAX: Final = _limit(
    "TIMEOUT_S_MAX", 30 * 24 * 3600.0, "s", "no job may hold a slice longer without being asked again"
)
TIMEOUT_S_DEFAULT: Final = _limit(
    "TIMEOUT_S_DEFAULT",
    7 * 24 * 3600.0,
    "s",
    "longer than most training runs; a forgotten job still ends within a week",
)
FAILURE_BUDGET_DEFAULT: Final = _limit(
    "FAILURE_BUDGET_DEFAULT", 0, "retries", "user failures are not retried unless the user says so"
)
INFRA_BUDGET_DEFAULT: Final = _limit(
    "INFRA_BUDGET_DEFAULT", 100, "retries", "spot jobs are lost often; the breaker, not the budget, stops a poison job"
)
BACKOFF_FIRST_S: Final = _limit(
    "BACKOFF_FIRST_S", 2.0, "s", "the first retry is quick: most losses are not the job's fault"
)
BACKOFF_MAX_S: Final = _limit("BACKOFF_MAX_S", 300.0, "s", "waiting longer than this saves nobody anything")
POISON_LOSSES: Final = _limit(
    "POISON_LOSSES", 8, "losses", "infrastructure losses in a row within their first minute: the job is the cause"
)
POISON_RUN_S: Final = _limit(
    "POISON_RUN_S", 60.0, "s", "a loss within this time of the start is a quick one: the poison breaker counts those"
)
INFEASIBLE_S: Final = _limit(
    "INFEASIBLE_S", 600.0, "s", "a job no pool can ever hold fails after this, so that a pool can still be made"
)
RETENTION_S: Final = _limit("RETENTION_S", 30 * 24 * 3600.0, "s", "terminal jobs may be purged after this")

# --- planning ---
WINDOW_JOBS: Final = _limit("WINDOW_JOBS", 64, "jobs", "jobs at the head of each queue the planner looks at")
SHARE_HALF_LIFE_S: Final = _limit("SHARE_HALF_LIFE_S", 24 * 3600.0, "s", "what a queue used a day ago counts half")
SHARE_CHARGE_S: Final = _limit(
    "SHARE_CHARGE_S", 300.0, "s", "chip-seconds charged at once per chip started, so that one round alternates"
)
ELASTIC_STEP: Final = _limit("ELASTIC_STEP", 64, "replicas", "replicas added to one job in one tick")
RACE_ZONES_MAX: Final = _limit("RACE_ZONES_MAX", 4, "zones", "intents of one racing set")
EVENTS_PER_READ: Final = _limit("EVENTS_PER_READ", 20_000, "events", "the projection catches up in pages of this size")

#: The whole table, in the order above.
LIMITS: Final = tuple(_rows)
