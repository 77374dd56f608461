"""What is damaged in a run is found and named, made again on request, and what nobody names is swept."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from fnmatch import fnmatch

import msgspec
import pytest
from typing_extensions import override

from penstock.domain import ledger
from penstock.domain.admission import BadInput
from penstock.extract.calls import Calls
from penstock.extract.claims import Claim
from penstock.extract.commit import publish
from penstock.extract.layout import Content, UnitFacts, decode_commit
from penstock.extract.plan import RunPlan
from penstock.extract.seal import Reopened, find_manifest, seal, sweep
from penstock.extract.verify import requeue, verify
from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import Stored
from tests.process.extraction import cheap_plan, check
from tests.unit.extract.cheap import calls_to, finish, finished, memory, run

FACTS = UnitFacts(
    documents=0,
    empty=0,
    tokens=0,
    truncated=0,
    rows_sha256="",
    sizes=(),
    sites={},
    seconds=0.0,
    worker="zombie",
    code="test",
)


def whole() -> tuple[MemoryObjects, Calls, RunPlan]:
    bucket = memory()
    calls, plan = finished(bucket)
    return bucket, calls, plan


def everything(bucket: MemoryObjects) -> dict[str, bytes]:
    return {path: stored.data for path in bucket.paths() if (stored := bucket.peek(path)) is not None}


def first(bucket: MemoryObjects, part: str) -> str:
    return next(path for path in bucket.paths() if fnmatch(path, f"*{part}*"))


def test_a_finished_run_is_sound() -> None:
    bucket, calls, plan = whole()
    checked = run(lambda: verify(calls, plan))
    assert (checked.problems, checked.sealed, checked.committed, checked.garbage) == ((), True, len(plan.units), 0)
    manifest = run(lambda: find_manifest(calls, plan.run))
    assert manifest is not None
    assert manifest.facts.rows_sha256 == checked.rows_sha256
    check(everything(bucket), plan)


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes] | None, str]] = {
    "a vector": ("resid_post.1.safetensors", flip, "has other bytes than were committed"),
    "a token": ("tokens.safetensors", flip, "has other bytes than were committed"),
    "gone": ("mlp_out.0.safetensors", None, "is gone"),
    "the list of refused rows": ("/index/*.refused.jsonl", flip, "the list of refused rows"),
    "the index of the run": ("/index/*.arrow", flip, "the run's index"),
    "another commit": ("/commits/", lambda data: data.replace(b'"start":0', b'"start":1'), "no such unit"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(what: str) -> None:
    bucket, calls, plan = whole()
    part, change, said = DAMAGE[what]
    path = first(bucket, part)
    stored = bucket.peek(path)
    assert stored is not None

    async def damage() -> None:
        if change is None:
            await bucket.delete(path)
        else:
            await bucket.put(path, change(stored.data))

    run(damage)
    assert any(said in problem for problem in run(lambda: verify(calls, plan)).problems)


def test_bytes_that_rot_in_their_place_are_found() -> None:
    bucket, calls, plan = whole()
    path = first(bucket, "resid_post.1.safetensors")
    stored = bucket.peek(path)
    assert stored is not None
    bucket._bucket.objects[path] = msgspec.structs.replace(stored, data=flip(stored.data))
    checked = run(lambda: verify(calls, plan))
    assert checked.problems == (f"{checked.damaged[0]}: {path} has other bytes than were committed",)
    # And it is mended: the unit is made again, the manifest with it.
    with pytest.raises(BadInput, match="is committed and sound"):
        run(lambda: requeue(calls, plan, next(unit.id for unit in plan.units if unit.id not in checked.damaged)))
    assert "makes it again" in run(lambda: requeue(calls, plan, checked.damaged[0]))
    assert not run(lambda: verify(calls, plan)).sealed
    run(lambda: finish(calls, plan, "mender"))
    assert run(lambda: verify(calls, plan)).problems == ()
    check(everything(bucket), plan)


def test_a_run_with_checksums_of_whole_objects_verifies() -> None:
    """As runs have them that were made before objects were hashed by blocks."""
    bucket, calls, plan = whole()

    async def story() -> None:
        for path in [each for each in bucket.paths() if "/manifest/" in each]:
            await bucket.delete(path)
        for path in [each for each in bucket.paths() if "/commits/" in each]:
            stored = bucket.peek(path)
            assert stored is not None
            commit = decode_commit(stored.data)
            objects = tuple(
                msgspec.structs.replace(data, checksum=ledger.checksum(everything(bucket)[data.path]))
                for data in commit.objects
            )
            await bucket.put(path, ledger.encode(msgspec.structs.replace(commit, objects=objects)))
        await seal(calls, plan)

    run(story)
    checked = run(lambda: verify(calls, plan))
    assert (checked.problems, checked.sealed) == ((), True)
    check(everything(bucket), plan)


def test_a_lease_that_holds_a_unit_up_is_removed() -> None:
    bucket, calls, plan = whole()
    unit = plan.units[0].id

    async def story() -> str:
        await requeue(calls, plan, unit, force=True)
        await bucket.put(ledger.lease_path(plan.run, unit, 0), b"{}")
        return await requeue(calls, plan, unit)

    assert "1 leases are removed" in run(story)
    with pytest.raises(BadInput, match="is not in the plan; units are u000000 to"):
        run(lambda: requeue(calls, plan, "u999"))


def test_a_run_whose_data_vanished_is_not_sealed() -> None:
    bucket, calls, plan = whole()

    async def story() -> None:
        await bucket.delete(first(bucket, "/manifest/"))
        await bucket.delete(first(bucket, "mlp_out.0.safetensors"))
        await seal(calls, plan)

    with pytest.raises(ledger.Incomplete, match=r"has no bytes instead of .* requeue u000000"):
        run(story)


def test_sweeping_spares_attempts_that_may_still_win() -> None:
    bucket, calls, plan = whole()
    open_unit, done_unit = plan.units[0].id, plan.units[1].id

    async def story() -> int:
        await requeue(calls, plan, open_unit, force=True)
        for unit in (open_unit, done_unit):
            await bucket.put(ledger.data_path(plan.run, unit, "slow-1", "tokens.safetensors"), b"half")
        return await sweep(calls, plan)

    assert run(story) == 1
    left = [path for path in bucket.paths() if "/slow-1/" in path]
    assert left == [ledger.data_path(plan.run, open_unit, "slow-1", "tokens.safetensors")]


class Meanwhile(Calls):
    """Calls of which one has others do something first."""

    def __init__(self, bucket: MemoryObjects, aimed: Callable[[str, str], bool], do: Callable[[], Awaitable[None]]):
        super().__init__(bucket, random.Random(1), patience_s=30)
        self._aimed = aimed
        self._do: Callable[[], Awaitable[None]] | None = do

    @override
    async def list(self, prefix: str) -> tuple[str, ...]:
        await self._now("list", prefix)
        return await super().list(prefix)

    @override
    async def read(self, path: str) -> Stored | None:
        await self._now("read", path)
        return await super().read(path)

    @override
    async def create(self, path: str, data: bytes) -> None:
        await self._now("create", path)
        await super().create(path, data)

    async def _now(self, verb: str, path: str) -> None:
        if self._do is not None and self._aimed(verb, path):
            do, self._do = self._do, None
            await do()


@pytest.mark.parametrize(("verb", "kind"), [("list", "data"), ("list", "commits"), ("read", "commits")])
def test_a_unit_that_is_made_again_during_a_sweep_keeps_its_data(verb: str, kind: str) -> None:
    bucket, calls, plan = whole()

    async def others() -> None:
        await requeue(calls, plan, plan.units[0].id, force=True)
        await finish(calls, plan, "two")

    slow = Meanwhile(bucket, lambda done, path: (done, path.split("/")[2]) == (verb, kind), others)
    run(lambda: sweep(slow, plan))
    assert run(lambda: verify(calls, plan)).problems == ()
    check(everything(bucket), plan)


def test_a_zombie_whose_data_were_swept_cannot_commit_after_a_requeue() -> None:
    """It lost while another's commit stood; that the commit is void now must not let it win with data that are gone."""
    bucket, calls, plan = whole()
    unit = plan.units[0]
    zombie = ledger.data_path(plan.run, unit.id, "zombie-1", "tokens.safetensors")

    async def story() -> None:
        await bucket.put(zombie, b"half")
        assert await sweep(calls, plan) == 1
        await requeue(calls, plan, unit.id, force=True)
        won = await publish(calls, plan, Claim(unit, "zombie-1", 0), Content({}, FACTS))
        assert not won
        await finish(calls, plan, "two")

    run(story)
    check(everything(bucket), plan)


