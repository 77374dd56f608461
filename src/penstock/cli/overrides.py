"""Turns `train.py lr=0.01 …` into the command that runs: aliases expanded, in the style the project chose.

`tpu run` calls `build`. Pure but for reading `[run]` of the project's `penstock.toml`. Only words of the form key=value
after a Python file are changed; what follows `--` is the user's own command and stays as it is, letter for letter.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from penstock.cli.preferences import Preferences, Style

PROJECT_FILE = "penstock.toml"
_KEY = re.compile(r"[A-Za-z_][\w.\-/@+]*")
_STAGE = "config.stage"


class Project(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[run]` of `penstock.toml` in the working directory: what holds for everybody who runs this project."""

    style: Style | None = None
    aliases: dict[str, str] = {}
    setup: str = ""


class _File(msgspec.Struct, frozen=True):
    run: Project = Project()


class Line(NamedTuple):
    """A command, and what it needs in its environment."""

    argv: tuple[str, ...]
    env: dict[str, str]


def read_project(directory: Path) -> Project:
    """The project's choices; none when it has no file."""
    file = directory / PROJECT_FILE
    try:
        return msgspec.convert(tomllib.loads(file.read_text("utf-8")), _File).run
    except FileNotFoundError:
        return Project()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise click.UsageError(f"{file}: {error}; [run] takes style, aliases and setup") from error


def build(
    words: Sequence[str],
    *,
    style: Style,
    aliases: Mapping[str, str],
    own_command: bool,
    log_stage: bool = False,
) -> Line:
    """The command for `words`; `own_command` when they stood after `--`."""
    if own_command:
        argv: list[str] = list(words)
        env: dict[str, str] = {}
    else:
        script, *rest = words
        if not script.endswith(".py"):
            raise click.UsageError(
                f"{script!r} is no Python file; other commands stand after --: tpu run -- {script} …"
            )
        # -u: a line must leave the program when it is printed, not when 8 kB of them have come together.
        argv, env = ["python", "-u", script], {}
        for word in rest:
            _add(word, style, aliases, argv, env)
    if log_stage:
        argv = _with_stage(argv, style)
    return Line(tuple(argv), env)


def _add(word: str, style: Style, aliases: Mapping[str, str], argv: list[str], env: dict[str, str]) -> None:
    key, equals, value = word.partition("=")
    if not equals or _KEY.fullmatch(key) is None:
        argv.append(word)
        return
    full = aliases.get(key, key)
    if style == "flag":
        argv.append(f"--{full}={value}")
    elif style == "hydra":
        argv.append(f"{full}={value}")
    else:
        env[_variable(full)] = value


def _variable(name: str) -> str:
    """config.training.learning_rate -> CONFIG_TRAINING_LEARNING_RATE"""
    return re.sub(r"\W", "_", name, flags=re.ASCII).upper()


def _with_stage(argv: Sequence[str], style: Style) -> list[str]:
    """The stage is known only when an attempt starts, on its host: a shell there puts it in."""
    if style == "env":
        script = f'{_variable(_STAGE)}="$PENSTOCK_STAGE" exec "$@"'
    else:
        dashes = "--" if style == "flag" else ""
        script = f'exec "$@" {dashes}{_STAGE}="$PENSTOCK_STAGE"'
    return ["sh", "-c", script, "sh", *argv]


def chosen_style(option: str | None, project: Project, preferences: Preferences) -> Style:
    """The option, else the project's choice, else the user's."""
    if option is not None:
        chosen: Style = msgspec.convert(option, Style)
        return chosen
    return project.style or preferences.settings.style
