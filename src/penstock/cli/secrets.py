"""`tpu secret`: names on the command line, values never.

A value comes from standard input, a file or a prompt that does not show it: what stands on a command line is in the
shell's history and in the process table. The server keeps it; nothing here prints it or says how long it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from penstock.cli import terminal
from penstock.cli.talk import talking
from penstock.cli.words import as_json

VALUE_CHARACTERS_MAX = 65_536  #: as `wire.api.SecretRequest` takes it


@click.group()
def secret() -> None:
    """Values that jobs may see by name (`tpu run --secret NAME`).

    \b
    tpu secret set WANDB_API_KEY                 asks for the value
    tpu secret set WANDB_API_KEY < key.txt       reads it
    tpu secret set CREDENTIALS --file creds.json
    tpu secret ls                                names only
    """


@secret.command(name="set")
@click.argument("name")
@click.argument("value", nargs=-1, metavar="")
@click.option("--file", "file", metavar="FILE", help="Take the value from a file, as it is.")
def set_secret(name: str, value: tuple[str, ...], file: str | None) -> None:
    """Set the secret NAME. The value is read from standard input, or asked for."""
    if value:
        raise click.UsageError("a value on the command line is seen by everybody here; pipe it in, or use --file")
    text = _value(name, file)
    if not text:
        raise click.UsageError(f"the value of {name} is empty; nothing was set")
    if len(text) > VALUE_CHARACTERS_MAX:
        raise click.UsageError(f"the value of {name} is over {VALUE_CHARACTERS_MAX} characters; shorten it")
    with talking(start=True) as client:
        client.set_secret(name, text)
    terminal.note(f"{terminal.safe(name)} is set; jobs get it with --secret {terminal.safe(name)}")


def _value(name: str, file: str | None) -> str:
    if file is not None:
        with Path(file).open("rb") as stream:
            data = stream.read(4 * VALUE_CHARACTERS_MAX + 2)
    elif sys.stdin.isatty():
        return str(click.prompt(f"value of {terminal.safe(name)}", hide_input=True, err=True))
    else:
        # One newline at the end is the shell's, not the value's.
        data = sys.stdin.buffer.read(4 * VALUE_CHARACTERS_MAX + 2).removesuffix(b"\n").removesuffix(b"\r")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise click.UsageError(f"the value of {name} is not UTF-8 text; encode it first, for instance base64") from None


@secret.command(name="ls")
@as_json
def list_secrets(as_json: bool) -> None:
    """List the names; values are never shown."""
    with talking() as client:
        names = client.secrets()
    if as_json:
        terminal.echo_json(names)
    else:
        for name in names:
            click.echo(terminal.safe(name))


@secret.command(name="rm")
@click.argument("name")
def remove_secret(name: str) -> None:
    """Remove the secret NAME; running jobs keep what they have."""
    with talking() as client:
        client.delete_secret(name)
