"""Live streams over real sockets: resumed where they broke off, ended when their subject is, heard when they fail."""

import time
from collections import deque
from typing import Any

import msgspec
import pytest

from penstock.client.errors import ApiError, Unreachable
from penstock.client.results import log_bytes
from penstock.wire.api import EventPage, EventView, LogChunk
from penstock.wire.problems import problem
from tests.unit.client.conftest import Make
from tests.unit.client.stand_in import Answer, Pieces, StandIn, event, refusal

EVENTS = "/v1/jobs/j1/events"
LOGS = "/v1/jobs/j1/logs"
END = b"event: end\ndata: {}\n\n"


def happened(seq: int, kind: str = "job.placed") -> bytes:
    return event(str(seq), EventView(seq=seq, at=0.0, kind=kind, id="j1"), kind)


def wrote(offset: int, text: str, stream: str = "out", rank: int = 0) -> bytes:
    return event(str(offset), LogChunk(attempt="a1", rank=rank, stream=stream, offset=offset, text=text), "log")


def test_a_stream_that_breaks_off_goes_on_after_its_last_id(server: StandIn, client: Any) -> None:
    server.end("j1", "running")
    whole = happened(3, "job.started")
    server.streams[EVENTS] = deque(
        [
            Pieces((happened(1), happened(2), whole[:20]), whole=False),  # cut in the middle of the third
            Pieces((b": still here\n\n", whole), whole=False),
            Pieces((happened(4, "job.succeeded"), END)),
        ]
    )
    assert [one.seq for one in client.events("j1", follow=True)] == [1, 2, 3, 4]
    assert [asked.headers.get("last-event-id") for asked in server.sent(EVENTS)] == [None, "2", "3"]
    assert server.asked[0].query == {"follow": "true"}
    assert server.asked[0].headers["accept"] == "text/event-stream"


def test_events_come_while_they_happen(server: StandIn, client: Any) -> None:
    server.end("j1", "running")
    server.streams[EVENTS] = deque([Pieces((happened(1), None, happened(2), END))])
    live = client.job("j1").events()
    assert next(live).seq == 1
    server.proceed.release()
    assert [one.seq for one in live] == [2]


def test_a_stream_that_ends_in_good_order_is_over_only_when_the_job_is(server: StandIn, client: Any) -> None:
    """A server that stops ends its streams politely; the client must ask the next one."""
    server.end("j1", "running")
    server.streams[EVENTS] = deque(
        [Pieces((happened(1),)), Pieces((happened(2, "job.succeeded"),)), Pieces((b": nothing new\n\n",))]
    )
    seen = []
    for one in client.events("j1", follow=True):
        seen.append(one.seq)
        if one.seq == 2:
            server.end("j1", "succeeded")
    assert seen == [1, 2]
    assert [asked.headers.get("last-event-id") for asked in server.sent(EVENTS)] == [None, "1", "2"]


def test_a_refused_stream_raises_and_a_busy_one_waits(server: StandIn, client: Any) -> None:
    server.streams[EVENTS] = deque([Pieces((happened(1), END))])
    server.fault(EVENTS, refusal("unavailable"), refusal("not_found", "no job j1"))
    with pytest.raises(ApiError, match="no job j1"):
        list(client.events("j1", follow=True))
    assert [one.seq for one in client.events("j1", follow=True)] == [1]


def test_a_problem_inside_a_stream_is_heard(server: StandIn, client: Any) -> None:
    def failing(code: str) -> bytes:
        return event("", problem(code, "the log cannot be read"), "problem").replace(b"id: \n", b"")

    server.streams[EVENTS] = deque(
        [Pieces((happened(1), failing("unavailable"))), Pieces((happened(2), failing("fault")))]
    )
    live = client.events("j1", follow=True)
    assert [next(live).seq, next(live).seq] == [1, 2]
    with pytest.raises(ApiError, match="the log cannot be read") as caught:
        next(live)
    assert caught.value.code == "fault"


def test_a_follower_gives_up_on_a_server_that_stays_away(make: Make, server: StandIn, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.domain.limits.CLIENT_STREAM_PATIENCE_S", 0.3)
    server.end("j1", "running")
    server.streams[EVENTS] = deque([Pieces((), whole=True)])
    began = time.monotonic()
    with pytest.raises(Unreachable):
        list(make(server, patience_s=0.3).events("j1", follow=True))
    assert time.monotonic() - began < 5


def test_a_silent_connection_is_made_anew(make: Make, server: StandIn, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.domain.limits.CLIENT_STREAM_SILENCE_S", 2.0)
    server.streams[EVENTS] = deque([Pieces((happened(1), None)), Pieces((happened(2), END))])
    assert [one.seq for one in make(server).events("j1", follow=True)] == [1, 2]
    server.proceed.release()


def test_past_events_come_page_by_page(server: StandIn, client: Any) -> None:
    def page(*seqs: int, upto: int) -> Answer:
        events = tuple(EventView(seq=seq, at=0.0, kind="job.placed", id="j1") for seq in seqs)
        return Answer(body=msgspec.json.encode(EventPage(events, upto)))

    # A page may be empty and still say how far it looked: other teams' events lay between.
    server.fault("/v1/events", page(1, 2, upto=2), page(upto=900), page(901, upto=901), page(upto=901))
    assert [one.seq for one in client.events()] == [1, 2, 901]
    assert [asked.query.get("after") for asked in server.asked] == [None, "2", "900", "901"]


def test_logs_are_followed_to_their_end(server: StandIn, client: Any) -> None:
    server.streams[LOGS] = deque([Pieces((wrote(0, "a\n"),), whole=False), Pieces((wrote(2, "ü\n"), END))])
    chunks = list(client.logs("j1", follow=True, host=0, stream="out"))
    assert b"".join(log_bytes(chunk) for chunk in chunks) == "a\nü\n".encode()
    assert server.asked[0].query == {"follow": "true", "host": "0", "stream": "out"}
    assert server.asked[1].headers["last-event-id"] == "0"


def test_one_stream_of_past_logs_still_comes_as_chunks(server: StandIn, client: Any) -> None:
    """The server answers plain bytes when both are named: the client asks for more and picks."""
    server.streams[LOGS] = deque([Pieces((wrote(0, "a"), wrote(0, "b", "err"), END))])
    assert [chunk.text for chunk in client.logs("j1", host=0, stream="err")] == ["b"]
    assert server.asked[0].query == {"follow": "false", "host": "0"}


def test_one_stream_as_it_was_written(server: StandIn, client: Any) -> None:
    server.fault(LOGS, Answer(body=b"\xff\x00raw", media_type="application/octet-stream"))
    assert client.job("j1").log_bytes(stream="err", host=3) == b"\xff\x00raw"
    assert server.asked[0].query == {"host": "3", "stream": "err"}


def test_bytes_that_are_no_text_come_as_base64() -> None:
    assert log_bytes(LogChunk(attempt="a", rank=0, stream="out", offset=0, base64="//8=")) == b"\xff\xff"


def test_leaving_a_stream_early_leaves_nothing_open(server: StandIn, client: Any) -> None:
    """Warnings are errors here: an abandoned socket would fail the test."""
    server.streams[EVENTS] = deque([Pieces((happened(1), None, happened(2), END))])
    live = client.events("j1", follow=True)
    assert next(live).seq == 1
    live.close()
    server.proceed.release()
