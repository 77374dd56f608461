"""A real terminal for tests: tmux, with a shell in which `tpu` is a command.

Every tmux server is one of the test's own, and ends with it.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.missing import missing
from tests.process.machine import until
from tests.process.shop import RUN_S, Shop, soon

COLUMNS, ROWS = 132, 40


class Screen:
    """A terminal with a shell in which `tpu` is a command."""

    def __init__(self, shop: Shop, folder: Path, columns: int = COLUMNS, rows: int = ROWS) -> None:
        if shutil.which("tmux") is None:
            missing("tmux")
        tools = folder / "bin"
        tools.mkdir()
        (tools / "tpu").write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "from penstock.cli.main import main; main()" "$@"\n'
        )
        (tools / "tpu").chmod(0o755)
        self._tmux = ("tmux", "-L", f"penstock-{secrets.token_hex(6)}", "-f", os.devnull)
        environment = {
            **{
                name: value
                for name, value in shop.environment.items()
                if name not in ("NO_COLOR", "TMUX", "COLUMNS", "LINES")
            },
            "PATH": f"{tools}:{os.environ['PATH']}",
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
            "PS1": "$ ",
        }
        size = ("-x", str(columns), "-y", str(rows))
        self._run(
            "new-session", "-d", *size, "-c", str(shop.desk), "env", "-i", *pairs(environment), "sh", env=environment
        )
        self.waits()

    def _run(self, *words: str, env: dict[str, str] | None = None) -> str:
        done = subprocess.run([*self._tmux, *words], env=env, capture_output=True, text=True, timeout=RUN_S, check=True)
        return done.stdout

    def type(self, line: str) -> None:
        """A line for the shell, once it asks for one: what is typed ahead is echoed twice."""
        self.waits()
        self._run("send-keys", "-l", line)
        self._run("send-keys", "Enter")

    def press(self, key: str) -> None:
        self._run("send-keys", key)

    def text(self, *, raw: bool = False) -> str:
        """What was and is on the screen, with colours if `raw`; blanks at the ends of lines are nobody's."""
        lines = self._run("capture-pane", "-p", "-J", "-S", "-", *(("-e",) if raw else ())).splitlines()
        return "\n".join(line.rstrip() for line in lines)

    def clear(self) -> None:
        self.type("clear")
        until(lambda: self.text().strip() == "$")
        self._run("clear-history")

    def shows(self, what: str) -> re.Match[str]:
        """Wait until the pattern is on the screen."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            found.extend(re.finditer(what, self.text(), re.MULTILINE))
            return bool(found)

        try:
            soon(look)
        except AssertionError:
            raise AssertionError(f"{what} is not on the screen:\n{self.text()}") from None
        return found[0]

    def program(self) -> int:
        """The pid of what the shell runs in the foreground."""
        shell = self._run("display-message", "-p", "#{pane_pid}").strip()
        return int(Path(f"/proc/{shell}/task/{shell}/children").read_text().split()[-1])

    def cursor(self) -> str:
        """Whether the cursor is seen: "1" or "0"."""
        return self._run("display-message", "-p", "#{cursor_flag}").strip()

    def resize(self, columns: int, rows: int) -> None:
        self._run("resize-window", "-x", str(columns), "-y", str(rows))

    def waits(self) -> None:
        """Wait until the shell asks for the next line."""
        soon(lambda: self.text().rstrip().endswith("$"))

    def end(self) -> None:
        self._run("kill-server")


def pairs(environment: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environment.items()]
