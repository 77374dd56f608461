"""What every bucket must do: first writer wins, generations rise, listings are by prefix, absence is an answer.

Runs on each adapter that `conftest.py` names. What only one adapter promises is tested beside that adapter.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.domain.admission import BadInput
from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import AlreadyThere
from tests.contract.objects.conftest import Make, Open


def test_what_was_put_is_read_back(client_of: Open) -> None:
    async def story() -> None:
        bucket = client_of()
        data = bytes(range(256)) * 5000
        generation = await bucket.put("jobs/j1/log/a1/0/out/0000000000000000.zst", data)
        stored = await client_of().get("jobs/j1/log/a1/0/out/0000000000000000.zst")
        assert stored is not None
        assert (stored.data, stored.generation) == (data, generation)

    asyncio.run(story())


def test_an_empty_object_exists(client_of: Open) -> None:
    async def story() -> None:
        bucket = client_of()
        await bucket.put_new("empty", b"")
        stored = await bucket.get("empty")
        assert stored is not None
        assert stored.data == b""

    asyncio.run(story())


def test_a_survey_tells_sizes_and_ages(client_of: Open) -> None:
    async def story() -> None:
        bucket = client_of()
        await bucket.put("a/1", b"12345")
        await bucket.put_new("a/2", b"")
        await bucket.put("ab", b"1")
        found = await bucket.survey("a/")
        assert [(kept.path, kept.size) for kept in found] == [("a/1", 5), ("a/2", 0)]
        assert all(abs(kept.written_at - time.time()) < 120 for kept in found)  # noqa: TID251 (the bucket's own clock)
        await bucket.put("a/1", b"1234567")
        assert [kept.size for kept in await bucket.survey("a/1")] == [7]
        assert await bucket.survey("z/") == ()

    asyncio.run(story())


def test_a_folder_is_removed_with_all_below_it(client_of: Open) -> None:
    async def story() -> None:
        bucket = client_of()
        for path in ("jobs/j1/log/a/1", "jobs/j1/log/2", "jobs/j1/logs", "jobs/j12/log/1", "jobs/j1/fence/0"):
            await bucket.put(path, b"x")
        await bucket.remove("jobs/j1/log")
        await bucket.remove("jobs/j1/log")
        await bucket.remove("nowhere/at/all")
        assert await bucket.list("") == ("jobs/j1/fence/0", "jobs/j1/logs", "jobs/j12/log/1")
        await bucket.put("jobs/j1/log/2", b"again")
        await bucket.remove("jobs/j1")
        assert await bucket.list("") == ("jobs/j12/log/1",)

    asyncio.run(story())


def test_a_part_of_an_object_is_read(client_of: Open) -> None:
    async def story() -> None:
        bucket = client_of()
        data = bytes(range(256)) * 50
        await bucket.put("a/part", data)
        for start, stop in ((0, 10), (5, 5), (100, 12_800), (12_790, 20_000)):
            assert await bucket.get_range("a/part", start, stop) == data[start:stop]
        assert await bucket.get_range("a/nothing", 0, 10) is None
        assert await bucket.get_range("a", 0, 10) is None

    asyncio.run(story())


def test_absence_is_an_answer(client_of: Open) -> None:
    async def story() -> None:
        bucket = client_of()
        await bucket.put("a/b", b"1")
        assert await bucket.get("a/c") is None
        assert await bucket.get("z/y/x") is None
        assert await bucket.get("a") is None
        await bucket.delete("a/c")
        await bucket.delete("z/y/x")
        assert await bucket.list("z") == ()

    asyncio.run(story())


def test_a_put_replaces_and_the_generation_rises(client_of: Open) -> None:
    async def story() -> None:
        bucket, other = client_of(), client_of()
        seen = [await each.put("fence", str(number).encode()) for number in range(20) for each in (bucket, other)]
        assert seen == sorted(set(seen))
        stored = await bucket.get("fence")
        assert stored is not None
        assert (stored.data, stored.generation) == (b"19", seen[-1])

    asyncio.run(story())


def test_a_generation_is_not_used_again_after_a_delete(client_of: Open) -> None:
    async def story() -> None:
        seen = []
        for _ in range(20):
            seen.append(await client_of().put_new("unit/7", b"x"))
            await client_of().delete("unit/7")
        assert seen == sorted(set(seen))

    asyncio.run(story())


def test_create_if_absent_does_not_touch_what_is_there(client_of: Open) -> None:
    async def story() -> None:
        bucket = client_of()
        generation = await bucket.put_new("a/b", b"first")
        with pytest.raises(AlreadyThere):
            await client_of().put_new("a/b", b"second")
        stored = await bucket.get("a/b")
        assert stored is not None
        assert (stored.data, stored.generation) == (b"first", generation)

    asyncio.run(story())


def test_one_of_many_creators_wins(client_of: Open) -> None:
    async def story() -> None:
        async def create(number: int) -> int | None:
            try:
                await client_of().put_new("commit", str(number).encode())
            except AlreadyThere:
                return None
            return number

        for _ in range(10):
            answers = await asyncio.gather(*(create(number) for number in range(8)))
            winners = [answer for answer in answers if answer is not None]
            assert len(winners) == 1
            stored = await client_of().get("commit")
            assert stored is not None
            assert stored.data == str(winners[0]).encode()
            await client_of().delete("commit")

    asyncio.run(story())


def test_readers_see_whole_objects_while_writers_replace_them(client_of: Open) -> None:
    async def story() -> None:
        writer, reader = client_of(), client_of()
        await writer.put("page", b"0" * 100_000)

        async def write() -> None:
            for number in range(1, 30):
                await writer.put("page", str(number % 10).encode() * 100_000)

        task = asyncio.create_task(write())
        generations = []
        while not task.done():
            stored = await reader.get("page")
            assert stored is not None
            assert stored.data == stored.data[:1] * 100_000
            generations.append(stored.generation)
            await asyncio.sleep(0)
        await task
        assert generations == sorted(generations)

    asyncio.run(story())


def test_a_delete_beside_writes_in_the_same_folder_loses_nothing(client_of: Open) -> None:
    async def story() -> None:
        for number in range(40):
            await client_of().put(f"jobs/j/a{number}", b"old")
            await asyncio.gather(
                client_of().delete(f"jobs/j/a{number}"),
                *(client_of().put_new(f"jobs/j/deep/er/b{number}.{twin}", b"new") for twin in range(3)),
            )
            assert len(await client_of().list(f"jobs/j/deep/er/b{number}.")) == 3
            await asyncio.gather(*(client_of().delete(f"jobs/j/deep/er/b{number}.{twin}") for twin in range(3)))

    asyncio.run(story())


def test_listings_are_by_prefix_and_sorted(client_of: Open) -> None:
    async def story() -> None:
        bucket = client_of()
        for path in ("jobs/j1/fence/0", "jobs/j1/log/a", "jobs/j10/fence/0", "blobs/ff", "jobs.txt"):
            await bucket.put(path, b".")
        assert await bucket.list("jobs/j1") == ("jobs/j1/fence/0", "jobs/j1/log/a", "jobs/j10/fence/0")
        assert await bucket.list("jobs/j1/") == ("jobs/j1/fence/0", "jobs/j1/log/a")
        assert await bucket.list("jobs/j1/lo") == ("jobs/j1/log/a",)
        assert await bucket.list("jobs/j1/fence/0") == ("jobs/j1/fence/0",)
        assert await bucket.list("jo") == ("jobs.txt", "jobs/j1/fence/0", "jobs/j1/log/a", "jobs/j10/fence/0")
        assert len(await bucket.list("")) == 5

    asyncio.run(story())


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "a%2Fb",
        "a%b",
        "a#b?c&d=e+f",
        "ü",
        "u\u0308",
        "~*'()!",
        "💧",
        "-rf",
        "CON",
        "$(true)",
        "<x>&amp;",
        "a:b",
        "é.zst",
    ],
)
def test_a_name_is_kept_as_it_is(client_of: Open, name: str) -> None:
    """I2: what means something to a shell, a URL, XML or a file system is only a name here."""

    async def story() -> None:
        bucket = client_of()
        for path in (name, f"in/{name}/side"):
            await bucket.put_new(path, path.encode())
            stored = await client_of().get(path)
            assert stored is not None
            assert stored.data == path.encode()
            assert await bucket.list(path) == (path,)
        assert await bucket.list("in/") == (f"in/{name}/side",)
        await bucket.delete(name)
        assert await bucket.get(name) is None

    asyncio.run(story())


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "../a", "a/./b", "a\\b", "a\0b", "x" * 256, "y/" * 600 + "z"])
def test_what_is_no_name_is_refused(empty: Make, path: str) -> None:
    bucket = empty()()
    for call in (bucket.put(path, b""), bucket.put_new(path, b""), bucket.get(path), bucket.delete(path)):
        with pytest.raises(BadInput, match=r"^path: "):
            asyncio.run(call)


def test_a_listing_of_many_objects_is_whole(client_of: Open) -> None:
    async def story() -> None:
        bucket = client_of()
        paths = [f"many/{number:04d}" for number in range(1_100)]
        for begin in range(0, len(paths), 50):
            await asyncio.gather(*(bucket.put_new(path, b"") for path in paths[begin : begin + 50]))
        assert await bucket.list("many/") == tuple(paths)
        assert await bucket.list("many/09") == tuple(paths[900:1000])

    asyncio.run(story())


_NAMES = st.sampled_from(["a", "b/c", "b/d", "b/e/f", "ü/…", "with space", "b.c"])
_STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "put_new", "get", "list", "delete"]), _NAMES, st.binary(max_size=3)), max_size=25
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS)
def test_every_bucket_answers_as_memory_does(empty: Make, steps: list[tuple[str, str, bytes]]) -> None:
    async def story() -> None:
        memory, other = MemoryObjects(), empty()()
        for verb, path, data in steps:
            answers = []
            for bucket in (memory, other):
                try:
                    match verb:
                        case "put":
                            await bucket.put(path, data)
                            answers.append("written")
                        case "put_new":
                            await bucket.put_new(path, data)
                            answers.append("written")
                        case "get":
                            stored = await bucket.get(path)
                            answers.append(repr(stored and stored.data))
                        case "list":
                            answers.append(repr(await bucket.list(path[:1])))
                        case _:
                            await bucket.delete(path)
                            answers.append("deleted")
                except AlreadyThere:
                    answers.append("already there")
            assert answers[0] == answers[1], (verb, path)

    asyncio.run(story())
