"""A working session in a real terminal (tmux): what stands on the screen while a job runs, after Ctrl-C, and later.

And what a pipe gets instead: plain lines, no escape sequences. Every tmux server is one of the test's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.shop import WORDS, Shop
from tests.process.tmux import COLUMNS, ROWS, Screen

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("terminal") / "home")
    try:
        yield shop
    finally:
        shop.end()


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
