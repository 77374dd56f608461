"""A small launcher for tests: real warm parents, real walls, and what one snippet left behind.

Used by the tests of `agent.warm` and of hostile snippets in place of the whole agent: same directories, same control
groups, streams in plain files.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any, cast

import msgspec

from penstock.agent import cgroups, sandbox
from penstock.agent import devices as devices_here
from penstock.agent.forks import WarmTree
from penstock.agent.host import Host, Place
from penstock.agent.layout import Layout, environment, lay_out
from penstock.agent.link import Link
from penstock.agent.record import Record
from penstock.agent.tree import Ended, Limits
from penstock.agent.warm import Warm
from penstock.wire.agent import LaunchSpec
from penstock.wire.api import SnippetRequest
from tests.missing import missing
from tests.process.installation import SystemClock

STREAMS = ("out", "err", "log")


def standing_walls() -> sandbox.Walls:
    """All walls, or no test: elsewhere it is skipped with the reason, in CI that is a failure."""
    walls = sandbox.probe()
    if walls.missing:
        missing(f"walls that do not stand here: {'; '.join(walls.missing)}")
    return walls


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """What a snippet left."""

    ended: Ended
    out: bytes
    err: bytes
    log: bytes
    report: dict[str, Any]
    layout: Layout

    @property
    def error(self) -> dict[str, str]:
        return cast("dict[str, str]", self.report["error"])


class Started(msgspec.Struct, frozen=True):
    tree: WarmTree
    layout: Layout

    async def left(self) -> Left:
        ended = await self.tree.wait()
        self.tree.close()
        cgroups.remove_noted(self.layout.home / "group.json", 2.0)
        streams = {name: self.layout.stream(name).read_bytes() for name in STREAMS}
        path = self.layout.result
        plain = path.exists() and not path.is_symlink()
        report = msgspec.json.decode(path.read_bytes()) if plain else {}
        return Left(ended=ended, report=report, layout=self.layout, **streams)


class Bench:
    """One host of one team."""

    def __init__(self, home: Path, walls: sandbox.Walls | None = None, env: dict[str, str] | None = None) -> None:
        self.state = home / "slices" / "s1" / "host-0"
        (self.state / "attempts").mkdir(parents=True)
        (home / "root" / "jobs").mkdir(parents=True)
        place = Place(slice=f"test-{os.getpid()}-{id(self)}", host=0, provider_id="p")
        self.host = Host(place, self.state, cast("Link", None), SystemClock(), Record(incarnation="i"))
        self.host.root = f"file://{home}/root"
        if env is not None:
            self.host.env = env
        self.warm = Warm(self.host, walls)
        self.real = devices_here.find().real
        self._numbers = count()

    async def start(
        self,
        code: str,
        *,
        memory_bytes: int | None = None,
        tasks: int = 64,
        isolation: str = "fork",
        devices: int = 2,
        env: dict[str, str] | None = None,
        **variables: object,
    ) -> Started:
        spec = LaunchSpec(
            attempt=f"a{next(self._numbers)}",
            job="job",
            name="",
            team="team",
            replica=0,
            fence=1,
            stage=0,
            rank=0,
            world_size=1,
            payload=msgspec.convert(
                {"type": "snippet", "code": code, "variables": variables, "isolation": isolation}, SnippetRequest
            ),
            timeout_s=60.0,
            accelerator="v5e-8",
            jax_devices=devices,
            coordinator=None,
            env=env or {},
        )
        layout = lay_out(self.state, self.host.root, spec)
        layout.make()
        fds = [os.open(layout.stream(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in STREAMS]
        bounds = Limits(memory_bytes=memory_bytes, tasks=tasks)
        try:
            full = environment(spec, layout, self.host.env, devices=self.real, deadline=0.0)
            tree = await self.warm.run(spec, layout, *fds, env=full, bounds=bounds)
        finally:
            for fd in fds:
                os.close(fd)
        return Started(tree, layout)

    async def run(self, code: str, **given: Any) -> Left:
        return await (await self.start(code, **given)).left()

    async def close(self) -> None:
        await self.warm.close()

    def assert_clean(self) -> None:
        """No control group is left; so no process is, either."""
        folders = sandbox.probe().groups.folders.values()
        assert [each for folder in folders for each in Path(folder).glob(f"penstock-{self.warm._kind}*")] == []
