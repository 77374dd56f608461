"""Tokens, agents' credentials, and who may call which route."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest

from penstock.domain.nouns import Principal, Role
from penstock.server.app import all_routes
from penstock.server.auth import (
    Token,
    Tokens,
    authenticate,
    has_role,
    host_credential,
    host_of,
    join_token,
    join_token_fits,
    token_hash,
)
from penstock.server.routing import AgentHost, Refusal, Route
from tests.unit.server.house import KEY, USERS

HOST = AgentHost("s01abc", 3, "life: 7.é")


def write(path: Path, *rows: Token, stamp: int) -> None:
    path.write_bytes(msgspec.json.encode(rows))
    os.utime(path, ns=(stamp, stamp))


def row(token: str, role: Role = Role.ADMIN) -> Token:
    return Token(sha256=token_hash(token), name="ada", team="lab", role=role)


def test_a_changed_file_counts_at_once(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    write(path, row("one"), stamp=1)
    tokens = Tokens(path)
    assert tokens.find("one") == Principal(name="ada", team="lab", role=Role.ADMIN)
    assert tokens.find("two") is None
    write(path, row("two"), stamp=2)
    assert tokens.find("one") is None
    assert tokens.find("two") is not None


def test_a_broken_file_locks_nobody_out_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens.json"
    write(path, row("one"), stamp=1)
    tokens = Tokens(path)
    path.write_text('[{"sha256":')
    with caplog.at_level(logging.ERROR):
        assert tokens.find("one") is not None
    assert "cannot be read" in caplog.text
    path.unlink()
    assert tokens.find("one") is not None


def test_a_server_does_not_start_on_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text('[{"sha256": "00", "name": "x", "team": "lab", "role": "king"}]')
    with pytest.raises(msgspec.ValidationError, match="king"):
        Tokens(path)


def test_a_credential_is_of_one_host_in_one_life() -> None:
    credential = host_credential(KEY, HOST)
    assert credential.startswith("h.s01abc.3.")
    assert host_of(KEY, credential) == HOST
    assert host_of(b"another key", credential) is None
    head, _, mac = credential.rpartition(".")
    assert host_of(KEY, f"{head}.{mac[:-1]}{'0' if mac[-1] != '0' else '1'}") is None
    assert host_of(KEY, credential.replace(".3.", ".4.", 1)) is None
    assert host_of(KEY, credential.replace("s01abc", "s01abd", 1)) is None


@pytest.mark.parametrize("bearer", ["h.", "h.s.0.zz.00", "h.s.-1.00.00", "h.s.0.ff.00", "h.s.٣.00.00", "h." + "." * 9])
def test_nonsense_is_no_credential(bearer: str) -> None:
    assert host_of(KEY, bearer) is None


def test_a_join_token_is_of_one_slice() -> None:
    token = join_token(KEY, "s1")
    assert join_token_fits(KEY, "s1", token)
    assert not join_token_fits(KEY, "s2", token)
    assert not join_token_fits(KEY, "s1", "é")


@pytest.mark.parametrize("header", [None, "", "Basic abc", "Bearer", "Bearer  ", "Bearer é", "Bearer " + "x" * 3000])
def test_without_a_token_nothing_is_said_but_what_is_missing(header: str | None) -> None:
    route = next(route for route in all_routes() if route.path == "/v1/jobs")
    with pytest.raises(Refusal) as refused:
        authenticate(Tokens(), KEY, route, header)
    assert refused.value.problem.status == 401


CALLERS = [*(key for key in USERS), "host", "nobody"]


@pytest.mark.parametrize("route", all_routes(), ids=lambda route: f"{route.method} {route.path}")
@pytest.mark.parametrize("caller", CALLERS)
def test_every_route_is_for_whom_it_says(route: Route, caller: str) -> None:
    """The whole matrix of roles and routes."""
    rows = [
        Token(sha256=token_hash(f"token-{key}"), name=name, team=team, role=role)
        for key, (name, team, role) in USERS.items()
    ]
    tokens = Tokens(rows=tuple(rows))
    bearer = host_credential(KEY, HOST) if caller == "host" else f"token-{caller}"
    try:
        principal, host = authenticate(tokens, KEY, route, None if caller == "nobody" else f"Bearer {bearer}")
    except Refusal as refusal:
        allowed, status = False, refusal.problem.status
    else:
        allowed, status = True, 0
        assert (host == HOST) == (caller == "host" and route.role is not None)
        assert (principal is not None) == (caller in USERS and route.role is not None)
    if route.role is None:
        assert allowed
    elif caller == "nobody":
        assert status == 401
    elif caller == "host":
        assert allowed == (route.role is Role.AGENT or route.agents)
    else:
        role = USERS[caller][2]
        order = [Role.VIEWER, Role.SUBMITTER, Role.ADMIN, Role.OPERATOR]
        assert allowed == (route.role is not Role.AGENT and order.index(role) >= order.index(route.role))
        assert allowed or status == 403


def test_writing_needs_more_than_looking() -> None:
    """No route that changes something is open to viewers, and only these three are open to everybody."""
    for route in all_routes():
        if route.method != "GET" and route.role is not None:
            assert route.role is not Role.VIEWER, route.path
    opened = {route.path for route in all_routes() if route.role is None and not route.joins}
    assert opened == {"/healthz", "/v1/openapi.json", "/v1/agent/join"}


def test_an_agent_has_no_role_among_users() -> None:
    assert not has_role(Principal(name="x", team="lab", role=Role.AGENT), Role.VIEWER)
