"""Agents: they sync, obey, report until forgotten, and keep custody by the two clocks."""

from __future__ import annotations

import asyncio

import pytest

from penstock.domain import limits
from penstock.domain.custody import Phase, SyncReply, SyncRequest, staging_path
from penstock.sim.processes import ECHO, Behaviour
from tests.unit.sim.desk import Desk, exit_of, story

LONG = Behaviour(duration_s=1e5)


def test_an_agent_joins_and_syncs_every_five_seconds() -> None:
    async def tell(desk: Desk) -> None:
        await asyncio.sleep(60.0)

    desk = story(tell, hosts=2)
    requests = [request for _, request in desk.requests]
    assert {request.host for request in requests} == {0, 1}
    assert {request.provider_id for request in requests} == {"fake-000001"}
    assert len({request.incarnation for request in requests}) == 2
    assert 24 <= len(requests) <= 26
    assert len(desk.records("agent.heard")) == 2


def test_a_process_runs_writes_and_is_reported_until_forgotten() -> None:
    async def tell(desk: Desk) -> None:
        desk.forget_exits = False
        await desk.launch()
        await asyncio.sleep(120.0)
        reported = len(desk.held())
        desk.forget_exits = True
        await asyncio.sleep(12.0)
        assert desk.agent().held == ()
        assert len(desk.held()) - reported <= 1

    behaviour = Behaviour(duration_s=100.0, outputs=("result.json",), open_units=3, start_s=0.5)
    desk = story(tell, behaviour)
    phases = [held.phase for _, held in desk.held()]
    assert [phase for n, phase in enumerate(phases) if phase not in phases[:n]] == list(Phase)
    last = desk.held()[-1][1]
    assert last.exit is not None
    assert last.exit.well
    assert (last.fence, last.outputs, last.open_units) == (1, ("result.json",), 3)
    (started,), (exited,) = desk.records("proc.started"), desk.records("proc.exited")
    assert started.body == {
        "job": "j1", "replica": 0, "fence": 1, "host": 0, "slice": "s1", "provider_id": "fake-000001",
        "world_size": 1, "incarnation": desk.requests[0][1].incarnation,
    }  # fmt: skip
    assert exited.body == {"job": "j1", "host": 0, "how": "code 0", "slice": "s1"}
    assert exited.t - started.t == pytest.approx(100.0, abs=1.0)
    (put,) = desk.records("object.put")
    assert put.subject == staging_path("j1", 1, "result.json")
    assert put.body["writer"] == "s1/0"
    assert put.t <= exited.t


def test_changes_are_reported_at_once() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch()
        await asyncio.sleep(120.0)

    desk = story(tell)
    assert exit_of(desk)[0] - desk.times("proc.exited")[0] < 0.2


def test_a_gang_makes_progress_only_when_all_run_and_ends_together() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch()
        await asyncio.sleep(200.0)

    def behaviour(job: str, attempt: str, rank: int, stage: int) -> Behaviour:
        return Behaviour(duration_s=100.0, start_s=0.1 if rank else 30.0, outputs=() if rank else ("o",))

    desk = story(tell, behaviour, hosts=3)
    assert len(desk.times("proc.started")) == 3
    assert all(at >= max(desk.times("proc.started")) + 100.0 for at in desk.times("proc.exited"))
    reports = [held for _, held in desk.held() if held.phase is Phase.EXITED]
    assert {held.outputs for held in reports} == {("o",)}


