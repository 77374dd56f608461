"""Any noun goes through the wire and through both stores and comes back the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect
from msgspec.structs import replace

from penstock.domain.lifecycle import AttemptState, JobState, SliceState
from penstock.domain.nouns import Attempt, Job, Pool, Queue, Quota, Slice, Team, Zone
from penstock.ports.store import Reader, Transaction
from penstock.store import rows
from tests.contract.store.examples import light
from tests.contract.store.harness import Harness, sqlite_file

# PostgreSQL holds no NUL in a column; names with one are refused at the door.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
ANY_TEXT = st.text(st.characters(codec="utf-8"))
WHOLE = st.integers(1, 2**31 - 2)
REAL = st.floats(allow_nan=False, allow_infinity=False)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | REAL | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field, by what msgspec says of its type: a new field is covered the day it is added."""
    match kind:
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return WHOLE
        case inspect.FloatType():
            return REAL
        case inspect.StrType():
            return TEXTS
        case inspect.CustomType(cls=cls) if cls is object:
            return ANYTHING
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=3).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: values(field.type) for field in fields})
        case _:
            raise AssertionError(f"no values for {kind}")


def nouns(noun: type[Any]) -> st.SearchStrategy[Any]:
    return values(inspect.type_info(noun))


@pytest.mark.parametrize("noun", [Job, Attempt, Slice, Pool, Queue, Team, Zone, Quota])
def test_the_wire_keeps_every_noun(noun: type[Any]) -> None:
    @given(nouns(noun))
    def check(one: Any) -> None:
        assert msgspec.json.decode(msgspec.json.encode(one), type=noun) == one

    check()


@given(nouns(Job))
def test_a_job_in_any_state_survives_being_split_into_columns(job: Job) -> None:
    row = rows.JOBS.row(job)
    spec, payload, rest = map(str, row[14:])
    assert rows.whole_job(payload, spec, rest) == job
    assert rows.light_job(spec, rest) == light(job)
    assert rows.light_job(spec, rows.rest_text(job)) == light(job)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """One store for all examples: each writes under a number of its own."""
    if request.param == "postgres":
        harness = Harness("postgres", request.getfixturevalue("postgres_url"))
    else:
        harness = Harness("sqlite-thread", sqlite_file(tmp_path))
    yield harness
    harness.close()


def write(tx: Transaction, job: Job, attempt: Attempt, one: Slice, pool: Pool, queue: Queue, zone: Zone) -> list[Any]:
    return [
        tx.add(job, "job.created", body={"reason": job.reason, "tags": list(job.tags)}),
        tx.add(attempt, "attempt.created"),
        tx.add(one, "slice.intended"),
        tx.add(pool, "pool.created"),
        tx.add(queue, "queue.created"),
        tx.add(zone, "zone.seen"),
    ]


def look(r: Reader, job: Job, attempt: Attempt, one: Slice, pool: Pool, queue: Queue, zone: Zone) -> list[Any]:
    return [
        r.job(job.id),
        r.attempt(attempt.id),
        r.slice(one.id),
        r.pool(pool.name),
        r.queue(queue.name),
        r.zone(zone.id),
    ]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    job=nouns(Job),
    attempt=nouns(Attempt),
    one=nouns(Slice),
    pool=nouns(Pool),
    queue=nouns(Queue),
    zone=nouns(Zone),
)
def test_the_store_keeps_every_noun(
    store: Harness, job: Job, attempt: Attempt, one: Slice, pool: Pool, queue: Queue, zone: Zone
) -> None:
    number = store.read(lambda r: r.last_seq())
    given_ = (
        replace(job, id=f"j{number}", state=JobState.QUEUED, key=None if job.key is None else f"{job.key}{number}"),
        replace(attempt, id=f"a{number}", job=f"j{number}", state=AttemptState.ASSIGNED),
        replace(one, id=f"s{number}", state=SliceState.INTENDED),
        replace(pool, name=f"p{number}"),
        replace(queue, name=f"q{number}"),
        replace(zone, zone=f"z{number}"),
    )
    written = store.transact(write, *given_)
    assert written == [replace(noun, version=1) for noun in given_]
    assert store.read(look, *given_) == written
    (event,) = store.read(lambda r: r.events_of("job", f"j{number}"))
    assert event.body == {"reason": job.reason, "tags": list(job.tags)}
