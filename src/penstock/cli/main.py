"""Entry point of `tpu`: which commands exist, and what each kind of error means to the caller.

The shell calls `main`; tests call `run`. Commands are named in `COMMANDS` and imported only when they are
called, so `tpu --help` stays fast however many there are. `_verdict` is the one place that turns an error
into one line on stderr and an exit code; commands raise (click's errors for bad input) or call
`ctx.exit(code)`, they do not print errors themselves. This module must not import a command, nor any other
part of Penstock.
"""

import copy
import os
import re
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
    """What the shell sees of Penstock itself; the numbers never change meaning. README.md explains them to users.

    A refusal of the server has the code that `wire.problems` gives it, which is one of these. A job that was waited for
    has its own code, or that of its cause: docs/reference/cli.md.
    """

    OK = 0
    CHECK_FAILED = 1
    BAD_INPUT = 2
    NOT_AVAILABLE = 3
    NOT_ALLOWED = 4
    NOT_FOUND = 5
    CONFLICT = 6
    FAULT = 70
    INTERRUPTED = 130
    CLOSED_PIPE = 141


class LazyCommand(NamedTuple):
    """A command not loaded yet: where its click object is, its line and its section in `tpu --help`."""

    target: str
    help: str
    section: str


RUN = "Run"
EXTRACT = "Extract activations"
LOOK = "Look at jobs"
CHANGE = "Change jobs"
CAPACITY = "Capacity"
SERVER = "Server"
ONCE = "Set up once"
LOOK_UP = "Look up"
PROVE = "Prove"