def test_a_dead_sibling_echoes() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch()
        await asyncio.sleep(100.0)

    def behaviour(job: str, attempt: str, rank: int, stage: int) -> Behaviour:
        return Behaviour(duration_s=20.0, code=3) if rank == 1 else LONG

    desk = story(tell, behaviour, hosts=2)
    exits = {held.exit.host: held.exit for _, held in desk.held() if held.exit is not None}
    assert (exits[1].code, exits[1].log_tail) == (3, "")
    assert (exits[0].code, exits[0].log_tail) == (1, ECHO)
    assert desk.times("proc.exited")[1] - desk.times("proc.exited")[0] == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("behaviour", "signal", "least_s", "most_s"),
    [
        (Behaviour(duration_s=1e5, stop_s=3.0), 15, 3.0, 8.2),
        (Behaviour(duration_s=1e5, ignores_term=True), 9, limits.GRACE_S, limits.GRACE_S + 5.2),
        (Behaviour(duration_s=1e5, stop_s=100.0), 9, limits.GRACE_S, limits.GRACE_S + 5.2),
    ],
)
def test_stop_is_obeyed_within_the_grace(behaviour: Behaviour, signal: int, least_s: float, most_s: float) -> None:
    ordered: list[float] = []

    async def tell(desk: Desk) -> None:
        await desk.launch()
        ordered.append(asyncio.get_running_loop().time())
        desk.stop = ("a1",)
        await asyncio.sleep(60.0)

    desk = story(tell, behaviour)
    assert exit_of(desk)[1:] == (None, signal, None)
    assert least_s <= desk.times("proc.exited")[0] - ordered[0] <= most_s


def test_kill_is_immediate_and_a_stop_before_the_start_prevents_it() -> None:
    async def tell_kill(desk: Desk) -> None:
        await desk.launch()
        desk.kill = ("a1",)
        await asyncio.sleep(6.0)

    assert exit_of(story(tell_kill, Behaviour(duration_s=1e5, ignores_term=True)))[1:] == (None, 9, None)

    async def tell_stop(desk: Desk) -> None:
        await desk.launch()
        desk.stop = ("a1",)
        await asyncio.sleep(60.0)

    desk = story(tell_stop, Behaviour(start_s=20.0))
    assert exit_of(desk)[1:] == (None, 15, None)
    assert desk.records("proc.started") == []


def test_the_timeout_is_the_agent_s_own() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch()
        await asyncio.sleep(3700.0)

    desk = story(tell, LONG)
    assert exit_of(desk)[1:] == (None, 15, "timeout")
    assert desk.times("proc.exited")[0] - desk.times("proc.started")[0] == pytest.approx(3601.0)


def test_an_unwelcome_host_stops_everything_and_does_not_come_back() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch()
        desk.welcome = False
        await asyncio.sleep(6.0)
        desk.welcome = True
        desk.requests.clear()
        await asyncio.sleep(100.0)
        assert desk.agent().ended

    desk = story(tell, LONG)
    assert desk.requests == []
    assert len(desk.records("proc.exited")) == 1


def test_a_second_attempt_on_busy_chips_says_so() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch("a1", 1)
        await desk.launch("a2", 2)

    desk = story(tell, LONG)
    assert exit_of(desk, "a2")[3] == "device_busy"
    assert [record.subject for record in desk.records("proc.started")] == ["a1"]


def test_repeated_and_outdated_orders_launch_nothing() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch("a1", 5)
        await asyncio.sleep(300.0)  # ended and forgotten, while the order is still repeated
        await desk.launch("a0", 4)
        await asyncio.sleep(20.0)

    assert [record.subject for record in story(tell).records("proc.started")] == ["a1"]


# --- the two clocks ---


def test_a_silent_server_kills_nothing_while_the_fence_is_own() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch(fence=3)
        await desk.write_fence(3)
        desk.down = True
        await asyncio.sleep(3 * limits.CUSTODY_S)
        assert desk.records("proc.exited") == []
        desk.down = False
        await asyncio.sleep(10.0)

    desk = story(tell, LONG)
    assert desk.held()[-1][1].phase is Phase.RUNNING
    assert len(desk.records("agent.silent")) == 1
    assert len(desk.records("agent.heard")) == 2


def test_no_fence_object_yet_means_go_on() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch(fence=3)
        desk.world.network.cut("s1", 0)
        await asyncio.sleep(2 * limits.CUSTODY_S)

    assert story(tell, LONG).records("proc.exited") == []


@pytest.mark.parametrize("cut", [True, False])
def test_a_higher_fence_stops_a_cut_off_attempt_in_time(cut: bool) -> None:
    written: list[float] = []

    async def tell(desk: Desk) -> None:
        await desk.launch(fence=3)
        if cut:
            desk.world.network.cut("s1", 0)
        else:
            desk.down = True
        await asyncio.sleep(limits.SILENCE_S)
        await desk.write_fence(4)
        written.append(asyncio.get_running_loop().time())
        await asyncio.sleep(60.0)

    for seed in range(20):
        desk = story(tell, Behaviour(duration_s=1e5, ignores_term=True), seed=seed)
        (exited,) = desk.times("proc.exited")
        assert exited - written[-1] <= limits.FENCE_WAIT_S


