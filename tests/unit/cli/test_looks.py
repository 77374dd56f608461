"""How `tpu` looks: tables, spans, one screen, completion, the watcher's lines, and no colour where none belongs."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import click
import pytest

from penstock.cli import terminal
from penstock.cli.follow import Teller, now_line
from penstock.cli.main import run
from penstock.cli.watch import _tell
from penstock.wire.api import JobView, ProgressView, WhyView
from tests.unit.cli.stand_in import StandIn, attempt, job


def test_tldr_is_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tldr"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(len(line) for line in lines) <= 100


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert f"_TPU_COMPLETE={shell}_complete" in capsys.readouterr().out


def complete(words: str, index: int) -> list[str]:
    asked = {**os.environ, "_TPU_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(index)}
    done = subprocess.run(
        [sys.executable, "-c", "from penstock.cli.main import run; run([])"],
        env=asked, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_the_shell_completes_commands_and_ids(server: StandIn) -> None:
    assert set(complete("tpu ca", 1)) == {"catalog", "cancel"}
    server.jobs = {"jab": job("jab"), "jac": job("jac"), "jb": job("jb")}
    assert complete("tpu logs ja", 2) == ["jab", "jac"]


def test_completion_without_a_server_offers_nothing(home: Path) -> None:
    assert complete("tpu logs ja", 2) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (0.4, "0s"), (59, "59s"), (61, "1m01s"), (3700, "1h01m"), (90_000, "25h00m"), (200_000, "2d")],
)
def test_spans(seconds: float, text: str) -> None:
    assert terminal.span(seconds) == text


def test_what_is_not_printable_is_shown_as_an_escape() -> None:
    assert terminal.safe("a\x1b[0m\nb\u202eü") == "a\\x1b[0m\\nb\\u202eü"


def test_a_list_loads_only_what_it_needs(server: StandIn) -> None:
    """What makes `tpu ps` slow to start stays out: the async client, the catalogue, freezing, any server part."""
    server.jobs["j1"] = job("j1")
    code = (
        "import sys; from penstock.cli.main import run; code = run(['ps']);"
        "print('LOADED', *sorted(name for name in sys.modules)); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "penstock.client.transport" in loaded
    heavy = {"asyncio", "httpx2", "numpy", "pathspec", "penstock.domain.catalogue", "penstock.objects"}
    assert not loaded & heavy
    assert not any(name.startswith(("penstock.server", "penstock.wiring", "penstock.agent")) for name in loaded)


def test_a_terminal_has_colours_unless_asked_not_to(server: StandIn) -> None:
    """A real terminal, because click asks the system what standard output is."""
    server.jobs["j1"] = job("j1", "running")
    shown = {}
    for no_color in ("", "1"):
        leader, follower = pty.openpty()
        done = subprocess.run(
            [sys.executable, "-c", "import sys; from penstock.cli.main import run; sys.exit(run(['ps']))"],
            env={**os.environ, "NO_COLOR": no_color, "TERM": "xterm"}, stdout=follower, check=True, timeout=60,
        )  # fmt: skip
        os.close(follower)
        assert done.returncode == 0
        shown[no_color] = os.read(leader, 65536).decode()
        os.close(leader)
    assert "\x1b[36mrunning" in shown[""]
    assert "running" in shown["1"]
    assert "\x1b" not in shown["1"]


def why(sentence: str) -> WhyView:
    return WhyView(id="j1", state="queued", code="backoff", sentence=sentence, place=2)


def test_the_teller_tells_each_thing_once() -> None:
    teller = Teller()
    queued = job("j1", "queued")
    assert teller.news(queued, why("It waits 3 s more.")) == ["waiting: It waits 3 s more (place 2)"]
    assert teller.news(queued, why("It waits 2 s more.")) == []
    running = job("j1", attempts=(attempt("a1", hosts=4),))
    assert teller.news(running, None) == ["running on s1, 4 hosts (attempt 1)"]
    lost = attempt("a1", cause="preempted", evidence=("the slice is gone",))
    progress = ProgressView(done=120, total=1000)
    again = job("j1", attempts=(lost, attempt("a2", stage=1, slices=("s2",))), progress=progress)
    assert teller.news(again, None) == [
        "attempt 1 preempted at 120/1000 (12%): the slice is gone",
        "running on s2, resumed at stage 1 (attempt 2)",
    ]
    assert teller.news(again, None) == []


def test_the_line_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.follow.now_s", lambda: 1_700_000_090.0)
    assert now_line(job("j1", "queued"), why("No slice is free.")) == "queued for 1m30s: No slice is free (place 2)"
    running = job("j1", started_at=1_700_000_060.0, progress=ProgressView(done=3, metrics={"loss": 0.5}))
    assert now_line(running, None) == "running for 30s, 3 loss=0.5"


def test_watch_writes_changes_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[list[JobView]] = [
        [job("j1", "queued")],
        [job("j1", "queued")],
        [job("j1", "running"), job("j2", "queued")],
        [job("j1", "failed", cause="oom"), job("j2", "queued")],
    ]

    def pause(_: float) -> None:
        if not looks:
            raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli.watch.time.sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        _tell(lambda: looks.pop(0), 1.0)
    told = [line.split("  ")[1:3] for line in capsys.readouterr().out.splitlines()]
    assert told == [["j1", "queued"], ["j1", "running"], ["j2", "queued"], ["j1", "failed (oom)"]]


def test_a_table_fits_a_narrow_terminal() -> None:
    header = ("NAME", "ZONES", "SPOT", "TEAM")
    rows = [("first", "us-a,us-b,us-c", "-", "default"), ("second", "us-a", "-", "default")]
    assert terminal.fitted(header, rows, ("TEAM",), 80) == (header, rows)
    narrower, short = terminal.fitted(header, rows, ("TEAM",), 32)
    assert (list(narrower), short[1]) == (["NAME", "ZONES", "TEAM"], ["second", "us-a", "default"])
    narrowest, short = terminal.fitted(header, rows, ("TEAM",), 16)
    assert (list(narrowest), short) == (["NAME", "ZONES"], [["first", "us-a,us…"], ["second", "us-a"]])
    explained = [("first", "a reason that is long"), ("the second", "none")]
    assert terminal.fitted(("NAME", ""), explained, (), 24)[1][0] == ["first", "a reason th…"]
    assert max(len(click.unstyle(line)) for line in terminal.table(narrowest, short)) == 16
    assert terminal.fitted(("A",), [("\x1b[31mred red red\x1b[0m",)], (), 3)[1] == [("\x1b[31mred red red\x1b[0m",)]
