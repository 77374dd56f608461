"""What a server was told, by whom: `penstock.toml`, then `PENSTOCK_…` variables, then flags; later wins.

`tpu serve` and the embedded server read their settings here, and `tpu config show` tells where each value came from.
The file in the state directory comes first, the nearest one above the working directory after it. A key nobody knows is
refused with the one that was probably meant. `[retention]` says how long things are kept, `[tpu_vm]` from which cloud
project slices come, `[regions]` which regions have a root of their own. What clients are told (`[client]`) is
`client.settings`'s business. Only the state directory's file may hold these.
"""

from __future__ import annotations

import difflib
import math
import re
import shlex
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from penstock.capacity.local import HOSTS_MAX
from penstock.client.settings import CONFIG_NAME, CONFIG_VARIABLE, home
from penstock.domain import limits
from penstock.domain.admission import BadInput
from penstock.domain.catalogue import UnknownAccelerator
from penstock.domain.catalogue import find as find_accelerator
from penstock.domain.retention import Retention
from penstock.wiring.stores import is_postgres

CLOUD_ENDPOINT: Final = "https://tpu.googleapis.com"
#: What jobs may import on a cloud's hosts without bringing it, where the server has it.
FOR_JOBS: Final = ("jax", "libtpu", "numpy", "requests", "safetensors")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
#: `[client]` belongs to the SDK, `[run]` to `tpu run`, `[bridge]` to bridges; they are checked where they are used.
_OTHER_TABLES: Final = {
    "client": ("url", "token", "token_file"),
    "run": None,
    "bridge": ("firestore",),
    "regions": None,  # its keys are the regions
}
#: A cloned repository must not choose where tokens go, whose documents become jobs here, nor what is deleted.
_OWN_TABLES: Final = {
    "retention": "may not say here how long the logs and results of others are kept",
    "tpu_vm": "may not say here which cloud project is billed",
    "regions": "may not say here where the checkpoints of others are kept",
    "client": "may not say here which server is used, or with which token",
    "bridge": "may not say here whose documents become jobs",
}


class Value(NamedTuple):
    """A setting and where it came from: "default", a file, a variable or a flag."""

    value: object
    source: str


class CloudSettings(NamedTuple):
    """`[tpu_vm]`: whose Cloud TPUs are used, and what each host of them is told. Without a project there are none."""

    project: str
    endpoint: str
    zones: tuple[str, ...]  #: patterns: where pools may have slices at all
    agents_url: str  #: how hosts reach this server
    network: str
    subnetwork: str
    service_account: str
    runtime_version: str
    bundle: tuple[str, ...]  #: packages that jobs find on every host
    tunnel: str = ""  #: an ssh command that leads hosts back to this server, where they cannot reach it themselves

    @property
    def emulated(self) -> bool:
        """Whether the API is one of this machine's own, which asks for no credential."""
        return urlsplit(self.endpoint).hostname in ("127.0.0.1", "localhost", "::1")


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
    retention: Retention
    cloud: CloudSettings | None = None
    regions: tuple[tuple[str, str], ...] = ()  #: (region, root): where checkpoints of jobs in that region are kept

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


def _ssh(text: object) -> object:
    try:
        words = shlex.split(text) if isinstance(text, str) else None
    except ValueError:
        words = None
    if words is None or (words and not any(word.rpartition("/")[2] == "ssh" for word in words)):
        raise ValueError('is not an ssh command, such as "ssh -i KEY -l USER"')
    return text


def _empty_or_word(value: object) -> object:
    return "" if value == "" else _word(value)


def _address(value: object) -> object:
    if value == "":
        return ""
    parts = urlsplit(value) if isinstance(value, str) and value.isprintable() else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise ValueError("is not an address such as https://penstock.example.org")
    return str(value).rstrip("/")


def _words(pattern: str, what: str) -> Callable[[object], object]:
    """A list, or words with commas between them."""

    def read(value: object) -> object:
        words = value.split(",") if isinstance(value, str) else value
        if not isinstance(words, list | tuple) or not words:
            raise ValueError(f"is not a list of {what}")
        found = tuple(str(word).strip() for word in words)
        if any(re.fullmatch(pattern, word) is None for word in found):
            raise ValueError(f"is not a list of {what}")
        return found

    return read


def _project(value: object) -> object:
    if value != "" and (not isinstance(value, str) or _PROJECT.fullmatch(value) is None):
        raise ValueError("is not a project's id")
    return value


def _age(least_s: float, why: str) -> Callable[[object], object]:
    """A time span such as 30d, 12h or a number of seconds, or `never`."""

    def read(value: object) -> object:
        if value == "never":
            return math.inf
        seconds = _span_s(value)
        if seconds is None:
            raise ValueError("is neither a time such as 30d, 12h, 90m nor never")
        if not least_s <= seconds <= 3.2e9:
            raise ValueError(f"is not at least {_spoken(least_s)} and at most 100 years: {why}")
        return seconds

    return read


