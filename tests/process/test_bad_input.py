"""The lists of bad input, item by item, against a real server and the real command: refused in one line, or only text.

| list | here | besides |
|---|---|---|
| I1, bodies | `BODIES` on every route that takes JSON; a gigabyte; slow ones | unit/server/test_app; schemathesis |
| I2, names | `NAMES` in every `PLACES` of the API, and as words of commands | unit/server/test_jobs, contract/objects |
| I3, archives | none: servers never unpack, hosts only our manifests | unit/objects/test_archive: `HOSTILE`, bombs |
| I4, what runs when read | `SERIAL` as files of a job; words that hold patterns up | unit/client/test_results |
| I6, commands | `files` as snippets, odd surroundings, Ctrl-C, lost readers | unit/cli, process/test_terminal |
"""

from __future__ import annotations

import gzip
import http.client
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote, urlsplit

import msgspec
import pytest
from typing_extensions import override

from penstock.domain.nouns import Role
from penstock.server.app import all_routes
from tests.process.machine import until
from tests.process.shop import RUN_S, TPU, Shop

pytestmark = pytest.mark.slow
MB = 1 << 20


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("bad") / "home")
    try:
        shop.open()
        yield shop
    finally:
        shop.end()


@pytest.fixture(scope="module")
def job(shop: Shop) -> str:
    """A job that ended, for names and questions about it."""
    code = (
        "import os, pickle\n"
        "class Evil:\n"
        "  def __reduce__(self): return (os.system, ('touch /tmp/penstock-was-here',))\n"
        "out = os.environ['PENSTOCK_OUTPUT_DIR']\n"
        "pickle.dump(Evil(), open(out + '/evil.pkl', 'wb'))\n"
        "import numpy\n"
        "numpy.savez(out + '/evil.npz', a=numpy.array([Evil()], dtype=object))\n"
        "open(out + '/evil.yaml', 'w').write('!!python/object/apply:os.system [\"touch /tmp/penstock-was-here\"]')\n"
        "result = Evil()\n"
    )
    id = str(shop.call("POST", "/v1/jobs", {"payload": {"type": "snippet", "code": code}, "on": ["v5e-1"]})[1]["id"])
    assert shop.ended(id)["state"] == "succeeded"
    return id


