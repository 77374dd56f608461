"""Loss of a slice → its job runs again, on the emulated cloud without provisioning delay, beside what peers wait for.

`make bench-recovery`, or `python -m bench.recovery [--quick] [--out FILE]`. Hosts are real processes that boot the real
startup script. A job writes down when it begins and when it is asked to stop; its slice is taken away through the
emulator's control address, without a word or with a notice; the next attempt begins on a slice that was idle (`spare`)
or on one that has to be made and set up first (`made anew`). Peers are constants in their sources (peers.md §5.1), not
measured here: how long a loss takes to be declared, or what that would make of our own figure. None of them uses a
notice. Exits with 1 when a part fails or the shortest of those waits is not beaten.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from bench.core import Bound, Row, table
from penstock import Client
from penstock.wire.api import AttemptView, CommandRequest, JobRequest
from tools.emulated import Emulated, Unusable, until

ZONE: Final = "us-central1-a"
TYPE: Final = "v3-8"
NOTICE_S: Final = 30.0  #: what a spot machine gets
WAIT_S_MAX: Final = 300.0
#: Says when it begins and, asked to stop, when; in the shell's own clock, so that nothing else is measured.
STAMPS: Final = "trap 'date +%s.%N; exit 143' TERM; date +%s.%N; sleep 3600 & wait"
#: Seconds until a loss is declared, at best. What follows, provisioning and set-up, comes on top.
PEERS: Final = {"SkyPilot": 15.0, "AXLearn": 30.0, "pu": 30.0, "Iris": 50.0, "dstack": 120.0}


class Loss(NamedTuple):
    """One loss, in seconds."""

    declared: float  #: until the server closed the attempt, by its own stamp
    again: float  #: from the loss, or from the notice, until the next attempt's payload has begun
    idle: float  #: from the last sign of life of the old payload until then


def p(times: list[float], percent: float) -> float:
    """A percentile, by the nearest rank."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


class Recovery:
    """Takes slices away from a job, one after another."""

    def __init__(self, folder: Path, losses: int) -> None:
        self._cloud = Emulated(folder)
        self._losses = losses

    def rows(self) -> Iterator[Row]:
        with self._cloud.running(), self._cloud.client() as client:
            for part, slices in (("made anew", 1), ("spare", 2)):
                options = ("--zones", ZONE, "--per-zone", str(slices), "--type", TYPE, "--spot")
                self._cloud.tpu("fleet", "create", "bench", *options)
                found = self._suffer(client, slices)
                self._cloud.tpu("fleet", "delete", "bench", "--yes")
                until(lambda: not self._cloud.nodes(), WAIT_S_MAX, "every slice is gone")
                for notice, losses in found.items():
                    yield from loss_rows(part, notice, losses)

    def _suffer(self, client: Client, slices: int) -> dict[bool, list[Loss]]:
        """Losses with and without notice in turn, so that a noisy moment meets both."""
        found: dict[bool, list[Loss]] = {False: [], True: []}
        payload = CommandRequest(("sh", "-c", STAMPS))
        job = client.submit(JobRequest(payload=payload, pool="bench", on=(TYPE,))).id
        _stamps(client, job, 1, 1)
        for number in range(2 * self._losses):
            until(lambda: self._ready(client) >= slices, WAIT_S_MAX, "all slices are ready")
            notice = bool(number % 2)
            found[notice].append(self._lose(client, job, number + 1, notice))
            kind = "noticed" if notice else "silent"
            print(f"bench-recovery: {kind}, {found[notice][-1].again:.2f} s", file=sys.stderr, flush=True)
        client.cancel(job)
        client.wait(job, WAIT_S_MAX)
        return found

    def _ready(self, client: Client) -> int:
        return sum(each.state == "ready" for each in client.slices())

    def _lose(self, client: Client, job: str, attempt: int, notice: bool) -> Loss:
        slice = client.get(job).attempts[attempt - 1].slices[0]
        began = time.time()  # noqa: TID251 (compared with the payload's own stamps)
        if not self._cloud.preempt(slice, NOTICE_S if notice else 0.0):
            raise Unusable(f"slice {slice} cannot be taken away")
        (again, *_) = _stamps(client, job, attempt + 1, 1)
        last = _stamps(client, job, attempt, 2)[1] if notice else began
        closed = _attempt(client, job, attempt).closed_at
        assert closed is not None, "the next attempt begins when the one before is closed"
        return Loss(closed - began, again - began, again - last)


