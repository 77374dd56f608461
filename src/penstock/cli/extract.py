"""`tpu extract`: a model's activations over a dataset, by any number of workers; and the workers themselves.

The group without a command makes the plan and, with `--workers`, one job with replicas on Penstock; with `--here`, or
with `--workers` and a directory, it starts workers on this machine. An option for what is not made is refused.
Everything else asks or mends a run by its address, and needs the bucket only. It decides what the words mean;
`wiring.extraction` does the work. Nothing of it is imported before it is needed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from penstock.cli import extract_cost, extract_view, terminal
from penstock.cli.extract_options import PlanOptions, plan_options
from penstock.cli.extract_workers import Start, WorkerOptions, worker_options
from penstock.cli.submit import JobOptions, job_options
from penstock.cli.talk import Refused
from penstock.cli.words import SPAN, Copies, as_json

if TYPE_CHECKING:
    from penstock.wiring.extraction import Planned

CHECK_FAILED = 1
NOT_AVAILABLE = 3

_FOR_JOBS: Final = frozenset({*JobOptions.__struct_fields__, "python", "setup"})
_FOR_WORKERS: Final = frozenset(WorkerOptions.__struct_fields__)
_FOR_MEMORY: Final = frozenset({"on", "rows", "mesh"})

_RUN = click.option(
    "--run", "address", required=True, metavar="URL", help="The run: …/runs/ID, or a root with one run."
)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Errors of extraction as one line with the exit code that belongs to it."""
    from penstock.wiring.extraction import BadInput, Incomplete, ObjectsError

    try:
        yield
    except BadInput as error:
        raise click.UsageError(str(error)) from error
    except Incomplete as error:
        raise Refused(str(error), CHECK_FAILED) from error
    except ObjectsError as error:
        raise Refused(str(error), NOT_AVAILABLE) from error


@click.group(invoke_without_command=True)
@plan_options
@click.option("--out", metavar="URL", help="Where the run is kept: a directory, gs://BUCKET/PREFIX or s3://….")
@click.option(
    "--workers",
    type=Copies(),
    metavar="N|A-B",
    help="Run them as one Penstock job: so many at once. With a directory as --out: on this machine, as --here.",
)
@click.option("--here", type=click.IntRange(1), metavar="N", help="Run N workers on this machine, and stay.")
@click.option("--dry-run", is_flag=True, help="Say what would be done and what it takes; write nothing.")
@click.option("--python", default=sys.executable, metavar="PROGRAM", help="The hosts' Python, for --workers.")
@click.option("--setup", default="", metavar="COMMAND", help="Runs first on each host, for --workers.")
@as_json
@worker_options
@job_options
@click.pass_context
def extract(
    context: click.Context,
    *,
    options: PlanOptions,
    out: str | None,
    workers: tuple[int, int] | None,
    here: int | None,
    dry_run: bool,
    python: str,
    setup: str,
    as_json: bool,
    worker: WorkerOptions,
    job: JobOptions,
) -> None:
    """A model's activations over a dataset, each row exactly once, by workers that come and go.

    \b
    tpu extract --model DIR --data 'docs/*.jsonl' --sites resid_post:10,12 \\
      --out gs://b/acts --on v5e-8 --workers 1-32
    tpu extract --model DIR --data docs.jsonl --sites embed --out acts --here 2
    tpu extract worker --run URL    one more worker, under any launcher
    tpu extract status --run URL    how it goes

    MODEL is a Hugging Face directory, here or in a bucket, or the name of one on the Hub: Qwen/Qwen2.5-0.5B[@REVISION].
    Without --workers and --here only the plan is made: its address is printed, and workers may be started anywhere.
    The same model, data and rules give the same run again, so a stopped one goes on where it was.
    """
    if context.invoked_subcommand is not None:
        return
    for name, value in (("--model", options.model), ("--data", options.data), ("--sites", options.sites)):
        if not value:
            raise click.UsageError(f"{name} is missing; give it, or a command: tpu extract --help")
    if out is None and not dry_run:
        raise click.UsageError("--out is missing; say where the run is kept, or give --dry-run")
    _refuse_unused(context, workers, here, dry_run)
    with told():
        from penstock.wiring.extract_memory import memory_of
        from penstock.wiring.extraction import is_bucket, make_run

        on_this_machine = workers is not None and not is_bucket(out or "")
        if on_this_machine and not dry_run:
            _refuse_elsewhere(context, out or "", here)
        planned = extract_view.planned(options, out)
        # Refuses a mesh that cannot be before anything is written or bought. A host of `--on` shows as many devices
        # where it is emulated, so that it can be said of every capacity; workers on this machine are given no `--on`.
        memory = memory_of(planned, worker.mesh, job.on, worker.rows)
        if dry_run:
            extract_view.echo_plan(planned, options, worker.mesh, memory, as_json)
            return
        address = make_run(planned.plan, out or "")
    _say_run(planned, options, address, as_json)
    if workers is not None and on_this_machine:
        here = min(max(workers[0], os.cpu_count() or 1), workers[1])
    start = Start(planned, address, worker)
    with told():
        if workers is not None and not on_this_machine:
            start.as_job(workers, python, setup, job)
        if here is not None:
            context.exit(start.here(here))


