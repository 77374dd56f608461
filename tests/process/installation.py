"""One process of a real installation: a controller on a real store and clock, over machines that are files.

`python -m tests.process.installation STORE FOLDER HOLDER` leads, submits jobs and prints the id of each one that was
acknowledged, until it is killed; the tests of this folder start and kill it, and run further controllers beside it in
their own process. The machines are files in FOLDER, so that they outlive whoever made them and every process sees the
same ones. It must not end by itself.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from itertools import count
from pathlib import Path

import msgspec

from penstock.controller.commands import Commands
from penstock.controller.loop import Controller
from penstock.domain.ids import IdMaker
from penstock.domain.nouns import Command, JobSpec, Pool, Queue, Resources, Slice, Team
from penstock.objects.memory import MemoryObjects
from penstock.ports.capacity import READY, Listing, NameTaken, Seen
from penstock.ports.store import Store
from penstock.wiring.stores import open_store

LABEL = "process-tests"
ZONE = "zone-a"
SLICES_MAX = 2
CALLERS = 4  #: at once, so that several submits share a commit


class SystemClock:
    """The clocks of this machine."""

    def now(self) -> float:
        return time.time()  # noqa: TID251 (a process is where time comes from)

    def steady(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class FolderCapacity:
    """A provider whose machines are files: made at once, ready at once, there until deleted."""

    name = "folder"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def machines(self) -> list[Seen]:
        return [msgspec.json.decode(path.read_bytes(), type=Seen) for path in sorted(self._folder.glob("*.json"))]

    async def create(self, wanted: Slice) -> Seen:
        made = Seen(
            name=wanted.id, zone=wanted.zone, provider_id=f"vm-{secrets.token_hex(4)}", state=READY, label=LABEL
        )
        ready = self._folder / f"{wanted.id}.{secrets.token_hex(4)}"
        ready.write_bytes(msgspec.json.encode(made))
        try:
            self._path(wanted.id).hardlink_to(ready)  # whole or not at all, and never over another one
        except FileExistsError:
            raise NameTaken(wanted.id) from None
        finally:
            ready.unlink()
        return made

    async def list(self, zone: str) -> Listing:
        return Listing(zone=zone, slices=tuple(each for each in self.machines() if each.zone == zone))

    async def get(self, name: str, zone: str) -> Seen | None:
        return next((each for each in self.machines() if (each.name, each.zone) == (name, zone)), None)

    async def delete(self, name: str, zone: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def a_controller(store: Store, capacity: FolderCapacity, holder: str, leads: asyncio.Event) -> Controller:
    """A controller that sets `leads` with its first tick: from then on it answers agents too."""
    return Controller(
        store=store,
        capacities={capacity.name: capacity},
        objects=MemoryObjects(),
        clock=SystemClock(),
        ids=IdMaker(lambda: secrets.randbits(29)),
        label=LABEL,
        holder=holder,
        ticked=lambda _plan, _epoch: leads.set(),
    )


async def set_up(commands: Commands) -> None:
    await commands.put_team(Team(name="red"))
    await commands.put_queue(Queue(name="main", team="red"))
    await commands.put_pool(
        Pool(
            name="small", team="red", provider=FolderCapacity.name, accelerator="v5e-8", chips=8, hosts=1,
            zones=(ZONE,), min=1, max=SLICES_MAX,
        )
    )  # fmt: skip


async def submit_forever(commands: Commands, numbers: count[int]) -> None:
    for number in numbers:
        spec = JobSpec(
            team="red",
            queue="main",
            resources=Resources(accelerators=("v5e-8",), chips=8),
            payload=Command(("python", "train.py")),
            name=f"job {number}",
        )
        submitted = await commands.submit(spec, key=f"{time.monotonic_ns()}-{number}")
        sys.stdout.write(f"{submitted.id}\n")
        sys.stdout.flush()


async def main(address: str, folder: str, holder: str) -> None:
    store = open_store(address, SystemClock())
    leads = asyncio.Event()
    controller = a_controller(store, FolderCapacity(Path(folder)), holder, leads)
    numbers = count()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(controller.run())
        await set_up(controller.commands)
        await leads.wait()
        for _ in range(CALLERS):
            tasks.create_task(submit_forever(controller.commands, numbers))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
