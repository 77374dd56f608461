"""Run `tpu sim check` on fresh seeds for a length of time; `make soak` calls it.

Starts one simulator process per core, chunk after chunk, adds up their reports and prints the sums, as a table and,
with `--out`, as JSON. A violation is shown at once with its replay command, and the soak goes on; a simulator that dies
ends it. It judges nothing itself: violations are the rules' word, and what a whole run should have exercised is that
of `penstock.sim.check.coverage_problems`. Exits with 1 on any violation or problem.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec

from penstock.sim.check import COVERING_SEEDS, Report, coverage_problems

TPU = Path(sys.executable).with_name("tpu")
SHOWN_MAX = 10  #: violations told in full; all of them are in the JSON
#: Seeds of one minute of the calendar: more than any soak uses, so that two soaks never share any.
SEEDS_PER_MINUTE = 100_000


class Died(Exception):
    """A simulator process ended without a report."""


def fresh_start() -> int:
    """A seed that tells when the soak began (261115043000000: 2026-11-15 04:30), far above those of CI."""
    return int(time.strftime("%y%m%d%H%M", time.gmtime())) * SEEDS_PER_MINUTE


def check(start: int, seeds: int) -> Report:
    """One chunk in a process of its own, so that memory and imports start afresh."""
    command = [str(TPU), "sim", "check", "--seeds", str(seeds), "--start", str(start), "--workers", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return msgspec.json.decode(done.stdout, type=Report)
    except msgspec.DecodeError:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise Died(f"exit code {done.returncode}: {last}; again with: tpu {' '.join(command[1:-1])}") from None


def add(total: Report, chunk: Report) -> None:
    """Add a chunk to the sums. Its own problems are left out: a chunk is too small to cover anything."""
    total.seeds += chunk.seeds
    total.events += chunk.events
    total.handled += chunk.handled
    total.virtual_h += chunk.virtual_h
    total.cpu_s += chunk.cpu_s
    total.violations = [*total.violations, *chunk.violations]
    for sums, more in ((total.faults, chunk.faults), (total.premises, chunk.premises)):
        for name, times in more.items():
            sums[name] = sums.get(name, 0) + times
    for point, sides in chunk.points.items():
        known = total.points.setdefault(point, {"before": 0, "after": 0})
        for side, times in sides.items():
            known[side] += times


def soak(minutes: float, processes: int, chunk: int, start: int) -> Report:
    """Chunk after chunk until the time is up; at least one for each process."""
    began = time.monotonic()
    end = began + minutes * 60
    total = Report(first_seed=start, faults={}, premises={}, points={})
    running: set[Future[Report]] = set()
    next_start = start
    print(f"soak: seeds from {start}, {minutes:g} minutes, {processes} processes", flush=True)
    with ThreadPoolExecutor(processes) as pool:
        while True:
            while len(running) < processes and (time.monotonic() < end or next_start == start):
                running.add(pool.submit(check, next_start, chunk))
                next_start += chunk
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                show_violations(total, future.result())
                add(total, future.result())
                left_s = max(0.0, end - time.monotonic())
                print(
                    f"soak: {total.seeds} seeds, {total.events:,} events, {sum(total.faults.values()):,} faults, "
                    f"{len(total.violations)} violations, {left_s:.0f} s left",
                    flush=True,
                )
    total.wall_s = time.monotonic() - began
    total.problems = coverage_problems(total)
    return total


def show_violations(total: Report, chunk: Report) -> None:
    room = max(0, SHOWN_MAX - len(total.violations))
    for failure in chunk.violations[:room]:
        print(f"soak: {failure.rule}, seed {failure.seed}: {failure.message}")
        print(f"{failure.story}\nreplay: {failure.replay}", flush=True)


def table(report: Report) -> str:
    """The sums as people read them."""
    rate = report.handled / report.cpu_s if report.cpu_s else 0.0
    sides = [(times, f"{side} {point}") for point, both in report.points.items() for side, times in both.items()]
    rarest = ", ".join(f"{where} ({times})" for times, where in sorted(sides)[:3])
    lines = [
        f"seeds       {report.seeds:,} from {report.first_seed}, {report.virtual_h:,.1f} virtual hours",
        f"time        {report.wall_s:,.0f} s, {rate:,.0f} events/s per process",
        f"events      {report.handled:,} handled by the controller, {report.events:,} of them commits",
        f"faults      {sum(report.faults.values()):,}: " + _pairs(report.faults),
        "premises    " + _pairs(report.premises),
        f"crashes     {sum(times for times, _ in sides):,} at {len(sides)} points and sides; rarest: {rarest}",
        f"violations  {len(report.violations)}",
    ]
    lines += [f"            {failure.rule}: {failure.replay}" for failure in report.violations[:SHOWN_MAX]]
    lines += [f"problem     {problem}" for problem in report.problems]
    if report.seeds < COVERING_SEEDS:
        lines.append(f"note        fewer than {COVERING_SEEDS} seeds: premises and crash points are not demanded")
    return "\n".join(lines)


def _pairs(counts: dict[str, int]) -> str:
    return " ".join(f"{name}:{counts[name]:,}" for name in sorted(counts))


def main() -> int:
    parser = argparse.ArgumentParser(description="simulation seeds nobody has seen before, for a length of time")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--chunk", type=int, default=20, help="seeds per start of a process")
    parser.add_argument("--start", type=int, default=None, help="first seed (where not given: from the date)")
    parser.add_argument("--out", type=Path, default=None, help="write the sums here as JSON")
    options = parser.parse_args()
    start = fresh_start() if options.start is None else options.start
    try:
        report = soak(options.minutes, options.processes, options.chunk, start)
    except Died as reason:
        print(f"soak: the simulator died: {reason}", file=sys.stderr)
        return 1
    print(table(report))
    if options.out is not None:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
