"""PostgreSQL shared by several processes, lost in the middle of things, and back again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import psycopg
import pytest
from msgspec.structs import replace

from penstock.domain.nouns import Job
from penstock.ports.store import Store, Transaction, Unavailable, UnknownOutcome
from penstock.store import postgres as postgres_module
from penstock.store.postgres import PostgresLink, PostgresStore
from penstock.store.threads import READERS
from tests.contract.store.examples import a_job, submit
from tests.contract.store.harness import HandClock, Harness
from tests.contract.store.test_group_commit import Gate

pytestmark = pytest.mark.postgres


@pytest.fixture
def server(postgres_server: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A connection from outside the database under test."""
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        yield connection


def database(on: Harness) -> str:
    return str(urlsplit(on.address).path[1:])


def cut(server: psycopg.Connection[tuple[object, ...]], name: str) -> None:
    """End every connection to one database, as a failing network or a restarted server would."""
    server.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,))


def bump(tx: Transaction) -> int:
    (job,) = tx.jobs(["j0001"])
    return tx.save(replace(job, priority=job.priority + 1), "job.edited").priority


def submit_once(tx: Transaction, number: int, key: str) -> Job:
    return tx.job_by_key("red", key) or submit(tx, a_job(number, key=key))[0]


def test_two_writers_take_turns(postgres: Harness) -> None:
    async def story(stores: list[Store]) -> list[int]:
        return await asyncio.gather(*(stores[n % 2].transact(bump) for n in range(200)))

    postgres.transact(submit, a_job(1))
    values = postgres.run(story([postgres.store, postgres.open_another()]))
    assert sorted(values) == list(range(1, 201))
    events = postgres.read(lambda r: r.events(0, 999))
    assert [event.seq for event in events] == list(range(1, 202))
    assert [event.version for event in events] == list(range(1, 202))
    assert postgres.troubles() == []


def test_two_writers_agree_on_one_job_per_key(postgres: Harness) -> None:
    async def story(stores: list[Store]) -> list[Job]:
        return await asyncio.gather(*(stores[n % 2].transact(submit_once, n, f"key {n // 4}") for n in range(80)))

    jobs = postgres.run(story([postgres.store, postgres.open_another()]))
    assert len({job.id for job in jobs}) == 20
    for start in range(0, 80, 4):
        assert len({job.id for job in jobs[start : start + 4]}) == 1


def test_one_of_two_candidates_leads_and_the_other_is_stale(postgres: Harness) -> None:
    async def story(one: Store, two: Store) -> list[int]:
        elected = await asyncio.gather(
            one.transact(lambda tx: tx.elect("one")), two.transact(lambda tx: tx.elect("two"))
        )
        return sorted(leader.epoch for leader in elected)

    assert postgres.run(story(postgres.store, postgres.open_another())) == [1, 2]


def test_a_connection_lost_inside_a_verb_writes_nothing_and_the_next_call_works(
    postgres: Harness, server: psycopg.Connection[tuple[object, ...]]
) -> None:
    name = database(postgres)

    async def story() -> None:
        gate = Gate()

        def verb(tx: Transaction) -> None:
            submit(tx, a_job(1))
            tx.live_jobs()
            gate(tx)
            tx.live_jobs()

        lost = asyncio.create_task(postgres.store.transact(verb))
        await asyncio.to_thread(gate.entered.wait, 10.0)
        cut(server, name)
        gate.open()
        with pytest.raises(Unavailable):
            await lost
        await postgres.store.transact(submit, a_job(2))

    postgres.run(story())
    assert [event.id for event in postgres.read(lambda r: r.events(0, 9))] == ["j0002"]


