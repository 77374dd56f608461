"""The `tpu` entry point: lazy commands, help, suggestions, and what each kind of error becomes.

Drives `run` in this process, and a fresh interpreter where the question is what gets imported or how a
closed pipe ends. What single commands print is tested beside them, not here.
"""

import errno
import subprocess
import sys
from collections.abc import Callable

import click
import pytest

from penstock import __version__
from penstock.cli.main import COMMANDS, FORMER_NAMES, ExitCode, run, tpu

Fail = Callable[[BaseException], None]


@pytest.fixture
def fail_with(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Make `tpu boom` raise the given error."""

    def plant(error: BaseException) -> None:
        @click.command()
        def boom() -> None:
            raise error

        monkeypatch.setattr(tpu, "get_command", lambda _context, _name: boom)
        monkeypatch.setitem(COMMANDS, "boom", COMMANDS["catalog"])

    return plant


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


def test_help_lists_every_command_under_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == ExitCode.OK
    out = capsys.readouterr().out
    for name, entry in COMMANDS.items():
        assert f"{entry.section}:" in out
        assert f"  {name} " in out
        assert entry.help in out


def test_help_imports_no_command_and_no_other_part() -> None:
    done = python(
        "import sys\nfrom penstock.cli.main import run\nrun(['--help'])\n"
        "print('LOADED', sorted(m for m in sys.modules if m.split('.')[0] in"
        " ('penstock', 'msgspec', 'apsw', 'psycopg')))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED ['penstock', 'penstock.cli', 'penstock.cli.main']"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_named_command_loads_and_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == ExitCode.OK
    assert f"Usage: tpu {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out == f"penstock {__version__}\n"


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cataloge"]) == ExitCode.BAD_INPUT
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err == "tpu: No such command 'cataloge'. Did you mean 'catalog'? (see `tpu --help`)\n"


def test_a_name_of_the_older_tool_leads_to_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["kill-job", "xibo"]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err == "tpu: 'kill-job' is now `tpu kill` (see `tpu --help`)\n"
    assert not FORMER_NAMES.keys() & COMMANDS.keys()
    assert {name.partition(" ")[0] for name in FORMER_NAMES.values()} <= COMMANDS.keys()


def test_unknown_command_near_to_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["zzzzzz"], program="penstock") == ExitCode.BAD_INPUT
    assert capsys.readouterr().err == "penstock: No such command 'zzzzzz'. (see `penstock --help`)\n"


def test_unknown_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--verison"]) == ExitCode.BAD_INPUT
    err = capsys.readouterr().err
    assert "'--verison'" in err
    assert "'--version'" in err
    assert err.count("\n") == 1


def test_no_command_shows_help_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == ExitCode.BAD_INPUT
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "Usage: tpu" in streams.err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            click.UsageError("jobs must be\nat least 1, not 0"),
            2,
            "jobs must be at least 1, not 0 (see `tpu boom --help`)",
        ),
        (click.ClickException("3 rules were violated"), 1, "3 rules were violated"),
        (click.Abort(), 130, "interrupted"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            ModuleNotFoundError("No module named 'apsw'", name="apsw"),
            3,
            "this command needs apsw; install it with: pip install 'penstock[server]'",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "a.db"),
            3,
            "a.db: No such file or directory",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), 3, "No space left on device"),
        (click.FileError("a.log", "is a directory"), 3, "Could not open file 'a.log': is a directory"),
        (
            ValueError("seven"),
            70,
            "a fault in Penstock: ValueError: seven (set PENSTOCK_TRACEBACK=1 for the trace)",
        ),
    ],
)
def test_errors_become_one_line_and_a_code(
    error: BaseException, code: int, line: str, fail_with: Fail, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(error)
    assert run(["boom"]) == code
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err == f"tpu: {line}\n"


def test_ctx_exit_is_the_exit_code(fail_with: Fail, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(click.exceptions.Exit(1))
    assert run(["boom"]) == ExitCode.CHECK_FAILED
    assert capsys.readouterr().err == ""


def test_a_fault_shows_its_trace_when_asked(fail_with: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(ValueError("seven"))
    monkeypatch.setenv("PENSTOCK_TRACEBACK", "1")
    with pytest.raises(ValueError, match="seven"):
        run(["boom"])


def test_a_closed_pipe_is_silent() -> None:
    # A pipe whose reader is already gone: the very first flush fails.
    done = python(
        "import os, sys\nfrom penstock.cli.main import run\nread, write = os.pipe()\nos.close(read)\n"
        "os.dup2(write, 1)\nsys.exit(run(['--help']))"
    )
    assert done.returncode == ExitCode.CLOSED_PIPE
    assert done.stderr == ""
