"""What people use: run, exec, map, handles of jobs. Over both clients, against the stand-in."""

import io
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

from penstock.cli import follow
from penstock.client.errors import ApiError, JobFailed
from penstock.domain import limits
from penstock.wire import api
from tests.unit.client.conftest import Make
from tests.unit.client.stand_in import Answer, Pieces, StandIn, event, refusal, view


def ending(job: str, kind: str = "job.succeeded") -> Pieces:
    return Pieces((event("9", api.EventView(seq=9, at=0.0, kind=kind, id=job), kind),))


def requests(server: StandIn) -> list[api.JobRequest]:
    return [job for _, job in server.jobs.values()]


def test_exec_submits_waits_and_returns_the_value(server: StandIn, client: Any) -> None:
    server.end("j0", "running", cause=None)
    server.end("j0", result={"sum": 6, "list": [1, None, "x"]})
    server.streams["/v1/jobs/j0/events"] = deque([ending("j0")])
    value = client.exec(
        "result = f(x)", variables={"x": [1, 2.5]}, on="v5e-8, v4-8", isolation="inline", tags=["a"], replicas=(1, 4),
        timeout_s=60, secrets=["KEY"], env={"A": "b"},
    )  # fmt: skip
    assert value == {"sum": 6, "list": [1, None, "x"]}
    (request,) = requests(server)
    assert request.payload == api.SnippetRequest("result = f(x)", {"x": [1, 2.5]}, "inline")
    assert (request.on, request.tags, request.secrets) == (("v5e-8", "v4-8"), ("a",), ("KEY",))
    assert (request.replicas_min, request.replicas_max, request.timeout_s, request.env) == (1, 4, 60.0, {"A": "b"})


def test_a_job_that_failed_raises_its_own_words(server: StandIn, client: Any) -> None:
    error = {"type": "ValueError", "message": "no such thing", "traceback": "Traceback…"}
    server.end("j0", "failed", cause="user_error", exit_code=1, error=error)
    with pytest.raises(JobFailed, match="job j0 failed: ValueError: no such thing") as caught:
        client.exec("boom()")
    assert (caught.value.type, caught.value.message, caught.value.traceback) == (
        "ValueError",
        "no such thing",
        "Traceback…",
    )
    assert (caught.value.cause, caught.value.exit_code) == ("user_error", 1)


@pytest.mark.parametrize(
    ("cause", "code", "expected"),
    [
        *[("oom", None, 137), ("timeout", None, 124), ("user_error", 3, 3), ("user_error", 256, 1), ("new", None, 1)],
        *[("new", 5, 5), (None, 9, 9), ("oom", 1, 137), ("timeout", 143, 124), ("infra", 70, 75), ("lost", 9, 75)],
        *[("preempted", 143, 75), ("cancelled", 143, 130), ("user_error", None, 1)],
    ],
)
def test_exit_codes_of_failed_jobs_are_those_of_the_shell(cause: str | None, code: int | None, expected: int) -> None:
    outcome = api.Outcome(id="j", state="failed", cause=cause, exit_code=code)
    assert JobFailed(outcome).exit_code == follow.exit_code(outcome) == expected


def test_a_cancelled_job_has_its_code_whatever_is_known_of_it() -> None:
    assert JobFailed(api.Outcome(id="j", state="cancelled", cause=None, exit_code=1)).exit_code == 130


def test_waiting_has_an_end_and_the_job_goes_on(server: StandIn, client: Any) -> None:
    server.end("j0", "running", cause=None)
    server.streams["/v1/jobs/j0/events"] = deque([Pieces((b": here\n\n", None))])
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        client.job("j0").wait(0.3)
    assert 0.25 <= time.monotonic() - began < 5
    server.proceed.release()


def test_a_wait_outlives_a_break_of_the_connection(server: StandIn, client: Any) -> None:
    server.end("j0", "running", cause=None)
    server.end("j0", "cancelled", cause="cancelled", exit_code=None)
    server.streams["/v1/jobs/j0/events"] = deque([Pieces((), whole=False), ending("j0", "job.cancelled")])
    assert client.job("j0").wait(30).state == "cancelled"


