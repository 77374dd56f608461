"""A worker: claims a unit, computes it, stores and commits it, and ends when no unit of the run is open.

`tpu extract worker` runs it, under any launcher or as a replica of a Penstock job; it needs the bucket and nothing
else. One unit is prepared (read, tokenised) while another is on the device and a third goes to the bucket, so that the
device need not wait for either. It may be killed at any moment: what it held is taken over when its lease has run out,
and what it stored without a commit counts for nothing. It must keep no state of its own.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterable
from typing import Final, NoReturn

import msgspec

from penstock.domain import ledger
from penstock.domain.ledger import Unit
from penstock.extract.calls import Calls
from penstock.extract.claims import Claim, Claims
from penstock.extract.commit import publish
from penstock.extract.layout import Compute, Piece, encode_unit
from penstock.extract.plan import RunPlan
from penstock.extract.seal import seal, sweep

logger = logging.getLogger(__name__)

LEASE_S: Final = 90.0
#: Units on the device or on their way to the bucket while the next is prepared: more would only need more memory.
BEGUN_MAX: Final = 2
#: With fewer units open than this, none is claimed before the device is free: another worker may be idle.
AHEAD_LEAST: Final = 4
LOOK_S: Final = 5.0  #: how often a worker that found nothing to claim looks again


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run stands, as a worker says it after each unit."""

    open: int
    units: int
    tokens: int  #: that this worker has committed
    documents: int


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What is one worker's own business: none of it changes what is stored."""

    worker: str
    fence: int = 0
    lease_s: float = LEASE_S
    look_s: float = LOOK_S
    begun_max: int = BEGUN_MAX
    read_back: bool = False
    code: str = ""


class Stopped(Exception):
    """The worker was asked to stop, and has let go of what it held."""


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
        self._device = asyncio.Lock()
        self._left = threading.Event()
        self._tokens = 0
        self._documents = 0

    async def work(self) -> None:
        """Until no unit is open and the run is sealed; raises `Stopped` when asked to stop before."""
        keeping = asyncio.create_task(self._claims.keep())
        try:
            while units := await self._open():
                await self._next(units, keeping)
            await self._settle(0)  # units that others have committed meanwhile: what was stored of them goes
            await seal(self._calls, self._plan)
            await sweep(self._calls, self._plan)
        finally:
            # The thread that computes looks here: an event loop that ends waits for its threads.
            self._left.set()
            for task in (keeping, *self._begun):
                task.cancel()
            await asyncio.gather(keeping, *self._begun, return_exceptions=True)

    async def _open(self) -> tuple[Unit, ...]:
        """Units without a commit, those that this worker has begun included."""
        prefix = ledger.commits_prefix(self._plan.run)
        done = [path.removeprefix(prefix) for path in await self._calls.list(prefix)]
        units = ledger.open_units(self._plan, done)
        standing = Standing(
            open=len(units), units=len(self._plan.units), tokens=self._tokens, documents=self._documents
        )
        if self._report is not None:
            self._report(standing)
        return units

    async def _next(self, units: tuple[Unit, ...], keeping: asyncio.Task[None]) -> None:
        """Begin one unit, or wait for something to change."""
        if keeping.done():
            keeping.result()  # the bucket was out of reach for longer than patience goes
        free = [unit for unit in units if unit.id not in self._begun.values()]
        if self._should_stop():
            await self._stop()
        if len(free) < AHEAD_LEAST:
            async with self._device:
                pass
        claim = await self._claims.claim(free) if free else None
        if claim is None:
            if self._begun:
                await self._settle(len(self._begun) - 1)
            else:
                await asyncio.sleep(self._settings.look_s)
            return
        started = self._steady()
        pieces = await asyncio.to_thread(self._compute, self._plan, claim.unit)
        prepared_s = self._steady() - started
        await self._device.acquire()
        if self._should_stop():
            self._device.release()
            await self._stop(claim)
        task = asyncio.create_task(self._finish(claim, pieces, prepared_s))
        self._begun[task] = claim.unit.id
        await self._settle(self._settings.begun_max)

    async def _stop(self, claim: Claim | None = None) -> NoReturn:
        """Let go of what is not computed yet, and see what is on its way to its end."""
        if claim is not None:
            await self._claims.release(claim, done=False)
        await self._settle(0)
        raise Stopped

    async def _finish(self, claim: Claim, pieces: Iterable[Piece], prepared_s: float) -> None:
        """Compute, store and commit a unit; whoever calls holds the device."""
        started = self._steady()
        try:
            computed = await asyncio.to_thread(self._run, pieces)
        except Stopped:
            await self._claims.release(claim, done=False)
            raise
        finally:
            self._device.release()
        await self._store(claim, computed, prepared_s + self._steady() - started)

    def _run(self, pieces: Iterable[Piece]) -> list[Piece]:
        """On a thread."""
        computed: list[Piece] = []
        for piece in pieces:
            computed.append(piece)
            if self._left.is_set() or self._should_stop():
                raise Stopped
        return computed

    async def _store(self, claim: Claim, pieces: list[Piece], seconds: float) -> None:
        settings = self._settings
        content = await asyncio.to_thread(
            lambda: encode_unit(
                self._plan, claim.unit, pieces, seconds=seconds, worker=settings.worker, code=settings.code
            )
        )
        pieces.clear()
        won = await publish(self._calls, self._plan, claim, content, fence=settings.fence, read_back=settings.read_back)
        await self._claims.release(claim, done=True)
        if won:
            self._tokens += content.facts.tokens
            self._documents += content.facts.documents
        else:
            logger.warning("%s was committed by another worker while this one computed it", claim.unit.id)

    async def _settle(self, most: int) -> None:
        """Wait until at most so many units are on their way; what failed on its way is raised here."""
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
