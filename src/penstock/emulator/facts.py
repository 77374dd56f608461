"""What is known of Google's APIs, row by row, each with a probe: a request whose answer shows whether it is so.

`facts.toml` has the rows. `tpu emulator facts` shows them and `--check` sends every probe to an emulator made for it;
the same probes can be sent to the real service, because a probe only needs somebody who sends requests. A row tells
where the behaviour is known from ("unknown" is an answer) and whether this project ever saw it on the real service.
"""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from penstock.emulator.gcs import GcsEmulator
from penstock.emulator.google import TpuEmulator
from penstock.emulator.http_words import Answer, Request, query_of
from penstock.emulator.tpu_hosts import HostSpec, NoHosts
from penstock.emulator.tpu_world import World
from penstock.emulator.vm_metadata import ROOT, Metadata

BUCKET: Final = "facts-bucket"
#: Where rows happen, unless they say otherwise or `fact_places` moves them.
PROJECT: Final = "p1"
DEFAULT_ZONE: Final = "us-central1-a"
_BEGIN: Final = 1_800_000_000.0
#: The machine whose metadata server is probed: the second host of the first of two slices.
PROBED_HOST: Final = HostSpec(
    project="p1",
    zone="us-central1-a",
    node="n1",
    node_number="1",
    index=1,
    hosts=2,
    incarnation="1-1-0",
    accelerator_type="v5litepod-8",
    topology="2x4",
    devices=4,
    spot=True,
    external_address=False,
    metadata={"startup-script": "echo"},
    service_account="default",
    addresses=("127.16.0.1", "127.16.0.2"),
    slices=2,
    coordinator="127.16.0.1",
)


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request. A path without a slash in front is below the zone; `{operation}` stands for the last operation,
    `{token}` for the last page's token, `{generation}` for the last object's."""

    call: str  #: `POST nodes?nodeId=a`; `NOTIFY /preempted` is no request but what the cloud does to a host
    body: str | dict[str, Any] | None = None  #: a text that begins with `$` names one of the common bodies
    version: str = "v2"
    headers: dict[str, str] = {}
    after_s: float = 0.0  #: let so much time pass first


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the answer must hold. A text that begins with `~` is a pattern; a table holds at least these keys."""

    status: int = 200
    reason: str = ""
    message: str = ""
    body: Any = None
    headers: dict[str, str] = {}


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One behaviour."""

    what: str
    source: str  #: an address, or "unknown"
    seen: bool  #: on the real service, by this project
    probe: Step
    expect: Expected
    seen_by: tuple[str, ...] = ()  #: real clients that were run against the emulator and need it so
    note: str = ""
    before: tuple[Step, ...] = ()
    world: dict[str, Any] = {}
    zone: str = DEFAULT_ZONE


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bodies: dict[str, dict[str, Any]]
    facts: dict[str, Fact]


Send = Callable[[str, str, bytes, dict[str, str]], Answer | None]


def known_facts() -> dict[str, Fact]:
    """All rows by name."""
    return _table().facts


def probe(fact: Fact, send: Send, pause: Callable[[float], None], project: str = PROJECT) -> list[str]:
    """Send a row's requests; what differs from the row, nothing if it holds. The last answer is the one that counts."""
    values = {"zone": fact.zone, "operation": "", "token": "", "generation": ""}
    answer: Answer | None = None
    for step in (*fact.before, fact.probe):
        if step.after_s:
            pause(step.after_s)
        method, _, target = step.call.partition(" ")
        path = (
            target if target.startswith("/") else f"/{step.version}/projects/{project}/locations/{fact.zone}/{target}"
        )
        for name, value in values.items():
            path = path.replace("{" + name + "}", value)
        answer = send(method, path, _body(step), step.headers)
        _remember(answer, values)
    return differences(fact.expect, answer)


