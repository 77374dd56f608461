"""What the monitor makes of lists and events, without a terminal or a server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.cli.monitor_model import KNOWN_MAX, LOG_LINES_KEPT, NOTHING, QUIET_S, Board, Frame, LogTail, Stale
from penstock.wire.api import EventView, JobView, ProgressView, QueueView, SliceView
from tests.unit.cli.stand_in import chunk, job

NOW = 1_700_001_000.0


def slice(id: str, zone: str = "z1", **more: Any) -> SliceView:
    known: dict[str, Any] = {
        "team": "lab", "pool": "big", "provider": "tpu_vm", "accelerator": "v5e-8", "chips": 8, "hosts": 2,
        "state": "ready", "made_at": NOW - 120,
    }  # fmt: skip
    return SliceView(id=id, zone=zone, **{**known, **more})


def queue(name: str = "default", waiting: int = 0) -> QueueView:
    return QueueView(
        name=name, team="lab", weight=1.0, quota_chips=None, borrow_chips=None, band=0, paused=False, waiting=waiting
    )


def said(done: float, at: float = NOW, **metrics: float) -> ProgressView:
    return ProgressView(done=done, total=100.0, metrics=metrics, at=at)


def event(seq: int, kind: str, id: str, **body: object) -> EventView:
    return EventView(seq=seq, at=NOW - 10 + seq, kind=kind, id=id, body=body)


def board(slices: tuple[SliceView, ...] = (), jobs: tuple[JobView, ...] = (), *queues: QueueView) -> Board:
    made = Board(NOW - 3600)
    made.put_slices(slices)
    made.put_jobs(jobs)
    made.put_queues(queues)
    return made


def test_slices_stand_by_zone_with_the_job_on_them() -> None:
    made = board(
        (
            slice("s3", "z2", state="creating", arriving="host 1 of 2 has joined"),
            slice("s2", "z1"),
            slice("s1", "z1", job="j1", user="ada"),
            slice("s4", "z2", state="preempted"),
            slice("s5", "z2", state="deleting"),
        ),
        (job("j1", name="resnet", progress=said(25, samples=5000.0, shards=3.0, loss=0.5)),),
    )
    first, second = made.frame(NOW).zones
    assert (first.zone, first.busy, first.free) == ("z1", 1, 1)
    assert (second.zone, second.coming, second.broken, second.leaving) == ("z2", 1, 1, 1)
    busy, free = first.slices
    assert (busy.id, busy.job, busy.job_name, busy.user, busy.age_s) == ("s1", "j1", "resnet", "ada", 120.0)
    assert busy.progress is not None
    assert (busy.progress.samples, busy.progress.shards, busy.progress.metrics) == (5000.0, 3.0, {"loss": 0.5})
    assert (free.id, free.job, free.progress) == ("s2", None, None)
    assert second.slices[0].why == "host 1 of 2 has joined"


def test_totals_count_everything_and_do_not_heed_the_filter() -> None:
    made = board(
        (slice("s1", job="j1"), slice("s2"), slice("s3", state="failed"), slice("s4", state="intended")),
        (
            job("j1", progress=said(1, samples=10.0)),
            job("j2", progress=said(1, samples=5.0, shards=2.0)),
            job("j3", "provisioning"),
            job("j4", "queued"),
        ),
        queue(waiting=2000),
        queue("night", waiting=5),
    )
    for kind in ("job.succeeded", "job.succeeded", "job.failed", "job.cancelled"):
        made.take(event((made.last_seq or 0) + 1, kind, "jx"))
    sums = made.frame(NOW, words="nothing like it").totals
    assert (sums.slices, sums.chips, sums.busy, sums.free, sums.broken, sums.coming) == (4, 32, 1, 1, 1, 1)
    assert (sums.running, sums.provisioning) == (2, 1)
    assert sums.queued == 2005, "of jobs that wait only the newest are listed"
    assert (sums.samples, sums.shards) == (15.0, 2.0)
    assert (sums.succeeded, sums.failed, sums.cancelled) == (2, 1, 1)


def test_preemptions_are_counted_for_the_job_the_zone_and_the_place() -> None:
    made = board((slice("s1", job="j1", title="tpu-z1-0"),), (job("j1"),))
    made.take(event(1, "attempt.created", "a1", job="j1"))
    made.take(event(2, "slice.preempted", "s1"))
    made.take(event(3, "attempt.closed", "a1", job="j1", cause="preempted"))
    made.take(event(4, "attempt.closed", "a0", job="j1", cause="user_error"))
    made.take(event(5, "slice.intended", "s2", zone="z2"))
    made.take(event(6, "slice.preempted", "s2"))
    made.put_slices((slice("s3", job="j1", title="tpu-z1-0"), slice("s4", "z2"), slice("s5", title="tpu-z1-1")))
    frame = made.frame(NOW)
    assert [(zone.zone, zone.preemptions) for zone in frame.zones] == [("z1", 1), ("z2", 1)]
    lost = {row.id: row.preemptions for zone in frame.zones for row in zone.slices}
    assert lost == {"s3": 1, "s4": 0, "s5": 0}
    assert frame.jobs[0].preemptions == 1
    assert frame.totals.preemptions == 2
    made.put_slices((slice("s3", title="tpu-z1-0"),))
    assert made.frame(NOW).zones[0].slices[0].preemptions == 1, "its predecessor was lost, whatever ran on it"


@pytest.mark.parametrize(
    ("kind", "stale"),
    [
        ("job.created", Stale(jobs=True, queues=True)),
        ("attempt.closed", Stale(jobs=True, slices=True)),
        ("slice.ready", Stale(slices=True)),
        ("queue.edited", Stale(queues=True)),
        ("queue.charged", NOTHING),
        ("slice.observed", NOTHING),
        ("leader.elected", NOTHING),
        ("something.new", NOTHING),
    ],
)
def test_an_event_says_which_list_is_out_of_date(kind: str, stale: Stale) -> None:
    assert board().take(event(1, kind, "x")) == stale


def test_a_loss_counts_once_however_many_events_tell_of_it() -> None:
    made = board((slice("s1", title="tpu-z1-0"), slice("s2"), slice("s3")), ())
    for seq, (kind, id) in enumerate(
        [
            ("slice.lost", "s1"),
            ("slice.draining", "s1"),
            ("slice.preempted", "s1"),
            ("slice.lost", "s2"),
            ("slice.deleting", "s2"),
            ("slice.preempted", "s3"),
        ],
        1,
    ):
        made.take(event(seq, kind, id))
    frame = made.frame(NOW)
    assert frame.totals.preemptions == 3
    assert [zone.preemptions for zone in frame.zones] == [3]
    assert [row.preemptions for row in frame.zones[0].slices] == [1, 1, 1]


def test_an_event_that_comes_twice_counts_once() -> None:
    made = board()
    assert made.take(event(7, "slice.preempted", "s1"))
    assert not made.take(event(7, "slice.preempted", "s1"))
    assert not made.take(event(3, "slice.preempted", "s1"))
    frame = made.frame(NOW)
    assert frame.totals.preemptions == 1
    assert [row.seq for row in frame.events] == [7]
    assert made.last_seq == 7


def test_events_are_newest_first_know_their_job_and_leave_bookkeeping_out() -> None:
    made = board()
    made.take(event(1, "job.created", "j1"))
    made.take(event(2, "attempt.created", "a1", job="j1"))
    made.take(event(3, "slice.bound", "s1", attempt="a1"))
    made.take(event(4, "queue.charged", "default", attempt="a1"))
    made.take(event(5, "slice.ready", "s2"))
    shown = [(row.kind, row.job) for row in made.frame(NOW).events]
    assert shown == [("slice.ready", None), ("slice.bound", "j1"), ("attempt.created", "j1"), ("job.created", "j1")]


@pytest.mark.parametrize(
    ("words", "slices", "jobs"),
    [
        ("", ["s1", "s2"], ["j1", "j2"]),
        ("Z1", ["s1"], []),
        ("resnet", ["s1"], ["j1"]),
        ("free", ["s2"], []),
        ("z2 v5e-8", ["s2"], []),
        ("ada running", [], ["j1"]),
        ("night-sweep", ["s1"], ["j1"]),
        ("nothing", [], []),
    ],
)
def test_every_word_of_the_filter_must_be_in_a_row(words: str, slices: list[str], jobs: list[str]) -> None:
    made = board(
        (slice("s1", job="j1"), slice("s2", "z2")),
        (job("j1", name="resnet", tags=("night-sweep",)), job("j2", "failed", name="vit", user="bob")),
    )
    frame = made.frame(NOW, words=words)
    assert [row.id for zone in frame.zones for row in zone.slices] == slices
    assert [row.id for row in frame.jobs] == jobs


def test_a_running_job_that_stopped_reporting_is_quiet() -> None:
    old = NOW - QUIET_S - 1
    made = board(
        (),
        (
            job("j1", progress=said(1, at=old)),
            job("j2", progress=said(1)),
            job("j3"),
            job("j4", "failed", progress=said(1, at=old)),
        ),
    )
    frame = made.frame(NOW)
    assert [row.id for row in frame.jobs if row.quiet] == ["j1"], "silent from the beginning is not stuck"
    assert frame.totals.quiet == 1


def test_progress_is_renewed_without_bringing_jobs_back() -> None:
    made = board((), (job("j1"),))
    made.renew_jobs((job("j1", progress=said(50)), job("j9")))
    (row,) = made.frame(NOW).jobs
    assert row.progress is not None
    assert row.progress.done == 50


def test_a_log_is_shown_first_of_what_runs_then_of_the_newest() -> None:
    made = board((), (job("j1", created_at=1.0), job("j2", "failed", created_at=9.0), job("j3", created_at=2.0)))
    assert made.default_selection() == "j3"
    made.put_jobs((job("j1", "failed", created_at=1.0), job("j2", "failed", created_at=9.0)))
    assert made.default_selection() == "j2"
    assert board().default_selection() is None


def test_a_frame_is_the_same_after_json() -> None:
    made = board((slice("s1", job="j1"),), (job("j1", progress=said(1)),), queue())
    made.take(event(1, "slice.preempted", "s1", why="taken"))
    frame = made.frame(NOW, selected="j1")
    assert msgspec.json.decode(msgspec.json.encode(frame), type=Frame) == frame


def test_a_monitor_that_stands_for_weeks_does_not_grow() -> None:
    made = board()
    for seq in range(KNOWN_MAX + 500):
        made.take(event(seq, "slice.intended", f"s{seq}", zone="z"))
    assert len(made._zone_of) == KNOWN_MAX
    assert len(made.frame(NOW).events) <= 200


# --- logs ---
def lines(*chunks: tuple[Any, bytes]) -> tuple[str, ...]:
    tail = LogTail()
    for each, data in chunks:
        tail.add(each, data)
    return tail.lines()


def test_lines_are_put_together_from_chunks() -> None:
    assert lines((chunk(), b"one\ntw"), (chunk(), b"o\nthr")) == ("one", "two", "thr")


def test_streams_do_not_mix_within_a_line() -> None:
    told = lines((chunk(), b"out "), (chunk(stream="err"), b"err\n"), (chunk(), b"put\n"))
    assert told == ("err", "out put")


def test_hosts_are_named_once_there_are_several() -> None:
    assert lines((chunk(), b"a\n"), (chunk(rank=1), b"b\n"), (chunk(), b"c\n")) == ("a", "[host 1] b", "[host 0] c")


def test_a_bar_that_is_painted_over_is_one_line() -> None:
    assert lines((chunk(), b"10%\r20%\r30%\r\ndone\n"), (chunk(), b"1\r2")) == ("30%", "done", "2")


def test_lost_bytes_are_told_and_bytes_that_are_no_text_shown() -> None:
    assert lines((chunk(dropped=12), b"\xff\n")) == ("[12 bytes of out are lost]", "�")


def test_a_log_is_bounded() -> None:
    tail = LogTail()
    tail.add(chunk(), b"x\n" * (3 * LOG_LINES_KEPT))
    assert len(tail.lines()) == LOG_LINES_KEPT
    for _ in range(100):
        tail.add(chunk(), b"y" * 1000)
    assert len(tail.lines()[-1]) <= 5000
