"""`tpu serve` and `tpu down`: the server in the foreground, and the end of the one in the background.

Decides only what is said about it; settings are `wiring.settings`'s, the process is `wiring.serve`'s.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from penstock.cli import terminal

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.command()
@click.option("--store", metavar="PATH_OR_URL", help="SQLite file or postgresql:// address.")
@click.option("--root", metavar="PATH_OR_URL", help="Directory, gs:// or s3:// for snapshots, logs and results.")
@click.option("--host", metavar="ADDRESS", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, metavar="N", help="Port to listen on; 0: the last one, or any that is free.")
@click.option("--default-on", metavar="LIST", help="Where jobs run that do not say where, such as v5e-8,v5e-1.")
@click.option("--local-hosts", type=int, metavar="N", help="Hosts of local slices at once; 0: none.")
@click.option("--local-slices", type=int, metavar="N", help="Slices of a pool that is made for a job.")
@click.option("--drain-s", type=float, metavar="S", help="How long calls under way may take at the end.")
@click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
def serve(**flags: object) -> None:
    """Run the server here: API, controller and local slices in one process.

    \b
    tpu serve                  SQLite and a directory under ~/.penstock
    tpu serve --store postgresql:///penstock --root gs://bucket/penstock

    With PostgreSQL and a bucket several may run; one leads.

    Every option may also stand in penstock.toml under [server], or in a variable such as PENSTOCK_STORE;
    `tpu config show` says what holds. Ctrl-C stops it; running jobs go on and wait for the next one.
    """
    from penstock.domain.admission import BadInput
    from penstock.wiring.settings import load, load_cloud, load_regions, load_retention, server_settings, shown

    try:
        own = (load_retention(os.environ), load_cloud(os.environ), load_regions(os.environ))
        settings = server_settings(*load(os.environ, flags, Path.cwd()), *own)
    except BadInput as error:
        raise click.UsageError(str(error)) from error
    from penstock.wiring.serve import log_to_stderr, run

    log_to_stderr(settings.log_level)

    def ready(url: str) -> None:
        click.echo(f"{url}  (store {shown(settings.store)}, root {settings.root})")
        click.echo(f"token: {settings.home / 'token'}")
        if settings.host not in LOOPBACK:
            terminal.note("others can reach this address; put TLS in front of it, tokens travel in the clear")

    try:
        run(settings, ready)
    except BadInput as error:
        raise click.UsageError(str(error)) from error


@click.command()
@click.option(
    "--slices", is_flag=True, help="End local slices that are in use too; their jobs resume at the next start."
)
@click.option("--force", is_flag=True, help="Kill a server that does not end by itself.")
def down(slices: bool, force: bool) -> None:
    """Stop the server of this machine and its idle slices.

    Jobs that run go on without it; the next `tpu run` or `tpu serve` finds them again.
    """
    from penstock.wiring.embedded import stop_server

    stopped = stop_server(force=force, slices=slices)
    click.echo(f"stopped {stopped.url}" if stopped.url is not None else "no server ran here")
    if stopped.ended:
        click.echo(f"ended the processes of {stopped.ended} local {_slices(stopped.ended)}")
    if stopped.running:
        names = ", ".join(stopped.running)
        click.echo(f"{len(stopped.running)} {_slices(len(stopped.running))} in use keep running: {names}")
        terminal.note("end them too with `tpu down --slices`")


def _slices(count: int) -> str:
    return "slice" if count == 1 else "slices"