def test_one_way_loss_is_not_silence_but_the_fence_is_still_read() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch(fence=3)
        desk.world.network.cut("s1", 0, requests=False)
        heard = len(desk.requests)
        await asyncio.sleep(100.0)
        assert len(desk.requests) - heard > 15
        assert desk.records("agent.silent") == []
        await desk.write_fence(4)
        await asyncio.sleep(limits.FENCE_WAIT_S)

    assert len(story(tell, LONG).records("proc.exited")) == 1


def test_custody_ends_when_server_and_bucket_are_both_unreachable() -> None:
    cut_at: list[float] = []

    async def tell(desk: Desk) -> None:
        await desk.launch(fence=3)
        cut_at.append(asyncio.get_running_loop().time())
        desk.world.network.cut("s1", 0, bucket=True)
        await asyncio.sleep(limits.CUSTODY_S - 10.0)
        assert desk.records("proc.exited") == []
        await asyncio.sleep(30.0)
        desk.world.heal()
        await asyncio.sleep(10.0)

    desk = story(tell, LONG)
    assert limits.CUSTODY_S - 6.0 <= desk.times("proc.exited")[0] - cut_at[0] <= limits.CUSTODY_S + 10.0
    assert exit_of(desk)[3] == "process_lost"


def test_a_flapping_link_kills_nothing() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch(fence=3)
        desk.world.network.flap("s1", 0, period_s=20.0, seconds=2000.0, bucket=True)
        await asyncio.sleep(2100.0)

    desk = story(tell, LONG)
    assert desk.records("proc.exited") == []
    assert 40 <= len(desk.records("agent.silent")) <= 50


def test_a_zombie_stops_after_it_wakes_and_acts_on_no_stale_reply() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch(fence=3)
        desk.agent().pause(700.0)
        desk.world.network.cut("s1", 0)
        await asyncio.sleep(20.0)
        await desk.write_fence(4)
        await asyncio.sleep(600.0)
        assert desk.records("proc.exited") == []
        assert not desk.agent().up
        await asyncio.sleep(100.0)

    desk = story(tell, LONG)
    (exited,) = desk.times("proc.exited")
    (silent,) = desk.times("agent.silent")
    assert 700.0 <= exited - silent <= 700.0 + limits.FENCE_WAIT_S


def test_a_zombie_whose_server_is_there_is_told_to_stop() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch(fence=3)
        desk.agent().pause(700.0)
        desk.kill = ("a1",)
        await asyncio.sleep(706.0)

    desk = story(tell, LONG)
    assert exit_of(desk)[2] == 9


def test_a_pause_stops_the_whole_gang() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch()
        desk.agent(1).pause(50.0)
        await asyncio.sleep(300.0)

    desk = story(tell, hosts=2)
    since = max(desk.times("proc.started"))
    assert all(150.0 <= at - since <= 151.0 for at in desk.times("proc.exited"))


# --- breakage of the host ---


def test_an_agent_crash_keeps_incarnation_processes_and_exits() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch()
        desk.agent().crash(200.0)
        await asyncio.sleep(150.0)
        assert len(desk.records("proc.exited")) == 1
        assert all(held.phase is not Phase.EXITED for _, held in desk.held())
        await asyncio.sleep(60.0)

    desk = story(tell)
    assert exit_of(desk)[1:] == (0, None, None)
    assert len({request.incarnation for _, request in desk.requests}) == 1


@pytest.mark.parametrize("how", ["reboot", "maintain"])
def test_a_reboot_loses_processes_and_keeps_the_incarnation(how: str) -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch()
        if how == "reboot":
            desk.agent().reboot(30.0)
        else:
            desk.world.cloud.maintain("s1", 30.0)
        await asyncio.sleep(60.0)

    desk = story(tell)
    assert exit_of(desk)[3] == "process_lost"
    assert len({request.incarnation for _, request in desk.requests}) == 1
    assert desk.records("proc.exited")[0].body["how"] == "vm_gone"
    assert len(desk.records("agent.silent")) == 1


