"""Syncs that bring nothing new are answered from memory, without an event; everything else by one transaction."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.controller import attempts, slices
from penstock.controller.agents import Agents, NotLeading, nothing_new
from penstock.controller.witness import Evidence
from penstock.domain.custody import Held, Phase, SyncReply, SyncRequest
from penstock.domain.nouns import Exit, Replicas
from penstock.planner.snapshot import Snapshot
from tests.unit.controller.stage import Stage, held, request


class Server:
    """Agents over a stage, counting transactions."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.evidence = Evidence(stage.clock)
        self.leading = True
        self.transactions = 0
        self.agents = Agents(self, self.evidence, self.snapshot)  # type: ignore[arg-type]

    async def transact(self, verb: Any, *args: Any) -> Any:
        self.transactions += 1
        return await self.stage.store.transact(verb, *args)

    def snapshot(self) -> Snapshot | None:
        return self.stage.projection.snapshot if self.leading else None

    def sync(self, asked: SyncRequest) -> SyncReply:
        self.stage.wait(self.stage.projection.catch_up())
        return self.stage.wait(self.agents.sync(asked))


@pytest.fixture
def server(stage: Stage) -> Server:
    return Server(stage)


def last_seq(stage: Stage) -> int:
    return stage.look(lambda reader: reader.last_seq())


def test_a_steady_host_costs_no_event_and_no_transaction(stage: Stage, server: Server) -> None:
    _, attempt, slice = stage.started("big")
    before = last_seq(stage)
    stage.clock.advance(7)
    for host in range(4):
        reply = server.sync(request(slice, host, held(stage.attempt(attempt))))
        assert reply == SyncReply(welcome=True)
        assert server.evidence._heard[slice][host] == 7.0
    assert (last_seq(stage), server.transactions) == (before, 0)


def test_an_idle_host_costs_nothing_either(stage: Stage, server: Server) -> None:
    slice = stage.ready()
    assert server.sync(request(slice)).welcome
    assert server.transactions == 0


def test_stop_and_kill_are_ordered_from_memory(stage: Stage, server: Server) -> None:
    _, attempt, slice = stage.started()
    stage.do(attempts.stop, attempt, "reclaimed")
    assert server.sync(request(slice, 0, held(stage.attempt(attempt)))).stop == (attempt,)
    stage.do(attempts.raise_fence, attempt)
    assert server.sync(request(slice, 0, held(stage.attempt(attempt)))).kill == (attempt,)
    assert server.transactions == 0


def test_hosts_of_a_broken_gang_are_told_to_hurry(stage: Stage, server: Server) -> None:
    _, attempt, slice = stage.started()
    stage.do(attempts.stop, attempt, "gang")
    reply = server.sync(request(slice, 0, held(stage.attempt(attempt))))
    assert (reply.stop, reply.broken, reply.kill) == ((attempt,), (attempt,), ())
    stage.do(attempts.stop, attempt, "cancelled")
    reply = server.sync(request(slice, 0, held(stage.attempt(attempt))))
    assert (reply.stop, reply.broken) == ((attempt,), ())


def test_only_a_committed_row_starts_a_process(stage: Stage, server: Server) -> None:
    job, slice = stage.submit(), stage.ready()
    attempt = stage.place(job, slice)
    reply = server.sync(request(slice))
    assert reply.launch is not None
    assert (reply.launch.attempt, server.transactions) == (attempt, 1)


@pytest.mark.parametrize(
    "what", ["join", "replaced", "stranger", "running", "exited", "progress", "notice", "closed", "unknown"]
)
def test_whatever_is_new_is_a_transaction(stage: Stage, server: Server, what: str) -> None:
    job = stage.submit(replicas=Replicas(1, 2))
    slice = stage.ready()
    attempt = stage.place(job, slice)
    stage.report(slice, attempt, phase=Phase.LAUNCHED)
    now = stage.attempt(attempt)
    (other,) = stage.intend()
    stage.see(other)
    asked = {
        "join": request(other),
        "replaced": request(slice, 0, incarnation="another"),
        "stranger": request("s-none"),
        "running": request(slice, 0, held(now)),
        "exited": request(slice, 0, held(now, Phase.EXITED, exit=Exit(host=0, code=0))),
        "progress": request(slice, 0, held(now, Phase.LAUNCHED, open_units=3)),
        "notice": request(slice, 0, held(now, Phase.LAUNCHED), notice=True),
        "closed": request(slice, 0, held(now, Phase.LAUNCHED)),
        "unknown": request(slice, 0, held(now, Phase.LAUNCHED), Held(attempt="a-none", fence=1, phase=Phase.RUNNING)),
    }[what]
    if what == "closed":
        stage.close(attempt)
    server.sync(asked)
    assert server.transactions == 1


def test_less_open_work_is_news_and_more_is_not(stage: Stage, server: Server) -> None:
    _, attempt, slice = stage.started(replicas=Replicas(1, 2))
    for units, cost in ((5, 1), (5, 1), (7, 1), (4, 2)):
        server.sync(request(slice, 0, held(stage.attempt(attempt), open_units=units)))
        assert server.transactions == cost


def test_a_unit_taken_in_hand_or_let_go_is_news(stage: Stage, server: Server) -> None:
    _, attempt, slice = stage.started(replicas=Replicas(1, 2))
    for holding, cost in ((None, 0), (False, 0), (True, 1), (True, 1), (None, 1), (False, 2)):
        server.sync(request(slice, 0, held(stage.attempt(attempt), holding=holding)))
        assert server.transactions == cost


def test_a_notice_is_taken_once(stage: Stage, server: Server) -> None:
    slice = stage.ready()
    for _ in range(3):
        server.sync(request(slice, notice=True))
    assert server.transactions == 1


def test_an_unwelcome_host_is_not_heard(stage: Stage, server: Server) -> None:
    slice = stage.ready()
    stage.do(slices.release, slice, "test")
    stage.clock.advance(9)
    assert not server.sync(request(slice)).welcome
    assert server.evidence._heard.get(slice) is None


def test_a_standby_sends_agents_away(stage: Stage, server: Server) -> None:
    server.leading = False
    with pytest.raises(NotLeading):
        server.sync(request("s1"))


def test_memory_that_lags_is_never_wrong_about_what_is_new(stage: Stage) -> None:
    """The projection has not seen the placement: an idle host's sync looks like nothing new, and starts nothing."""
    job, slice = stage.submit(), stage.ready()
    stage.wait(stage.projection.catch_up())
    stale = stage.projection.snapshot.slices[slice]
    stage.place(job, slice)
    assert nothing_new(stage.projection.snapshot, stale, request(slice))
    stage.wait(stage.projection.catch_up())
    fresh = stage.projection.snapshot
    assert not nothing_new(fresh, fresh.slices[slice], request(slice))
