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


def echo_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()) -> None:
    """Columns of text; those named in `right` stand to the right."""
    for line in table(header, rows, right=right):
        click.echo(line)


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