def test_an_edited_job_is_not_taken_for_an_ended_one(server: StandIn, client: Any) -> None:
    server.end("j0", "running", cause=None)
    server.end("j0")
    edited = event("5", api.EventView(seq=5, at=0.0, kind="job.edited", id="j0"), "job.edited")
    server.streams["/v1/jobs/j0/events"] = deque([Pieces((edited, *ending("j0").chunks))])
    assert client.job("j0").wait(30).state == "succeeded"
    assert len(server.sent("/v1/jobs/j0/result")) == 2


def test_map_yields_results_in_the_order_of_the_items(server: StandIn, client: Any) -> None:
    for index in range(3):
        server.end(f"j{index}", result=index * 10)
    results = client.map("result = item * 10", (index for index in range(3)), on="v5e-1")
    assert len(server.jobs) == 3  # before the first result is asked for
    assert list(results) == [0, 10, 20]
    assert [one.payload.variables for one in requests(server)] == [{"item": 0}, {"item": 1}, {"item": 2}]  # type: ignore[union-attr]
    arrays = {str(one.array).rpartition("/")[0] for one in requests(server)}
    assert len(arrays) == 1
    assert [str(one.array).rpartition("/")[2] for one in requests(server)] == ["0", "1", "2"]


def test_map_with_a_key_may_be_repeated(server: StandIn, client: Any) -> None:
    server.end("j0", result=1)
    for _ in range(2):
        assert list(client.map("result = a", [{"a": 1}], idempotency_key="night")) == [1]
    first, second = (msgspec.json.decode(asked.body) for asked in server.sent("/v1/jobs/batch"))
    assert first == second
    assert list(server.jobs) == ["night/0"]
    assert requests(server)[0].payload.variables == {"a": 1}  # type: ignore[union-attr]


def test_map_says_which_item_failed(server: StandIn, client: Any) -> None:
    for job in ("j0", "j3"):
        server.end(job, result=1)
    for job in ("j1", "j4"):
        server.end(job, "failed", cause="user_error", exit_code=1)
    for job in ("j2", "j5"):
        server.end(job, result=3)
    results = client.map("result = item", [1, 2, 3])
    assert next(results) == 1
    with pytest.raises(JobFailed, match="job j1"):
        next(results)
    first, second, third = client.map("result = item", [1, 2, 3], errors="return")
    assert (first, second.id, third) == (1, "j4", 3)


def test_map_takes_a_whole_request_as_template(server: StandIn, client: Any) -> None:
    template = api.JobRequest(payload=api.SnippetRequest("result = item + b", {"b": 1}), on=("v4-8",), note="n")
    client.map(template, [5])
    (request,) = requests(server)
    assert request.payload == api.SnippetRequest("result = item + b", {"b": 1, "item": 5})
    assert (request.on, request.note) == (("v4-8",), "n")
    with pytest.raises(ApiError, match="only snippets have variables"):
        client.map(api.JobRequest(payload=api.CommandRequest(("true",))), [5])


@pytest.mark.parametrize("bad", [float("nan"), {1, 2}, b"x", {"not a name": 1}, {1: 2}], ids=repr)
def test_nothing_is_sent_when_one_item_cannot_be(server: StandIn, client: Any, bad: object) -> None:
    with pytest.raises(ApiError, match=r"items\[1\]") as caught:
        client.map("result = 1", [1, bad])
    assert caught.value.exit_code == 2
    assert server.asked == []


def test_options_of_the_wrong_type_are_refused_before_they_are_sent(server: StandIn, client: Any) -> None:
    with pytest.raises(ApiError, match="priority"):
        client.exec("result = 1", priority="high")
    with pytest.raises(TypeError, match="prio"):
        client.exec("result = 1", prio=1)
    assert server.asked == []


