"""What agents may do and are told: joining, the long poll, launch specs, and whose attempt is whose."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.controller import attempts
from penstock.controller.jobs import NotFound
from penstock.domain import limits
from penstock.domain.custody import Phase
from penstock.domain.lifecycle import Cause, JobState
from penstock.domain.nouns import Attempt, Bound, Command, Exit, Secret, Slice, Snippet
from penstock.server import agents
from penstock.server.auth import join_token
from penstock.server.routing import Refusal
from penstock.wire.agent import AgentSync, Join, LaunchSpec
from penstock.wire.api import CommandRequest, ProgressView, SnippetRequest
from tests.unit.server.plant import Host, Plant, plant


def run(story: Any, home: Path) -> None:
    async def play() -> None:
        async with plant(home) as made:
            await story(made)

    asyncio.run(play())


def join_of(joining: Host, /, **changes: Any) -> Join:
    wanted = Join(
        slice=joining.slice,
        host=joining.host,
        provider_id=f"vm-{joining.slice}",
        incarnation=joining.incarnation,
        token="t",
    )
    return msgspec.structs.replace(wanted, **changes)


async def refusal(awaited: Any) -> tuple[str, str]:
    with pytest.raises(Refusal) as caught:
        await awaited
    return caught.value.problem.code, caught.value.problem.detail


def test_a_host_joins_with_its_slice_s_token_only(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        host = await made.ready()
        token = join_token(made.service.key, host.slice)

        async def join(**changes: Any) -> tuple[str, str]:
            return await refusal(agents.join(made.service, made.call(None, body=join_of(host, **changes))))

        assert (await join(token=join_token(made.service.key, "s-another")))[0] == "unauthenticated"
        assert (await join(slice="s-none", token=join_token(made.service.key, "s-none")))[1].endswith("no such slice")
        code, detail = await join(token=token, incarnation="another-life")
        assert (code, "replaced" in detail) == ("forbidden", True)
        assert "hosts" in (await join(token=token, host=1))[1]
        # Its own life can be read in the log of events: with the token that must not be enough, either.
        code, detail = await join(token=token)
        assert (code, "is spent" in detail) == ("forbidden", True)
        assert (await host.sync()).welcome, "the credential that it got goes on"

    run(story, tmp_path)


def test_a_host_whose_credential_was_lost_on_the_way_joins_again_until_it_syncs(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        await made.submit()
        slice = await made.until(lambda: made._unjoined("v5e-8"))
        host = Host(made, slice.id, 0)
        for _ in range(2):
            assert (await host.join()).root == "file:///root"
        assert (await host.sync()).welcome
        assert (await refusal(host.join()))[0] == "forbidden"

    run(story, tmp_path)


def test_a_sync_of_another_host_is_refused(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        host = await made.ready()
        for changes in ({"host": 1}, {"slice": "s-other"}, {"incarnation": "x"}):
            body = AgentSync(request=host.request(**changes))
            assert (await refusal(agents.sync(made.service, host.call(body=body))))[0] == "forbidden"

    run(story, tmp_path)


def test_a_command_s_launch_spec(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        made.service.secrets.put("lab", "WANDB_API_KEY", "canary")
        job = await made.submit(
            payload=Command(("python", "train.py"), "f" * 64, "pip install x"),
            env={"A": "b"},
            secrets=(Secret("WANDB_API_KEY"),),
            outputs=("model.bin",),
            environment="e1",
            name="mine",
        )
        (host,) = await made.hosts()
        attempt = await host.launched()
        spec = await agents.launch(made.service, host.call(attempt))
        assert spec == LaunchSpec(
            attempt=attempt.id,
            job=job,
            name="mine",
            team="lab",
            replica=0,
            fence=attempt.fence,
            stage=0,
            rank=0,
            world_size=1,
            payload=CommandRequest(("python", "train.py"), "f" * 64, "pip install x"),
            timeout_s=attempt.timeout_s,
            accelerator="v5e-8",
            jax_devices=8,
            coordinator=None,
            environment="e1",
            env={"A": "b"},
            secrets={"WANDB_API_KEY": "canary"},
            outputs=("model.bin",),
            wandb_run_id=job,
        )
        assert "canary" not in repr(await made.store.read(lambda reader: reader.events(0, 10_000)))

    run(story, tmp_path)


def test_an_order_to_launch_brings_its_spec_along(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        made.service.secrets.put("lab", "TOKEN", "canary")
        host = await made.ready()
        await made.submit(secrets=(Secret("TOKEN"),))
        while (told := await host.sync(wait_s=5.0)).launch is None:
            assert told.spec is None
        assert told.spec == await agents.launch(made.service, host.call(told.launch.attempt))
        assert told.spec.secrets == {"TOKEN": "canary"}
        assert "canary" not in repr(made.service.part(agents.Desk).__dict__)

    run(story, tmp_path)


def test_a_spec_that_cannot_be_made_is_asked_for_and_refused(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        host = await made.ready()
        await made.submit(secrets=(Secret("TOKEN"),))
        while (told := await host.sync(wait_s=5.0)).launch is None:
            pass
        assert told.spec is None
        assert (await refusal(agents.launch(made.service, host.call(told.launch.attempt))))[0] == "conflict"

    run(story, tmp_path)


def test_a_server_that_stops_sends_idle_hosts_away_and_still_takes_reports_in(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, host, attempt = await made.running()
        idle = await made.ready()
        made.service.stopping.set()
        assert (await refusal(idle.sync()))[0] == "unavailable"
        assert (await host.exit(attempt)).forget == (attempt.id,)
        assert (await made.job(job)).state is JobState.SUCCEEDED

    run(story, tmp_path)


def test_a_snippet_keeps_its_variables_and_isolation(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        _, host, attempt = await made.running(payload=Snippet("result = x", {"x": [1, None]}, "inline"))
        spec = await agents.launch(made.service, host.call(attempt))
        assert spec.payload == SnippetRequest("result = x", {"x": [1, None]}, "inline")

    run(story, tmp_path)


def test_a_missing_secret_is_said_by_name(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        _, host, attempt = await made.running(secrets=(Secret("TOKEN"),))
        code, detail = await refusal(agents.launch(made.service, host.call(attempt)))
        assert (code, detail) == ("conflict", "secrets: 'TOKEN' has no value")

    run(story, tmp_path)


def test_a_gang_meets_at_one_place(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        await made.submit("v5e-16")
        hosts = await made.hosts("v5e-16")
        started = await asyncio.gather(*(host.launched() for host in hosts))
        specs = [
            await agents.launch(made.service, host.call(attempt)) for host, attempt in zip(hosts, started, strict=True)
        ]
        assert [spec.rank for spec in specs] == [0, 1, 2, 3]
        assert {spec.world_size for spec in specs} == {4}
        assert {spec.jax_devices for spec in specs} == {4}
        (place,) = {spec.coordinator for spec in specs}
        found = re.fullmatch(r"127\.0\.0\.1:(\d+)", place or "")
        assert found is not None
        assert 20_000 <= int(found[1]) <= 32_767

    run(story, tmp_path)


def test_the_notice_of_one_host_stops_the_whole_gang_within_a_second(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        await made.submit("v5e-16")
        hosts = await made.hosts("v5e-16")
        started = await asyncio.gather(*(host.launched() for host in hosts))
        others = [
            asyncio.create_task(host.sync(host.held(attempt), wait_s=20.0))
            for host, attempt in zip(hosts[:3], started[:3], strict=True)
        ]
        await asyncio.sleep(0.3)  # they are parked by now, or will be told at once
        assert not any(other.done() for other in others)
        began = made.clock.steady()
        await hosts[3].sync(hosts[3].held(started[3]), notice=True)
        replies = await asyncio.gather(*others)
        assert made.clock.steady() - began < limits.SYNC_S
        assert [reply.stop for reply in replies] == [(attempt.id,) for attempt in started[:3]]

    run(story, tmp_path)


def test_a_gang_in_a_cloud_meets_at_its_first_host_once_that_said_where_it_is() -> None:
    bound = tuple(Bound(slice=id, provider_id=f"vm-{id}") for id in ("s1", "s2"))
    attempt = Attempt(
        id="a1", job="j1", team="lab", queue="main", slices=bound, hosts=2, chips=8, created_at=0.0, timeout_s=9.0,
        fence=1, replica=0,
    )  # fmt: skip
    slice = Slice(
        id="s2", team="lab", pool="p", provider="tpu_vm", zone="z", accelerator="v5e-4", chips=4, hosts=1,
        intended_at=0.0,
    )  # fmt: skip
    with pytest.raises(Refusal) as caught:
        agents.coordinator(attempt, slice, "")
    assert caught.value.problem.code == "unavailable"
    place = agents.coordinator(attempt, slice, "10.0.0.7")
    assert place is not None
    assert place.startswith("10.0.0.7:")
    assert (agents.coordinator(attempt, slice, "fd00::7") or "").startswith("[fd00::7]:")
    assert agents.coordinator(msgspec.structs.replace(attempt, hosts=1), slice, "") is None


def test_what_may_be_restored_goes_back_to_the_start_and_to_the_parent(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, host, first = await made.running()
        assert (await agents.launch(made.service, host.call(first))).restore == ()
        await made.store.transact(attempts.close, first.id, Cause.PREEMPTED, ("test",), True)
        assert (await host.sync(host.held(first), wait_s=5.0)).kill == (first.id,)
        second = await host.launched()
        spec = await agents.launch(made.service, host.call(second))
        assert (spec.stage, spec.restore) == (1, ((job, first.fence),))
        await host.exit(second, code=1)
        resumed = (await made.controller.commands.resume(job)).id
        third = await host.launched()
        spec = await agents.launch(made.service, host.call(third))
        assert third.job == resumed
        assert spec.restore == ((job, second.fence), (job, first.fence))
        assert spec.wandb_run_id == job
        await host.exit(third, code=1)
        await made.controller.commands.rerun(job)
        fourth = await host.launched()
        spec = await agents.launch(made.service, host.call(fourth))
        assert (spec.restore, spec.wandb_run_id) == ((), fourth.job)

    run(story, tmp_path)


def test_only_the_hosts_of_an_attempt_may_use_it(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        _, one, first = await made.running()
        _, two, second = await made.running()
        assert one.slice != two.slice
        for host, attempt in ((one, second), (two, first)):
            code, detail = await refusal(agents.launch(made.service, host.call(attempt)))
            assert (code, "is not on slice" in detail) == ("forbidden", True)
        with pytest.raises(NotFound):
            await agents.launch(made.service, one.call("a-none"))
        assert one.credential is not None
        one.credential = one.credential._replace(incarnation="an-older-life")
        assert (await refusal(agents.launch(made.service, one.call(first))))[0] == "forbidden"

    run(story, tmp_path)


def test_a_slice_that_holds_something_else_opens_nothing(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        _, host, attempt = await made.running()
        slice = await made.store.read(lambda reader: reader.slice(host.slice))
        assert slice is not None
        assert host.credential is not None
        assert agents._estranged(attempt, slice, host.credential) == ""
        other = msgspec.structs.replace(slice, attempt="a-another")
        assert "is not what slice" in agents._estranged(attempt, other, host.credential)

    run(story, tmp_path)


def test_a_closed_attempt_is_open_for_what_is_late_only_and_not_for_long(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        _, host, attempt = await made.running()
        await host.exit(attempt)
        code, detail = await refusal(agents.launch(made.service, host.call(attempt)))
        assert (code, "is closed" in detail) == ("conflict", True)
        late = agents.bound_attempt(made.service, host.call(attempt), late=True, committed=True)
        assert (await late)[0].id == attempt.id
        made.clock.skip(limits.LATE_S + 1)
        late = agents.bound_attempt(made.service, host.call(attempt), late=True, committed=True)
        assert (await refusal(late))[0] == "conflict"

    run(story, tmp_path)


def test_progress_is_handed_on_by_whoever_holds_the_attempt(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        _, one, first = await made.running()
        _, two, second = await made.running()
        await made.until(lambda: _in_memory(made, second.id))
        said = {
            first.id: ProgressView(done=3, total=10, metrics={"loss": 0.5}, at=1.0),
            second.id: ProgressView(done=9),
        }
        body = AgentSync(request=one.request(one.held(first)), progress=said)
        await agents.sync(made.service, one.call(body=body))
        kept = made.service.progress[first.id]
        assert (kept.done, kept.total, kept.metrics) == (3, 10, {"loss": 0.5})
        assert kept.at > 1.0, "stamps are the server's"
        assert second.id not in made.service.progress
        assert two.slice != one.slice

    run(story, tmp_path)


async def _in_memory(made: Plant, attempt: str) -> bool:
    return attempt in made.controller.snapshot.attempts


def test_the_same_order_is_not_repeated_at_once_but_is_repeated(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, host, attempt = await made.running()
        await made.controller.commands.cancel(job)
        while not (await host.sync(host.held(attempt), wait_s=5.0)).stop:
            pass
        told = next(iter(made.service.part(agents.Desk)._told.values()))[1]
        again = await host.sync(host.held(attempt), wait_s=5.0)
        assert again.stop == (attempt.id,)
        assert made.clock.steady() - told >= limits.SYNC_REPEAT_S * 0.9
        assert made.clock.steady() - told < 4.0
        assert (await host.sync(host.held(attempt))).stop == (attempt.id,), "without a wait it is said at once"
        forget = await host.exit(attempt, code=1)
        assert forget.forget == (attempt.id,)

    run(story, tmp_path)


def test_the_report_of_an_end_brings_the_next_order_when_there_is_one_and_is_answered_soon_when_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(made: Plant) -> None:
        host = await made.ready()
        first, second = await made.submit(), await made.submit()
        attempt = await host.launched()
        ended = host.held(attempt, Phase.EXITED, exit=Exit(host=0, code=0))
        with monkeypatch.context() as patient:  # until it is decided, however long a commit takes here
            patient.setattr(limits, "SYNC_REPEAT_S", 4.5)
            told = await host.sync(ended, wait_s=5.0)
        assert told.forget == (attempt.id,)
        assert told.launch is not None
        assert {attempt.job, told.launch.job} == {first, second}
        last = await made.attempt(told.launch.attempt)
        began = made.clock.steady()
        told = await host.sync(host.held(last, Phase.EXITED, exit=Exit(host=0, code=0)), wait_s=5.0)
        assert (told.forget, told.launch) == ((last.id,), None)
        assert made.clock.steady() - began < 4.0

    run(story, tmp_path)


def test_a_launch_is_not_forgotten_when_its_reply_was_lost(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        host = await made.ready()
        await made.submit()
        while (lost := await host.sync(wait_s=5.0)).launch is None:
            pass
        again = await host.sync(wait_s=5.0)
        assert again.launch == lost.launch
        attempt = await made.attempt(again.launch.attempt) if again.launch else None
        assert attempt is not None
        assert not (await host.sync(host.held(attempt, Phase.LAUNCHED))).launch

    run(story, tmp_path)


def test_an_unwelcome_host_hears_it_at_once(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        host = await made.ready()
        started = made.clock.steady()
        reply = await host.sync(wait_s=5.0, provider_id="vm-another")
        assert not reply.welcome
        assert made.clock.steady() - started < 4.0

    run(story, tmp_path)