def ask(
    shop: Shop, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    address = urlsplit(shop.server.url)
    token = (shop.home.path / "token").read_text().strip()
    sent = {"authorization": f"Bearer {token}", "content-type": "application/json", **(headers or {})}
    with closing(http.client.HTTPConnection(address.hostname or "", address.port, timeout=RUN_S)) as connection:
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        return answer.status, answer.read()


def memory(shop: Shop) -> int:
    status = Path(f"/proc/{shop.server.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def assert_one_line(said: bytes) -> None:
    if said == b"Invalid HTTP request received.":
        return  # a first line beyond what the HTTP parser takes never reaches us
    told = msgspec.json.decode(said)
    assert told["code"]
    assert told["detail"]
    assert "\n" not in told["detail"]
    assert len(told["detail"]) < 600, told["detail"]


# --- I1 ---
DEEP = 100_000
SNIPPET = b'{"payload": {"type": "snippet", "code": "pass"}, '
BODIES: dict[str, tuple[bytes, dict[str, str]]] = {
    "deep lists": (b"[" * DEEP + b"]" * DEEP, {}),
    "deep objects": (b'{"a":' * DEEP + b"1" + b"}" * DEEP, {}),
    "deep variables": (b'{"payload": {"type": "snippet", "code": "", "variables": {"a": ' + b"[" * DEEP, {}),
    "NaN": (b'{"timeout_s": NaN}', {}),
    "Infinity": (SNIPPET + b'"timeout_s": Infinity}', {}),
    "minus Infinity": (SNIPPET + b'"timeout_s": -1e999}', {}),
    "2^63": (SNIPPET + b'"priority": 9223372036854775808}', {}),
    "a number of 5000 digits": (SNIPPET + b'"priority": ' + b"9" * 5000 + b"}", {}),
    "negative": (SNIPPET + b'"slices": -1}', {}),
    "empty": (b"", {}),
    "no object": (b"null", {}),
    "wrong types": (SNIPPET + b'"tags": {"a": 1}}', {}),
    "unknown field": (SNIPPET + b'"priorty": 1}', {}),
    "broken UTF-8": (b'{"name": "\xff\xfe"}', {}),
    "lone surrogate": (SNIPPET + b'"name": "\\ud800"}', {}),
    "wrong content type": (SNIPPET + b'"name": "x"}', {"content-type": "text/plain"}),
    "bad gzip": (b"\x1f\x8b not gzip", {"content-encoding": "gzip"}),
    "a bomb in gzip": (gzip.compress(b" " * (8 * MB)), {"content-encoding": "gzip"}),
    "another alphabet": (SNIPPET.decode().encode("utf-16"), {"content-type": "application/json; charset=utf-16"}),
}  # fmt: skip
TAKING = [route for route in all_routes() if route.takes not in (None, bytes) and route.role not in (None, Role.AGENT)]


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_is_refused_in_one_line_by_every_route(shop: Shop, job: str, name: str) -> None:
    body, headers = BODIES[name]
    before = memory(shop)
    for route in TAKING:
        place = re.sub(r"\{\w+\}", job if "jobs" in route.path else "X", route.path)
        status, said = ask(shop, route.method, place, body, headers)
        # Where nothing need be said, nothing is a good body: rerun, resume, preempt, clean.
        fine = name == "empty" and route.body_optional and status < 300
        assert fine or 400 <= status < 500, (place, status, said[:300])
        if status >= 400:
            assert_one_line(said)
    assert memory(shop) - before < 64 * MB


def test_keys_that_are_there_twice_are_no_fault(shop: Shop) -> None:
    body = b'{"payload": {"type": "snippet", "code": "pass"}, "name": "one", "name": "two"}'
    status, said = ask(shop, "POST", "/v1/jobs", body)
    assert status == 201
    assert shop.view(msgspec.json.decode(said)["id"])["name"] in ("one", "two")


def test_a_gigabyte_is_refused_before_it_is_sent(shop: Shop) -> None:
    address = urlsplit(shop.server.url)
    token = (shop.home.path / "token").read_text().strip()
    before, sent = memory(shop), 0
    with closing(socket.create_connection((address.hostname, address.port), timeout=RUN_S)) as line:
        head = (
            f"POST /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-type: application/json\r\n"
            "transfer-encoding: chunked\r\n\r\n"
        )
        line.sendall(head.encode())
        piece = b"%x\r\n%s\r\n" % (MB, b" " * MB)
        with suppress(OSError):  # it hangs up
            for _ in range(1024):
                line.sendall(piece)
                sent += MB
    assert sent < 200 * MB, "it did not listen to the end"
    assert memory(shop) - before < 64 * MB
    assert ask(shop, "GET", "/v1/server")[0] == 200


def test_slow_bodies_keep_nobody_waiting(shop: Shop) -> None:
    address = urlsplit(shop.server.url)
    token = (shop.home.path / "token").read_text().strip()
    lines = [socket.create_connection((address.hostname, address.port), timeout=RUN_S) for _ in range(50)]
    try:
        for line in lines:
            line.sendall(f"POST /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n".encode())
            line.sendall(b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{")
        began = time.monotonic()
        assert ask(shop, "GET", "/v1/jobs")[0] == 200
        assert time.monotonic() - began < RUN_S / 2  # they are never sent to the end: who waits for them waits for ever
    finally:
        for line in lines:
            line.close()


# --- I2 ---
NAMES = {
    "dots": "..",
    "slash": "a/b/../c",
    "NUL": "a\0b",
    "newline": "a\nb",
    "right to left": "a\u202egpj.sh",
    "NFC": "caf\u00e9",
    "NFD": "cafe\u0301",
    "emoji": "🚀",
    "64 KiB": "n" * 65_536,
    "CON": "CON",
    "leading dash": "-rf",
    "shell": "$(touch /tmp/penstock-was-here)`id`;&|",
    "SQL": "'; drop table jobs; --",
    "empty": "",
    "spaces": "  ",
    "escape": "\x1b[2J",
    "percent": "%2e%2e%2f",
}
PLACES = ("name", "tags", "queue", "idempotency_key", "pools", "queues", "secrets", "artifact", "env", "zones", "on")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_refused_in_one_line_or_is_only_text(shop: Shop, job: str, name: str) -> None:
    value = NAMES[name]
    base = {"payload": {"type": "snippet", "code": "pass"}, "on": ["v5e-1"]}
    for place in PLACES:
        if place in ("pools", "queues", "secrets"):
            body = {"pools": {"accelerator": "v5e-8"}, "queues": {}, "secrets": {"value": "v"}}[place]
            status, said = ask(shop, "PUT", f"/v1/{place}/{quote(value, safe='')}", msgspec.json.encode(body))
            if status == 200:
                assert msgspec.json.decode(said)["name"] == value
                ask(shop, "DELETE", f"/v1/{place}/{quote(value, safe='')}")
        elif place == "artifact":
            status, said = ask(shop, "GET", f"/v1/jobs/{job}/artifacts/{quote(value, safe='')}")
        else:
            given = {"tags": [value], "env": {value: "x"}, "zones": [value], "on": [value]}.get(place, value)
            status, said = ask(shop, "POST", "/v1/jobs", msgspec.json.encode({**base, place: given}))
            if status == 201 and place == "name":
                assert shop.view(msgspec.json.decode(said)["id"])["name"] == value
        assert status < 500, (place, status, said[:300])
        if status >= 400:
            assert_one_line(said)
            assert not re.search("[\x00-\x1f\u202a-\u202e]", said.decode())
    assert not Path("/tmp/penstock-was-here").exists()


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"NUL"}))  # no process can be given a NUL
def test_a_name_as_a_word_of_a_command(shop: Shop, job: str, name: str) -> None:
    value = NAMES[name]
    for words in (("tag", job, "--", value), ("show", "--", value)):
        done = shop.command(*words, stdin=b"v\n")
        assert_brief(done)
    assert not Path("/tmp/penstock-was-here").exists()


def assert_brief(done: subprocess.CompletedProcess[bytes], codes: tuple[int, ...] = (0, 1, 2, 4, 5, 6)) -> None:
    """A documented exit code; when it refuses, a short reason that does nothing to a terminal."""
    said = done.stderr.decode("utf-8", "replace")
    assert done.returncode in codes, (done.args[-4:], done.returncode, said[:500])
    assert "Traceback" not in said
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e]", said), said[:300]
    if done.returncode in (2, 4, 5, 6):
        assert 0 < len(said.strip().splitlines()) <= 3, said[:1000]
        assert len(said) < 2000


