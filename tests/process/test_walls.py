"""S17 with a real server, real jobs and real hosts: what a team's people and machines are shown of another team.

Two teams have the same things, each marked with words that occur nowhere else. A stranger asks every route there is,
by name, by id, by hash, as a stream and as an agent, before and after the other team acts: no mark of the others may be
in any answer, and no answer about things that are not the asker's may change.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any, Final
from urllib.parse import quote, urlsplit

import msgspec
import pytest
from typing_extensions import override

from penstock.domain.nouns import Role
from penstock.server.app import all_routes
from penstock.server.auth import Token, token_hash
from penstock.server.routing import Route
from tests.process.evidence import Evidence
from tests.process.machine import until
from tests.process.shop import ENDED, RUN_S, Shop

pytestmark = pytest.mark.slow
ROLES: Final = (Role.VIEWER, Role.SUBMITTER, Role.ADMIN)
#: Differ from one asking to the next for reasons of the asker's own: the log's numbers and the time.
_MOVING: Final = re.compile(rb'"(seq|next|at|as_of|idle_s_left|heard_at|seen_at)": ?("[^"]*"|[0-9.e+]+|null),?')


class Team:
    """One team's tokens, and one of everything, all of it marked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mark = f"{name}{secrets.token_hex(6)}"
        self.tokens = {role: secrets.token_urlsafe(24) for role in ROLES}
        self.blob = secrets.token_bytes(2000)
        self.ids: dict[str, str] = {}

    @property
    def rows(self) -> list[Token]:
        return [
            Token(sha256=token_hash(token), name=f"{self.mark}-{role.value}", team=self.name, role=role)
            for role, token in self.tokens.items()
        ]

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.blob).hexdigest()

    @property
    def marks(self) -> list[str]:
        return [self.mark, *self.ids.values()]

    def secret_name(self) -> str:
        return f"S_{self.mark}"


class Asked(msgspec.Struct, frozen=True):
    status: int
    body: bytes


class House(Shop):
    def ask(self, token: str, method: str, path: str, body: bytes = b"", *, most_s: float = RUN_S) -> Asked:
        """One answer, or as much of a stream as comes until it is silent for `most_s`."""
        address = urlsplit(self.server.url)
        kind = "application/octet-stream" if "/blobs/" in path or "/snapshots/" in path else "application/json"
        headers = {
            "authorization": f"Bearer {token}",
            "content-type": "application/json" if "missing" in path else kind,
        }
        with closing(http.client.HTTPConnection(address.hostname or "", address.port, timeout=RUN_S)) as connection:
            connection.request(method, path, body, headers)
            line = connection.sock  # the answer takes it over
            answer = connection.getresponse()
            line.settimeout(most_s)
            read = b"".join(str(pair).encode() for pair in answer.getheaders() if pair[0] != "date")
            with suppress(TimeoutError):
                while piece := answer.read1(1 << 16):
                    read += piece
        return Asked(answer.status, read)

    def tell(self, team: Team, method: str, path: str, body: object = None, role: Role = Role.ADMIN) -> Any:
        asked = self.ask(team.tokens[role], method, path, b"" if body is None else msgspec.json.encode(body))
        assert asked.status in (200, 201, 204), asked
        start = asked.body.find(b"{")
        return msgspec.json.decode(asked.body[start:]) if start >= 0 and asked.status != 204 else None

    def furnish(self, team: Team) -> None:
        """A job that ran and left a result, an artifact and a log; a pool, a queue, a secret, a blob, a snapshot."""
        mark, submitter = team.mark, team.tokens[Role.SUBMITTER]
        assert self.ask(submitter, "PUT", f"/v1/blobs/{team.hash}", team.blob).status == 204
        assert self.ask(submitter, "PUT", f"/v1/snapshots/{team.hash}", team.blob).status == 204
        self.tell(team, "PUT", f"/v1/secrets/{team.secret_name()}", {"value": f"value-of-{mark}"})
        self.tell(team, "PUT", f"/v1/pools/{mark}-pool", {"accelerator": "v5e-8"})
        self.tell(team, "PUT", f"/v1/queues/{mark}-queue", {})
        code = f"print('{mark}')\nopen(__import__('os').environ['PENSTOCK_OUTPUT_DIR'] + '/{mark}.txt', 'w').write('x')"
        job = {
            "payload": {"type": "snippet", "code": f"{code}\nresult = '{mark}'"}, "name": mark, "tags": [mark],
            "note": mark, "env": {"M": mark}, "idempotency_key": mark, "on": ["v5e-1"],
        }  # fmt: skip
        team.ids["id"] = self.tell(team, "POST", "/v1/jobs", job, Role.SUBMITTER)["id"]
        until(lambda: self.tell(team, "GET", f"/v1/jobs/{team.ids['id']}")["state"] in ENDED, RUN_S)
        view = self.tell(team, "GET", f"/v1/jobs/{team.ids['id']}")
        assert view["state"] == "succeeded", view
        team.ids |= {"attempt": view["attempts"][0]["id"], "slice": view["attempts"][0]["slices"][0]}

    def credential(self, team: Team) -> str:
        """What a host of the team's own slice calls with."""
        file = self.home.slices / team.ids["slice"] / "host-0" / "credential.json"
        return str(json.loads(file.read_bytes())["credential"])


