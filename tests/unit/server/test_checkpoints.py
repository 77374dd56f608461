"""Checkpoints by pieces and lists: whole or not there, under one's own fence, and for nobody else."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from penstock.controller import attempts
from penstock.domain import limits
from penstock.domain.nouns import Attempt, Rule
from penstock.ports.objects import Damaged, ObjectsError
from penstock.server import checkpoints
from penstock.server.routing import Refusal
from penstock.wire.agent import PiecesQuery, Saved, SavedFile
from penstock.wire.api import ProgressView
from tests.unit.server.plant import Host, Plant, plant


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about how long a job that failed waits before its next attempt."""
    monkeypatch.setattr(limits, "BACKOFF_FIRST_S", 0.01)


def run(story: Any, home: Path) -> None:
    async def play() -> None:
        async with plant(home) as made:
            await story(made)

    asyncio.run(play())


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def a_list(number: int, *contents: bytes) -> Saved:
    files = [SavedFile(f"f{n}", len(each), 0o600, 1, (name_of(each),)) for n, each in enumerate(contents)]
    return Saved(number=number, files=tuple(files))


async def put(made: Plant, host: Host, attempt: Attempt, data: bytes) -> None:
    await checkpoints.put_piece(made.service, host.call(attempt, body=data, sha256=name_of(data)))


async def commit(made: Plant, host: Host, attempt: Attempt, saved: Saved) -> None:
    await checkpoints.put_saved(made.service, host.call(attempt, body=saved))


async def refused(awaited: Any) -> tuple[str, str | None]:
    with pytest.raises(Refusal) as caught:
        await awaited
    return caught.value.problem.code, caught.value.problem.field


