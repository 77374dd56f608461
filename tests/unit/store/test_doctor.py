"""Each of the doctor's checks, on a store that is well and on one where that one thing is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.cli.main import run
from penstock.domain.lifecycle import AttemptState, SliceState
from penstock.ports.store import Transaction
from penstock.store.doctor import sums
from tests.contract.store.examples import (
    a_job,
    a_slice,
    a_team,
    an_attempt,
    close,
    fail,
    place,
    submit,
    walk_slice,
)
from tests.contract.store.harness import Harness


def busy(tx: Transaction) -> None:
    """A bit of everything, with counters that agree."""
    tx.add(a_team(), "team.created")
    jobs = submit(tx, *(a_job(n) for n in range(1, 5)))
    place(tx, jobs[0], an_attempt(1))
    second, attempt = place(tx, jobs[1], an_attempt(2, job="j0002"))
    close(tx, attempt)
    purged = fail(tx, second)
    tx.purge(purged)
    one = tx.add(a_slice(1), "slice.intended")
    walk_slice(tx, one, SliceState.CREATING, SliceState.READY)
    tx.elect("me")
    for scope, name in (("team", "red"), ("pool", "pool"), ("provider", "fake"), ("queue", "main"), ("cohort", "red")):
        tx.reserve(scope, name, 8)


@pytest.fixture
def on(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness("sqlite-inline", str(tmp_path / "store.db"))
    harness.transact(busy)
    yield harness
    harness.close()


def test_a_store_that_is_well_has_no_troubles_and_every_check_had_something_to_look_at(on: Harness) -> None:
    findings = on.doctor()
    assert [finding.check for finding in findings if not finding.ok] == []
    assert [finding.check for finding in findings if not finding.looked_at] == []


ILLS = [
    ("columns", "drop trigger jobs_step; update jobs set queue = 'other' where id = 'j0003'"),
    ("columns", "drop trigger jobs_step; update jobs set waiting = 0 where id = 'j0003'"),
    ("columns", "drop trigger attempts_step; update attempts set fence = 7"),
    ("columns", "drop trigger slices_step; update slices set race = 'r'"),
    ("log", "delete from events where seq = 3"),
    ("history", "delete from events where seq = (select max(seq) from events where entity = 'slice')"),
    ("history", "drop trigger teams_step; update teams set version = 5"),
    ("history", "drop trigger jobs_step; update jobs set state = 'provisioning', waiting = 0 where id = 'j0003'"),
    ("history", "drop trigger jobs_keep; delete from jobs where id = 'j0003'"),
    ("history", "drop trigger attempts_keep; delete from attempts"),
    ("history", "drop trigger events_stay; update events set kind = 'job.started' where id = 'j0003'"),
    ("history", "drop trigger events_stay; update events set version = 9 where id = 'red'"),
    ("history", "insert into queues values ('ghost', 1, '{}')"),
    (
        "one live attempt",
        """drop index attempts_one_live;
        insert into attempts select 'a9', job, replica, 9, 'assigned', 1, body, null from attempts""",
    ),
    ("counters", "update quotas set used_chips = used_chips + 1 where scope = 'team'"),
    ("counters", "delete from quotas where scope = 'queue'"),
    ("counters", "insert into quotas values ('pool', 'ghost', null, 4, 0)"),
]


@pytest.mark.parametrize(("check", "sql"), ILLS)
def test_what_is_wrong_is_found_by_its_check(on: Harness, check: str, sql: str) -> None:
    on.raw(sql)
    assert check in [finding.check for finding in on.doctor() if not finding.ok]


def test_a_body_that_cannot_be_read_is_a_trouble_not_a_crash(on: Harness) -> None:
    on.raw("drop trigger slices_step; update slices set body = '{broken'")
    bad = {finding.check for finding in on.doctor() if not finding.ok}
    assert {"columns", "counters"} <= bad


def test_only_a_few_troubles_are_shown_and_the_rest_counted(on: Harness) -> None:
    on.transact(submit, *(a_job(n) for n in range(10, 30)))
    on.raw("drop trigger jobs_step; update jobs set team = 'other'")
    (columns,) = [finding for finding in on.doctor() if finding.check == "columns"]
    assert len(columns.troubles) == 5
    assert columns.more_troubles == 18


def test_a_forgotten_beginning_is_no_trouble_but_a_wrong_end_is(on: Harness) -> None:
    on.transact(lambda tx: tx.forget_events(10))
    assert on.troubles() == []
    on.raw("drop trigger slices_step; update slices set state = 'gone'")
    assert any("slice s0001" in trouble for trouble in on.troubles())


def test_the_sums_count_races_once_and_providers_until_the_end() -> None:
    slices = [
        a_slice(1, chips=8, race="r", state=SliceState.CREATING),
        a_slice(2, chips=16, race="r", state=SliceState.INTENDED),
        a_slice(3, chips=4, state=SliceState.READY),
        a_slice(4, chips=2, state=SliceState.PREEMPTED),
        a_slice(5, chips=1, state=SliceState.DELETING),
        a_slice(6, chips=100, state=SliceState.GONE),
    ]
    attempts = [an_attempt(1, chips=20), replace(an_attempt(2, chips=40), state=AttemptState.CLOSED)]
    assert sums(slices, attempts) == {
        ("team", "red"): 20,
        ("pool", "pool"): 20,
        ("provider", "fake"): 8 + 16 + 4 + 2 + 1,
        ("queue", "main"): 20,
        ("cohort", "red"): 20,
    }


def test_the_command_prints_one_line_per_check(on: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--store", on.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert all(line.startswith("ok ") for line in lines)
    on.raw("update quotas set used_chips = 99 where scope = 'team'")
    assert run(["doctor", "--store", on.address]) == 1
    out = capsys.readouterr().out
    assert "FAIL counters" in out
    assert "team red: the counter says 99 chips, its holders 8" in out


def test_the_command_prints_json(on: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    on.raw("delete from events where seq = 3")
    assert run(["doctor", "--store", on.address, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert answer["store"] == on.address
    by_check = {check["check"]: check for check in answer["checks"]}
    assert by_check["schema"]["ok"]
    assert by_check["log"]["troubles"] == [
        f"{by_check['log']['looked_at']} events lie between seq 1 and 16: 1 are missing"
    ]


def test_the_command_says_what_is_not_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--store", str(tmp_path / "nothing.db")]) == 3
    assert "there is no store here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    (tmp_path / "notes").write_text("not a database at all " * 50)
    assert run(["doctor", "--store", str(tmp_path / "notes")]) == 3
    assert "file is not a database" in capsys.readouterr().err
    assert run(["doctor", "--store", "postgresql://nobody@127.0.0.1:1/none"]) == 3
    assert "cannot be reached" in capsys.readouterr().err
