"""Hostile snippets through the whole path, from the client to the agent and back; after each, ordinary ones are exact.

`test_hostile_snippets` attacks the walls themselves; here the question is what users see: the right cause, and that
nobody else's snippet is hurt. All share one slice, so that what one breaks the next would feel.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.capacity import processes
from penstock.client import Client
from penstock.domain import limits
from penstock.wire.api import JobRequest, SnippetRequest
from tests.process.shop import RUN_S, Shop

pytestmark = pytest.mark.slow
ORDINARY = 20  #: after each hostile one


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("payloads") / "home")
    try:
        shop.open()
        yield shop
    finally:
        shop.end()


def submit(client: Client, code: str, **given: Any) -> str:
    variables = given.pop("variables", {})
    request = JobRequest(payload=SnippetRequest(code, variables=variables), on=("v5e-1",), **given)
    return client.submit(request).id


def check_ordinary(client: Client) -> None:
    """Five kinds of usual snippets, each with its own numbers; all must come out exact."""
    jobs = []
    for n in range(ORDINARY):
        code = (
            "result = {'n': n, 'sum': sum(range(n))}",
            "print('out', n)\nlogger.info('log %d', n)\nresult = [n] * 3",
            "result = float(jnp.arange(n + 1.0).sum())",
            "raise ValueError(f'number {n}')",
            "import sys\nsys.stderr.write(f'err {n}')\nresult = None",
        )[n % 5]
        jobs.append(submit(client, code, variables={"n": n}))
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
    ],
    ids=["sys.exit", "os._exit", "segfault", "hog", "flood", "loop"],
)
def test_it_ends_as_its_cause_and_hurts_nobody(
    shop: Shop, code: str, given: dict[str, Any], cause: str, exit_code: int | None
) -> None:
    with shop.client() as client:
        id = submit(client, code, **given)
        outcome = client.wait(id, RUN_S)
        assert (outcome.cause, outcome.attempts) == (cause, 1), outcome
        if exit_code is not None:
            assert (outcome.exit_code or 0) == exit_code
        if cause == "succeeded":
            assert outcome.result == "done"
            assert shop.log(id) == (b"x" * ((1 << 20) - 1) + b"\n") * 20
        check_ordinary(client)


def test_a_daemonised_child_ends_with_its_snippet(shop: Shop) -> None:
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
            assert time.monotonic() - ended < limits.KILL_S
            time.sleep(0.05)
        check_ordinary(client)
