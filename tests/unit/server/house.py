"""A server in this process: the real application over a real controller, SQLite on disk and objects in memory.

Tests get a `House` from the fixture in `conftest.py`. Two teams live in it, `lab` and `other`, so that every test can
look over the wall. Requests go through the ASGI interface; streams are read message by message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2
import msgspec

from penstock.controller.loop import Controller
from penstock.domain.ids import IdMaker
from penstock.domain.nouns import Pool, Queue, Role, Slice, Team
from penstock.objects.memory import MemoryObjects
from penstock.ports.capacity import Listing, Seen
from penstock.server import app
from penstock.server.auth import Token, Tokens, token_hash
from penstock.server.secret_files import SecretFiles
from penstock.server.service import Service, Settings
from penstock.store.sqlite import SqliteStore

T = TypeVar("T")
START = 1_800_000_000.0
KEY = bytes(range(32))
JOB: dict[str, Any] = {"payload": {"type": "snippet", "code": "result = 1"}}

USERS = {
    "viewer": ("vera", "lab", Role.VIEWER),
    "submitter": ("sam", "lab", Role.SUBMITTER),
    "second": ("sue", "lab", Role.SUBMITTER),
    "admin": ("ada", "lab", Role.ADMIN),
    "operator": ("olga", "ops", Role.OPERATOR),
    "stranger": ("stan", "other", Role.ADMIN),
}


class SteadyClock:
    """Real waits; a calendar that begins at a round number."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def now(self) -> float:
        return START + self.steady()

    def steady(self) -> float:
        return time.monotonic() - self._began

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SlowCapacity:
    """A provider that never gets round to anything."""

    name = "local"

    async def create(self, wanted: Slice) -> Seen:
        await asyncio.Event().wait()
        raise AssertionError

    async def list(self, zone: str) -> Listing:
        return Listing(zone=zone, slices=())

    async def get(self, name: str, zone: str) -> Seen | None:
        return None

    async def delete(self, name: str, zone: str) -> None:
        return None


class Answer(msgspec.Struct, frozen=True):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class House:
    def __init__(self, directory: Path, **settings: Any) -> None:
        self.runner = asyncio.Runner()
        self.clock = SteadyClock()
        self.store = SqliteStore.open(directory / "penstock.db", self.clock)
        self.objects = MemoryObjects()
        ids = IdMaker(lambda: 7)
        self.controller = Controller(
            store=self.store,
            capacities={"local": SlowCapacity()},
            objects=self.objects,
            clock=self.clock,
            ids=ids,
            label="test",
            holder="house",
        )
        rows = tuple(
            Token(sha256=token_hash(f"token-{key}"), name=name, team=team, role=role)
            for key, (name, team, role) in USERS.items()
        )
        made = {"version": "0.0.0", "store": "sqlite", "root": "memory:", "started_at": START, **settings}
        self.service = Service(
            controller=self.controller,
            store=self.store,
            objects=self.objects,
            clock=self.clock,
            ids=ids,
            tokens=Tokens(rows=rows),
            key=KEY,
            secrets=SecretFiles(directory / "secrets"),
            settings=Settings(**made),
        )
        self.app = app.make(self.service)
        self._client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=self.app), base_url="http://house")
        for team in ("lab", "other"):
            self.wait(self.controller.commands.put_team(Team(name=team)))
            self.wait(self.controller.commands.put_queue(Queue(name=team, team=team)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.stopping.set()
        self.wait(self.service.close_parts())
        self.wait(self._client.aclose())
        self.wait(self.store.close())
        self.runner.close()

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    # --- calling ---
    def call(self, method: str, path: str, user: str | None = "submitter", json: Any = None, **more: Any) -> Answer:
        headers: dict[str, str] = dict(more.pop("headers", {}))
        if user is not None:
            headers["authorization"] = f"Bearer token-{user}"
        content = more.pop("content", None)
        if json is not None:
            content = msgspec.json.encode(json)
            headers.setdefault("content-type", "application/json")

        async def send() -> Answer:
            reply = await self._client.request(method, path, headers=headers, content=content, **more)
            return Answer(reply.status_code, reply.headers, reply.content)

        return self.wait(send())

    def get(self, path: str, by: str = "submitter", **params: Any) -> Any:
        answer = self.call("GET", path, by, params=params)
        assert answer.status == 200, answer.body
        return answer.json

    def submit(self, user: str = "submitter", **changes: Any) -> str:
        answer = self.call("POST", "/v1/jobs", user, {**JOB, **changes})
        assert answer.status == 201, answer.body
        id: str = answer.json["id"]
        return id

    def refused(self, status: int, method: str, path: str, user: str | None = "submitter", **more: Any) -> Any:
        """The problem of a call that must be refused so."""
        answer = self.call(method, path, user, **more)
        assert answer.status == status, answer.body
        assert answer.headers["content-type"] == "application/problem+json"
        said = answer.json
        assert said["status"] == status
        assert "\n" not in said["detail"]
        return said

    def pool(self, name: str, team: str = "lab", **changes: Any) -> None:
        wanted: dict[str, Any] = {"provider": "local", "zones": ("local",), "max": 4, **changes}
        pool = Pool(name=name, team=team, accelerator="v5e-8", chips=0, hosts=0, **wanted)
        self.wait(self.controller.commands.put_pool(pool))

    def tick(self) -> None:
        """Lead and plan once."""

        async def once() -> None:
            assert await self.controller._leadership.lead()
            await self.controller.tick()

        self.wait(once())


class Listener:
    """A client of one stream, fed by the application's own messages."""

    def __init__(self, house: House, path: str, user: str = "submitter", query: str = "", **headers: str) -> None:
        sent = [(b"authorization", f"Bearer token-{user}".encode())]
        sent += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": sent,
            "server": ("house", 80),
            "client": ("house", 1),
        }
        self._app = house.app
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._gone = asyncio.Event()
        self.status = 0
        self._text = b""

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._run())
        start = await self._next()
        self.status = start["status"]
        return self

    async def _run(self) -> None:
        asked = False

        async def receive() -> Any:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self._messages.put_nowait(message)

        await self._app(self._scope, receive, send)
        self._messages.put_nowait(None)

    async def _next(self) -> Any:
        return await asyncio.wait_for(self._messages.get(), 10)

    async def events(self) -> AsyncIterator[dict[str, str]]:
        """Events until the stream ends."""
        while True:
            while b"\n\n" in self._text:
                block, _, self._text = self._text.partition(b"\n\n")
                lines = [line for line in block.decode().split("\n") if line and not line.startswith((":", "retry"))]
                if lines:
                    yield dict(line.split(": ", 1) for line in lines)
            message = await self._next()
            if message is None:
                return
            self._text += message.get("body", b"")

    async def take(self, count: int) -> list[dict[str, str]]:
        taken: list[dict[str, str]] = []
        async for event in self.events():
            taken.append(event)
            if len(taken) == count:
                break
        return taken

    async def __aexit__(self, *_: object) -> None:
        self._gone.set()
        await asyncio.wait_for(self._task, 10)
