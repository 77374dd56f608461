"""What a user set up once: aliases of overrides, numbered working directories, and a few settings.

They live in `$PENSTOCK_HOME/settings.toml`, on this machine only; `tpu alias`, `tpu dir` and `tpu settings` change
them, `tpu run`, `exec` and `watch` read them. A file with an error is refused with its line, never overwritten. It must
not hold anything secret.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Literal

import click
import msgspec

DIRECTORIES_MAX = 100  #: numbered 1 to this, as the older tool had it

DEFAULT_ALIASES = {
    "lr": "config.training.learning_rate",
    "bs": "config.training.batch_size",
    "ep": "config.training.num_epochs",
    "wd": "config.training.weight_decay",
    "b1": "config.training.adam_b1",
    "b2": "config.training.adam_b2",
    "ckpt": "config.training.checkpoint_per_epoch",
}

Style = Literal["flag", "hydra", "env"]


class Choices(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`[settings]`: what a command does when its option is not given."""

    style: Style = "flag"  #: how overrides reach a program: --key=value, key=value, or the variable KEY
    on: str = ""  #: where jobs run unless --on says so; empty: the server's default
    wait: bool = True  #: whether `run` stays and shows logs
    refresh_s: float = 1.0  #: how often `watch` looks


#: One line each, for `tpu settings`.
MEANINGS = {
    "style": "how key=value reaches your program: flag (--key=value), hydra (key=value) or env (KEY=value)",
    "on": "where jobs run unless --on says so; empty: the server's default",
    "wait": "whether `tpu run` stays and shows logs",
    "refresh_s": "seconds between two looks of `tpu watch`",
}


class Preferences(msgspec.Struct, forbid_unknown_fields=True):
    settings: Choices = msgspec.field(default_factory=Choices)
    aliases: dict[str, str] = {}  #: an empty value takes a default alias away
    directories: dict[str, str] = {}

    @property
    def all_aliases(self) -> dict[str, str]:
        """The defaults and the user's own, which win."""
        return {name: full for name, full in {**DEFAULT_ALIASES, **self.aliases}.items() if full}


def path() -> Path:
    from penstock.client.settings import home

    return home() / "settings.toml"


def load() -> Preferences:
    """The user's preferences; the defaults when there is no file."""
    file = path()
    try:
        return msgspec.convert(tomllib.loads(file.read_text("utf-8")), Preferences)
    except FileNotFoundError:
        return Preferences()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise click.UsageError(f"{file}: {error}; mend the line or remove the file") from error


def save(preferences: Preferences) -> None:
    """Write the file as a whole: a reader sees the old one or the new one."""
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    sections = msgspec.to_builtins(preferences)
    lines = ["# Written by `tpu alias`, `tpu dir` and `tpu settings`; you may edit it too."]
    for section, values in sections.items():
        if values:
            lines += ["", f"[{section}]", *(f"{_text(key)} = {_value(value)}" for key, value in values.items())]
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text("\n".join(lines) + "\n", "utf-8")
    fresh.replace(file)


def directory(number: str) -> Path:
    """The working directory a number stands for."""
    found = load().directories.get(number)
    if found is None:
        raise click.UsageError(f"directory {number} is not set; go there and run: tpu dir set {number}")
    return Path(found)


def _value(value: str | bool | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _text(value) if isinstance(value, str) else repr(value)


def _text(text: str) -> str:
    """A TOML basic string. JSON's is one, but for DEL, which TOML wants escaped."""
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")
