"""Entry point of `tpu`: which commands exist, and what each kind of error means to the caller.

The shell calls `main`; tests call `run`. Commands are named in `COMMANDS` and imported only when they are
called, so `tpu --help` stays fast however many there are. `_verdict` is the one place that turns an error
into one line on stderr and an exit code; commands raise (click's errors for bad input) or call
`ctx.exit(code)`, they do not print errors themselves. This module must not import a command, nor any other
part of Penstock.
"""

import os
import sys
from collections.abc import Sequence
from enum import IntEnum
from importlib import import_module
from pathlib import PurePath
from typing import NamedTuple

import click
from typing_extensions import override

from penstock import __version__


class ExitCode(IntEnum):
    """What the shell sees. README.md explains these to users; the numbers never change meaning."""

    OK = 0
    CHECK_FAILED = 1
    BAD_INPUT = 2
    NOT_AVAILABLE = 3
    FAULT = 70
    INTERRUPTED = 130
    CLOSED_PIPE = 141


class LazyCommand(NamedTuple):
    """A command not loaded yet: where its click object is, its line and its section in `tpu --help`."""

    target: str
    help: str
    section: str


LOOK_UP = "Look up"
PROVE = "Prove"

COMMANDS: dict[str, LazyCommand] = {
    "catalog": LazyCommand(
        "penstock.cli.catalog:catalog", "Accelerators: names, topologies, hosts, zones, prices.", LOOK_UP
    ),
    "rules": LazyCommand("penstock.cli.rules:rules", "What each retry policy does for each cause of failure.", LOOK_UP),
    "classify": LazyCommand(
        "penstock.cli.classify:classify", "Say why a run failed, from its exit code, signal or log.", LOOK_UP
    ),
    "sim": LazyCommand("penstock.cli.sim:sim", "Run the real controller in a simulated world, with faults.", PROVE),
    "doctor": LazyCommand(
        "penstock.cli.doctor:doctor", "Check a store: schema, rows, counters, one live attempt per replica.", PROVE
    ),
}

# Which extra brings a module that the bare install does not have.
EXTRA_OF_MODULE = {"apsw": "server", "psycopg": "postgres"}

# Set to 1 to see the full trace of a fault instead of one line.
TRACEBACK_VARIABLE = "PENSTOCK_TRACEBACK"


class LazyGroup(click.Group):
    """A click group that lists `COMMANDS` without importing them."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module_name, _, attribute = entry.target.partition(":")
        command = getattr(import_module(module_name), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.target} is a {type(command).__name__}, not a click command")
        return command

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # Click would compare only with the commands it has loaded, which here are none.
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            raise click.exceptions.NoSuchCommand(name, possibilities=COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
            with formatter.section(section):
                formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items() if entry.section == section])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="penstock %(version)s")
def tpu() -> None:
    """Penstock feeds work to TPUs and never loses any of it."""


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _verdict(error: BaseException) -> tuple[int, str]:
    """The exit code of an error and the line that tells the user what happened and what to do."""
    match error:
        case click.UsageError():
            where = f" (see `{error.ctx.command_path} --help`)" if error.ctx else ""
            return ExitCode.BAD_INPUT, _one_line(error.format_message()) + where
        case click.FileError():
            return ExitCode.NOT_AVAILABLE, _one_line(error.format_message())
        case click.ClickException():
            return error.exit_code, _one_line(error.format_message())
        case click.Abort() | KeyboardInterrupt():
            return ExitCode.INTERRUPTED, "interrupted"
        case ModuleNotFoundError() if (missing := (error.name or "").partition(".")[0]) in EXTRA_OF_MODULE:
            extra = EXTRA_OF_MODULE[missing]
            return (
                ExitCode.NOT_AVAILABLE,
                f"this command needs {missing}; install it with: pip install 'penstock[{extra}]'",
            )
        case OSError(filename=str(name)):
            return ExitCode.NOT_AVAILABLE, f"{name}: {_one_line(error.strerror or str(error))}"
        case OSError():
            return ExitCode.NOT_AVAILABLE, _one_line(error.strerror or str(error))
        case _:
            what = f"{type(error).__name__}: {_one_line(str(error))}"
            return ExitCode.FAULT, f"a fault in Penstock: {what} (set {TRACEBACK_VARIABLE}=1 for the trace)"


def run(args: Sequence[str], program: str = "tpu") -> int:
    """Run one command line and return its exit code."""
    if f"_{program.upper()}_COMPLETE" in os.environ:
        tpu.main(list(args), prog_name=program)  # the shell asks for completions; click answers and exits
    try:
        # Not `tpu.main`: it turns a closed pipe into exit code 1, which here means that a check failed.
        with tpu.make_context(program, list(args)) as context:
            tpu.invoke(context)
        # Flush here, so that a closed pipe is met inside the try and not in the interpreter's shutdown.
        sys.stdout.flush()
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except BrokenPipeError:
        # The reader has had enough (`tpu catalog | head`): what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.CLOSED_PIPE
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return ExitCode.BAD_INPUT
    except (Exception, KeyboardInterrupt) as error:
        code, line = _verdict(error)
        if code == ExitCode.FAULT and os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        click.echo(f"{program}: {line}", err=True)
        return code
    return ExitCode.OK


def main() -> None:
    """The `tpu` and `penstock` scripts."""
    program = "penstock" if PurePath(sys.argv[0]).name.startswith("penstock") else "tpu"
    sys.exit(run(sys.argv[1:], program))
