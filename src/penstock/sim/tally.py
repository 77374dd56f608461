"""Adds up what a simulated workload costs and yields, instead of keeping its history.

`sim.workload` gives it to the world as its recorder: of the world's records only machines and processes matter, and
each is turned into sums at once. Work that was run and not saved by a checkpoint is waste; chips held and not working
are idle.
"""

from __future__ import annotations

import asyncio

import msgspec
from typing_extensions import override

from penstock.domain.invariants.history import History, Recorder
from penstock.domain.lifecycle import JobState
from penstock.domain.nouns import Job
from penstock.ports.store import Reader

HOUR = 3600.0


class _Run(msgspec.Struct):
    """One attempt's run so far: when its last process came up, how many there are, and its chips."""

    job: str
    started: float
    running: int
    chips: int


class Tally(Recorder):
    """Sums over a whole workload."""

    def __init__(self) -> None:
        super().__init__(History(events=[], clients=[], world=[]), lambda: 0, lambda: 0.0)
        self._submitted_at: dict[str, float] = {}
        self._checkpoint_s: dict[str, float] = {}
        self._saved_s: dict[str, float] = {}
        self._runs: dict[str, _Run] = {}
        self._machines: dict[str, tuple[float, int, float | None]] = {}
        self._waits: list[float] = []
        self._waited: set[str] = set()
        self.price_of: dict[int, float | None] = {}  #: chips of a slice -> dollars per chip-hour of its pool
        self.ended = self.succeeded = self.failed = 0
        self.preemptions = self.creates = self.refusals = 0
        self.useful_chip_s = self.wasted_chip_s = self.held_chip_s = 0.0
        self.usd: float | None = 0.0
        self.last_end = 0.0

    # --- what the workload says ---

    def submitted(self, job: str, checkpoint_s: float) -> None:
        self._submitted_at[job] = _now()
        self._checkpoint_s[job] = checkpoint_s

    def saved_s(self, job: str) -> float:
        """Work of a job that its checkpoints hold."""
        return self._saved_s.get(job, 0.0)

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
                self._machines[str(body["provider_id"])] = (_now(), chips, self.price_of.get(chips))
            case "vm.deleted":
                self._let_go(str(body["provider_id"]))
            case "vm.preempted":
                self.preemptions += 1
                self._let_go(str(body["provider_id"]))
            case "provider.call" if body["verb"] == "create":
                self.creates += 1
                self.refusals += body["outcome"] != "ok"
            case _:
                pass

    def _let_go(self, provider_id: str) -> None:
        since, chips, price = self._machines.pop(provider_id, (_now(), 0, None))
        chip_s = chips * (_now() - since)
        self.held_chip_s += chip_s
        if chips:
            self.usd = None if price is None or self.usd is None else self.usd + price * chip_s / HOUR

    def _start(self, attempt: str, body: dict[str, object]) -> None:
        job = str(body["job"])
        run = self._runs.get(attempt)
        if run is None:
            _, chips, _ = self._machines.get(str(body["provider_id"]), (0.0, 0, None))
            run = self._runs[attempt] = _Run(job, _now(), 0, chips)
            if job not in self._waited and job in self._submitted_at:
                self._waited.add(job)
                self._waits.append(_now() - self._submitted_at[job])
        run.started = _now()
        run.running += 1

    def _stop(self, attempt: str, body: dict[str, object]) -> None:
        run = self._runs.get(attempt)
        if run is None:
            return
        run.running -= 1
        if run.running > 0:
            return
        del self._runs[attempt]
        ran_s = _now() - run.started
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
            self.last_end = max(self.last_end, _now())
            for known in (self._submitted_at, self._checkpoint_s, self._saved_s):
                known.pop(job.id, None)
            self._waited.discard(job.id)
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
