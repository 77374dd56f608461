"""A process that commits until it is killed, and prints each job it was told is durable.

`python commit_forever.py FILE FIRST_NUMBER`; `test_crashes.py` starts and kills it.
"""

from __future__ import annotations

import asyncio
import sys

from penstock.ports.store import Store, Transaction
from penstock.store.sqlite import SqliteStore
from tests.contract.store.examples import a_job, an_attempt, close, fail, place, submit_one
from tests.contract.store.harness import HandClock


def move(tx: Transaction, chips: int) -> None:
    tx.reserve("queue", "main", chips)
    tx.reserve("cohort", "red", chips)


def live_and_die(tx: Transaction, number: int) -> str:
    """A whole life in one transaction, with a counter that must not drift."""
    move(tx, 8)
    job, attempt = place(tx, submit_one(tx, a_job(number)), an_attempt(number, job=f"j{number:04}"))
    if number % 3:
        close(tx, attempt)
        fail(tx, job)
        move(tx, -8)
    return job.id


async def one_caller(store: Store, number: int, step: int) -> None:
    while True:
        acknowledged = await store.transact(live_and_die, number)
        sys.stdout.write(f"{acknowledged}\n")
        sys.stdout.flush()
        number += step


async def main(path: str, first: int) -> None:
    store = SqliteStore.open(path, HandClock())
    await asyncio.gather(*(one_caller(store, first + lane, 4) for lane in range(4)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
