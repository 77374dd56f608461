"""The stores the suite runs on: SQLite inline, SQLite with threads, PostgreSQL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import sql

from tests.contract.store.harness import Harness, sqlite_file

_EVERY = [
    pytest.param("sqlite-inline"),
    pytest.param("sqlite-thread"),
    pytest.param("postgres", marks=pytest.mark.postgres),
]


_schemas = count()


@pytest.fixture(scope="session")
def shared_database(postgres_server: str) -> Iterator[str]:
    """One database for all tests that are content with a schema of their own: making one takes a second."""
    name = f"contract_{os.getpid()}"
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    yield urlunsplit(urlsplit(postgres_server)._replace(path=f"/{name}"))
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def _own_schema(database: str) -> str:
    name = f"test_{next(_schemas)}"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(sql.SQL("create schema {}").format(sql.Identifier(name)))
    return f"{database}{'&' if '?' in database else '?'}options=-csearch_path%3D{name}"


def _harness(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Harness]:
    if kind == "postgres":
        address = _own_schema(request.getfixturevalue("shared_database"))
    else:
        address = ":memory:" if kind == "sqlite-inline" else sqlite_file(tmp_path)
    harness = Harness(kind, address)
    yield harness
    harness.close()


@pytest.fixture(params=_EVERY)
def on(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """Each store in turn."""
    yield from _harness(request.param, tmp_path, request)


@pytest.fixture(params=_EVERY[1:])
def threaded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """Each store with a writer thread in turn."""
    yield from _harness(request.param, tmp_path, request)


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[Harness]:
    """PostgreSQL with a whole database, for tests that cut its connections."""
    harness = Harness("postgres", postgres_url)
    yield harness
    harness.close()
