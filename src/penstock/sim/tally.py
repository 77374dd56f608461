"""Adds up what a simulated workload costs and yields, instead of keeping its history.

`sim.workload` gives it to the world as its recorder: of the world's records only machines and processes matter, and
each is turned into sums at once. Work that was run and not saved by a checkpoint is waste; chips held and not working
are idle.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

import msgspec
from typing_extensions import override

from penstock.domain.invariants.history import History, Recorder
from penstock.domain.lifecycle import JobState
from penstock.domain.nouns import Job
from penstock.ports.store import Reader

HOUR = 3600.0


class _Run(msgspec.Struct):
    """One attempt's run so far. It gets on from its last process coming up to the first one ending."""

    job: str
    world_size: int
    started: int = 0
    running: int = 0
    whole_at: float | None = None
    ended_at: float | None = None
    chips: int = 0
    machines: tuple[str, ...] = ()


class _Machine(msgspec.Struct):
    """One slice that exists. It is paid for from the moment it is ready."""

    zone: str
    chips: int
    price: float | None
    ready: float | None = None


class ZoneSums(msgspec.Struct):
    """What one zone was asked for and did."""

    asked: int = 0
    refused: int = 0
    preempted: int = 0


class Tally(Recorder):
    """Sums over a whole workload. `epoch` is what the store's clock showed at its start."""

    def __init__(self, zones: Sequence[str], epoch: float) -> None:
        super().__init__(History(events=[], clients=[], world=[]), lambda: 0, lambda: 0.0)
        self._epoch = epoch
        self.zones = {zone: ZoneSums() for zone in zones}
        self._submitted_at: dict[str, float] = {}
        self._checkpoint_s: dict[str, float] = {}
        self._saved_s: dict[str, float] = {}
        self._runs: dict[str, _Run] = {}
        self._machines: dict[str, _Machine] = {}
        self._pool_of: dict[str, str] = {}  #: slice asked for -> its pool, until the answer
        self._waits = array("d")
        self.price_of: dict[str, float | None] = {}  #: pool -> dollars per chip-hour
        self.ended = self.succeeded = self.failed = 0
        self.useful_chip_s = self.wasted_chip_s = self.held_chip_s = 0.0
        self.usd: float | None = 0.0
        self.last_end = 0.0

    # --- what the workload says ---

    def asked(self, slice: str, pool: str) -> None:
        """A slice is being asked for: if it is granted, this pool's price holds for it."""
        self._pool_of[slice] = pool

    def submitted(self, job: str, checkpoint_s: float) -> None:
        self._submitted_at[job] = _now()
        self._checkpoint_s[job] = checkpoint_s

    def saved_s(self, job: str) -> float:
        """Work of a job that its checkpoints hold."""
        return self._saved_s.get(job, 0.0)

    @property
    def creates(self) -> int:
        return sum(zone.asked for zone in self.zones.values())

    @property
    def refusals(self) -> int:
        return sum(zone.refused for zone in self.zones.values())

    @property
    def preemptions(self) -> int:
        return sum(zone.preempted for zone in self.zones.values())

    # --- what the world says ---

    @override
    def client(self, kind: str, subject: str, **body: object) -> None:
        """Nobody but the workload itself is a client here."""

    @override
    def world(self, kind: str, subject: str, **body: object) -> None:
        match kind:
            case "proc.started":
                self._start(subject, body)
            case "proc.exited":
                self._stop(subject, body)
            case "vm.created":
                chips = body["chips"]
                assert isinstance(chips, int)
                price = self.price_of.get(self._pool_of.pop(subject, ""))
                self._machines[str(body["provider_id"])] = _Machine(str(body["zone"]), chips, price)
            case "vm.ready":
                self._machines[str(body["provider_id"])].ready = _now()
            case "vm.refused":
                self.zones[self._machines[str(body["provider_id"])].zone].refused += 1
            case "vm.deleted":
                self._let_go(str(body["provider_id"]))
            case "vm.preempted":
                self.zones[self._machines[str(body["provider_id"])].zone].preempted += 1
                self._let_go(str(body["provider_id"]))
            case "provider.call" if body["verb"] == "create":
                self._pool_of.pop(subject, None)
                zone = self.zones[str(body["zone"])]
                zone.asked += 1
                zone.refused += body["outcome"] != "ok"
            case _:
                pass

    def _let_go(self, provider_id: str) -> None:
        machine = self._machines.pop(provider_id, None)
        if machine is None or machine.ready is None:
            return
        chip_s = machine.chips * (_now() - machine.ready)
        self.held_chip_s += chip_s
        if machine.price is None or self.usd is None:
            self.usd = None
        else:
            self.usd += machine.price * chip_s / HOUR

    def _start(self, attempt: str, body: dict[str, object]) -> None:
        job, provider_id = str(body["job"]), str(body["provider_id"])
        run = self._runs.get(attempt)
        if run is None:
            world_size = body["world_size"]
            assert isinstance(world_size, int)
            run = self._runs[attempt] = _Run(job, world_size)
            submitted_at = self._submitted_at.pop(job, None)
            if submitted_at is not None:
                self._waits.append(_now() - submitted_at)
        if provider_id not in run.machines:
            run.machines = (*run.machines, provider_id)
            run.chips += self._machines[provider_id].chips
        run.started += 1
        run.running += 1
        if run.started == run.world_size and run.ended_at is None:
            run.whole_at = _now()

    def _stop(self, attempt: str, body: dict[str, object]) -> None:
        run = self._runs[attempt]
        run.running -= 1
        if run.ended_at is None:
            run.ended_at = _now()
        if run.running > 0:
            return
        del self._runs[attempt]
        ran_s = 0.0 if run.whole_at is None else run.ended_at - run.whole_at
        if str(body["how"]) == "code 0":
            self.useful_chip_s += run.chips * ran_s
            return
        step = self._checkpoint_s.get(run.job, 0.0)
        kept = ran_s - ran_s % step if step > 0 else 0.0
        self._saved_s[run.job] = self.saved_s(run.job) + kept
        self.useful_chip_s += run.chips * kept
        self.wasted_chip_s += run.chips * (ran_s - kept)

    # --- what the store says ---

    def collect_ended(self, reader: Reader) -> list[str]:
        """Count jobs that have ended since last asked; the workload purges them next."""
        ended: list[Job] = []
        for state in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED):
            ended += reader.jobs_page(team=None, states=(state.value,), after=None, limit=100_000)
        for job in ended:
            self.ended += 1
            self.succeeded += job.state is JobState.SUCCEEDED
            self.failed += job.state is not JobState.SUCCEEDED
            self.last_end = max(self.last_end, (job.finished_at or 0.0) - self._epoch)
            for known in (self._submitted_at, self._checkpoint_s, self._saved_s):
                known.pop(job.id, None)
        return [job.id for job in ended]

    def close(self) -> None:
        """The end: machines still held are paid for up to now."""
        for provider_id in list(self._machines):
            self._let_go(provider_id)

    def wait_s(self, share: float) -> float:
        """The waiting time that this share of the started jobs did not exceed."""
        waits = sorted(self._waits)
        return waits[min(len(waits) - 1, int(share * len(waits)))] if waits else 0.0

    @property
    def wait_mean_s(self) -> float:
        return sum(self._waits) / len(self._waits) if self._waits else 0.0


def _now() -> float:
    return asyncio.get_running_loop().time()