def differences(expected: Expected, answer: Answer | None) -> list[str]:
    """What an answer lacks; no answer at all has status 0."""
    status, raw = (0, b"") if answer is None else (answer.status, answer.body)
    found = [] if status == expected.status else [f"status: {status}, not {expected.status}: {raw[:200]!r}"]
    content = _json(raw)
    if expected.reason or expected.message:
        error = content.get("error", {}) if isinstance(content, dict) else {}
        reason = error.get("status") or next((each.get("reason") for each in error.get("errors", [])), "")
        found += _differs("reason", expected.reason, reason) if expected.reason else []
        found += _differs("message", expected.message, error.get("message", "")) if expected.message else []
    if expected.body is not None:
        found += _differs("body", expected.body, raw.decode() if isinstance(expected.body, str) else content)
    headers = {} if answer is None else dict(answer.headers)
    for name, value in expected.headers.items():
        found += _differs(f"header {name}", value, headers.get(name))
    return found


def check_on_emulator(fact: Fact) -> list[str]:
    """A row's probe, sent to an emulator of its own in the row's world."""
    moment = [_BEGIN]
    world = msgspec.convert(fact.world, World)
    tpu = TpuEmulator(world, lambda: moment[0], NoHosts())
    gcs = GcsEmulator([BUCKET], lambda: moment[0])
    metadata = Metadata(PROBED_HOST, "host-1")

    def send(method: str, target: str, body: bytes, headers: dict[str, str]) -> Answer | None:
        parts = urlsplit(target)
        if method == "NOTIFY":
            metadata.notify("preempted" if target == "/preempted" else "maintenance")
            return Answer()
        if parts.path.startswith(ROOT):
            told = asyncio.run(metadata.answer(method, target, headers, body))
            return Answer(told.status, told.text.encode())
        request = Request(method, parts.path, query_of(parts.query), {"host": "here", **headers}, body)
        return asyncio.run(tpu.answer(request) if tpu.serves(parts.path) else gcs.answer(request))

    def pause(seconds: float) -> None:
        moment[0] += seconds

    return probe(fact, send, pause)


@cache
def _table() -> _Table:
    text = files("penstock.emulator").joinpath("facts.toml").read_text()
    return msgspec.convert(tomllib.loads(text), _Table)


def body_of(step: Step) -> str | dict[str, Any] | None:
    """A step's body, with a common one in place of its name."""
    if isinstance(step.body, str) and step.body.startswith("$"):
        return _table().bodies[step.body[1:]]
    return step.body


def _body(step: Step) -> bytes:
    match body_of(step):
        case None:
            return b""
        case str(text):
            return text.encode()
        case content:
            return msgspec.json.encode(content)


def _remember(answer: Answer | None, values: dict[str, str]) -> None:
    content = _json(answer.body) if answer is not None else None
    if not isinstance(content, dict):
        return
    name = str(content.get("name", "")).rpartition("/")[2]
    if name.startswith("operation-"):
        values["operation"] = f"operations/{name}"
    values["token"] = content.get("nextPageToken", values["token"])
    values["generation"] = str(content.get("generation", values["generation"]))


def _json(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw) if raw else {}
    except msgspec.DecodeError:
        return None


def _differs(where: str, wanted: Any, got: Any) -> list[str]:
    match wanted:
        case dict():
            if not isinstance(got, dict):
                return [f"{where}: {got!r} is no table"]
            return [each for key, value in wanted.items() for each in _differs(f"{where}.{key}", value, got.get(key))]
        case list():
            if not isinstance(got, list) or len(got) != len(wanted):
                return [f"{where}: {got!r}, not {len(wanted)} of them"]
            return [
                each
                for at, (w, g) in enumerate(zip(wanted, got, strict=True))
                for each in _differs(f"{where}[{at}]", w, g)
            ]
        case str() if wanted.startswith("~"):
            return (
                [] if re.fullmatch(wanted[1:], str(got), re.DOTALL) else [f"{where}: {got!r} is not like {wanted[1:]}"]
            )
        case "absent":
            return [] if got is None else [f"{where}: {got!r} should not be there"]
        case _:
            return [] if wanted == got else [f"{where}: {got!r}, not {wanted!r}"]
