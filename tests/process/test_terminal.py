"""A working session in a real terminal (tmux): what stands on the screen while a job runs, after Ctrl-C, and later.

And what a pipe gets instead: plain lines, no escape sequences. Every tmux server is one of the test's own.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.machine import until
from tests.process.shop import RUN_S, WORDS, Shop, soon

pytestmark = pytest.mark.slow
COLUMNS, ROWS = 132, 40


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("terminal") / "home")
    try:
        yield shop
    finally:
        shop.end()


class Screen:
    """A terminal with a shell in which `tpu` is a command."""

    def __init__(self, shop: Shop, folder: Path) -> None:
        if shutil.which("tmux") is None:
            if os.environ.get("CI") == "true":
                pytest.fail("needs tmux, and in CI that is no reason to skip", pytrace=False)
            pytest.skip("needs tmux")
        tools = folder / "bin"
        tools.mkdir()
        (tools / "tpu").write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "from penstock.cli.main import main; main()" "$@"\n'
        )
        (tools / "tpu").chmod(0o755)
        self._tmux = ("tmux", "-L", f"penstock-{secrets.token_hex(6)}", "-f", os.devnull)
        environment = {
            **{name: value for name, value in shop.environment.items() if name not in ("NO_COLOR", "TMUX")},
            "PATH": f"{tools}:{os.environ['PATH']}",
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
            "PS1": "$ ",
        }
        size = ("-x", str(COLUMNS), "-y", str(ROWS))
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


@pytest.fixture
def screen(shop: Shop, tmp_path: Path) -> Iterator[Screen]:
    screen = Screen(shop, tmp_path)
    yield screen
    screen.end()


PROGRAM = """
from penstock import payload
for step in range(1, 4):
    payload.progress(step, 10, loss=1 / step)
    say("step", step)
