"""Lives of real jobs on the embedded server: gangs, preemptions, kill -9 of everything, stops, retried submits.

Real server, agents and payloads, as processes; what is asserted is what a user sees. Times are bounds that a busy
machine keeps too; nothing waits for a time to pass.
"""

from __future__ import annotations

import json
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from typing_extensions import override

from penstock.capacity import processes
from penstock.capacity.slice_files import SliceFiles
from penstock.client import Client
from penstock.domain import limits
from penstock.wire.api import CommandRequest, JobRequest
from tests.process.shop import ENDED, RUN_S, Shop, soon
from tests.tidy.tracked import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("life") / "home")
    try:
        shop.open()
        yield shop
    finally:
        shop.end()


# --- gangs ---
WORLD = """
import json, jax, numpy as np
from penstock import payload
assert payload.distributed()
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = jax.device_count()
mesh = Mesh(np.array(jax.devices()), ("d",))
own = jax.make_array_from_callback(
    (devices,), NamedSharding(mesh, P("d")), lambda i: np.arange(1, devices + 1, dtype=np.float32)[i])
total = jax.jit(lambda a: (a * a).sum(), out_shardings=NamedSharding(mesh, P()))(own)
total = float(total.addressable_data(0))
say("world", payload.rank(), jax.process_index(), jax.process_count(), jax.local_device_count(), total)
"""


def test_four_hosts_are_one_jax_world(shop: Shop) -> None:
    leave = "if payload.rank() == 0: json.dump(total, open(payload.output_dir() + '/result.json', 'w'))"
    job = shop.submit(WORLD + leave, on="v5e-16")
    view = shop.ended(job)
    assert (view["state"], view["attempts"][0]["hosts"]) == ("succeeded", 4), view
    squares = sum(number**2 for number in range(1, 17))
    for host in range(4):
        assert f"world {host} {host} 4 4 {float(squares)}\n".encode() in shop.log(job, host=host)
    assert shop.result(job)["result"] == squares


@pytest.mark.parametrize(
    ("death", "cause", "code"),
    [
        ("raise RuntimeError('the data of rank 2 is broken')", "user_error", 1),
        ("os._exit(7)", "user_error", 7),
        ("os.kill(os.getpid(), 11)", "user_error", 139),
    ],
)
def test_when_one_of_a_gang_dies_all_are_stopped_and_its_death_is_the_cause(
    shop: Shop, death: str, cause: str, code: int
) -> None:
    """One waits in a collective, two are busy and do not hear SIGTERM: JAX keeps it for itself."""
    mark = f"gang-{secrets.token_hex(6)}"
    hang = (
        "if payload.rank() % 2: time.sleep(600)\n"
        "from jax.experimental import multihost_utils; multihost_utils.sync_global_devices('never')"
    )
    job = shop.submit(f"{WORLD}\nif payload.rank() == 2:\n    gate('die')\n    {death}\n{hang}", mark, on="v5e-16")
    shop.says(job, b"world", hosts=4)
    assert len(shop.payloads(mark)) == 4
    began = time.monotonic()
    shop.open_gate(job, "die")
    view = shop.ended(job)
    took_s = time.monotonic() - began
    assert not shop.payloads(mark)
    assert took_s < limits.GRACE_S * 0.8, f"the others lived on for {took_s:.1f} s"
    assert (view["state"], view["cause"], view["exit_code"], len(view["attempts"])) == ("failed", cause, code, 1)
    if cause == "user_error" and code == 1:
        assert "the data of rank 2 is broken" in view["error"]["message"] + view["error"]["traceback"]


# --- preemption ---
def weights(shop: Shop, job: str) -> tuple[str, int]:
    with shop.client() as client:
        metrics = json.loads(client.artifact(job, "metrics.json"))
        assert client.artifact(job, "weights.sha256").decode().strip() == metrics["weights_sha256"]
    return metrics["weights_sha256"], metrics["stage"]


