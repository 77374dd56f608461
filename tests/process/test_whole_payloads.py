"""Hostile snippets through the whole path, from the client to the agent and back; after each, ordinary ones are exact.

`test_hostile_snippets` attacks the walls themselves; here the question is what users see: the right cause, and that
nobody else's snippet is hurt. All share one slice, so that what one breaks the next would feel.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from penstock.capacity import processes
from penstock.capacity.slice_files import SliceFiles
from penstock.client import Client
from penstock.domain import limits
from penstock.wire.api import JobRequest, SnippetRequest
from tests.process.shop import RUN_S, Shop, soon

pytestmark = pytest.mark.slow
#: Usual snippets after each hostile one: a few in every run, all that issue 3 asks for in the long one.
ORDINARY = [20, pytest.param(200, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("payloads") / "home")
    shop.environment["PENSTOCK_LOCAL_SLICES"] = "1"
    try:
        shop.open()
        yield shop
    finally:
        shop.end()


def submit(client: Client, code: str, **given: Any) -> str:
    variables, isolation = given.pop("variables", {}), given.pop("isolation", "fork")
    payload = SnippetRequest(code, variables=variables, isolation=isolation)
    return client.submit(JobRequest(payload=payload, on=("v5e-1",), **given)).id


def check_ordinary(client: Client, count: int) -> None:
    """Five kinds of usual snippets, forked and inline, each with its own numbers; all must come out exact."""
    jobs = []
    for n in range(count):
        code = (
            "result = {'n': n, 'sum': sum(range(n))}",
            "print('out', n)\nlogger.info('log %d', n)\nresult = [n] * 3",
            "result = float(jnp.arange(n + 1.0).sum())",
            "raise ValueError(f'number {n}')",
            "import sys\nsys.stderr.write(f'err {n}')\nresult = None",
        )[n % 5]
        jobs.append(submit(client, code, variables={"n": n}, isolation="inline" if n % 3 == 0 else "fork"))
    for n, id in enumerate(jobs):
        outcome = client.wait(id, RUN_S)
        wanted: tuple[object, ...] = (
            ("succeeded", {"n": n, "sum": sum(range(n))}),
            ("succeeded", [n] * 3),
            ("succeeded", n * (n + 1) / 2),
            ("failed", None),
            ("succeeded", None),
        )[n % 5]
        assert (outcome.state, outcome.result) == wanted, (n, outcome)
        assert outcome.attempts == 1
        if n % 5 == 3:
            assert outcome.error is not None
            assert (outcome.error.type, outcome.error.message) == ("ValueError", f"number {n}")
        streams = {(chunk.stream, chunk.text) for chunk in client.logs(id)}
        if n % 5 == 1:
            assert ("out", f"out {n}\n") in streams
            assert any(stream == "log" and text.endswith(f"log {n}\n") for stream, text in streams)
        elif n % 5 == 4:
            assert streams == {("err", f"err {n}")}


HOG = "kept = []\nwhile True: kept.append(bytearray(16 << 20))"
FLOOD = "import sys\nfor n in range(20): sys.stdout.write('x' * ((1 << 20) - 1) + '\\n')\nresult = 'done'"
CLOSED = "import os, sys\nprint('before', flush=True)\nsys.stdout.close()\nos.close(1)\nos.close(2)\nresult = 'done'"
#: Small processes, so that the limit of tasks is met before that of memory.
FORKS = "import os\nfor _ in range(10_000): os.posix_spawn('/bin/sleep', ['sleep', '60'], {})"
LOOP = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\nwhile True: pass"


@pytest.mark.parametrize(
    ("code", "given", "cause", "exit_code"),
    [
        ("import sys; sys.exit(3)", {}, "user_error", 3),
        ("import os; os._exit(4)", {}, "user_error", 4),
        ("import ctypes; ctypes.string_at(0)", {}, "user_error", 139),
        (HOG, {"memory_bytes": 512 << 20}, "oom", 137),
        (FLOOD, {}, "succeeded", 0),
        (LOOP, {"timeout_s": 2.0}, "timeout", None),
        (CLOSED, {}, "succeeded", 0),
        (FORKS, {}, "user_error", 1),
    ],
    ids=["sys.exit", "os._exit", "segfault", "hog", "flood", "loop", "closed stdout", "forks"],
)
@pytest.mark.parametrize("ordinary", ORDINARY)
def test_it_ends_as_its_cause_and_hurts_nobody(
    shop: Shop, code: str, given: dict[str, Any], cause: str, exit_code: int | None, ordinary: int
) -> None:
    with shop.client() as client:
        id = submit(client, code, **given)
        outcome = client.wait(id, RUN_S)
        assert (outcome.cause, outcome.attempts) == (cause, 1), outcome
        if exit_code is not None:
            assert (outcome.exit_code or 0) == exit_code
        if cause == "succeeded":
            assert outcome.result == "done"
            assert shop.log(id) == (b"before\n" if code == CLOSED else (b"x" * ((1 << 20) - 1) + b"\n") * 20)
        if code == FORKS:
            assert outcome.error is not None
            assert outcome.error.type == "BlockingIOError"
        check_ordinary(client, ordinary)


@pytest.mark.parametrize("ordinary", ORDINARY)
def test_a_daemonised_child_ends_with_its_snippet(shop: Shop, ordinary: int) -> None:
    mark = f"daemon-{secrets.token_hex(6)}"
    code = (
        "import os, sys\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"    if os.fork() == 0: os.execvp('python3', ['python3', '-c', 'import time; time.sleep(600)', {mark!r}])\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "result = 'left one behind'"
    )
    with shop.client() as client:
        outcome = client.wait(submit(client, code), RUN_S)
        ended = time.monotonic()
        assert (outcome.state, outcome.result) == ("succeeded", "left one behind")
        while processes.with_arguments(mark):
            assert time.monotonic() - ended < 6 * limits.KILL_S  # they sleep for ten minutes
            time.sleep(0.05)
        check_ordinary(client, ordinary)


def test_a_daemonised_child_of_an_inline_snippet_ends_with_it_and_the_interpreter_goes_on(shop: Shop) -> None:
    mark = f"daemon-{secrets.token_hex(6)}"
    code = (
        "import os, subprocess, sys\n"
        f"argv = [sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}]\n"
        "child = subprocess.Popen(argv, start_new_session=True)\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: os.execv(argv[0], argv)\n    os._exit(0)\n"
        "result = os.getpid()"
    )
    with shop.client() as client:
        first = client.exec(code, on="v5e-1", isolation="inline", wait_s=RUN_S)
        ended = time.monotonic()
        while processes.with_arguments(mark):
            assert time.monotonic() - ended < 6 * limits.KILL_S  # they sleep for ten minutes
            time.sleep(0.05)
        again = "import os, subprocess\nresult = [os.getpid(), subprocess.run(['true']).returncode]"
        assert client.exec(again, on="v5e-1", isolation="inline", wait_s=RUN_S) == [first, 0]


#: The secret in everything a job may say; `%s` is how it gets its name.
TELLS = """
import json, os, urllib.parse
key = os.environ["TOLD"]
out = os.environ["PENSTOCK_OUTPUT_DIR"]
open(f"{out}/model-{key}.txt", "w").write("my own data")
said = {"done": 1.0, "total": 2.0, "metrics": {f"loss {key}": 0.5}}
with open(os.environ["PENSTOCK_PROGRESS_FILE"] + ".new", "w") as file: json.dump(said, file)
os.replace(os.environ["PENSTOCK_PROGRESS_FILE"] + ".new", os.environ["PENSTOCK_PROGRESS_FILE"])
print("https://user:" + urllib.parse.quote(key, safe="") + "@host/", json.dumps(key), repr(key), key)
result = {"key": key, key: [f"is {key}", {"deep": (key, 1)}], "quoted": json.dumps({"k": key})}
"""
LEAVES_JSON = "\njson.dump(result, open(f'{out}/result.json', 'w'))"
MASKED = {"key": "***", "***": ["is ***", {"deep": ["***", 1]}], "quoted": '{"k": "***"}'}


def test_a_secret_leaves_in_no_result_name_metric_or_address(shop: Shop) -> None:
    """Files are the job's own data; all that is said about them, and all that is said at all, is cleaned."""
    key = f'told-{secrets.token_hex(8)} "\\+\u00e9'
    assert shop.command("secret", "set", "TOLD", stdin=key.encode()).returncode == 0
    command = shop.submit(TELLS + LEAVES_JSON, secrets=["TOLD"])
    with shop.client() as client:
        snippet = submit(client, TELLS, secrets=("TOLD",))
        as_repr = submit(client, "import os\nclass A:\n  def __repr__(self): return os.environ['TOLD']\nresult = A()",
                         secrets=("TOLD",))  # fmt: skip
        said = ""
        for id, result in ((command, MASKED), (snippet, MASKED), (as_repr, "***")):
            outcome = client.wait(id, RUN_S)
            assert (outcome.state, outcome.result) == ("succeeded", result), outcome
            said += f"{outcome} {shop.everything(id)!r} {client.get(id)} {list(client.events(id))}"
            names = [each.name for each in client.artifacts(id)]
            assert names == ([] if id == as_repr else ["model-***.txt"])
            said += str(names)
        assert client.artifact(snippet, "model-***.txt") == b"my own data"
    assert "loss ***" in said
    assert "https://user:***@host/" in said
    mark = key[:21].encode()  # what every form of it has in common
    assert mark.decode() not in said
    soon(lambda: not list(shop.home.slices.glob("*/host-*/attempts/*")))  # their own directories go when all is sent
    where = [path for path in shop.home.path.rglob("*") if path.is_file() and mark in _unpacked(path)]
    assert [path.relative_to(shop.home.path).as_posix() for path in where] == ["secrets/default/TOLD"]
    assert not [
        path for path in shop.home.path.rglob("*") if mark.decode() in path.name and "attempts" not in path.parts
    ]


