"""Virtual time under asyncio: a loop that never waits but moves its clock to the next timer.

`run` executes a whole simulation in one thread, in the same order each time; a virtual day costs what happens
in it. Nothing real may happen under it: threads, sockets, pipes and signals are refused, because they would
take real time and another order each run. When nothing is left to run and the main coroutine is not done, the
run ends with `Deadlock` instead of hanging.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import selectors
import threading
from collections.abc import Coroutine, Generator
from typing import Any, Never, TypeVar

from typing_extensions import override

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits for something that no timer will ever bring."""


class NotInVirtualTime(RuntimeError):
    """Something asked the virtual loop for a thread, a socket, a pipe or a signal."""


class _Jump(selectors.BaseSelector):
    """Stands where asyncio expects the selector: instead of waiting it moves the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.advance(timeout)
        return []

    @override
    def register(self, fileobj: object, events: int, data: object = None) -> Never:
        _refuse("a socket")

    @override
    def unregister(self, fileobj: object) -> Never:
        _refuse("a socket")

    @override
    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return {}


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time is a number. `turns` counts its rounds: what a simulation costs."""

    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self._now = start
        self._clock_resolution = math.ulp(start)  # two timers are due together only at the very same instant
        self._selector = _Jump(self)
        self._failure: BaseException | None = None
        self._thread = threading.get_ident()
        self._made = 0
        self.turns = 0

    @override
    def time(self) -> float:
        return self._now

    def advance(self, timeout: float | None) -> None:
        """Go to the next timer when nothing is ready now (`timeout` is 0 when something is)."""
        self.turns += 1
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if timeout is None:
            raise Deadlock(f"at {self._now:.3f} s every task waits and no timer is left")
        if timeout > 0:
            self._now = self._scheduled[0].when()
            self._clock_resolution = math.ulp(self._now)

    def fail(self, failure: BaseException) -> None:
        """End the whole run with this error: for tasks that nobody awaits."""
        self._failure = self._failure or failure

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Let an error of `task` end the run."""
        task.add_done_callback(self._watched)

    def _watched(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    @override
    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
        **more: Any,
    ) -> asyncio.Task[T]:
        # The number makes the order of leftovers known: asyncio itself keeps its tasks in a set.
        self._made += 1
        name = f"{self._made} {name}" if name else str(self._made)
        return super().create_task(coro, name=name, context=context, **more)

    def _process_events(self, event_list: list[object]) -> None:
        """asyncio hands over what the selector found: never anything."""

    def _write_to_self(self) -> None:
        if threading.get_ident() != self._thread:
            _refuse("a call from another thread")

    @override
    def run_in_executor(self, executor: object, func: object, *args: object) -> Never:
        _refuse(f"a thread for {func!r}")

    @override
    async def getaddrinfo(self, *args: object, **kwargs: object) -> Never:
        _refuse("a name look-up")

    @override
    async def create_connection(self, *args: object, **kwargs: object) -> Never:
        _refuse("a connection")

    @override
    async def create_server(self, *args: object, **kwargs: object) -> Never:
        _refuse("a listening socket")

    @override
    async def create_datagram_endpoint(self, *args: object, **kwargs: object) -> Never:
        _refuse("a socket")

    @override
    def add_reader(self, fd: object, callback: object, *args: object) -> Never:
        _refuse("a file descriptor to read")

    @override
    def add_writer(self, fd: object, callback: object, *args: object) -> Never:
        _refuse("a file descriptor to write")

    @override
    def add_signal_handler(self, sig: int, callback: object, *args: object) -> Never:
        _refuse("a signal handler")

    @override
    async def subprocess_exec(self, *args: object, **kwargs: object) -> Never:
        _refuse("a process")

    @override
    async def subprocess_shell(self, *args: object, **kwargs: object) -> Never:
        _refuse("a process")


def _refuse(what: str) -> Never:
    raise NotInVirtualTime(f"{what} was asked for under virtual time: use the fake of that port")


def run(main: Coroutine[Any, Any, T], *, start: float = 0.0) -> T:
    """Run `main` to its end in virtual time from `start` on; tasks left over are cancelled, oldest first."""
    loop = VirtualLoop(start)
    try:
        result = loop.run_until_complete(main)
        loop.run_until_complete(_finish(loop))
        return result
    except BaseException:
        # The run has failed with this error; whatever the cancelled leftovers still say cannot matter more.
        with contextlib.suppress(Exception):
            loop.run_until_complete(_finish(loop))
        raise
    finally:
        loop.close()


async def _finish(loop: VirtualLoop) -> None:
    own = asyncio.current_task()
    tasks = sorted(asyncio.all_tasks(loop) - {own}, key=lambda task: int(task.get_name().partition(" ")[0]))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await loop.shutdown_asyncgens()


class VirtualClock:
    """The clock port over the running loop. Changing `skew_s` moves `now`, never `steady`."""

    def __init__(self, *, epoch: float = 1_800_000_000.0, skew_s: float = 0.0) -> None:
        self.epoch = epoch
        self.skew_s = skew_s

    def now(self) -> float:
        return self.epoch + self.skew_s + asyncio.get_running_loop().time()

    def steady(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