def _span_s(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    found = _SPAN.fullmatch(value) if isinstance(value, str) else None
    return None if found is None else float(found[1]) * _UNITS_S[found[2]]


def _spoken(seconds: float) -> str:
    return next(f"{seconds / size:g}{unit}" for unit, size in _SPOKEN_S.items() if seconds >= size or unit == "s")


_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)", re.ASCII)
_SPOKEN_S: Final = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
_UNITS_S: Final = {"": 1.0, "w": 7 * 86_400.0, **_SPOKEN_S}
_LATE: Final = "until then hosts may still send what a job left"
_SUBMITS: Final = "a submit under way may still need them"
_KEPT: Final = "keys of submits are remembered so long"


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
_POLICY: Final = Retention()
#: Every key of `[retention]`; the variable is PENSTOCK_RETENTION_ and its name in capitals.
RETENTION_KEYS: Final[Mapping[str, Key]] = {
    "logs": Key(_age(limits.LATE_S, _LATE), lambda _: _POLICY.logs_s, "how long logs of ended jobs stay"),
    "results": Key(_age(limits.LATE_S, _LATE), lambda _: _POLICY.results_s, "how long results and artifacts stay"),
    "checkpoints": Key(
        _age(limits.LATE_S, _LATE), lambda _: _POLICY.checkpoints_s, "how long checkpoints but the newest stay"
    ),
    "jobs": Key(_age(limits.RETENTION_S, _KEPT), lambda _: _POLICY.jobs_s, "how long ended jobs are remembered"),
    "unused": Key(_age(limits.UNUSED_S, _SUBMITS), lambda _: _POLICY.unused_s, "how long snapshots nobody names stay"),
    "every": Key(_age(1, "each pass costs something"), lambda _: _POLICY.every_s, "how often the server cleans itself"),
}
_PROJECT: Final = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{0,61}[a-z0-9]")
_REGION: Final = re.compile(r"[a-z]+-[a-z]+[0-9]{1,2}")
_ZONES: Final = _words(r"[a-z0-9*?-]{1,63}", "zones or patterns such as us-*")
_PACKAGES: Final = _words(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", "packages that this server has installed")
#: Every key of `[tpu_vm]`; the variable is PENSTOCK_TPU_VM_ and its name in capitals.
CLOUD_KEYS: Final[Mapping[str, Key]] = {
    "project": Key(_project, lambda _: "", "the project whose Cloud TPUs are used; none: this server has no cloud"),
    "endpoint": Key(_address, lambda _: CLOUD_ENDPOINT, "the API, or an emulator of it"),
    "zones": Key(_ZONES, lambda _: ("*",), "zones and patterns that pools may choose from"),
    "agents_url": Key(_address, lambda _: "", "how hosts reach this server, such as https://penstock.example.org"),
    "network": Key(_empty_or_word, lambda _: "default", "of hosts, unless their pool names one"),
    "subnetwork": Key(_empty_or_word, lambda _: "", "of hosts, unless their pool names one"),
    "service_account": Key(_empty_or_word, lambda _: "", "of hosts; none: the project's default one"),
    "runtime_version": Key(_empty_or_word, lambda _: "", "of hosts; none: the catalogue's for their accelerator"),
    "tunnel": Key(_ssh, lambda _: "", "ssh and its options: lead hosts to this server over ssh; none: they reach it"),
    "bundle": Key(_PACKAGES, lambda _: FOR_JOBS, "packages of this server's that jobs find on every host"),
}
#: The tables of `penstock.toml` and their keys; None: checked where it is used.
_TABLES: Final[Mapping[str, Collection[str] | None]] = {
    "server": KEYS,
    "retention": RETENTION_KEYS,
    **_OTHER_TABLES,
    "tpu_vm": CLOUD_KEYS,
}


def variable(name: str) -> str:
    return f"PENSTOCK_{name.upper()}"


def load_retention(environment: Mapping[str, str]) -> dict[str, Value]:
    """All of `[retention]` with sources."""
    return _load_own(environment, "retention", RETENTION_KEYS)


def load_cloud(environment: Mapping[str, str]) -> dict[str, Value]:
    """All of `[tpu_vm]` with sources."""
    return _load_own(environment, "tpu_vm", CLOUD_KEYS)


def load_regions(environment: Mapping[str, str]) -> dict[str, Value]:
    """All of `[regions]` with sources, or what PENSTOCK_REGIONS says instead: `us-central1=gs://a,europe-west4=gs://b`."""
    state = home(environment).absolute()
    found: dict[str, Value] = {}
    for file, whole in _files(environment, state, None):
        content = whole.get("regions", {})
        assert isinstance(content, dict)
        for region, root in content.items():
            found[region] = _region_root(f"{file}: regions.{region}", region, root, str(file))
    given = environment.get(variable("regions"), "")
    if given:
        pairs = [word.strip().partition("=") for word in given.split(",")]
        found = {name: _region_root(variable("regions"), name, root, variable("regions")) for name, _, root in pairs}
    return found


def _region_root(where: str, region: str, root: object, source: str) -> Value:
    if _REGION.fullmatch(region) is None:
        raise BadInput(where, region, "is not a region", "write a region such as us-central1 and its root")
    if not isinstance(root, str) or not root.startswith(("gs://", "s3://", "/", "file://")):
        raise BadInput(where, root, "is not a root", "write gs://BUCKET/PREFIX, s3://BUCKET/PREFIX or a whole path")
    return Value(root, source)


def _load_own(environment: Mapping[str, str], table: str, keys: Mapping[str, Key]) -> dict[str, Value]:
    """A whole table with sources. A project's file cannot hold it: `load` refuses that."""
    state = home(environment).absolute()
    found: dict[str, Value] = {}
    for file, whole in _files(environment, state, None):
        content = whole.get(table, {})
        assert isinstance(content, dict)
        for name, value in content.items():
            found[name] = _checked(f"{file}: {table}.{name}", keys[name], value, str(file))
    for name, key in keys.items():
        given = variable(f"{table}_{name}")
        if environment.get(given):
            found[name] = _checked(given, key, environment[given], given)
        found.setdefault(name, Value(key.default(state), "default"))
    return {name: found[name] for name in keys}


def cloud_settings(values: Mapping[str, Value]) -> CloudSettings | None:
    """What `[tpu_vm]` says; None when it names no project."""
    given = {name: value.value for name, value in values.items()}
    return CloudSettings(**given) if given.get("project") else None  # type: ignore[arg-type]


def retention(values: Mapping[str, Value]) -> Retention:
    return Retention(**{f"{name}_s": value.value for name, value in values.items()})  # type: ignore[arg-type]


def load(
    environment: Mapping[str, str], flags: Mapping[str, object] | None = None, directory: Path | None = None
) -> tuple[Path, dict[str, Value]]:
    """The state directory, and all of `[server]` with sources; a project's file is sought from `directory` upwards."""
    state = home(environment).absolute()
    found: dict[str, Value] = {}
    for file, whole in _files(environment, state, directory):
        for name, value in _server_table(file, whole).items():
            found[name] = _checked(f"{file}: server.{name}", KEYS[name], value, str(file))
    for name in KEYS:
        if environment.get(variable(name)):
            found[name] = _checked(variable(name), KEYS[name], environment[variable(name)], variable(name))
    for name, given in (flags or {}).items():
        if given is not None:
            flag = f"--{name.replace('_', '-')}"
            found[name] = _checked(flag, KEYS[name], given, flag)
    for name, key in KEYS.items():
        found.setdefault(name, Value(key.default(state), "default"))
    if found["local_hosts"].source == "default" and is_postgres(str(found["store"].value)):
        found["local_hosts"] = Value(0, "default: a shared store has no local slices unless it is said")
    return state, {name: found[name] for name in KEYS}


def server_settings(
    state: Path,
    values: Mapping[str, Value],
    policy: Mapping[str, Value] | None = None,
    cloud: Mapping[str, Value] | None = None,
    regions: Mapping[str, Value] | None = None,
) -> ServerSettings:
    # `load` has checked each value by its key.
    given = {name: value.value for name, value in values.items()}
    return ServerSettings(
        home=state,
        retention=retention(policy or {}),
        cloud=cloud_settings(cloud or {}),
        regions=tuple((region, str(root.value)) for region, root in (regions or {}).items()),
        **given,  # type: ignore[arg-type]
    )


def bridge_table(environment: Mapping[str, str], state: Path) -> tuple[Path, Mapping[str, object]] | None:
    """`[bridge.firestore]` and the file it stands in; None when no bridge is wanted beside the server."""
    for file, whole in _files(environment, state, None):
        table = whole.get("bridge")
        found = table.get("firestore") if isinstance(table, dict) else None
        if found is not None:
            if not isinstance(found, dict):
                raise BadInput(f"{file}: bridge.firestore", found, "is not a table", "write [bridge.firestore]")
            return file, found
    return None


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
        if table not in _TABLES:
            raise _unknown(file, "", table, content, _TABLES)
        known = _TABLES[table]
        if table in _OWN_TABLES and not own:
            fix = f"move [{table}] to {CONFIG_NAME} of the state directory"
            raise BadInput(f"{file}: {table}", "…", _OWN_TABLES[table], fix)
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


def _checked(where: str, key: Key, value: object, source: str) -> Value:
    try:
        return Value(key.read(value), source)
    except ValueError as error:
        shown_value = shown(value) if isinstance(value, str) else value
        raise BadInput(where, shown_value, str(error), key.text) from error
