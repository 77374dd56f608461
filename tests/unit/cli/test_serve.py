"""`tpu serve` and `tpu down`: how mistakes are answered. What they do is in tests/process/test_embedded.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.main import run


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--port", "70000"], "--port: 70000 is not a whole number from 0 to 65535"),
        (["--local-hosts", "-1"], "--local-hosts: -1 is not a whole number"),
        (["--log-level", "loud"], "--log-level: 'loud' is not one of debug"),
        (["--default-on", "v99-8"], "--default-on: 'v99-8' names an accelerator nobody knows"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], line: str, home: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", *words]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1


def test_down_without_a_server_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["down"]) == 0
    assert capsys.readouterr().out == "no server ran here\n"
