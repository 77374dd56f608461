"""Objects that are written before they have a name, on every bucket: in any order, seen whole or not at all."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.objects.directory import DirectoryObjects
from penstock.objects.drafts import MemoryDraft
from penstock.ports.objects import AlreadyThere, Draft, Drafting, Ranged
from tests.contract.objects.conftest import Open

DATA = bytes(range(256)) * 3000


def draft_of(bucket: Ranged) -> Draft:
    return bucket.draft() if isinstance(bucket, Drafting) else MemoryDraft(bucket)


def test_a_draft_is_seen_whole_when_it_has_its_name(client_of: Open) -> None:
    async def story() -> None:
        bucket = client_of()
        await bucket.put_new("a/other", b"before")
        draft = draft_of(bucket)
        with ThreadPoolExecutor(4) as threads:
            for at in range(0, len(DATA), 7000):
                parts: list[bytes | memoryview] = [DATA[at : at + 3000], memoryview(DATA)[at + 3000 : at + 7000]]
                threads.submit(draft.write, at, parts)
        assert await bucket.list("") == ("a/other",)
        generation = await draft.name("a/data")
        stored = await client_of().get("a/data")
        assert stored is not None
        assert (stored.data, stored.generation) == (DATA, generation)
        with pytest.raises(AlreadyThere):
            await draft.name("a/data")
        with pytest.raises(AlreadyThere):
            await draft.name("a/other")
        again = await client_of().get("a/data")
        assert again is not None
        assert again.generation == generation
        await bucket.delete("a/data")
        later = draft_of(bucket)
        later.write(0, [b"later"])
        assert await later.name("a/data") > generation

    asyncio.run(story())


def test_a_directory_forgets_a_draft_that_got_no_name(tmp_path: Path) -> None:
    draft = DirectoryObjects(tmp_path).draft()
    draft.write(0, [b"x" * 100_000])
    assert asyncio.run(DirectoryObjects(tmp_path).list("")) == ()
    del draft
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
