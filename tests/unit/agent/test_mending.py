"""Orders to look after a host: taken once, carried out beside the rest, and told until somebody hears it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typing_extensions import override

from penstock.agent import solving
from penstock.agent.host import Host, Place
from penstock.agent.link import Link, Refused, Silent
from penstock.agent.mending import Mending, surroundings
from penstock.agent.record import Record
from penstock.domain.cloud import Mount
from penstock.wire.problems import Problem
from penstock.wire.solving import Finding, SolveOrder, SolveReport


class Wire(Link):
    """A server that answers as told."""

    def __init__(self, *answers: Exception | None) -> None:
        super().__init__("http://penstock.example.org:8080")
        self._answers = list(answers)
        self.got: list[SolveReport] = []

    @override
    async def call(self, method: str, path: str, body: Any = b"", **_: Any) -> bytes:
        assert (method, path) == ("POST", "/v1/agent/solved")
        answer = self._answers.pop(0) if self._answers else None
        if answer is not None:
            raise answer
        self.got.append(msgspec.json.decode(body, type=SolveReport))
        return b""


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at + 1e9

    def steady(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds
        await asyncio.sleep(0)


def host_with(tmp_path: Path, wire: Wire, metadata: str = "") -> Host:
    host = Host(Place(slice="s1", host=0, provider_id="p"), tmp_path, wire, Clock(), Record(incarnation="i"))
    host.metadata = metadata
    return host


def order(run: str = "r1", **changes: Any) -> SolveOrder:
    return SolveOrder(run=run, **{"dry_run": False, "now": 1e9 + 100.0, **changes})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """How the checks were called: (dry_run, busy)."""
    calls: list[tuple[bool, bool]] = []

    def solve(_: Any, *, dry_run: bool, busy: bool) -> tuple[Finding, ...]:
        calls.append((dry_run, busy))
        return (Finding(check="disk", verdict="well"),)

    monkeypatch.setattr(solving, "solve", solve)
    return calls


async def settled(mending: Mending) -> None:
    task = mending._task
    assert task is not None
    await asyncio.wait_for(asyncio.shield(task), 10)


def test_an_order_is_carried_out_once_and_told_until_it_is_heard(tmp_path: Path, asked: list[Any]) -> None:
    async def story() -> None:
        wire = Wire(Silent("away"), Silent("away"))
        mending = Mending(host_with(tmp_path, wire), lambda: frozenset({"a1"}))
        mending.take(order())
        mending.take(order())
        mending.take(order("r2"))  # the first is not done: the server gives this one again
        await settled(mending)
        mending.take(order())
        await settled(mending)
        assert asked == [(False, True)]
        assert [each.run for each in wire.got] == ["r1"]
        mending.take(order("r2", dry_run=True))
        await settled(mending)
        assert (asked[1], [each.run for each in wire.got]) == ((True, True), ["r1", "r2"])

    asyncio.run(story())


def test_a_report_that_nobody_wants_ends_it(tmp_path: Path, asked: list[Any]) -> None:
    async def story() -> None:
        gone = Refused(Problem(status=409, code="conflict", detail="over"))
        wire = Wire(gone)
        mending = Mending(host_with(tmp_path, wire), frozenset)
        mending.take(order())
        await settled(mending)
        assert (wire.got, asked) == ([], [(False, False)])
        away = Wire(*[Silent("away")] * 10_000)
        mending = Mending(host_with(tmp_path, away), frozenset)
        mending.take(order())
        await settled(mending)  # it gives up by itself
        assert away.got == []

    asyncio.run(story())


def test_what_checks_see_of_this_host(tmp_path: Path) -> None:
    mounts = (Mount("nfs", "10.0.0.2:/x", "/mnt/x"),)
    metadata = "http://metadata.google.internal/computeMetadata/v1/instance"
    host, mine = host_with(tmp_path, Wire(), metadata), order(mounts=mounts, ours_alone=True)
    seen = surroundings(host, mine, 99.0, frozenset({"a1"}))
    assert seen.ours_alone
    assert not surroundings(host, order(), 99.0, frozenset()).ours_alone, "one that was adopted is somebody's"
    assert seen.names == ("penstock.example.org", "metadata.google.internal")
    assert (seen.mounts, seen.attempts, seen.came_at) == (mounts, frozenset({"a1"}), 99.0)
    assert seen.packages[0].is_dir()
    wire = Wire()
    wire._host = "127.0.0.1"
    here = surroundings(host_with(tmp_path, wire), mine, 99.0, frozenset())
    assert (here.ours_alone, here.names) == (False, ())
