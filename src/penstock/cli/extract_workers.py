"""The workers of a run as `tpu extract` starts them: as one job with replicas, or as processes of this machine.

`cli.extract` calls it when a plan is made. What a worker was given goes to every one of them as words of its command
line, so that all of them say the same thing the same way. A run that has nothing left to do gets no worker. It must not
compute: `tpu extract worker` does.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Final

import click
import msgspec

from penstock.cli import extract_cost, terminal
from penstock.cli.submit import JobOptions, job_request
from penstock.cli.talk import talking
from penstock.cli.words import SPAN, grouped

if TYPE_CHECKING:
    from penstock.wiring.extraction import Planned

#: A worker on another machine is a command there; on this one it is this very program.
WORKER: Final = "from penstock.cli.main import main; main()"
LEASE_S: Final = 90.0  #: as text below


class WorkerOptions(msgspec.Struct, kw_only=True):
    """What a worker was given; None and False: it decides itself."""

    lease: float
    rows: int | None
    processes: int | None
    mesh: str | None
    read_back: bool
    one_unit: bool
    no_sync: bool
    cache: str | None

    def words(self) -> tuple[str, ...]:
        """The options again, as another worker takes them."""
        words: list[str] = [] if self.lease == LEASE_S else ["--lease", f"{self.lease:g}"]
        for name, value in (
            ("--rows", self.rows),
            ("--processes", self.processes),
            ("--mesh", self.mesh),
            ("--cache", self.cache),
        ):
            if value is not None:
                words += [name, str(value)]
        for name, wanted in (
            ("--read-back", self.read_back),
            ("--one-unit", self.one_unit),
            ("--no-sync", self.no_sync),
        ):
            if wanted:
                words.append(name)
        return tuple(words)


_OPTIONS = (
    click.option("--lease", type=SPAN, default="90s", show_default=True, help="Without a sign for so long: lost."),
    click.option("--rows", type=click.IntRange(1), metavar="N", help="Packed rows of one step; as the device likes."),
    click.option(
        "--processes",
        type=click.IntRange(0),
        metavar="N",
        help="That tokenise ahead of the device; half of the processors, 8 at most, and none on a CPU.",
    ),
    click.option(
        "--mesh", metavar="AXES", help="data=4,fsdp=1,tensor=2; rows over all devices of the host if left out."
    ),
    click.option("--read-back", is_flag=True, help="Read each object again before it is committed."),
    click.option("--one-unit", is_flag=True, help="Begin a unit when the last is committed: a loss costs one at most."),
    click.option(
        "--no-sync", is_flag=True, help="In a directory: commit before vectors are on the disk (scratch disks)."
    ),
    click.option("--cache", metavar="DIR", help="Keep compiled programs here; in the user's cache on an accelerator."),
)
#: Gives a command the options above; it takes them as one `WorkerOptions` named `worker`.
worker_options = grouped(_OPTIONS, WorkerOptions, "worker")


class Start:
    """Workers for one run, all with the same options."""

    def __init__(self, planned: Planned, address: str, worker: WorkerOptions) -> None:
        self._planned = planned
        self._address = address
        self._worker = worker

    def as_job(self, workers: tuple[int, int], python: str, setup: str, job: JobOptions) -> None:
        """One job whose replicas are the workers: each has its own fence and costs its units only when it is lost."""
        from penstock.cli.targets import resolve
        from penstock.wire.api import CommandRequest

        most = self._at_most(workers[1])
        if not most:
            return
        job.replicas = (min(workers[0], most), most)
        job.name = job.name or f"extract {self._planned.plan.run[:8]}"
        job.tag = (*job.tag, extract_cost.tag_of(self._planned.plan.run))
        command = CommandRequest(self._argv(python), setup=setup)
        with talking(start=True) as client:
            accepted = client.submit(job_request(command, job, resolve(job.on or "", client)))
        terminal.note(f"job {accepted.id}: up to {terminal.many(most, 'worker')}")
        _warn_of_own_files(self._planned)
        terminal.note(f"`tpu extract watch --run {self._address}` shows the workers")

    def here(self, workers: int) -> int:
        """On this machine, until the last has ended: 0 when the run is done, whatever became of one of them."""
        from penstock.wiring.extraction import left

        most = self._at_most(workers)
        if not most:
            return 0
        terminal.note(f"{terminal.many(most, 'worker')} on this machine")
        asked, codes = run(self._argv(sys.executable), most)
        bad = [code if code > 0 else 128 - code for code in codes if code]
        if not bad and not asked:
            return 0
        if not left(self._address).sealed:
            return 128 + asked if asked else bad[0]
        if bad:
            terminal.note(f"the run is done; {terminal.many(len(bad), 'worker')} ended with {', '.join(map(str, bad))}")
        return 0

    def _argv(self, python: str) -> tuple[str, ...]:
        return (python, "-c", WORKER, "extract", "worker", "--run", self._address, *self._worker.words())

    def _at_most(self, workers: int) -> int:
        """As many as there are open units, and one where none is, which then seals the run; 0: it is sealed."""
        from penstock.wiring.extraction import left

        rest = left(self._address)
        if rest.sealed:
            terminal.note("every unit is committed and the run is sealed: nothing is left to do")
            return 0
        return max(1, min(workers, rest.open))


def run(argv: Sequence[str], count: int) -> tuple[int, list[int]]:
    """So many processes, until the last has ended: the first signal that asked this one to stop, or 0; their codes."""
    started: list[subprocess.Popen[bytes]] = []
    with _passed_on(started) as asked, contextlib.ExitStack() as stack:
        while len(started) < count and not asked:
            started.append(stack.enter_context(subprocess.Popen(argv)))
        if asked:  # one that was just being started has not been told
            _stop(started)
        codes = [process.wait() for process in started]
    return (asked[0] if asked else 0), codes


@contextlib.contextmanager
def _passed_on(started: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Ask the workers to stop when this process is asked, and wait for them; the signals that came."""
    asked: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        _stop(started)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(started: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in started:
        process.terminate()


def _warn_of_own_files(planned: Planned) -> None:
    """Slices of this machine can read its files, others cannot, and which ones a job gets is not known yet."""
    work = planned.plan.work
    places = {"model": [work["model"]], "data": [file["address"] for file in work["source"]["files"]]}
    own = [f"the {what}" for what, addresses in places.items() if any("://" not in each for each in addresses)]
    if own:
        terminal.note(f"the hosts must see {' and '.join(own)}, which lie on this machine; gs:// or s3:// always works")
