"""How long `GET /v1/cost` takes over a hundred thousand attempts, from a real server on SQLite on disk.

`python bench/cost.py [--attempts N] [--runs N] [--json]`. The attempts are written into the store of a server that is
stopped, as they would be after a week of 16 users; then the server starts and is asked over HTTP, for each way to group
the rows. What is timed is the whole request. Exits with 1 when the bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from core import Bound, Row, table
from msgspec.structs import replace
from served import Served, p

from penstock.domain.lifecycle import AttemptState, Cause
from penstock.domain.nouns import Attempt, Save
from penstock.ports.store import Transaction
from penstock.store.sqlite import SqliteStore
from penstock.wiring.clock import SystemClock

PART = "cost"
BOUND_S = 1.0
BATCH = 5_000
WEEK_S = 7 * 86_400.0
USERS, QUEUES, ZONES = 16, 8, 4
ENDS = (Cause.SUCCEEDED, Cause.SUCCEEDED, Cause.SUCCEEDED, Cause.PREEMPTED, Cause.USER_ERROR)


def past(tx: Transaction, first: int, count: int, all_of_them: int) -> None:
    """Attempts that ended within the last six days; three of four jobs had one, the others more."""
    rng = random.Random(first)
    for number in range(first, first + count):
        begun = tx.at - 3600.0 - 6 * 86_400.0 * (1.0 - number / all_of_them)
        ran = rng.uniform(10.0, 3000.0)
        cause = rng.choice(ENDS)
        one = tx.add(
            Attempt(
                id=f"a{number:08}", job=f"j{number * 3 // 4:08}", replica=0, fence=number + 1, team="default",
                queue=f"q{number % QUEUES}", chips=8, slices=(), hosts=1, created_at=begun, timeout_s=86_400.0,
                user=f"user-{number % USERS}", zone=f"zone-{number % ZONES}", usd_per_chip_hour=1.2,
                waited_s=rng.uniform(0.0, 600.0),
            ),
            "attempt.created",
        )  # fmt: skip
        saves = (Save(host=0, at=begun + ran / 2),) if cause is Cause.PREEMPTED else ()
        closed = replace(
            one, state=AttemptState.CLOSED, closed_at=begun + ran, started_at=begun + 5.0, cause=cause, saves=saves
        )
        tx.save(closed, "attempt.closed")


async def fill(file: Path, attempts: int) -> None:
    store = SqliteStore.open(file, SystemClock())
    for first in range(0, attempts, BATCH):
        await store.transact(past, first, min(BATCH, attempts - first), attempts)
    await store.close()


def measure(attempts: int, runs: int, folder: Path) -> list[Row]:
    served = Served(folder / "home")
    with served:
        pass  # it makes the directory and the store
    asyncio.run(fill(served.home / "penstock.db", attempts))
    rows = []
    with served, served.client() as client:
        for by in ("job", "user", "queue", "zone"):
            times, before = [], served.weigh().server_cpu_s
            for _ in range(runs):
                began = time.perf_counter()
                page = client.cost(by=by, since=time.time() - WEEK_S)  # noqa: TID251 (the server's own clock)
                times.append(time.perf_counter() - began)
                if page.total.attempts != attempts:
                    raise RuntimeError(f"{attempts} attempts were written, {page.total.attempts} are counted")
            what = f"{attempts:,} attempts by {by}, p50 of {runs}"
            bound = Bound(BOUND_S, at_most=True)
            rows.append(Row(part=PART, what=what, measured=p(times, 50), unit="s", bound=bound))
            rows.append(Row(part=PART, what=f"the same, max of {runs}", measured=max(times), unit="s", bound=bound))
            spent = (served.weigh().server_cpu_s - before) / runs
            rows.append(Row(part=PART, what="processor time of the server, each", measured=spent, unit="s"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="how long GET /v1/cost takes")
    parser.add_argument("--attempts", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=".", ignore_cleanup_errors=True) as folder:
        rows = measure(options.attempts, options.runs, Path(folder).absolute())
    print(json.dumps(msgspec.to_builtins(rows), indent=1) if options.json else table(rows))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
