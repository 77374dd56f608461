"""Faults O1 and O2 between the bucket adapter and Cloud Storage: every answer is right, or says that it is unknown.

What truly happened is read from the emulator's history, past the adapter.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from penstock.emulator.gcs_faults import Fault
from penstock.objects import bucket as bucket_module
from penstock.objects.bucket import BucketObjects, NoBucket, open_gcs
from penstock.ports.objects import AlreadyThere, ObjectsError
from tests.contract.objects.servers import BUCKET, Emulator, gcs_emulator


@pytest.fixture
def place(gcs: Emulator, request: pytest.FixtureRequest) -> Iterator[str]:
    """A prefix of the test's own; faults are gone before and after."""
    gcs.heal()
    yield f"{request.node.name}/".replace("[", ".").replace("]", "")
    gcs.heal()


@pytest.fixture
def bucket(gcs: Emulator, place: str) -> BucketObjects:
    return open_gcs(BUCKET, place, gcs.environment)


def writes(gcs: Emulator, place: str, path: str = "x") -> int:
    return sum(1 for each in gcs.history() if each.name == place + path and each.verb == "put")


@pytest.mark.parametrize("status", [503, 429, 500])
def test_a_service_that_refuses_for_a_moment_is_asked_again(
    gcs: Emulator, bucket: BucketObjects, place: str, status: int
) -> None:
    async def story() -> None:
        gcs.plant(Fault("refuse", f"{BUCKET}/{place}", times=2, status=status))
        generation = await bucket.put_new("x", b"1")
        gcs.plant(Fault("refuse", f"{BUCKET}/{place}", times=2, status=status))
        stored = await bucket.get("x")
        assert stored is not None
        assert (stored.data, stored.generation) == (b"1", generation)
        gcs.plant(Fault("refuse", f"{BUCKET}/{place}", times=2, status=status))
        assert await bucket.list("") == ("x",)
        gcs.plant(Fault("refuse", f"{BUCKET}/{place}", times=2, status=status))
        await bucket.delete("x")
        assert gcs.struck() == [2, 2, 2, 2]
        assert writes(gcs, place) == 1

    asyncio.run(story())


def test_a_retry_that_meets_its_own_success_is_told_and_can_be_read_back(
    gcs: Emulator, bucket: BucketObjects, place: str
) -> None:
    """O1: the 412 is caused by our own earlier success, and only reading back says so."""

    async def story() -> None:
        gcs.plant(Fault("refuse_after", f"{BUCKET}/{place}", "PUT", status=503))
        with pytest.raises(AlreadyThere):
            await bucket.put_new("x", b"mine")
        stored = await bucket.get("x")
        assert stored is not None
        assert stored.data == b"mine"
        assert writes(gcs, place) == 1
        assert gcs.struck() == [1]

    asyncio.run(story())


@pytest.mark.parametrize("new", [True, False])
def test_a_lost_answer_is_never_taken_for_a_failure_without_effect(
    gcs: Emulator, bucket: BucketObjects, place: str, new: bool
) -> None:
    async def story() -> None:
        gcs.plant(Fault("lose", f"{BUCKET}/{place}", "PUT"))
        with contextlib.suppress(AlreadyThere, ObjectsError):
            await (bucket.put_new("x", b"mine") if new else bucket.put("x", b"mine"))
        stored = await bucket.get("x")
        assert stored is not None
        assert stored.data == b"mine"
        assert gcs.struck() == [1]
        assert writes(gcs, place) == 1 if new else writes(gcs, place) in (1, 2)

    asyncio.run(story())


def test_an_upload_that_was_cut_leaves_nothing_or_all(gcs: Emulator, bucket: BucketObjects, place: str) -> None:
    async def story() -> None:
        data = bytes(range(256)) * 4096
        gcs.plant(Fault("cut", f"{BUCKET}/{place}", "PUT", times=20))
        with pytest.raises(ObjectsError):
            await bucket.put_new("x", data)
        assert await bucket.get("x") is None
        assert writes(gcs, place) == 0
        gcs.heal()
        gcs.plant(Fault("cut", f"{BUCKET}/{place}", "GET"))
        await bucket.put_new("x", data)
        stored = await bucket.get("x")
        assert stored is not None
        assert stored.data == data

    asyncio.run(story())


