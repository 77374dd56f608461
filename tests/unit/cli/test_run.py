"""`tpu run`: what is submitted for which words, what is shown, and how it exits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.client.client import Client
from penstock.wire.api import CommandRequest, ErrorView, LogChunk
from penstock.wiring import embedded
from tests.unit.cli.stand_in import StandIn, chunk, outcome


def command(server: StandIn, index: int = -1) -> CommandRequest:
    payload = server.submitted[index].payload
    assert isinstance(payload, CommandRequest)
    return payload


def test_a_program_is_frozen_submitted_and_followed(
    server: StandIn, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.logs = [chunk("step 1\n"), chunk("careful\n", stream="err"), chunk("step 2\n", offset=7)]
    assert run(["run", "--on", "v5e-8", "train.py", "lr=0.01", "seed=3", "--verbose", "data"]) == 0
    streams = capsys.readouterr()
    assert streams.out == "step 1\nstep 2\n"
    assert streams.err == "job j0001\ncareful\nj0001 succeeded after 2s\n"
    (request,) = server.submitted
    assert request.on == ("v5e-8",)
    assert request.name == "train.py"
    assert command(server).argv == (
        "python", "-u", "train.py", "--config.training.learning_rate=0.01", "--seed=3", "--verbose", "data",
    )  # fmt: skip
    assert command(server).snapshot in server.snapshots
    assert server.blobs


def test_after_two_dashes_nothing_is_changed(server: StandIn, project: Path) -> None:
    assert run(["run", "--no-snapshot", "--", "make", "CC=gcc", "lr=1", "--on", "x"]) == 0
    assert command(server).argv == ("make", "CC=gcc", "lr=1", "--on", "x")
    assert command(server).snapshot is None
    assert server.submitted[0].env == {}


def test_every_option_reaches_the_request(server: StandIn, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "kept")
    options = (
        "--on v4-8,v5e-8 -n exp --env A=1=2 --env FROM_HERE --secret KEY --after j0 --priority 5 --queue q --tag t1 "
        "--tag t2 --note why --timeout 1h30m --expected 10m --memory 2GiB --rule rerun --max-retries 2 --replicas 1-8 "
        "--slices 2 --spot --zone z1 --zone z2 --idempotency-key k --setup ./set-up --detach"
    )
    assert run(["run", *options.split(), "train.py"]) == 0
    (request,) = server.submitted
    assert request.on == ("v4-8", "v5e-8")
    assert (request.name, request.priority, request.queue, request.note) == ("exp", 5, "q", "why")
    assert request.env == {"A": "1=2", "FROM_HERE": "kept"}
    assert (request.secrets, request.after, request.tags) == (("KEY",), ("j0",), ("t1", "t2"))
    assert (request.timeout_s, request.expected_s, request.memory_bytes) == (5400.0, 600.0, 2 << 30)
    assert (request.rule, request.max_retries) == ("rerun", 2)
    assert (request.replicas_min, request.replicas_max, request.slices) == (1, 8, 2)
    assert (request.spot, request.zones, request.idempotency_key) == (True, ("z1", "z2"), "k")
    assert command(server).setup == "./set-up"


@pytest.mark.parametrize(
    ("style", "argv", "env"),
    [
        ("flag", ("--config.training.batch_size=8",), {}),
        ("hydra", ("config.training.batch_size=8",), {}),
        ("env", (), {"CONFIG_TRAINING_BATCH_SIZE": "8"}),
    ],
)
def test_overrides_come_in_the_style_of_the_project(
    style: str, argv: tuple[str, ...], env: dict[str, str], server: StandIn, project: Path
) -> None:
    (project / "penstock.toml").write_text(f'[run]\nstyle = "{style}"\n')
    assert run(["run", "--detach", "train.py", "bs=8"]) == 0
    assert command(server).argv == ("python", "-u", "train.py", *argv)
    assert server.submitted[0].env == env


def test_the_stage_is_put_in_on_the_host(server: StandIn, project: Path) -> None:
    assert run(["run", "--detach", "--log-stage", "train.py", "bs=8"]) == 0
    shell, flag, script, *rest = command(server).argv
    assert (shell, flag) == ("sh", "-c")
    assert script == 'exec "$@" --config.stage="$PENSTOCK_STAGE"'
    assert rest == ["sh", "python", "-u", "train.py", "--config.training.batch_size=8"]


def test_a_numbered_directory_is_frozen(server: StandIn, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["dir", "set", "2"]) == 0
    monkeypatch.chdir("/")
    assert run(["run", "--dir", "2", "--detach", "train.py"]) == 0
    assert command(server).snapshot in server.snapshots


def test_detached_prints_the_id_alone(server: StandIn, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--detach", "train.py"]) == 0
    streams = capsys.readouterr()
    assert streams.out == "j0001\n"
    assert "tpu logs -f j0001" in streams.err
    assert not any(path.endswith("/logs") for _, path in server.asked)


@pytest.mark.parametrize(
    ("state", "cause", "code", "seen"),
    [
        ("succeeded", "succeeded", 0, 0),
        ("failed", "user_error", 7, 7),
        ("failed", "user_error", None, 1),
        ("failed", "user_error", 256, 1),
        ("failed", "timeout", 143, 124),
        ("failed", "oom", None, 137),
        ("failed", "preempted", None, 75),
        ("failed", "infra", None, 75),
        ("failed", "lost", None, 75),
        ("cancelled", "cancelled", 143, 130),
        ("failed", "of a newer server", None, 1),
    ],
)
def test_the_exit_code_is_the_payloads_or_the_causes(
    state: str, cause: str, code: int | None, seen: int, server: StandIn, project: Path
) -> None:
    server.ending = outcome(state=state, cause=cause, exit_code=code)
    assert run(["run", "train.py"]) == seen


def test_json_is_the_outcome_and_nothing_else(
    server: StandIn, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.logs = [chunk("noise\n")]
    error = ErrorView(type="ValueError", message="no", traceback="Traceback…")
    server.ending = outcome(state="failed", cause="user_error", exit_code=1, error=error)
    assert run(["run", "--json", "train.py"]) == 1
    streams = capsys.readouterr()
    told = json.loads(streams.out)
    shape = "id state cause exit_code result error stage attempts slice started_at finished_at"
    assert set(told) >= set(shape.split())
    assert told["error"] == {"type": "ValueError", "message": "no", "traceback": "Traceback…"}
    assert streams.err == ""


def test_ctrl_c_detaches_and_says_how_to_return(
    server: StandIn, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_client: Client, _id: str, **_: object) -> Iterator[LogChunk]:
        yield chunk("step 1\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "logs", interrupted)
    assert run(["run", "train.py"]) == 130
    streams = capsys.readouterr()
    assert streams.out == "step 1\n"
    assert "detached: j0001 goes on; return with `tpu logs -f j0001`" in streams.err
    assert ("POST", "/v1/jobs/j0001/cancel") not in server.asked


def test_an_array_is_one_job_per_index(server: StandIn, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--array", "0-4:2", "train.py", "seed={index}"]) == 0
    assert [command(server, index).argv[-1] for index in range(3)] == ["--seed=0", "--seed=2", "--seed=4"]
    assert [request.env["PENSTOCK_ARRAY_INDEX"] for request in server.submitted] == ["0", "2", "4"]
    assert [request.name for request in server.submitted] == ["train.py[0]", "train.py[2]", "train.py[4]"]
    stems = {(request.array or "").partition("/")[0] for request in server.submitted}
    assert len(stems) == 1
    assert "3 of 3 succeeded" in capsys.readouterr().err


def test_an_array_with_a_bound_goes_out_whole_and_the_server_holds_it(
    server: StandIn, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.ending = outcome(state="failed", cause="user_error", exit_code=9)
    assert run(["run", "--json", "--array", "0-4%2", "train.py"]) == 9
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["index"] for each in told] == [0, 1, 2, 3, 4]
    assert run(["run", "--array", "0-4%2", "--detach", "train.py"]) == 0
    assert len(capsys.readouterr().out.split()) == 5
    batches = [path for method, path in server.asked if (method, path) == ("POST", "/v1/jobs/batch")]
    assert len(batches) == 2
    assert [request.at_most for request in server.submitted] == [2] * 10
    assert len({str(request.array).partition("/")[0] for request in server.submitted}) == 2


def test_an_array_sent_again_under_its_key_is_the_same_request(server: StandIn, project: Path) -> None:
    for _ in range(2):
        assert run(["run", "--detach", "--idempotency-key", "night 7", "--array", "0-2%1", "train.py"]) == 0
    assert server.submitted[:3] == server.submitted[3:]


def test_a_dry_run_sends_nothing(server: StandIn, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.pool("cheap", "v5e-8", provider="tpu_vm", spot=False)
    assert run(["run", "--dry-run", "--on", "v5e-8", "--timeout", "2h", "train.py", "lr=1"]) == 0
    out = capsys.readouterr().out
    assert "--config.training.learning_rate=1" in out
    assert "1 files, 14 B" in out
    assert "cheap" in out
    assert "per hour, at most $" in out
    assert server.submitted == []
    assert server.blobs == set()
    assert run(["run", "--dry-run", "--json", "--array", "0-9", "train.py"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["jobs"], told["files"], told["bytes"]) == (10, 1, 14)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["train.sh"], "'train.sh' is no Python file; other commands stand after --"),
        (["train.py", "--on", "v5e-8"], "--on stands after train.py; write it before"),
        (["train.py", "--timeout=3"], "--timeout=3 stands after train.py"),
        (["--dir", "nowhere", "train.py"], "--dir: 'nowhere' is no directory"),
        (["--dir", "7", "train.py"], "directory 7 is not set; go there and run: tpu dir set 7"),
        (["--array", "5-1", "train.py"], "5-1 is empty"),
        (["--array", "0-9%0", "train.py"], "after % comes how many may run at once, 1 or more"),
        (["--replicas", "8-1", "train.py"], "replicas are at least 1"),
        (["--memory", "lots", "train.py"], "'lots' is not a size; write it as 512M, 16G or 16GiB"),
        (["--timeout", "soon", "train.py"], "'soon' is not a time"),
        (["--env", "A B=1", "train.py"], "is not KEY=VALUE"),
        (["--env", "NOT_SET_HERE_AT_ALL", "train.py"], "has no value here"),
        ([], "Missing argument"),
        (["--no-snapshot", "--dir", ".", "train.py"], "give one of them"),
        (["--on", "v5e-7", "train.py"], "v5e-7"),
    ],
)
def test_bad_input_is_one_line(
    args: list[str], told: str, server: StandIn, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", *args]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert told in streams.err
    assert streams.err.count("\n") == 1
    assert server.submitted == []


def test_a_broken_project_file_is_told_with_its_name(
    server: StandIn, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "penstock.toml").write_text('[run]\nstyle = "loud"\n')
    assert run(["run", "train.py"]) == 2
    assert "penstock.toml" in capsys.readouterr().err


def test_a_whole_home_is_not_frozen_by_accident(
    server: StandIn, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(project))
    assert run(["run", "train.py"]) == 2
    assert "--dir DIR" in capsys.readouterr().err
    assert run(["run", "--dir", ".", "--detach", "train.py"]) == 0


def test_without_a_server_the_embedded_one_is_started(
    home: Path, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def start() -> str:
        started.append(True)
        raise OSError(98, "no port is free")

    monkeypatch.setattr(embedded, "ensure_server", start)
    assert run(["run", "train.py"]) == 3
    assert started == [True]
    assert capsys.readouterr().err == "tpu: no port is free\n"


def test_a_program_that_is_not_there_is_refused_before_anything_is_sent(
    server: StandIn, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", "trian.py"]) == 2
    assert "'trian.py' is not in " in capsys.readouterr().err
    assert not server.submitted
    assert not server.snapshots