def test_a_manifest_that_comes_after_a_requeue_counts_for_nothing() -> None:
    bucket, calls, plan = whole()

    async def story() -> None:
        await bucket.delete(first(bucket, "/manifest/"))
        slow = Meanwhile(
            bucket,
            lambda verb, path: verb == "create" and "/manifest/" in path,
            lambda: _void(calls, plan),
        )
        with pytest.raises(Reopened, match="was requeued while the manifest was written"):
            await seal(slow, plan)
        assert not [path for path in bucket.paths() if "/manifest/" in path]
        # And if whoever wrote it was killed before it could look again:
        stale = await _stale_manifest(bucket, plan)
        assert await find_manifest(calls, plan.run) is None
        await finish(calls, plan, "two")
        assert bucket.peek(stale) is None

    run(story)
    assert run(lambda: verify(calls, plan)).problems == ()
    check(everything(bucket), plan)


def test_a_worker_whose_run_is_reopened_while_it_seals_goes_on() -> None:
    bucket, plan = memory(), cheap_plan(30, 7)
    slow = Meanwhile(
        bucket,
        lambda verb, path: verb == "create" and "/manifest/" in path,
        lambda: _void(calls_to(bucket), plan),
    )
    run(lambda: finish(slow, plan))
    checked = run(lambda: verify(slow, plan))
    assert (checked.problems, checked.sealed) == ((), True)
    check(everything(bucket), plan)


async def _void(calls: Calls, plan: RunPlan) -> None:
    await requeue(calls, plan, plan.units[0].id, force=True)


async def _stale_manifest(bucket: MemoryObjects, plan: RunPlan) -> str:
    """Made of the commits before any was void."""
    other = memory()
    for path, data in everything(bucket).items():
        if "/void/" not in path:
            await other.put(path, data)
    stale = await seal(calls_to(other), plan)
    path = ledger.manifest_path(plan.run, stale)
    await bucket.put(path, ledger.encode(stale))
    return path


def test_a_manifest_of_the_next_edition_survives_a_requeue_that_was_slow() -> None:
    """Only what names a commit that is void is removed, not whatever lies there by then."""
    bucket, calls, plan = whole()
    slow = Meanwhile(
        bucket, lambda verb, path: verb == "list" and "/manifest/" in path, lambda: finish(calls, plan, "two")
    )
    run(lambda: requeue(slow, plan, plan.units[0].id, force=True))
    checked = run(lambda: verify(calls, plan))
    assert (checked.problems, checked.sealed) == ((), True)


def test_commits_name_worker_and_code() -> None:
    bucket, _, plan = whole()
    stored = bucket.peek(ledger.commit_path(plan.run, plan.units[0].id))
    assert stored is not None
    facts = decode_commit(stored.data).facts
    assert (facts.worker, facts.code) == ("one", "test")