@pytest.mark.long
def test_training_that_lost_two_slices_ends_with_the_weights_of_a_quiet_run(shop: Shop) -> None:
    steps = ("num_epochs=2", "steps_per_epoch=40", "checkpoint_per_epoch=4")
    words = [
        "run",
        "--detach",
        "--on",
        "v5e-1",
        "--dir",
        str(ROOT / "examples" / "train_mlp"),
        "--",
        "python",
        "train.py",
    ]
    words += [f"--config.training.{each}" for each in steps]
    quiet, disturbed = (shop.command(*words, *more).stdout.decode().strip() for more in ((), ("--pause=0.3",)))
    slices = []
    for attempt, notice in enumerate(((), ("--notice", "20s")), 1):
        # A step is counted once it is made, and a checkpoint comes every ten.
        soon(lambda attempt=attempt: reached(shop, disturbed, attempt) >= 15 + 30 * (attempt - 1))  # type: ignore[misc]
        slices.append(shop.view(disturbed)["slice"])
        assert shop.command("local", "preempt", slices[-1], *notice).returncode == 0
    view = shop.ended(disturbed)
    assert view["state"] == "succeeded", view
    assert [each["cause"] for each in view["attempts"]] == ["preempted", "preempted", "succeeded"]
    assert len({*slices, view["slice"]}) == 3, "each went on elsewhere"
    assert b"resumed at step " in shop.log(disturbed)
    assert shop.ended(quiet)["state"] == "succeeded"
    assert weights(shop, disturbed) == (weights(shop, quiet)[0], 2)


def reached(shop: Shop, job: str, attempt: int) -> float:
    """The step that this attempt has counted last."""
    view = shop.view(job)
    assert view["state"] not in ENDED, view
    if len(view["attempts"]) != attempt or view["state"] != "running" or view.get("progress") is None:
        return 0
    return float(view["progress"]["done"]) if view["progress"]["at"] > view["attempts"][-1]["started_at"] else 0


# --- kill -9 ---
COUNTED = """
for number in range(400):
    say("line", number, "x" * 200)
    if number % 100 == 99: gate(f"after-{number}")
import json
json.dump({"lines": 400}, open(os.environ["PENSTOCK_OUTPUT_DIR"] + "/result.json", "w"))
"""


def test_server_and_agent_killed_while_a_job_runs_change_nothing_of_it(shop: Shop) -> None:
    mark = f"counted-{secrets.token_hex(6)}"
    job = shop.submit(COUNTED, mark)
    shop.says(job, b"line 99 ")
    before = shop.payloads(mark)
    assert len(before) == 1
    files = SliceFiles(shop.home.slices)
    place = shop.view(job)["slice"]
    (agent,) = files.agents(place)

    shop.kill_server()  # it writes while nobody listens
    shop.open_gate(job, "after-99")
    shop.open()
    shop.says(job, b"line 199 ")

    processes.send(agent.process, signal.SIGKILL)  # and while no agent does
    shop.open_gate(job, "after-199")
    soon(lambda: [new for new in files.agents(place) if new.process.alive and new.process != agent.process])
    shop.says(job, b"line 299 ")

    (agent,) = files.agents(place)
    shop.kill_server()
    processes.send(agent.process, signal.SIGKILL)
    shop.open_gate(job, "after-299")
    shop.open()
    shop.says(job, b"line 399 ")
    assert shop.payloads(mark) == before, "the same process"
    shop.open_gate(job, "after-399")
    view = shop.ended(job)
    assert (view["state"], len(view["attempts"]), view["stage"]) == ("succeeded", 1, 0), view
    assert shop.log(job) == b"".join(b"line %d %s\n" % (number, b"x" * 200) for number in range(400))
    assert shop.result(job)["result"] == {"lines": 400}


@pytest.mark.parametrize(("rule", "state", "attempts"), [("pass", "failed", 1), ("pre", "succeeded", 2)])
def test_after_kill_9_of_a_payload_its_policy_decides(shop: Shop, rule: str, state: str, attempts: int) -> None:
    mark = f"killed-{secrets.token_hex(6)}"
    job = shop.submit("say('up')\nif os.environ['PENSTOCK_FENCE'] == '1': gate('never')", mark, rule=rule)
    shop.says(job, b"up")
    for payload in shop.payloads(mark):
        processes.send(payload, signal.SIGKILL)
    view = shop.ended(job)
    assert (view["state"], len(view["attempts"])) == (state, attempts), view
    assert (view["attempts"][0]["exit_code"], view["attempts"][0]["cause"]) == (137, "infra")
    assert shop.log(job) == b"up\n" * attempts


