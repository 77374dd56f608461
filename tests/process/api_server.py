"""A whole API server in a process of its own, over machines that are ready at once: `python -m … DIRECTORY`.

It prints its address when it answers. Tests that speak HTTP to a real server start it; hosts of its machines can join
and sync, so that routes of agents have something to answer about. It must not end by itself.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
from pathlib import Path

import uvicorn

from penstock.controller.loop import Controller
from penstock.domain.ids import IdMaker
from penstock.domain.nouns import Queue, Role, Slice, Team
from penstock.objects.memory import MemoryObjects
from penstock.ports.capacity import READY, Listing, Seen
from penstock.server import app
from penstock.server.auth import Token, Tokens, token_hash
from penstock.server.secret_files import SecretFiles
from penstock.server.service import Service, Settings
from penstock.store.sqlite import SqliteStore
from tests.process.installation import SystemClock

LABEL = "api-tests"
KEY = b"k" * 32
TOKEN = "token-of-the-test-user"
STRANGER = "token-of-another-team"


class ReadyCapacity:
    """A provider whose machines are ready at once, on this machine's books only."""

    name = "local"

    def __init__(self) -> None:
        self._made: dict[str, Seen] = {}

    async def create(self, wanted: Slice) -> Seen:
        made = Seen(name=wanted.id, zone=wanted.zone, provider_id=f"vm-{wanted.id}", state=READY, label=LABEL)
        return self._made.setdefault(wanted.id, made)

    async def list(self, zone: str) -> Listing:
        return Listing(zone=zone, slices=tuple(seen for seen in self._made.values() if seen.zone == zone))

    async def get(self, name: str, zone: str) -> Seen | None:
        return self._made.get(name)

    async def delete(self, name: str, zone: str) -> None:
        self._made.pop(name, None)

    async def preempt(self, name: str, notice_s: float) -> None:
        self._made.pop(name, None)


def make_service(directory: Path) -> Service:
    clock = SystemClock()
    store = SqliteStore.open(directory / "penstock.db", clock)
    objects, capacity = MemoryObjects(), ReadyCapacity()
    ids = IdMaker(lambda: secrets.randbits(29))
    controller = Controller(
        store=store, capacities={"local": capacity}, objects=objects, clock=clock, ids=ids, label=LABEL, holder="api"
    )
    rows = (
        Token(sha256=token_hash(TOKEN), name="olga", team="lab", role=Role.OPERATOR),
        Token(sha256=token_hash(STRANGER), name="stan", team="other", role=Role.ADMIN),
    )
    return Service(
        controller=controller,
        store=store,
        objects=objects,
        clock=clock,
        ids=ids,
        tokens=Tokens(rows=rows),
        key=KEY,
        secrets=SecretFiles(directory / "secrets"),
        settings=Settings(
            version="0.0.0", store="sqlite", root="memory:", started_at=clock.now(), local_pools=True, local_slices=2
        ),
        preempt=capacity.preempt,
    )


async def main(directory: str) -> None:
    service = make_service(Path(directory))
    for team in ("lab", "other"):
        await service.controller.commands.put_team(Team(name=team))
        await service.controller.commands.put_queue(Queue(name=team, team=team))
    # asyncio switches Nagle's delay off only for sockets that say they are TCP: without it each answer takes 40 ms.
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    door.bind(("127.0.0.1", 0))
    door.listen(128)
    config = uvicorn.Config(app.make(service), log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(service.controller.run())
        tasks.create_task(server.serve([door]))
        sys.stdout.write(f"http://127.0.0.1:{door.getsockname()[1]}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
