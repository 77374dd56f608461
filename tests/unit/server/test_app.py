"""The door: what every route has in common, whatever it does."""

from __future__ import annotations

import asyncio
import logging
import zlib
from typing import Any, ClassVar

import pytest

from penstock.controller.agents import NotLeading
from penstock.ports.objects import ObjectsError
from penstock.ports.store import Conflict, StaleLeader, StoreError, Unavailable, UnknownOutcome
from penstock.server import app
from penstock.server.jobs import JOB_BODY_MAX
from penstock.server.routing import Events, Refusal, Sent
from tests.unit.server.house import JOB, House


def test_a_path_that_is_not_there(house: House) -> None:
    for path in ("/", "/v1", "/v1/jobs/", "/v2/jobs", "/v1/jobs/j1/nothing", "/%00"):
        said = house.refused(404, "GET", path)
        assert said["code"] == "not_found"


def test_a_method_that_is_not_there_says_which_are(house: House) -> None:
    answer = house.call("DELETE", "/v1/jobs")
    assert (answer.status, answer.headers["allow"]) == (405, "GET, POST")
    assert answer.json["code"] == "method_not_allowed"
    assert house.call("OPTIONS", "/v1/pools/x").headers["allow"] == "DELETE, GET, PUT"


def test_head_is_get_without_a_body(house: House) -> None:
    whole, head = house.call("GET", "/healthz", None), house.call("HEAD", "/healthz", None)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]


def test_who_is_unknown_is_told_how(house: House) -> None:
    for user in (None, "nobody"):
        answer = house.call("GET", "/v1/jobs", user)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json["code"] == "unauthenticated"


def test_a_body_that_is_too_large_is_not_read(house: House) -> None:
    said = house.refused(413, "POST", "/v1/jobs", content=b"x" * (JOB_BODY_MAX + 1))
    assert said["code"] == "too_large"

    async def pieces() -> Any:
        for _ in range(JOB_BODY_MAX // (1 << 20) + 2):
            yield b" " * (1 << 20)

    answer = house.call("POST", "/v1/jobs", content=pieces(), headers={"content-type": "application/json"})
    assert answer.status == 413
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("media", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_json_must_say_that_it_is(house: House, media: str) -> None:
    headers = {"content-type": media} if media else {}
    said = house.refused(415, "POST", "/v1/jobs", content=b"{}", headers=headers)
    assert said["code"] == "unsupported_media_type"


def test_json_may_say_its_alphabet(house: House) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert house.call("POST", "/v1/jobs", json=JOB, headers=headers).status == 201


def test_packed_bodies_are_refused_unopened(house: House) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    for body in (zlib.compress(b"{}"), b"not packed"):
        house.refused(415, "POST", "/v1/jobs", content=body, headers=headers)


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"NaN", b"-", b'"\\ud800"', b"1e999", b"null", b"\x00"],
)
def test_bad_bodies_are_bad_input(house: House, body: bytes) -> None:
    said = house.refused(400, "POST", "/v1/jobs", content=body, headers={"content-type": "application/json"})
    assert said["code"] == "bad_input"


@pytest.mark.parametrize(
    ("query", "field"),
    [("limit=0", "limit"), ("limit=x", "limit"), ("state=sleeping", "state"), ("limit=1&limit=2", "limit")],
)
def test_a_query_that_does_not_fit(house: House, query: str, field: str) -> None:
    said = house.refused(400, "GET", f"/v1/jobs?{query}")
    assert (said["code"], said["field"]) == ("bad_input", field)


def test_an_unknown_parameter_is_told_with_those_there_are(house: House) -> None:
    said = house.refused(400, "GET", "/v1/jobs?stat=queued")
    assert "state, user, tag" in said["detail"]


@pytest.mark.parametrize(
    ("error", "status", "code", "waits"),
    [
        (Unavailable("disk /secret/path"), 503, "unavailable", True),
        (UnknownOutcome("no answer"), 503, "unavailable", True),
        (StoreError("odd"), 503, "unavailable", True),
        (ObjectsError("bucket"), 503, "unavailable", True),
        (NotLeading("x"), 503, "not_leading", True),
        (StaleLeader("x"), 503, "not_leading", True),
        (Conflict("changed"), 409, "conflict", False),
        (RuntimeError("token-of-somebody"), 500, "fault", False),
    ],
)
def test_what_goes_wrong_has_a_code(
    house: House,
    error: Exception,
    status: int,
    code: str,
    waits: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(house.store, "read", fail)
    with caplog.at_level(logging.WARNING):
        answer = house.call("GET", "/v1/jobs")
    assert answer.status == status
    assert answer.json["code"] == code
    assert ("retry-after" in answer.headers) == waits
    assert b"/secret/path" not in answer.body
    assert b"token-of-somebody" not in answer.body
    if status == 500:
        assert "token-of-somebody" in caplog.text  # the log has what the caller must not see


def test_service_resumes_with_the_store(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """L9: 503 with Retry-After while it is away, then as before, unaided."""

    async def away(*_: object, **__: object) -> None:
        raise Unavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(house.store, "read", away)
        answer = house.call("GET", "/healthz", None)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert house.call("GET", "/healthz", None).status == 200


def test_a_body_that_stops_coming_is_given_up(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_PAUSE_S", 0.05)

    async def stuck() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    class Request:
        headers: ClassVar[dict[str, str]] = {}

        def stream(self) -> Any:
            return stuck()

    with pytest.raises(Refusal, match="nothing came"):
        house.wait(app.read_body(Request(), 100))  # type: ignore[arg-type]


# --- streams ---
def test_silence_is_filled_and_the_source_is_closed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "HEARTBEAT_S", 0.02)
    closed = []

    async def source() -> Any:
        try:
            yield Sent("1", "job.created", b"{}")
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def read() -> list[bytes]:
        frames = app.frames(house.service, Events(source()))
        got = [await anext(frames) for _ in range(4)]
        await frames.aclose()  # type: ignore[attr-defined]
        return got

    assert house.wait(read()) == [
        b"retry: 1000\n\n",
        b"id: 1\nevent: job.created\ndata: {}\n\n",
        b": still here\n\n",
        b": still here\n\n",
    ]
    assert closed == [True]


def test_a_stream_ends_when_the_server_stops(house: House) -> None:
    async def source() -> Any:
        await asyncio.Event().wait()
        yield Sent("1", "x", b"{}")

    async def read() -> list[bytes]:
        asyncio.get_running_loop().call_later(0.02, house.service.stopping.set)
        return [frame async for frame in app.frames(house.service, Events(source()))]

    assert house.wait(read()) == [b"retry: 1000\n\n"]


def test_a_fault_in_a_stream_is_told_in_it(house: House) -> None:
    async def source() -> Any:
        yield Sent("1", "x", b"{}")
        raise Unavailable("away")

    async def read() -> list[bytes]:
        return [frame async for frame in app.frames(house.service, Events(source()))]

    frames = house.wait(read())
    assert len(frames) == 3
    assert frames[2].startswith(b"event: problem\ndata: {")
    assert b'"code":"unavailable"' in frames[2]