def _attempt(client: Client, job: str, attempt: int) -> AttemptView:
    return client.get(job).attempts[attempt - 1]


def _stamps(client: Client, job: str, attempt: int, count: int) -> list[float]:
    """The times that the payload of one attempt wrote down, as soon as there are so many."""
    said: list[bytes] = []

    def enough() -> bool:
        attempts = client.get(job).attempts
        if len(attempts) >= attempt:
            said[:] = client.log_bytes(job, stream="out", attempt=attempts[attempt - 1].id).split()
        return len(said) >= count

    until(enough, WAIT_S_MAX, f"attempt {attempt} of {job} has written {count} stamps")
    return [float(each) for each in said]


def loss_rows(part: str, notice: bool, losses: list[Loss]) -> Iterator[Row]:
    kind = f"{part}, {'notice' if notice else 'no notice'}"
    again, declared = [loss.again for loss in losses], [loss.declared for loss in losses]
    if not notice:
        bound = Bound(min(PEERS.values()), True)
        median, worst = p(declared, 50), p(declared, 95)
        yield Row(part=kind, what=f"declared lost, median of {len(losses)}", measured=median, unit="s", bound=bound)
        yield Row(part=kind, what="declared lost, p95", measured=worst, unit="s", bound=bound)
    yield Row(part=kind, what=f"runs again, median of {len(losses)}", measured=p(again, 50), unit="s")
    yield Row(part=kind, what="runs again, p95", measured=p(again, 95), unit="s")
    if notice:
        idle = [loss.idle for loss in losses]
        yield Row(part=kind, what="after the payload's end, median", measured=p(idle, 50), unit="s")
        yield Row(part=kind, what="after the payload's end, p95", measured=p(idle, 95), unit="s")


def ratios(rows: list[Row]) -> list[str]:
    """How many times longer each peer's wait is than ours, and a time without work with that wait than ours."""
    lines = []
    for part in dict.fromkeys(row.part for row in rows):
        median = {row.what.partition(",")[0]: row.measured for row in rows if row.part == part and "median" in row.what}
        declared = median.get("declared lost", 0.0)
        idle = median.get("after the payload's end", median["runs again"])
        if declared:
            told = ", ".join(f"{name} {wait / declared:.0f} ×" for name, wait in PEERS.items())
            lines.append(f"{part}: declared lost: {told}")
        told = ", ".join(f"{name} {(wait + idle - declared) / idle:.1f} ×" for name, wait in PEERS.items())
        lines.append(f"{part}: without work, ours with a peer's wait: {told}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="loss of a slice to running again, on the emulated cloud")
    parser.add_argument("--quick", action="store_true", help="two losses of each kind, nothing judged")
    parser.add_argument("--losses", type=int, default=20, help="of each kind")
    parser.add_argument("--out", type=Path, default=None, help="write the figures here as JSON")
    options = parser.parse_args()
    rows: list[Row] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=".", ignore_cleanup_errors=True) as folder:
        recovery = Recovery(Path(folder) / "cloud", 2 if options.quick else options.losses)
        try:
            rows.extend(recovery.rows())
        except Unusable as why:
            problems.append(str(why))
    print(table(rows, judged=not options.quick))
    for line in [*ratios(rows), *(f"problem: {problem}" for problem in problems)]:
        print(line)
    ok = not problems and (options.quick or all(row.ok for row in rows))
    if options.out is not None:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
        answer = {"ok": ok, "problems": problems, "machine": machine, "rows": msgspec.to_builtins(rows)}
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(answer), indent=1))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
