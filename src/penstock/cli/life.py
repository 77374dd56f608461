"""Changing jobs: `tpu cancel`, `kill`, `resume`, `rerun`, `tag`.

Each asks the server and tells its answer; what may be done to a job in which state is decided there. Several jobs may
be named at once: one that is refused does not keep the others from being asked, and the exit code tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli import follow, terminal
from penstock.cli.talk import Refused, talking
from penstock.cli.words import JOB, as_json

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.wire.api import CancelReply


@click.command()
@click.argument("jobs", nargs=-1, required=True, type=JOB, metavar="JOB…")
@as_json
def cancel(jobs: tuple[str, ...], as_json: bool) -> None:
    """Stop jobs: SIGTERM, 30 s, then SIGKILL of everything they started. Comes back at once."""
    with talking() as client:
        _cancel(client, jobs, as_json)


@click.command()
@click.argument("jobs", nargs=-1, required=True, type=JOB, metavar="JOB…")
@as_json
def kill(jobs: tuple[str, ...], as_json: bool) -> None:
    """Stop jobs as `cancel` does, and come back when they have ended."""
    with talking() as client:
        for reply in _cancel(client, jobs, as_json):
            outcome = client.wait(reply.id)
            if not as_json:
                terminal.note(follow.summary(outcome))


def _cancel(client: Client, jobs: tuple[str, ...], as_json: bool) -> list[CancelReply]:
    from penstock.client.errors import ApiError

    replies: list[CancelReply] = []
    refusal: ApiError | None = None
    for id in jobs:
        try:
            replies.append(client.cancel(id))
        except ApiError as error:
            if len(jobs) == 1:
                raise
            terminal.note(f"tpu: {id}: {error}")
            refusal = error
            continue
        if not as_json:
            click.echo(f"{replies[-1].id} {replies[-1].answer}")
    if as_json:
        terminal.echo_json(replies)
    if refusal is not None:
        raise Refused(f"{len(jobs) - len(replies)} of {len(jobs)} were refused", refusal.exit_code)
    return replies


def _again(context: click.Context, verb: str, job: str, on: str | None, wait: bool, as_json: bool) -> None:
    with talking(stay=wait) as client:
        target: tuple[str, ...] = ()
        if on is not None:
            from penstock.cli.targets import resolve

            found = resolve(on, client)
            if not found.on:
                raise click.BadParameter(f"{on!r} is a pool or slice; name accelerators", param_hint="--on")
            target = found.on
        ask = client.resume if verb == "resume" else client.rerun
        accepted = ask(job, on=target)
        if not wait:
            if as_json:
                terminal.echo_json(accepted)
            else:
                click.echo(accepted.id)
            return
        if not as_json:
            terminal.note(f"job {accepted.id}")
        outcome = follow.follow(client, accepted.id, silent=as_json, quiet_logs=as_json)
        kind = client.get(accepted.id).kind
    if as_json:
        terminal.echo_json(outcome)
    else:
        follow.echo_error(outcome, whole=kind == "snippet")
        terminal.note(follow.summary(outcome))
    context.exit(follow.exit_code(outcome))


_ON = click.option("--on", metavar="WHERE", help="Other accelerators than before: v5e-8, a list, a pattern.")
_WAIT = click.option("--wait", is_flag=True, help="Stay with the new job.")


@click.command()
@click.argument("job", type=JOB)
@_ON
@_WAIT
@as_json
@click.pass_context
def resume(context: click.Context, job: str, on: str | None, wait: bool, as_json: bool) -> None:
    """Go on with a job that has ended: same files, same checkpoints, one stage further. Prints the new job's id."""
    _again(context, "resume", job, on, wait, as_json)


@click.command()
@click.argument("job", type=JOB)
@_ON
@_WAIT
@as_json
@click.pass_context
def rerun(context: click.Context, job: str, on: str | None, wait: bool, as_json: bool) -> None:
    """Do a job again from nothing: same files, stage 0. Prints the new job's id."""
    _again(context, "rerun", job, on, wait, as_json)


@click.command()
@click.argument("job", type=JOB)
@click.argument("tags", nargs=-1, metavar="[TAG]…")
@click.option("--rm", "removed", multiple=True, metavar="TAG", help="Take this tag away; may be repeated.")
@as_json
def tag(job: str, tags: tuple[str, ...], removed: tuple[str, ...], as_json: bool) -> None:
    """Add tags to a job, or take some away; without either, print them."""
    with talking() as client:
        view = client.get(job)
        wanted = tuple(word for word in dict.fromkeys((*view.tags, *tags)) if word not in removed)
        if wanted != view.tags:
            view = client.edit(view.id, tags=wanted)
    if as_json:
        terminal.echo_json(view.tags)
    else:
        for word in view.tags:
            click.echo(terminal.safe(word))
