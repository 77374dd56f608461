"""Each rule that only real processes put to the test holds on a lawful record and breaks on a planted violation."""

from __future__ import annotations

import pytest

from penstock.domain import limits
from tests.unit.domain.invariants.scribe import Scribe


@pytest.fixture
def run() -> Scribe:
    return Scribe()


# --- S17 ---
def answer(run: Scribe, route: str, *marks: str, digest: str = "p", who: str = "ann") -> None:
    run.client("answer.ok", who, route=route, marks=list(marks), digest=digest)


@pytest.fixture
def walled(run: Scribe) -> Scribe:
    run.world("granted", "ann", teams=["red"])
    run.world("owned", "job-of-red", team="red")
    run.world("owned", "job-of-blue", team="blue")
    return run


def test_s17_own_things_may_be_shown(walled: Scribe) -> None:
    answer(walled, "GET /v1/jobs", "job-of-red")
    answer(walled, "GET /v1/events")
    assert walled.premises("S17") == 2


def test_s17_without_a_second_team_nothing_is_proved(run: Scribe) -> None:
    run.world("granted", "ann", teams=["red"])
    run.world("owned", "job-of-red", team="red")
    answer(run, "GET /v1/jobs", "job-of-red")
    assert run.premises("S17") == 0


def test_s17_another_teams_thing_in_an_answer(walled: Scribe) -> None:
    answer(walled, "GET /v1/jobs", "job-of-red", "job-of-blue")
    assert walled.broken("S17") == ["GET /v1/jobs showed 'job-of-blue' of team blue"]


def test_s17_an_answer_that_changes_when_only_others_act(walled: Scribe) -> None:
    answer(walled, "GET /v1/queues", digest="two wait")
    walled.world("acted", "bob", team="blue")
    answer(walled, "GET /v1/queues", digest="three wait")
    assert walled.broken("S17") == ["GET /v1/queues answered otherwise after only other teams had acted"]


def test_s17_what_the_own_team_does_may_show(walled: Scribe) -> None:
    answer(walled, "GET /v1/queues", digest="two wait")
    walled.world("acted", "bob", team="blue")
    walled.world("acted", "ann", team="red")
    answer(walled, "GET /v1/queues", digest="three wait")
    assert walled.premises("S17") == 2
    walled.world("acted", "bob", team="blue")
    answer(walled, "GET /v1/queues", digest="three wait")
    assert walled.premises("S17") == 4


# --- S18 ---
def written(run: Scribe, size: int = 100, sha256: str = "h") -> None:
    run.world("log.written", "a1/0/out", bytes=size, sha256=sha256)


def read(run: Scribe, *parts: tuple[int, int, int], sha256: str = "h", **more: int) -> None:
    run.client("log.read.ok", "a1/0/out", parts=[list(part) for part in parts], sha256=sha256, **more)


def test_s18_all_of_it_in_order(run: Scribe) -> None:
    written(run)
    read(run, (0, 60, 0), (60, 40, 0))
    assert run.premises("S18") == 1


def test_s18_nothing_was_written_so_nothing_is_proved(run: Scribe) -> None:
    read(run, (0, 60, 0))
    assert run.premises("S18") == 0


def test_s18_what_was_taken_away_is_marked(run: Scribe) -> None:
    written(run)
    run.world("log.taken", "a1/0/out", bytes=30, sha256="rest")
    read(run, (0, 10, 0), (40, 60, 30), sha256="rest")
    assert run.premises("S18") == 1


def test_s18_what_the_host_dropped_is_said_in_the_stream(run: Scribe) -> None:
    written(run, 1000)
    run.world("log.taken", "a1/0/out", bytes=900, sha256="head")
    read(run, (0, 180, 0), sha256="head", marker_bytes=80, host_missing=900)
    assert run.premises("S18") == 1


@pytest.mark.parametrize(
    ("parts", "sha256", "message"),
    [
        (((0, 60, 0), (70, 30, 0)), "h", "bytes 60 to 70 are missing and nothing says so"),
        (((0, 60, 0), (70, 30, 5)), "h", "bytes 60 to 70 are missing and nothing says so"),
        (((0, 60, 0), (50, 40, 0)), "h", "what was read at 50 had been read before"),
        (((0, 60, 0),), "h", "100 bytes were written, 60 read and 0 marked as missing"),
        (((0, 100, 0),), "other", "what was read is not what was written"),
        (((0, 60, 0), (70, 30, 10)), "h", "10 bytes are marked as missing, but 0 were taken away"),
    ],
)
def test_s18_planted(run: Scribe, parts: tuple[tuple[int, int, int], ...], sha256: str, message: str) -> None:
    written(run)
    read(run, *parts, sha256=sha256)
    assert message in run.broken("S18")


def test_s18_above_the_cap(run: Scribe) -> None:
    written(run, limits.LOG_BYTES_MAX + 1)
    read(run, (0, limits.LOG_BYTES_MAX + 1, 0))
    assert run.broken("S18") == [f"{limits.LOG_BYTES_MAX + 1} bytes are kept, above the cap"]


# --- S19 ---
def scanned(run: Scribe, sink: str, *, found: bool, home: bool = False, size: int = 10) -> None:
    run.world("sink.scanned", sink, secret="canary-1", found=found, home=home, bytes=size)


