"""A worker: claims a unit, computes it, stores and commits it, and ends when no unit of the run is open.

`tpu extract worker` runs it, under any launcher or as a replica of a Penstock job; it needs the bucket and nothing
else. It claims one unit at a time, when the device has got the last of the work of the one before; what that one still
needs (its last rows, its sync or upload, its commit) happens meanwhile, for one unit at most. The input of the next is
read and tokenised as soon as that of this one was, without a lease. It may be killed at any moment: what it held is
taken over when its lease has run out, and what it stored without a commit counts for nothing. It must keep no state of
its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple, NoReturn

import msgspec

from penstock.domain import ledger
from penstock.domain.ledger import Unit
from penstock.extract.calls import Calls, Stopped
from penstock.extract.claims import Claim, Claims
from penstock.extract.commit import publish
from penstock.extract.layout import Compute, Course, Piece
from penstock.extract.plan import RunPlan
from penstock.extract.seal import Reopened, seal, sweep
from penstock.extract.unit_writer import Hands, UnitWriter
from penstock.ports.objects import ObjectsError

logger = logging.getLogger(__name__)

LEASE_S: Final = 90.0
#: Units that are being stored while the device works on the next: a worker that is lost then costs both. With 0 it
#: costs one at most, and the device waits for each commit.
STORING_MAX: Final = 1
GIVE_BACK_S: Final = 10.0  #: to let go of leases at the end; they run out by themselves
LOOK_S: Final = 5.0  #: how often a worker that found nothing to claim looks again


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run stands, as a worker says it after each unit."""

    open: int
    units: int
    holding: bool = False  #: whether this worker has begun one that is not committed yet
    tokens: int  #: that this worker has committed
    documents: int


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What is one worker's own business: none of it changes what is stored."""

    worker: str
    fence: int = 0
    lease_s: float = LEASE_S
    look_s: float = LOOK_S
    storing_max: int = STORING_MAX
    hands: int | None = None  #: threads that hash and write; None: three of four processors
    read_back: bool = False
    code: str = ""


class _Ready(NamedTuple):
    """A unit's pieces, as far as they are ready before the device works, and how long that took."""

    pieces: Iterable[Piece]
    seconds: float


