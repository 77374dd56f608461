"""What a server was told, by whom: `penstock.toml`, then `PENSTOCK_…` variables, then flags; later wins.

`tpu serve` and the embedded server read their settings here, and `tpu config show` tells where each value came from.
The file in the state directory comes first, the nearest one above the working directory after it. A key nobody knows is
refused with the one that was probably meant. What clients are told (`[client]`) is `client.settings`'s business, and
only the state directory's file may hold it: a cloned repository must not choose where tokens go.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from penstock.capacity.local import HOSTS_MAX
from penstock.client.settings import CONFIG_NAME, CONFIG_VARIABLE, home
from penstock.domain.admission import BadInput
from penstock.domain.catalogue import UnknownAccelerator
from penstock.domain.catalogue import find as find_accelerator
from penstock.wiring.stores import is_postgres

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
#: `[client]` belongs to the SDK, `[run]` to `tpu run`; they are checked where they are used.
_OTHER_TABLES: Final = {"client": ("url", "token", "token_file"), "run": None}


class Value(NamedTuple):
    """A setting and where it came from: "default", a file, a variable or a flag."""

    value: object
    source: str


class ServerSettings(NamedTuple):
    """What one server process needs to know."""

    home: Path
    store: str
    root: str
    host: str
    port: int  #: 0: the one it had last time, or any that is free
    default_on: tuple[str, ...]
    local_hosts: int  #: 0: no local slices
    local_slices: int
    drain_s: float
    log_level: str

    @property
    def embedded(self) -> bool:
        """Whether this is one machine's own server: it makes pools of local slices for whoever needs one."""
        return self.local_hosts > 0 and not is_postgres(self.store)


class Key(NamedTuple):
    """One key of `[server]`: how a word becomes its value, what it is by default, and one line about it."""

    read: Callable[[object], object]
    default: Callable[[Path], object]
    text: str


def _word(value: object) -> object:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError("is not a word")
    return value


def _number(least: int, most: int) -> Callable[[object], object]:
    def read(value: object) -> object:
        given = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
        if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= most:
            raise ValueError(f"is not a whole number from {least} to {most}")
        return given

    return read


def _seconds(value: object) -> object:
    given = float(value) if isinstance(value, str) and value.replace(".", "", 1).isdigit() else value
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 <= given <= 3600:
        raise ValueError("is not a number of seconds from 0 to 3600")
    return float(given)


def _level(value: object) -> object:
    if value not in LOG_LEVELS:
        raise ValueError(f"is not one of {', '.join(LOG_LEVELS)}")
    return value


def _accelerators(value: object) -> object:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise ValueError("is not a list of accelerators such as v5e-8")
    try:
        return tuple(find_accelerator(str(name).strip()).name for name in names)
    except UnknownAccelerator as error:
        raise ValueError(f"names an accelerator nobody knows: {error}") from error


#: Every key of `[server]`; the variable is PENSTOCK_ and its name in capitals, the flag its name with dashes.
KEYS: Final[Mapping[str, Key]] = {
    "store": Key(_word, lambda home: str(home / "penstock.db"), "an SQLite file or a postgresql:// address"),
    "root": Key(_word, lambda home: str(home / "root"), "where snapshots, logs and results are kept"),
    "host": Key(_word, lambda _: "127.0.0.1", "the address to listen on"),
    "port": Key(_number(0, 65_535), lambda _: 0, "the port to listen on; 0: the last one, or any that is free"),
    "default_on": Key(_accelerators, lambda _: ("v5e-1",), "where jobs run that do not say where, best first"),
    "local_hosts": Key(_number(0, 1_000), lambda _: HOSTS_MAX, "hosts of local slices at once; 0: no local slices"),
    "local_slices": Key(_number(1, 1_000), lambda _: 4, "slices of one pool that was made for a job that needed one"),
    "drain_s": Key(_seconds, lambda _: 25.0, "how long calls under way may take when the server stops"),
    "log_level": Key(_level, lambda _: "info", f"one of {', '.join(LOG_LEVELS)}"),
}


def variable(name: str) -> str:
    return f"PENSTOCK_{name.upper()}"


