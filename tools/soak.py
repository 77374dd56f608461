"""Run `tpu sim check` on fresh seeds for a length of time; `make soak` calls it.

Starts one simulator process per core, batch after batch, adds up every figure they report and prints the
sums as JSON. It stops at the first batch that fails, with the replay of its seeds, and exits with that
batch's code. It judges nothing itself: the simulator's rules do.
"""

import argparse
import json
import secrets
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

TPU = Path(sys.executable).with_name("tpu")
# Keys that name a batch rather than count something in it.
NOT_SUMMED = {"start", "seed", "hash", "trace_hash"}


def add(total: dict[str, Any], batch: dict[str, Any]) -> None:
    """Add every number in the batch's report, however deep, to the same place in the total."""
    for key, value in batch.items():
        if key in NOT_SUMMED:
            continue
        if isinstance(value, dict):
            add(total.setdefault(key, {}), value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            total[key] = total.get(key, 0) + value
        elif isinstance(value, list):
            total.setdefault(key, []).extend(value)


def check(start: int, seeds: int) -> tuple[int, subprocess.CompletedProcess[str]]:
    command = [str(TPU), "sim", "check", "--seeds", str(seeds), "--start", str(start), "--json"]
    return start, subprocess.run(command, capture_output=True, text=True, check=False)


def soak(minutes: float, processes: int, batch: int, start: int) -> int:
    end = time.monotonic() + minutes * 60
    total: dict[str, Any] = {}
    seeds = 0
    next_start = start
    running: set[Future[tuple[int, subprocess.CompletedProcess[str]]]] = set()
    print(f"soak: seeds from {start}, {minutes:g} minutes, {processes} processes", flush=True)
    with ThreadPoolExecutor(processes) as pool:
        while running or time.monotonic() < end:
            while len(running) < processes and time.monotonic() < end:
                running.add(pool.submit(check, next_start, batch))
                next_start += batch
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                batch_start, result = future.result()
                if result.returncode != 0:
                    print(result.stdout, result.stderr, sep="\n")
                    print(f"soak: failed; replay with: tpu sim check --seeds {batch} --start {batch_start}")
                    return result.returncode
                add(total, json.loads(result.stdout))
                seeds += batch
                print(f"soak: {seeds} seeds, {max(0.0, end - time.monotonic()):.0f} s left", flush=True)
    print(json.dumps({"seeds_run": seeds, "first_seed": start, "sums": total}, indent=2, sort_keys=True))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description="simulation seeds nobody has seen before, for a length of time"
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=20, help="seeds per process start")
    parser.add_argument("--start", type=int, default=None, help="first seed (a fresh one where not given)")
    options = parser.parse_args()
    # Seeds below a million belong to CI; above them each soak starts somewhere new.
    start = 1_000_000 + secrets.randbelow(10**9) if options.start is None else options.start
    return soak(options.minutes, options.processes, options.batch, start)


if __name__ == "__main__":
    sys.exit(main())
