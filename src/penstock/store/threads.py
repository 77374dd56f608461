"""The executor of servers: one writer thread with group commit, a few reader threads.

`sqlite.py` and `postgres.py` make it with their links. All verbs that wait when the writer comes round share
one commit, so a slow disk costs one sync for many callers; each verb's failure is its own, and a failed
commit is everyone's. Nobody is told of success before it is durable. It must not run a verb twice: what was
sent and not answered is `UnknownOutcome`, and the caller reads before trying again.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from penstock.ports.clock import Clock
from penstock.ports.store import Reader, StoreError, Transaction, Unavailable, UnknownOutcome
from penstock.store.link import Link
from penstock.store.reading import RowReader
from penstock.store.turns import Turns
from penstock.store.wake import Waker

T = TypeVar("T")
P = ParamSpec("P")

READERS: Final = 3  #: reader threads: more would only queue for the interpreter
GROUP_S: Final = 0.010  #: no verb joins a group that is older: the first of it waits for the commit
CALL_S: Final = 30.0  #: the longest a caller waits for an answer; a verb takes milliseconds
CLOSE_S: Final = 15.0  #: the longest `close` waits for what is under way
WAITING_MAX: Final = 50_000  #: calls in the line; beyond it new ones are turned away at once


class _Call:
    """One verb or query, and whom to tell."""

    __slots__ = ("_future", "actor", "args", "epoch", "error", "kwargs", "loop", "result", "started", "verb")

    def __init__(
        self,
        verb: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        actor: str = "",
        epoch: int = 0,
    ) -> None:
        self.verb = verb
        self.args = args
        self.kwargs = kwargs
        self.actor = actor
        self.epoch = epoch
        self.started = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Any] = self.loop.create_future()

    def start(self) -> bool:
        """On the worker's thread: False when the caller has given up, and then it must not run."""
        self.started = True
        return not self._future.cancelled()

    async def answer(self) -> Any:
        limit = asyncio.timeout(CALL_S)
        try:
            async with limit:
                return await self._future
        except TimeoutError:
            if not limit.expired():
                raise  # the verb's own
            # The future is cancelled by now: a call that has not started never will.
            if self.started:
                raise UnknownOutcome(f"the store gave no answer within {CALL_S:g} s") from None
            raise Unavailable(f"the store was busy for {CALL_S:g} s") from None

    def settle(self) -> None:
        """On the loop's thread: hand over what came of it."""
        if self._future.done():
            return
        if self.error is not None:
            self._future.set_exception(self.error)
        else:
            self._future.set_result(self.result)

    @staticmethod
    def tell(calls: list[_Call]) -> None:
        """On the worker's thread: answer all of them, with one wake-up per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Call]] = {}
        for call in calls:
            by_loop.setdefault(call.loop, []).append(call)
        for loop, mine in by_loop.items():
            # A closed loop has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_tell_all, mine)


def _tell_all(calls: list[_Call]) -> None:
    for call in calls:
        call.settle()


class _Stop:
    """The last thing in a worker's line."""


_Line = queue.SimpleQueue[_Call | _Stop]


def _fail(calls: Iterable[_Call], error: StoreError) -> None:
    """The same reason for all, but each its own exception: tracebacks must not grow into each other."""
    for call in calls:
        if call.error is None:
            call.error = type(error)(*error.args)
            call.error.__cause__ = error.__cause__


