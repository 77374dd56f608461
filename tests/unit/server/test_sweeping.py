"""Snapshots and blobs that nobody needs go, and no submit under way loses what it was told is there."""

from __future__ import annotations

import hashlib

import pytest

from penstock.domain import limits
from penstock.domain.nouns import Principal, Role
from penstock.ports.objects import ObjectsError
from penstock.server import bytes as moving
from penstock.server import submission
from penstock.server.routing import Refusal
from penstock.wire.api import CommandRequest, JobRequest, MissingRequest
from tests.unit.server.yard import ADMIN, DAY_S, Play, Yard, sizes


def test_snapshots_go_with_their_blobs_when_no_job_names_them(play: Play) -> None:
    async def story(yard: Yard) -> None:
        both, lonely, stray = [await yard.put_blob(data) for data in (b"both", b"lonely", b"a stray")]
        used, unused = await yard.put_snapshot(both), await yard.put_snapshot(both, lonely)
        await yard.submit(used)
        assert sizes(await yard.clean()) == {}  # all of it was sent just now
        yard.clock.ahead_s += DAY_S + 60
        fresh = await yard.put_blob(b"for a submit under way")
        counted = await yard.clean(dry_run=True)
        assert await yard.has(both, lonely, stray) == [True, True, True]
        removed = await yard.clean()
        assert removed.removed == counted.removed
        assert sizes(removed) == {"snapshots": (1, 129), "blobs": (2, 13)}
        assert await yard.objects.list("snapshots/") == (f"snapshots/lab/{used}.json",)
        assert unused != used
        assert await yard.has(both, lonely, stray, fresh) == [True, False, False, True]
        asked = yard.call(MissingRequest((both, lonely)), ADMIN)
        assert (await moving.missing_blobs(yard.service, asked)).missing == (lonely,)

    play(story)


def test_large_roots_take_several_calls(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CLEAN_OBJECTS", 2)
    monkeypatch.setattr(limits, "CLEAN_READ_BYTES", 70)

    async def story(yard: Yard) -> None:
        kept = [await yard.put_blob(f"kept {number}".encode()) for number in range(4)]
        for blob in kept:
            await yard.submit(await yard.put_snapshot(blob))
        for number in range(5):
            await yard.put_snapshot(await yard.put_blob(f"old {number}".encode()))
        yard.clock.ahead_s += DAY_S + 60
        counted = await yard.clean(dry_run=True)
        removed = await yard.clean()
        assert sizes(removed) == sizes(counted) == {"snapshots": (5, 320), "blobs": (5, 25)}
        assert await yard.has(*kept) == [True] * 4

    play(story)


def test_a_submit_under_way_keeps_what_it_was_told_is_there(play: Play) -> None:
    async def story(yard: Yard) -> None:
        blob, other = await yard.put_blob(b"told to be there"), await yard.put_blob(b"not needed")
        yard.clock.ahead_s += DAY_S + 60
        refusals = []

        async def send_the_snapshot() -> None:
            """The list is written, the sweep has not looked again: the client's next call comes now."""
            try:
                await yard.put_snapshot(blob)
            except Refusal as refusal:
                refusals.append(refusal.problem)

        yard.clock.meanwhile = send_the_snapshot
        await yard.clean()
        assert await yard.has(blob, other) == [True, False]
        assert [(said.code, said.retry_after_s) for said in refusals] == [("unavailable", 2.0)]
        await yard.submit(await yard.put_snapshot(blob))  # which the client repeats

    play(story)


def test_a_snapshot_that_is_sent_again_is_young_again(play: Play) -> None:
    async def story(yard: Yard) -> None:
        snapshot = await yard.put_snapshot(await yard.put_blob(b"data"))
        yard.clock.ahead_s += DAY_S + 60
        await yard.put_snapshot(*[path.removeprefix("blobs/lab/") for path in await yard.objects.list("blobs/")])
        assert sizes(await yard.clean()) == {}
        yard.clock.ahead_s += DAY_S + 60

        async def name_it() -> None:
            request = JobRequest(payload=CommandRequest(("true",), snapshot))
            call = yard.call(None, ADMIN)
            with pytest.raises(Refusal) as caught:
                await submission.prepare(yard.service, call, (request,))
            assert caught.value.problem.code == "unavailable"

        yard.clock.meanwhile = name_it
        assert sizes(await yard.clean()) == {"snapshots": (1, 64), "blobs": (1, 4)}

    play(story)


def test_blobs_that_went_after_they_were_asked_about_are_asked_for_again(play: Play) -> None:
    async def story(yard: Yard) -> None:
        blob = await yard.put_blob(b"gone soon")
        yard.clock.ahead_s += DAY_S + 60
        asked = yard.call(MissingRequest((blob,)), ADMIN)
        assert (await moving.missing_blobs(yard.service, asked)).missing == ()
        await yard.clean()
        with pytest.raises(Refusal) as caught:
            await yard.put_snapshot(blob)
        assert (caught.value.problem.code, caught.value.problem.field) == ("conflict", "snapshot")
        assert (await moving.missing_blobs(yard.service, asked)).missing == (blob,)
        await yard.put_blob(b"gone soon")
        await yard.put_snapshot(blob)

    play(story)


def test_a_sweep_that_died_hinders_nobody_for_long(play: Play) -> None:
    async def story(yard: Yard) -> None:
        blobs = [await yard.put_blob(f"blob {number}".encode()) for number in range(3)]
        yard.clock.ahead_s += DAY_S + 60

        async def die() -> None:
            raise ObjectsError("the power went")

        yard.clock.meanwhile = die
        with pytest.raises(ObjectsError):
            await yard.clean()
        with pytest.raises(Refusal):
            await yard.put_snapshot(*blobs)
        yard.clock.ahead_s += 2 * limits.SWEEP_S
        await yard.put_snapshot(*blobs)
        assert await yard.has(*blobs) == [True] * 3
        yard.clock.ahead_s += DAY_S + 60
        assert sizes(await yard.clean())["blobs"] == (3, 18)
        lists = await yard.objects.list("clean/")
        yard.clock.ahead_s += DAY_S + 60
        await yard.clean()
        assert not set(lists) & set(await yard.objects.list("clean/"))

    play(story)


def test_what_another_team_names_keeps_nothing(play: Play) -> None:
    """Equal bytes of two teams are two blobs: neither is kept, lost or asked for again because of the other."""

    async def story(yard: Yard) -> None:
        blob = await yard.put_blob(b"the same")
        stranger = Principal(name="stan", team="other", role=Role.ADMIN)
        await moving.put_blob(yard.service, yard.call(b"the same", stranger, sha256=blob))
        yard.clock.ahead_s += DAY_S + 60
        refusals = []

        async def send_the_snapshot() -> None:
            try:
                body = blob.encode()
                name = hashlib.sha256(body).hexdigest()
                await moving.put_snapshot(yard.service, yard.call(body, stranger, sha256=name))
            except Refusal as refusal:
                refusals.append(refusal.problem.code)

        yard.clock.meanwhile = send_the_snapshot
        assert sizes(await yard.clean())["blobs"] == (1, 8)
        assert await yard.objects.list("blobs/") == (f"blobs/other/{blob}",)
        assert refusals == ["unavailable"]  # it came while its own blob was on the list

    play(story)
