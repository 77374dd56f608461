"""Uploads: what a payload left is sent, what it must not be is not followed, and declared outputs are told apart."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from typing_extensions import override

from penstock.agent import uploads
from penstock.agent.link import Link, Refused, Silent
from penstock.agent.uploads import Left
from penstock.domain import limits
from penstock.wire.agent import ResultReport
from penstock.wire.api import ErrorView
from penstock.wire.problems import problem


class Recorder(Link):
    """Takes calls instead of making them; `fates` are raised first, one per call."""

    def __init__(self) -> None:
        super().__init__("http://nowhere")
        self.sent: dict[str, bytes] = {}
        self.fates: list[Exception] = []

    @override
    async def call(self, method: str, path: str, body: bytes | Path = b"", **_: object) -> bytes:
        if self.fates:
            raise self.fates.pop(0)
        self._take(path.removeprefix("/v1/agent/attempts/a1/"), body)
        return b""

    def _take(self, path: str, body: bytes | Path) -> None:
        self.sent[path] = body if isinstance(body, bytes) else body.read_bytes()

    @property
    def report(self) -> ResultReport:
        return msgspec.json.decode(self.sent["result"], type=ResultReport)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "output").mkdir()
    return tmp_path


def send(link: Recorder, folder: Path, **more: object) -> tuple[tuple[str, ...], list[str]]:
    said: list[str] = []
    given = {
        "attempt": "a1",
        "rank": 0,
        "outputs": (),
        "folder": folder / "output",
        "report": folder / "report",
        **more,
    }
    return asyncio.run(uploads.send(link, Left(**given), said.append)), said  # type: ignore[arg-type]


def test_nothing_left_costs_no_call(folder: Path) -> None:
    link = Recorder()
    assert send(link, folder) == ((), [])
    assert link.sent == {}


def test_files_are_sent_by_their_names_and_outputs_told(folder: Path) -> None:
    (folder / "output/model").mkdir()
    (folder / "output/model/a b.bin").write_bytes(b"1")
    (folder / "output/notes.txt").write_bytes(b"2")
    link = Recorder()
    assert send(link, folder, outputs=("model", "missing", "notes.txt")) == (("model", "notes.txt"), [])
    assert link.sent["artifacts/model/a%20b.bin"] == b"1"
    assert link.report.artifacts == ("notes.txt", "model/a b.bin")


def test_other_ranks_do_not_write_over_rank_0(folder: Path) -> None:
    for name in ("declared", "other"):
        (folder / "output" / name).write_bytes(b"x")
    link = Recorder()
    assert send(link, folder, rank=2, outputs=("declared",))[0] == ("declared",)
    assert set(link.sent) == {"artifacts/declared", "artifacts/host-2/other", "result"}


def test_links_pipes_and_giants_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "secret").write_text("canary")
    (folder / "output/link").symlink_to(folder / "secret")
    (folder / "output/folder").symlink_to(folder)
    os.mkfifo(folder / "output/pipe")
    (folder / "output/result.json").symlink_to(folder / "secret")
    monkeypatch.setattr(limits, "ARTIFACT_BYTES_MAX", 10)
    (folder / "output/giant").write_bytes(b"x" * 11)
    link = Recorder()
    _, said = send(link, folder)
    assert link.sent == {}
    assert len(said) == 4


def test_a_commands_result_and_a_snippets_report(folder: Path) -> None:
    (folder / "output/result.json").write_text('{"loss": 1}')
    link = Recorder()
    send(link, folder)
    assert link.report.result == {"loss": 1}
    (folder / "report").write_bytes(msgspec.json.encode(ResultReport(result=5, note="n", artifacts=("x",))))
    send(link, folder, error=ErrorView(type="late", message="m"))
    again = link.report
    assert again == msgspec.structs.replace(
        ResultReport(result=5, note="n", artifacts=("x", "result.json")), error=again.error
    )
    assert again.error is not None


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 200_000, b"nan"])
def test_a_result_that_is_not_json_is_a_file_like_any_other(folder: Path, content: bytes) -> None:
    (folder / "output/result.json").write_bytes(content)
    link = Recorder()
    send(link, folder)
    assert link.report.result is None
    assert link.sent["artifacts/result.json"] == content


def test_a_result_too_large_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESULT_BYTES_MAX", 100)
    (folder / "report").write_bytes(msgspec.json.encode(ResultReport(result="x" * 40)))
    (folder / "output" / ("y" * 40)).touch()
    link = Recorder()
    _, said = send(link, folder)
    assert link.report.error is not None
    assert link.report.error.type == "ResultTooLarge"
    assert said


def test_it_tries_through_a_silence_and_takes_a_no(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "RETRY_FIRST_S", 0.001)
    for name in ("a", "b"):
        (folder / "output" / name).write_bytes(b"x")
    link = Recorder()
    link.fates = [Silent("down"), Silent("down"), Refused(problem("too_large", "no"))]
    outputs, said = send(link, folder, outputs=("a", "b"))
    assert outputs == ("b",)
    assert len(said) == 1
    assert set(link.sent) == {"artifacts/b", "result"}


def test_no_secret_leaves_in_a_result_an_error_a_name_or_a_complaint(folder: Path) -> None:
    for name in ("a-s3cret.txt", "a-0ther-one.txt", "data.bin", "pipe-s3cret"):
        (folder / "output" / name).write_text("s3cret data")
    (folder / "output" / "pipe-s3cret").unlink()
    os.mkfifo(folder / "output" / "pipe-s3cret")
    (folder / "output" / "result.json").write_text('{"s3cret": ["is s3cret", 1]}')
    link = Recorder()
    error = ErrorView(type="X", message="no s3cret", traceback="at s3cret")
    _, said = send(link, folder, hidden=("s3cret", "0ther-one"), error=error)
    assert link.report.result == {"***": ["is ***", 1]}
    assert link.report.error == ErrorView(type="X", message="no ***", traceback="at ***")
    assert set(link.sent) == {"artifacts/a-%2A%2A%2A.txt", "artifacts/a-%2A%2A%2A.txt_", "artifacts/data.bin", "result"}
    assert link.sent["artifacts/data.bin"] == b"s3cret data", "files are the job's own"
    assert any("result.json" in line for line in said)
    assert not [line for line in said if "s3cret" in line]
