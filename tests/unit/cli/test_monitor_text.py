"""A frame as lines: it fits 80 columns, it shows more where there is room, and nobody's name steers the terminal."""

from __future__ import annotations

import click
import pytest

from penstock.cli import monitor_text
from penstock.cli.monitor_model import Board, Frame
from penstock.cli.monitor_text import amount, done, printed
from penstock.cli.screen import shown_width
from tests.unit.cli.stand_in import chunk, job
from tests.unit.cli.test_monitor_model import NOW, board, event, queue, said, slice


def full() -> Board:
    long = "a run with a name that goes on and on"
    made = board(
        (
            slice("s01m7fed5e759695j", "us-central1-a", job="j01m7fed5e090v0pw", user="ada"),
            slice("s01m7fed61b1zd010", "us-central1-a"),
            slice("s01m7fed6nx3enpg2", "us-east1-d", state="creating", arriving="1 of 4 hosts have joined"),
            slice("s01m7fed6nx3enpg3", "us-east1-d", state="preempted", why="the provider took it away"),
        ),
        (
            job("j01m7fed5e090v0pw", name=long, progress=said(25, samples=1_234_567.0, shards=42.0, loss=0.25)),
            job("j01m7fed613e4jk6z", "failed", cause="oom"),
            job("j01m7fed613e4jk6y", "queued"),
        ),
        queue(waiting=12),
        queue("a queue with a name that goes on and on and on and on and on and on and on and on", 1),
    )
    made.take(event(1, "attempt.created", "a01", job="j01m7fed5e090v0pw"))
    made.take(event(2, "slice.preempted", "s01m7fed6nx3enpg3", why="x" * 300))
    made.take(event(3, "attempt.closed", "a01", job="j01m7fed5e090v0pw", cause="preempted"))
    made.log.add(chunk(), b"step 1\n" + b"y" * 500 + b"\nwide \xe6\xbc\xa2\xe5\xad\x97 \x1b[31mred\tend\n")
    return made


def told(frame: Frame, width: int) -> list[str]:
    return [click.unstyle(line) for line in printed(frame, width)]


@pytest.mark.parametrize("width", [40, 80, 100, 140, 200])
def test_no_line_is_longer_than_the_terminal_is_wide(width: int) -> None:
    frame = full().frame(NOW, selected="j01m7fed5e090v0pw")
    for line in printed(frame, width):
        assert shown_width(line) <= width, line


def test_eighty_columns_have_what_counts() -> None:
    lines = told(full().frame(NOW, selected="j01m7fed5e090v0pw"), 80)
    assert lines[0] == "4 slices (1 busy, 1 free, 1 coming), 32 chips · jobs: 1 running, 13 queued"
    assert lines[1].startswith("1 broken · 1.23M samples · 42 shards · since ")
    assert "us-central1-a: 1 busy, 1 free" in lines
    assert "us-east1-d: 1 coming, 1 broken, 1 preempted" in lines
    title = next(line for line in lines if line.startswith("SLICE"))
    row = next(line for line in lines if line.startswith("s01m7fed5e759695j"))
    assert title.split() == ["SLICE", "STATE", "JOB", "DONE", "SAMPLES", "SHARDS", "AGE", "LOST"]
    assert row.split()[1] == "busy"
    assert row.split()[-5:] == ["25%", "1.23M", "42", "2m00s", "1"]
    assert title.index("SAMPLES") + len("SAMPLES") == row.index("1.23M") + len("1.23M"), "numbers stand to the right"
    assert any(line.startswith("j01m7fed613e4jk6z") and " failed " in line for line in lines)
    assert any(line.startswith("default ") and line.split()[1:] == ["12", "1", "-", "1"] for line in lines)
    assert any("slice.preempted" in line and line.endswith("…") for line in lines)
    assert lines[-4].startswith("log of j01m7fed5e090v0pw (a run with")


