"""`tpu extract`: a model's activations over a dataset, by any number of workers; and the workers themselves.

The group without a command makes the plan and, with `--on` or `--workers`, one job with replicas on Penstock; with
`--here` it starts workers on this machine. Everything else asks or mends a run by its address, and needs the bucket
only. It decides what the words mean; `wiring.extraction` does the work. Nothing of it is imported before it is needed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from penstock.cli import extract_cost, extract_view, terminal
from penstock.cli.extract_options import PlanOptions, plan_options
from penstock.cli.submit import JobOptions, job_options, job_request
from penstock.cli.talk import Refused, talking
from penstock.cli.words import SPAN, Copies, as_json

if TYPE_CHECKING:
    from penstock.wire.api import CommandRequest
    from penstock.wiring.extraction import Planned

#: A worker on another machine is a command there; on this one it is this very program.
WORKER = "from penstock.cli.main import main; main()"
CHECK_FAILED = 1
NOT_AVAILABLE = 3

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
@click.option(
    "--mesh", metavar="AXES", help="data=4,fsdp=1,tensor=2 of each worker; for --dry-run the memory it takes."
)
@click.option("--dry-run", is_flag=True, help="Say what would be done and what it takes; write nothing.")
@click.option("--python", default=sys.executable, metavar="PROGRAM", help="The hosts' Python, for --workers.")
@click.option("--setup", default="", metavar="COMMAND", help="Runs first on each host, for --workers.")
@as_json
@job_options
@click.pass_context
def extract(
    context: click.Context,
    *,
    options: PlanOptions,
    out: str | None,
    workers: tuple[int, int] | None,
    here: int | None,
    mesh: str | None,
    dry_run: bool,
    python: str,
    setup: str,
    as_json: bool,
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
    on_this_machine = workers is not None and not (out or "").startswith(("gs://", "s3://"))
    if on_this_machine and not dry_run:
        _refuse_elsewhere(context, out or "", here)
    with told():
        from penstock.wiring.extraction import make_run, memory_of

        planned = extract_view.planned(options, out)
        memory = memory_of(planned, mesh)  # refuses a mesh that cannot be before anything is written
        if dry_run:
            extract_view.echo_plan(planned, options, mesh, memory, as_json)
            return
        address = make_run(planned.plan, out or "")
    _say_run(planned, address, as_json)
    if workers is not None and on_this_machine:
        here = max(1, min(max(workers[0], os.cpu_count() or 1), workers[1], len(planned.plan.units)))
        terminal.note(f"{terminal.many(here, 'worker')} on this machine, which alone sees {out}")
    elif workers is not None:
        from penstock.wire.api import CommandRequest

        _submit(planned, workers, CommandRequest(_worker(python, address, mesh), setup=setup), job)
        _warn_of_own_files(planned)
        terminal.note(f"`tpu extract watch --run {address}` shows the workers")
    if here is not None:
        context.exit(_run_here(address, here, mesh))


def _refuse_elsewhere(context: click.Context, out: str, here: int | None) -> None:
    """A job may write to its own folders and to buckets only, so workers on a directory are processes of this user."""
    if here is not None:
        raise click.UsageError(f"--here and --workers both run workers on this machine for {out!r}; give one of them")
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if given and parameter.name in (*JobOptions.__struct_fields__, "python", "setup"):
            raise click.UsageError(
                f"--out: {out!r} is a directory, and {parameter.opts[-1]} is for a job, whose hosts do not see it; "
                f"give gs:// or s3://, or leave {parameter.opts[-1]} out to run the workers on this machine"
            )


# How many replicas there are is said by --workers here.
next(
    option for option in extract.params if isinstance(option, click.Option) and option.name == "replicas"
).hidden = True


def _warn_of_own_files(planned: Planned) -> None:
    """Slices of this machine can read its files, others cannot, and which ones a job gets is not known yet."""
    work = planned.plan.work
    places = {"model": [work["model"]], "data": [file["address"] for file in work["source"]["files"]]}
    own = [f"the {what}" for what, addresses in places.items() if any("://" not in each for each in addresses)]
    if own:
        terminal.note(f"the hosts must see {' and '.join(own)}, which lie on this machine; gs:// or s3:// always works")


def _say_run(planned: Planned, address: str, as_json: bool) -> None:
    if as_json:
        terminal.echo_json({"run": planned.plan.run, "address": address, "units": len(planned.plan.units)})
        return
    click.echo(address)
    terminal.note(f"{planned.plan.rows} rows in {len(planned.plan.units)} units; tpu extract status --run {address}")


def _worker(python: str, address: str, mesh: str | None) -> tuple[str, ...]:
    own = () if mesh is None else ("--mesh", mesh)
    return (python, "-c", WORKER, "extract", "worker", "--run", address, *own)


def _submit(planned: Planned, workers: tuple[int, int], command: CommandRequest, job: JobOptions) -> None:
    """One job whose replicas are the workers: each has its own fence and costs its units only when it is lost."""
    from penstock.cli.targets import resolve

    most = min(workers[1], len(planned.plan.units))
    job.replicas = (min(workers[0], most), most)
    job.name = job.name or f"extract {planned.plan.run[:8]}"
    job.tag = (*job.tag, extract_cost.tag_of(planned.plan.run))
    with talking(start=True) as client:
        accepted = client.submit(job_request(command, job, resolve(job.on or "", client)))
    terminal.note(f"job {accepted.id}: up to {most} workers")


def _run_here(address: str, count: int, mesh: str | None) -> int:
    argv = _worker(sys.executable, address, mesh)
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(argv)) for _ in range(count)]
        try:
            codes = [process.wait() for process in started]
        except KeyboardInterrupt:
            for process in started:
                process.terminate()
            raise
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


@extract.command()
@_RUN
@click.option("--lease", type=SPAN, default="90s", show_default=True, help="Without a sign for so long: taken over.")
@click.option("--rows", type=click.IntRange(1), metavar="N", help="Packed rows of one step; as the device likes.")
@click.option("--processes", type=click.IntRange(0), default=0, metavar="N", help="That tokenise ahead of the device.")
@click.option("--mesh", metavar="AXES", help="data=4,fsdp=1,tensor=2; rows over all devices of this host if left out.")
@click.option("--read-back", is_flag=True, help="Read each object again before it is committed.")
@click.option("--one-unit", is_flag=True, help="Begin a unit when the last is committed: a loss costs one at most.")
@click.option("--no-sync", is_flag=True, help="In a directory: commit before vectors are on the disk (scratch disks).")
@click.option("--cache", metavar="DIR", help="Keep compiled programs here.")
def worker(
    *,
    address: str,
    lease: float,
    rows: int | None,
    processes: int,
    mesh: str | None,
    read_back: bool,
    one_unit: bool,
    no_sync: bool,
    cache: str | None,
) -> None:
    """Work on a run until no unit is open.

    It needs the bucket and nothing else, may be killed at any moment, and ends with 0 when the run is done.
    """
    from penstock.wiring.extraction import work

    with told():
        code = work(
            address,
            lease_s=lease,
            rows=rows,
            processes=processes,
            mesh=mesh,
            read_back=read_back,
            one_unit=one_unit,
            synced=not no_sync,
            cache=cache,
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
@as_json
def verify(address: str, as_json: bool) -> None:
    """Read and hash everything again: each row once, nothing missing, nothing changed. Exit 1 if not."""
    from penstock.wiring import extraction

    with told():
        checked = extraction.check_run(address)
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
