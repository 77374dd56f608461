"""`tpu run`: freeze a directory, submit a command on it, stay with it until it has ended.

Decides only what the words on the command line mean; the snapshot is made by `client.upload`, the job by the server.
Standard output carries what the job writes, or JSON; everything Penstock says goes to standard error. The exit code is
the payload's own, or that of the cause (`wire.problems.JOB_EXIT_CODES`).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from typing_extensions import override

from penstock.cli import follow, many, overrides, preferences, terminal
from penstock.cli.submit import JobOptions, job_options, job_request
from penstock.cli.talk import talking
from penstock.cli.words import Array, Members, as_json

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.wire.api import JobRequest

INDEX_VARIABLE = "PENSTOCK_ARRAY_INDEX"
OWN_COMMAND = "penstock.cli.run.own_command"  #: key of the context's notes: the words stood after `--`


class RunCommand(click.Command):
    """Remembers whether the words stood after `--`, which click forgets."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        rest = super().parse_args(ctx, args)
        # Options end at the first word, so the words are the tail of what was given.
        words = ctx.params.get("words") or ()
        before = len(given) - len(words) - 1
        ctx.meta[OWN_COMMAND] = before >= 0 and given[before] == "--"
        return rest


@click.command(
    cls=RunCommand,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    epilog="Options stand before the program; what follows it belongs to the program.",
)
@click.argument("words", nargs=-1, required=True, metavar="FILE.py [KEY=VALUE]… | -- COMMAND…")
@click.option("--dir", "directory", metavar="DIR|N", help="The directory to freeze, or its number in `tpu dir`.")
@click.option("--no-snapshot", is_flag=True, help="Freeze nothing: the command needs no files of yours.")
@click.option("--setup", default="", metavar="COMMAND", help="Runs first on each host; kept by its hash.")
@click.option("--style", type=click.Choice(["flag", "hydra", "env"]), help="How KEY=VALUE reaches the program.")
@click.option("--log-stage", is_flag=True, help="Also pass config.stage=N, the number of resumes so far.")
@click.option("--array", type=Array(), metavar="A-B[%N]", help="One job per index; {index} in words is replaced.")
@click.option("--wait/--detach", default=None, help="Stay until it has ended (default), or leave at once.")
@click.option("--dry-run", is_flag=True, help="Print what would happen and what it would cost; submit nothing.")
@as_json
@job_options
@click.pass_context
def run(
    context: click.Context,
    *,
    words: tuple[str, ...],
    directory: str | None,
    no_snapshot: bool,
    setup: str,
    style: str | None,
    log_stage: bool,
    array: Members | None,
    wait: bool | None,
    dry_run: bool,
    as_json: bool,
    job: JobOptions,
) -> None:
    """Run a program on frozen files and stay with it.

    \b
    tpu run train.py lr=0.01 bs=256              aliases are expanded
    tpu run --on v5e-8 --dir 2 train.py          a numbered directory
    tpu run --on 'v5e-*,v4-8' --spot train.py    the first that can be had
    tpu run --array 0-9%3 train.py seed={index}  ten jobs, three at once
    tpu run --detach -- bash -c 'make && ./go'   any command, and do not stay

    Ctrl-C detaches: the job goes on, `tpu logs -f ID` returns to it.
    """
    known = preferences.load()
    place = _directory(directory, no_snapshot)
    project = overrides.read_project(place) if place is not None else overrides.Project()
    own_command = bool(context.meta[OWN_COMMAND])
    if not own_command:
        _check_words(context, words, place)
    line = overrides.build(
        words,
        style=overrides.chosen_style(style, project, known),
        aliases={**known.all_aliases, **project.aliases},
        own_command=own_command,
        log_stage=log_stage,
    )
    if not job.name:
        job.name = Path(words[0]).name
    wait = known.settings.wait if wait is None else wait
    with talking(start=not dry_run, stay=wait and not dry_run) as client:
        from penstock.cli.targets import resolve
        from penstock.wire.api import CommandRequest

        target = resolve(known.settings.on if job.on is None else job.on, client)
        payload = CommandRequest(line.argv, setup=setup or project.setup)
        request = job_request(payload, job, target, env=line.env)
        if dry_run:
            from penstock.cli.dry import echo_dry_run

            echo_dry_run(client, request, place, array, as_json)
            return
        if place is not None:
            request = _with_snapshot(client, place, request, as_json)
        if array is not None:
            _run_array(context, client, _members(request, array), array, wait, as_json)
        else:
            _run_one(context, client, request, wait, as_json)


