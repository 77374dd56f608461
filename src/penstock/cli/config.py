"""`tpu config show`: every setting, its value, and where that came from. It reads; it changes nothing."""

from __future__ import annotations

import math
import os
from pathlib import Path

import click

from penstock.cli import terminal
from penstock.cli.words import as_json


@click.group()
def config() -> None:
    """Settings of the server and of this client."""


@config.command()
@as_json
def show(as_json: bool) -> None:
    """Show what holds and who said so: a flag, a variable, a file, or nobody.

    Files: penstock.toml above the working directory, then the one in ~/.penstock (or $PENSTOCK_HOME).
    [server] is for `tpu serve`; [retention] says how long things are kept (logs, results, checkpoints, jobs,
    unused, every: 30d, 12h, never), [tpu_vm] which cloud project slices come from, [regions] the roots of
    regions that have their own; these three and [client] (url, token, token_file) only count in ~/.penstock.
    """
    from penstock.client import ApiError
    from penstock.client.settings import find
    from penstock.domain.admission import BadInput
    from penstock.wiring.settings import load, load_cloud, load_regions, load_retention, shown

    try:
        home, values = load(os.environ, directory=Path.cwd())
        policy = load_retention(os.environ)
        cloud = load_cloud(os.environ)
        regions = load_regions(os.environ)
        client = find()
    except BadInput as error:
        raise click.UsageError(str(error)) from error
    except ApiError as error:
        raise click.UsageError(str(error)) from error
    home_from = "PENSTOCK_HOME" if os.environ.get("PENSTOCK_HOME") else "default"
    rows: list[tuple[str, object, str]] = [("home", str(home), home_from)]
    if client is not None:
        # That there is a token may be shown, the token never.
        rows.append(("client.url", client.url, client.url_from))
        rows.append(("client.token", "(set)" if client.token else "(none)", client.token_from))
    else:
        rows.append(("client.url", None, "no server is configured and none runs here"))
    for name, (value, source) in values.items():
        rows.append((f"server.{name}", shown(value) if isinstance(value, str) else value, source))
    for name, (value, source) in policy.items():
        assert isinstance(value, float)
        rows.append((f"retention.{name}", _age(value, as_json), source))
    for name, (value, source) in cloud.items():
        rows.append((f"tpu_vm.{name}", value, source))
    for name, (value, source) in regions.items():
        rows.append((f"regions.{name}", value, source))
    if as_json:
        terminal.echo_json([{"name": name, "value": value, "from": source} for name, value, source in rows])
    else:
        plain = [(name, terminal.safe(_plain(value)), terminal.safe(source)) for name, value, source in rows]
        terminal.echo_table(("SETTING", "VALUE", "FROM"), plain)


def _age(seconds: float, as_json: bool) -> object:
    """A number of seconds for programs, words for people."""
    if math.isinf(seconds):
        return "never"
    return seconds if as_json else terminal.span(seconds)


def _plain(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return ",".join(str(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
