"""The in-memory bucket: create-if-absent, generations, views of several writers, faults around the effect."""

import asyncio

import pytest

from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import AlreadyThere, Objects, ObjectsError


class Broken:
    """Fails before or after the effect of one verb."""

    def __init__(self, verb: str, *, after: bool) -> None:
        self.verb = verb
        self.late = after

    async def before(self, verb: str, path: str) -> None:
        if verb == self.verb and not self.late:
            raise ObjectsError("not sent")

    async def after(self, verb: str, path: str) -> None:
        if verb == self.verb and self.late:
            raise ObjectsError("no answer")


def test_it_is_an_objects_port() -> None:
    objects: Objects = MemoryObjects()
    assert asyncio.run(objects.get("nothing")) is None


def test_put_replaces_and_generations_rise() -> None:
    async def story() -> None:
        objects = MemoryObjects()
        first = await objects.put("a", b"1")
        second = await objects.put("a", b"2")
        other = await objects.put("b", b"3")
        assert first < second < other
        stored = await objects.get("a")
        assert stored is not None
        assert (stored.data, stored.generation) == (b"2", second)

    asyncio.run(story())


def test_the_first_create_wins() -> None:
    async def story() -> None:
        objects = MemoryObjects()
        one, two = objects.by("one"), objects.by("two")
        await one.put_new("a", b"one")
        with pytest.raises(AlreadyThere):
            await two.put_new("a", b"two")
        stored = await two.get("a")
        assert stored is not None
        assert stored.data == b"one"
        await two.delete("a")
        await two.put_new("a", b"two")

    asyncio.run(story())


def test_list_is_sorted_and_by_prefix() -> None:
    async def story() -> None:
        objects = MemoryObjects()
        for path in ("x/b", "x/a", "y/a"):
            await objects.put(path, b"")
        assert await objects.list("x/") == ("x/a", "x/b")
        await objects.delete("x/a")
        await objects.delete("x/a")
        assert await objects.list("x/") == ("x/b",)
        assert objects.paths() == ("x/b", "y/a")

    asyncio.run(story())


@pytest.mark.parametrize("verb", ["put", "put_new"])
@pytest.mark.parametrize("after", [False, True])
def test_a_failed_write_has_happened_or_not(verb: str, after: bool) -> None:
    async def story() -> None:
        objects = MemoryObjects()
        broken = objects.by("me", Broken(verb, after=after))
        with pytest.raises(ObjectsError):
            await getattr(broken, verb)("a", b"1")
        assert (objects.peek("a") is not None) is after

    asyncio.run(story())


def test_changes_are_told_once_with_their_writer() -> None:
    told: list[tuple[str, bytes | None, int, str]] = []

    async def story() -> None:
        objects = MemoryObjects(writer="w", on_change=lambda *change: told.append(change))
        await objects.put("a", b"1")
        with pytest.raises(AlreadyThere):
            await objects.put_new("a", b"2")
        with pytest.raises(ObjectsError):
            await objects.by("v", Broken("put_new", after=True)).put_new("b", b"3")
        await objects.delete("a")
        await objects.delete("a")

    asyncio.run(story())
    assert told == [("a", b"1", 1, "w"), ("b", b"3", 2, "v"), ("a", None, 0, "w")]
