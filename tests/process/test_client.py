"""Both clients against a real server in a process of its own: every call of the API, as the SDK sends it."""

import asyncio
import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.client.client import Client
from penstock.client.errors import ApiError, JobFailed
from penstock.wire.api import JobRequest, PoolRequest, QueueRequest, SnippetRequest
from tests.process.api_server import STRANGER, TOKEN
from tests.unit.client.both import blocking

JOB = JobRequest(payload=SnippetRequest("result = 1"), name="first", tags=("t1",))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("server")
    command = [sys.executable, "-m", "tests.process.api_server", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()
        process.wait(30)


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, url: str) -> Iterator[Any]:
    if request.param == "sync":
        with Client(url, TOKEN) as sync:
            yield sync
        return
    with asyncio.Runner() as runner:
        twin = blocking(runner, url, TOKEN)
        yield twin
        twin.close()


def test_a_job_is_submitted_seen_changed_and_cancelled(client: Any) -> None:
    accepted = client.submit(JOB)
    view = client.get(accepted.id[:-1] + accepted.id[-1])
    assert (view.id, view.name, view.tags, view.state) == (accepted.id, "first", ("t1",), view.state)
    assert client.edit(accepted.id, priority=7, tags=["t2"]).priority == 7
    assert [job.id for job in client.jobs(tag="t2", state="queued,provisioning,running")] == [accepted.id]
    assert client.page(limit=1).jobs[0].id == accepted.id
    assert client.outcome(accepted.id).id == accepted.id
    assert client.artifacts(accepted.id) == ()
    assert list(client.logs(accepted.id)) == []
    assert client.log_bytes(accepted.id, stream="out") == b""
    assert client.cancel(accepted.id).answer in ("cancelled", "cancelling")
    assert client.wait(accepted.id, 60).state == "cancelled"
    kinds = [event.kind for event in client.events(accepted.id)]
    assert kinds[0] == "job.created"
    assert kinds[-1] == "job.cancelled"
    assert [event.kind for event in client.events(accepted.id, follow=True)] == kinds
    assert list(client.logs(accepted.id, follow=True)) == []
    assert client.why(accepted.id).state == "cancelled"
    again = client.job(accepted.id).rerun()
    assert again.view().state != "cancelled"
    again.cancel()
    with pytest.raises(JobFailed, match=f"job {again.id} cancelled"):
        again.result(60)


def test_keys_mean_the_same_job_and_batches_are_whole(client: Any) -> None:
    stem = hashlib.sha256(repr(client).encode()).hexdigest()[:8]
    keyed = JobRequest(payload=SnippetRequest("result = 2"), idempotency_key=f"{stem}-key")
    first, second = client.submit(keyed), client.submit(keyed)
    assert (first.id, first.created, second.created) == (second.id, True, False)
    other = JobRequest(payload=SnippetRequest("result = 3"), idempotency_key=f"{stem}-key")
    with pytest.raises(ApiError) as caught:
        client.submit(other)
    assert (caught.value.code, caught.value.exit_code) == ("conflict", 6)
    accepted = client.submit_many([JOB] * 20)
    assert len({one.id for one in accepted}) == 20
    bad = JobRequest(payload=SnippetRequest("result = 1"), priority=5000)
    with pytest.raises(ApiError, match="priority"):
        client.submit_many([JOB, bad])
    for one in (first, *accepted):
        client.cancel(one.id)


def test_events_of_all_are_followed_from_now_on(client: Any, url: str) -> None:
    """The stream begins when it is asked for: events come only after that, so another keeps submitting."""
    over = threading.Event()

    def submit() -> None:
        with Client(url, TOKEN) as other:
            while not over.wait(0.05):
                other.cancel(other.submit(JOB).id)

    thread = threading.Thread(target=submit)
    thread.start()
    try:
        live = client.events(follow=True)
        found = [next(live).seq for _ in range(5)]
        live.close()
    finally:
        over.set()
        thread.join()
    assert found == sorted(set(found))


def test_refusals_of_a_real_server(client: Any, url: str) -> None:
    with pytest.raises(ApiError) as caught:
        client.get("j0000000000000000")
    assert (caught.value.code, caught.value.exit_code) == ("not_found", 5)
    with Client(url, "nobody's") as nobody, pytest.raises(ApiError) as caught:
        nobody.server()
    assert caught.value.code == "unauthenticated"
    mine = client.submit(JOB).id
    with Client(url, STRANGER) as stranger, pytest.raises(ApiError) as caught:
        stranger.get(mine)
    assert caught.value.code == "not_found"
    client.cancel(mine)
    with pytest.raises(ApiError, match="sha256"):
        client.put_blob("0" * 64, b"something else")


def test_capacity_secrets_and_the_server_itself(client: Any) -> None:
    assert client.put_pool("p1", PoolRequest(accelerator="v5e-8", max=2)).max == 2
    assert client.pool("p1").name == "p1"
    assert "p1" in [pool.name for pool in client.pools()]
    client.delete_pool("p1")
    assert client.put_queue("lab", QueueRequest(weight=2.0)).weight == 2.0
    assert client.queue("lab").weight == 2.0
    assert "lab" in [queue.name for queue in client.queues()]
    assert isinstance(client.slices(), tuple)
    client.set_secret("KEY", "value")
    assert "KEY" in client.secrets()
    client.delete_secret("KEY")
    assert "KEY" not in client.secrets()
    assert client.maintenance(True).on is True
    assert client.maintenance(False).on is False
    said = client.server()
    assert (said.principal, said.team, said.role) == ("olga", "lab", "operator")


def test_a_directory_is_sent_once(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    project = tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    (project / "train.py").write_text("print(1)\n")
    (project / "sub" / "data.bin").write_bytes(bytes(range(256)) * 1000)
    job = client.run(project, ["python", "train.py"], on="v5e-1")
    view = job.view()
    assert (view.kind, view.command) == ("command", "python train.py")
    assert client.upload(project) == view.snapshot
    job.cancel()