class _Writer:
    """The thread that writes."""

    def __init__(self, link: Link, clock: Clock, waker: Waker) -> None:
        self._link = link
        self._clock = clock
        self._turns = Turns(link, clock)
        self._waker = waker
        self.line: _Line = queue.SimpleQueue()

    def loop(self) -> None:
        stopping = False
        while not stopping:
            first = self.line.get()
            if isinstance(first, _Stop):
                break
            group = [first]
            try:
                stopping = self._serve(group)
            except Exception as error:  # noqa: BLE001 - a fault of ours; callers must hear of it all the same
                for call in group:
                    call.error = call.error or error
            _Call.tell(group)
        self._link.close()

    def _serve(self, group: list[_Call]) -> bool:
        """Run the first call and those that come meanwhile, and commit once; True when the line has ended."""
        try:
            self._turns.begin()
        except StoreError as error:
            stopping = self._drain(group)
            _fail(group, error)
            self._link.rollback()
            return stopping
        stopping = self._run_all(group)
        try:
            if self._link.in_transaction:
                if self._turns.commit():
                    self._waker.grown_elsewhere(self._turns.seq)
            else:
                _fail(group, Unavailable("the database dropped the transaction; nothing was written"))
        except StoreError as error:
            _fail(group, error)
        finally:
            self._link.rollback()
        return stopping

    def _run_all(self, group: list[_Call]) -> bool:
        until = self._clock.steady() + GROUP_S
        call = group[0]
        while True:
            if call.start():
                self._run(call, grouped=len(group) > 1)
            if not self._link.in_transaction or self._clock.steady() > until:
                return False
            try:
                following = self.line.get_nowait()
            except queue.Empty:
                return False
            if isinstance(following, _Stop):
                return True
            call = following
            group.append(call)

    def _run(self, call: _Call, *, grouped: bool) -> None:
        try:
            call.result = self._turns.run(call.actor, call.epoch, grouped, call.verb, call.args, call.kwargs)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
            call.error = error
            if not grouped:
                # The first of a group has no mark to return to; it is alone so far.
                self._link.rollback()

    def _drain(self, group: list[_Call]) -> bool:
        """Everybody who waits shares the bad news: asking again for each would take a time-out each."""
        while True:
            try:
                call = self.line.get_nowait()
            except queue.Empty:
                return False
            if isinstance(call, _Stop):
                return True
            group.append(call)


def _read_loop(link: Link, line: _Line) -> None:
    while not isinstance(call := line.get(), _Stop):
        if not call.start():
            continue
        try:
            link.begin_reading()
            call.result = call.verb(RowReader(link), *call.args, **call.kwargs)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
            call.error = error
        finally:
            link.rollback()
        _Call.tell([call])
        del call
    link.close()


class _Workers:
    """The threads and their lines, shared by all bound views of one store."""

    def __init__(
        self,
        writer: Link,
        readers: list[Link],
        clock: Clock,
        waker: Waker,
        on_close: Callable[[], None] | None,
    ) -> None:
        self.waker = waker
        self._on_close = on_close
        self.open = True
        self._writer = _Writer(writer, clock, waker)
        self.writing = self._writer.line
        self.reading: _Line = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._writer.loop, name="store-writer", daemon=True)]
        self._threads += [
            threading.Thread(target=_read_loop, args=(link, self.reading), name=f"store-reader-{number}", daemon=True)
            for number, link in enumerate(readers)
        ]
        for thread in self._threads:
            thread.start()

    async def stop(self) -> None:
        self.open = False
        self.writing.put(_Stop())
        for _ in self._threads[1:]:
            self.reading.put(_Stop())
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        def watch() -> None:
            if self._on_close is not None:
                self._on_close()
            for thread in self._threads:
                thread.join(CLOSE_S)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end)

        threading.Thread(target=watch, name="store-close", daemon=True).start()
        await ended


class ThreadedStore:
    """A store whose verbs run on threads of their own."""

    def __init__(self, workers: _Workers, *, actor: str = "system", epoch: int = 0) -> None:
        self._workers = workers
        self._actor = actor
        self._epoch = epoch

    @classmethod
    def over(
        cls,
        writer: Link,
        readers: list[Link],
        clock: Clock,
        waker: Waker,
        on_close: Callable[[], None] | None = None,
    ) -> Self:
        """A store over links that nobody else uses; `on_close` may wait."""
        return cls(_Workers(writer, readers, clock, waker, on_close))

    def _put(self, line: _Line, call: _Call) -> None:
        if not self._workers.open:
            raise Unavailable("the store is closed")
        if line.qsize() >= WAITING_MAX:
            raise Unavailable(f"{WAITING_MAX} calls wait for the store already")
        line.put(call)

    async def transact(self, verb: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        call = _Call(verb, args, kwargs, self._actor, self._epoch)
        self._put(self._workers.writing, call)
        result: T = await call.answer()
        return result

    async def read(self, query: Callable[Concatenate[Reader, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        call = _Call(query, args, kwargs)
        self._put(self._workers.reading, call)
        result: T = await call.answer()
        return result

    def bound(self, *, actor: str, epoch: int = 0) -> ThreadedStore:
        return ThreadedStore(self._workers, actor=actor, epoch=epoch)

    async def wait(self, after: int, timeout_s: float) -> None:
        await self._workers.waker.wait(after, timeout_s)

    async def close(self) -> None:
        if self._workers.open:
            await self._workers.stop()
