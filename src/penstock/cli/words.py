"""How values are written on the command line: spans of time, sizes, ranges, `KEY=VALUE`, and the shared options.

Commands use these as click types, so that a bad value is refused in one line before anything is sent. Values whose
rules the server knows (priorities, names) are left to it: one rule in one place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
from typing_extensions import override

if TYPE_CHECKING:
    import msgspec
    from click.shell_completion import CompletionItem

    from penstock.wire.inventory import BudgetRequest

ARRAY_MEMBERS_MAX = 100_000  #: of one array: what the fault list asks us to survive

_SPAN = re.compile(r"(?:(\d+(?:\.\d+)?)([smhdw]?))")
_SPAN_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_BUDGET = re.compile(r"\$?([0-9]{1,12}(?:\.[0-9]{1,6})?) ?(usd|chip-?hours?)?/(day|week|month)", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

F = TypeVar("F", bound=Callable[..., Any])


def grouped(options: Sequence[Callable[[Any], Any]], shape: type[msgspec.Struct], name: str) -> Callable[[F], F]:
    """Give a command options that belong together; it takes their values as one `shape`, in the argument `name`."""

    def decorate(command: F) -> F:
        def wrapped(**values: Any) -> Any:
            taken = {field: values.pop(field) for field in shape.__struct_fields__}
            return command(**{name: shape(**taken)}, **values)

        wrapped.__name__ = command.__name__
        wrapped.__doc__ = command.__doc__
        wrapped.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped  # type: ignore[return-value]

    return decorate


def text_or_file(_context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The callback of an option whose value `@FILE` stands for what the file holds."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text()
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{value!r} is no UTF-8; name a file of text", param=parameter) from error


class Span(click.ParamType[float]):
    """Seconds, written 90, 30s, 15m, 2h, 1h30m, 7d."""

    name = "time"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        text = str(value).strip().lower()
        parts = _SPAN.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            self.fail(f"{value!r} is not a time; write it as 90, 30s, 15m, 2h, 1h30m or 7d", param, ctx)
        seconds = sum(float(number) * _SPAN_UNITS[unit] for number, unit in parts)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is too long a time", param, ctx)
        return seconds


class Size(click.ParamType[int]):
    """Bytes, written 512M, 16G, 16GiB, 1e9 is not."""

    name = "size"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a size; write it as 512M, 16G or 16GiB", param, ctx)
        number, unit, binary = match.groups()
        factor = (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " ")
        return int(float(number) * factor)


class Members(NamedTuple):
    """The indices of an array and how many may be in flight at once."""

    indices: tuple[int, ...]
    at_once: int | None


class Array(click.ParamType[Members]):
    """Indices, written 0-99, 0-99%10, 1,5,9, 0-30:10."""

    name = "array"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Members:
        if isinstance(value, Members):
            return value
        text, _, at_once = str(value).partition("%")
        if "%" in str(value) and not (at_once.isascii() and at_once.isdigit() and int(at_once) > 0):
            self.fail(f"{value!r}: after % comes how many may run at once, 1 or more", param, ctx)
        indices: list[int] = []
        for part in text.split(","):
            match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", part.strip(), re.ASCII)
            if match is None:
                self.fail(f"{value!r} is not an array; write it as 0-99, 0-99%10, 0-90:10 or 1,5,9", param, ctx)
            first = int(match[1])
            last = first if match[2] is None else int(match[2])
            step = 1 if match[3] is None else int(match[3])
            if last < first or step == 0:
                self.fail(f"{value!r}: {part} is empty; the first index comes first, steps are 1 or more", param, ctx)
            if len(indices) + (last - first) // step >= ARRAY_MEMBERS_MAX:
                self.fail(f"{value!r} has more than {ARRAY_MEMBERS_MAX} members; split it", param, ctx)
            indices.extend(range(first, last + 1, step))
        if len(set(indices)) != len(indices):
            self.fail(f"{value!r} names an index twice", param, ctx)
        return Members(tuple(indices), int(at_once) if at_once else None)


class Copies(click.ParamType[tuple[int, int]]):
    """How many replicas, written 4 or 1-8."""

    name = "replicas"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", str(value), re.ASCII)
        if match is None:
            self.fail(f"{value!r} is not a number of replicas; write it as 4 or 1-8", param, ctx)
        low = int(match[1])
        high = low if match[2] is None else int(match[2])
        if not 1 <= low <= high:
            self.fail(f"{value!r}: replicas are at least 1, and the smaller number comes first", param, ctx)
        return low, high


class Pair(click.ParamType[tuple[str, str]]):
    """KEY=VALUE with a key that can be the name of a variable."""

    name = "key=value"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, text = str(value).partition("=")
        if not equals or _NAME.fullmatch(key) is None:
            self.fail(f"{value!r} is not KEY=VALUE with a key of letters, digits and _", param, ctx)
        return key, text


class BudgetAmount(click.ParamType["BudgetRequest"]):
    """What may be spent, written 500usd/month, $20/day or 1000chip-hours/week."""

    name = "budget"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> BudgetRequest:
        from penstock.domain.budgets import Unit, Window
        from penstock.wire.inventory import BudgetRequest

        match = _BUDGET.fullmatch(str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r} is no budget; write it as 500usd/month, 20usd/day or 1000chip-hours/week", param, ctx)
        unit = Unit.USD if match[2] in (None, "usd") else Unit.CHIP_HOURS
        return BudgetRequest(limit=float(match[1]), unit=unit, window=Window(match[3]))


class JobId(click.ParamType[str]):
    """A job's id or the beginning of it; the shell completes it from the newest jobs."""

    name = "job"

    @override
    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from penstock.cli.talk import newest_jobs

        return [
            CompletionItem(job.id, help=f"{job.state} {job.name or job.kind}")
            for job in newest_jobs()
            if job.id.startswith(incomplete)
        ]


JOB = JobId()
SPAN = Span()
BUDGET = BudgetAmount()

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


_USER = click.option("--user", metavar="NAME", help="Only jobs of this user.")
_STATE = click.option("--state", metavar="STATE", help="Only jobs in this state, several, or `live` or `ended`.")
_TAG = click.option("--tag", metavar="TAG", help="Only jobs with this tag.")
_QUEUE = click.option("--queue", metavar="NAME", help="Only jobs of this queue.")
#: Words for several states at once.
STATE_WORDS = {"live": "running,provisioning,queued", "ended": "succeeded,failed,cancelled"}


def job_filters(command: F) -> F:
    """The options of every list of jobs."""
    since = click.option("--since", type=SPAN, metavar="TIME", help="Only jobs made in this time: 30m, 12h, 7d.")
    return _with(command, _USER, _STATE, _TAG, _QUEUE, since)


def event_filters(command: F) -> F:
    """The options of a list of what happened to jobs."""
    since = click.option("--since", type=SPAN, metavar="TIME", help="Only what happened in this time: 30m, 12h, 7d.")
    return _with(command, _USER, _STATE, _TAG, since)


def slice_filters(command: F) -> F:
    """The options of every list of slices."""
    return _with(
        command,
        click.option("--user", metavar="NAME", help="Only slices that run a job of this user."),
        click.option("--state", metavar="STATE", help="Only slices in this state, or several: ready,creating."),
        click.option("--tag", metavar="TAG", help="Only slices that run a job with this tag."),
        click.option("--since", type=SPAN, metavar="TIME", help="Only slices asked for in this time: 30m, 12h."),
    )


def _with(command: F, *options: Callable[[F], F]) -> F:
    for option in reversed(options):
        command = option(command)
    return command
