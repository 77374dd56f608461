"""What a payload leaves behind: files of its output directory, its result or error, sent before its end is reported.

`course` calls `send` once the payload's last process is gone. Names and files are the payload's, so nothing but plain
files is read and no link is followed. A file the server will not have is said in the log and left out; only declared
outputs that arrived are reported (S8). It tries for as long as the server is away: whoever calls may give up sooner.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec

from penstock.agent.hiding import hide, hide_all
from penstock.agent.layout import open_plain
from penstock.agent.link import BYTES_S, Link, Refused, Silent
from penstock.domain import limits
from penstock.domain.nouns import Exit
from penstock.wire.agent import ResultReport
from penstock.wire.api import ErrorView

RESULT_FILE = "result.json"  #: a command's way to give a result, in its output directory
FILES_MAX = 10_000
SMALL_BYTES = 64 << 10
RETRY_FIRST_S, RETRY_MAX_S = 0.1, 5.0


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """Where a payload left things, and how it ended."""

    attempt: str
    rank: int
    outputs: tuple[str, ...]  #: declared
    folder: Path
    report: Path  #: a snippet's own report
    error: ErrorView | None = None  #: what to say if the payload said nothing itself
    hidden: tuple[str, ...] = ()  #: values of secrets, which leave this host in no result, error or name


async def send(link: Link, left: Left, complain: Callable[[str], None]) -> tuple[str, ...]:
    """Send everything; the declared outputs that are complete in staging."""
    sent: list[str] = []
    say, hidden = complain, left.hidden
    complain = lambda text: say(hide(text, hidden))  # noqa: E731 (names in complaints are the payload's)
    found = await asyncio.to_thread(lambda: list(_files(left.folder, complain))) if _has_files(left.folder) else ()
    for path, name in found:
        if name == RESULT_FILE and _tells(path, hidden):
            complain(f"artifact {name!r}: has a secret in it; only the result is kept, without it")
            continue
        name = hide(name, hidden)  # noqa: PLW2901 (from here on it is called so)
        shown = name if left.rank == 0 or _declared(name, left.outputs) else f"host-{left.rank}/{name}"
        while shown in sent:  # two that differed by a secret only
            shown += "_"
        where = f"/v1/agent/attempts/{left.attempt}/artifacts/{quote(shown)}"
        if await _patiently(lambda: _put(link, where, path), f"artifact {name!r}", complain):  # noqa: B023 (awaited here)
            sent.append(shown)
    await _send_report(link, left, tuple(sent), complain)
    return tuple(name for name in left.outputs if any(_declared(each, (name,)) for each in sent))


async def _send_report(link: Link, left: Left, artifacts: tuple[str, ...], complain: Callable[[str], None]) -> None:
    # What is small is read faster than a thread is found to read it.
    report = _report(left, complain) if _is_small(left) else await asyncio.to_thread(_report, left, complain)
    report = msgspec.structs.replace(
        report, artifacts=tuple(dict.fromkeys((*report.artifacts, *artifacts))), error=report.error or left.error
    )
    if left.hidden:
        report = msgspec.convert(hide_all(msgspec.to_builtins(report), left.hidden), ResultReport)
    if report == ResultReport():
        return  # nothing was left: then there is nothing to read later, and no call to make
    where = f"/v1/agent/attempts/{left.attempt}/result"
    data = msgspec.json.encode(report)
    if len(data) > limits.RESULT_BYTES_MAX:
        complain(f"the result has {len(data)} bytes as JSON, more than {limits.RESULT_BYTES_MAX}: it is left out")
        error = report.error or ErrorView(type="ResultTooLarge", message=f"{len(data)} bytes of JSON; write a file")
        data = msgspec.json.encode(ResultReport(error=error, artifacts=artifacts))
    await _patiently(lambda: link.call("PUT", where, data), "the result", complain)


def _report(left: Left, complain: Callable[[str], None]) -> ResultReport:
    """A snippet's own report, else what a command put into `result.json`."""
    try:
        return msgspec.json.decode(_plain(left.report, limits.RESULT_BYTES_MAX), type=ResultReport)
    except FileNotFoundError:
        pass  # a command, or a snippet that died
    except (OSError, ValueError, RecursionError) as error:
        complain(f"the report of the snippet cannot be read: {error}")
    try:
        result = msgspec.json.decode(_plain(left.folder / RESULT_FILE, limits.RESULT_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return ResultReport()  # none, or not JSON: then it is an artifact like any other
    return ResultReport(result=result)


def error_of(exit: Exit) -> ErrorView | None:
    """How a payload failed that did not say so itself."""
    if exit.well:
        return None
    if exit.oom_killed:
        return ErrorView(type="OutOfMemory", message="the kernel killed it because it used more memory than it may")
    if exit.agent is not None:
        return ErrorView(type=exit.agent, message=f"the agent ended it: {exit.agent}")
    if exit.signal is not None:
        return ErrorView(type="Signal", message=f"it was ended by signal {exit.signal}")
    return ErrorView(type="ExitCode", message=f"it ended with exit code {exit.code}", traceback=exit.log_tail)


def own_error(report: Path) -> str:
    """The traceback in a snippet's own report. It is in no log, and yet it is what explains how the snippet ended."""
    try:
        error = msgspec.json.decode(_plain(report, limits.RESULT_BYTES_MAX), type=ResultReport).error
    except (OSError, ValueError, RecursionError):
        return ""  # none, or none that can be read: sending it complains of that
    return "" if error is None else error.traceback[-limits.LOG_TAIL_BYTES :]


def _tells(path: Path, hidden: tuple[str, ...]) -> bool:
    """Whether a secret is in a file that is going to be the result."""
    try:
        text = _plain(path, limits.RESULT_BYTES_MAX).decode("utf-8", "replace") if hidden else ""
    except (OSError, ValueError):
        return False  # too large to be a result: an artifact like any other
    return hide(text, hidden) != text


def _plain(path: Path, most: int) -> bytes:
    """The bytes of a plain file of the payload's that is not endless."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"{path.name}: is not a plain file of at most {most} bytes")
        return file.read(most)


def _has_files(folder: Path) -> bool:
    """Whether there is anything to look through; a folder that cannot be read is looked at with the others' care."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError:
        return True


def _is_small(left: Left) -> bool:
    return all(_size(path) <= SMALL_BYTES for path in (left.report, left.folder / RESULT_FILE))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _files(folder: Path, complain: Callable[[str], None]) -> Iterator[tuple[Path, str]]:
    count = 0
    for here, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        for each in sorted(names):
            path = Path(here) / each
            name = path.relative_to(folder).as_posix()
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode):
                complain(f"artifact {name!r}: is not a plain file, and left out")
            elif found.st_size > limits.ARTIFACT_BYTES_MAX:
                complain(
                    f"artifact {name!r}: has {found.st_size} bytes, more than {limits.ARTIFACT_BYTES_MAX}: left out"
                )
            elif count == FILES_MAX:
                complain(f"there are more than {FILES_MAX} artifacts: the rest is left out; pack them into an archive")
                return
            else:
                count += 1
                yield path, name


def _declared(name: str, outputs: tuple[str, ...]) -> bool:
    """Whether a file is a declared output, or part of one that is a directory."""
    return any(name == each or name.startswith(f"{each.rstrip('/')}/") for each in outputs)


async def _put(link: Link, where: str, path: Path) -> None:
    await link.call("PUT", where, path, media="application/octet-stream", timeout_s=BYTES_S)


async def _patiently(call: Callable[[], Awaitable[object]], what: str, complain: Callable[[str], None]) -> bool:
    """Call until the server answers; whether it took it."""
    rest_s = RETRY_FIRST_S
    while True:
        try:
            await call()
            return True
        except Refused as refused:
            if refused.status != 401:  # the credential is being renewed
                complain(f"{what}: the server refuses it: {refused}")
                return False
        except Silent:
            rest_s = min(2 * rest_s, RETRY_MAX_S)
        except FileNotFoundError as error:
            complain(f"{what}: {error}")
            return False
        await asyncio.sleep(rest_s)