def test_an_agent_that_took_a_job_over_hides_its_secrets_too(shop: Shop) -> None:
    key = f"told-{secrets.token_hex(12)}"
    assert shop.command("secret", "set", "OVER", stdin=key.encode()).returncode == 0
    leave = "json.dump(os.environ['OVER'], open(os.environ['PENSTOCK_OUTPUT_DIR'] + '/result.json', 'w'))"
    job = shop.submit(f"say('up')\ngate('go')\nimport json\n{leave}", secrets=["OVER"])
    shop.says(job, b"up")
    files = SliceFiles(shop.home.slices)
    (agent,) = files.agents(shop.view(job)["slice"])
    processes.send(agent.process, signal.SIGKILL)
    shop.open_gate(job, "go")
    assert shop.ended(job)["state"] == "succeeded"
    assert shop.result(job)["result"] == "***"


def _unpacked(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError:
        return b""  # cleared away meanwhile
    return data + zstd.decompress(data) if path.suffix == ".zst" else data


def test_each_snippet_has_the_limit_of_memory_it_was_given(shop: Shop) -> None:
    """Also where control groups serve again: up, down, and after a kill."""
    for most, code in (("300M", 0), ("900M", 0), ("300M", 137), ("900M", 0)):
        wanted = 200 if most == "300M" and code == 0 else 700
        done = shop.command("exec", "--memory", most, "-c", f"result = len(bytearray({wanted} << 20))")
        assert done.returncode == code, (most, wanted, done.stderr)