def test_a_limit_on_one_object_does_not_stop_others(
    gcs: Emulator, bucket: BucketObjects, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = {**bucket_module._RETRY, "max_retries": 10_000, "retry_timeout": timedelta(minutes=5)}

    async def story() -> None:
        gcs.plant(Fault("refuse", f"{BUCKET}/{place}hot", times=10_000, status=429))
        with pytest.raises(ObjectsError, match="429"):
            await bucket.put("hot", b"1")
        monkeypatch.setattr(bucket_module, "_RETRY", endless)
        patient = open_gcs(BUCKET, place, gcs.environment)
        hot = asyncio.create_task(patient.put("hot", b"1"))
        for number in range(5):
            await patient.put(f"cold{number}", b"1")
        assert not hot.done()
        gcs.heal()
        await hot

    asyncio.run(story())


def test_bytes_damaged_on_the_way_are_never_handed_on(gcs: Emulator, bucket: BucketObjects, place: str) -> None:
    async def story() -> None:
        await bucket.put("x", b"as it was")
        gcs.plant(Fault("damage", f"{BUCKET}/{place}", "GET"))
        stored = await bucket.get("x")
        assert stored is not None
        assert stored.data == b"as it was"
        gcs.plant(Fault("damage", f"{BUCKET}/{place}", "PUT", times=2))
        await bucket.put("x", b"as it should be")
        stored = await bucket.get("x")
        assert stored is not None
        assert stored.data == b"as it should be"
        gcs.plant(Fault("damage", f"{BUCKET}/{place}", "PUT"))
        await bucket.put_new("y", b"new")
        found = await bucket.get("y")
        assert found is not None
        assert found.data == b"new"
        gcs.plant(Fault("damage", f"{BUCKET}/{place}", "PUT", times=9))
        with pytest.raises(ObjectsError, match="other bytes arrived than were sent"):
            await bucket.put("x", b"never right")
        gcs.heal()
        with pytest.raises(ObjectsError, match="damaged"):
            await bucket.get("x")

    asyncio.run(story())


def test_credentials_that_ran_out_are_an_error_with_the_reason(
    gcs: Emulator, bucket: BucketObjects, place: str
) -> None:
    async def story() -> None:
        await bucket.put("x", b"1")
        gcs.plant(Fault("refuse", f"{BUCKET}/{place}", status=401, times=4))
        for call in (bucket.put("x", b"2"), bucket.get("x"), bucket.list(""), bucket.delete("x")):
            with pytest.raises(ObjectsError, match=r"^gs://test-bucket/.*401"):
                await call
        stored = await bucket.get("x")
        assert stored is not None
        assert stored.data == b"1"

    asyncio.run(story())


def test_an_object_that_a_lifecycle_rule_deleted_is_absent_and_its_name_free(
    gcs: Emulator, bucket: BucketObjects, place: str
) -> None:
    async def story() -> None:
        first = await bucket.put_new("x", b"1")
        gcs.plant(Fault("vanish", f"{BUCKET}/{place}", "GET"))
        assert await bucket.get("x") is None
        assert await bucket.put_new("x", b"2") > first

    asyncio.run(story())


def test_short_and_empty_pages_do_not_end_a_listing(gcs: Emulator, bucket: BucketObjects, place: str) -> None:
    async def story() -> None:
        paths = tuple(f"p/{number}" for number in range(9))
        for path in paths:
            await bucket.put(path, b"")
        gcs.plant(
            Fault("short", f"{BUCKET}/{place}", most=2, times=2), Fault("short", f"{BUCKET}/{place}", most=0, times=2)
        )
        assert await bucket.list("p/") == paths
        assert gcs.struck() == [2, 2]

    asyncio.run(story())


def test_a_slow_answer_is_waited_for_and_others_are_not_held_up(
    gcs: Emulator, bucket: BucketObjects, place: str
) -> None:
    async def story() -> None:
        gcs.plant(Fault("slow", f"{BUCKET}/{place}slow", seconds=8.0))
        began = time.monotonic()
        slow = asyncio.create_task(bucket.put("slow", b"1"))
        async with asyncio.timeout(30):
            while gcs.struck() != [1]:  # noqa: ASYNC110 - what is waited for happens in another process
                await asyncio.sleep(0.01)
        await bucket.put("fast", b"1")
        assert not slow.done()
        await slow
        assert time.monotonic() - began >= 8.0

    asyncio.run(story())


def test_a_bucket_that_is_not_there_is_not_an_empty_one(gcs: Emulator) -> None:
    bucket = open_gcs("another-bucket", "", gcs.environment)
    for call in (bucket.get("x"), bucket.list(""), bucket.put("x", b""), bucket.put_new("x", b""), bucket.delete("x")):
        with pytest.raises(NoBucket, match="gs://another-bucket: there is no such bucket"):
            asyncio.run(call)
    with pytest.raises(NoBucket):
        bucket.probe()


def test_a_service_that_does_not_answer_is_an_error_in_bounded_time() -> None:
    with gcs_emulator() as emulator:
        bucket = open_gcs(BUCKET, "", emulator.environment)
        asyncio.run(bucket.put("x", b"1"))
    began = time.monotonic()
    with pytest.raises(ObjectsError, match=r"^gs://test-bucket: x: "):
        asyncio.run(bucket.put("x", b"2"))
    assert time.monotonic() - began < 30


def test_an_emulator_with_a_directory_has_everything_again(tmp_path: Path) -> None:
    async def first(bucket: BucketObjects) -> int:
        await bucket.put("gone", b"")
        await bucket.delete("gone")
        return await bucket.put("kept/here", b"\n1\n")

    async def second(bucket: BucketObjects, before: int) -> None:
        assert await bucket.list("") == ("kept/here",)
        stored = await bucket.get("kept/here")
        assert stored is not None
        assert (stored.data, stored.generation) == (b"\n1\n", before)
        assert await bucket.put("kept/here", b"2") > before

    with gcs_emulator("--directory", str(tmp_path / "cloud")) as emulator:
        generation = asyncio.run(first(open_gcs(BUCKET, "", emulator.environment)))
    with gcs_emulator("--directory", str(tmp_path / "cloud")) as emulator:
        asyncio.run(second(open_gcs(BUCKET, "", emulator.environment), generation))
