"""A store under test: the same few calls whichever database it is on.

Tests are plain functions; `transact` and `read` run the store's coroutines on a loop of the harness's own. `link` is a
second connection behind the store's back, for what the port cannot ask.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from penstock.ports.store import Store
from penstock.store.doctor import Finding, examine
from penstock.store.inline import InlineStore
from penstock.store.link import Link
from penstock.store.postgres import PostgresLink, PostgresStore
from penstock.store.sqlite import SqliteLink, SqliteStore

T = TypeVar("T")


class HandClock:
    """`now` is what the test sets; `steady` is real, because threads wait in real time."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def steady(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Harness:
    def __init__(self, kind: str, address: str) -> None:
        self.kind = kind
        self.address = address
        self.clock = HandClock()
        self._runner = asyncio.Runner()
        self.store: Store = self.another()
        self._opened = [self.store]

    def another(self) -> Store:
        """One more store on the same data, as a second process would open it."""
        if self.kind == "postgres":
            return PostgresStore.open(self.address, self.clock)
        if self.kind == "sqlite-thread":
            return SqliteStore.open(self.address, self.clock)
        return SqliteStore.inline(self.clock, self.address)

    def open_another(self) -> Store:
        store = self.another()
        self._opened.append(store)
        return store

    @property
    def threaded(self) -> bool:
        return self.kind != "sqlite-inline"

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def transact(self, verb: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return self.run(self.store.transact(verb, *args, **kwargs))

    def read(self, query: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return self.run(self.store.read(query, *args, **kwargs))

    def link(self) -> Link:
        if self.kind == "postgres":
            return PostgresLink(self.address)
        if self.address == ":memory:":
            assert isinstance(self.store, InlineStore)
            return self.store._core.link
        return SqliteLink(self.address)

    def raw(self, sql: str) -> None:
        """Run SQL that no verb would."""
        link = self.link()
        try:
            link.begin()
            link.script(sql)
            link.commit(None)
        finally:
            link.rollback()
            if self.address != ":memory:":
                link.close()

    def doctor(self) -> list[Finding]:
        link = self.link()
        if self.address == ":memory:":
            return examine(link)
        with closing(link):
            return examine(link)

    def troubles(self) -> list[str]:
        return [f"{finding.check}: {text}" for finding in self.doctor() for text in finding.troubles]

    def close(self) -> None:
        for store in self._opened:
            self.run(store.close())
        self._runner.close()


def sqlite_file(folder: Path) -> str:
    return str(folder / "store.db")