@pytest.fixture(scope="module")
def red() -> Team:
    return Team("red")


@pytest.fixture(scope="module")
def blue() -> Team:
    return Team("blue")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, red: Team, blue: Team) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("walls") / "home")
    house.home.prepare()
    tokens = house.home.path / "tokens.json"
    rows = msgspec.json.decode(tokens.read_bytes(), type=list[Token])
    tokens.write_bytes(msgspec.json.encode([*rows, *red.rows, *blue.rows]))
    try:
        house.open()
        yield house
    finally:
        house.end()


def path_of(route: Route, team: Team) -> str:
    """The route's path about something of the team's."""
    kind = route.path.split("/")[2] if route.path.startswith("/v1/") else ""
    names = {"pools": f"{team.mark}-pool", "queues": f"{team.mark}-queue", "secrets": team.secret_name()}
    slots = {
        "id": team.ids.get("slice" if kind == "slices" else "id", "jnowhere"),
        "attempt": team.ids.get("attempt", "anowhere"),
        "name": names.get(kind, f"{team.mark}.txt"),
        "sha256": team.hash,
    }
    path = re.sub(r"\{(\w+)(:path)?\}", lambda found: quote(slots[found[1]]), route.path)
    if route.path.endswith("/logs") and route.method == "POST":
        path += "?rank=0&stream=out&offset=0"
    return path


def body_of(route: Route, team: Team) -> bytes:
    """A body the route takes, about the team's things where it can name some."""
    given: dict[str, object] = {
        "JobRequest": {"payload": {"type": "snippet", "code": ""}, "after": [team.ids.get("id", "jnowhere")]},
        "BatchRequest": {"jobs": [{"payload": {"type": "snippet", "code": ""}, "queue": f"{team.mark}-queue"}]},
        "EditRequest": {"tags": []},
        "PoolRequest": {"accelerator": "v5e-8"},
        "SecretRequest": {"value": "own"},
        "MissingRequest": {"blobs": [team.hash]},
        "Maintenance": {"on": False},
        "CleanRequest": {"dry_run": True, "older_than_s": 0},
    }
    if route.takes is None:
        return b""
    return team.blob if route.takes is bytes else msgspec.json.encode(given.get(route.takes.__name__, {}))


def walk(house: House, evidence: Evidence, principal: str, token: str, stranger: Team) -> None:
    """Ask every route about the other team's things, and note which marks the answers show."""
    for route in all_routes():
        path, body = path_of(route, stranger), body_of(route, stranger)
        ways = [path]
        if route.streams:
            ways.append(f"{path}?follow=true" + ("&after=0" if route.path.endswith("events") else ""))
        for way in ways:
            asked = house.ask(token, route.method, way, body, most_s=1.0 if "follow" in way else RUN_S)
            assert asked.status < 500, (way, asked)
            # What the asker said itself may be repeated to it.
            said = way + body.decode("latin-1") + principal
            marks = [mark for mark in stranger.marks if mark.encode() in asked.body and mark not in said]
            name = f"{route.method} {route.path}{'?follow' if 'follow' in way else ''}"
            evidence.client("answer.ok", principal, route=name, marks=marks, digest="")


#: What a stranger can ask without an id: lists, and things by names and hashes that it may guess.
def guesses(stranger: Team) -> list[tuple[str, str, bytes]]:
    named = [f"pools/{stranger.mark}-pool", f"queues/{stranger.mark}-queue", f"blobs/{stranger.hash}"]
    lists = ["jobs", "jobs?state=queued", "pools", "queues", "slices", "secrets", "server", "events", "events?after=0"]
    missing = msgspec.json.encode({"blobs": [stranger.hash]})
    job = {"payload": {"type": "snippet", "code": ""}, "queue": f"{stranger.mark}-queue"}
    return [
        *(("GET", f"/v1/{each}", b"") for each in (*named, f"snapshots/{stranger.hash}", *lists)),
        ("POST", "/v1/blobs/missing", missing),
        ("DELETE", f"/v1/pools/{stranger.mark}-pool", b""),
        ("DELETE", f"/v1/queues/{stranger.mark}-queue", b""),
        ("DELETE", f"/v1/secrets/{stranger.secret_name()}", b""),
        ("POST", "/v1/jobs", msgspec.json.encode(job)),
    ]


