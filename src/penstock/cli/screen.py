"""A whole terminal screen that is painted over and over, and given back as it was: what `tpu watch` draws on.

Plain escape sequences that every terminal of today knows: the alternate buffer, cursor home, clear to the end of the
line. A frame goes out in one write, so that it does not flicker; lines are cut to the width there is at that moment.
Leaving by any way (Ctrl-C, `q`, SIGTERM, Ctrl-Z, an error) gives the shell its screen, cursor and echo back. It must
not know what is drawn.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import sys
import termios
import time
import tty
import unicodedata
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import click

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, LINE_END, REST = "\x1b[H", "\x1b[K", "\x1b[J"
RESET = "\x1b[0m"
#: A colour, or one character: what a line consists of.
_PARTS = re.compile(r"\x1b\[[0-9;]*m|.", re.DOTALL)
#: `q`, and the end of what is typed.
_LEAVING = (b"q", b"Q", b"\x04", b"")
TERMINATED = 128 + signal.SIGTERM


def usable() -> bool:
    """Whether there is a screen to paint on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def fit(line: str, columns: int) -> str:
    """As much of a line as fits: colours count nothing, wide characters two; a cut is shown."""
    if shown_width(line) <= columns:
        return line
    taken, room = [], columns
    for part in _PARTS.findall(line):
        room -= _width(part)
        if room < 1:
            break
        taken.append(part)
    return "".join(taken) + RESET + "…"


def shown_width(line: str) -> int:
    """How many columns a line takes."""
    if line.isascii() and "\x1b" not in line:  # most are, and a screen has thousands
        return len(line)
    return sum(_width(part) for part in _PARTS.findall(line))


def _width(part: str) -> int:
    if part.startswith("\x1b") or unicodedata.combining(part):
        return 0
    return 2 if unicodedata.east_asian_width(part) in "WF" else 1


class Screen:
    """Used as a context; `frame` makes the lines for a height, and is asked again when the size changes."""

    def __init__(self, frame: Callable[[int], Sequence[str]], *, colour: bool) -> None:
        self._frame = frame
        self._colour = colour
        self._keys = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._modes: list[Any] | None = None
        self._signals: dict[signal.Signals, Any] = {}
        self._woken, self._waker = os.pipe()

    def __enter__(self) -> Self:
        os.set_blocking(self._waker, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number, handler in (
            (signal.SIGWINCH, lambda *_: None),  # the wake-up itself is what counts
            (signal.SIGTSTP, self._suspend),
            (signal.SIGTERM, _terminate),
        ):
            self._signals[number] = signal.signal(number, handler)
        self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._give_back()
        for number, handler in self._signals.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self._woken)
        os.close(self._waker)

    def _take(self) -> None:
        if self._keys is not None:
            self._modes = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)  # keys come one by one and are not shown; Ctrl-C stays Ctrl-C
        _write(ENTER)

    def _give_back(self) -> None:
        _write(LEAVE)
        if self._keys is not None and self._modes is not None:
            termios.tcsetattr(self._keys, termios.TCSADRAIN, self._modes)

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)  # here it stands until `fg`
        self._take()
        self.paint()

    def paint(self) -> None:
        size = shutil.get_terminal_size()
        lines = [fit(line, size.columns) for line in self._frame(size.lines)[: size.lines]]
        shown = lines if self._colour else [click.unstyle(line) for line in lines]
        # Not clear-then-draw: that would flicker. Each line clears its own rest, the last one what is below.
        _write(HOME + "\r\n".join(line + LINE_END for line in shown) + REST)

    def pause(self, seconds: float) -> bool:
        """Wait, painting anew when the size changes; False when the reader pressed `q`."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            watched = [self._woken] if self._keys is None else [self._woken, self._keys]
            ready, _, _ = select.select(watched, [], [], left)
            if self._keys is not None and self._keys in ready and os.read(self._keys, 1) in _LEAVING:
                return False
            if self._woken in ready:
                os.read(self._woken, 512)
                self.paint()
        return True


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)


def _write(text: str) -> None:
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]
