"""`tpu monitor` in a real terminal (tmux), against a real server with a job that runs, loses its slice, and ends."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.process.shop import Shop, soon
from tests.process.tmux import Screen

pytestmark = pytest.mark.slow

PROGRAM = """
from penstock import payload
payload.progress(1, 4, samples=512, shards=3, loss=0.5)
say("first words")
gate("on")
payload.progress(2, 4, samples=1024, shards=6, loss=0.25)
say("more words")
gate("go")
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("monitor") / "home")
    try:
        yield shop
    finally:
        shop.end()


@pytest.fixture
def screen(shop: Shop, tmp_path: Path) -> Iterator[Screen]:
    screen = Screen(shop, tmp_path, 80, 24)
    yield screen
    screen.end()


def running(shop: Shop, name: str) -> str:
    """A job that waits at its first gate."""
    shop.open()
    id = shop.submit(PROGRAM, name=name)
    shop.says(id, b"first words")
    soon(lambda: shop.view(id)["progress"])
    return id


def test_a_session_at_eighty_columns(shop: Shop, screen: Screen) -> None:
    job = running(shop, "watched")
    slice = shop.view(job)["slice"]
    screen.type("echo before; tpu monitor")
    screen.shows(rf"^{slice} +busy +watched +25% +512 +3 +\d+s +-")
    screen.shows(r"^local: 1 busy")
    screen.shows(r"jobs: 1 running, 0 queued$")
    screen.shows(rf"log of {job} \(watched\)")
    screen.shows(r"^first words$")
    assert "before" not in screen.text(), "it has a screen of its own"
    assert all(len(line) <= 80 for line in screen.text().splitlines())

    shop.open_gate(job, "on")
    screen.shows(rf"^{slice} +busy +watched +50% +1\.02k +6 ")  # by itself
    screen.shows(r"^more words$")

    with shop.client() as client:
        client.preempt(slice)
    screen.shows(rf"^(?!{slice})s\w+ +busy +watched +25% +512 +3 +\d+s +1")  # on another slice, from the beginning
    screen.shows(r"1 preempted")
    screen.press("4")
    screen.shows(r"^TIME +WHAT +OF")
    screen.press("/")
    screen.shows(r"^words that a row must hold")
    screen.press("slice.preempted")
    screen.shows(rf"^TIME +WHAT +OF\n[\d:]+ +slice\.preempted +{slice} ")
    screen.press("Escape")
    screen.shows(r"job\.placed")

    screen.press("2")
    screen.shows(rf"^{job} +watched +running +25% ")
    screen.press("c")
    screen.shows(rf"Stop {job} \(watched\)\?")
    screen.press("y")
    screen.shows(rf"^{job} +watched +cancelled ")
    screen.press("q")
    screen.shows(r"^before$")
    screen.waits()
    assert "watched" not in screen.text(), "the screen is what it was"
    screen.type("echo code $?")  # and what is typed is seen again
    screen.shows(r"^\$ echo code \$\?\ncode 0$")
    assert "Traceback" not in screen.text()


def test_it_says_that_the_server_is_away_and_goes_on_when_it_is_back(shop: Shop, screen: Screen) -> None:
    job = running(shop, "steady")
    screen.type("tpu monitor")
    screen.shows(r"^s\w+ +busy +steady +25% ")
    shop.kill_server()
    screen.shows(r"^the server does not answer: ")
    assert re.search(r"^s\w+ +busy +steady ", screen.text(), re.MULTILINE), "what was known stays"
    shop.open()
    screen.shows(r"^all well")
    shop.open_gate(job, "on")
    screen.shows(r"^s\w+ +busy +steady +50% ")
    screen.shows(r"^more words$")
    assert shop.command("cancel", job).returncode == 0  # another test may count what runs
    shop.ended(job)
    screen.press("C-c")
    screen.waits()
    assert "Traceback" not in screen.text()


def test_the_terminal_is_given_back_however_it_ends(shop: Shop, screen: Screen) -> None:
    job = running(shop, "left")
    screen.type("echo before; tpu monitor")
    screen.shows(r"^s\w+ +busy +left ")
    screen.press("C-z")
    screen.shows(r"^before\n(.*\n)*.*Stopped")
    screen.type("fg")
    screen.shows(r"^s\w+ +busy +left ")
    os.kill(screen.program(), signal.SIGTERM)
    screen.waits()
    screen.type("echo code $?")  # what is typed is seen: the terminal is not raw
    screen.shows(r"^\$ echo code \$\?\ncode 143$")
    assert screen.cursor() == "1"
    shop.open_gate(job, "on")
    shop.open_gate(job, "go")
    shop.ended(job)


def test_once_is_text_and_data(shop: Shop) -> None:
    job = running(shop, "printed")
    done = shop.command("monitor", "--once", "--filter", "printed", "--job", job)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert "\x1b" not in text
    assert re.search(r"^s\w+ +busy +v5e-1 +printed +25% +512 +3 ", text, re.MULTILINE)
    assert re.search(rf"^{job} +printed +running +25% ", text, re.MULTILINE)
    assert text.endswith(f"log of {job} (printed)\nfirst words\n")
    frame = msgspec.json.decode(shop.command("monitor", "--json", "--job", job).stdout)
    assert frame["selected"] == job
    assert frame["log"] == ["first words"]
    assert any(row["id"] == job and row["progress"]["samples"] == 512 for row in frame["jobs"])
    shop.open_gate(job, "on")
    shop.open_gate(job, "go")
    shop.ended(job)
