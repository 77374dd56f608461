"""Forks workers, strikes them at the calls it is told, lets others finish, and checks the bucket: one line per case.

The test starts it as a process of its own, because a fork needs a parent without threads, and its imports are paid once
for hundreds of workers. Its words are `calls ROOT`, `points ADDRESS POINT…`, `crowd ADDRESS SEED UNITS KILLS`, or
`losses ROOT SEED KILLS STORING`. An address is a directory, or of the emulated Cloud Storage.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Final

import msgspec

from penstock.emulator.gcs_faults import Fault, Kind
from penstock.extract.plan import RunPlan
from penstock.ports.objects import ObjectsError
from tests.process.extraction import (
    cheap_plan,
    check,
    ended,
    spawn,
    stopped,
    whole_bucket,
    whole_directory,
    work,
)

KILLED = -9
LEASE_S = 0.25
CROWD = 8
#: What a bucket's server does by itself, rather than the trap in front of it; `spoil` damages what is on its way to it.
SERVED: Final[dict[str, Kind]] = {"lose": "lose", "taken": "refuse_after", "spoil": "damage"}


def struck(address: str, plan: RunPlan, point: str) -> str:
    """What became of one worker that is struck at `point` and of the one after it; the bucket is for `checked`."""
    by_server = plant(address, plan, point)
    first = spawn(address, plan, "first", point="" if by_server else point, lease_s=LEASE_S)
    if point.startswith("stop"):
        if not stopped(first):
            return "the worker did not stop"
    elif (code := ended(first)) != (KILLED if point.startswith("kill") else 0):
        return f"the worker ended with {code}"
    if (code := ended(spawn(address, plan, "second", lease_s=LEASE_S))) != 0:
        return f"the next worker ended with {code}"
    if point.startswith("stop"):
        os.kill(first, signal.SIGCONT)
        if (code := ended(first)) != 0:
            return f"the worker that slept ended with {code}"
    return "ok"


def plant(address: str, plan: RunPlan, point: str) -> bool:
    """Have the server strike, where the point is one for servers and there is one."""
    how, verb, what, *_ = point.split(":")
    if how not in SERVED or "://" not in address:
        return False
    assert verb == "put_new", "only writes are aimed at"
    subject = f"{address.removeprefix('gs://')}/runs/{plan.run}/{what}"
    body = msgspec.json.encode([Fault(SERVED[how], subject=subject, method="PUT")])
    url = f"{os.environ['STORAGE_EMULATOR_HOST']}/_emulator/faults"
    with urllib.request.urlopen(urllib.request.Request(url, body, method="POST"), timeout=60):
        return True


def checked(address: str, plan: RunPlan) -> str:
    """What an independent checker says. Starts threads: nothing may be forked any more."""
    try:
        check(whole_bucket(address) if "://" in address else whole_directory(address), plan)
    except (AssertionError, ValueError, KeyError, ObjectsError) as error:
        return f"the bucket is wrong: {type(error).__name__}: {error}".replace("\n", " ")[:500]
    return "ok"


def crowd(address: str, seed: int, units: int, kills: int) -> str:
    """Eight workers on one run: some are killed and replaced, others sleep past their lease and go on.

    One sleeps with its hand on a commit until the others are done with everything, this unit too.
    """
    rng = random.Random(seed)
    plan = cheap_plan(rows=units * 3, unit_rows=3)
    names = iter(range(10_000))
    late = spawn(address, plan, "late", point="stop-before:put_new:commits", lease_s=LEASE_S * 2)
    if not stopped(late):
        return "the worker that is to be late did not stop"

    def start() -> int:
        return spawn(address, plan, f"w{next(names)}", lease_s=LEASE_S * 2, unit_s=0.05)

    alive = {start() for _ in range(CROWD - 1)}
    asleep: dict[int, float] = {}  #: and until when, which is long after its lease has run out
    slept: set[int] = set()
    codes: list[int] = []
    for number in range(kills):
        wake(asleep, time.monotonic())
        time.sleep(rng.uniform(0.05, 0.3))  # how far they have come is chance; what comes out is not
        victim = rng.choice(sorted(alive))
        if number % 2:
            os.kill(victim, signal.SIGSTOP)
            slept.add(victim)
            asleep[victim] = time.monotonic() + 5 * LEASE_S
        else:
            os.kill(victim, signal.SIGKILL)
            codes.append(ended(victim))
        alive = (alive - {victim}) | {start()}
    while asleep:
        time.sleep(LEASE_S / 5)
        wake(asleep, time.monotonic())
    codes += [ended(child) for child in alive | slept]
    os.kill(late, signal.SIGCONT)
    codes.append(ended(late))
    # What was killed while others sealed left things behind; the next worker, or `tpu extract gc`, sweeps them.
    codes.append(ended(spawn(address, plan, "last", lease_s=LEASE_S)))
    if set(codes) - {0, KILLED}:
        return f"workers ended with {codes}"
    return checked(address, plan)


def losses(root: str, seed: int, kills: int, storing_max: int) -> list[int]:
    """For each of some workers that were killed on a run: how many units it had begun or held, and not committed."""
    rng = random.Random(seed)
    plan = cheap_plan(rows=(kills + 1) * 90, unit_rows=3)  # more than they can do before they are killed
    notes = f"{root}.begun"
    lost: list[int] = []
    for number in range(kills):
        name = f"v{number}"
        victim = spawn(root, plan, name, lease_s=LEASE_S, unit_s=0.1, storing_max=storing_max, notes=notes)
        patience = time.monotonic() + 60
        while not _begun_by(notes, name) and time.monotonic() < patience:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.4))  # how far it has come is chance; the bound is not
        os.kill(victim, signal.SIGKILL)
        ended(victim)
        committed = {path.name for path in Path(f"{root}/runs/{plan.run}/commits").glob("*")}
        lost.append(len((_begun_by(notes, name) | _held_by(f"{root}/runs/{plan.run}/leases", name)) - committed))
    if ended(spawn(root, plan, "last", lease_s=LEASE_S)) != 0:
        raise SystemExit("the last worker did not end well")
    check(whole_directory(root), plan)
    return lost


def _begun_by(notes: str, name: str) -> set[str]:
    if not Path(notes).exists():
        return set()
    lines = (line.split() for line in Path(notes).read_text().splitlines())
    return {unit for worker, unit in lines if worker == name}


def _held_by(leases: str, name: str) -> set[str]:
    """Units with a lease of this worker."""
    found = [json.loads(path.read_bytes()) for path in Path(leases).glob("*/*")]
    return {lease["unit"] for lease in found if lease["attempt"].startswith(f"{name}-")}


def wake(asleep: dict[int, float], now: float) -> None:
    """Let those go on whose time has come. One that sleeps in a write to a directory holds others up until then."""
    for child, until in tuple(asleep.items()):
        if now >= until:
            os.kill(child, signal.SIGCONT)
            del asleep[child]


def main() -> None:
    match sys.argv[1:]:
        case ["calls", root]:
            made = asyncio.run(work(root, cheap_plan(rows=12, unit_rows=4), "alone", lease_s=3000, unit_s=0.0))
            sys.stdout.write("\n".join(sorted(made)) + "\n")
        case ["points", address, *points]:
            plan = cheap_plan(rows=12, unit_rows=4)
            places = [f"{address}/{number}" for number in range(len(points))]
            workers = [struck(place, plan, point) for place, point in zip(places, points, strict=True)]
            for place, point, became in zip(places, points, workers, strict=True):
                sys.stdout.write(f"{point} {checked(place, plan) if became == 'ok' else became}\n")
        case ["crowd", address, seed, units, kills]:
            sys.stdout.write(f"{crowd(address, int(seed), int(units), int(kills))}\n")
        case ["losses", root, seed, kills, storing_max]:
            lost = losses(root, int(seed), int(kills), int(storing_max))
            sys.stdout.write(f"{' '.join(map(str, lost))}\n")
        case words:
            sys.exit(f"unknown words: {words}")


if __name__ == "__main__":
    main()