def test_wide_terminals_show_more() -> None:
    lines = told(full().frame(NOW), 140)
    titles = " ".join(line for line in lines if line.startswith(("SLICE", "JOB")))
    assert {"TYPE", "USER", "POOL", "SAYS"} <= set(titles.split())
    assert any("25/100 loss=0.25" in line for line in lines)


def test_what_others_wrote_cannot_steer_the_terminal() -> None:
    made = board((slice("s1", "z\x1b[2J"),), (job("j1", name="\x1b]0;owned\x07", user="\x1b[31m"),), queue("q\x1b[H"))
    made.take(event(1, "slice.failed", "s1", why="\x1b[2Jboom"))
    made.log.add(chunk(), b"\x1b[2J\x07ring\n")
    made.away = "\x1b[2J"
    for line in printed(made.frame(NOW, selected="j1", words="\x1b"), 200):
        assert "\x07" not in line
        assert "\x1b" not in click.unstyle(line)


def test_states_stand_out() -> None:
    made = board((slice("s1", job="j1"), slice("s2")), (job("j1", cancel_requested=True),))
    lines = "\n".join(printed(made.frame(NOW), 80))
    assert "\x1b[36mbusy" in lines
    assert "\x1b[32mfree" in lines
    assert "\x1b[33mstopping" in lines


def test_a_server_that_is_away_is_told_instead_of_health() -> None:
    made = full()
    made.away = "the server does not answer: nobody there"
    frame = made.frame(NOW)
    assert click.unstyle(monitor_text.head(frame, 80)[1]) == "the server does not answer: nobody there"
    assert "us-central1-a: 1 busy, 1 free" in told(frame, 80), "what was known stays"


def test_nothing_at_all_is_a_frame_too() -> None:
    lines = told(board().frame(NOW, words="x y"), 80)
    assert lines[0] == "0 slices (0 busy, 0 free), 0 chips · jobs: 0 running, 0 queued"
    assert lines[1] == "only: x y · all well"
    assert {"no slices", "no jobs", "no queues", "no events"} <= set(lines)


def test_a_long_place_keeps_its_number() -> None:
    made = board((slice("s1", "northamerica-northeast1-a", title="tpu-northamerica-northeast1-a-17"),))
    rows = [line for line in told(made.frame(NOW), 80) if "-17 " in line]
    assert rows
    assert rows[0].startswith("…")


def test_keys_act_on_the_job_and_the_slice_of_a_row() -> None:
    frame = full().frame(NOW)
    _, slices = monitor_text.slice_lines(frame, 80)
    assert [line.heading for line in slices] == [True, False, False, True, False, False]
    assert (slices[1].job, slices[1].slice) == ("j01m7fed5e090v0pw", "s01m7fed5e759695j")
    assert (slices[2].job, slices[2].slice) == (None, "s01m7fed61b1zd010")
    _, jobs = monitor_text.job_lines(frame, 80)
    assert (jobs[0].job, jobs[0].slice) == ("j01m7fed5e090v0pw", "s01m7fed5e759695j")
    assert jobs[1].slice is None
    _, events = monitor_text.event_lines(frame, 80)
    assert [line.job for line in events] == ["j01m7fed5e090v0pw", None, "j01m7fed5e090v0pw"]


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "-"), (0, "0"), (7.5, "7.5"), (999, "999"), (1000, "1k"), (12_345, "12.3k"), (999_499, "999k"),
     (999_600, "1M"), (1_234_567, "1.23M"), (4.2e9, "4.2G"), (5e13, "50T"), (-2500, "-2.5k")],
)  # fmt: skip
def test_counts_are_short(number: float | None, text: str) -> None:
    assert amount(number) == text


def test_done_is_a_share_where_the_whole_is_known() -> None:
    frame = board((), (job("j1", progress=said(33.4)), job("j2"))).frame(NOW)
    assert [done(row.progress) for row in frame.jobs] == ["33%", "-"]