def _directory(given: str | None, no_snapshot: bool) -> Path | None:
    """The directory to freeze. A whole home directory by accident would take hours and send everything you have."""
    if no_snapshot:
        if given is not None:
            raise click.UsageError("--dir with --no-snapshot: give one of them")
        return None
    if given is not None and given.isascii() and given.isdigit() and not Path(given).is_dir():
        place = preferences.directory(given)
    else:
        place = Path(given) if given is not None else Path.cwd()
    if not place.is_dir():
        raise click.UsageError(f"--dir: {str(place)!r} is no directory; give a path, or a number of `tpu dir`")
    place = place.resolve()
    if given is None and place in (Path(place.anchor), Path("~").expanduser()):
        raise click.UsageError(f"{place} as a whole is not what a job needs; give --dir DIR, or --no-snapshot")
    return place


def _check_words(context: click.Context, words: tuple[str, ...], place: Path | None) -> None:
    """Refuse here what would only fail there: a program that is not in the directory, an option behind the program.

    An option of ours after the program would silently become the program's: say both ways out.
    """
    if place is not None and words[0].endswith(".py") and not (place / words[0]).is_file():
        raise click.UsageError(f"{words[0]!r} is not in {str(place)!r}; check its name, or choose a directory by --dir")
    ours = {name for parameter in context.command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words[1:]:
        if word.startswith("--") and word.partition("=")[0] in ours:
            raise click.UsageError(
                f"{word} stands after {words[0]}; write it before, or, if it is for the program:"
                f" tpu run -- python {words[0]} {word} …"
            )


def _with_snapshot(client: Client, place: Path, request: JobRequest, quiet: bool) -> JobRequest:
    from penstock.client.upload import upload_directory
    from penstock.wire.api import CommandRequest

    status = terminal.StatusLine(silent=quiet)
    snapshot = upload_directory(client, place, progress=status.show, note=lambda line: status.say(terminal.safe(line)))
    status.clear()
    assert isinstance(request.payload, CommandRequest)
    return msgspec.structs.replace(request, payload=msgspec.structs.replace(request.payload, snapshot=snapshot))


def _run_one(context: click.Context, client: Client, request: JobRequest, wait: bool, as_json: bool) -> None:
    accepted = client.submit(request)
    if not wait:
        if as_json:
            terminal.echo_json(accepted)
        else:
            click.echo(accepted.id)
            terminal.note(f"submitted; `tpu logs -f {accepted.id}` shows it, `tpu show {accepted.id}` says how it is")
        return
    if not as_json:
        again = "" if accepted.created else " (taken in earlier, under the same key)"
        terminal.note(f"job {accepted.id}{again}")
    outcome = follow.follow(client, accepted.id, silent=as_json, quiet_logs=as_json)
    if as_json:
        terminal.echo_json(outcome)
    else:
        follow.echo_error(outcome, whole=False)
        terminal.note(follow.summary(outcome))
        if outcome.state == "failed":
            terminal.note(f"`tpu why {outcome.id}` and `tpu events {outcome.id}` say more")
    context.exit(follow.exit_code(outcome))


def _members(request: JobRequest, array: Members) -> list[JobRequest]:
    from penstock.wire.api import CommandRequest

    assert isinstance(request.payload, CommandRequest)
    given = request.idempotency_key
    # The same key again must be the same request: the array's name is part of it.
    stem = os.urandom(8).hex() if given is None else hashlib.sha256(given.encode()).hexdigest()[:16]
    members = []
    for index in array.indices:
        argv = tuple(word.replace("{index}", str(index)) for word in request.payload.argv)
        env = {key: value.replace("{index}", str(index)) for key, value in request.env.items()}
        members.append(
            msgspec.structs.replace(
                request,
                payload=msgspec.structs.replace(request.payload, argv=argv),
                env={**env, INDEX_VARIABLE: str(index)},
                name=f"{request.name}[{index}]",
                array=f"{stem}/{index}",
                at_most=array.at_once,
                idempotency_key=None if given is None else f"{given}/{index}",
            )
        )
    return members


def _run_array(
    context: click.Context, client: Client, requests: list[JobRequest], array: Members, wait: bool, as_json: bool
) -> None:
    status = terminal.StatusLine(silent=as_json)
    ids = many.submit_all(client, requests)
    if not wait:
        if as_json:
            terminal.echo_json(ids)
        else:
            for id in ids:
                click.echo(id)
        return
    codes: list[int] = []
    try:
        for index, outcome in zip(array.indices, many.wait_all(client, ids, status), strict=True):
            codes.append(follow.exit_code(outcome))
            if as_json:
                terminal.echo_json_line({"index": index, **msgspec.structs.asdict(outcome)})
            elif codes[-1]:
                status.say(f"[{index}] {follow.summary(outcome)}")
    except KeyboardInterrupt:
        raise many.detached(ids, "tpu ps") from None
    terminal.note(f"{codes.count(0)} of {len(codes)} succeeded")
    context.exit(next((code for code in codes if code), 0))
