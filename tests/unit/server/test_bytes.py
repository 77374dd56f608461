"""Bytes by hash, artifacts and results: what is stored is what was named, and what counts can no longer change."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.controller import attempts
from penstock.controller.jobs import NotFound
from penstock.domain.admission import BadInput
from penstock.domain.lifecycle import Cause
from penstock.domain.nouns import Attempt, Principal, Role, Rule
from penstock.server import bytes as moving
from penstock.server.agents import bells
from penstock.server.routing import Refusal
from penstock.wire.agent import ResultReport
from penstock.wire.api import ErrorView, MissingRequest, Outcome
from tests.unit.server.plant import USER, Host, Plant, plant


def run(story: Any, home: Path) -> None:
    async def play() -> None:
        async with plant(home) as made:
            await story(made)

    asyncio.run(play())


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def code_of(awaited: Any) -> str:
    with pytest.raises(Refusal) as caught:
        await awaited
    return caught.value.problem.code


# --- by hash ---
def test_blobs_and_snapshots_are_what_their_names_say(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        service = made.service
        for put, get in ((moving.put_blob, moving.get_blob), (moving.put_snapshot, moving.get_snapshot)):
            for data in (b"", b"content", b"x" * (3 << 20)):
                params = {"sha256": name_of(data)}
                with pytest.raises(NotFound):
                    await get(service, made.call(USER, params=params))
                await put(service, made.call(USER, params=params, body=data))
                await put(service, made.call(USER, params=params, body=data))
                assert (await get(service, made.call(USER, params=params))).body == data
            wrong = made.call(USER, params={"sha256": name_of(b"other")}, body=b"content")
            assert await code_of(put(service, wrong)) == "conflict"
        assert f"blobs/lab/{name_of(b'other')}" not in made.objects.paths()
        assert f"snapshots/lab/{name_of(b'content')}.json" in made.objects.paths()

    run(story, tmp_path)


STRANGER = Principal(name="stan", team="../lab", role=Role.ADMIN)
OPERATOR = Principal(name="olga", team="ops", role=Role.OPERATOR)


def test_a_hash_tells_a_team_nothing_of_what_another_has(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        service, name = made.service, name_of(b"content")
        params, asked = {"sha256": name}, MissingRequest((name,))
        for put in (moving.put_blob, moving.put_snapshot):
            await put(service, made.call(USER, params=params, body=b"content"))
        for stranger in (STRANGER, OPERATOR):
            assert (await moving.missing_blobs(service, made.call(stranger, body=asked))).missing == (name,)
            for get in (moving.get_blob, moving.get_snapshot):
                with pytest.raises(NotFound):
                    await get(service, made.call(stranger, params=params))
        # Sending it shows nothing either: the answer is that of a first sending.
        await moving.put_blob(service, made.call(STRANGER, params=params, body=b"content"))
        assert {f"blobs/lab/{name}", f"blobs/%2E%2E%2Flab/{name}"} <= set(made.objects.paths())
        named = made.call(STRANGER, params=params, query={"team": "lab"})
        assert await code_of(moving.get_blob(service, named)) == "forbidden"
        told = made.call(OPERATOR, params=params, query={"team": "lab"})
        assert (await moving.get_blob(service, told)).body == b"content"

    run(story, tmp_path)


def test_a_host_gets_what_its_slices_team_has_sent(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        own, theirs = {"sha256": name_of(b"own")}, {"sha256": name_of(b"theirs")}
        await moving.put_blob(made.service, made.call(USER, params=own, body=b"own"))
        await moving.put_blob(made.service, made.call(STRANGER, params=theirs, body=b"theirs"))
        _, host, _ = await made.running()
        assert (await moving.get_blob(made.service, host.call(sha256=own["sha256"]))).body == b"own"
        with pytest.raises(NotFound):
            await moving.get_blob(made.service, host.call(sha256=theirs["sha256"]))
        with pytest.raises(NotFound):
            await moving.get_blob(made.service, host.call(query={"team": "../lab"}, sha256=theirs["sha256"]))
        made.service.controller.snapshot.slices.clear()  # a server that has just started
        assert (await moving.get_blob(made.service, host.call(sha256=own["sha256"]))).body == b"own"

    run(story, tmp_path)


def test_only_what_is_missing_is_asked_for(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        async def missing(*names: str) -> tuple[str, ...]:
            body = MissingRequest(names)
            return (await moving.missing_blobs(made.service, made.call(USER, body=body))).missing

        one, two = name_of(b"one"), name_of(b"two")
        assert await missing(one, two, one) == (one, two)
        await moving.put_blob(made.service, made.call(USER, params={"sha256": one}, body=b"one"))
        assert await missing(one, two) == (two,)
        assert await missing() == ()

    run(story, tmp_path)


# --- what attempts leave ---
async def put_artifact(made: Plant, host: Host, attempt: Attempt, name: str, data: bytes) -> None:
    await moving.put_artifact(made.service, host.call(attempt, body=data, name=name))


async def put_result(made: Plant, host: Host, attempt: Attempt, **said: Any) -> None:
    await moving.put_result(made.service, host.call(attempt, body=ResultReport(**said)))


async def outcome(made: Plant, job: str) -> Outcome:
    return await moving.job_result(made.service, made.user_call(job))


def test_a_result_and_its_artifacts_come_back(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, host, attempt = await made.running()
        early = await outcome(made, job)
        assert (early.state, early.result, early.error, early.exit_code) == ("running", None, None, None)
        await put_artifact(made, host, attempt, "model/weights.npy", b"\x93NUMPY")
        await put_artifact(made, host, attempt, "model/weights.npy", b"\x93NUMPY2")
        await put_result(made, host, attempt, result={"loss": 0.5}, artifacts=("model/weights.npy",), note="n")
        await host.exit(attempt)
        done = await outcome(made, job)
        assert (done.state, done.cause, done.exit_code, done.attempts) == ("succeeded", "succeeded", 0, 1)
        assert (done.result, done.note, done.error, done.slice) == ({"loss": 0.5}, "n", None, host.slice)
        assert done.started_at is not None
        assert done.finished_at is not None
        page = await moving.artifacts(made.service, made.user_call(job))
        assert [(each.name, each.attempt) for each in page.artifacts] == [("model/weights.npy", attempt.id)]
        raw = await moving.artifact(made.service, made.user_call(job, params={"name": "model/weights.npy"}))
        assert (raw.body, raw.headers["content-disposition"]) == (b"\x93NUMPY2", "attachment")
        with pytest.raises(NotFound):
            await moving.artifact(made.service, made.user_call(job, params={"name": "none"}))

    run(story, tmp_path)


@pytest.mark.parametrize("shown", [17, 16], ids=["the whole id", "the start of it"])
def test_a_result_can_be_waited_for(tmp_path: Path, shown: int) -> None:
    async def story(made: Plant) -> None:
        job, host, attempt = await made.running()
        wanted = made.user_call(job[:shown], query={"wait": "10"})
        asked = asyncio.create_task(moving.job_result(made.service, wanted))
        await made.until(lambda: _true(bells(made.service).awaited))
        await put_result(made, host, attempt, result=[7])
        began = made.clock.steady()
        await host.exit(attempt)
        found = await asked
        assert (found.state, found.result) == ("succeeded", [7])
        assert made.clock.steady() - began < 5
        assert (await moving.job_result(made.service, wanted)).state == "succeeded"
        assert bells(made.service).awaited == 0

    run(story, tmp_path)


def test_who_waits_for_a_result_is_answered_in_time_and_when_the_server_stops(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, _, _ = await made.running()
        assert (await moving.job_result(made.service, made.user_call(job, query={"wait": "0.05"}))).state == "running"
        asked = asyncio.create_task(moving.job_result(made.service, made.user_call(job, query={"wait": "10"})))
        await made.until(lambda: _true(bells(made.service).awaited))
        bells(made.service).hush()
        assert (await asyncio.wait_for(asked, 5)).state == "running"

    run(story, tmp_path)


async def _true(found: int) -> int | None:
    return found or None


def test_what_counts_no_longer_changes(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, host, attempt = await made.running()
        await put_result(made, host, attempt, result=1)
        await put_artifact(made, host, attempt, "a", b"first")
        await host.exit(attempt)
        await put_result(made, host, attempt, result=1)
        await put_artifact(made, host, attempt, "a", b"first")
        assert await code_of(put_result(made, host, attempt, result=2)) == "conflict"
        assert await code_of(put_artifact(made, host, attempt, "a", b"second")) == "conflict"
        assert await code_of(put_artifact(made, host, attempt, "b", b"new")) == "conflict"
        assert (await outcome(made, job)).result == 1

    run(story, tmp_path)


def test_a_zombie_s_result_is_not_its_successor_s(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, host, first = await made.running()
        await made.store.transact(attempts.close, first.id, Cause.PREEMPTED, ("test",), True)
        assert (await host.sync(host.held(first), wait_s=5.0)).kill == (first.id,)
        second = await host.launched()
        await put_result(made, host, second, result="second")
        await put_result(made, host, first, result="zombie")
        await put_artifact(made, host, first, "a", b"zombie")
        await host.exit(second)
        assert (await outcome(made, job)).result == "second"
        assert (await moving.artifacts(made.service, made.user_call(job))).artifacts == ()

    run(story, tmp_path)


def test_the_error_is_that_of_the_first_host_that_failed(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job = await made.submit("v5e-16", rule=Rule(preset="pre"))
        hosts = await made.hosts("v5e-16")
        started = [await host.launched() for host in hosts]
        said = ErrorView(type="ValueError", message="bad shape", traceback="…")
        await put_result(made, hosts[2], started[2], error=said)
        await hosts[2].exit(started[2], code=3)
        await put_result(made, hosts[0], started[0], error=ErrorView(type="Echo", message="a peer is gone"))
        for index in (0, 1, 3):
            await hosts[index].exit(started[index], code=1, agent="stopped")
        done = await outcome(made, job)
        assert (done.state, done.cause, done.exit_code) == ("failed", "user_error", 3)
        assert done.error == said

    run(story, tmp_path)


def test_a_failure_without_a_report_still_says_why(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, host, attempt = await made.running()
        await host.sync(host.held(attempt))
        await host.exit(attempt, code=2)
        done = await outcome(made, job)
        assert done.error is not None
        assert done.error.type == "user_error"
        assert done.error.message
        assert done.result is None

    run(story, tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a//b", "a/./b", "", "a\nb", "a\0b"])
def test_an_artifact_cannot_leave_its_place(tmp_path: Path, name: str) -> None:
    async def story(made: Plant) -> None:
        job, host, attempt = await made.running()
        before = made.objects.paths()
        with pytest.raises(BadInput):
            await put_artifact(made, host, attempt, name, b"x")
        with pytest.raises(BadInput):
            await moving.artifact(made.service, made.user_call(job, params={"name": name}))
        assert made.objects.paths() == before

    run(story, tmp_path)


def test_another_team_sees_nothing(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, host, attempt = await made.running()
        await put_result(made, host, attempt, result="ours")
        await host.exit(attempt)
        stranger = Principal(name="eve", team="other", role=Role.ADMIN)
        call = made.call(stranger, params={"id": job, "name": "a"})
        for handler in (moving.job_result, moving.artifacts, moving.artifact):
            with pytest.raises(NotFound):
                await handler(made.service, call)

    run(story, tmp_path)


def test_results_are_plain_json(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        _, host, attempt = await made.running()
        await put_result(made, host, attempt, result=[1, None, "ä"])
        stored = made.objects.peek(f"jobs/{attempt.job}/results/{attempt.fence}.json")
        assert stored is not None
        assert msgspec.json.decode(stored.data)["result"] == [1, None, "ä"]

    run(story, tmp_path)