def test_large_batches_are_split(server: StandIn, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = api.JobRequest(payload=api.SnippetRequest("result = 1"))
    monkeypatch.setattr(limits, "BATCH_JOBS_MAX", 10)
    accepted = client.submit_many(job for _ in range(25))
    assert [one.id for one in accepted] == [f"j{index}" for index in range(25)]
    sizes = [len(msgspec.json.decode(asked.body)["jobs"]) for asked in server.sent("/v1/jobs/batch")]
    assert sizes == [10, 10, 5]
    monkeypatch.setattr(limits, "CLIENT_BATCH_BYTES", 2000)
    client.submit_many(job for _ in range(10))
    assert all(len(asked.body) < 2500 for asked in server.sent("/v1/jobs/batch")[3:])
    assert len(server.jobs) == 35


def test_a_batch_that_fails_half_way_says_what_was_taken(
    server: StandIn, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BATCH_JOBS_MAX", 2)
    job = api.JobRequest(payload=api.SnippetRequest("result = 1"))
    answers = iter([None, refusal("conflict", "quota")])
    whole = server.answer

    def answer(asked: Any) -> Any:
        planted = next(answers)
        return planted or whole(asked)

    monkeypatch.setattr(server, "answer", answer)
    with pytest.raises(ApiError, match="quota") as caught:
        client.submit_many([job] * 4)
    assert caught.value.__notes__ == ["the 2 jobs before were taken in"]


def test_jobs_are_listed_over_all_pages(server: StandIn, client: Any) -> None:
    server.pages[""] = api.JobPage((view("j9"), view("j8")), "j8")
    server.pages["j8"] = api.JobPage((), "j5")  # a filter that matched nothing on this page
    server.pages["j5"] = api.JobPage((view("j1"),))
    found = client.jobs(state="queued,running", since=5.5, tag="a b")
    assert [job.id for job in found] == ["j9", "j8", "j1"]
    assert server.asked[0].query == {"state": "queued,running", "since": "5.5", "tag": "a b"}
    assert server.asked[2].query["cursor"] == "j5"


def test_handles_cancel_and_go_on(server: StandIn, client: Any) -> None:
    job = client.job("j1")
    assert job.cancel().answer == "cancelling"
    assert job.resume(on=["v4-8"]).id == "j1x"
    assert job.rerun().id == "j1x"
    first, second = (msgspec.json.decode(asked.body) for asked in server.asked[1:])
    assert first["on"] == ["v4-8"]
    assert first["idempotency_key"] != second["idempotency_key"]


def test_run_freezes_and_sends_a_directory(server: StandIn, client: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print(1)\n")
    whole = server._do

    def do(asked: Any) -> Any:
        if asked.path == "/v1/blobs/missing":
            hashes = msgspec.json.decode(asked.body, type=api.MissingRequest).blobs
            return Answer(body=msgspec.json.encode(api.MissingReply(hashes)))
        return whole(asked)

    monkeypatch.setattr(server, "_do", do)
    job = client.run(project, ["python", "train.py"], on="v5e-8", setup="pip install x", name="mlp")
    assert job.id == "j0"
    (request,) = requests(server)
    assert isinstance(request.payload, api.CommandRequest)
    assert request.payload.argv == ("python", "train.py")
    assert request.payload.setup == "pip install x"
    assert [asked.path for asked in server.asked if "/snapshots/" in asked.path] == [
        f"/v1/snapshots/{request.payload.snapshot}"
    ]
    assert client.run(None, ["true"]).id == "j1"
    assert requests(server)[1].payload == api.CommandRequest(("true",))


def test_arrays_of_a_result_are_fetched(server: StandIn, make: Make) -> None:
    buffer = io.BytesIO()
    numpy.save(buffer, numpy.arange(6).reshape(2, 3))
    server.artifacts["result.npy"] = buffer.getvalue()
    reference = {"artifact": "result.npy", "key": None, "shape": [2, 3], "dtype": "int64"}
    server.end("j0", result={"a": {"$array": reference}, "b": [{"$array": reference}]})
    value = make(server).exec("result = 1")
    assert value["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert value["b"][0].sum() == 15
    assert len(server.sent("/v1/jobs/j0/artifacts/result.npy")) == 1