def load(
    environment: Mapping[str, str], flags: Mapping[str, object] | None = None, directory: Path | None = None
) -> tuple[Path, dict[str, Value]]:
    """The state directory, and all of `[server]` with sources; a project's file is sought from `directory` upwards."""
    state = home(environment).absolute()
    found: dict[str, Value] = {}
    for file, whole in _files(environment, state, directory):
        for name, value in _server_table(file, whole).items():
            found[name] = _checked(f"{file}: server.{name}", name, value, str(file))
    for name in KEYS:
        if environment.get(variable(name)):
            found[name] = _checked(variable(name), name, environment[variable(name)], variable(name))
    for name, given in (flags or {}).items():
        if given is not None:
            flag = f"--{name.replace('_', '-')}"
            found[name] = _checked(flag, name, given, flag)
    for name, key in KEYS.items():
        found.setdefault(name, Value(key.default(state), "default"))
    if found["local_hosts"].source == "default" and is_postgres(str(found["store"].value)):
        found["local_hosts"] = Value(0, "default: a shared store has no local slices unless it is said")
    return state, {name: found[name] for name in KEYS}


def server_settings(state: Path, values: Mapping[str, Value]) -> ServerSettings:
    # `load` has checked each value by its key.
    return ServerSettings(home=state, **{name: value.value for name, value in values.items()})  # type: ignore[arg-type]


def shown(address: str) -> str:
    """An address as people and logs may see it: without the password."""
    parts = urlsplit(address)
    if parts.password is None:
        return address
    user = f"{parts.username}:***@" if parts.username else "***@"
    return urlunsplit(parts._replace(netloc=user + parts.netloc.rpartition("@")[2]))


def _files(
    environment: Mapping[str, str], state: Path, directory: Path | None
) -> Iterable[tuple[Path, dict[str, object]]]:
    """The files that count, the weakest first, each read and with known tables only."""
    chosen = environment.get(CONFIG_VARIABLE)
    own = Path(chosen).expanduser() if chosen else state / CONFIG_NAME
    if chosen or own.is_file():
        yield own, _read(own, own=True)
    for folder in (directory, *directory.parents) if directory is not None else ():
        file = folder / CONFIG_NAME
        if file.is_file() and file.resolve() != own.resolve():
            yield file, _read(file, own=False)
            return


def _read(file: Path, *, own: bool) -> dict[str, object]:
    try:
        whole = tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise BadInput(CONFIG_VARIABLE, str(file), "is not there", "correct the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise BadInput(str(file), file.name, f"cannot be read: {error}", "mend the line") from error
    for table, content in whole.items():
        known = _OTHER_TABLES.get(table, KEYS)
        if table != "server" and table not in _OTHER_TABLES:
            raise _unknown(file, "", table, content, ("server", *_OTHER_TABLES))
        if table == "client" and not own:
            fix = f"move [client] to {CONFIG_NAME} of the state directory"
            rule = "may not say here which server is used, or with which token"
            raise BadInput(f"{file}: client", "…", rule, fix)
        if not isinstance(content, dict):
            raise BadInput(f"{file}: {table}", content, "is not a table", f"write [{table}]")
        if known is not None:
            for name, value in content.items():
                if name not in known:
                    raise _unknown(file, f"{table}.", name, value, known)
    return whole


def _server_table(file: Path, whole: Mapping[str, object]) -> dict[str, object]:
    """`[server]`, its paths read from where the file lies."""
    table = whole.get("server", {})
    assert isinstance(table, dict)
    settled = dict(table)
    for name in ("store", "root"):
        value = settled.get(name)
        if isinstance(value, str) and value and "://" not in value:
            settled[name] = str(file.parent.absolute() / Path(value).expanduser())
    return settled


def _unknown(file: Path, table: str, name: str, value: object, known: Iterable[str]) -> BadInput:
    near = difflib.get_close_matches(name, list(known), 1)
    fix = f"did you mean {table}{near[0]}?" if near else f"there are {', '.join(known)}"
    # A token may stand under a misspelt name: only its place is shown.
    held = type(value).__name__ if table == "client." else value
    return BadInput(f"{file}: {table}{name}", held, "stands under a name that nobody knows", fix)


def _checked(where: str, name: str, value: object, source: str) -> Value:
    try:
        return Value(KEYS[name].read(value), source)
    except ValueError as error:
        shown_value = shown(value) if isinstance(value, str) else value
        raise BadInput(where, shown_value, str(error), KEYS[name].text) from error
