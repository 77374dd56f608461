"""Calls over real sockets: what is tried again and what never, keep-alive, deadlines, and refusals as errors."""

import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from penstock.client.client import Client
from penstock.client.errors import ApiError, Unreachable
from penstock.wire.api import JobRequest, SnippetRequest
from tests.unit.client.conftest import Make
from tests.unit.client.stand_in import TOKEN, Answer, Cut, Pieces, StandIn, refusal, serving

JOB = JobRequest(payload=SnippetRequest("result = 1"))


def test_calls_share_one_connection_and_carry_the_token(server: StandIn, client: Any) -> None:
    for number in range(5):
        client.put_blob("ab" * 32, bytes([number]))
        client.submit(JOB)  # answers with a body, without one, and refusals: all leave the connection usable
        with pytest.raises(ApiError):
            client.why("nobody")
    assert {asked.connection for asked in server.asked} == {server.asked[0].connection}
    assert {asked.headers["authorization"] for asked in server.asked} == {f"Bearer {TOKEN}"}
    assert [asked.body for asked in server.asked[::3]] == [bytes([number]) for number in range(5)]
    assert server.asked[0].headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize("cut", [Cut(after=False), Cut(after=True)], ids=["before", "after"])
def test_a_submit_that_got_no_answer_is_repeated_and_makes_one_job(server: StandIn, client: Any, cut: Cut) -> None:
    server.fault("/v1/jobs", cut, cut)
    accepted = client.submit(JOB)
    assert len(server.jobs) == 1
    assert accepted.id == "j0"
    assert accepted.created is (not cut.after)
    assert len(server.sent("/v1/jobs")) == 3


def test_a_key_of_the_callers_own_is_kept(server: StandIn, client: Any) -> None:
    first = client.submit(JobRequest(payload=JOB.payload, idempotency_key="mine"))
    second = client.submit(JobRequest(payload=JOB.payload, idempotency_key="mine"))
    assert (first.id, first.created, second.created) == (second.id, True, False)
    assert list(server.jobs) == ["mine"]


def test_a_batch_is_repeated_with_the_same_keys(server: StandIn, client: Any) -> None:
    server.fault("/v1/jobs/batch", Cut(after=True), refusal("unavailable"))
    accepted = client.submit_many([JOB, JOB, JOB])
    assert [one.id for one in accepted] == ["j0", "j1", "j2"]
    assert len(server.jobs) == 3


def test_a_503_is_tried_again_after_the_time_it_names(server: StandIn, client: Any) -> None:
    server.fault("/v1/jobs", refusal("not_leading", retry_after_s=0.3))
    began = time.monotonic()
    client.submit(JOB)
    assert time.monotonic() - began >= 0.3


def test_the_header_retry_after_counts_too(server: StandIn, client: Any) -> None:
    server.fault("/v1/jobs", Answer(503, b"busy", "text/plain", (("Retry-After", "1"),)))
    began = time.monotonic()
    client.submit(JOB)
    assert time.monotonic() - began >= 1


def test_a_call_that_is_not_repeatable_is_sent_once(server: StandIn, client: Any) -> None:
    server.fault("/v1/slices/s1/preempt", Cut(after=True))
    with pytest.raises(Unreachable, match="no answer from http://127"):
        client.preempt("s1")
    server.fault("/v1/slices/s1/preempt", refusal("unavailable"))
    with pytest.raises(ApiError) as caught:
        client.preempt("s1")
    assert caught.value.code == "unavailable"
    assert len(server.asked) == 2


def test_a_refusal_is_not_tried_again(server: StandIn, client: Any) -> None:
    server.fault("/v1/jobs", refusal("bad_input", "priority: 5000 is not between -1000 and 1000"))
    with pytest.raises(ApiError, match="priority: 5000") as caught:
        client.submit(JOB)
    assert (caught.value.code, caught.value.status, caught.value.exit_code) == ("bad_input", 400, 2)
    assert len(server.asked) == 1


def test_a_wrong_token_is_said(server: StandIn, make: Make) -> None:
    with pytest.raises(ApiError) as caught:
        make(server, token="another").submit(JOB)
    assert (caught.value.code, caught.value.exit_code) == ("unauthenticated", 4)


def test_an_answer_of_a_proxy_is_shown(server: StandIn, client: Any) -> None:
    server.fault("/v1/slices/s1/preempt", Answer(418, b"<html>\n I am   a teapot", "text/html"))
    with pytest.raises(ApiError, match="<html> I am a teapot") as caught:
        client.preempt("s1")
    assert caught.value.status == 418


def test_a_redirect_is_an_error_and_the_token_stays(server: StandIn, client: Any) -> None:
    server.fault("/v1/slices/s1/preempt", Answer(307, b"", "text/plain", (("Location", "http://127.0.0.1:1/x"),)))
    with pytest.raises(ApiError) as caught:
        client.preempt("s1")
    assert caught.value.status == 307


