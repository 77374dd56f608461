"""Where a client finds its server and its token, who wins, and where a token never goes."""

import json
from pathlib import Path

import pytest

from penstock.client.errors import ApiError
from penstock.client.settings import find, normal_url, required


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


def environment(home: Path, **more: str) -> dict[str, str]:
    return {"PENSTOCK_HOME": str(home), **more}


def embed(home: Path, url: str = "http://127.0.0.1:7000", token: str = "home-token\n") -> None:
    (home / "server.json").write_text(json.dumps({"url": url, "pid": 1, "pid_started": 2.0, "version": "0"}))
    (home / "token").write_text(token)


def test_nothing_configured(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(environment=environment(home)) is None
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    with pytest.raises(ApiError, match="tpu serve") as caught:
        required()
    assert caught.value.exit_code == 3


def test_the_embedded_server_is_found_with_its_token(home: Path) -> None:
    embed(home)
    found = find(environment=environment(home))
    assert found is not None
    assert found[:2] == ("http://127.0.0.1:7000", "home-token")
    assert (found.url_from, found.token_from) == (str(home / "server.json"), str(home / "token"))


def test_later_sources_give_way_to_earlier_ones(home: Path) -> None:
    embed(home)
    (home / "penstock.toml").write_text('[client]\nurl = "https://file/"\ntoken = "file-token"\n[serve]\nport = 1\n')
    in_file = find(environment=environment(home))
    assert in_file is not None
    assert in_file[:2] == ("https://file", "file-token")
    in_environment = find(environment=environment(home, PENSTOCK_URL="https://env", PENSTOCK_TOKEN="env-token"))
    assert in_environment is not None
    assert in_environment == ("https://env", "env-token", "PENSTOCK_URL", "PENSTOCK_TOKEN")
    given = find("https://arg", "arg-token", environment=environment(home, PENSTOCK_URL="https://env"))
    assert given is not None
    assert given[:2] == ("https://arg", "arg-token")


def test_a_token_goes_only_to_the_server_it_belongs_to(home: Path) -> None:
    """Neither the embedded server's token nor the file's may be collected by an address from elsewhere."""
    embed(home)
    (home / "penstock.toml").write_text('[client]\nurl = "https://file"\ntoken = "file-token"\n')
    found = find("https://elsewhere", environment=environment(home))
    assert found is not None
    assert found.token is None
    same = find("http://127.0.0.1:7000/", environment=environment(home))
    assert same is not None
    assert same.token == "home-token"


def test_a_file_in_the_working_directory_is_not_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "cloned"
    work.mkdir()
    (work / "penstock.toml").write_text('[client]\nurl = "https://evil"\n')
    monkeypatch.chdir(work)
    assert find(environment=environment(home)) is None


def test_a_config_of_ones_own_with_a_token_in_a_file(home: Path, tmp_path: Path) -> None:
    config = tmp_path / "other.toml"
    config.write_text('[client]\nurl = "https://team:8443/api/"\ntoken_file = "secret"\n')
    (tmp_path / "secret").write_text("from-file\n")
    found = find(environment=environment(home, PENSTOCK_CONFIG=str(config)))
    assert found is not None
    assert found[:2] == ("https://team:8443/api", "from-file")
    (tmp_path / "secret").unlink()
    with pytest.raises(ApiError, match="secret: there is no such file"):
        find(environment=environment(home, PENSTOCK_CONFIG=str(config)))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host", "is not an http or https address"),
        ("host:80", "is not an http or https address"),
        ("http://", "is not an http or https address"),
        ("http://host:99999", "is no address"),
        ("http://user:pass@host", "user name"),
        ("http://host/?token=1", "a query"),
    ],
)
def test_addresses_that_are_none(url: str, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        normal_url(url)
    assert "pass" not in str(caught.value)


def test_addresses_are_compared_in_one_spelling() -> None:
    assert normal_url("HTTP://Host:80/api/") == "http://host:80/api"
    assert normal_url("http://[::1]:80") == "http://[::1]:80"


@pytest.mark.parametrize("token", ["with space", "two\nlines", "ümlaut", "x" * 5000])
def test_a_token_that_cannot_be_a_header_is_refused_without_showing_it(home: Path, token: str) -> None:
    with pytest.raises(ApiError, match="token: the one from PENSTOCK_TOKEN") as caught:
        find("http://host", environment=environment(home, PENSTOCK_TOKEN=token))
    assert token[:4] not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"), [("penstock.toml", "[client\n"), ("penstock.toml", "[client]\nurl = 5\n"), ("server.json", "{")]
)
def test_damaged_files_are_named(home: Path, name: str, text: str) -> None:
    (home / name).write_text(text)
    with pytest.raises(ApiError, match=name) as caught:
        find(environment=environment(home))
    assert caught.value.exit_code == 2
