"""Stays with a job until it has ended: its logs, and beside them what becomes of it; Ctrl-C leaves it running.

`tpu run`, `exec`, `resume` and `rerun` call `follow`, then exit with `exit_code`. A second thread looks at the job once
a second and tells what changed (why it waits, where it runs, what was lost and resumed); the first one only copies
bytes, so that a log line is never late. It must not decide anything about the job.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from penstock.cli.logs import Writer, from_hosts
from penstock.cli.terminal import StatusLine, note, now_s, safe, span
from penstock.wire.problems import job_exit_code

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.wire.api import AttemptView, JobView, Outcome, ProgressView, WhyView

LOOK_EVERY_S = 1.0
FIRST_LOOK_S = 0.5  #: a snippet that is over sooner needs no commentary
INTERRUPTED = 130
ENDED = frozenset({"succeeded", "failed", "cancelled"})


def exit_code(outcome: Outcome) -> int:
    """The payload's own code where it ended by itself, else the one that stands for the cause."""
    return job_exit_code(outcome.state, outcome.cause, outcome.exit_code)


def follow(client: Client, id: str, *, silent: bool = False, quiet_logs: bool = False) -> Outcome:
    """Show logs and changes of `id` until it has ended. `silent`: say nothing of our own; Ctrl-C detaches."""
    status = StatusLine(silent=silent)
    writer = Writer(silent=quiet_logs)
    try:
        with _watched(client, id, status, writer):
            for chunk in from_hosts(client, id, client.logs(id, follow=True), writer):
                with status.lock:
                    status.clear()
                    writer.write(chunk)
            return client.wait(id)
    except KeyboardInterrupt:
        status.clear()
        note(f"\ndetached: {id} goes on; return with `tpu logs -f {id}`, stop it with `tpu cancel {id}`")
        raise click.exceptions.Exit(INTERRUPTED) from None


@contextmanager
def _watched(client: Client, id: str, status: StatusLine, writer: Writer) -> Iterator[None]:
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(client, id, status, writer, stop), name="watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        # Not after an interrupt alone: a call in flight may take long, and the thread dies with the process.
        watcher.join(timeout=LOOK_EVERY_S)
        status.clear()


def _watch(client: Client, id: str, status: StatusLine, writer: Writer, stop: threading.Event) -> None:
    from penstock.client.errors import ApiError

    teller = Teller()
    wait_s = FIRST_LOOK_S
    while not stop.wait(wait_s):
        wait_s = LOOK_EVERY_S
        try:
            job = client.get(id)
            why = client.why(id) if job.state in ("queued", "provisioning") else None
        except ApiError:
            continue  # the log stream meets the same trouble, and says so when it is given up
        if stop.is_set():
            return
        for line in teller.news(job, why):
            status.say(line)
        with status.lock:
            if writer.at_line_start:
                status.show(now_line(job, why))


def _reason(why: WhyView) -> str:
    place = f" (place {why.place})" if why.place is not None else ""
    return safe(why.sentence).removesuffix(".") + place


class Teller:
    """Remembers what was told about a job, and gives only what is new."""

    def __init__(self) -> None:
        self._why: str | None = None  #: a code: sentences hold seconds, which always change
        self._told: set[tuple[str, str]] = set()

    def news(self, job: JobView, why: WhyView | None) -> list[str]:
        """Lines that have not been told yet, oldest first."""
        lines = []
        for number, attempt in enumerate(job.attempts, 1):
            if attempt.started_at is not None and self._is_new(attempt.id, "started"):
                lines.append(_started(number, attempt))
            if attempt.cause not in (None, "succeeded") and self._is_new(attempt.id, "closed"):
                lines.append(_closed(number, attempt, job))
        if why is not None and why.code != self._why and job.state == "queued":
            lines.append(f"waiting: {_reason(why)}")
        self._why = why.code if why is not None else None
        return lines

    def _is_new(self, attempt: str, what: str) -> bool:
        new = (attempt, what) not in self._told
        self._told.add((attempt, what))
        return new


def _started(number: int, attempt: AttemptView) -> str:
    where = ", ".join(attempt.slices) or "?"
    hosts = f", {attempt.hosts} hosts" if attempt.hosts > 1 else ""
    again = f", resumed at stage {attempt.stage}" if attempt.stage else ""
    return f"running on {safe(where)}{hosts}{again} (attempt {number})"


def _closed(number: int, attempt: AttemptView, job: JobView) -> str:
    evidence = f": {safe(attempt.evidence[0])}" if attempt.evidence else ""
    reached = f" at {progress(job.progress)}" if job.progress is not None else ""
    return f"attempt {number} {safe(attempt.cause or '?')}{reached}{evidence}"


def now_line(job: JobView, why: WhyView | None) -> str:
    """One line about how it stands now."""
    if why is not None:
        return f"{job.state} for {span(now_s() - job.created_at)}: {_reason(why)}"
    ran = "" if job.started_at is None else f" for {span(now_s() - job.started_at)}"
    done = f", {progress(job.progress)}" if job.progress is not None else ""
    return f"{job.state}{ran}{done}"


def progress(view: ProgressView) -> str:
    """How far a payload says it is: 120/1000 (12%) loss=0.25"""
    done = f"{view.done:g}"
    if view.total:
        done += f"/{view.total:g} ({100 * view.done / view.total:.0f}%)"
    return " ".join([done, *(f"{safe(name)}={value:.4g}" for name, value in view.metrics.items())])


def summary(outcome: Outcome) -> str:
    """The last line about a job that has ended."""
    took = ""
    if outcome.started_at is not None and outcome.finished_at is not None:
        took = f" after {span(outcome.finished_at - outcome.started_at)}"
    cause = "" if outcome.cause in (None, outcome.state) else f" ({outcome.cause})"
    code = f", exit code {outcome.exit_code}" if outcome.exit_code else ""
    tries = f", {outcome.attempts} attempts" if outcome.attempts > 1 else ""
    return f"{outcome.id} {outcome.state}{cause}{took}{code}{tries}"


def echo_error(outcome: Outcome, *, whole: bool = True) -> None:
    """How the payload failed, in its own words. Not `whole` for a command whose log, just shown, ended with them."""
    error = outcome.error
    if error is None:
        return
    if error.traceback and whole:
        click.echo("\n".join(safe(line) for line in error.traceback.rstrip().split("\n")), err=True)
    else:
        click.echo(f"{safe(error.type)}: {safe(error.message)}", err=True)


def echo_note(outcome: Outcome) -> None:
    """What the reader has to know about the result, such as that it is only a `repr`."""
    if outcome.note:
        note(f"note: {safe(outcome.note)}")
