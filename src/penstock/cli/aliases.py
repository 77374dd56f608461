"""`tpu alias`, `tpu settings` and `tpu dir`: what a user sets up once, on this machine.

The commands show and change `cli.preferences`; they contact no server. Each shows its list when it is called without a
subcommand.
"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from penstock.cli import preferences, terminal
from penstock.cli.preferences import DEFAULT_ALIASES, DIRECTORIES_MAX, MEANINGS, Choices
from penstock.cli.words import as_json

NUMBER = click.IntRange(1, DIRECTORIES_MAX)


@click.group(invoke_without_command=True)
@as_json
@click.pass_context
def alias(context: click.Context, as_json: bool) -> None:
    """Short names of overrides: `lr=0.01` means `config.training.learning_rate=0.01`.

    \b
    tpu alias                                        list them
    tpu alias set wu config.training.warmup_steps    add or change one
    tpu alias rm wu                                  take it away
    """
    if context.invoked_subcommand is not None:
        return
    known = preferences.load()
    if as_json:
        terminal.echo_json(known.all_aliases)
        return
    rows = [
        (name, full, "default" if name not in known.aliases else "yours")
        for name, full in sorted(known.all_aliases.items())
    ]
    terminal.echo_table(("ALIAS", "MEANS", "FROM"), rows)


@alias.command(name="set")
@click.argument("name")
@click.argument("full")
def set_alias(name: str, full: str) -> None:
    """Let NAME stand for FULL in `tpu run train.py NAME=…`."""
    for field, value in (("NAME", name), ("FULL", full)):
        if not value.strip() or "=" in value or not value.isprintable() or value.startswith("-"):
            raise click.UsageError(f"{field}: {value!r} cannot be the left side of key=value; use letters, digits, . _")
    known = preferences.load()
    known.aliases[name] = full
    preferences.save(known)


@alias.command(name="rm")
@click.argument("name")
def remove_alias(name: str) -> None:
    """Take the alias NAME away; a default one too."""
    known = preferences.load()
    if name not in known.all_aliases:
        raise click.UsageError(f"there is no alias {name!r}; `tpu alias` lists them")
    if name in DEFAULT_ALIASES:
        known.aliases[name] = ""
    else:
        del known.aliases[name]
    preferences.save(known)


@click.group(invoke_without_command=True)
@as_json
@click.pass_context
def settings(context: click.Context, as_json: bool) -> None:
    """What commands do when an option is not given.

    \b
    tpu settings                   list them
    tpu settings set style hydra   change one
    tpu settings reset [KEY]       back to the default: one, or all
    """
    if context.invoked_subcommand is not None:
        return
    chosen = msgspec.structs.asdict(preferences.load().settings)
    if as_json:
        terminal.echo_json(chosen)
        return
    default = msgspec.structs.asdict(Choices())
    rows = [
        (key, _shown(value), "" if value == default[key] else f"default {_shown(default[key])}", MEANINGS[key])
        for key, value in chosen.items()
    ]
    terminal.echo_table(("KEY", "VALUE", "", "MEANING"), rows)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "-" if value == "" else str(value)


@settings.command(name="set")
@click.argument("key")
@click.argument("value")
def set_setting(key: str, value: str) -> None:
    """Set KEY to VALUE."""
    known = preferences.load()
    chosen = msgspec.structs.asdict(known.settings)
    _check_key(key)
    try:
        # Not strict: values come as text, and "true" or "2.5" must become what the field is.
        known.settings = msgspec.convert({**chosen, key: value}, Choices, strict=False)
    except msgspec.ValidationError as error:
        rule = str(error).partition(" - at")[0]
        raise click.UsageError(f"{key}: {value!r} does not fit: {rule}; {MEANINGS[key]}") from error
    if not 0.1 <= known.settings.refresh_s <= 3600:
        raise click.UsageError(f"refresh_s: {value!r} is not between 0.1 and 3600")
    preferences.save(known)


@settings.command()
@click.argument("key", required=False)
def reset(key: str | None) -> None:
    """Back to the default: KEY, or every setting."""
    known = preferences.load()
    if key is None:
        known.settings = Choices()
    else:
        _check_key(key)
        setattr(known.settings, key, getattr(Choices(), key))
    preferences.save(known)


def _check_key(key: str) -> None:
    if key not in MEANINGS:
        raise click.UsageError(f"there is no setting {key!r}; choose from {', '.join(MEANINGS)}")


@click.group(name="dir", invoke_without_command=True)
@as_json
@click.pass_context
def directories(context: click.Context, as_json: bool) -> None:
    """Numbered working directories, for `tpu run --dir 2`.

    \b
    tpu dir                 list them
    tpu dir set 2 [PATH]    number 2 is PATH, or where you are
    tpu dir swap 1 2        tpu dir get 2        tpu dir rm 2
    """
    if context.invoked_subcommand is not None:
        return
    known = preferences.load().directories
    if as_json:
        terminal.echo_json(known)
    elif not known:
        click.echo("no directory has a number; `tpu dir set 1` gives one to where you are")
    else:
        rows = [
            (number, terminal.safe(place), "" if Path(place).is_dir() else "missing")
            for number, place in sorted(known.items(), key=lambda item: int(item[0]))
        ]
        terminal.echo_table(("NUMBER", "DIRECTORY", ""), rows)


@directories.command(name="set")
@click.argument("number", type=NUMBER)
@click.argument("path", default=".", type=click.Path(exists=True, file_okay=False, path_type=Path))
def set_directory(number: int, path: Path) -> None:
    """Let NUMBER stand for PATH (default: where you are)."""
    known = preferences.load()
    known.directories[str(number)] = str(path.resolve())
    preferences.save(known)


@directories.command(name="get")
@click.argument("number", type=NUMBER)
def get_directory(number: int) -> None:
    """Print the path of NUMBER, for `cd $(tpu dir get 2)`."""
    click.echo(str(preferences.directory(str(number))))


@directories.command()
@click.argument("first", type=NUMBER)
@click.argument("second", type=NUMBER)
def swap(first: int, second: int) -> None:
    """Let FIRST and SECOND change places."""
    known = preferences.load()
    here, there = preferences.directory(str(first)), preferences.directory(str(second))
    known.directories[str(first)], known.directories[str(second)] = str(there), str(here)
    preferences.save(known)


@directories.command(name="rm")
@click.argument("number", type=NUMBER)
def remove_directory(number: int) -> None:
    """Forget NUMBER; the directory itself stays."""
    known = preferences.load()
    if known.directories.pop(str(number), None) is None:
        raise click.UsageError(f"directory {number} is not set; `tpu dir` lists them")
    preferences.save(known)
