"""`tpu ps`, `show`, `result`, `why`, `events`: what is asked, what is shown, safely."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.wire.api import ErrorView, EventView, ProgressView
from penstock.wire.problems import problem
from tests.unit.cli.stand_in import StandIn, attempt, job, outcome


def test_ps_shows_live_jobs_then_the_latest_that_ended(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressView(done=120, total=1000, metrics={"loss": 0.25})
    for each in (job("j1", "failed", cause="oom"), job("j2", "running", progress=progress, tags=("a", "b"))):
        server.jobs[each.id] = each
    assert run(["ps"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["ID", "NAME", "STATE", "ON"]
    assert first.startswith("j2")
    assert "120/1000 (12%) loss=0.25" in first
    assert "a,b" in first
    assert second.startswith("j1")
    assert "failed (oom)" in second
    assert "\x1b" not in header + first + second  # no terminal, no colours


@pytest.mark.parametrize(
    ("args", "query"),
    [
        (["--state", "failed", "--user", "ada"], {"state": "failed", "user": "ada"}),
        (["--state", "live", "--tag", "t"], {"state": "running,provisioning,queued", "tag": "t"}),
        (["--state", "ended", "--queue", "q"], {"state": "succeeded,failed,cancelled", "queue": "q"}),
        (["-a"], {}),
    ],
)
def test_ps_passes_its_filters_on(args: list[str], query: dict[str, str], server: StandIn) -> None:
    assert run(["ps", *args]) == 0
    assert server.queries == [query]


def test_ps_since_is_a_point_in_time(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.jobs.now_s", lambda: 1000.0)
    assert run(["ps", "--since", "10m"]) == 0
    assert server.queries == [{"since": "400.0"}]


def test_ps_json_is_a_list_of_jobs(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["j1"] = job("j1")
    assert run(["ps", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["id"], told["state"], told["on"]) == ("j1", "running", ["v5e-8"])


def test_names_cannot_steer_the_terminal(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "x\x1b]0;owned\x07\r\nfake line\u202e"
    view = job("j1", name=hostile, note=hostile, reason=hostile, attempts=(attempt(evidence=(hostile,)),))
    server.jobs["j1"] = view
    for args in (["ps"], ["show", "j1"]):
        assert run(args) == 0
        out = capsys.readouterr().out
        assert not {"\x1b", "\x07", "\r", "\u202e"} & set(out)
        assert not any(line.startswith("fake line") for line in out.splitlines())


def test_show_tells_attempts_and_the_error(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    attempts = (
        attempt("a1", state="closed", cause="preempted", closed_at=1_700_000_062.0, evidence=("the slice is gone",)),
        attempt("a2", stage=1, slices=("s2",), exit_code=3, cause="user_error", closed_at=1_700_000_070.0),
    )
    server.jobs["j1"] = job(
        "j1",
        "failed",
        cause="user_error",
        exit_code=3,
        attempts=attempts,
        error=ErrorView(type="ValueError", message="no"),
    )
    assert run(["show", "j1"]) == 0
    out = capsys.readouterr().out
    assert "failed (user_error)" in out
    assert "preempted" in out
    assert "the slice is gone" in out
    assert "user_error (exit code 3)" in out
    assert out.endswith("ValueError: no\n")


@pytest.mark.parametrize(
    ("usd", "line"), [(0.0, "cost       free: this machine's own capacity"), (1234.5, "cost       $1,234.50")]
)
def test_show_says_what_a_job_cost(usd: float, line: str, server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["j1"] = job("j1", "succeeded", cost_usd=usd)
    assert run(["show", "j1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_show_says_why_a_job_waits(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["j1"] = job("j1", "queued")
    assert run(["show", "j1"]) == 0
    assert "no slice is free (place 3)" in capsys.readouterr().out


def test_show_json_has_the_shape_of_an_outcome(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.outcomes["j1"] = outcome("j1", result=[1, 2])
    assert run(["show", "j1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"] == [1, 2]


@pytest.mark.parametrize(
    ("code", "exit_code"), [("not_found", 5), ("ambiguous", 2), ("forbidden", 4), ("unauthenticated", 4), ("fault", 70)]
)
def test_a_refusal_is_one_line_with_its_exit_code(
    code: str, exit_code: int, server: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refusals["/v1/jobs/j9"] = problem(code, "job: 'j9' it is", advice="try `tpu ps`")
    assert run(["show", "j9"]) == exit_code
    assert capsys.readouterr().err == "tpu: job: 'j9' it is; try `tpu ps`\n"


def test_result_prints_the_value_and_saves_artifacts(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.jobs["j1"] = job("j1", "succeeded")
    server.outcomes["j1"] = outcome("j1", result={"a": 1})
    server.artifacts = {"loss.json": b"[1]", "plots/a.png": b"\x89"}
    assert run(["result", "j1"]) == 0
    streams = capsys.readouterr()
    assert json.loads(streams.out) == {"a": 1}
    assert "artifacts: loss.json, plots/a.png" in streams.err
    assert run(["result", "j1", "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "plots" / "a.png").read_bytes() == b"\x89"


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil", "a//b"])
def test_an_artifact_cannot_leave_the_folder(
    name: str, server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.jobs["j1"] = job("j1", "succeeded")
    server.artifacts = {name: b"x"}
    assert run(["result", "j1", "-o", str(tmp_path / "out")]) == 1
    assert "was not fetched" in capsys.readouterr().err
    assert not (tmp_path / "evil").exists()


def test_result_of_a_job_that_runs_says_so(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.jobs["j1"] = job("j1", "running")
    assert run(["result", "j1"]) == 3
    assert "j1 is running; there is no result yet; add --wait" in capsys.readouterr().err


def test_result_exits_as_the_job_did(server: StandIn) -> None:
    server.jobs["j1"] = job("j1", "failed")
    server.outcomes["j1"] = outcome("j1", state="failed", cause="user_error", exit_code=42)
    assert run(["result", "j1"]) == 42


def test_why_is_a_sentence_a_place_and_advice(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["why", "j1"]) == 0
    assert capsys.readouterr().out == "j0001 (queued): no slice is free\nplace 3 in its queue\n"
    assert run(["why", "j1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["code"] == "no_capacity"


def test_events_are_lines(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.events = [
        EventView(seq=1, at=0.0, kind="job.created", id="j1", body={"by": "ada", "empty": None}),
        EventView(seq=2, at=1.0, kind="job.started", id="j1"),
    ]
    assert run(["events", "j1"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[0] == "1"
    assert first.endswith("j1  by=ada")
    assert "job.started" in second
    assert run(["events", "j1", "-f", "--json", "--after", "1"]) == 0
    assert [json.loads(line)["seq"] for line in capsys.readouterr().out.splitlines()] == [2]


def test_without_a_server_there_is_one_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ps"]) == 3
    line = capsys.readouterr().err
    assert line.startswith("tpu: no server is configured and none runs on this machine; `tpu run` or `tpu serve`")


def test_colours_are_for_terminals_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.cli.main import _colour

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert _colour() is None
    monkeypatch.setenv("NO_COLOR", "1")
    assert _colour() is False