def guess(house: House, evidence: Evidence, principal: str, token: str, stranger: Team) -> None:
    for method, path, body in guesses(stranger):
        asked = house.ask(token, method, path, body)
        digest = hashlib.sha256(f"{asked.status}".encode() + _MOVING.sub(b"", asked.body)).hexdigest()
        marks = [mark for mark in stranger.marks if mark.encode() in asked.body and mark not in path + body.decode()]
        evidence.client("answer.ok", principal, route=f"{method} {path}", marks=marks, digest=digest)


class Listener(threading.Thread):
    """Reads a stream of events until it is told to go, or the stream is silent for long."""

    def __init__(self, house: House, token: str) -> None:
        super().__init__(daemon=True)
        self._house, self._token = house, token
        self.heard = b""
        self.enough = threading.Event()

    @override
    def run(self) -> None:
        address = urlsplit(self._house.server.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=RUN_S)
        with closing(connection):
            headers = {"authorization": f"Bearer {self._token}"}
            connection.request("GET", "/v1/events?follow=true", headers=headers)
            answer = connection.getresponse()
            while not self.enough.is_set() and (piece := answer.read1(1 << 16)):
                self.heard += piece


def test_a_team_sees_nothing_of_another(house: House, red: Team, blue: Team) -> None:
    evidence = Evidence(house.home.path / "penstock.db")
    house.furnish(blue)
    everybody = {f"blue {role.value}": token for role, token in blue.tokens.items()}
    for principal in (*everybody, "blue host", "blue follower"):
        evidence.world("granted", principal, teams=["blue"])
    for mark in blue.marks:
        evidence.world("owned", mark, team="blue")
    own = house.ask(blue.tokens[Role.VIEWER], "GET", "/v1/jobs")
    assert blue.mark.encode() in own.body, "a mark is seen where it may be seen"
    for principal, token in everybody.items():
        guess(house, evidence, principal, token, red)
    listener = Listener(house, blue.tokens[Role.VIEWER])
    listener.start()

    house.furnish(red)
    evidence.world("acted", "red", team="red")
    for mark in red.marks:
        evidence.world("owned", mark, team="red")
    for principal, token in everybody.items():
        guess(house, evidence, principal, token, red)
    for principal, token in {**everybody, "blue host": house.credential(blue)}.items():
        walk(house, evidence, principal, token, red)

    until(
        lambda: (
            house.tell(blue, "PATCH", f"/v1/jobs/{blue.ids['id']}", {"tags": ["heard"]})
            and b"job.edited" in listener.heard
        )
    )
    listener.enough.set()
    marks = [mark for mark in red.marks if mark.encode() in listener.heard]
    evidence.client("answer.ok", "blue follower", route="GET /v1/events?follow, open all the time", marks=marks)
    assert evidence.prove("S17")["S17"] > 4 * len(all_routes())
    # Nothing of what the strangers tried has changed anything of red's.
    assert house.tell(red, "GET", f"/v1/jobs/{red.ids['id']}")["tags"] == [red.mark]
    assert {pool["name"] for pool in house.tell(red, "GET", "/v1/pools")["pools"]} >= {f"{red.mark}-pool"}
    assert house.tell(red, "GET", "/v1/secrets")["names"] == [red.secret_name()]


def test_the_same_walk_by_one_who_may_see_all_shows_the_marks(house: House, red: Team, blue: Team) -> None:
    """An operator taken for one of blue's: the alarm rings, so the walk above would have heard it."""
    if not red.ids:  # the test above ran in another process, which has a house of its own
        house.furnish(red)
    evidence = Evidence(house.home.path / "penstock.db")
    evidence.world("granted", "operator", teams=["blue"])
    for mark in red.marks:
        evidence.world("owned", mark, team="red")
    walk(house, evidence, "operator", (house.home.path / "token").read_text().strip(), red)
    with pytest.raises(AssertionError, match="of team red") as caught:
        evidence.prove("S17")
    shown = {line.partition(": ")[2].partition(" showed")[0] for line in str(caught.value).splitlines()}
    assert shown >= {"GET /v1/jobs", "GET /v1/jobs/{id}", "GET /v1/jobs/{id}/logs", "GET /v1/events", "GET /v1/slices"}
    assert blue.mark != red.mark
