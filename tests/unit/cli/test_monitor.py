"""`tpu monitor` as a command: one frame as text or data without textual, and one line where it cannot draw."""

from __future__ import annotations

import sys

import msgspec
import pytest

from penstock.cli import monitor, screen
from penstock.cli.main import ExitCode, run
from penstock.wire import problems
from tests.unit.cli.stand_in import StandIn, chunk, job
from tests.unit.cli.test_monitor_model import event, queue, said, slice


@pytest.fixture
def busy(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A server with something to see, and no textual."""
    monkeypatch.setitem(sys.modules, "textual", None)
    server.slices = [slice("s1", job="j1"), slice("s2", "z2")]
    server.jobs = {"j1": job("j1", name="resnet", progress=said(25, samples=500.0)), "j2": job("j2", "failed")}
    server.queues = {"default": queue(waiting=3)}
    server.events = [event(1, "job.created", "j1"), event(2, "slice.preempted", "s1")]
    server.logs = [chunk("hello\nworld\n")]
    return server


def test_once_prints_a_frame(busy: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["monitor", "--once"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.startswith("2 slices (1 busy, 1 free), 16 chips · jobs: 1 running, 3 queued\n")
    assert "\x1b" not in out
    for word in ("z1: 1 busy, 1 preempted", "resnet", "25%", "slice.preempted", "log of j1 (resnet)", "world"):
        assert word in out
    logs = [query for (_, path), query in zip(busy.asked, busy.queries, strict=True) if path.endswith("/logs")]
    assert logs[0]["tail"], "a monitor reads the end of a log, not all of it"
    assert logs[0].get("follow") != "true"


def test_json_is_the_frame(busy: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["monitor", "--once", "--json"], ["monitor", "--json"]):
        assert run(words) == ExitCode.OK
        frame = msgspec.json.decode(capsys.readouterr().out)
        assert frame["totals"]["preemptions"] == 1
        assert [zone["zone"] for zone in frame["zones"]] == ["z1", "z2"]
        assert frame["zones"][0]["slices"][0]["progress"]["samples"] == 500.0
        assert frame["log"] == ["hello", "world"]
        assert frame["selected"] == "j1"


def test_the_log_of_another_job_and_a_filter(busy: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["monitor", "--json", "--job", "j2", "--filter", "z2"]) == ExitCode.OK
    frame = msgspec.json.decode(capsys.readouterr().out)
    assert frame["selected"] == "j2"
    assert [zone["zone"] for zone in frame["zones"]] == ["z2"]
    assert frame["jobs"] == []


def test_since_says_how_far_back_is_counted(busy: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["monitor", "--json", "--since", "2h"]) == ExitCode.OK
    frame = msgspec.json.decode(capsys.readouterr().out)
    assert frame["at"] - frame["since"] == pytest.approx(7200, abs=60)
    assert run(["monitor", "--once", "--since", "yesterday"]) == ExitCode.BAD_INPUT


def test_without_textual_the_live_screen_says_what_to_install(
    busy: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "usable", lambda: True)
    assert run(["monitor"]) == ExitCode.NOT_AVAILABLE
    assert capsys.readouterr().err == "tpu: this command needs textual; install it with: pip install 'penstock[tui]'\n"
    assert busy.asked == []


def test_no_screen_no_monitor(busy: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["monitor"]) == ExitCode.BAD_INPUT
    assert "add --once" in capsys.readouterr().err


def test_a_refusal_is_one_line_before_any_screen(
    server: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "usable", lambda: True)
    monkeypatch.setattr(monitor, "_show", lambda *_: pytest.fail("a screen was taken"))
    server.refusals["/v1/slices"] = problems.problem("unauthenticated", "no valid token")
    assert run(["monitor"]) == ExitCode.NOT_ALLOWED
    err = capsys.readouterr().err
    assert "no valid token" in err
    assert err.count("\n") == 1
