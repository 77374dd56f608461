"""`tpu dataset`: what is printed, what is written, and how bad input is refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.main import run
from tests.unit.extract.small_tokenizer import TEXT, write_tokenizer

PAIR = [[[1, 2]], [[2, 1]]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        json.dumps({"text": TEXT[: 20 + number], "chat": [{"role": "user", "content": "hi"}]}) for number in range(30)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*rows, "{"]) + "\n")
    return path


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_inspect_tells_what_a_run_would_meet(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dataset", "inspect", str(data), "--refused", str(data.parent / "bad.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "documents  30" in out
    assert "refused    1, listed in" in out
    assert "1 is not JSON" in out
    assert f"sample  {TEXT[:20]}" in out
    (refused,) = (data.parent / "bad.jsonl").read_text().splitlines()
    assert json.loads(refused)["line"] == 31


def test_inspect_counts_tokens_with_a_tokenizer(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tokenizer(data.parent / "model")
    assert run(["dataset", "inspect", str(data), "--tokenizer", str(folder), "--width", "12", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == 30
    assert found["tokens"]["width"] == 12
    assert found["tokens"]["cut"] > 0
    assert run(["dataset", "inspect", str(data), "--tokenizer", str(folder), "--width", "12"]) == 0
    assert "% of packed rows of 12 are real tokens" in capsys.readouterr().out


def test_inspect_reads_chats_and_templates(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tokenizer(data.parent / "model")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert run(["dataset", "inspect", str(data), "--tokenizer", str(folder), "--chat", "chat", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == ["<user>hi"]
    (data.parent / "t.jinja").write_text("T: {{ text }}")
    assert run(["dataset", "inspect", str(data), "--template", f"@{data.parent / 't.jinja'}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == [f"T: {TEXT[:20]}"]


def test_split_writes_streams(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = data.parent / "streams"
    assert run(["dataset", "split", str(data), "--streams", "9", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("30 rows in 9 streams, round robin; 1 refused\nstream_000.jsonl  4\n")
    assert "… and 1 more" in shown
    assert len(list(out.glob("stream_*.jsonl"))) == 9
    assert run(["dataset", "split", str(data), "--streams", "2", "--out", str(out)]) == 2
    assert "holds 9 streams already" in one_line(capsys)
    words = ["dataset", "split", str(data), "--streams", "2", "--contiguous", "--max-samples", "10"]
    assert run([*words, "--replace", "--json", "--out", str(out)]) == 0
    assert [stream["rows"] for stream in json.loads(capsys.readouterr().out)["streams"]] == [5, 5]


def test_grids_writes_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"examples": [PAIR, [1], PAIR]}) + "\n{}\n")
    words = ["dataset", "grids", str(tmp_path / "tasks.jsonl"), "--column", "examples"]
    assert run([*words, "--out", str(tmp_path / "p.jsonl"), "--refused", str(tmp_path / "bad.jsonl")]) == 0
    shown = capsys.readouterr().out
    assert shown == "8 prompts about 1 tasks; 1 rows refused\n1 examples were left out: they are no grids\n"
    first = json.loads((tmp_path / "p.jsonl").read_text().splitlines()[0])
    assert "```grid shape: 1x2" in first["messages"][1]["content"]
    assert json.loads((tmp_path / "bad.jsonl").read_text())["line"] == 2
    assert run([*words, "--out", str(tmp_path / "q.jsonl"), "--augment", "none", "--variants", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 1
    assert run([*words, "--out", str(tmp_path / "r.jsonl"), "--system", "none"]) == 0
    first = json.loads((tmp_path / "r.jsonl").read_text().splitlines()[0])
    assert [message["role"] for message in first["messages"]] == ["user"]


def test_the_names_of_grids_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dataset", "grids", "--list"]) == 0
    out = capsys.readouterr().out
    for name in ("minimal", "separated", "repeat", "symbols", "rows", "block", "shape", "flip", "colours"):
        assert name in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["inspect", "nothing.jsonl"], 2, "matches no file"),
        (["inspect", "gs://"], 2, "names no bucket"),
        (["inspect", "{data}", "--chat", "chat"], 2, "needs a chat template"),
        (["inspect", "{data}", "--filter", "odd"], 2, "is no token filter"),
        (["inspect", "{data}", "--filter", "assistant"], 2, "is for chats"),
        (["inspect", "{data}", "--column", "a", "--tokens", "b"], 2, "is given together with"),
        (["inspect", "{data}", "--tokenizer", "nowhere"], 2, "has no tokenizer.json"),
        (["inspect", "{data}", "--template", "{{% if %}}"], 2, "is no Jinja template"),
        (["inspect", "{data}", "--template", "@nowhere"], 3, "nowhere"),
        (["split", "{data}", "--streams", "600", "--out", "o"], 2, "is not between 1 and 512"),
        (["split", "{data}", "--streams", "2", "--out", "ftp://b/o"], 2, "is no place we can write to"),
        (["grids", "{data}", "--out", "gs://b"], 2, "names no file"),
        (["grids", "{data}", "--out", "o", "--encoder", "eval('1')"], 2, "which is none"),
        (["grids", "{data}", "--out", "o", "--augment", "stretch"], 2, "is no change"),
        (["grids", "{data}", "--out", "o"], 2, "has no task"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    words: list[str],
    code: int,
    message: str,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(data.parent)
    assert run(["dataset", *(word.format(data=data) for word in words)]) == code
    assert message in one_line(capsys)
    assert sorted(path.name for path in data.parent.iterdir()) == ["a.jsonl"]


def test_the_help_loads_no_library_of_data() -> None:
    check = (
        "import sys; from penstock.cli.main import run; run(['dataset', '--help']); "
        "sys.exit(any(name in sys.modules for name in ('numpy', 'pyarrow', 'jinja2', 'tokenizers', 'jax')))"
    )
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, check=False).returncode == 0
