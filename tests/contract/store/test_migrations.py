"""Migrations: up from the first schema with data inside, all or nothing, and never by a file that was changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.domain.nouns import Quota, untried
from penstock.ports.store import StoreError, Unavailable
from penstock.store.doctor import examine
from penstock.store.inline import InlineCore, InlineStore
from penstock.store.link import Link
from penstock.store.migrate import Migration, SchemaMismatch, migrate, migrations, missing
from penstock.store.postgres import PostgresLink
from penstock.store.reading import RowReader
from penstock.store.sqlite import SqliteLink
from tests.contract.store.examples import PAYLOAD, a_job, a_pool, submit
from tests.contract.store.harness import HandClock, sqlite_file

CLOCK = HandClock()
FIRST_DATA = Path(__file__).with_name("first_schema_data.sql")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Link]]:
    """Opens links to one empty database."""
    opened: list[Link] = []
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else sqlite_file(tmp_path)

    def open_link() -> Link:
        link: Link = PostgresLink(url) if request.param == "postgres" else SqliteLink(url)
        opened.append(link)
        return link

    yield open_link
    for link in opened:
        link.close()


def later(number: int, sql: str) -> Migration:
    return Migration(number, f"{number:04}_later", sql, f"checksum of {sql}")


def test_a_store_of_the_first_schema_comes_up_with_its_data(opener: Callable[[], Link]) -> None:
    link = opener()
    known = migrations(link.dialect)
    migrate(link, CLOCK, known[:1])
    link.begin()
    link.script(FIRST_DATA.read_text())
    link.commit(None)
    assert [one.number for one in migrate(link, CLOCK)] == [one.number for one in known[1:]]
    assert [(finding.check, finding.troubles) for finding in examine(link) if not finding.ok] == []
    reader = RowReader(link)
    job = reader.job("j0001")
    assert job is not None
    assert (job.spec.payload, job.key, job.state, job.chains[0].live) == (PAYLOAD, "k1", "provisioning", True)
    assert [one.id for one in reader.heads(["main"], 9)["main"]] == ["j0002"]
    assert [one.id for one in reader.live_attempts()] == ["a0001"]
    assert [one.id for one in reader.live_slices()] == ["s0001", "s0002"]
    assert reader.dependants("j0001") == ["j0003"]
    assert reader.quota("team", "red") == Quota(scope="team", name="red", limit_chips=64, used_chips=16, version=1)
    assert reader.control().maintenance
    (zone,) = reader.zones()
    assert (zone.id, zone.bought) == ("fake/zone-a/v5litepod-8/spot", "spot"), "it knew no other kinds"
    assert reader.zone(untried(replace(a_pool(), spot=True), "zone-a").id) == zone
    assert len(reader.events(0, 999)) == reader.last_seq() == 25
    store = InlineStore(InlineCore(link, CLOCK))
    asyncio.run(store.transact(submit, a_job(9)))
    assert reader.last_seq() == 26


def test_migrations_run_once_and_in_order(opener: Callable[[], Link]) -> None:
    link = opener()
    known = [
        *migrations(link.dialect),
        later(9001, "create table extra (a text)"),
        later(9002, "insert into extra values ('x')"),
    ]
    assert [one.number for one in migrate(link, CLOCK, known)] == [one.number for one in known]
    assert migrate(link, CLOCK, known) == []
    assert link.rows("select a from extra") == [("x",)]
    assert missing(link, known) == []


def test_a_failing_migration_leaves_nothing_and_can_be_run_again(opener: Callable[[], Link]) -> None:
    link = opener()
    known = migrations(link.dialect)
    migrate(link, CLOCK)
    bad = later(9001, "create table half (a text); insert into nowhere values (1)")
    with pytest.raises(StoreError):
        migrate(link, CLOCK, [*known, bad])
    with pytest.raises(StoreError):
        link.rows("select * from half")
    good = later(9001, "create table half (a text)")
    assert migrate(link, CLOCK, [*known, good]) == [good]


def test_a_migration_that_was_changed_after_it_ran_is_refused(opener: Callable[[], Link]) -> None:
    link = opener()
    known = migrations(link.dialect)
    migrate(link, CLOCK)
    with pytest.raises(SchemaMismatch, match="was changed after it ran"):
        migrate(link, CLOCK, [replace(known[0], checksum="other"), *known[1:]])


def test_a_store_of_a_newer_release_is_refused(opener: Callable[[], Link]) -> None:
    link = opener()
    migrate(link, CLOCK, [*migrations(link.dialect), later(9001, "create table extra (a text)")])
    with pytest.raises(SchemaMismatch, match="9001_later"):
        migrate(link, CLOCK)
    schema = examine(link)[0]
    assert not schema.ok
    assert "9001_later" in schema.troubles[0]


def test_processes_that_open_an_empty_store_at_once_migrate_it_once(opener: Callable[[], Link]) -> None:
    ran: list[Migration] = []

    def open_it() -> None:
        ran.extend(migrate(opener(), CLOCK))

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Who ran which is chance, and who tells of it first as well.
    assert sorted(one.number for one in ran) == [one.number for one in migrations(opener().dialect)]


def test_the_doctor_says_what_is_missing(opener: Callable[[], Link]) -> None:
    link = opener()
    (schema,) = examine(link)
    assert not schema.ok
    assert "migrations" in schema.troubles[0]
    with pytest.raises(Unavailable):
        link.rows("select 1 from jobs")