def test_s19_only_its_own_file_holds_a_secret(run: Scribe) -> None:
    run.world("secret.planted", "canary-1")
    scanned(run, "secrets/default/CANARY", found=True, home=True)
    scanned(run, "server.log", found=False)
    scanned(run, "an empty file", found=False, size=0)
    assert run.premises("S19") == 2


def test_s19_a_scan_for_what_nobody_planted_proves_nothing(run: Scribe) -> None:
    scanned(run, "server.log", found=False)
    assert run.premises("S19") == 0


def test_s19_a_secret_in_a_log(run: Scribe) -> None:
    run.world("secret.planted", "canary-1")
    scanned(run, "server.log", found=True)
    assert run.broken("S19") == ["holds secret canary-1"]


def change(run: Scribe, *kinds: str, actor: str = "red/ann") -> None:
    """A cancel by ann, and the records it left."""
    about = {"entity": "job", "id": "j1", "what": "job.cancel_requested"}
    run.client("change.invoke", "red/ann", call=1, **about)
    for kind in kinds:
        event = run.commit(kind, "j1")
        run.history.events[-1] = type(event)(
            seq=event.seq, at=event.at, kind=kind, entity="job", id="j1", version=event.version, actor=actor,
            epoch=1, fence=0, body={},
        )  # fmt: skip
    run.client("change.ok", "red/ann", call=1, **about)


def test_s19_a_change_has_one_record_with_its_principal(run: Scribe) -> None:
    run.commit("job.cancel_requested", "j1")  # of an earlier call
    change(run, "job.cancel_requested", "job.edited")
    assert run.premises("S19") == 1


def test_s19_a_change_that_leaves_a_line(run: Scribe) -> None:
    about = {"entity": "secret", "id": "CANARY", "what": "sets secret"}
    run.client("change.invoke", "red/ann", call=1, **about)
    run.client("change.ok", "red/ann", call=1, **about)
    run.world("audit.line", "CANARY", what="sets secret", principal="red/ann")
    assert run.premises("S19") == 1


@pytest.mark.parametrize(
    ("kinds", "actor", "message"),
    [
        ((), "red/ann", "has 0 audit records, by nobody"),
        (("job.edited",), "red/ann", "has 0 audit records, by nobody"),
        (("job.cancel_requested",), "system", "has 1 audit records, by system"),
        (("job.cancel_requested",) * 2, "red/ann", "has 2 audit records, by red/ann, red/ann"),
    ],
)
def test_s19_planted(run: Scribe, kinds: tuple[str, ...], actor: str, message: str) -> None:
    change(run, *kinds, actor=actor)
    assert run.broken("S19") == [f"job.cancel_requested of j1 {message}"]


# --- S21 ---
def test_s21_an_older_history(run: Scribe) -> None:
    run.world("replayed", "0.2.0", events=500, rejected=[])
    assert run.premises("S21") == 500
    run.world("replayed", "0.1.0", events=7, rejected=["job.lost of j1 at 7"])
    assert run.broken("S21") == ["its history does not replay: job.lost of j1 at 7"]


# --- S22 ---
def test_s22_the_tree_that_runs(run: Scribe) -> None:
    run.world("tree.found", "j0", tree="t0")  # nobody said what was sent
    run.world("tree.sent", "j1", tree="t1")
    run.world("tree.found", "j1", tree="t1")
    assert run.premises("S22") == 1
    run.world("tree.found", "j1", tree="t2")
    assert run.broken("S22") == ["runs tree t2, not t1"]


# --- L10 ---
def stopped(run: Scribe, *, took_s: float = 3.0, code: int = 0) -> None:
    run.wait(took_s)
    run.world("server.gone", "server-1", code=code)


@pytest.fixture
def stopping(run: Scribe) -> Scribe:
    run.job("j1")
    run.world("server.told", "server-1")
    return run


def submit(run: Scribe, job: str) -> None:
    run.call("submit", "ok", key=None, body_hash="h", team="red", server="server-1", answer={"job": job})


def test_l10_what_was_acknowledged_while_stopping_is_there(stopping: Scribe) -> None:
    stopping.write("job.created", "j2", {"team": "red"})
    submit(stopping, "j2")
    stopped(stopping)
    assert stopping.premises("L10") == 1


def test_l10_a_stop_in_silence_proves_nothing(stopping: Scribe) -> None:
    stopped(stopping)
    assert stopping.premises("L10") == 0


def test_l10_an_acknowledged_call_that_is_lost(stopping: Scribe) -> None:
    submit(stopping, "j2")
    stopping.call("cancel", "ok", job="j1", server="server-1", answer={"answer": "cancelled"})
    stopped(stopping)
    assert stopping.broken("L10") == [
        "its submit was acknowledged by server-1 and is lost",
        "its cancel was acknowledged by server-1 and is lost",
    ]


def test_l10_too_slow_or_by_force(stopping: Scribe) -> None:
    stopped(stopping, took_s=31.0, code=-9)
    assert stopping.broken("L10") == ["took 31.0 s to stop", "ended with -9"]


def test_l10_never(stopping: Scribe) -> None:
    stopping.wait(31.0)
    stopping.world("tick", "c1")
    assert stopping.broken("L10") == ["was told to stop and has not stopped"]
