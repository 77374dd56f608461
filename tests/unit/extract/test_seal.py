"""A unit that is requeued, made again and swept while another worker seals: nothing is damaged then."""

from __future__ import annotations

import pytest

from penstock.domain import ledger
from penstock.extract.seal import Reopened, find_manifest, index_prefix, seal
from penstock.extract.verify import requeue, verify
from penstock.objects.memory import MemoryObjects
from tests.process.extraction import cheap_plan, check
from tests.unit.extract.cheap import calls_to, finish, finished, memory, run

PLAN = cheap_plan(rows=11, unit_rows=6)
FIRST = PLAN.units[0].id
SURVEY, INDEX = ("list", f"runs/{PLAN.run}/data/"), ("get", f"/data/{FIRST}/")


class Meanwhile:
    """Before a call for the first time, a unit is requeued, and another worker makes it again, seals and sweeps."""

    def __init__(self, bucket: MemoryObjects, verb: str, path: str) -> None:
        self.over = False
        self._bucket = bucket
        self._call = (verb, path)

    async def before(self, verb: str, path: str) -> None:
        if self.over or verb != self._call[0] or self._call[1] not in path:
            return
        self.over = True
        calls = calls_to(self._bucket)
        await requeue(calls, PLAN, FIRST, force=True)
        await finish(calls, PLAN, "other")

    async def after(self, verb: str, path: str) -> None:
        pass


@pytest.mark.parametrize(("verb", "path"), [SURVEY, INDEX], ids=["survey", "index"])
def test_a_unit_that_was_made_again_meanwhile_is_not_told_as_damaged(verb: str, path: str) -> None:
    bucket = memory()
    meanwhile = Meanwhile(bucket, verb, path)
    run(lambda: finish(calls_to(bucket.by("one", meanwhile)), PLAN))
    assert meanwhile.over
    assert ledger.commit_path(PLAN.run, FIRST, 1) in bucket.paths()
    check({each: stored.data for each in bucket.paths() if (stored := bucket.peek(each)) is not None}, PLAN)
    assert run(lambda: verify(calls_to(bucket), PLAN)).problems == ()


def test_a_commit_that_cannot_be_read_and_is_void_meanwhile_is_no_fault() -> None:
    bucket = memory()
    meanwhile = Meanwhile(bucket, "get", ledger.commit_path(PLAN.run, FIRST))

    async def story() -> None:
        await finish(calls_to(bucket), PLAN)
        await bucket.put(ledger.commit_path(PLAN.run, FIRST), b"")
        for path in await bucket.list(ledger.manifest_prefix(PLAN.run)):
            await bucket.delete(path)
        with pytest.raises(Reopened, match=f"requeued while it was sealed: {FIRST}"):
            await seal(calls_to(bucket.by("one", meanwhile)), PLAN)
        assert await find_manifest(calls_to(bucket), PLAN.run) is not None

    run(story)


def test_data_that_are_gone_without_a_requeue_are_told() -> None:
    bucket = memory()
    calls, plan = finished(bucket, 11, 6)
    last = plan.units[-1].id

    async def story() -> None:
        await requeue(calls, plan, FIRST, force=True)  # long before: it explains nothing
        await finish(calls, plan, "two")
        for path in bucket.paths():
            if f"/data/{last}/" in path or path.startswith((ledger.manifest_prefix(plan.run), index_prefix(plan.run))):
                await bucket.delete(path)
        with pytest.raises(ledger.Incomplete, match=rf"`tpu extract requeue {last}`") as caught:
            await seal(calls, plan)
        assert not isinstance(caught.value, Reopened)

    run(story)
