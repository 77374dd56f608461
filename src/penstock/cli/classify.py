"""`tpu classify`: why a run failed, from what the user knows about it.

Decides only how facts are read from the command line and how the verdict is shown; the verdict comes from
`domain.classify`. The command line loads it when `classify` is called. It contacts no server and must not
keep more of a log than its end.
"""

import stat
import sys
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from penstock.domain.classify import SIGNAL_MAX, SIGNAL_NAMES, SLICE_STATES, Signals, Verdict, slice_word
from penstock.domain.classify import classify as verdict_of
from penstock.domain.classify_log import SCAN_CHARS

#: Bytes of the log's end that are read: as many as the classifier looks at, were they all ASCII.
TAIL_BYTES = SCAN_CHARS


def _signal_number(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    name = value.strip().upper()
    number = int(name) if name.isascii() and name.isdigit() and len(name) < 4 else 0
    for known, long_name in SIGNAL_NAMES.items():
        if name in (long_name, long_name.removeprefix("SIG")):
            number = known
    if not 1 <= number <= SIGNAL_MAX:
        raise click.BadParameter(f"{value!r} is not a signal; give a name such as TERM or a number 1..{SIGNAL_MAX}")
    return number


def _known_state(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    word = slice_word(value)
    if word not in SLICE_STATES:
        raise click.BadParameter(f"{value!r} is not a state; give one of {', '.join(sorted(SLICE_STATES))}")
    return word


@click.command(name="classify")
@click.option("--exit-code", type=click.IntRange(-SIGNAL_MAX, 255), metavar="N", help="Exit code of the process.")
@click.option("--signal", callback=_signal_number, metavar="S", help="Signal that ended it: TERM, SIGKILL, 11 …")
@click.option("--slice-state", callback=_known_state, metavar="X", help="The provider's word: READY, PREEMPTED …")
@click.option("--oom", is_flag=True, help="The kernel killed it for lack of memory.")
@click.option("--notice", is_flag=True, help="A preemption or maintenance notice was seen.")
@click.option("--log", metavar="FILE", help="Its log; - reads standard input. Only the last 64 KiB count.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: cause, evidence, confidence, advice.")
def classify(
    exit_code: int | None,
    signal: int | None,
    slice_state: str | None,
    oom: bool,
    notice: bool,
    log: str | None,
    as_json: bool,
) -> None:
    """Say why a run ended: one cause, the evidence, how sure that is, and what to do.

    Facts decide (exit code, signal, OOM kill, state of the slice, notice); the log only explains them. Exit
    code 0 is a success whatever the log says.
    """
    if exit_code == 0 and signal is not None:
        raise click.UsageError(f"--exit-code 0 with --signal {signal}: a process ends by one of them; give that one")
    silent_state = slice_state is None or SLICE_STATES[slice_state] is None
    no_failure = exit_code is None and signal is None and silent_state and not oom and not notice
    if no_failure and log is None:
        raise click.UsageError("no fact given that ends a run; give --exit-code, --signal, --oom or --log")
    verdict = verdict_of(
        Signals(
            exit_code=exit_code,
            signal=signal,
            oom_killed=oom,
            slice_state=slice_state,
            notice=notice,
            log_tail="" if log is None else _read_tail(log),
        )
    )
    if no_failure and verdict.pattern is None:
        # Silence in a log is neither success nor failure, so there is no verdict to give.
        raise click.UsageError(f"--log {log} shows no failure that is known, and no fact was given; add --exit-code")
    if as_json:
        _show_json(verdict)
    else:
        _show_plain(verdict)


def _show_json(verdict: Verdict) -> None:
    answer = {
        "cause": verdict.cause,
        "evidence": verdict.evidence,
        "confidence": verdict.confidence,
        "advice": verdict.advice,
    }
    click.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2))


def _show_plain(verdict: Verdict) -> None:
    click.echo(f"cause     {verdict.cause} ({verdict.confidence})")
    for place, fact in enumerate(verdict.evidence):
        click.echo(f"{'evidence' if place == 0 else '':<8}  {fact}")
    click.echo(f"advice    {verdict.advice}")


def _read_tail(log: str) -> str:
    """The end of a log as text. Bytes that are not UTF-8 become a mark: no log is refused for its bytes."""
    if log == "-":
        return _tail(sys.stdin.buffer).decode(errors="replace")
    try:
        with Path(log).open("rb") as file:
            if stat.S_ISREG(Path(log).stat().st_mode):
                file.seek(max(0, Path(log).stat().st_size - TAIL_BYTES))
            return _tail(file).decode(errors="replace")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a file name"
        raise click.BadParameter(
            f"{log!r} cannot be read: {why}; give a readable file or -", param_hint="--log"
        ) from error


def _tail(stream: BinaryIO) -> bytes:
    """The last `TAIL_BYTES` of a stream of any length, in bounded memory."""
    end = b""
    while chunk := stream.read(TAIL_BYTES):
        end = (end + chunk)[-TAIL_BYTES:]
    return end
