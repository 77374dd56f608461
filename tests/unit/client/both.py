"""Both clients under one set of tests: the async one is called like the sync one, over an event loop of its own.

Tests use the fixtures of `conftest`; only it may import this. A coroutine is run to its end, an async iterator is
walked step by step, everything else is handed through.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

from penstock.client.aio import AsyncClient
from penstock.client.job import AsyncJob


class Blocking:
    """An object of the async API, as if it were the sync one."""

    def __init__(self, runner: asyncio.Runner, inner: Any) -> None:
        self._runner = runner
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            return self._settle(found(*args, **options))

        return call

    def _settle(self, value: Any) -> Any:
        if inspect.iscoroutine(value):
            value = self._runner.run(value)
        if isinstance(value, AsyncJob):
            return Blocking(self._runner, value)
        if isinstance(value, AsyncIterator):
            return self._walk(value)
        return value

    def _walk(self, steps: AsyncIterator[Any]) -> Iterator[Any]:
        async def step() -> tuple[bool, Any]:
            try:
                return True, await anext(steps)
            except StopAsyncIteration:
                return False, None

        try:
            while True:
                more, value = self._runner.run(step())
                if not more:
                    return
                yield value
        finally:
            close = getattr(steps, "aclose", None)
            if close is not None:
                self._runner.run(close())


def blocking(runner: asyncio.Runner, *args: Any, **options: Any) -> Blocking:
    """A new async client, made inside its loop."""

    async def make() -> AsyncClient:
        return AsyncClient(*args, **options)

    return Blocking(runner, runner.run(make()))