# --- I4 ---
SERIAL = ("evil.pkl", "evil.npz", "evil.yaml")


def test_nothing_that_is_read_is_run(shop: Shop, job: str) -> None:
    with shop.client() as client:
        outcome = client.outcome(job)
        assert "Evil" in str(outcome.result), "what is no JSON is shown as text"
        for name in SERIAL:
            data = client.artifact(job, name)
            assert isinstance(data, bytes)
            assert data
    assert shop.command("result", job).returncode == 0
    assert not Path("/tmp/penstock-was-here").exists()


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (f"/v1/jobs?since={'9' * 500}", {}),
        (f"/v1/jobs?tag={'a' * 400}!", {}),
        (f"/v1/jobs/{'0' * 4000}", {}),
        ("/v1/events?after=" + "1" * 400, {}),
        ("/v1/jobs/{job}/logs", {"last-event-id": "a:" + "0o1," * 10_000 + "!"}),
        ("/v1/jobs/{job}/events", {"last-event-id": "9" * 5000}),
    ],
)
def test_words_made_to_hold_a_pattern_up(shop: Shop, job: str, path: str, headers: dict[str, str]) -> None:
    began = time.monotonic()
    status, said = ask(shop, "GET", path.replace("{job}", job), headers=headers)
    assert 400 <= status < 500, (status, said[:300])
    assert time.monotonic() - began < 10.0  # a pattern that goes back and forth over this needs more than that


# --- I6 ---
def files(folder: Path) -> dict[str, Path]:
    """What people give `tpu exec` by mistake."""
    names = ("missing.py", "binary.py", "folder.py", "loop.py", "large.ipynb", "text.txt")
    made = {name: folder / name for name in names}
    made["binary.py"].write_bytes(bytes(range(256)) * 100)
    made["folder.py"].mkdir()
    made["loop.py"].symlink_to("loop.py")
    with made["large.ipynb"].open("wb") as file:
        file.truncate(2 << 30)
    made["text.txt"].write_text("this: is not Python!\n")
    return made


@pytest.mark.parametrize("name", ["missing.py", "binary.py", "folder.py", "loop.py", "large.ipynb"])
def test_a_file_that_is_no_snippet(shop: Shop, tmp_path: Path, name: str) -> None:
    path = files(tmp_path)[name]
    began = time.monotonic()
    done = shop.command("exec", str(path))
    assert_brief(done, (2,))
    assert time.monotonic() - began < RUN_S / 2
    assert name in done.stderr.decode()
    done = shop.command("exec", "--batch", str(path))
    assert_brief(done, (2,))


