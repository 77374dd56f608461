"""How fast the store is: durable submits and assignments on both databases, and claims beside procrastinate's.

`python bench/store.py [--json]`, under `tools/with_postgres` for the PostgreSQL half. Every figure is of commits that
are durable when they are counted, on a fresh store, by the calls a controller would make. Exits with 1 when a figure
misses its floor. It compares; it must not tune anything that the product does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec.structs import replace

from penstock.domain.lifecycle import JobState, SliceState
from penstock.domain.nouns import Attempt, Bound, Chain, Command, Job, JobSpec, Resources, Slice
from penstock.ports.store import Store, Transaction
from penstock.store.sqlite import SqliteStore

BATCH = 1000
BATCHES = 10
SINGLE = 4000
CALLERS = 64
ASSIGNS = 5000
ASSIGNS_PER_VERB = 100
CLAIMS = 2000


class Figure(msgspec.Struct, frozen=True):
    """One measured rate. `floor` is what issue 2 promises; None where it promises nothing."""

    database: str
    what: str
    per_second: float
    floor: float | None = None

    @property
    def ok(self) -> bool:
        return self.floor is None or self.per_second >= self.floor


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def steady(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def a_job(number: int, queue: str) -> Job:
    spec = JobSpec(
        team="red",
        queue=queue,
        resources=Resources(accelerators=("v5litepod-8",), chips=8),
        payload=Command(("python", "train.py", "--seed", str(number)), snapshot="a" * 64),
        name=f"run {number}",
        tags=("sweep",),
    )
    return Job(
        id=f"j{queue}{number:012}",
        spec=spec,
        state=JobState.QUEUED,
        created_at=1.0,
        key=f"{queue}/{number}",
        body_hash="b" * 64,
    )


def submit(tx: Transaction, queue: str, first: int, count: int) -> None:
    for number in range(first, first + count):
        tx.add(a_job(number, queue), "job.created")


def make_slices(tx: Transaction, count: int) -> None:
    for number in range(count):
        one = tx.add(
            Slice(
                id=f"s{number:06}",
                team="red",
                pool="pool",
                provider="fake",
                zone="zone-a",
                accelerator="v5litepod-8",
                chips=8,
                hosts=2,
                intended_at=1.0,
            ),
            "slice.intended",
        )
        one = tx.save(replace(one, state=SliceState.CREATING), "slice.creating")
        tx.save(replace(one, state=SliceState.READY, provider_id=f"p{number}", joined=("x", "y")), "slice.ready")


def assign(tx: Transaction, first: int, count: int) -> None:
    """What placing does: job, attempt, slice and counter of each, in one transaction."""
    jobs = tx.jobs([f"jassign{number:012}" for number in range(first, first + count)])
    slices = tx.slices([f"s{number:06}" for number in range(first, first + count)])
    for number, (job, one) in enumerate(zip(jobs, slices, strict=True), first):
        attempt = Attempt(
            id=f"a{number:06}",
            job=job.id,
            replica=0,
            fence=job.fence + 1,
            team="red",
            queue="assign",
            chips=8,
            slices=(Bound(one.id, one.provider_id or ""),),
            hosts=2,
            created_at=tx.at,
            timeout_s=600.0,
        )
        chain = Chain(replica=0, fence=attempt.fence, attempts=1, live=True)
        placed = replace(job, state=JobState.PROVISIONING, chains=(chain,), fence=attempt.fence)
        tx.save(placed, "job.placed", fence=attempt.fence)
        tx.add(attempt, "attempt.created", fence=attempt.fence, body={"job": job.id})
        tx.save(replace(one, attempt=attempt.id), "slice.bound")
        tx.reserve("queue", "assign", 8)


def claim(tx: Transaction, queue: str, count: int) -> int:
    """Take the heads of a queue, as a worker that pulls would."""
    heads = tx.heads([queue], count)[queue]
    for job in heads:
        chain = Chain(replica=0, fence=1, attempts=1, live=True)
        tx.save(replace(job, state=JobState.PROVISIONING, chains=(chain,), fence=1), "job.placed", fence=1)
    return len(heads)


async def rate(count: int, work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return count / (time.perf_counter() - started)


async def spread(callers: int, calls: int, one: Callable[[int], Awaitable[object]]) -> None:
    """`calls` calls by `callers` that each wait for their own answer."""
    numbers = iter(range(calls))

    async def caller() -> None:
        for number in numbers:
            await one(number)

    await asyncio.gather(*(caller() for _ in range(callers)))


async def measure(database: str, store: Store, floors: dict[str, float]) -> list[Figure]:
    figures: list[Figure] = []

    async def note(what: str, count: int, work: Awaitable[object]) -> None:
        figures.append(Figure(database, what, round(await rate(count, work)), floors.get(what)))

    await note(
        "submits in batches",
        BATCH * BATCHES,
        spread(1, BATCHES, lambda n: store.transact(submit, "batch", n * BATCH, BATCH)),
    )
    await note("submits singly", SINGLE, spread(CALLERS, SINGLE, lambda n: store.transact(submit, "one", n, 1)))
    await note("submits singly, one caller", 500, spread(1, 500, lambda n: store.transact(submit, "alone", n, 1)))
    await store.transact(submit, "assign", 0, ASSIGNS)
    await store.transact(make_slices, ASSIGNS)
    verbs = ASSIGNS // ASSIGNS_PER_VERB
    await note(
        "assigns in batches",
        ASSIGNS,
        spread(1, verbs, lambda n: store.transact(assign, n * ASSIGNS_PER_VERB, ASSIGNS_PER_VERB)),
    )
    await store.transact(submit, "claim", 0, CLAIMS)
    await note("claims in batches", CLAIMS, spread(1, CLAIMS // 100, lambda _: store.transact(claim, "claim", 100)))
    await store.transact(submit, "claim", CLAIMS, CLAIMS)
    await note("claims singly", CLAIMS, spread(CALLERS, CLAIMS, lambda _: store.transact(claim, "claim", 1)))
    left = (await store.read(lambda r: r.waiting_counts())).get("claim", 0)
    if left:
        raise RuntimeError(f"{left} jobs were never claimed")
    return figures


async def measure_procrastinate(url: str) -> list[Figure]:
    """The same claims by procrastinate: its own schema, its own fetch, one connection per caller up to 8."""
    import procrastinate

    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url, min_size=8, max_size=8))
    figures: list[Figure] = []
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        task = app.configure_task("bench", queue="claim")
        payloads: list[dict[str, Any]] = [{"seed": number} for number in range(2 * CLAIMS)]
        defers = task.batch_defer_async(*payloads)
        figures.append(Figure("procrastinate", "submits in batches", round(await rate(2 * CLAIMS, defers))))
        worker = await app.job_manager.register_worker()

        async def fetch(_: int) -> None:
            job = await app.job_manager.fetch_job(queues=["claim"], worker_id=worker)
            if job is None:
                raise RuntimeError("procrastinate had no job left")

        for what, callers in (("claims singly, one caller", 1), ("claims singly", 8)):
            figures.append(Figure("procrastinate", what, round(await rate(CLAIMS, spread(callers, CLAIMS, fetch)))))
    return figures


async def sqlite_figures() -> list[Figure]:
    # Beside the checkout, not in /tmp: a memory file system would sync for free.
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        store = SqliteStore.open(Path(folder) / "store.db", SystemClock())
        try:
            floors = {"submits in batches": 3000.0, "submits singly": 500.0, "assigns in batches": 2000.0}
            return await measure("sqlite", store, floors)
        finally:
            await store.close()


async def postgres_figures(server: str) -> list[Figure]:
    import psycopg

    from penstock.store.postgres import PostgresStore

    figures: list[Figure] = []
    for whose in ("penstock", "procrastinate"):
        name = f"bench_{whose}_{os.getpid()}"
        url = urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f'create database "{name}"')
        try:
            if whose == "penstock":
                store = PostgresStore.open(url, SystemClock())
                try:
                    floors = {"submits in batches": 5000.0, "assigns in batches": 2000.0}
                    figures += await measure("postgres", store, floors)
                finally:
                    await store.close()
            else:
                figures += await measure_procrastinate(url)
        finally:
            with psycopg.connect(server, autocommit=True) as connection:
                connection.execute(f'drop database "{name}" with (force)')
    return figures


def report(figures: list[Figure], missing: str | None) -> dict[str, Any]:
    rates = {(figure.database, figure.what): figure.per_second for figure in figures}
    answer: dict[str, Any] = {
        "figures": [{**msgspec.structs.asdict(figure), "ok": figure.ok} for figure in figures],
        "ok": all(figure.ok for figure in figures),
    }
    if missing:
        answer["postgres_missing"] = missing
    else:
        theirs = rates["procrastinate", "claims singly"]
        answer["claims_per_procrastinate_claim"] = {
            "singly": round(rates["postgres", "claims singly"] / theirs, 2),
            "in batches": round(rates["postgres", "claims in batches"] / theirs, 2),
        }
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed of the store.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    figures = asyncio.run(sqlite_figures())
    server = os.environ.get("PENSTOCK_TEST_POSTGRES")
    missing = None if server else "PENSTOCK_TEST_POSTGRES is not set; run under tools/with_postgres"
    if server:
        figures += asyncio.run(postgres_figures(server))
    answer = report(figures, missing)
    if as_json:
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    else:
        for figure in figures:
            floor = "" if figure.floor is None else f"  (floor {figure.floor:,.0f}{'' if figure.ok else ', MISSED'})"
            sys.stdout.write(f"{figure.database:14} {figure.what:28} {figure.per_second:>10,.0f}/s{floor}\n")
        if missing:
            sys.stdout.write(f"no PostgreSQL figures: {missing}\n")
        else:
            sys.stdout.write(f"times procrastinate's claims: {answer['claims_per_procrastinate_claim']}\n")
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
