"""From a document to its one job: who wins, what is left behind, and what the next bridge makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from penstock.firestore.claim import Claims
from penstock.firestore.database import Database, LostRace, TooLarge, Trouble
from penstock.firestore.desk import Desk, Refused
from penstock.firestore.documents import Wanted, key_of
from penstock.firestore.fields import Document
from penstock.firestore.mirror import Mirror
from penstock.wire.api import JobView, Outcome
from tests.unit.firestore.crew import Crew, hurry, played
from tests.unit.firestore.fake_database import FakeDatabase, name_of


def job_id(number: int) -> str:
    return f"j{number:016}"


class FakeDesk:
    """Penstock as a dictionary of keys."""

    def __init__(self) -> None:
        self.jobs: dict[str, str] = {}
        self.views: dict[str, JobView] = {}
        self.submitted = 0
        self.cancelled: list[str] = []
        self.refusal: Refused | None = None

    async def submit(self, wanted: Wanted, *, key: str, name: str, note: str) -> tuple[str, bool]:
        await asyncio.sleep(0)
        self.submitted += 1
        if self.refusal is not None:
            raise self.refusal
        new = key not in self.jobs
        id = self.jobs.setdefault(key, job_id(len(self.jobs)))
        if new:
            self.say(id, "queued", note)
        return id, new

    def say(self, id: str, state: str, note: str) -> None:
        self.views[id] = JobView(
            id=id, name="", team="t", queue="q", user="u", state=state, kind="snippet", on=(), slices=1,
            created_at=1.0, version=1, note=note, started_at=2.0 if state != "queued" else None,
        )  # fmt: skip

    async def view(self, job: str) -> JobView | None:
        return self.views.get(job)

    async def outcome(self, job: str) -> Outcome | None:
        view = self.views[job]
        return Outcome(id=job, state=view.state, cause=None, exit_code=0, result=7, attempts=1, started_at=2.0)

    async def cancel(self, job: str) -> None:
        self.cancelled.append(job)
        self.say(job, "cancelled", self.views[job].note)

    async def last_lines(self, job: str) -> list[str]:
        return []

    def log_url(self, job: str) -> str:
        return f"http://x/{job}/logs"

    def result_url(self, job: str) -> str:
        return f"http://x/{job}/result"


class Stage(Crew):
    def __init__(self, database: FakeDatabase | None = None, desk: FakeDesk | None = None, me: str = "me") -> None:
        self.database = database or FakeDatabase()
        self.desk = desk or FakeDesk()
        super().__init__()
        self.mirror = Mirror(cast(Database, self.database), self.desk.cancel, self.spawn)
        self.claims = Claims(cast(Database, self.database), cast(Desk, self.desk), self.mirror, me)

    async def pending(self, document: Document) -> dict[str, object]:
        await self.claims.pending(document)
        await self.rest()
        return self.database.fields(document.id)


def on_stage(play: Callable[[Stage], Awaitable[None]]) -> None:
    played(Stage, play)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def test_a_document_is_taken_submitted_and_told_its_job() -> None:
    async def play(stage: Stage) -> None:
        document = stage.database.put("d", status="pending", code="x", job_id="forged", error="forged")
        found = await stage.pending(document)
        assert (found["status"], found["job_id"], found["bridge"]) == ("scheduled", job_id(0), "me")
        assert found["job_key"] == key_of(document)
        assert found["log_url"] == f"http://x/{job_id(0)}/logs"
        assert "error" not in found
        assert stage.desk.jobs == {key_of(document): job_id(0)}

    on_stage(play)


def test_of_two_bridges_one_takes_it_and_one_job_is_made() -> None:
    async def play(first: Stage) -> None:
        second = Stage(first.database, first.desk, "other")
        document = first.database.put("d", status="pending", code="x")
        await asyncio.gather(first.claims.pending(document), second.claims.pending(document))
        await first.rest()
        await second.rest()
        assert first.desk.submitted == 1
        assert first.database.statuses("d") == ["scheduled"]

    on_stage(play)


def test_a_claim_whose_answer_was_lost_is_ours_and_somebody_elses_is_not() -> None:
    async def ours(stage: Stage) -> None:
        document = stage.database.put("d", status="pending", code="x")
        stage.database.lost_answers = 1
        assert (await stage.pending(document))["job_id"] == job_id(0)

    async def theirs(stage: Stage) -> None:
        document = stage.database.put("d", status="pending", code="x")
        stage.database.faults = [Trouble("down")]
        stage.database.put("d", status="scheduled", job_key=key_of(document), bridge="other")
        await stage.pending(document)
        assert stage.desk.submitted == 0

    on_stage(ours)
    on_stage(theirs)


def test_an_invalid_document_fails_once_and_never_reaches_penstock() -> None:
    async def play(stage: Stage) -> None:
        found = await stage.pending(stage.database.put("d", status="pending", code=3, mine="kept"))
        assert found["status"] == "failed"
        assert cast(dict[str, object], found["error"])["field"] == "code"
        assert found["mine"] == "kept"
        assert stage.desk.submitted == 0
        assert not stage.mirror.entries

    on_stage(play)


def test_what_the_server_refuses_fails_with_its_words() -> None:
    async def play(stage: Stage) -> None:
        stage.desk.refusal = Refused("on", "on: no such thing")
        found = await stage.pending(stage.database.put("d", status="pending", code="x"))
        assert found["status"] == "failed"
        assert cast(dict[str, object], found["error"])["message"] == "on: no such thing"

    on_stage(play)


def test_a_document_without_room_still_ends() -> None:
    async def play(stage: Stage) -> None:
        document = stage.database.put("d", status="pending", code="x")
        stage.database.faults = [TooLarge("full"), TooLarge("full")]
        await stage.pending(document)
        assert stage.database.writes == [(name_of("d"), {"status": "failed"})]

    on_stage(play)


def test_a_cancel_before_the_claim_needs_no_job() -> None:
    async def play(stage: Stage) -> None:
        document = stage.database.put("d", status="cancel_requested", code="x")
        await stage.claims.cancel(document)
        assert stage.database.fields("d")["status"] == "failed"
        assert not stage.desk.jobs

    async def meanwhile(stage: Stage) -> None:
        document = stage.database.put("d", status="cancel_requested", code="x")
        stage.database.faults = [LostRace("d")]
        await stage.claims.cancel(document)
        assert stage.database.fields("d")["status"] == "cancel_requested"  # the watch shows its next version

    on_stage(play)
    on_stage(meanwhile)


def test_a_cancel_of_what_a_dead_bridge_had_finds_the_job_by_its_key() -> None:
    async def play(stage: Stage) -> None:
        document = stage.database.put("d", status="cancel_requested", code="x")
        key = key_of(document)
        document = stage.database.put("d", job_key=key)
        await stage.desk.submit(Wanted(code="x"), key=key, name="", note=document.name)
        await stage.claims.cancel(document)
        await stage.rest()
        assert stage.desk.cancelled == [job_id(0)]
        assert stage.database.fields("d")["status"] == "failed"

    on_stage(play)


@pytest.mark.parametrize("state", ["queued", "running", "succeeded"])
@pytest.mark.parametrize("noted", [False, True])
def test_a_document_of_a_dead_bridge_is_brought_up_to_date(state: str, noted: bool) -> None:
    async def play(stage: Stage) -> None:
        document = stage.database.put("d", status="scheduled", code="x")
        key = key_of(document)
        await stage.desk.submit(Wanted(code="x"), key=key, name="", note=document.name)
        stage.desk.say(job_id(0), state, document.name)
        document = stage.database.put("d", job_key=key, **({"job_id": job_id(0)} if noted else {}))
        await stage.claims.adopt(document)
        await stage.rest()
        found = stage.database.fields("d")
        expected = {"queued": "scheduled", "running": "running", "succeeded": "completed"}
        assert (found["status"], found["job_id"]) == (expected[state], job_id(0))
        assert stage.desk.jobs == {key: job_id(0)}

    on_stage(play)


@pytest.mark.parametrize("forged", ["../../secrets", "j", job_id(5)])
def test_a_forged_job_id_shows_nobody_elses_job(forged: str) -> None:
    async def play(stage: Stage) -> None:
        stage.desk.say(job_id(5), "succeeded", name_of("theirs"))
        document = stage.database.put("d", status="running", code="x", job_id=forged)
        await stage.claims.adopt(document)
        await stage.rest()
        assert stage.database.fields("d")["job_id"] == job_id(0)
        assert "result" not in stage.database.fields("d")

    on_stage(play)


def test_a_job_that_was_cleaned_away_fails_the_document_instead_of_running_again() -> None:
    async def play(stage: Stage) -> None:
        document = stage.database.put("d", status="running", code="x", job_id=job_id(9))
        await stage.claims.adopt(document)
        await stage.rest()
        assert stage.database.fields("d")["status"] == "failed"
        assert cast(dict[str, object], stage.database.fields("d")["error"])["type"] == "Lost"
        assert stage.desk.submitted == 0

    on_stage(play)