def test_text_that_is_no_python_is_its_own_error(shop: Shop, tmp_path: Path) -> None:
    done = shop.command("exec", str(files(tmp_path)["text.txt"]))
    assert done.returncode == 1
    assert b"SyntaxError" in done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"HOME": None},
        {"HOME": "/nonexistent"},
        {"LC_ALL": "C", "LANG": "C"},
        {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0"},
        {"LC_ALL": "xx_YY.nonsense"},
        {"TERM": None, "COLUMNS": "0"},
        {"TERM": "nonsense", "COLUMNS": "-5", "LINES": "x"},
    ],
    ids=["no HOME", "HOME is nowhere", "C", "only ASCII", "no such locale", "no terminal", "a strange terminal"],
)
def test_odd_surroundings(shop: Shop, changes: dict[str, str | None]) -> None:
    environment = {name: value for name, value in shop.environment.items() if name not in changes}
    environment |= {name: value for name, value in changes.items() if value is not None}
    for words in (
        ("exec", "-c", "print('ünï ✓'); result = 1"),
        ("ps",),
        ("ps", "--json"),
        ("tldr",),
        ("run", "--help"),
    ):
        done = subprocess.run(
            [*TPU, *words], env=environment, cwd=shop.desk, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=RUN_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stderr)
        assert b"Traceback" not in done.stderr
        assert b"\x1b" not in done.stdout, "it is no terminal"


def test_a_working_directory_that_is_gone(shop: Shop, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
    words = ["sh", "-c", script, "sh", str(gone), *TPU]
    for more, codes in ((("ps",), (0,)), (("run", "--", "true"), (2, 3))):
        gone.mkdir(exist_ok=True)
        done = subprocess.run([*words, *more], env=shop.environment, capture_output=True, timeout=RUN_S, check=False)
        assert_brief(done, codes)


def test_a_reader_that_leaves(shop: Shop, job: str) -> None:
    for words in (("ps",), ("events", "--json"), ("show", job, "--json"), ("tldr",)):
        with subprocess.Popen(
            [*TPU, *words], env=shop.environment, cwd=shop.desk, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as command:
            assert command.stdout is not None
            assert command.stderr is not None
            command.stdout.close()
            said = command.stderr.read()
            assert command.wait(RUN_S) in (0, 141, -signal.SIGPIPE), (words, said)
            assert b"Traceback" not in said


def test_ctrl_c_in_each_phase(shop: Shop) -> None:
    """While it starts, while the job waits, while it runs: it leaves quickly, says how to return, and kills nothing."""
    # Before `begun` the interpreter itself may still be on its way, and what it says is not ours.
    begun = "from penstock.cli.main import main; print('begun', flush=True); main()"
    for wait_for in (b"begun", b"job ", b"up"):
        program = "import time; print('up'); time.sleep(60)"
        words = [sys.executable, "-c", begun, "run", "--on", "v5e-1", "--", "python3", "-uc", program]
        with subprocess.Popen(
            words, env=shop.environment, cwd=shop.desk, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as command:
            assert command.stdout is not None
            os.set_blocking(command.stdout.fileno(), False)
            said = b""

            def heard(wanted: bytes = wait_for, command: subprocess.Popen[bytes] = command) -> bool:
                nonlocal said
                assert command.stdout is not None
                said += command.stdout.read() or b""
                return wanted in said

            until(heard, RUN_S)
            began = time.monotonic()
            command.send_signal(signal.SIGINT)
            command.wait(RUN_S)
            assert time.monotonic() - began < 30.0  # the job sleeps for sixty
            heard()
            assert b"Traceback" not in said, said
            assert command.returncode in (0, 130, -signal.SIGINT), (wait_for, command.returncode, said)
    for view in shop.call("GET", "/v1/jobs?state=running")[1]["jobs"]:
        shop.call("POST", f"/v1/jobs/{view['id']}/cancel")


def test_a_pickle_would_have_shown_itself(tmp_path: Path) -> None:
    """The trap works: unpickled, it leaves its mark."""
    mark = tmp_path / "mark"

    class Evil:
        @override
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {mark}",)

    pickle.loads(pickle.dumps(Evil()))  # noqa: S301 (that is the point)
    assert mark.exists()
