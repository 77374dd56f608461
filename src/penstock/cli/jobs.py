"""Looking at jobs: `tpu ps`, `show`, `result`, `why`, `events`.

Reads only. Lists show the newest first and leave out what takes long to fetch; `show` has the rest. Ids may be
shortened to what is unique. It must not wait for anything unless asked to (`result --wait`, `events -f`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli import follow, terminal
from penstock.cli.talk import Refused, talking
from penstock.cli.terminal import moment, now_s, safe, span
from penstock.cli.words import JOB, STATE_WORDS, as_json, event_filters, job_filters

if TYPE_CHECKING:
    from penstock.client.calls import EventFilters
    from penstock.client.client import Client
    from penstock.wire.api import AttemptView, EventView, JobView
    from penstock.wire.cost import JobCost

LIVE = ("running", "provisioning", "queued")
RECENT = 15  #: ended jobs that `ps` shows below the live ones
NOT_AVAILABLE = 3


@click.command()
@job_filters
@click.option("-a", "--all", "everything", is_flag=True, help="All jobs, not only the live and the latest.")
@click.option("-n", "--limit", type=click.IntRange(1), default=200, show_default=True, help="At most so many.")
@as_json
def ps(
    *,
    user: str | None,
    state: str | None,
    tag: str | None,
    queue: str | None,
    since: float | None,
    everything: bool,
    limit: int,
    as_json: bool,
) -> None:
    """List jobs: the live ones and the latest that ended.

    \b
    tpu ps                          tpu ps --state failed --since 12h
    tpu ps -a --tag sweep --json    tpu ps --user ada
    """
    with talking() as client:
        found = list(islice(select(client, state, user, tag, queue, since, everything), limit))
    if as_json:
        terminal.echo_json(found)
    elif not found:
        click.echo("no jobs" if everything else "no live job and none ended lately; `tpu ps -a` shows all")
    else:
        terminal.echo_table(HEADER, [row(job) for job in found])


def select(
    client: Client,
    state: str | None,
    user: str | None,
    tag: str | None,
    queue: str | None,
    since: float | None,
    everything: bool,
) -> Iterator[JobView]:
    """The jobs a list shows: what was asked for, or the live ones and then the latest that ended."""
    made_since = None if since is None else now_s() - since
    if state is not None or everything or since is not None:
        states = STATE_WORDS.get(state, state) if state is not None else None
        yield from client.jobs(state=states, user=user, tag=tag, queue=queue, since=made_since)
        return
    yield from client.jobs(state=STATE_WORDS["live"], user=user, tag=tag, queue=queue)
    yield from client.page(state=STATE_WORDS["ended"], user=user, tag=tag, queue=queue, limit=RECENT).jobs


HEADER = ("ID", "NAME", "STATE", "ON", "PROGRESS", "AGE", "RAN", "USER", "TAGS")


def row(job: JobView) -> tuple[str, ...]:
    """One line of a list."""
    state = terminal.state(job.state)
    if job.cause not in (None, job.state, "user_error"):
        state += f" ({job.cause})"
    elif job.cancel_requested and job.state in LIVE:
        state += " (stopping)"
    ran = "-" if job.started_at is None else span((job.finished_at or now_s()) - job.started_at)
    return (
        job.id,
        _short(job.name or job.kind, 28),
        state,
        _short(job.slice or ",".join(job.on), 24),
        "-" if job.progress is None else _short(follow.progress(job.progress), 32),
        span(now_s() - job.created_at),
        ran,
        _short(job.user, 12),
        _short(",".join(job.tags), 20) or "-",
    )


def _short(text: str, width: int) -> str:
    shown = safe(text)
    return shown if len(shown) <= width else shown[: width - 1] + "…"


@click.command()
@click.argument("job", type=JOB)
@as_json
def show(job: str, as_json: bool) -> None:
    """Show one job: how it stands, its attempts, what went wrong.

    --json prints {id, state, cause, exit_code, result, error, stage, attempts, slice, started_at, finished_at}.
    """
    with talking() as client:
        if as_json:
            terminal.echo_json(client.outcome(job))
            return
        view = client.get(job)
        why = client.why(view.id) if view.state in ("queued", "provisioning") else None
    facts = [("job", view.id), *((name, text) for name, text in _facts(view) if text not in ("", "-"))]
    if why is not None:
        facts.append(("waiting", safe(why.sentence) + (f" (place {why.place})" if why.place is not None else "")))
    terminal.echo_facts(facts)
    if view.attempts:
        click.echo("")
        rows = [_attempt_row(number, each) for number, each in enumerate(view.attempts, 1)]
        terminal.echo_table(ATTEMPTS, rows, spare=("HOSTS", "STAGE", "STARTED", "ID", "STATE"))
    for number, each in enumerate(view.attempts, 1):
        if each.copied is not None:
            click.echo(f"attempt {number}: {safe(each.copied.told)}")
    if view.error is not None:
        click.echo("")
        text = view.error.traceback or f"{view.error.type}: {view.error.message}"
        click.echo("\n".join(safe(line) for line in text.rstrip().split("\n")))


def _facts(job: JobView) -> list[tuple[str, str]]:
    ran = "" if job.started_at is None else span((job.finished_at or now_s()) - job.started_at)
    cause = "" if job.cause in (None, job.state) else f" ({job.cause})"
    return [
        ("name", safe(job.name)),
        ("state", terminal.state(job.state) + cause + (", asked to stop" if job.cancel_requested else "")),
        ("reason", safe(job.reason)),
        ("exit code", "" if job.exit_code is None else str(job.exit_code)),
        ("progress", "" if job.progress is None else follow.progress(job.progress)),
        ("command", safe(job.command)),
        ("snapshot", (job.snapshot or "")[:16]),
        ("on", ", ".join(job.on) + (f" × {job.slices} slices" if job.slices > 1 else "")),
        ("slice", safe(job.slice or "")),
        ("stage", str(job.stage) if job.stage else ""),
        ("queue", f"{safe(job.queue)}, priority {job.priority}"),
        ("owner", f"{safe(job.user)} of {safe(job.team)}"),
        ("tags", safe(", ".join(job.tags))),
        ("note", safe(job.note)),
        ("goes on from", job.parent or ""),
        ("submitted", moment(job.created_at)),
        ("started", moment(job.started_at)),
        ("finished", moment(job.finished_at)),
        ("ran", ran),
        ("cost", "" if job.cost_usd is None else terminal.money(job.cost_usd)),
        *(_use(job.used) if job.used is not None else ()),
    ]


def _use(used: JobCost) -> list[tuple[str, str]]:
    """How much of its time was worth it; `tpu cost JOB` has the parts."""
    from penstock.cli import cost

    told = {"goodput", "checkpoints", "save every"} if used.saves or used.losses else {"goodput"}
    return [(name, text) for name, text in cost.facts(used) if name in told]


ATTEMPTS = ("ATTEMPT", "ID", "STATE", "STAGE", "SLICES", "HOSTS", "STARTED", "RAN", "ENDED BY", "EVIDENCE")


def _attempt_row(number: int, attempt: AttemptView) -> tuple[str, ...]:
    ran = "-" if attempt.started_at is None else span((attempt.closed_at or now_s()) - attempt.started_at)
    code = "" if attempt.exit_code is None else f" (exit code {attempt.exit_code})"
    return (
        str(number),
        attempt.id,
        attempt.state,
        str(attempt.stage),
        safe(",".join(attempt.slices)),
        str(attempt.hosts),
        moment(attempt.started_at),
        ran,
        (attempt.cause or "-") + code,
        safe("; ".join((*attempt.evidence, attempt.then) if attempt.then else attempt.evidence)),
    )


@click.command()
@click.argument("job", type=JOB)
@click.option("--wait", is_flag=True, help="Wait until it has ended.")
@click.option(
    "-o", "--save", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Fetch its artifacts there."
)
@as_json
@click.pass_context
def result(context: click.Context, job: str, wait: bool, save: Path | None, as_json: bool) -> None:
    """Print the result of a job that has ended; exit as the job did.

    \b
    tpu result j01             the value of `result`, as JSON
    tpu result j01 -o out/     and the files it left
    """
    with talking() as client:
        view = client.get(job)
        if view.state not in follow.ENDED and not wait:
            raise Refused(f"{view.id} is {view.state}; there is no result yet; add --wait", NOT_AVAILABLE)
        outcome = client.wait(view.id)
        names = [artifact.name for artifact in client.artifacts(view.id)]
        if save is not None:
            for name in names:
                client.save_artifact(view.id, name, _place(save, name))
    if as_json:
        terminal.echo_json(outcome)
    else:
        if outcome.result is not None:
            terminal.echo_json(outcome.result)
            follow.echo_note(outcome)
        follow.echo_error(outcome)
        if outcome.state != "succeeded":
            terminal.note(follow.summary(outcome))
        if names and save is None:
            terminal.note(f"artifacts: {safe(', '.join(names))}; fetch them with `tpu result {outcome.id} -o DIR`")
    context.exit(follow.exit_code(outcome))


def _place(folder: Path, name: str) -> Path:
    """Where an artifact goes. Names come from the job: one that leads out of the folder is refused."""
    place = folder.joinpath(*name.split("/"))
    if Path(name).is_absolute() or any(part in ("", ".", "..") or "\0" in part for part in name.split("/")):
        raise click.ClickException(f"artifact {name!r} would be written outside {folder}; it was not fetched")
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


@click.command()
@click.argument("job", type=JOB)
@as_json
def why(job: str, as_json: bool) -> None:
    """Say why a job is not running, and what would help.

    \b
    tpu why j01m7
    """
    with talking() as client:
        answer = client.why(job)
    if as_json:
        terminal.echo_json(answer)
        return
    click.echo(f"{answer.id} ({terminal.state(answer.state)}): {safe(answer.sentence)}")
    if answer.place is not None:
        click.echo(f"place {answer.place} in its queue")
    for line in answer.details:
        click.echo(f"  {safe(line)}")
    if answer.advice:
        click.echo(f"what helps: {safe(answer.advice)}")


@click.command()
@click.argument("job", type=JOB, required=False)
@click.option("-f", "--follow", "live", is_flag=True, help="Go on as they happen.")
@click.option("--after", type=click.IntRange(0), default=0, metavar="SEQ", help="Only those after this number.")
@event_filters
@as_json
def events(
    *,
    job: str | None,
    live: bool,
    after: int,
    user: str | None,
    state: str | None,
    tag: str | None,
    since: float | None,
    as_json: bool,
) -> None:
    """List what happened: to one job, or to everything of your team. One line each; --json gives JSON lines.

    \b
    tpu events j01                     one job, from its first to its last
    tpu events --since 1h              everything of the last hour
    tpu events -f --tag sweep          as it happens, of jobs with a tag
    tpu events --state failed --since 1d
    """
    if job is not None and (user, state, tag) != (None, None, None):
        raise click.UsageError("--user, --state and --tag choose among jobs; with one job named, leave them out")
    filters: EventFilters = {"since": None if since is None else now_s() - since}
    if job is None:
        filters |= {"user": user, "tag": tag, "state": None if state is None else STATE_WORDS.get(state, state)}
    begin = after or (None if live and job is None else 0)
    with talking() as client:
        try:
            for event in client.events(job, follow=live, after=begin, **filters):
                if as_json:
                    terminal.echo_json_line(event)
                else:
                    click.echo(event_line(event))
        except KeyboardInterrupt:
            raise click.exceptions.Exit(follow.INTERRUPTED) from None


def event_line(event: EventView) -> str:
    line = f"{event.seq:>7}  {moment(event.at)}  {event.kind:<22} {event.id}  {event_facts(event.body)}"
    return line.rstrip()


def event_facts(body: Mapping[str, object]) -> str:
    """What an event says beside its kind and subject."""
    return " ".join(f"{name}={safe(str(value))}" for name, value in body.items() if value not in (None, "", []))
