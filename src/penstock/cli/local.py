"""`tpu local`: the slices of this machine, and how to take one away as a cloud would.

Asks the server like any other command; it kills nothing itself.
"""

from __future__ import annotations

import click

from penstock.cli import terminal
from penstock.cli.pools import chosen_slices
from penstock.cli.talk import talking
from penstock.cli.terminal import safe
from penstock.cli.words import SPAN, as_json, slice_filters


@click.group()
def local() -> None:
    """Slices on this machine.

    \b
    tpu local ls                                list them
    tpu local preempt s0abc                     take one away without a word
    tpu local preempt s0abc --notice 30s        with a notice
    """


@local.command(name="ls")
@slice_filters
@as_json
def list_local(*, user: str | None, state: str | None, tag: str | None, since: float | None, as_json: bool) -> None:
    """List local slices and what runs on them."""
    with talking() as client:
        found = [each for each in chosen_slices(client, user, state, tag, since) if each.provider == "local"]
    if as_json:
        terminal.echo_json(found)
    elif not found:
        click.echo("no local slices; they are made for jobs that need one")
    else:
        rows = [
            (
                each.id,
                each.accelerator,
                str(each.hosts),
                terminal.state(each.state),
                each.job or "-",
                safe(each.why) or "-",
            )
            for each in found
        ]
        terminal.echo_table(("SLICE", "ACCELERATOR", "HOSTS", "STATE", "JOB", "WHY"), rows, right=("HOSTS",))


@local.command()
@click.argument("slice")
@click.option("--notice", type=SPAN, default=0.0, metavar="TIME", help="Give notice this long before, such as 30s.")
def preempt(slice: str, notice: float) -> None:
    """Take the local SLICE away, to see what survives it."""
    with talking() as client:
        client.preempt(slice, notice_s=notice)
    if notice > 0:
        click.echo(f"{safe(slice)} was given notice and goes in {notice:g} s")
    else:
        click.echo(f"{safe(slice)} is gone")
