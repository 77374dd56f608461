"""What a command says when the server of this machine gives no answer: that it is down, or only that it is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.talk import Refused, talking
from penstock.client.transport import unreachable


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (ConnectionRefusedError("refused"), "the server of this machine is down; `tpu serve` or `tpu run` starts it"),
        (TimeoutError("timed out"), "the server of this machine runs and did not answer in time"),
    ],
)
def test_a_server_that_is_slow_is_not_called_down(home: Path, cause: OSError, told: str) -> None:
    home.mkdir()
    (home / "server.json").write_text('{"url": "http://127.0.0.1:1"}')
    (home / "token").write_text("token")
    with pytest.raises(Refused) as caught, talking():
        raise unreachable("http://127.0.0.1:1", cause) from cause
    assert told in caught.value.message
    assert caught.value.message.count("\n") == 0


def test_another_machines_server_is_none_of_our_business(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not home.exists()
    monkeypatch.setenv("PENSTOCK_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("PENSTOCK_TOKEN", "token")
    cause = TimeoutError("timed out")
    with pytest.raises(Refused) as caught, talking():
        raise unreachable("http://127.0.0.1:1", cause) from cause
    assert "this machine" not in caught.value.message