def test_an_answer_that_is_no_answer_of_ours_says_which(server: StandIn, client: Any) -> None:
    server.fault("/v1/jobs", Answer(200, b'{"id": 7}'))
    with pytest.raises(ApiError, match="/v1/jobs cannot be read"):
        client.submit(JOB)


def test_nobody_there_is_said_within_the_patience(make: Make) -> None:
    gone = StandIn()
    with serving(gone) as stop:
        stop()
    began = time.monotonic()
    with pytest.raises(Unreachable) as caught:
        make(gone, patience_s=0.5).submit(JOB)
    assert 0.2 <= time.monotonic() - began < 5
    assert (caught.value.code, caught.value.exit_code) == ("unavailable", 3)


def test_a_restart_of_the_server_is_bridged(make: Make) -> None:
    """The connection at rest is dead after it, and for a while nobody listens."""
    first = StandIn()
    with serving(first) as stop:
        client = make(first)
        client.put_blob("ab" * 32, b"1")
        port = int(first.url.rpartition(":")[2])
        stop()
    second = StandIn()
    over = threading.Event()

    def come_back() -> None:
        with serving(second, port):
            over.wait(30)

    timer = threading.Timer(0.3, come_back)
    timer.start()
    try:
        client.put_blob("ab" * 32, b"2")
        assert [asked.body for asked in second.asked] == [b"2"]
    finally:
        over.set()
        timer.join()


def test_a_server_that_hangs_is_given_up_in_time(make: Make) -> None:
    """It takes connections and never says a word: half of the time for one try, the rest for another."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        silent = StandIn()
        silent.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(Unreachable):
            make(silent, timeout_s=0.6).submit(JOB)
        assert 0.5 <= time.monotonic() - began < 5


def test_a_body_that_trickles_does_not_last_for_ever(server: StandIn, make: Make) -> None:
    server.streams["/v1/blobs/" + "ab" * 32] = deque(
        [Pieces((b"a", None, b"b"), media_type="application/octet-stream")]
    )
    began = time.monotonic()
    with pytest.raises(Unreachable):
        make(server, timeout_s=0.6).get_blob("ab" * 32)
    assert time.monotonic() - began < 5
    server.proceed.release()
    server.proceed.release()


def test_a_body_cut_off_is_fetched_again(server: StandIn, client: Any, tmp_path: Path) -> None:
    path = "/v1/jobs/j1/artifacts/sub/weights.npy"
    server.artifacts["sub/weights.npy"] = b"whole"
    server.fault(path, Pieces((b"wh",), whole=False), Pieces((b"who",), whole=False))
    assert client.artifact("j1", "sub/weights.npy") == b"whole"
    server.fault(path, Answer(body=b"who", missing=2))
    assert client.artifact("j1", "sub/weights.npy") == b"whole"
    server.fault(path, Pieces((b"longer than the whole",), whole=False))
    client.save_artifact("j1", "sub/weights.npy", tmp_path / "weights.npy")
    assert (tmp_path / "weights.npy").read_bytes() == b"whole"
    assert [file.name for file in tmp_path.iterdir()] == ["weights.npy"]


def test_an_artifact_that_cannot_be_had_leaves_no_file(server: StandIn, client: Any, tmp_path: Path) -> None:
    server.fault("/v1/jobs/j1/artifacts/a", refusal("not_found"))
    with pytest.raises(ApiError):
        client.save_artifact("j1", "a", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("id", ["", ".", "..", "a/result"])
def test_ids_that_would_be_another_path_are_not_sent(server: StandIn, client: Any, id: str) -> None:
    with pytest.raises(ApiError, match="is not a name"):
        client.get(id)
    assert server.asked == []


@pytest.mark.parametrize("id", ["a?x=1", "a b", "ü", "%2e", "a\nb", "a#b"])
def test_ids_of_any_other_kind_arrive_as_they_are(server: StandIn, client: Any, id: str) -> None:
    server.end(id)
    assert client.outcome(id).id == id
    assert server.asked[0].query == {}


def test_threads_share_a_client(server: StandIn) -> None:
    with Client(server.url, TOKEN) as client:
        threads = [threading.Thread(target=client.submit, args=(JOB,)) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(server.jobs) == 20


def test_a_refusal_before_the_body_was_read_is_still_seen() -> None:
    """A server that answers 413 and closes breaks our sending; its reason must not be lost in that."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def refuse() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                answer = refusal("too_large", "body: is longer than 1000 bytes")
                head = f"HTTP/1.1 413 no\r\nContent-Type: {answer.media_type}\r\nConnection: close\r\n"
                connection.sendall(f"{head}Content-Length: {len(answer.body)}\r\n\r\n".encode() + answer.body)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 20):
                    pass

        thread = threading.Thread(target=refuse)
        thread.start()
        with (
            Client(f"http://127.0.0.1:{listening.getsockname()[1]}", TOKEN) as client,
            pytest.raises(ApiError, match="longer than 1000") as caught,
        ):
            client.put_blob("ab" * 32, bytes(20 << 20))
        thread.join()
    assert caught.value.code == "too_large"
