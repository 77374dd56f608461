"""How `tpu` looks: tables, colours, ages, JSON, and the one place where text from elsewhere is made safe to show.

Every command prints through here. Decides nothing about jobs. Colours are written always and taken out again by click
where standard output is no terminal or `NO_COLOR` is set, so that commands need not ask. Names, notes and reasons come
from other people: `safe` keeps them from steering the reader's terminal. It must stay cheap to import.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

import click

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0

_STATE_COLOURS = {
    "queued": "yellow",
    "provisioning": "yellow",
    "running": "cyan",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "bright_black",
    "ready": "green",
    "preempted": "red",
}


def now_s() -> float:
    """The time of the reader's clock, for ages that are shown; nothing is decided by it."""
    return time.time()  # noqa: TID251


def safe(text: str) -> str:
    """`text` on one line, with everything that is no plain character shown as an escape."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def state(word: str) -> str:
    """A state in its colour."""
    return click.style(word, fg=_STATE_COLOURS.get(word))


def span(seconds: float) -> str:
    """A time span as people say it: 42s, 3m10s, 2h05m, 4d."""
    whole = max(0, int(seconds))
    if whole < MINUTE_S:
        return f"{whole}s"
    if whole < HOUR_S:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 2 * DAY_S:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{int(whole // DAY_S)}d"


def many(count: int, what: str) -> str:
    """1 host, 2 hosts."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def moment(at: float | None) -> str:
    """A point in time in the reader's zone, with the zone."""
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))


def size(count: int) -> str:
    """A number of bytes as people say it."""
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 10 else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


#: Of what runs on the machine at hand, wherever a price is shown.
FREE = "free: this machine's own capacity"


def money(usd: float) -> str:
    """What something cost; on the machine at hand, that it cost nothing."""
    return f"${usd:,.2f}" if usd else FREE


def echo_json(value: object) -> None:
    """One JSON document on standard output, indented."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def echo_json_line(value: object) -> None:
    """One JSON document on one line: the shape of lists that are read while they grow."""
    import msgspec

    click.echo(msgspec.json.encode(value).decode())


def echo_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = (), spare: Sequence[str] = ()
) -> None:
    """Columns of text; those named in `right` stand to the right. On a narrow terminal `spare` ones go, in turn."""
    rows = list(rows)
    if sys.stdout.isatty():
        header, rows = fitted(header, rows, spare, shutil.get_terminal_size().columns)
    for line in table(header, rows, right=right):
        click.echo(line)


def fitted(
    header: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str], columns: int
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """A table whose lines are no longer than `columns`, if it can be: without columns that say nothing, then without
    `spare` ones, at last with a plain column cut short: the last one, which explains, or else the widest."""
    silent = [title for index, title in enumerate(header) if all(row[index] in ("", "-") for row in rows)]
    for title in (*silent, *spare):
        if _width(header, rows) <= columns:
            break
        kept = [index for index, each in enumerate(header) if each != title]
        header, rows = [header[index] for index in kept], [[row[index] for index in kept] for row in rows]
    over = _width(header, rows) - columns
    longest = {
        index: max(len(row[index]) for row in rows)
        for index in range(len(header))
        if all("\x1b" not in row[index] for row in rows)
    }
    if over > 0 and longest:
        last = len(header) - 1
        cut = last if longest.get(last, 0) - over >= _CUT_MIN else max(longest, key=lambda index: longest[index])
        room = max(_CUT_MIN, longest[cut] - over)
        rows = [[*row[:cut], _cut(row[cut], room), *row[cut + 1 :]] for row in rows]
    return header, rows


_CUT_MIN = 8


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def _width(header: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    widths = [max(len(click.unstyle(line[index])) for line in (header, *rows)) for index in range(len(header))]
    return sum(widths) + 2 * (len(widths) - 1)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()) -> Iterator[str]:
    """The lines of a table, the header first. Widths count characters, not colour codes."""
    lines = [[click.style(title, bold=True) if title else "" for title in header], *(list(row) for row in rows)]
    widths = [max(len(click.unstyle(line[column])) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = []
        for column, cell in enumerate(line):
            blank = " " * (widths[column] - len(click.unstyle(cell)))
            cells.append(blank + cell if header[column] in right else cell + blank)
        yield "  ".join(cells).rstrip()


def echo_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Names and values, one pair a line."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        click.echo(f"{name:<{width}}  {value}")


def note(text: str) -> None:
    """A line about what goes on. It goes to standard error, so that standard output holds answers only."""
    click.echo(text, err=True)


class StatusLine:
    """One line on standard error that is written over while it changes; on no terminal each change is a line.

    `show` is for progress (dropped where nobody sees it move), `say` for what should stay. Whoever prints anything else
    meanwhile holds `lock` and clears the line first: two threads may talk to one terminal.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self.live = sys.stderr.isatty() and not silent
        self.lock = threading.RLock()
        self._silent = silent
        self._shown = 0

    def show(self, text: str) -> None:
        if not self.live:
            return
        with self.lock:
            width = max(20, shutil.get_terminal_size().columns - 1)
            line = text if len(text) <= width else text[: width - 1] + "…"
            click.echo("\r" + line + " " * max(0, self._shown - len(line)), nl=False, err=True)
            self._shown = len(line)

    def say(self, text: str) -> None:
        with self.lock:
            self.clear()
            if not self._silent:
                click.echo(text, err=True)

    def clear(self) -> None:
        with self.lock:
            if self._shown:
                click.echo("\r" + " " * self._shown + "\r", nl=False, err=True)
                self._shown = 0