COMMANDS: dict[str, LazyCommand] = {
    "run": LazyCommand("penstock.cli.run:run", "Freeze a directory, run a program on it, show its logs.", RUN),
    "exec": LazyCommand("penstock.cli.execute:execute", "Run a snippet of Python and print its result.", RUN),
    "extract": LazyCommand("penstock.cli.extract:extract", "A model's activations over a dataset, each once.", EXTRACT),
    "dataset": LazyCommand("penstock.cli.dataset:dataset", "Data for extraction: inspect, split, grids.", EXTRACT),
    "ps": LazyCommand("penstock.cli.jobs:ps", "List jobs.", LOOK),
    "watch": LazyCommand("penstock.cli.watch:watch", "Keep the list of jobs on the screen.", LOOK),
    "monitor": LazyCommand("penstock.cli.monitor:monitor", "Everything on one screen, live: slices, jobs, logs.", LOOK),
    "show": LazyCommand("penstock.cli.jobs:show", "One job: how it stands, its attempts, what went wrong.", LOOK),
    "logs": LazyCommand("penstock.cli.logs:logs", "What a job wrote, now or as it comes.", LOOK),
    "result": LazyCommand("penstock.cli.jobs:result", "The result and the artifacts of a job.", LOOK),
    "why": LazyCommand("penstock.cli.jobs:why", "Why a job is not running, and what would help.", LOOK),
    "events": LazyCommand("penstock.cli.jobs:events", "What happened to a job, or to all.", LOOK),
    "cancel": LazyCommand("penstock.cli.life:cancel", "Stop jobs.", CHANGE),
    "kill": LazyCommand("penstock.cli.life:kill", "Stop jobs and wait until they have ended.", CHANGE),
    "resume": LazyCommand("penstock.cli.life:resume", "Go on with an ended job from its last checkpoint.", CHANGE),
    "rerun": LazyCommand("penstock.cli.life:rerun", "Do a job again from nothing.", CHANGE),
    "tag": LazyCommand("penstock.cli.life:tag", "Add tags to a job, or take them away.", CHANGE),
    "clean": LazyCommand("penstock.cli.clean:clean", "Remove what jobs left that ended long ago.", CHANGE),
    "slices": LazyCommand("penstock.cli.pools:slices", "What capacity there is, who uses it, what is free.", CAPACITY),
    "pools": LazyCommand("penstock.cli.pools:pools", "Where slices come from: list, create, set, rm.", CAPACITY),
    "find": LazyCommand("penstock.cli.inventory:find", "Slices of a kind: free, or whose and until when.", CAPACITY),
    "reserve": LazyCommand("penstock.cli.inventory:reserve", "Keep a slice or a pool for your own jobs.", CAPACITY),
    "release": LazyCommand("penstock.cli.inventory:release", "Give back what you reserved.", CAPACITY),
    "cost": LazyCommand("penstock.cli.cost:cost", "Where chip-time and money went; how often to save.", CAPACITY),
    "queues": LazyCommand("penstock.cli.pools:queues", "Where jobs wait and how teams share: list, set, rm.", CAPACITY),
    "solve": LazyCommand("penstock.cli.solve:solve", "What is wrong with the hosts of a slice; mend it.", CAPACITY),
    "fleet": LazyCommand("penstock.cli.fleet:fleet", "So many slices in each zone, kept whole.", CAPACITY),
    "zones": LazyCommand("penstock.cli.zones:zones", "Where slices can be had: odds, times, prices.", CAPACITY),
    "describe": LazyCommand("penstock.cli.one_slice:describe", "All that is known of one slice.", CAPACITY),
    "restart": LazyCommand("penstock.cli.one_slice:restart", "Put another slice in the place of one.", CAPACITY),
    "adopt": LazyCommand("penstock.cli.adopt:adopt", "Take over a TPU VM that exists.", CAPACITY),
    "ssh": LazyCommand("penstock.cli.ssh:ssh", "Enter a host, or run a command on all hosts of a slice.", CAPACITY),
    "scp": LazyCommand("penstock.cli.ssh:scp", "Copy files to all hosts of a slice, or from one.", CAPACITY),
    "mount": LazyCommand("penstock.cli.mount:mount", "Mount something on all hosts of a pool.", CAPACITY),
    "local": LazyCommand("penstock.cli.local:local", "Slices of this machine: ls, preempt.", CAPACITY),
    "serve": LazyCommand("penstock.cli.serve:serve", "Run the server: API, controller and local slices.", SERVER),
    "bridge": LazyCommand("penstock.cli.bridge:bridge", "Firestore documents in, results out: firestore.", SERVER),
    "down": LazyCommand("penstock.cli.serve:down", "Stop the server of this machine.", SERVER),
    "config": LazyCommand("penstock.cli.config:config", "What is set, and where each value came from.", SERVER),
    "alias": LazyCommand("penstock.cli.aliases:alias", "Short names of overrides: lr=0.01.", ONCE),
    "dir": LazyCommand("penstock.cli.aliases:directories", "Numbered working directories.", ONCE),
    "settings": LazyCommand("penstock.cli.aliases:settings", "What commands do when an option is not given.", ONCE),
    "secret": LazyCommand("penstock.cli.secrets:secret", "Values that jobs see by name: set, ls, rm.", ONCE),
    "completion": LazyCommand("penstock.cli.completion:completion", "Completion for bash, zsh or fish.", ONCE),
    "tldr": LazyCommand("penstock.cli.tldr:tldr", "Everything for a working day, on one screen.", LOOK_UP),
    "catalog": LazyCommand(
        "penstock.cli.catalog:catalog", "Accelerators: names, topologies, hosts, zones, prices.", LOOK_UP
    ),
    "rules": LazyCommand("penstock.cli.rules:rules", "What each retry policy does for each cause of failure.", LOOK_UP),
    "classify": LazyCommand(
        "penstock.cli.classify:classify", "Say why a run failed, from its exit code, signal or log.", LOOK_UP
    ),
    "sim": LazyCommand("penstock.cli.sim:sim", "Run the real controller in a simulated world, with faults.", PROVE),
    "emulator": LazyCommand(
        "penstock.cli.emulator:emulator", "A cloud on this machine: Cloud TPU and Storage APIs.", PROVE
    ),
    "cloud": LazyCommand("penstock.cli.cloud:cloud", "A real project: selftest compares it with what is known.", PROVE),
    "doctor": LazyCommand(
        "penstock.cli.doctor:doctor", "Which walls stand around jobs here; whether a store is sound.", PROVE
    ),
}


class OtherName(NamedTuple):
    """Another word for a command: which one, its line in `tpu --help`, and how the command's own examples begin."""

    target: str
    help: str
    examples: tuple[str, ...] = ()


# One of a kind, as people say it when they make one; and words of the older tool for what is the same.
OTHER_NAMES = {
    "pool": OtherName("pools", "The same as pools: pool create NAME."),
    "fleets": OtherName("fleet", "The same as fleet."),
    "apply": OtherName("pools create", "The same as pools create.", ("pools set", "pool create")),
    "reapply": OtherName("restart", "The same as restart.", ("restart",)),
    "check-status": OtherName("slices", "The same as slices.", ("slices",)),
}

