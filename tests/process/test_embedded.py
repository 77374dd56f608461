"""The embedded server as people meet it: started by whoever needs it, once, found again, killed, stopped, drained.

Real processes in a state directory of the test's own. Whatever a test leaves running is ended.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from typing_extensions import override

from penstock.capacity import processes
from penstock.domain import limits
from penstock.domain.admission import BadInput
from penstock.wiring.embedded import answers, ensure_server
from penstock.wiring.home import Unusable
from tests.process.machine import WITHIN_S, Machine, until

BODY = {"payload": {"type": "command", "argv": ["true"]}, "on": ["v5e-1"]}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "home")
    yield machine
    machine.end()


def test_the_first_command_starts_a_server_and_the_next_finds_it(machine: Machine) -> None:
    url = machine.start()
    assert answers(url)
    first = machine.server
    assert machine.start() == url
    assert machine.server == first
    assert os.getsid(first.pid) == first.pid, "it outlives the terminal"
    files = {path.name: oct(path.stat().st_mode & 0o777) for path in machine.home.path.iterdir() if path.is_file()}
    assert set(files.values()) == {"0o600"}, files
    assert {"server.json", "token", "tokens.json", "key", "penstock.db", "server.log"} <= files.keys()
    assert machine.call("GET", "/v1/server")[1]["team"] == "default"
    until(lambda: machine.call("GET", "/v1/queues")[1]["queues"])
    assert machine.call("GET", "/v1/queues")[1]["queues"][0]["name"] == "default"
    assert machine.call("GET", "/v1/server", token="x")[0] == 401


def test_a_stale_pid_is_repaired(machine: Machine) -> None:
    machine.start()
    dead = machine.kill_server()
    # The pid was given to somebody else meanwhile: to this test.
    stale = msgspec.structs.replace(dead, pid=os.getpid(), url="http://127.0.0.1:9")
    (machine.home.path / "server.json").write_bytes(msgspec.json.encode(stale))
    assert answers(machine.start())
    assert machine.server.pid not in (dead.pid, os.getpid())


def test_a_server_killed_at_once_loses_nothing_and_leads_again(machine: Machine) -> None:
    machine.start()
    until(lambda: machine.call("POST", "/v1/jobs", BODY)[0] == 201)
    ids = {machine.call("POST", "/v1/jobs", {**BODY, "priority": number})[1]["id"] for number in range(5)}
    first = machine.kill_server()
    url = machine.start()
    assert url == first.url, "agents find it where they left it"
    # From its first answer on: on a quiet machine that comes seconds before the dead one's term is over.
    began = time.monotonic()
    until(lambda: machine.call("GET", "/v1/server")[1]["leading"])
    assert time.monotonic() - began < limits.LEADER_TTL_S / 2, "no term has to run out first"
    listed = {job["id"] for job in machine.call("GET", "/v1/jobs")[1]["jobs"]}
    assert ids <= listed


def test_two_starters_make_one_server(machine: Machine) -> None:
    code = "from penstock.wiring.embedded import ensure_server; print(ensure_server())"
    starters = [machine.python(code) for _ in range(4)]
    said = [starter.communicate(timeout=WITHIN_S)[0] for starter in starters]
    assert [starter.returncode for starter in starters] == [0] * 4
    assert set(said) == {f"{machine.server.url}\n".encode()}
    assert [found.pid for found in machine.servers()] == [machine.server.pid]


def test_a_second_server_is_refused(machine: Machine) -> None:
    machine.start()
    done = machine.tpu("serve", "--port", "0")
    assert done.returncode == 3
    assert f"already (pid {machine.server.pid}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_two_directories_cannot_share_one_sqlite_file(machine: Machine, tmp_path: Path) -> None:
    machine.start()
    other = Machine(tmp_path / "other")
    done = other.tpu("serve", "--store", str(machine.home.path / "penstock.db"))
    assert done.returncode == 3
    assert "another server uses this store" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("--root", "ftp://bucket"), 2, "root: 'ftp://bucket' is a ftp:// address"),
        (("--host", "192.0.2.1", "--port", "1"), 3, "cannot listen on 192.0.2.1 port 1"),
        (("--store", "/proc/nothing/p.db"), 3, "/proc/nothing"),
    ],
)
def test_what_a_server_cannot_use_is_told_in_one_line(
    machine: Machine, words: tuple[str, ...], code: int, line: str
) -> None:
    done = machine.tpu("serve", *words)
    assert done.returncode == code
    assert line in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_mistake_in_the_settings_is_told_at_once(machine: Machine) -> None:
    with pytest.raises(BadInput, match="PENSTOCK_PORT: 'many'"):
        ensure_server({**machine.environment, "PENSTOCK_PORT": "many"})
    assert machine.servers() == []


def test_a_server_that_cannot_start_says_why(machine: Machine) -> None:
    machine.home.path.mkdir()
    (machine.home.path / "root").write_text("a file where the objects should be")
    with pytest.raises(Unusable, match=r"did not start: .*must be a directory"):
        machine.start()
    assert machine.servers() == []
    (machine.home.path / "root").unlink()
    assert answers(machine.start())


def test_down_stops_it_and_says_so(machine: Machine) -> None:
    url = machine.start()
    pid = machine.server.pid
    done = machine.tpu("down")
    assert (done.returncode, done.stdout) == (0, f"stopped {url}\n")
    assert processes.find(pid) is None
    assert not (machine.home.path / "server.json").exists()
    assert machine.tpu("down").stdout == "no server ran here\n"


def test_serve_in_the_foreground_ends_well_on_ctrl_c(machine: Machine) -> None:
    argv = [sys.executable, "-c", "from penstock.cli.main import main; main()", "serve", "--log-level", "error"]
    with subprocess.Popen(argv, env=machine.environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[0]
        assert answers(url)
        assert machine.start() == url, "no other one is started beside it"
        server.send_signal(signal.SIGINT)
        assert server.wait(WITHIN_S) == 0
    assert not (machine.home.path / "server.json").exists()


class Submitter(threading.Thread):
    """Submits over one connection until the server goes; remembers what was acknowledged."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._address = urlsplit(machine.server.url)
        self._token = (machine.home.path / "token").read_text().strip()
        self.ids: list[str] = []
        self.refused: list[int] = []

    @override
    def run(self) -> None:
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/json"}
        connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=WITHIN_S)
        with closing(connection):
            while True:
                try:
                    connection.request("POST", "/v1/jobs", msgspec.json.encode(BODY), headers)
                    answer = connection.getresponse()
                    body = answer.read()
                except (OSError, http.client.HTTPException):
                    return
                if answer.status == 201:
                    self.ids.append(msgspec.json.decode(body)["id"])
                else:
                    self.refused.append(answer.status)


