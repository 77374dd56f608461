"""A frame of `tpu monitor` as lines of a terminal: which columns fit a width, how numbers are written, what is red.

`tpu monitor --once` prints all of it; the live screen (`cli.monitor_screen`) shows the same lines in its panels. Lines
carry colours as escape sequences, as everything of `cli.terminal` does. It must not ask the server, nor draw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import click

from penstock.cli import terminal
from penstock.cli.jobs import event_facts
from penstock.cli.monitor_model import EventRow, Frame, JobRow, QueueRow, Share, SliceRow, ZoneRow
from penstock.cli.screen import fit, shown_width
from penstock.cli.terminal import safe, span

Row = TypeVar("Row")
ID_COLUMNS = 17
TITLE_COLUMNS = 24  #: of a longer one the beginning goes: it ends with what tells it apart, and the zone stands above
EVENTS_PRINTED = 10
LOG_PRINTED = 10
JOBS_PRINTED = 40


class Line(NamedTuple):
    """One line of a panel. `key` tells it apart from the others; `job` and `slice` are what keys act on."""

    key: str
    text: str
    job: str | None = None
    slice: str | None = None
    heading: bool = False


class Column(NamedTuple, Generic[Row]):
    """`wide_from` is the width of the panel from which on it is shown; of width 0 is the one that takes the rest."""

    title: str
    width: int
    cell: Callable[[Row], str]
    right: bool = False
    wide_from: int = 0


# --- words and numbers ---
def amount(number: float | None) -> str:
    """A count in at most six characters: 999, 12.3k, 4.56M."""
    if number is None:
        return "-"
    if abs(number) < 1000:
        return f"{number:.4g}"
    for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if abs(number) < 999.5 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number / 1e12:.3g}T"


def done(progress: Share | None) -> str:
    """As percent where the payload said of how much, else as a count."""
    if progress is None:
        return "-"
    return f"{100 * progress.done / progress.total:.0f}%" if progress.total else amount(progress.done)


def samples(progress: Share | None) -> str:
    return amount(None if progress is None else progress.samples)


def shards(progress: Share | None) -> str:
    return amount(None if progress is None else progress.shards)


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _said(progress: Share | None) -> str:
    """What else the payload reported: 120/1000 loss=0.25"""
    if progress is None:
        return ""
    of = f"/{progress.total:g}" if progress.total else ""
    return " ".join(
        [f"{progress.done:g}{of}", *(f"{safe(name)}={value:.4g}" for name, value in progress.metrics.items())]
    )


def _title(row: SliceRow) -> str:
    title = safe(row.title)
    return title if len(title) <= TITLE_COLUMNS else "…" + title[1 - TITLE_COLUMNS :]


def _slice_state(row: SliceRow) -> str:
    if row.state == "ready":
        return click.style("busy", fg="cyan") if row.job is not None else click.style("free", fg="green")
    return terminal.state(row.state)


def _job_state(row: JobRow) -> str:
    if row.stopping:
        return click.style("stopping", fg="yellow")
    if row.quiet:
        return click.style("quiet", fg="red")
    return terminal.state(row.state)


def _lost(count: int) -> str:
    return click.style(str(count), fg="red") if count else "-"


# --- columns ---
SLICES: Sequence[Column[SliceRow]] = (
    Column("SLICE", ID_COLUMNS, _title),
    Column("STATE", 9, _slice_state),
    Column("TYPE", 8, lambda row: row.accelerator, wide_from=100),
    Column("JOB", 0, lambda row: safe(row.job_name or row.why or "-")),
    Column("DONE", 5, lambda row: done(row.progress), right=True),
    Column("SAMPLES", 7, lambda row: samples(row.progress), right=True),
    Column("SHARDS", 6, lambda row: shards(row.progress), right=True),
    Column("AGE", 6, lambda row: span(row.age_s), right=True),
    Column("LOST", 4, lambda row: _lost(row.preemptions), right=True),
    Column("USER", 8, lambda row: safe(row.user or "-"), wide_from=110),
    Column("POOL", 10, lambda row: safe(row.pool), wide_from=120),
)
JOBS: Sequence[Column[JobRow]] = (
    Column("JOB", ID_COLUMNS, lambda row: row.id),
    Column("NAME", 0, lambda row: safe(row.name)),
    Column("STATE", 12, _job_state),
    Column("DONE", 5, lambda row: done(row.progress), right=True),
    Column("SAMPLES", 7, lambda row: samples(row.progress), right=True, wide_from=100),
    Column("AGE", 6, lambda row: span(row.age_s), right=True),
    Column("RAN", 6, lambda row: "-" if row.ran_s is None else span(row.ran_s), right=True),
    Column("LOST", 4, lambda row: _lost(row.preemptions), right=True),
    Column("USER", 8, lambda row: safe(row.user), wide_from=90),
    Column("SAYS", 24, lambda row: _said(row.progress) or safe(row.cause or ""), wide_from=120),
)
QUEUES: Sequence[Column[QueueRow]] = (
    Column("QUEUE", 0, lambda row: safe(row.name)),
    Column("WAIT", 5, lambda row: str(row.waiting), right=True),
    Column("RUN", 5, lambda row: str(row.running), right=True),
    Column("QUOTA", 6, lambda row: "-" if row.quota_chips is None else str(row.quota_chips), right=True),
    Column("WEIGHT", 6, lambda row: f"{row.weight:g}", right=True),
    Column("", 6, lambda row: click.style("paused", fg="yellow") if row.paused else ""),
)
_ALARMING = frozenset({"slice.lost", "slice.preempted", "slice.failed", "job.failed", "attempt.fencing"})


def _kind(row: EventRow) -> str:
    return click.style(row.kind, fg="red") if row.kind in _ALARMING else row.kind


def _facts(row: EventRow) -> str:
    return event_facts(row.body)


EVENTS: Sequence[Column[EventRow]] = (
    Column("TIME", 8, lambda row: clock(row.at)),
    Column("WHAT", 18, _kind),
    Column("OF", ID_COLUMNS, lambda row: safe(row.id)),
    Column("", 0, _facts),
)


class Table(Generic[Row]):
    """Columns as they fit one width: a title line, and a line for each row."""

    def __init__(self, columns: Sequence[Column[Row]], width: int) -> None:
        self._width = width
        self._columns = [column for column in columns if width >= column.wide_from]
        taken = sum(column.width for column in self._columns) + 2 * (len(self._columns) - 1)
        self._widths = [column.width or max(4, width - taken) for column in self._columns]

    def title(self) -> str:
        return click.style(self._join([column.title for column in self._columns]), bold=True)

    def line(self, row: Row) -> str:
        return self._join([column.cell(row) for column in self._columns])

    def _join(self, cells: Sequence[str]) -> str:
        placed = []
        for column, width, cell in zip(self._columns, self._widths, cells, strict=True):
            text = fit(cell, width)
            blank = " " * (width - shown_width(text))
            placed.append(blank + text if column.right else text + blank)
        return fit("  ".join(placed).rstrip(), self._width)


# --- panels ---
def slice_lines(frame: Frame, width: int) -> tuple[str, list[Line]]:
    """The title line and the rows, under a heading for each zone."""
    longest = max((len(row.title) for zone in frame.zones for row in zone.slices), default=0)
    first = SLICES[0]._replace(width=max(ID_COLUMNS, min(longest, TITLE_COLUMNS)))
    table = Table((first, *SLICES[1:]), width)
    lines: list[Line] = []
    for zone in frame.zones:
        lines.append(Line(f"zone {zone.zone}", _zone_heading(zone, width), heading=True))
        lines += (Line(row.id, table.line(row), row.job, row.id) for row in zone.slices)
    return table.title(), lines


def _zone_heading(zone: ZoneRow, width: int) -> str:
    counts = [(zone.busy, "busy"), (zone.free, "free"), (zone.coming, "coming"), (zone.leaving, "leaving")]
    words = [f"{count} {word}" for count, word in counts if count]
    if zone.broken:
        words.append(click.style(f"{zone.broken} broken", fg="red"))
    if zone.preemptions:
        words.append(click.style(f"{zone.preemptions} preempted", fg="red"))
    return fit(click.style(safe(zone.zone), bold=True) + ": " + ", ".join(words), width)


def job_lines(frame: Frame, width: int) -> tuple[str, list[Line]]:
    table = Table(JOBS, width)
    running_on = {row.job: row.id for zone in frame.zones for row in zone.slices if row.job is not None}
    return table.title(), [Line(row.id, table.line(row), row.id, running_on.get(row.id)) for row in frame.jobs]


def queue_lines(frame: Frame, width: int) -> tuple[str, list[Line]]:
    table = Table(QUEUES, width)
    return table.title(), [Line(row.name, table.line(row)) for row in frame.queues]


def event_lines(frame: Frame, width: int) -> tuple[str, list[Line]]:
    table = Table(EVENTS, width)
    return table.title(), [Line(str(row.seq), table.line(row), row.job) for row in frame.events]


def log_title(frame: Frame) -> str:
    if frame.selected is None:
        return "log"
    name = next((row.name for row in frame.jobs if row.id == frame.selected), "")
    return f"log of {frame.selected}" + (f" ({safe(name)})" if name else "")


def log_lines(frame: Frame, count: int) -> list[str]:
    return [safe(line.expandtabs()) for line in frame.log[-count:]]


# --- the two lines on top ---
def head(frame: Frame, width: int) -> tuple[str, str]:
    """What there is, and whether it is well."""
    sums = frame.totals
    use = [f"{sums.busy} busy", f"{sums.free} free"]
    use += [f"{count} {word}" for count, word in ((sums.coming, "coming"), (sums.leaving, "leaving")) if count]
    jobs = [f"{sums.running} running", f"{sums.queued} queued"]
    if sums.provisioning:
        jobs.insert(1, f"{sums.provisioning} provisioning")
    slices, chips = (
        f"{count} {word}" if count == 1 else f"{count} {word}s"
        for count, word in ((sums.slices, "slice"), (sums.chips, "chip"))
    )
    first = f"{slices} ({', '.join(use)}), {chips} · jobs: {', '.join(jobs)}"
    return fit(click.style(first, bold=True), width), fit(_health(frame), width)


def _health(frame: Frame) -> str:
    if frame.away:
        return click.style(safe(frame.away), fg="red")
    sums = frame.totals
    alarms = [f"{count} {word}" for count, word in ((sums.broken, "broken"), (sums.quiet, "quiet for 10m")) if count]
    health = click.style(", ".join(alarms), fg="red") if alarms else click.style("all well", fg="green")
    past = [
        f"{count} {word}"
        for count, word in (
            (sums.preemptions, "preempted"),
            (sums.failed, "failed"),
            (sums.cancelled, "cancelled"),
            (sums.succeeded, "succeeded"),
        )
        if count
    ]
    since = f" · since {clock(frame.since)[:5]}: {', '.join(past)}" if past else ""
    work = "".join(
        f" · {amount(count)} {word}" for count, word in ((sums.samples, "samples"), (sums.shards, "shards")) if count
    )
    only = click.style(f"only: {safe(frame.filter)} · ", fg="yellow") if frame.filter else ""
    return only + health + work + since


# --- all of it ---
def printed(frame: Frame, width: int) -> Iterator[str]:
    """The whole frame as text, for `--once`."""
    yield from head(frame, width)
    sections = (
        ("no slices", slice_lines(frame, width), None),
        ("no jobs", job_lines(frame, width), JOBS_PRINTED),
        ("no queues", queue_lines(frame, width), None),
        ("no events", event_lines(frame, width), EVENTS_PRINTED),
    )
    for empty, (title, lines), most in sections:
        yield ""
        if not lines:
            yield empty
            continue
        yield title
        yield from (line.text for line in lines[:most])
        if most is not None and len(lines) > most:
            yield f"… and {len(lines) - most} more"
    if frame.selected is not None:
        yield ""
        yield fit(click.style(log_title(frame), bold=True), width)
        yield from (fit(line, width) for line in log_lines(frame, LOG_PRINTED))