class Worker:
    """One process on one run."""

    def __init__(
        self,
        calls: Calls,
        plan: RunPlan,
        compute: Compute,
        settings: Settings,
        *,
        rng: random.Random,
        steady: Callable[[], float],
        should_stop: Callable[[], bool] = lambda: False,
        report: Callable[[Standing], None] | None = None,
    ) -> None:
        self._calls = calls
        self._plan = plan
        self._compute = compute
        self._settings = settings
        self._steady = steady
        self._should_stop = should_stop
        self._report = report
        self._claims = Claims(
            calls, plan, settings.worker, fence=settings.fence, lease_s=settings.lease_s, rng=rng, steady=steady
        )
        self._begun: dict[asyncio.Task[None], str] = {}
        self._committing: set[str] = set()  #: units whose commit is under way
        self._leaving: set[asyncio.Task[None]] = set()  #: leases of committed units, on their way out
        #: Of the unit that was begun last: whether its input was read, and whether the device has got all of its work.
        self._read, self._fed = asyncio.Event(), asyncio.Event()
        self._read.set()
        self._fed.set()
        self._hands = Hands(settings.hands)
        self._left = threading.Event()
        self._tokens = 0
        self._documents = 0

    async def work(self) -> None:
        """Until no unit is open and the run is sealed; raises `Stopped` when asked to stop before."""
        keeping = asyncio.create_task(self._claims.keep())
        try:
            await self._until_sealed(keeping)
            await self._tidy()
        except Stopped:
            await self._claims.leave()
            raise
        finally:
            # The thread that computes looks here: an event loop that ends waits for its threads.
            self._left.set()
            tasks = (keeping, *self._begun)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._hands.close()
            await self._give_back()

    async def _tidy(self) -> None:
        """The run is whole: what cannot be removed now is no reason to fail."""
        try:
            await self._claims.leave()
            await asyncio.gather(*self._leaving)
            await sweep(self._calls, self._plan)
        except ObjectsError as error:
            logger.warning("the run is sealed, and what nobody needs any more is left for `tpu extract gc`: %s", error)

    async def _give_back(self) -> None:
        """Let others begin at once what this worker will not finish, whatever ended it.

        Not what may still be on its way to its commit: a thread that was left alone with it does not stop.
        """
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                try:
                    for claim in self._claims.held:
                        if claim.unit.id not in self._committing:
                            await self._claims.release(claim, done=False)
                finally:
                    await asyncio.gather(*self._leaving, return_exceptions=True)
        except (ObjectsError, TimeoutError, Stopped) as error:
            logger.warning("others wait until its leases have run out: %s", error or type(error).__name__)

    async def _until_sealed(self, keeping: asyncio.Task[None]) -> None:
        while True:
            while units := await self._open():
                await self._next(units, keeping)
            await self._settle(0)  # units that others have committed meanwhile: what was stored of them goes
            with contextlib.suppress(Reopened):  # then there is an open unit again
                await seal(self._calls, self._plan)
                return

    async def _open(self) -> tuple[Unit, ...]:
        """Units without a commit that counts, those that this worker has begun included."""
        run = self._plan.run
        names = await self._calls.list(ledger.commits_prefix(run))
        units = ledger.open_units(self._plan, ledger.editions(run, names).committed)
        standing = Standing(
            open=len(units),
            units=len(self._plan.units),
            holding=bool(self._begun),
            tokens=self._tokens,
            documents=self._documents,
        )
        if self._report is not None:
            self._report(standing)
        return units

    async def _next(self, units: tuple[Unit, ...], keeping: asyncio.Task[None]) -> None:
        """Begin one unit, or wait for something to change."""
        if keeping.done():
            keeping.result()  # the bucket was out of reach for longer than patience goes
        free = [unit for unit in units if unit.id not in self._begun.values()]
        await self._read.wait()  # whatever tokenises does so for the unit that the device works on
        if self._should_stop():
            await self._stop()
        # Which one it will be is not sure, and the input of the wrong one is thrown away: no lease is needed for it.
        likely = await self._claims.likely(free) if free else None
        ready = None if likely is None else await self._prepare(likely)
        await self._fed.wait()
        begun = len(self._begun)
        await self._settle(self._settings.storing_max)
        if self._should_stop():
            await self._stop()
        claim = await self._claims.claim(free, first=likely) if free else None
        if claim is not None:
            self._begin(claim, ready if ready is not None and claim.unit == likely else await self._prepare(claim.unit))
        elif self._begun:
            await self._settle(len(self._begun) - 1)
        elif not begun:  # otherwise something has changed already: it was this worker's own unit
            await asyncio.sleep(self._settings.look_s)

    async def _prepare(self, unit: Unit) -> _Ready:
        started = self._steady()
        pieces = await asyncio.to_thread(self._compute, self._plan, unit)
        return _Ready(pieces, self._steady() - started)

    def _begin(self, claim: Claim, ready: _Ready) -> None:
        """Have the device compute a unit, and what comes out be stored; `_fed` tells when it may get the next one."""
        read, fed = self._read, self._fed = asyncio.Event(), asyncio.Event()
        if isinstance(ready.pieces, Course):
            loop = asyncio.get_running_loop()
            ready.pieces.on_read = partial(loop.call_soon_threadsafe, read.set)
            ready.pieces.on_fed = partial(loop.call_soon_threadsafe, fed.set)
        if not isinstance(ready.pieces, Course) or ready.pieces.is_read:
            read.set()  # it does not tell, or had nothing more to read
        task = asyncio.create_task(self._finish(claim, ready, read, fed))
        self._begun[task] = claim.unit.id

    async def _stop(self) -> NoReturn:
        """See what is on its way to its end."""
        await self._settle(0)
        raise Stopped

    async def _finish(self, claim: Claim, ready: _Ready, read: asyncio.Event, fed: asyncio.Event) -> None:
        """Compute, store and commit a unit."""
        started = self._steady()
        settings = self._settings
        # What is read back and found damaged is sent again: then it must still be in memory.
        draft = partial(self._calls.draft, in_memory=settings.read_back)
        try:
            writer = await asyncio.to_thread(UnitWriter, self._plan, claim.unit, self._hands, draft)
            await asyncio.to_thread(self._run, ready.pieces, writer)
        except Stopped:
            await self._claims.release(claim, done=False)
            raise
        finally:
            # Whatever went wrong: who waits for them has to look at what became of this unit.
            read.set()
            fed.set()
        await self._store(claim, writer, ready.seconds + self._steady() - started)

    def _run(self, pieces: Iterable[Piece], writer: UnitWriter) -> None:
        """On a thread."""
        try:
            for piece in pieces:
                writer.add(piece)
                if self._left.is_set() or self._should_stop():
                    raise Stopped
        finally:
            if isinstance(pieces, Course):  # at once: an error would hold it, and its places on the device
                pieces.close()

    async def _store(self, claim: Claim, writer: UnitWriter, seconds: float) -> None:
        settings = self._settings
        content = await asyncio.to_thread(writer.finish, seconds=seconds, worker=settings.worker, code=settings.code)
        try:
            won = await publish(
                self._calls,
                self._plan,
                claim,
                content,
                fence=settings.fence,
                read_back=settings.read_back,
                on_commit=partial(self._committing.add, claim.unit.id),
            )
        except Exception:  # not when it was cancelled: then its commit may still be under way
            self._committing.discard(claim.unit.id)
            raise
        self._committing.discard(claim.unit.id)
        # Nobody waits for it: a busy disk may take as long to remove a file as the device to compute a unit.
        self._leaving.add(asyncio.create_task(self._claims.release(claim, done=True)))
        if won:
            self._tokens += content.facts.tokens
            self._documents += content.facts.documents
        else:
            logger.warning("%s was committed by another worker while this one computed it", claim.unit.id)

    async def _settle(self, most: int) -> None:
        """Wait until at most so many units are on their way; what failed on its way is raised here."""
        for task in [each for each in self._leaving if each.done()]:
            self._leaving.discard(task)
            task.result()  # a store that lets nothing be removed is told now, and not after days
        stopped = False
        while self._begun and (len(self._begun) > most or any(task.done() for task in self._begun)):
            done, _ = await asyncio.wait(self._begun, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                del self._begun[task]
                try:
                    task.result()
                except Stopped:
                    stopped, most = True, 0  # what the others have computed is stored all the same
        if stopped:
            raise Stopped