def test_everyone_in_a_lost_group_is_told(
    postgres: Harness, server: psycopg.Connection[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.threads.GROUP_S", 60.0)
    name = database(postgres)

    async def story() -> list[object]:
        gates = [Gate(), Gate()]
        calls: list[asyncio.Task[object]] = [asyncio.create_task(postgres.store.transact(gates[0]))]
        await asyncio.to_thread(gates[0].entered.wait, 10.0)
        calls += [asyncio.create_task(postgres.store.transact(submit, a_job(n))) for n in range(3)]
        calls.append(asyncio.create_task(postgres.store.transact(gates[1])))
        await asyncio.sleep(0)
        gates[0].open()
        await asyncio.to_thread(gates[1].entered.wait, 10.0)
        cut(server, name)
        gates[1].open()
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = postgres.run(story())
    # The commit was sent into a dead connection: nobody can say from this side that it did not arrive.
    assert {type(outcome) for outcome in outcomes} <= {Unavailable, UnknownOutcome}
    assert postgres.read(lambda r: r.last_seq()) == 0


def test_a_connection_lost_during_commit_is_an_unknown_outcome(postgres: Harness) -> None:
    postgres.raw(
        """create function die() returns trigger language plpgsql as $$
        begin perform pg_terminate_backend(pg_backend_pid()); return null; end $$;
        create constraint trigger die after insert on events deferrable initially deferred
        for each row when (new.id = 'j0001') execute function die();"""
    )
    with pytest.raises(UnknownOutcome):
        postgres.transact(submit, a_job(1))
    postgres.transact(submit, a_job(2))
    assert [event.id for event in postgres.read(lambda r: r.events(0, 9))] == ["j0002"]


def test_idle_connections_are_replaced(postgres: Harness, server: psycopg.Connection[tuple[object, ...]]) -> None:
    postgres.transact(submit, a_job(1))
    cut(server, database(postgres))
    # A connection that died while nobody used it costs nobody an error.
    assert [postgres.read(lambda r: r.last_seq()) for _ in range(2 * READERS)] == [1] * (2 * READERS)
    postgres.transact(submit, a_job(2))


def test_calls_fail_while_the_server_is_away_and_work_when_it_is_back(
    postgres: Harness, server: psycopg.Connection[tuple[object, ...]]
) -> None:
    name = database(postgres)
    server.execute(f'alter database "{name}" allow_connections false')
    cut(server, name)
    for number in range(3):
        with pytest.raises(Unavailable):
            postgres.transact(submit, a_job(number))
    with pytest.raises(Unavailable, match="cannot be reached"):
        PostgresStore.open(postgres.address, HandClock())
    server.execute(f'alter database "{name}" allow_connections true')
    postgres.transact(submit, a_job(7))
    assert [event.id for event in postgres.read(lambda r: r.events(0, 9))] == ["j0007"]


def test_the_listener_comes_back(
    postgres: Harness, server: psycopg.Connection[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        await other.wait(0, 20.0)

    monkeypatch.setattr(postgres_module, "RECONNECT_S", 0.05)
    other = postgres.open_another()
    cut(server, database(postgres))
    postgres.transact(submit, a_job(1))
    started = time.monotonic()
    postgres.run(story())
    assert time.monotonic() - started < 10.0


def test_a_writer_that_keeps_the_lock_makes_others_unavailable(
    postgres: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = postgres_module._SETTINGS.replace(f"'{postgres_module.LOCK_S}s'", "'100ms'")
    assert "100ms" in settings
    monkeypatch.setattr(postgres_module, "_SETTINGS", settings)
    impatient = postgres.open_another()
    holder = PostgresLink(postgres.address)
    holder.begin()
    with pytest.raises(Unavailable):
        postgres.run(impatient.transact(submit, a_job(1)))
    holder.rollback()
    holder.close()
    postgres.run(impatient.transact(submit, a_job(1)))


def test_installations_in_two_schemas_of_one_database_are_apart(postgres: Harness) -> None:
    postgres.raw("create schema other")
    there = f"{postgres.address}&options=-csearch_path%3Dother"
    second = PostgresStore.open(there, HandClock())
    holder = PostgresLink(postgres.address)
    holder.begin()  # the first installation's lock
    postgres.run(second.transact(submit, a_job(1)))
    holder.rollback()
    holder.close()
    assert postgres.run(second.read(lambda r: r.last_seq())) == 1
    assert postgres.read(lambda r: r.last_seq()) == 0
    postgres.run(second.close())
    with pytest.raises(Unavailable, match="search_path"):
        PostgresStore.open(f"{postgres.address}&options=-csearch_path%3Dnowhere", HandClock())