def test_a_copy_counts_when_all_of_it_is_there(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, host, attempt = await made.running()
        prefix = f"jobs/{job}/checkpoints/{attempt.fence}/0/"
        assert (await checkpoints.saved(made.service, host.call(attempt))).number == 0
        await put(made, host, attempt, b"one")
        wanted = PiecesQuery((name_of(b"one"), name_of(b"two")))
        reply = await checkpoints.missing_pieces(made.service, host.call(attempt, body=wanted))
        assert reply.missing == (name_of(b"two"),)
        assert await refused(commit(made, host, attempt, a_list(1, b"one", b"two"))) == ("conflict", "pieces")
        assert not [path for path in made.objects.paths() if "/lists/" in path]
        await put(made, host, attempt, b"two")
        for _ in range(2):  # its answer was lost, and it comes again
            await commit(made, host, attempt, a_list(1, b"one", b"two"))
        assert await checkpoints.saved(made.service, host.call(attempt)) == a_list(1, b"one", b"two")
        assert await refused(commit(made, host, attempt, a_list(1, b"two"))) == ("conflict", "number")
        await commit(made, host, attempt, a_list(2, b"two"))
        assert await refused(commit(made, host, attempt, a_list(1, b"two"))) == ("conflict", "number")
        await commit(made, host, attempt, a_list(3, b"two"))
        # The one before stays as well; what only older ones named goes.
        assert {path.removeprefix(prefix) for path in made.objects.paths() if path.startswith(prefix)} == {
            "lists/0000000000000002.json",
            "lists/0000000000000003.json",
            f"pieces/{name_of(b'two')}",
        }

    run(story, tmp_path)


def test_the_ledger_hears_of_each_checkpoint_and_what_it_cost(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        _, host, attempt = await made.running()
        await commit(made, host, attempt, Saved(number=1))  # "I am here": nothing is saved by it
        found = await made.service.store.read(lambda reader: reader.attempt(attempt.id))
        assert found is not None
        assert found.saves == ()
        for number, data in ((2, b"one"), (3, b"two")):
            made.service.note_progress(attempt.id, ProgressView(done=1.0, save_s=float(number)))
            await put(made, host, attempt, data)
            await commit(made, host, attempt, a_list(number, data))
        found = await made.service.store.read(lambda reader: reader.attempt(attempt.id))
        assert found is not None
        (save,) = found.saves
        assert (save.host, save.count, save.cost_s) == (0, 2, 3.0)
        assert found.saved_at == save.at
        assert found.created_at <= save.at <= made.service.clock.now()

    run(story, tmp_path)


def test_a_piece_is_what_its_name_says_however_often_it_comes(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, host, attempt = await made.running()
        wrong = host.call(attempt, body=b"one", sha256=name_of(b"two"))
        assert await refused(checkpoints.put_piece(made.service, wrong)) == ("conflict", "sha256")
        path = f"jobs/{job}/checkpoints/{attempt.fence}/0/pieces/{name_of(b'one')}"
        await made.objects.put(path, b"damaged on the way")
        await put(made, host, attempt, b"one")
        found = made.objects.peek(path)
        assert found is not None
        assert found.data == b"one"

    run(story, tmp_path)


def test_whoever_was_passed_writes_nothing_more(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        _, host, attempt = await made.running()
        await put(made, host, attempt, b"one")
        await made.store.transact(attempts.raise_fence, attempt.id)
        before = [path for path in made.objects.paths() if "/checkpoints/" in path]
        assert await refused(put(made, host, attempt, b"two")) == ("conflict", "fence")
        assert await refused(commit(made, host, attempt, a_list(1, b"one"))) == ("conflict", "fence")
        assert [path for path in made.objects.paths() if "/checkpoints/" in path] == before

    run(story, tmp_path)


def test_a_resumed_attempt_reads_the_newest_whole_copy_and_nothing_else(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, host, attempt = await made.running(rule=Rule(failure_budget=5))
        other_job, other, others = await made.running()
        await put(made, other, others, b"theirs")
        await commit(made, other, others, a_list(1, b"theirs"))
        await put(made, host, attempt, b"mine")
        await commit(made, host, attempt, a_list(1, b"mine"))
        await host.exit(attempt, code=1)
        second = await host.launched()
        assert second.job == job
        await put(made, host, second, b"cut off before its list")
        await host.exit(second, code=1)
        third = await host.launched()
        reply = await checkpoints.restore(made.service, host.call(third))
        assert [(each.job, each.fence, each.rank) for each in reply.found] == [(job, attempt.fence, 0)]
        assert reply.found[0].saved == a_list(1, b"mine")

        def piece(of: str, fence: int, data: bytes) -> Any:
            query = {"job": of, "fence": str(fence), "rank": "0"}
            return checkpoints.get_piece(made.service, host.call(third, query=query, sha256=name_of(data)))

        assert (await piece(job, attempt.fence, b"mine")).body == b"mine"
        assert await refused(piece(other_job, others.fence, b"theirs")) == ("forbidden", None)
        theirs = other.call(third, query={"job": job, "fence": str(attempt.fence), "rank": "0"}, sha256="0" * 64)
        assert (await refused(checkpoints.get_piece(made.service, theirs)))[0] == "forbidden"
        assert (await refused(checkpoints.restore(made.service, other.call(third))))[0] == "forbidden"

    run(story, tmp_path)


# --- damage ---
async def resumed(made: Plant, *lists: tuple[bytes, ...]) -> tuple[str, Host, Attempt, Attempt]:
    """A job whose first attempt made these copies and failed: job, host, that attempt, and the next one."""
    job, host, first = await made.running(rule=Rule(failure_budget=5))
    for number, contents in enumerate(lists, 1):
        for data in contents:
            await put(made, host, first, data)
        await commit(made, host, first, a_list(number, *contents))
    await host.exit(first, code=1)
    return job, host, first, await host.launched()


async def found(made: Plant, host: Host, attempt: Attempt, skip: int = 0) -> tuple[list[int], list[str]]:
    """The numbers of the lists that are given to restore, and what is said of others."""
    reply = await checkpoints.restore(made.service, host.call(attempt, query={"skip": str(skip)}))
    return [each.saved.number for each in reply.found], list(reply.notes)


def test_older_copies_are_given_when_newer_ones_are_not_whole(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, host, first, second = await resumed(made, (b"one",), (b"two",))
        assert [await found(made, host, second, skip) for skip in range(3)] == [([2], []), ([1], []), ([], [])]
        shelf = f"jobs/{job}/checkpoints/{first.fence}/0/"
        await made.objects.delete(f"{shelf}pieces/{name_of(b'two')}")
        lost = "checkpoint 2 of attempt 1, host 0, is skipped: pieces of it are missing"
        assert await found(made, host, second) == ([1], [lost])
        await made.objects.put(f"{shelf}lists/{2:016d}.json", b'{"number": 2, "fil')
        torn = "checkpoint 2 of attempt 1, host 0, is skipped: its list is damaged"
        assert await found(made, host, second) == ([1], [torn])
        await made.objects.delete(f"{shelf}pieces/{name_of(b'one')}")
        assert (await found(made, host, second))[0] == []
        gone = host.call(second, query={"job": job, "fence": str(first.fence), "rank": "0"}, sha256=name_of(b"one"))
        assert await refused(checkpoints.get_piece(made.service, gone)) == ("not_found", "sha256")

    run(story, tmp_path)


def test_a_damaged_piece_is_told_apart_from_a_storage_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(made: Plant) -> None:
        job, host, first, second = await resumed(made, (b"one",))
        query = {"job": job, "fence": str(first.fence), "rank": "0"}
        asked = host.call(second, query=query, sha256=name_of(b"one"))

        async def damaged(path: str) -> None:
            raise Damaged(path)

        async def away(path: str) -> None:
            raise ObjectsError(path)

        monkeypatch.setattr(made.objects, "get", damaged)
        assert await refused(checkpoints.get_piece(made.service, asked)) == ("conflict", "sha256")
        monkeypatch.setattr(made.objects, "get", away)
        with pytest.raises(ObjectsError):  # which `app` says as 503: it is asked again
            await checkpoints.get_piece(made.service, asked)

    run(story, tmp_path)


def test_a_damaged_list_of_ones_own_does_not_stop_the_copying(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, host, attempt = await made.running()
        await put(made, host, attempt, b"one")
        await commit(made, host, attempt, a_list(1, b"one"))
        await made.objects.put(f"jobs/{job}/checkpoints/{attempt.fence}/0/lists/{1:016d}.json", b"\xff")
        assert await checkpoints.saved(made.service, host.call(attempt)) == Saved(number=1)
        for number in (2, 3):
            await commit(made, host, attempt, a_list(number, b"one"))
        assert await checkpoints.saved(made.service, host.call(attempt)) == a_list(3, b"one")

    run(story, tmp_path)


# --- compiled code ---
def test_compiled_code_is_kept_by_job_for_its_own_attempts_only(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        compiled = {"kind": "compiled"}
        job, host, first = await made.running(rule=Rule(failure_budget=5))
        _, other, others = await made.running()
        put_one = host.call(first, query=compiled, body=b"jit", sha256=name_of(b"jit"))
        await checkpoints.put_piece(made.service, put_one)
        await checkpoints.put_saved(made.service, host.call(first, query=compiled, body=a_list(1, b"jit")))
        assert (await checkpoints.saved(made.service, host.call(first))).number == 0, "these are no checkpoints"
        await host.exit(first, code=1)
        second = await host.launched()
        reply = await checkpoints.restore(made.service, host.call(second, query=compiled))
        assert [(each.job, each.rank, each.saved) for each in reply.found] == [(job, 0, a_list(1, b"jit"))]
        assert (await checkpoints.saved(made.service, host.call(second, query=compiled))).number == 1
        query = {**compiled, "job": job, "fence": "0", "rank": "0"}
        piece = await checkpoints.get_piece(made.service, host.call(second, query=query, sha256=name_of(b"jit")))
        assert piece.body == b"jit"
        theirs = other.call(others, query=query, sha256=name_of(b"jit"))
        assert (await refused(checkpoints.get_piece(made.service, theirs)))[0] == "forbidden"
        assert (await checkpoints.restore(made.service, other.call(others, query=compiled))).found == ()
        assert {path.split("/")[2] for path in made.objects.paths() if job in path} >= {"jax-cache"}

    run(story, tmp_path)