def test_sigterm_drains_and_loses_no_acknowledged_call(machine: Machine) -> None:
    """L10, with open streams that would never end by themselves."""
    machine.start()
    until(lambda: machine.call("POST", "/v1/jobs", BODY)[0] == 201)
    address = urlsplit(machine.server.url)
    token = (machine.home.path / "token").read_text().strip()
    streams = []
    for _ in range(3):
        stream = http.client.HTTPConnection(address.hostname or "", address.port, timeout=WITHIN_S)
        headers = {"authorization": f"Bearer {token}", "accept": "text/event-stream"}
        stream.request("GET", "/v1/events?follow=true", headers=headers)
        answer = stream.getresponse()
        assert answer.status == 200
        streams.append((stream, answer))
    submitters = [Submitter(machine) for _ in range(4)]
    for submitter in submitters:
        submitter.start()
    until(lambda: all(len(submitter.ids) >= 10 for submitter in submitters))
    process = machine.server.process
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    until(lambda: not process.alive)
    took_s = time.monotonic() - began
    for submitter in submitters:
        submitter.join(WITHIN_S)
    for stream, answer in streams:
        answer.read()  # ended by the server, not cut off in the middle of a line
        stream.close()
    assert took_s < 22.0, "open streams do not hold it: they would for 25 s (`drain_s`)"
    acknowledged = {id for submitter in submitters for id in submitter.ids}
    assert [submitter.refused for submitter in submitters] == [[]] * 4
    machine.start()
    kept: set[str] = set()
    cursor = ""
    while True:
        page = machine.call("GET", f"/v1/jobs?limit=500{cursor}")[1]
        kept |= {job["id"] for job in page["jobs"]}
        if page.get("next") is None:
            break
        cursor = f"&cursor={page['next']}"
    assert acknowledged <= kept


@pytest.mark.postgres
def test_the_same_server_serves_a_team_on_postgresql(machine: Machine, postgres_url: str) -> None:
    machine.environment |= {"PENSTOCK_STORE": postgres_url, "PENSTOCK_LOCAL_HOSTS": "2"}
    machine.start()
    pool = {"accelerator": "v5e-1"}
    until(lambda: machine.call("GET", "/v1/queues")[1]["queues"])
    assert machine.call("PUT", "/v1/pools/here", pool)[0] in (200, 201)
    job = machine.call("POST", "/v1/jobs", BODY)[1]["id"]
    until(lambda: machine.call("GET", f"/v1/jobs/{job}")[1]["state"] == "succeeded")
    shown = machine.call("GET", "/v1/server")[1]["store"]
    assert shown.startswith("postgresql://")
    assert not (machine.home.path / "penstock.db").exists()