def _refuse_elsewhere(context: click.Context, out: str, here: int | None) -> None:
    """A job may write to its own folders and to buckets only, so workers on a directory are processes of this user."""
    if here is not None:
        raise click.UsageError(f"--here and --workers both run workers on this machine for {out!r}; give one of them")
    for option in _given(context, _FOR_JOBS):
        raise click.UsageError(
            f"--out: {out!r} is a directory, and {option} is for a job, whose hosts do not see it; "
            f"give gs:// or s3://, or leave {option} out to run the workers on this machine"
        )


def _refuse_unused(context: click.Context, workers: tuple[int, int] | None, here: int | None, dry_run: bool) -> None:
    """Who says how a job or its workers shall be expects some; a dry run uses what memory depends on."""
    if workers is not None:
        return
    shown = _FOR_MEMORY if dry_run else frozenset()
    for option in _given(context, _FOR_JOBS - shown):
        raise click.UsageError(
            f"{option} is for a job, and without --workers there is none; give --workers, or leave {option} out"
        )
    if here is not None:
        return
    for option in _given(context, _FOR_WORKERS - shown):
        raise click.UsageError(
            f"{option} is for workers, and without --workers or --here none is started; give one of them, "
            f"or leave {option} out and give it to `tpu extract worker`"
        )


def _given(context: click.Context, names: frozenset[str]) -> Iterator[str]:
    """Those of the options that the user wrote."""
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in names and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            yield parameter.opts[-1]


# How many replicas there are is said by --workers here.
next(
    option for option in extract.params if isinstance(option, click.Option) and option.name == "replicas"
).hidden = True


def _say_run(planned: Planned, options: PlanOptions, address: str, as_json: bool) -> None:
    for line in (*extract_view.refusals(planned), *planned.notes):
        terminal.note(line)
    if as_json:
        terminal.echo_json({"run": planned.plan.run, "address": address, "units": len(planned.plan.units)})
        return
    click.echo(address)
    rows = f"{planned.plan.rows} rows{extract_view.total_of(options)}"
    terminal.note(f"{rows} in {len(planned.plan.units)} units; tpu extract status --run {address}")


@extract.command("worker")
@_RUN
@worker_options
def worker_command(address: str, worker: WorkerOptions) -> None:
    """Work on a run until no unit is open.

    It needs the bucket and nothing else, may be killed at any moment, and ends with 0 when the run is done.
    """
    from penstock.wiring.extraction import work

    with told():
        code = work(
            address,
            lease_s=worker.lease,
            rows=worker.rows,
            processes=worker.processes,
            mesh=worker.mesh,
            read_back=worker.read_back,
            one_unit=worker.one_unit,
            synced=not worker.no_sync,
            cache=worker.cache,
            say=terminal.note,
        )
    click.get_current_context().exit(code)


