"""The state directory: made once, kept private, mended where that is safe, refused in one line where it is not."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from penstock.capacity import processes
from penstock.wiring.home import Home, ServerFile, Unusable, locked


def mode(path: Path) -> str:
    return oct(path.stat().st_mode & 0o777)


def rows(home: Home) -> list[dict[str, str]]:
    return msgspec.json.decode((home.path / "tokens.json").read_bytes(), type=list[dict[str, str]])


def test_the_first_run_makes_key_and_token(tmp_path: Path) -> None:
    home = Home(tmp_path / "a" / "home")
    key = home.prepare()
    assert len(key) == 32
    token = (home.path / "token").read_text().strip()
    assert len(token) >= 40
    (row,) = rows(home)
    assert (row["team"], row["role"]) == ("default", "operator")
    assert row["sha256"] == hashlib.sha256(token.encode()).hexdigest()
    assert token not in (home.path / "tokens.json").read_text()
    assert mode(home.path) == "0o700"
    assert {mode(home.path / name) for name in ("key", "token", "tokens.json")} == {"0o600"}


def test_the_next_run_changes_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path)
    key = home.prepare()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert Home(tmp_path).prepare() == key
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_files_that_others_could_read_are_closed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.prepare()
    for name in ("key", "token", "tokens.json"):
        (tmp_path / name).chmod(0o644)
    home.prepare()
    assert {mode(tmp_path / name) for name in ("key", "token", "tokens.json")} == {"0o600"}


def test_a_lost_token_is_replaced_and_others_stay_valid(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.prepare()
    (first,) = rows(home)
    (tmp_path / "token").unlink()
    home.prepare()
    both = rows(home)
    assert both[0] == first
    assert both[1]["sha256"] != first["sha256"]


@pytest.mark.parametrize("text", ["", "xyz", "00" * 31, "00" * 33])
def test_a_damaged_key_is_not_replaced_in_silence(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(Unusable, match="is not 64 hex digits; restore or remove it"):
        Home(tmp_path).prepare()


def test_damaged_tokens_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text("[{")
    with pytest.raises(Unusable, match=r"tokens\.json: .*mend it"):
        Home(tmp_path).prepare()
    assert (tmp_path / "tokens.json").read_text() == "[{"


def test_a_directory_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unusable, match="set PENSTOCK_HOME elsewhere"):
        Home(tmp_path / "file" / "home").prepare()


def test_racers_agree_on_one_key(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from penstock.wiring.home import Home\n"
        "print(Home(Path(sys.argv[1])).prepare().hex())"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "home")], stdout=subprocess.PIPE) for _ in range(4)
    ]
    answers = {process.communicate()[0] for process in started}
    assert len(answers) == 1
    assert bytes.fromhex(answers.pop().decode().strip()) == Home(tmp_path / "home").prepare()


def test_a_server_file_counts_only_while_its_process_lives(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert home.server() is None
    said = home.announce("http://127.0.0.1:1", "1.0")
    assert home.server() == said
    assert mode(tmp_path / "server.json") == "0o600"
    for change in ({"pid_started": said.pid_started - 1}, {"boot": "another"}, {"pid": 2**22 - 3}):
        (tmp_path / "server.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(said, **change)))
        assert home.server() is None, change


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xff", b'{"url": 3}', b"[]"])
def test_a_damaged_server_file_is_no_server(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "server.json").write_bytes(text)
    home = Home(tmp_path)
    assert home.server() is None
    home.withdraw()
    assert not (tmp_path / "server.json").exists()


def test_a_server_withdraws_only_its_own_word(tmp_path: Path) -> None:
    home = Home(tmp_path)
    mine = home.announce("http://127.0.0.1:1", "1.0")
    me = processes.find(os.getpid())
    assert me is not None
    other = ServerFile(url="http://127.0.0.1:2", pid=me.pid, pid_started=me.started, version="1.0", boot=me.boot)
    (tmp_path / "server.json").write_bytes(msgspec.json.encode(other))
    home.withdraw(mine)
    assert home.server() == other
    home.withdraw(other)
    assert home.server() is None


def test_one_server_holds_the_directory(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with home.held():
        home.announce("http://127.0.0.1:1", "1.0")
        with pytest.raises(Unusable, match=r"runs in .* already \(pid \d+ at http://127.0.0.1:1\)"), home.held():
            pass
    with home.held():
        pass


def test_a_lock_says_whether_it_was_got(tmp_path: Path) -> None:
    with locked(tmp_path / "lock") as first:
        assert first
        with locked(tmp_path / "lock") as second:
            assert not second


@pytest.mark.parametrize(("text", "port"), [("8123\n", 8123), ("80", 0), ("x", 0), ("", 0), ("70000", 0)])
def test_the_last_port_is_remembered_if_it_is_one(tmp_path: Path, text: str, port: int) -> None:
    (tmp_path / "port").write_text(text)
    home = Home(tmp_path)
    assert home.last_port() == port
    home.keep_port(9000)
    assert home.last_port() == 9000