def test_a_replaced_host_comes_as_another_with_nothing_held() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch()
        desk.attempt = None
        desk.requests.clear()
        desk.world.cloud.replace_host("s1", 0)
        await asyncio.sleep(60.0)

    desk = story(tell, hosts=2)
    mine = [request for _, request in desk.requests if request.host == 0]
    assert {request.incarnation for request in mine} == {mine[0].incarnation}
    assert all(request.held == () for request in mine)
    lost = [record for record in desk.records("proc.exited") if record.body["how"] == "vm_gone"]
    assert [record.body["host"] for record in lost] == [0]


@pytest.mark.parametrize("how", ["preempt", "die_unseen", "delete_outside"])
def test_agents_die_with_their_machines(how: str) -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch()
        getattr(desk.world.cloud, how)("s1")
        await asyncio.sleep(0.2)  # what was on its way still arrives
        desk.requests.clear()
        await asyncio.sleep(100.0)
        assert not desk.world.alive("s1", 0)

    desk = story(tell, hosts=2)
    assert desk.requests == []
    assert [record.body["how"] for record in desk.records("proc.exited")] == ["vm_gone", "vm_gone"]
    assert len(desk.records("agent.silent")) == 2


def test_a_notice_is_passed_on_as_sigterm() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch()
        desk.world.cloud.preempt("s1", notice_s=30.0)
        await asyncio.sleep(20.0)

    desk = story(tell, LONG)
    assert desk.requests[-1][1].notice
    reports = [held.exit for _, held in desk.held() if held.exit is not None]
    assert (reports[0].signal, reports[0].notice) == (15, True)


def test_a_reply_that_waited_through_a_freeze_is_not_obeyed() -> None:
    async def tell(desk: Desk) -> None:
        async def freeze_then_order(request: SyncRequest) -> SyncReply:
            desk.attempt, desk.fence = "a1", 1
            reply = await desk.sync(request)
            desk.attempt = None
            desk.world.network.server = desk.sync
            desk.agent().pause(60.0)
            return reply

        desk.world.network.server = freeze_then_order
        await asyncio.sleep(100.0)

    desk = story(tell)
    assert len(desk.times("agent.heard")) == 2
    assert desk.records("proc.started") == []


@pytest.mark.parametrize("moment", ["starting", "ending", "stopping", "uploading"])
def test_nothing_on_a_frozen_host_happens_before_it_thaws(moment: str) -> None:
    froze: list[float] = []

    async def tell(desk: Desk) -> None:
        desk.attempt, desk.fence = "a1", 1
        desk.agent().poke()
        await asyncio.sleep({"starting": 2.0, "ending": 50.0, "stopping": 50.0, "uploading": 105.05}[moment])
        if moment == "stopping":
            desk.stop = ("a1",)
            desk.agent().poke()
            await asyncio.sleep(1.0)
        froze.append(asyncio.get_running_loop().time())
        desk.agent().pause(300.0)
        await asyncio.sleep(500.0)

    behaviour = Behaviour(duration_s=100.0, start_s=5.0, stop_s=10.0, outputs=("o",))
    desk = story(tell, behaviour)
    during = [record.kind for record in desk.history.world if froze[0] < record.t < froze[0] + 300.0]
    # What was on its way to the bucket still arrives; nothing begins, ends or is heard.
    assert during == (["object.put"] if moment == "uploading" else [])
    assert [record.kind for record in desk.history.world].count("proc.exited") == 1


def test_a_crash_of_a_process_before_its_siblings_start_leaves_them_waiting() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch()
        desk.agent(0).held[0].kill()
        await asyncio.sleep(300.0)

    def behaviour(job: str, attempt: str, rank: int, stage: int) -> Behaviour:
        return Behaviour(duration_s=50.0, start_s=60.0 if rank else 0.1, echo_s=None)

    desk = story(tell, behaviour, hosts=2)
    assert len(desk.records("proc.started")) == 2
    assert [record.body["how"] for record in desk.records("proc.exited")] == ["signal 9"]
