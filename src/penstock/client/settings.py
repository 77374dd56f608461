"""Finds the server and the token: arguments, then the environment, then `penstock.toml`, then the embedded server.

Both clients and `cli` call `find`. The token in the state directory belongs to the embedded server: it is sent to that
server's address and to no other, so that an address from elsewhere never collects it. It must not open a connection,
nor start a server (that is `wiring.embedded`, asked by the CLI).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from penstock.client.errors import ApiError, bad_input
from penstock.wire.problems import problem

HOME_VARIABLE = "PENSTOCK_HOME"
CONFIG_VARIABLE = "PENSTOCK_CONFIG"
CONFIG_NAME = "penstock.toml"
TOKEN_CHARACTERS_MAX = 4096  # a signed token fits; a file named by mistake does not


class Settings(NamedTuple):
    """Where the server is, who we are, and where both came from (for `tpu config show` and for error lines)."""

    url: str
    token: str | None
    url_from: str
    token_from: str


class _ServerFile(msgspec.Struct, frozen=True):
    """What the client needs of `server.json`."""

    url: str


class _ClientTable(msgspec.Struct, frozen=True):
    """`[client]` of `penstock.toml`."""

    url: str | None = None
    token: str | None = None
    token_file: str | None = None


class _ConfigFile(msgspec.Struct, frozen=True):
    client: _ClientTable = _ClientTable()


def home(environment: Mapping[str, str] = os.environ) -> Path:
    """The state directory: `$PENSTOCK_HOME`, by default `~/.penstock`."""
    chosen = environment.get(HOME_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path("~/.penstock").expanduser()


def config_path(environment: Mapping[str, str] = os.environ) -> Path:
    """The one `penstock.toml` a client reads: `$PENSTOCK_CONFIG`, by default the one in the state directory.

    Not the one in the working directory: a cloned repository must not be able to send our token elsewhere.
    """
    chosen = environment.get(CONFIG_VARIABLE)
    return Path(chosen).expanduser() if chosen else home(environment) / CONFIG_NAME


def find(
    url: str | None = None, token: str | None = None, *, environment: Mapping[str, str] = os.environ
) -> Settings | None:
    """The settings to use; None when no server is configured and none was started here."""
    file = config_path(environment)
    config = _read_config(file, required=CONFIG_VARIABLE in environment)
    embedded = _read_embedded(home(environment))
    urls = (
        (url, "the argument url"),
        (environment.get("PENSTOCK_URL"), "PENSTOCK_URL"),
        (config.url, str(file)),
        (embedded, str(home(environment) / "server.json")),
    )
    chosen = next(((value, source) for value, source in urls if value), None)
    if chosen is None:
        return None
    address, url_from = normal_url(chosen[0], chosen[1]), chosen[1]
    found, token_from = _find_token(token, address, config, embedded, environment)
    if found is not None:
        _check_token(found, token_from)
    return Settings(address, found, url_from, token_from)


def required(url: str | None = None, token: str | None = None) -> Settings:
    """The settings to use; refused with what to do when there are none."""
    found = find(url, token)
    if found is None:
        raise ApiError(
            problem(
                "unavailable",
                "no server is configured and none runs on this machine",
                advice="`tpu run` or `tpu serve` starts one; or set PENSTOCK_URL and PENSTOCK_TOKEN",
            )
        )
    return found


def _find_token(
    token: str | None, address: str, config: _ClientTable, embedded: str | None, environment: Mapping[str, str]
) -> tuple[str | None, str]:
    if token:
        return token, "the argument token"
    if given := environment.get("PENSTOCK_TOKEN"):
        return given, "PENSTOCK_TOKEN"
    file = config_path(environment)
    if config.url and normal_url(config.url, str(file)) == address:
        if config.token:
            return config.token, str(file)
        if config.token_file:
            path = file.parent / Path(config.token_file).expanduser()
            return _read_text(path, required=True), str(path)
    if embedded and normal_url(embedded, "server.json") == address:
        path = home(environment) / "token"
        return _read_text(path, required=False), str(path)
    return None, "nowhere"


def normal_url(url: str, source: str = "url") -> str:
    """The address without what would make two spellings of it differ; refused when it is not one."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise bad_input(f"url: {url!r} from {source} is no address: {error}", field="url") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise bad_input(
            f"url: {url!r} from {source} is not an http or https address",
            field="url",
            advice="write it as https://host:port",
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise bad_input(
            f"url: the one from {source} holds a user name, a query or a fragment",
            field="url",
            advice="write it as https://host:port, and give the token by PENSTOCK_TOKEN",
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    shown_port = "" if port is None else f":{port}"
    return f"{parts.scheme}://{host}{shown_port}{parts.path.rstrip('/')}"


def _check_token(token: str, source: str) -> None:
    """It becomes a header: anything else would be refused much later, and less clearly. The value is never shown."""
    if not token.isascii() or not token.isprintable() or " " in token or len(token) > TOKEN_CHARACTERS_MAX:
        raise bad_input(
            f"token: the one from {source} is too long, or has spaces or characters other than printable ASCII",
            field="token",
            advice="copy it again",
        )


def _read_config(path: Path, *, required: bool) -> _ClientTable:
    text = _read_text(path, required=required)
    if text is None:
        return _ClientTable()
    import tomllib

    try:
        return msgspec.convert(tomllib.loads(text), _ConfigFile).client
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise bad_input(f"{path}: {error}", advice="[client] takes url, token and token_file") from error


def _read_embedded(directory: Path) -> str | None:
    text = _read_text(directory / "server.json", required=False)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=_ServerFile).url
    except msgspec.DecodeError as error:
        raise bad_input(f"{directory / 'server.json'}: {error}", advice="run `tpu down`, then try again") from error


def _read_text(path: Path, *, required: bool) -> str | None:
    try:
        return path.read_text("utf-8").strip()
    except FileNotFoundError as error:
        if not required:
            return None
        raise bad_input(f"{path}: there is no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise bad_input(f"{path}: cannot be read: {error}") from error
