"""`tpu exec`: where code comes from, what is sent, what comes back, batches."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.wire.api import ErrorView, SnippetRequest
from tests.unit.cli.stand_in import StandIn, chunk, outcome


def snippet(server: StandIn, index: int = -1) -> SnippetRequest:
    payload = server.submitted[index].payload
    assert isinstance(payload, SnippetRequest)
    return payload


def test_code_runs_and_its_result_is_printed(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.logs = [chunk("hello\n"), chunk("info\n", stream="log")]
    server.ending = outcome(result={"devices": 8, "names": ["a"]})
    assert run(["exec", "-c", "result = 1", "--var", "n=100", "--var", 's="x"', "--isolation", "inline"]) == 0
    streams = capsys.readouterr()
    assert streams.out == 'hello\n{"devices":8,"names":["a"]}\n'
    assert streams.err == "info\n"
    assert snippet(server) == SnippetRequest("result = 1", {"n": 100, "s": "x"}, "inline")


def test_a_result_that_is_only_a_repr_says_so(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.ending = outcome(result="<object>", note="object cannot be JSON")
    assert run(["exec", "-c", "x"]) == 0
    assert "note: object cannot be JSON" in capsys.readouterr().err


def test_code_comes_from_a_file_or_standard_input(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probe.py").write_text("\ufeffresult = 'ä'\n", "utf-8")
    assert run(["exec", str(tmp_path / "probe.py")]) == 0
    assert snippet(server).code == "result = 'ä'\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"result = 2")))
    assert run(["exec", "-"]) == 0
    assert snippet(server).code == "result = 2"


def test_an_error_is_the_payloads_own(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    trace = 'Traceback (most recent call last):\n  File "<snippet>", line 1\nValueError: \x1b[2Jno'
    error = ErrorView(type="ValueError", message="no", traceback=trace)
    server.ending = outcome(state="failed", cause="user_error", exit_code=1, error=error)
    assert run(["exec", "-c", "raise ValueError('no')"]) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert 'File "<snippet>", line 1\n' in streams.err
    assert "\x1b" not in streams.err
    assert streams.err.endswith("j0001 failed (user_error) after 2s, exit code 1\n")


def test_json_is_the_outcome(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.logs = [chunk("noise\n")]
    server.ending = outcome(result=3)
    assert run(["exec", "--json", "-c", "result = 3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["result"]) == ("succeeded", 3)


def test_a_batch_is_one_job_per_line(server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"variables": {"n": 1}, "name": "one", "tags": ["x"]},
        {"code": "result = 9", "timeout_s": 5, "idempotency_key": "mine"},
    ]
    (tmp_path / "work.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    server.ending = outcome(result=1)
    options = ["--batch", str(tmp_path / "work.jsonl"), "--json", "--tag", "t", "--idempotency-key", "k"]
    assert run(["exec", "-c", "result = n", *options]) == 0
    first, second = server.submitted
    assert snippet(server, 0) == SnippetRequest("result = n", {"n": 1}, "fork")
    assert (first.name, first.tags, first.idempotency_key) == ("one", ("t", "x"), "k")
    assert snippet(server, 1).code == "result = 9"
    assert (second.timeout_s, second.idempotency_key) == (5.0, "mine")
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["id"] for each in told] == ["j0001", "j0002"]


def test_a_batch_exits_with_the_first_failure(server: StandIn, tmp_path: Path) -> None:
    (tmp_path / "work.jsonl").write_text("{}\n{}\n")
    server.ending = outcome(state="failed", cause="timeout")
    assert run(["exec", "-c", "pass", "--batch", str(tmp_path / "work.jsonl")]) == 124


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "there is no code; give -c CODE, FILE.py, or - for standard input"),
        (["-c", "1", "x.py"], "give the code once"),
        (["nowhere.py"], "'nowhere.py' cannot be read: No such file or directory"),
        (["."], "'.' is no regular file"),
        (["binary"], "is not UTF-8 text (byte 0)"),
        (["huge.py"], "is over 1.0 MB; put larger programs into a directory"),
        (["loop"], "'loop' cannot be read"),
        (["-c", "1", "--var", "n=x y"], "the value is not JSON"),
        (["-c", "1", "--var", "2n=1"], "is not KEY=VALUE"),
        (["--batch", "bad.jsonl"], "--batch bad.jsonl, line 2:"),
        (["--batch", "unknown.jsonl"], "unknown field `cod`"),
        (["--batch", "empty.jsonl"], "there is no line in it"),
        (["--batch", "nocode.jsonl"], "--batch, line 1: it has no code"),
    ],
)
def test_bad_input_is_one_line(
    args: list[str],
    told: str,
    server: StandIn,
    project: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (project / "binary").write_bytes(b"\xff\x00")
    (project / "huge.py").write_bytes(b"#" * (1 << 20) + b"#")
    (project / "loop").symlink_to("loop")
    (project / "bad.jsonl").write_text('{"code": "1"}\n{"code": \n')
    (project / "unknown.jsonl").write_text('{"cod": "1"}\n')
    (project / "empty.jsonl").write_text("\n\n")
    (project / "nocode.jsonl").write_text("{}\n")
    assert run(["exec", *args]) == 2
    streams = capsys.readouterr()
    assert told in streams.err
    assert streams.err.count("\n") == 1
    assert server.submitted == []
