"""What is damaged in a run is found and named, made again on request, and what nobody names is swept."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from penstock.domain import ledger
from penstock.domain.admission import BadInput
from penstock.extract.calls import Calls
from penstock.extract.layout import decode_commit
from penstock.extract.plan import RunPlan
from penstock.extract.seal import find_manifest, seal, sweep
from penstock.extract.verify import requeue, verify
from penstock.objects.memory import MemoryObjects
from tests.process.extraction import check
from tests.unit.extract.cheap import finish, finished, memory, run


def whole() -> tuple[MemoryObjects, Calls, RunPlan]:
    bucket = memory()
    calls, plan = finished(bucket)
    return bucket, calls, plan


def everything(bucket: MemoryObjects) -> dict[str, bytes]:
    return {path: stored.data for path in bucket.paths() if (stored := bucket.peek(path)) is not None}


def first(bucket: MemoryObjects, part: str) -> str:
    return next(path for path in bucket.paths() if part in path)


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
    "a vector": ("resid_post.1.safetensors", flip, "is not the write"),
    "a token": ("tokens.safetensors", flip, "is not the write"),
    "gone": ("mlp_out.0.safetensors", None, "is gone"),
    "the index of the run": ("/index/", flip, "the run's index"),
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


def test_commits_name_worker_and_code() -> None:
    bucket, _, plan = whole()
    stored = bucket.peek(ledger.commit_path(plan.run, plan.units[0].id))
    assert stored is not None
    facts = decode_commit(stored.data).facts
    assert (facts.worker, facts.code) == ("one", "test")