# What the older `tpu` tool called it; docs/howto/from-tpu-manager.md has the whole table.
FORMER_NAMES = {
    "add-tag": "tag",
    "check": "ps",
    "check-rules": "rules",
    "clear-all": "ps --state live",
    "del-config-alias": "alias rm",
    "del-dir": "dir rm",
    "delete": "pools rm",
    "dequeue": "cancel",
    "get-settings": "settings",
    "kill-job": "kill",
    "lian": "ssh",
    "ls": "dir",
    "mount-disk": "mount",
    "queue": "run --detach",
    "rel": "release",
    "reset-settings": "settings reset",
    "set-cur": "dir set",
    "set-dir": "dir set",
    "set-settings": "settings set",
    "swap-dir": "dir swap",
    "vq": "ps --state queued",
    "zhan": "reserve",
}

# Which extra brings a module that the bare install does not have.
EXTRA_OF_MODULE = {
    "apsw": "server",
    "starlette": "server",
    "uvicorn": "server",
    "uvloop": "server",
    "httptools": "server",
    "psycopg": "postgres",
    "google": "firestore",
    "grpc": "firestore",
    "textual": "tui",
    "jax": "extract",
    "ml_dtypes": "extract",
    "numpy": "extract",
    "pyarrow": "extract",
    "tokenizers": "extract",
    "jinja2": "extract",
}

# Set to 1 to see the full trace of a fault instead of one line.
TRACEBACK_VARIABLE = "PENSTOCK_TRACEBACK"


class LazyGroup(click.Group):
    """A click group that lists `COMMANDS` without importing them."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        other = OTHER_NAMES.get(cmd_name)
        name, *inner = cmd_name.split() if other is None else other.target.split()
        entry = COMMANDS.get(name)
        if entry is None:
            return None
        module_name, _, attribute = entry.target.partition(":")
        command = getattr(import_module(module_name), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.target} is a {type(command).__name__}, not a click command")
        for word in inner:
            assert isinstance(command, click.Group)
            command = command.commands[word]
        return command if other is None else _called(command, cmd_name, other.examples)

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # Click would compare only with the commands it has loaded, which here are none.
        if name not in COMMANDS and name not in OTHER_NAMES and not name.startswith("-") and not ctx.resilient_parsing:
            if name in FORMER_NAMES:
                raise click.exceptions.UsageError(f"{name!r} is now `tpu {FORMER_NAMES[name]}`", ctx)
            raise click.exceptions.NoSuchCommand(name, possibilities=COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
            with formatter.section(section):
                formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items() if entry.section == section])
        with formatter.section("Other names"):
            formatter.write_dl([(name, other.help) for name, other in OTHER_NAMES.items()])


def _called(command: click.Command, name: str, examples: tuple[str, ...]) -> click.Command:
    """The same command under another name, which its examples have too: one types what one reads."""
    same = copy.copy(command)
    for former in examples:
        same.help = re.sub(rf"(?m)^(\s*)tpu {re.escape(former)}\b", rf"\1tpu {name}", same.help or "")
    return same


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="penstock %(version)s")
def tpu() -> None:
    """Penstock feeds work to TPUs and never loses any of it.

    \b
    tpu run train.py lr=0.01           freeze this directory, run it, show its logs
    tpu exec -c 'result = jax.devices()[0].device_kind'
    tpu ps                             what runs and what ended lately
    tpu logs -f ID                     return to a job; Ctrl-C leaves it running
    tpu tldr                           the rest, on one screen
    """


def _colour() -> bool | None:
    """Colours on terminals only (None lets click look), and nowhere when NO_COLOR is set to anything."""
    return False if os.environ.get("NO_COLOR") else None


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


def _as_utf8(word: str) -> str:
    """A word of the command line as it was typed, also where the locale (`LC_ALL=C`) knows no letter of it."""
    try:
        return os.fsencode(word).decode("utf-8")
    except UnicodeError as error:
        raise click.UsageError(f"{word!a} is not UTF-8; write it in UTF-8, or put it into a file") from error


def run(args: Sequence[str], program: str = "tpu") -> int:
    """Run one command line and return its exit code."""
    if f"_{program.upper()}_COMPLETE" in os.environ:
        tpu.main(list(args), prog_name=program)  # the shell asks for completions; click answers and exits
    try:
        args = [_as_utf8(word) for word in args]
        # Not `tpu.main`: it turns a closed pipe into exit code 1, which here means that a check failed.
        with tpu.make_context(program, list(args), color=_colour()) as context:
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
