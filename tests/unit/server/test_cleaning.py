"""Cleaning on a real controller, SQLite and two kinds of objects: exact, repeatable, and never under a live job."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from penstock.domain import limits
from penstock.domain.lifecycle import JobState
from penstock.domain.retention import Retention
from penstock.ports.objects import ObjectsError
from penstock.ports.store import Transaction
from penstock.server import cleaning, jobs, retention
from penstock.server.routing import Refusal
from penstock.wire.api import AgainRequest, CleanedView
from tests.contract.store.examples import an_attempt, close, fail, place
from tests.unit.server.house import House
from tests.unit.server.yard import ADMIN, ALL, DAY_S, Play, Yard, sizes


# --- jobs ---
def test_a_dry_run_counts_exactly_what_then_goes_and_touches_nothing(play: Play) -> None:
    async def story(yard: Yard) -> None:
        old, young, live = await yard.ended(31), await yard.ended(29), await yard.submit()
        await yard.leave(live)
        before = await yard.objects.list("")
        counted = await yard.clean(dry_run=True)
        assert await yard.objects.list("") == before
        assert await yard.row(old) is not None
        assert sizes(counted) == {**ALL, "rows": (1, 0), "records": (1, 3)}
        removed = await yard.clean()
        assert (removed.removed, removed.jobs) == (counted.removed, counted.jobs)
        assert removed.jobs == 1
        assert await yard.row(old) is None
        assert await yard.left(old) == set()
        assert len(await yard.left(young)) == len(await yard.left(live)) == 7
        assert sizes(await yard.clean()) == {}

    play(story)


def test_an_explicit_age_takes_the_last_checkpoint_but_not_the_row(play: Play) -> None:
    async def story(yard: Yard) -> None:
        week, young = await yard.ended(8), await yard.ended(6)
        counted = await yard.clean(older_than_s=7 * DAY_S, dry_run=True)
        assert sizes(await yard.clean(older_than_s=7 * DAY_S)) == sizes(counted) == ALL
        assert await yard.left(week) == {"fence/0", "cleaned"}
        assert len(await yard.left(young)) == 7
        assert await yard.row(week) is not None
        with pytest.raises(Refusal) as caught:
            await jobs.resume(yard.service, yard.call(AgainRequest(), id=week))
        assert caught.value.problem.code == "conflict"
        assert f"tpu rerun {week}" in str(caught.value.problem.advice)
        assert (await jobs.rerun(yard.service, yard.call(AgainRequest(), id=week))).created
        assert (await jobs.resume(yard.service, yard.call(AgainRequest(), id=young))).created

    play(story)


def test_kept_results_keep_their_job_and_its_newest_checkpoint_of_each_replica(play: Play) -> None:
    async def story(yard: Yard) -> None:
        yard.clock.ahead_s -= 40 * DAY_S
        id = await yard.submit()
        await yard.leave(id)
        await yard.objects.put(f"jobs/{id}/checkpoints/3/x", b"other replica")
        for fence, replica in ((1, 0), (2, 0), (3, 1), (4, 0)):
            await yard.store.transact(_try, id, fence, replica)
            await yard.store.transact(_close, id)
        await yard.store.transact(_fail, id)
        yard.clock.ahead_s += 40 * DAY_S
        counted = await yard.clean(keep_results=True, dry_run=True)
        removed = await yard.clean(keep_results=True)
        assert removed.removed == counted.removed
        assert sizes(removed) == {"logs": (1, 11), "checkpoints": (1, 19), "compiled code": (1, 29)}
        kept = {"results/1.json", "staging/1/model/weights.npy", "fence/0"}
        assert await yard.left(id) == {*kept, "checkpoints/2/step-9/data", "checkpoints/3/x"}
        assert (await jobs.resume(yard.service, yard.call(AgainRequest(), id=id))).created

    play(story)


def test_lists_of_a_gang_that_copied_nothing_do_not_push_the_last_checkpoint_out(play: Play) -> None:
    async def story(yard: Yard) -> None:
        yard.clock.ahead_s -= 40 * DAY_S
        id = await yard.submit()
        await yard.leave(id)
        kept = {f"checkpoints/7/0/lists/{2:016d}.json", "checkpoints/7/0/pieces/ab"}
        gone = {f"checkpoints/8/{rank}/lists/{1:016d}.json" for rank in (0, 1)} | {"checkpoints/9/0/pieces/cd"}
        for name in kept | gone:
            await yard.objects.put(f"jobs/{id}/{name}", b"x")
        for fence in (7, 8, 9):
            await yard.store.transact(_try, id, fence, 0)
            await yard.store.transact(_close, id)
        await yard.store.transact(_fail, id)
        yard.clock.ahead_s += 40 * DAY_S
        await yard.clean(keep_results=True)
        assert {name for name in await yard.left(id) if name.startswith("checkpoints/")} == kept

    play(story)


def _try(tx: Transaction, id: str, fence: int, replica: int) -> None:
    job = tx.job(id)
    assert job is not None
    attempt = an_attempt(fence, job=id, fence=fence, replica=replica, team="lab", queue="lab")
    if job.state is JobState.QUEUED:
        place(tx, job, attempt)
    else:
        tx.add(attempt, "attempt.created")


def _close(tx: Transaction, id: str) -> None:
    for attempt in tx.attempts_of(id):
        if attempt.closed_at is None:
            close(tx, attempt)


def _fail(tx: Transaction, id: str) -> None:
    job = tx.job(id)
    assert job is not None
    fail(tx, job)


def test_what_a_live_job_goes_on_from_stays(play: Play) -> None:
    async def story(yard: Yard) -> None:
        first = await yard.ended(50)
        yard.clock.ahead_s -= 40 * DAY_S
        second = (await yard.commands.resume(first)).id
        await yard.leave(second)
        await yard.commands.cancel(second)
        yard.clock.ahead_s += 40 * DAY_S
        third = (await yard.commands.resume(second)).id
        for older_than_s in (None, DAY_S):
            reply = await yard.clean(older_than_s=older_than_s)
            assert "checkpoints" not in sizes(reply)
            assert "2 ended jobs keep their checkpoints" in reply.notes[0]
            for id in (first, second):
                assert await yard.row(id) is not None
                kept = {"checkpoints/1/step-3/data", "checkpoints/2/step-9/data", "fence/0"}
                assert await yard.left(id) == kept
        await yard.commands.cancel(third)
        assert sizes(await yard.clean()) == {"checkpoints": (4, 84), "rows": (2, 0), "records": (2, 6)}

    play(story)


def test_a_resume_and_a_cleaning_at_once_cannot_both_win(play: Play) -> None:
    async def story(yard: Yard) -> None:
        old = await yard.ended(8)
        put = yard.objects.put

        async def put_and_be_resumed(path: str, data: bytes) -> int:
            yard.objects.put = put  # type: ignore[method-assign]
            generation = await put(path, data)
            await yard.commands.resume(old)  # its own look for the mark comes later, and is the next test
            return generation

        yard.objects.put = put_and_be_resumed  # type: ignore[method-assign]
        reply = await yard.clean(older_than_s=DAY_S)
        assert "checkpoints" not in sizes(reply)
        assert {"checkpoints/1/step-3/data", "checkpoints/2/step-9/data"} <= await yard.left(old)
        assert "cleaned" not in await yard.left(old)

    play(story)


def test_a_resume_that_a_cleaning_did_not_see_is_taken_back(play: Play) -> None:
    async def story(yard: Yard) -> None:
        old = await yard.ended(8)
        get = yard.objects.get

        async def get_before_the_mark(path: str) -> Any:
            yard.objects.get = get  # type: ignore[method-assign]
            found = await get(path)
            await yard.clean(older_than_s=DAY_S)
            return found

        yard.objects.get = get_before_the_mark  # type: ignore[method-assign]
        with pytest.raises(Refusal) as caught:
            await jobs.resume(yard.service, yard.call(AgainRequest(), id=old))
        assert caught.value.problem.code == "conflict"
        listed = await yard.store.read(lambda r: r.jobs_page(team=None, states=(), after=None, limit=9))
        assert {job.state for job in listed} == {JobState.CANCELLED}

    play(story)


def test_a_call_is_bounded_and_the_next_goes_on(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CLEAN_JOBS", 2)
    monkeypatch.setattr(cleaning, "_PAGE", 3)

    async def story(yard: Yard) -> None:
        ids = [await yard.ended(31 + number) for number in range(5)]
        reply = await yard.one(ADMIN)
        assert reply.jobs == 2
        assert [await yard.row(id) is None for id in ids].count(True) == 2
        assert reply.next is not None
        assert (await yard.clean(ADMIN, cursor=reply.next)).jobs == 3
        assert [await yard.row(id) for id in ids] == [None] * 5

    play(story)


def test_a_job_whose_bytes_cannot_go_stays_and_the_others_go(play: Play) -> None:
    async def story(yard: Yard) -> None:
        stuck, other = await yard.ended(31), await yard.ended(31)
        remove = yard.objects.remove

        async def refuse(folder: str) -> None:
            if folder == f"jobs/{stuck}/checkpoints/2":
                raise ObjectsError("Operation not permitted")
            await remove(folder)

        yard.objects.remove = refuse  # type: ignore[method-assign]
        reply = await yard.clean()
        assert reply.notes == (f"{stuck} stays: Operation not permitted",)
        assert (await yard.row(stuck) is None, await yard.row(other) is None) == (False, True)
        yard.objects.remove = remove  # type: ignore[method-assign]
        await yard.clean()
        assert await yard.row(stuck) is None
        assert await yard.left(stuck) == set()

    play(story)


def test_teams_clean_only_their_own(play: Play) -> None:
    async def story(yard: Yard) -> None:
        own, others = await yard.ended(31), await yard.ended(31, team="other")
        await yard.put_blob(b"whose?")
        yard.clock.ahead_s += 2 * DAY_S
        reply = await yard.clean(ADMIN)
        assert sizes(reply) == {**ALL, "rows": (1, 0), "records": (1, 3)}
        assert "operators clean them" in reply.notes[0]
        assert await yard.row(own) is None
        assert len(await yard.left(others)) == 7
        with pytest.raises(Refusal) as caught:
            await yard.one(ADMIN, cursor="blobs")
        assert caught.value.problem.code == "forbidden"
        assert sizes(await yard.clean()) == {**ALL, "rows": (1, 0), "records": (1, 3), "blobs": (1, 6)}

    play(story)


def test_the_route_is_for_administrators(house: House) -> None:
    for user in ("viewer", "submitter"):
        assert house.refused(403, "POST", "/v1/clean", user, json={})["code"] == "forbidden"
    answer = house.call("POST", "/v1/clean", "admin")
    assert (answer.status, answer.json["removed"], answer.json["next"]) == (200, [], None)
    assert house.refused(400, "POST", "/v1/clean", "admin", json={"older_than_s": 60})["field"] == "older_than_s"
    assert house.refused(400, "POST", "/v1/clean", "admin", json={"cursor": "else"})["field"] == "cursor"


def test_caches_are_asked_after_the_blobs(play: Play) -> None:
    async def story(yard: Yard) -> None:
        asked = []

        async def caches(before: float, dry_run: bool) -> tuple[list[CleanedView], str]:
            asked.append((round(yard.clock.now() - before), dry_run))
            return [CleanedView(kind="environments", count=2, bytes=700)], "one stays"

        yard.service.caches = caches
        reply = await yard.clean(dry_run=True)
        assert asked == [(DAY_S, True)]
        assert (sizes(reply), reply.notes) == ({"environments": (2, 700)}, ("one stays",))

    play(story)


# --- the policy ---
def kinds(left: set[str]) -> set[str]:
    return {path.partition("/")[0] for path in left}


def obey(yard: Yard, **policy: float) -> None:
    yard.service.settings = dataclasses.replace(yard.service.settings, retention=Retention(**policy))


def test_each_kind_has_its_own_time_and_the_row_goes_last(play: Play) -> None:
    async def story(yard: Yard) -> None:
        obey(yard, logs_s=2 * DAY_S, results_s=math.inf, checkpoints_s=5 * DAY_S)
        sixty, six, three, one = [await yard.ended(days) for days in (60, 6, 3, 1)]  # ids never go back
        live = await yard.submit()
        await yard.leave(live)
        whole = await yard.left(live)
        assert sizes(await yard.clean(dry_run=True)) == {
            "logs": (3, 33), "checkpoints": (4, 84), "compiled code": (2, 58)
        }  # fmt: skip
        await retention.one_pass(yard.service, None)
        assert (await yard.left(one), await yard.left(live)) == (whole, whole)
        assert kinds(await yard.left(three)) == kinds(whole) - {"log"}
        for id in (six, sixty):
            assert kinds(await yard.left(id)) & {"results", "staging"} == {"results", "staging"}
            assert not kinds(await yard.left(id)) & {"log", "jax-cache"}
            assert await yard.row(id) is not None, "its results stay, so it stays"
        obey(yard)
        await retention.one_pass(yard.service, None)
        assert (await yard.row(sixty), await yard.left(sixty)) == (None, set())
        assert await yard.left(live) == whole

    play(story)


def test_for_ever_is_for_ever(play: Play) -> None:
    async def story(yard: Yard) -> None:
        obey(yard, logs_s=math.inf, results_s=math.inf, checkpoints_s=math.inf, jobs_s=math.inf)
        old = await yard.ended(4000)
        before = await yard.left(old)
        assert await retention.one_pass(yard.service, None) is None
        assert (await yard.clean()).removed == ()
        assert await yard.left(old) == before
        assert sizes(await yard.clean(older_than_s=7 * DAY_S)) == ALL, "unless somebody says otherwise"
        assert await yard.row(old) is not None

    play(story)


def test_a_pass_is_bounded_and_the_next_goes_on(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CLEAN_JOBS", 1)
    monkeypatch.setattr(limits, "RETENTION_PARTS", 4)

    async def story(yard: Yard) -> None:
        jobs = [await yard.ended(31) for _ in range(3)]
        cursor = await retention.one_pass(yard.service, None)  # snapshots, blobs, caches, one job
        assert cursor is not None
        assert sum([await yard.row(id) is None for id in jobs]) == 1
        while cursor is not None:
            cursor = await retention.one_pass(yard.service, cursor)
        assert all([await yard.row(id) is None for id in jobs])

    play(story)


def test_trouble_ends_a_pass_and_not_the_server(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    async def story(yard: Yard) -> None:
        id = await yard.ended(31)

        async def broken(prefix: str) -> Any:
            raise ObjectsError("the bucket is away")

        right = yard.objects.survey
        yard.objects.survey = broken  # type: ignore[method-assign]
        assert await retention.one_pass(yard.service, None) is None
        assert "this pass ends early: the bucket is away" in caplog.text
        yard.objects.survey = right  # type: ignore[method-assign]
        await retention.one_pass(yard.service, None)
        assert await yard.row(id) is None

    play(story)
