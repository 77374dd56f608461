"""`tpu classify`: how facts are read, what is printed, and how bad input is refused."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from penstock.cli.classify import TAIL_BYTES, _tail, classify
from penstock.cli.main import run as run_tpu

LOGS = Path(__file__).parents[1] / "domain" / "logs"


def run(*arguments: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(classify, list(arguments), input=stdin)


def read(*arguments: str, stdin: bytes = b"") -> Any:
    result = run(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_has_exactly_the_published_keys() -> None:
    shown = read("--exit-code", "1", "--log", str(LOGS / "vfio_busy.log"))
    assert list(shown) == ["cause", "evidence", "confidence", "advice"]
    assert (shown["cause"], shown["confidence"]) == ("infra", "likely")
    assert shown["evidence"][0] == "exit code 1"
    assert "/dev/vfio/2" in shown["evidence"][1]


@pytest.mark.parametrize("signal", ["TERM", "SIGTERM", "sigterm", "15", " term "])
def test_a_signal_is_a_name_or_a_number(signal: str) -> None:
    assert read("--signal", signal)["evidence"] == ["ended by signal 15 (SIGTERM)"]


def test_signals_without_a_name_are_taken() -> None:
    assert read("--signal", "64")["evidence"] == ["ended by signal 64"]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--exit-code", "0"], "succeeded"),
        (["--exit-code", "-9"], "infra"),
        (["--exit-code", "1", "--oom"], "oom"),
        (["--exit-code", "143"], "infra"),
        (["--exit-code", "143", "--notice"], "preempted"),
        (["--slice-state", "preempted"], "preempted"),
        (["--slice-state", "not found"], "lost"),
        (["--exit-code", "1", "--slice-state", "READY"], "user_error"),
        (["--exit-code", "0", "--log", str(LOGS / "healthy_with_error_words.log")], "succeeded"),
        (["--exit-code", "134", "--log", str(LOGS / "coordination_echo.log")], "infra"),
    ],
)
def test_each_option_reaches_the_classifier(arguments: list[str], cause: str) -> None:
    assert read(*arguments)["cause"] == cause


def test_plain_output_says_the_same() -> None:
    result = run("--exit-code", "137", "--slice-state", "PREEMPTED")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "cause     preempted (certain)",
        "evidence  slice state PREEMPTED",
        "          ended by signal 9 (SIGKILL)",
        "          exit code 137",
        "advice    The provider took the machine back: resume from the last checkpoint on new capacity.",
    ]


def test_standard_input_is_a_log() -> None:
    log = (LOGS / "hbm_oom_compile.log").read_bytes()
    assert read("--exit-code", "1", "--log", "-", stdin=log)["cause"] == "oom"


def test_a_log_alone_gives_a_guess() -> None:
    shown = read("--log", str(LOGS / "hbm_oom_compile.log"))
    assert (shown["cause"], shown["confidence"]) == ("oom", "guess")


def test_colours_and_bytes_that_are_not_utf8_are_taken() -> None:
    shown = read("--exit-code", "1", "--log", str(LOGS / "colours_and_bad_bytes.log"))
    assert shown["evidence"][-1] == "log: OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize("by_stdin", [True, False])
def test_only_the_end_of_a_long_log_is_read(by_stdin: bool, tmp_path: Path) -> None:
    early = b"No space left on device\n" + b"y\n" * TAIL_BYTES
    late = early + b"Could not open any log file.\n"
    for number, (log, cause) in enumerate(((early, "user_error"), (late, "infra"))):
        path = tmp_path / str(number)
        path.write_bytes(log)
        source = "-" if by_stdin else str(path)
        assert read("--exit-code", "1", "--log", source, stdin=log)["cause"] == cause


def test_memory_does_not_grow_with_the_log() -> None:
    assert _tail(io.BytesIO(b"a" * 3 * TAIL_BYTES + b"end")) == b"a" * (TAIL_BYTES - 3) + b"end"


def test_what_is_not_a_regular_file_is_read_too() -> None:
    assert read("--exit-code", "1", "--log", "/dev/null")["cause"] == "user_error"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "no fact given"),
        (["--json"], "no fact given"),
        (["--slice-state", "READY"], "no fact given"),
        (["--exit-code", "256"], "'--exit-code': 256"),
        (["--exit-code", "one"], "'one'"),
        (["--signal", "BANG"], "'BANG' is not a signal"),
        (["--signal", "0"], "'0' is not a signal"),
        (["--signal", "65"], "'65' is not a signal"),
        (["--signal", "9" * 5000], "is not a signal"),
        (["--signal", "²"], "is not a signal"),
        (["--slice-state", "PREEMTED"], "'PREEMTED' is not a state"),
        (["--exit-code", "0", "--signal", "9"], "--exit-code 0 with --signal 9"),
        (["--log", "/no/such/file"], "'/no/such/file' cannot be read: No such file"),
        (["--log", "/"], "'/' cannot be read: Is a directory"),
        (["--exit-code", "1", "--log", "a\0b"], "cannot be read: not a file name"),
        (["--log", str(LOGS / "wandb_noise_only.log")], "add --exit-code"),
        (["--bogus"], "--bogus"),
        (["extra"], "extra"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tpu(["classify", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert named in shown.err
