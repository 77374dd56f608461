"""Schemathesis against a real server: every route, every check, with authentication.

It reads our OpenAPI page, sends what the page allows and what it forbids, and holds every answer against it. A host has
joined and holds an attempt, so that agents' routes answer about something that exists.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from penstock.domain import limits
from penstock.server.app import all_routes
from penstock.server.auth import join_token
from tests.process.api_server import KEY, TOKEN

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0
ANSWER_S = limits.RESULT_WAIT_S + 30.0  #: some answers are waited for, by whoever asks for that


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.process.api_server", str(tmp_path)]
    with (
        (tmp_path / "server.log").open("wb") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, (tmp_path / "server.log").read_text()
        try:
            yield url
            assert process.poll() is None, (tmp_path / "server.log").read_text()
        finally:
            process.kill()


def call(url: str, method: str, path: str, token: str | None, body: Any = None) -> Any:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S)
    headers = {"content-type": "application/json"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    connection.request(method, path, msgspec.json.encode(body) if body is not None else None, headers)
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    assert reply.status < 300, (method, path, reply.status, data)
    return msgspec.json.decode(data) if data else None


def hold_an_attempt(url: str) -> tuple[str, str]:
    """Submit a job, join as the host that the server makes for it, and take the launch: credential and attempt."""
    call(url, "POST", "/v1/jobs", TOKEN, {"payload": {"type": "snippet", "code": "result = 1"}})
    until = time.monotonic() + DEADLINE_S
    credential = ""
    while time.monotonic() < until:
        slices = [one for one in call(url, "GET", "/v1/slices", TOKEN)["slices"] if one["state"] != "intended"]
        if not slices:
            time.sleep(0.05)
            continue
        name = slices[0]["id"]
        host = {"slice": name, "host": 0, "provider_id": f"vm-{name}", "incarnation": "life-1"}
        if not credential:
            joined = call(url, "POST", "/v1/agent/join", None, {**host, "token": join_token(KEY, name)})
            credential = joined["credential"]
        reply = call(url, "POST", "/v1/agent/sync", credential, {"request": host, "wait_s": 1.0})
        if reply["launch"] is not None:
            return credential, reply["launch"]["attempt"]
    raise AssertionError("no attempt was launched")


def settings_of(directory: Path, credential: str, attempt: str) -> Path:
    path = directory / "schemathesis.toml"
    path.write_text(
        f"""
hooks = "tests.process.schemathesis_formats"
max-stream-events = 3
[checks]
max_response_time = {ANSWER_S}
[auth.openapi]
user = {{ bearer = "{TOKEN}" }}
agent = {{ bearer = "{credential}" }}
[[operations]]
include-path-regex = "attempts/.*/(checkpoints|restore|fence)"
parameters = {{ "path.attempt" = "{attempt}" }}
"""
        + "".join(
            # A stream of something that goes on never ends: a second of it is enough.
            f"""
[[operations]]
include-name = "GET {path}"
request-timeout = 1.0
request-retries = 10
"""
            for path in ("/v1/events", "/v1/jobs/{id}/events", "/v1/jobs/{id}/logs")
        )
    )
    return path


@pytest.mark.long
def test_the_api_is_as_it_is_described(server: str, tmp_path: Path) -> None:
    credential, attempt = hold_an_attempt(server)
    spec = call(server, "GET", f"/v1/agent/attempts/{attempt}/launch", credential)
    assert spec["payload"]["code"] == "result = 1"
    config = settings_of(tmp_path, credential, attempt)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
    # From a file: by its address, schemathesis would leave the route of the page itself out.
    page = tmp_path / "openapi.json"
    page.write_bytes(msgspec.json.encode(call(server, "GET", "/v1/openapi.json", None)))
    command += [str(page), "--url", server, "--checks", "all", "--max-examples", "5", "--seed", "20261115"]
    command += ["--request-timeout", str(ANSWER_S), "--no-color"]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    routes = len(all_routes())
    assert f"Selected: {routes}/{routes}" in run.stdout
    assert f"Tested: {routes}" in run.stdout
    assert call(server, "GET", "/healthz", None) == {"ok": True}
