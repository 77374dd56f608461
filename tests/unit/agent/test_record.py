"""The record: what was written is read again, whole; fences are remembered; a torn file is put aside."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.agent import record
from penstock.agent.record import CHAINS_KEPT, Journal, Kept, Line, Record
from penstock.agent.tree import Handle
from penstock.domain.custody import Launch, Phase
from penstock.domain.nouns import Exit

LAUNCH = Launch(attempt="a1", job="j1", replica=0, fence=4, stage=0, rank=0, world_size=1, timeout_s=10.0)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert record.load(path) is None
    handle = Handle(folder="/x", shim=5, shim_started=6, main=7, group={"pids": "/g"}, attempt="a1")
    kept = Kept(launch=LAUNCH, phase=Phase.EXITED, exit=Exit(host=0, code=3), handle=handle, durable={"out": 9})
    written = Record(incarnation="i1", boot="b", fences=[("j1", 0, 4)], held={"a1": kept})
    for sync in (False, True):
        record.save(path, msgspec.json.encode(written), sync=sync)
        assert record.load(path) == written
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_read_is_kept_for_people(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for torn in (b'{"incarnation": "i1", ', b"\xff", b'{"boot": 1}'):
        path.write_bytes(torn)
        assert record.load(path) is None
        assert (tmp_path / "record.unreadable").read_bytes() == torn


def test_the_highest_fence_of_each_chain_is_kept_and_old_chains_go() -> None:
    kept = Record(incarnation="i")
    kept.raise_fence("j1", 0, 4)
    kept.raise_fence("j1", 1, 2)
    kept.raise_fence("j1", 0, 5)
    assert (kept.fence("j1", 0), kept.fence("j1", 1), kept.fence("j2", 0)) == (5, 2, 0)
    for number in range(CHAINS_KEPT):
        kept.raise_fence(f"k{number}", 0, 1)
    assert kept.fence("j1", 0) == 0
    assert len(kept.fences) == CHAINS_KEPT


def test_the_journal_survives_a_torn_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    assert replayed(tmp_path) == Record(incarnation="i")
    journal.note(Line(kept=Kept(launch=LAUNCH)))
    journal.note(Line(kept=Kept(launch=msgspec.structs.replace(LAUNCH, attempt="a2", fence=5))))
    assert journal.flush() == (tmp_path / "journal").stat().st_size
    with (tmp_path / "journal").open("ab") as file:
        file.write(b'{"kept": {"launch": {"attempt": "a3", "jo')
    assert list(replayed(tmp_path).held) == ["a1", "a2"]
    journal.clear()
    assert replayed(tmp_path).held == {}
    journal.note(Line(kept=Kept(launch=LAUNCH)))
    Journal(tmp_path / "journal").clear()
    assert replayed(tmp_path).held == {}


def test_the_journal_brings_a_record_up_to_date(tmp_path: Path) -> None:
    journal, other = Journal(tmp_path / "journal"), msgspec.structs.replace(LAUNCH, attempt="a2", fence=5)
    journal.note(Line(kept=Kept(launch=LAUNCH)))
    journal.note(Line(kept=Kept(launch=LAUNCH, phase=Phase.EXITED)))
    before = replayed(tmp_path)
    assert before.held["a1"].phase is Phase.EXITED
    assert before.fence("j1", 0) == 4
    journal.note(Line(cleared="a1"))
    journal.note(Line(kept=Kept(launch=other)))
    after = replayed(tmp_path, before)
    assert list(after.held) == ["a2"]
    assert after.fence("j1", 0) == 5
    assert list(replayed(tmp_path, after).held) == ["a2"]  # lines that a record knows already change nothing


def replayed(folder: Path, record: Record | None = None) -> Record:
    record = record or Record(incarnation="i")
    Journal(folder / "journal").replay(record)
    return record
