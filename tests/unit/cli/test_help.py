"""What `tpu COMMAND --help` says: it fits a terminal of eighty columns, and shows what one would type."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import click
import pytest

from penstock.cli.main import COMMANDS, OTHER_NAMES, run

COLUMNS = 80
#: Commands about capacity in a cloud; each shows an example.
CLOUDY = (
    "adopt", "cloud", "cost", "describe", "emulator", "find", "fleet", "monitor", "mount", "pools", "release",
    "reserve", "restart", "scp", "slices", "solve", "ssh", "why", "zones",
)  # fmt: skip


def found(name: str) -> click.Command:
    module, _, attribute = COMMANDS[name].target.partition(":")
    command = getattr(import_module(module), attribute)
    assert isinstance(command, click.Command)
    return command


def below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for word, each in command.commands.items():
            yield from below(f"{name} {word}", each)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_fits_eighty_columns(name: str) -> None:
    for title, command in below(name, found(name)):
        context = click.Context(command, info_name=f"tpu {title}", terminal_width=COLUMNS, max_content_width=COLUMNS)
        long = [line for line in command.get_help(context).splitlines() if len(line) > COLUMNS]
        assert long == [], f"tpu {title} --help"


@pytest.mark.parametrize("name", CLOUDY)
def test_help_has_an_example(name: str) -> None:
    for title, command in below(name, found(name)):
        lines = [line.strip() for line in (command.help or "").splitlines()]
        assert any(line.startswith("tpu ") for line in lines), f"tpu {title} --help shows nothing to type"


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_are_commands_too(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"Usage: tpu {name}" in said
    assert [line for line in said.splitlines() if len(line) > COLUMNS] == []


@pytest.mark.parametrize(
    ("name", "real"), [("apply", "pools create"), ("reapply", "restart"), ("check-status", "slices")]
)
def test_examples_are_written_with_the_name_that_was_called(
    name: str, real: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for words in (name.split(), real.split()):
        assert run([*words, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        shown[" ".join(words)] = [line.strip() for line in lines if line.startswith("  tpu ")]
    assert shown[name]
    assert all(line.startswith(f"tpu {name} ") for line in shown[name])
    assert len(shown[name]) == len(shown[real])
    assert not any(line.startswith(f"tpu {name}") for line in shown[real]), "the command itself is as it was"


def test_the_overview_names_every_command_and_other_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    first = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ") and line.strip()]
    assert {*COMMANDS, *OTHER_NAMES} <= set(first)
    assert "create" in COMMANDS["pools"].help