@extract.command()
@_RUN
@as_json
def status(address: str, as_json: bool) -> None:
    """How a run goes: workers, totals, rate, time left, cost."""
    from penstock.wiring import extraction

    with told():
        view = extraction.status(address)
    spent = extract_cost.spent_on(view.run)
    if as_json:
        terminal.echo_json(extract_view.status_json(view, spent))
    else:
        extract_view.echo_status(view, spent)


@extract.command()
@_RUN
@as_json
def refused(address: str, as_json: bool) -> None:
    """The input rows that gave nothing, as far as units are committed: file, line, id, reason. --json: a line each."""
    from penstock.wiring import extraction

    with told():
        found = extraction.refused(address)
    extract_view.echo_refused(found, as_json)


@extract.command()
@_RUN
@click.option("--every", type=SPAN, default="5s", show_default=True, help="Between two looks.")
def watch(address: str, every: float) -> None:
    """Keep the status on the screen until the run is sealed."""
    from penstock.wiring import extraction

    with told():
        for view in extraction.watch(address, every):
            if sys.stdout.isatty():
                click.clear()
            extract_view.echo_status(view, extract_cost.spent_on(view.run))


@extract.command()
@_RUN
@click.argument("unit")
@click.option("--force", is_flag=True, help="Also if it is committed and sound.")
def requeue(address: str, unit: str, force: bool) -> None:
    """Have UNIT made again: at once if a lease holds it up, anew if what was committed is damaged."""
    from penstock.wiring import extraction

    with told():
        click.echo(extraction.requeue(address, unit, force=force))


@extract.command()
@_RUN
def gc(address: str) -> None:
    """Remove what attempts left that lost, of units that are committed."""
    from penstock.wiring import extraction

    with told():
        click.echo(f"{extraction.collect_garbage(address)} objects removed")


@extract.command()
@_RUN
@click.option("--so-far", is_flag=True, help="Of a run that goes on: units without a commit are no problem.")
@as_json
def verify(address: str, so_far: bool, as_json: bool) -> None:
    """Read and hash everything again: each row once, nothing missing, nothing changed. Exit 1 if not."""
    from penstock.wiring import extraction

    with told():
        checked = extraction.check_run(address, so_far=so_far)
    if as_json:
        terminal.echo_json(checked)
    else:
        extract_view.echo_checked(checked)
    if checked.problems:
        click.get_current_context().exit(CHECK_FAILED)


@extract.command()
@_RUN
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="A page with a plot.")
@as_json
def stats(address: str, html: Path | None, as_json: bool) -> None:
    """Numbers of a run: sites, workers, and its rate over time."""
    from penstock.wiring import extraction

    with told():
        plan, done = extraction.finished_units(address)
    shown: Any = extract_view.stats(plan, done)
    if html is not None:
        html.write_text(extract_view.stats_page(plan, done))
        terminal.note(f"written to {html}")
    if as_json:
        terminal.echo_json(shown)
    elif html is None:
        extract_view.echo_stats(shown)


@extract.command()
@_RUN
@click.option("--site", required=True, metavar="SITE", help="As resid_post:12.")
@click.option("--to", "folder", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
@click.option("--context", type=click.IntRange(1), default=128, show_default=True, help="Rows of one example.")
@click.option("--column", metavar="NAME", help="What the hook is called; SITE if left out.")
def export(address: str, site: str, folder: Path, context: int, column: str | None) -> None:
    """One site as a Hugging Face dataset directory, as SAELens' cached activations are."""
    from penstock.wiring import extraction

    with told():
        done = extraction.export(address, site, folder, context=context, column=column or site)
    click.echo(
        f"{done.contexts} examples of {context} rows in {done.files} files; {done.left_over} rows fill no example"
    )


@extract.command("old-shard")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@as_json
def old_shard(files: tuple[Path, ...], as_json: bool) -> None:
    """What is in shard_*.pkl.gz files of the older tool; nothing in them is run."""
    from penstock.wiring import extraction

    with told():
        for path in files:
            samples = extraction.load_old_shard(path)
            extract_view.echo_old_shard(path, samples, as_json)