# --- stops ---
#: A child in its own session, whose parent is gone, and which does not hear SIGTERM.
DAEMON = """
import signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("daemon")
        time.sleep(600)
    os._exit(0)
os.wait()
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
SLEEP = "say('main')\ntime.sleep(600)\n"


@pytest.mark.long
def test_cancel_and_timeout_end_the_whole_tree(shop: Shop) -> None:
    """Four at once, so that the grace of those that do not hear is waited for only once."""
    marks = {each: f"{each}-{secrets.token_hex(6)}" for each in ("cancel", "timeout", "deaf-cancel", "deaf-timeout")}
    jobs = {
        each: shop.submit(
            DAEMON + (DEAF if "deaf" in each else "") + SLEEP, mark, timeout_s=8.0 if "timeout" in each else None
        )
        for each, mark in marks.items()
    }
    cancelled_at = {}
    for each, job in jobs.items():
        if "cancel" in each:
            shop.says(job, b"main")
            shop.says(job, b"daemon")
            assert len(shop.payloads(marks[each])) == 2
            assert shop.command("cancel", job).returncode == 0
            cancelled_at[each] = time.time()  # noqa: TID251 (compared with the server's stamps)
    for each, mark in marks.items():
        view = shop.ended(jobs[each])
        assert not shop.payloads(mark)
        wanted = ("cancelled", "cancelled") if "cancel" in each else ("failed", "timeout")
        assert (view["state"], view["cause"]) == wanted
        grace_s = limits.GRACE_S if "deaf" in each else 0.0
        ran_s = view["finished_at"] - view["started_at"]
        if "cancel" in each:
            assert view["finished_at"] - cancelled_at[each] < grace_s + 20.0, f"{each} took too long"
        else:
            # That it runs is told a moment after it began.
            assert view["finished_at"] - view["created_at"] >= 8.0
            assert ran_s < 8.0 + grace_s + 20.0, f"{each} ran {ran_s:.1f} s"


# --- submits ---
class Cut(threading.Thread):
    """Passes one request on to the server; when the answer has come it does not give it back but kills the server."""

    def __init__(self, shop: Shop) -> None:
        super().__init__(daemon=True)
        self._shop = shop
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.answer = b""

    @override
    def run(self) -> None:
        address = urlsplit(self._shop.server.url)
        first = True
        with closing(self._listener):
            while True:
                client, _ = self._listener.accept()
                with closing(client), suppress(OSError):
                    upstream = socket.create_connection((address.hostname, address.port), timeout=RUN_S)
                    with closing(upstream):
                        upstream.sendall(receive(client))
                        answer = receive(upstream)
                        if not first:
                            client.sendall(answer)
                            return
                        self.answer, first = answer, False
                        self._shop.kill_server()


def receive(sock: socket.socket) -> bytes:
    """One whole message of HTTP with a length."""
    sock.settimeout(RUN_S)
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        if not piece:
            raise ConnectionResetError
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += sock.recv(65536)
    return head + b"\r\n\r\n" + body


def test_a_submit_whose_answer_was_lost_makes_one_job(shop: Shop) -> None:
    cut = Cut(shop)
    cut.start()
    name = f"once-{secrets.token_hex(6)}"
    accepted: list[Any] = []

    def submit() -> None:
        with Client(cut.url, (shop.home.path / "token").read_text().strip()) as client:
            accepted.append(client.submit(JobRequest(payload=CommandRequest(("true",)), on=("v5e-1",), name=name)))

    first = shop.server.process
    caller = threading.Thread(target=submit, daemon=True)
    caller.start()
    soon(lambda: not first.alive)
    shop.open()
    caller.join(RUN_S)
    cut.join(RUN_S)
    lost = json.loads(cut.answer.partition(b"\r\n\r\n")[2])
    assert cut.answer.startswith(b"HTTP/1.1 201 ")
    assert lost["created"]
    assert [(one.id, one.created) for one in accepted] == [(lost["id"], False)]
    with shop.client() as client:
        assert [job.id for job in client.jobs() if job.name == name] == [lost["id"]]
    assert shop.ended(lost["id"])["state"] == "succeeded"
