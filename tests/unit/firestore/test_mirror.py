"""What is written to documents: in order, until it lands, never backwards, never over a wish or an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from penstock.firestore import mirror as mirror_module
from penstock.firestore.database import Database, TooLarge, Trouble
from penstock.firestore.documents import key_of
from penstock.firestore.mirror import Entry, Mirror, key_now
from tests.unit.firestore.crew import Crew, hurry, played
from tests.unit.firestore.fake_database import FakeDatabase


class Stage(Crew):
    """A mirror over a fake database, with one document whose job is j1."""

    def __init__(self) -> None:
        self.database = FakeDatabase()
        self.cancelled: list[str] = []
        super().__init__()
        self.mirror = Mirror(cast(Database, self.database), self.cancel, self.spawn)
        document = self.database.put("d", status="scheduled", code="x")
        self.database.put("d", job_key=key_of(document))
        document = self.database.documents[document.name]
        self.entry: Entry = self.mirror.enter(document, key_of(document), status="scheduled", stamp=document.stamp)
        self.mirror.bind(self.entry, "j1")

    async def cancel(self, job: str) -> None:
        self.cancelled.append(job)


def on_stage(play: Callable[[Stage], Awaitable[None]]) -> None:
    played(Stage, play)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def test_wishes_that_come_while_one_is_written_become_one_write() -> None:
    async def play(stage: Stage) -> None:
        stage.mirror.push(stage.entry, {"job_id": "j1"})
        await asyncio.sleep(0)
        stage.mirror.push(stage.entry, {"status": "running", "attempt": 1})
        stage.mirror.push(stage.entry, {"status": "completed", "result": "7"})
        await stage.rest()
        assert stage.database.statuses("d") == ["completed"]
        assert stage.database.fields("d")["attempt"] == 1
        assert stage.entry.over
        assert not stage.mirror.entries
        assert not stage.mirror.by_job

    on_stage(play)


def test_what_is_in_no_hurry_is_joined_with_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "LATER_S", 0.01)

    async def joined(stage: Stage) -> None:
        stage.mirror.push(stage.entry, {"job_id": "j1"}, hurry=False)
        stage.mirror.push(stage.entry, {"status": "running"})
        await stage.rest()
        assert [set(content) for _, content in stage.database.writes] == [{"job_id", "status", "updated_at"}]

    async def alone(stage: Stage) -> None:
        stage.mirror.push(stage.entry, {"job_id": "j1", "log_url": "u"}, hurry=False)
        await stage.rest()
        assert stage.database.fields("d")["job_id"] == "j1"

    on_stage(joined)
    on_stage(alone)


def test_no_status_goes_back_and_an_end_is_final() -> None:
    async def play(stage: Stage) -> None:
        stage.mirror.push(stage.entry, {"status": "running"})
        await stage.rest()
        stage.mirror.push(stage.entry, {"status": "scheduled", "log_url": "u"})
        await stage.rest()
        assert stage.database.fields("d")["status"] == "running"
        assert stage.database.fields("d")["log_url"] == "u"
        stage.mirror.push(stage.entry, {"status": "failed"})
        stage.mirror.push(stage.entry, {"status": "running"})
        await stage.rest()
        stage.mirror.push(stage.entry, {"status": "completed"})
        await stage.rest()
        assert stage.database.statuses("d") == ["running", "failed"]

    on_stage(play)


def test_a_write_that_fails_is_tried_until_it_lands() -> None:
    async def play(stage: Stage) -> None:
        stage.database.faults = [Trouble("down") for _ in range(20)]
        stage.mirror.push(stage.entry, {"status": "running"})
        await stage.rest()
        assert stage.database.statuses("d") == ["running"]

    on_stage(play)


def test_a_write_whose_answer_was_lost_is_not_a_conflict() -> None:
    async def play(stage: Stage) -> None:
        stage.database.lost_answers = 1
        stage.mirror.push(stage.entry, {"status": "completed", "result": "1"})
        await stage.rest()
        assert stage.database.statuses("d") == ["completed"]
        assert stage.entry.over

    on_stage(play)


def test_a_cancel_request_is_kept_and_obeyed_though_a_status_was_on_its_way() -> None:
    async def play(stage: Stage) -> None:
        stage.database.put("d", status="cancel_requested")
        stage.mirror.push(stage.entry, {"status": "running", "attempt": 1})
        await stage.rest()
        assert stage.database.fields("d")["status"] == "cancel_requested"
        assert stage.database.fields("d")["attempt"] == 1
        assert stage.cancelled == ["j1"]
        stage.mirror.push(stage.entry, {"status": "failed"})
        await stage.rest()
        assert stage.database.fields("d")["status"] == "failed"
        assert stage.cancelled == ["j1"]

    on_stage(play)


def test_a_document_that_is_gone_or_made_anew_cancels_the_job() -> None:
    async def gone(stage: Stage) -> None:
        stage.database.delete("d")
        stage.mirror.push(stage.entry, {"status": "running"})
        await stage.rest()
        assert stage.cancelled == ["j1"]
        assert not stage.database.writes

    async def anew(stage: Stage) -> None:
        stage.database.delete("d")
        stage.database.put("d", status="pending", code="y")
        stage.mirror.push(stage.entry, {"status": "running"})
        await stage.rest()
        assert stage.cancelled == ["j1"]
        assert stage.database.fields("d")["status"] == "pending"

    on_stage(gone)
    on_stage(anew)


def test_what_another_bridge_ended_stays() -> None:
    async def play(stage: Stage) -> None:
        stage.database.put("d", status="completed", result="theirs")
        stage.mirror.push(stage.entry, {"status": "failed"})
        await stage.rest()
        assert stage.database.fields("d")["result"] == "theirs"
        assert not stage.database.writes
        assert not stage.cancelled

    on_stage(play)


def test_a_document_that_is_too_full_gets_a_reference_then_only_its_status() -> None:
    async def play(stage: Stage) -> None:
        stage.entry.result_url = "http://x/result"
        stage.database.faults = [TooLarge("over")]
        stage.mirror.push(stage.entry, {"status": "completed", "result": "y" * 9_000})
        await stage.rest()
        written = stage.database.fields("d")
        assert (written["result_truncated"], written["result_bytes"]) == (True, 9_000)
        assert written["result_url"] == "http://x/result"

    async def fuller(stage: Stage) -> None:
        stage.database.faults = [TooLarge("over"), TooLarge("over")]
        stage.mirror.push(stage.entry, {"status": "completed", "result": "y"})
        await stage.rest()
        assert stage.database.writes[-1][1] == {"status": "completed"}

    on_stage(play)
    on_stage(fuller)


def test_too_many_unfinished_documents_make_the_next_ones_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "ENTRIES_MAX", 1)

    async def play(stage: Stage) -> None:
        other = stage.database.put("e", status="scheduled")
        second = stage.mirror.enter(other, "k", status="scheduled", stamp=other.stamp)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stage.mirror.room(), 0.01)
        stage.mirror.forget(second)
        stage.mirror.forget(stage.entry)
        await asyncio.wait_for(stage.mirror.room(), 1)

    on_stage(play)


def test_a_noted_key_counts_only_in_its_own_document() -> None:
    database = FakeDatabase()
    mine = database.put("a", status="scheduled")
    theirs = database.put("b", status="scheduled")
    forged = database.put("a", job_key=key_of(theirs))
    assert key_now(forged) == key_of(mine)
    imported = database.put("a", job_key=key_of(mine).rpartition("@")[0] + "@1.000000000")
    assert key_now(imported).endswith("@1.000000000")
