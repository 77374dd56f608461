"""What every test shares: how hypothesis searches, and where a test gets a PostgreSQL database.

Read by pytest; other modules must not import it. It decides one thing: a test that needs PostgreSQL where
none is to be had skips with the reason, except in CI (`CI=true`), where it fails, so that green never
means unseen.
"""

import os
from collections.abc import Iterator
from itertools import count
from urllib.parse import urlsplit, urlunsplit

import pytest
from hypothesis import settings

from tests.missing import missing

# `ci` is the default: the same examples on every run. `HYPOTHESIS_PROFILE=explore` looks for new ones.
settings.register_profile("ci", derandomize=True, database=None, deadline=None, print_blob=True)
settings.register_profile("explore", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

_database_numbers = count()


@pytest.fixture(scope="session")
def postgres_server() -> str:
    """Address of the server's own database, as `tools/with_postgres` gives it."""
    address = os.environ.get("PENSTOCK_TEST_POSTGRES")
    if not address:
        unset = "PENSTOCK_TEST_POSTGRES is not set; run `make test` or tools/with_postgres"
        missing(f"PostgreSQL: {os.environ.get('PENSTOCK_TEST_POSTGRES_MISSING', unset)}")
    return address


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """Address of an empty database of this test's own: channels and advisory locks are per database."""
    import psycopg
    from psycopg import sql

    name = f"test_{os.getpid()}_{next(_database_numbers)}"
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    yield urlunsplit(urlsplit(postgres_server)._replace(path=f"/{name}"))
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