gate("go")
say("\\x1b[32mdone\\x1b[0m", os.environ["PENSTOCK_STAGE"])
"""


STEPS = """
from penstock import payload
payload.progress(1, 4, loss=0.5)
say("first")
gate("on")
payload.progress(2, 4, loss=0.5)
gate("go")
"""


def test_a_session(shop: Shop, screen: Screen) -> None:
    (shop.desk / "train.py").write_text(WORDS + PROGRAM)
    screen.type("tpu run --on v5e-1 -n 'my run' train.py")
    job = screen.shows(r"^job (j\w+)$")[1]
    screen.shows(r"^running on s\w+ \(attempt 1\)$")
    screen.shows(r"^step 3$")
    screen.shows(r"^running for \d+s, 3/10 \(30%\) loss=0\.3333")  # a line that moves, below what the job said

    screen.press("C-c")
    screen.shows(rf"^detached: {job} goes on; return with `tpu logs -f {job}`, stop it with `tpu cancel {job}`$")
    screen.waits()
    text = screen.text()
    assert "Traceback" not in text
    assert "running for" not in text, "the moving line was taken away"
    screen.type("echo code $?")
    screen.shows(r"^code 130$")

    screen.clear()
    screen.type("tpu ps")
    screen.shows(r"^ID +NAME +STATE +ON +PROGRESS +AGE +RAN +USER +TAGS$")
    screen.shows(rf"^{job} +my run +running +s\w+ +3/10 \(30%\) loss=0\.3333 ")
    assert "\x1b[36mrunning\x1b[39m" in screen.text(raw=True), "states have colours on a terminal"
    screen.clear()
    screen.type("NO_COLOR=1 tpu ps")
    screen.shows(rf"^{job} +my run +running ")
    assert "\x1b" not in screen.text(raw=True)

    screen.clear()
    screen.type(f"tpu why {job[:-2]}")
    screen.shows(rf"^{job} \(running\): It runs on ")
    screen.type(f"tpu logs {job}")
    screen.shows(r"^step 1\nstep 2\nstep 3\n\$")
    screen.clear()
    screen.type(f"tpu logs -f {job}")
    screen.shows(r"^step 3$")
    shop.open_gate(job, "go")
    screen.shows(r"^done 0\n\$")
    screen.type(f"tpu why {job}; tpu show {job}")
    screen.shows(r"^state +succeeded$")
    assert "Traceback" not in screen.text()


def test_watch_takes_the_screen_repaints_it_and_gives_it_back(shop: Shop, screen: Screen) -> None:
    (shop.desk / "watched.py").write_text(WORDS + STEPS)
    screen.type("tpu run --on v5e-1 -n 'watched run' --detach watched.py")
    job = screen.shows(r"^(j\w{16})$")[1]
    shop.says(job, b"first")
    screen.clear()
    screen.type("echo before; tpu watch --every 0.2")
    line = rf"^{job} +watched run +running +s\w+ +1/4 \(25%\) loss=0\.5 "
    screen.shows(line)
    screen.shows(r"\d running")
    screen.shows(r"^ID +NAME +STATE ")
    screen.shows(r"; q or Ctrl-C leaves$")
    assert "before" not in screen.text(), "it has a screen of its own"
    assert "\x1b[36mrunning" in screen.text(raw=True)
    assert screen.cursor() == "0", "nothing blinks in it"

    shop.open_gate(job, "on")
    screen.shows(line.replace("1/4 \\(25%\\)", "2/4 \\(50%\\)"))  # by itself
    assert len(re.findall(f"^{job}", screen.text(), re.MULTILINE)) == 1, "painted over, not below"
    screen.resize(60, 10)
    screen.shows(rf"^{job} +watched run .{{,60}}…$")
    assert all(len(row) <= 60 for row in screen.text().splitlines())
    assert "leaves" in screen.text()
    screen.resize(COLUMNS, ROWS)
    screen.shows(line.replace("1/4 \\(25%\\)", "2/4 \\(50%\\)"))

    shop.open_gate(job, "go")
    screen.shows(rf"^{job} +watched run +succeeded ")
    screen.press("C-c")
    screen.shows(r"^before$")
    screen.waits()
    assert "watched run" not in screen.text(), "the screen is what it was"
    assert "Traceback" not in screen.text()
    assert screen.cursor() == "1"
    screen.type("echo code $?")  # and what is typed is seen again
    screen.shows(r"^\$ echo code \$\?\ncode 0$")

    screen.type("NO_COLOR=1 tpu watch --every 0.2")
    screen.shows(rf"^{job} +watched run +succeeded ")
    assert "\x1b" not in screen.text(raw=True)
    screen.press("q")
    screen.waits()
    screen.type("tpu watch --every 0.2")
    screen.shows(rf"^{job} ")
    screen.press("C-z")
    screen.shows(r"Stopped")
    assert "watched run" not in screen.text()
    screen.type("fg")
    screen.shows(rf"^{job} +watched run +succeeded ")
    screen.press("q")
    screen.waits()
    assert screen.cursor() == "1"


def test_watch_waits_for_a_server_that_is_away(shop: Shop, screen: Screen) -> None:
    shop.open()
    id = shop.submit("say('done')", name="short")
    shop.ended(id)
    screen.type("tpu watch --every 0.2")
    screen.shows(rf"^{id} +short +succeeded ")
    shop.kill_server()
    screen.shows(r"^the server does not answer: ")
    screen.shows(rf"^{id} +short +succeeded ")
    shop.open()
    screen.shows(r"; q or Ctrl-C leaves$")
    screen.press("q")
    screen.waits()


def test_a_failure_ends_the_session_with_its_last_words_and_what_to_do(shop: Shop, screen: Screen) -> None:
    (shop.desk / "fails.py").write_text("import sys\nsys.exit('no data in /data')\n")
    screen.type("tpu run --on v5e-1 fails.py; echo code $?")
    job = screen.shows(r"^(j\w+) failed \(user_error\) after \d+s, exit code 1$")[1]
    screen.shows(r"^code 1$")
    screen.shows(r"^no data in /data$")
    screen.shows(rf"^`tpu why {job}` and `tpu events {job}` say more$")


def test_a_pipe_gets_plain_lines(shop: Shop) -> None:
    shop.open()
    (shop.desk / "plain.py").write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)\n")
    for env in ({}, {"NO_COLOR": "1"}, {"TERM": "dumb"}, {"FORCE_COLOR": ""}):
        done = shop.command("ps", env=env)
        assert done.returncode == 0
        assert b"\x1b" not in done.stdout + done.stderr
    done = shop.command("run", "--on", "v5e-1", "plain.py")
    assert (done.returncode, done.stdout) == (0, b"out\n"), "standard output is the job's"
    assert b"\x1b" not in done.stderr
    assert b"\r" not in done.stderr
    lines = done.stderr.decode().splitlines()
    assert re.fullmatch(r"job j\w+", lines[0])
    assert "err" in lines
    assert re.fullmatch(r"j\w+ succeeded after \d+s", lines[-1])
    assert not re.search("[─-▟⠀-⣿]", done.stderr.decode()), "no boxes, bars or spinners"
