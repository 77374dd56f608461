"""Who works on which unit: leases by create-if-absent, renewed while the work goes on, taken over when they are old.

`worker` calls it. Age is told by the store's clock alone: the store stamps leases, and its time now is what it stamps
on an object that this worker has just written, carried on by the worker's own steady clock. That object is its sign of
life, too, while it holds nothing, and goes when it leaves: what is left of a worker without a lease is one that was
lost. A claim only saves double work. Nothing rests on it: a worker that slept past its lease finds out at the commit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from penstock.domain import ledger
from penstock.domain.ledger import Lease, SeenLease, Unit
from penstock.extract.calls import Calls
from penstock.extract.plan import RunPlan

#: The two clocks drift apart; the store is asked again after this long.
CLOCK_TRUSTED_S: Final = 600.0
#: A lease is renewed this often in its time, so that one lost renewal does not cost it.
RENEWALS: Final = 3


def leases_of_run(run: str) -> str:
    return f"runs/{run}/leases/"


def clocks_of_run(run: str) -> str:
    return f"runs/{run}/clocks/"


def clock_path(run: str, worker: str) -> str:
    return f"{clocks_of_run(run)}{worker}"


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's clock object says beside the store's stamp on it."""

    lease_s: float


class Claim(msgspec.Struct, frozen=True):
    """One try of one unit. `attempt` is unlike any other's, also of the same worker."""

    unit: Unit
    attempt: str
    number: int
    edition: int = 0  #: of the unit, which its commit will be


class Claims:
    """The claims of one worker process."""

    def __init__(
        self,
        calls: Calls,
        plan: RunPlan,
        worker: str,
        *,
        fence: int,
        lease_s: float,
        rng: random.Random,
        steady: Callable[[], float],
    ) -> None:
        self.lease_s = lease_s
        self._calls = calls
        self._plan = plan
        self._worker = worker
        self._fence = fence
        self._rng = rng
        self._steady = steady
        self._tries = 0
        self._store_ahead: tuple[float, float] | None = None  #: store's clock minus ours, and when that was found
        self._held: dict[str, Claim] = {}
        self._left = False
        self._turn = asyncio.Lock()  #: a lease that is let go must not be renewed once more

    @property
    def held(self) -> tuple[Claim, ...]:
        return tuple(self._held.values())

    async def likely(self, units: Sequence[Unit]) -> Unit | None:
        """One of the units that nobody holds now; it is not claimed, and another may be faster."""
        return next((unit for unit, _ in await self._free(units)), None)

    async def claim(self, units: Sequence[Unit], first: Unit | None = None) -> Claim | None:
        """One of the units, now ours, `first` if it can be had; None when others hold all of them."""
        free = await self._free(units)
        free.sort(key=lambda each: each[0] != first)
        for unit, number in free:
            if (claim := await self._take(unit, number)) is not None:
                return claim
        return None

    async def _free(self, units: Sequence[Unit]) -> list[tuple[Unit, int]]:
        """Units whose lease is old or absent, and the number to claim each with, from anywhere in the row onwards."""
        seen: dict[str, list[SeenLease]] = {}
        for kept in await self._calls.survey(leases_of_run(self._plan.run)):
            name = kept.path.split("/")[-2]
            seen.setdefault(name, []).append(SeenLease(number=ledger.lease_number(kept.path), since=kept.written_at))
        now = await self._store_now()
        begin = self._rng.randrange(len(units)) if units else 0
        found: list[tuple[Unit, int]] = []
        for unit in (*units[begin:], *units[:begin]):
            number = ledger.next_lease(seen.get(unit.id, ()), now, self.lease_s)
            if number is not None:
                found.append((unit, number))
        return found

    async def release(self, claim: Claim, *, done: bool) -> None:
        """Let go of a unit: committed (then none of its leases is needed any more) or given back."""
        run, unit = self._plan.run, claim.unit.id
        own = ledger.lease_path(run, unit, claim.number)
        async with self._turn:
            held = self._held.get(unit)
            if held is not None and held.attempt == claim.attempt:
                del self._held[unit]
        # Not in our turn: a slow store would keep what is held now from being renewed.
        for path in await self._calls.list(ledger.leases_prefix(run, unit)) if done else (own,):
            await self._calls.delete(path)

    async def keep(self) -> None:
        """Renew all that is held until cancelled; who holds nothing gives a sign all the same."""
        while True:
            await asyncio.sleep(self.lease_s / RENEWALS)
            async with self._turn:
                if not self._held and not self._left:
                    await self._give_sign()
            for unit in tuple(self._held):
                async with self._turn:
                    claim = self._held.get(unit)
                    if claim is not None:
                        # A zombie renews an older number, which nobody looks at.
                        path = ledger.lease_path(self._plan.run, unit, claim.number)
                        await self._calls.put(path, ledger.encode(self._lease(claim.unit, claim.attempt)))

    async def leave(self) -> None:
        """Give no more signs, and take the last one away: this worker is not lost, it has ended."""
        async with self._turn:
            self._left = True
            await self._calls.delete(clock_path(self._plan.run, self._worker))

    async def _take(self, unit: Unit, number: int) -> Claim | None:
        self._tries += 1
        claim = Claim(unit, f"{self._worker}-{self._tries}", number)
        path = ledger.lease_path(self._plan.run, unit.id, number)
        data = ledger.encode(self._lease(unit, claim.attempt))
        if not await self._calls.create_own(path, data, claim.attempt, _holder):
            return None
        self._held[unit.id] = claim
        run = self._plan.run
        voids = await self._calls.list(ledger.voids_prefix(run, unit.id))
        claim = msgspec.structs.replace(claim, edition=ledger.editions(run, voids).of(unit.id))
        # Leases go when a unit is committed; whoever saw it open before that must not begin it again.
        if await self._calls.read(ledger.commit_path(run, unit.id, claim.edition)) is not None:
            await self.release(claim, done=True)
            return None
        return claim

    def _lease(self, unit: Unit, attempt: str) -> Lease:
        return Lease(unit=unit.id, attempt=attempt, fence=self._fence, lease_s=self.lease_s)

    async def _give_sign(self) -> None:
        sign = msgspec.json.encode(Sign(lease_s=self.lease_s))
        await self._calls.put(clock_path(self._plan.run, self._worker), sign)

    async def _store_now(self) -> float:
        """The store's time, never ahead of it: what passes between its stamp and our reading is not counted."""
        if self._store_ahead is None or self._steady() - self._store_ahead[1] > CLOCK_TRUSTED_S:
            path = clock_path(self._plan.run, self._worker)
            await self._give_sign()
            read_at = self._steady()
            stamps = [kept.written_at for kept in await self._calls.survey(path) if kept.path == path]
            if not stamps:  # swept away by whoever sealed the run just now: then there is nothing to claim either
                return float("-inf")
            self._store_ahead = (stamps[0] - read_at, read_at)
        return self._steady() + self._store_ahead[0]


def _holder(stored: bytes) -> str:
    """The attempt of a lease; one that a power cut has damaged is nobody's, and gets old like any other."""
    try:
        return ledger.decode_lease(stored).attempt
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
