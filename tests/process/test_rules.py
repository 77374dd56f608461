"""The rules that only real processes put to the test: every one of them is proved by a test of this folder.

Here S22 (what was sent is what runs), L10 (an orderly stop) and the audit half of S19; `test_walls` has S17,
`test_whole_logs` S18 and the canaries of S19, `test_releases` S21.
"""

from __future__ import annotations

import ast
import http.client
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from typing_extensions import override

from penstock.domain.invariants.rules import RULES
from penstock.domain.nouns import Role
from penstock.server.app import all_routes
from tests.process.evidence import Evidence
from tests.process.machine import until
from tests.process.shop import RUN_S, TPU, Shop

SNIPPET = {"payload": {"type": "snippet", "code": "pass"}, "on": ["v5e-1"]}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("rules") / "home")
    try:
        shop.open()
        yield shop
    finally:
        shop.end()


def proved() -> set[str]:
    """The rules that some test calls `prove` with. A call names them as plain words, so that they can be found."""
    found: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "prove":
                found |= {str(word.value) for word in node.args if isinstance(word, ast.Constant)}
    return found


def test_every_rule_of_real_processes_is_proved_by_some_test() -> None:
    assert proved() == {rule.name for rule in RULES.values() if rule.where == "process"}


# --- S22 ---
#: In the tree itself, so that the test and every payload count alike. Modes count as far as they travel: executable.
TREE = """
import hashlib, os, sys
digest = hashlib.sha256()
for folder, folders, files in os.walk('.'):
    folders.sort()
    for name in sorted(files):
        path = os.path.join(folder, name)
        kind = 'link ' + os.readlink(path) if os.path.islink(path) else 'x' if os.access(path, os.X_OK) else '-'
        data = b'' if os.path.islink(path) else open(path, 'rb').read()
        digest.update(f'{path} {kind} {len(data)} '.encode('utf-8', 'surrogateescape') + hashlib.sha256(data).digest())
print('tree', digest.hexdigest(), flush=True)
if 'spoil' in sys.argv and os.environ['PENSTOCK_FENCE'] == '1':
    open('deep/er/file', 'w').write('spoilt')
    open('planted', 'w').write('x')
    sys.exit(1)
"""


def make_tree(folder: Path) -> str:
    """A tree with what trees have: depth, empty and large files, odd names, an executable, what is ignored."""
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "tree.py").write_text(TREE)
    (folder / "deep" / "er" / "file").write_text("content\r\n")
    (folder / "empty").touch()
    (folder / "large").write_bytes(bytes(range(256)) * (80 << 10))
    (folder / "ünï ✓ 'code'").write_bytes(b"\xff\xfe\x00")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    for number in range(300):
        (folder / "deep" / f"small-{number}").write_text("x" * number)
    before = counted(folder)
    (folder / ".tpuignore").write_text("secret*\n.tpuignore\n")
    (folder / "secret.txt").write_text("stays at home")
    return before


def counted(folder: Path) -> str:
    done = subprocess.run([sys.executable, "tree.py"], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split()[1]


@pytest.mark.slow
def test_every_host_and_attempt_finds_the_tree_that_was_sent(shop: Shop, tmp_path: Path) -> None:
    evidence = Evidence()
    sent = make_tree(tmp_path)
    words = ("run", "--detach", "--dir", str(tmp_path))
    gang = shop.command(*words, "--on", "v5e-16", "--", "python3", "tree.py").stdout.decode().strip()
    spoilt = shop.command(*words, "--on", "v5e-1", "--max-retries", "1", "--", "python3", "tree.py", "spoil")
    for job, hosts in ((gang, 4), (spoilt.stdout.decode().strip(), 1)):
        evidence.world("tree.sent", job, tree=sent)
        view = shop.ended(job)
        assert view["state"] == "succeeded", (view, shop.everything(job))
        for host in range(hosts):
            for line in shop.log(job, host=host).decode().splitlines():
                evidence.world("tree.found", job, tree=line.removeprefix("tree "))
    assert evidence.prove("S22") == {"S22": 4 + 2}


# --- L10 ---
class Caller(threading.Thread):
    """Submits and cancels over one connection until the server is gone; remembers what was acknowledged, and when."""

    def __init__(self, shop: Shop) -> None:
        super().__init__(daemon=True)
        self._address = urlsplit(shop.server.url)
        token = (shop.home.path / "token").read_text().strip()
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        self.acknowledged: list[tuple[float, str, str]] = []
        self.refused: list[int] = []

    @override
    def run(self) -> None:
        connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=RUN_S)
        with closing(connection):
            try:
                while True:
                    job = self._call(connection, "submit", "/v1/jobs", msgspec.json.encode(SNIPPET))
                    if job and len(self.acknowledged) % 3 == 0:
                        self._call(connection, "cancel", f"/v1/jobs/{job}/cancel", b"")
            except (OSError, http.client.HTTPException):
                return  # it is gone

    def _call(self, connection: http.client.HTTPConnection, verb: str, path: str, body: bytes) -> str:
        connection.request("POST", path, body, self._headers)
        answer = connection.getresponse()
        said = answer.read()
        if answer.status not in (200, 201):
            self.refused.append(answer.status)
            return ""
        id = str(msgspec.json.decode(said)["id"])
        self.acknowledged.append((time.monotonic(), verb, id))
        return id


@pytest.mark.slow
def test_a_server_told_to_stop_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "home")
    try:
        with subprocess.Popen([*TPU, "serve"], env=shop.environment, cwd=shop.desk, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            shop.open()  # it is there already: this only waits until it leads
            assert shop.server.pid == server.pid
            shop.call("POST", "/v1/maintenance", {"on": True})
            callers = [Caller(shop) for _ in range(4)]
            for caller in callers:
                caller.start()
            until(lambda: all(len(caller.acknowledged) >= 20 for caller in callers))
            told_at = time.monotonic()
            server.send_signal(signal.SIGTERM)
            code = server.wait(RUN_S)
            gone_at = time.monotonic()
        for caller in callers:
            caller.join(RUN_S)
        assert not [status for caller in callers for status in caller.refused if status != 503]
        evidence = Evidence(shop.home.path / "penstock.db")
        lines = [(at, verb, id) for caller in callers for at, verb, id in caller.acknowledged]
        for at, verb, id in sorted([*lines, (told_at, "told", ""), (gone_at, "gone", "")]):
            evidence.at = at
            if verb == "told":
                evidence.world("server.told", "server")
            elif verb == "gone":
                evidence.world("server.gone", "server", code=code)
            else:
                evidence.client(f"{verb}.ok", "caller", server="server", job=id)
        assert evidence.prove("L10") == {"L10": 1}
    finally:
        shop.end()


# --- S19, the audit ---
AUDIT_WORDS = "sets secret|deletes secret|preempts slice|replaces slice|recreates pool|solves slice|cleans"


class Auditor:
    """Makes one change after another in one principal's name, and notes what it asked for and when it was answered."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self.evidence = Evidence(shop.home.path / "penstock.db")
        self.routes: set[str] = set()
        view = shop.call("GET", "/v1/server")[1]
        self.principal = f"{view['team']}/{view['principal']}"
        self._number = 0

    def change(self, route: str, what: str, entity: str, id: str = "", body: object = None) -> str:
        """One change and the record it must leave: an event's kind, or the words of a line."""
        self._number += 1
        self.routes.add(route)
        method, _, path = route.partition(" ")
        place = re.sub(r"\{\w+\}", id, path)
        self.evidence.client("change.invoke", self.principal, call=self._number)
        status, answer = self._call(method, place, body)
        assert status in (200, 201, 204), (route, status, answer)
        about = id if what != "job.created" else str(answer.get("id") or answer["jobs"][0]["id"])
        self.evidence.client("change.ok", self.principal, call=self._number, what=what, entity=entity, id=about)
        return about

    def _call(self, method: str, place: str, body: object) -> tuple[int, Any]:
        address = urlsplit(self._shop.server.url)
        token = (self._shop.home.path / "token").read_text().strip()
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        with closing(http.client.HTTPConnection(address.hostname or "", address.port, timeout=RUN_S)) as connection:
            connection.request(method, place, None if body is None else msgspec.json.encode(body), headers)
            answer = connection.getresponse()
            return answer.status, msgspec.json.decode(answer.read() or b"{}")

    def read_lines(self) -> None:
        """What the server's log says of changes that are no events."""
        for line in self._shop.home.log.read_text().splitlines():
            found = re.search(rf"penstock\.audit: (\S+) ({AUDIT_WORDS}) ?(\S*)", line)
            if found:
                self.evidence.world("audit.line", found[3], what=found[2], principal=found[1])


#: Need a cloud: tests/process/test_fleets.py and tests/unit/server/test_adoption.py look for their lines.
ELSEWHERE = {"POST /v1/adopt", "POST /v1/slices/{id}/unreached"}
#: Content by hash and questions about it change nothing that is anybody's to audit.
BYTES = {"POST /v1/blobs/missing", "PUT /v1/blobs/{sha256}", "PUT /v1/snapshots/{sha256}"}


@pytest.mark.slow
def test_every_change_has_one_audit_record_with_its_principal(shop: Shop) -> None:
    auditor = Auditor(shop)
    change = auditor.change
    job = change("POST /v1/jobs", "job.created", "job", body=SNIPPET)
    change("PATCH /v1/jobs/{id}", "job.edited", "job", job, {"tags": ["seen"]})
    assert shop.ended(job)["state"] == "succeeded"
    change("POST /v1/jobs/{id}/rerun", "job.created", "job", job)
    change("POST /v1/jobs/{id}/resume", "job.created", "job", job)
    batch = {"jobs": [{**SNIPPET, "payload": {"type": "snippet", "code": "import time; time.sleep(600)"}}]}
    change("POST /v1/jobs/{id}/cancel", "job.cancel_requested", "job", change(
        "POST /v1/jobs/batch", "job.created", "job", body=batch
    ))  # fmt: skip
    for kind, body in (("pool", {"accelerator": "v5e-8"}), ("queue", {})):
        route = f"/v1/{kind}s/{{name}}"
        change(f"PUT {route}", f"{kind}.created", kind, f"audited-{kind}", body)
        more = {"max": 2} if kind == "pool" else {"weight": 2.0}
        change(f"PUT {route}", f"{kind}.edited", kind, f"audited-{kind}", {**body, **more})
        change(f"DELETE {route}", f"{kind}.deleted", kind, f"audited-{kind}")
    change("PUT /v1/secrets/{name}", "sets secret", "secret", "AUDITED", {"value": "something"})
    change("DELETE /v1/secrets/{name}", "deletes secret", "secret", "AUDITED")
    slice = shop.view(job)["slice"]
    for kind, id in (("slice", slice), ("pool", "local-v5e-1")):
        place = f"/v1/{kind}s/{{{'id' if kind == 'slice' else 'name'}}}/reservation"
        change(f"PUT {place}", f"{kind}.reserved", kind, id, {"note": "audited"})
        change(f"DELETE {place}", f"{kind}.unreserved", kind, id)
    change("POST /v1/slices/{id}/preempt", "preempts slice", "slice", slice)
    change("POST /v1/pools/{name}/recreate", "recreates pool", "pool", "local-v5e-1")
    another = shop.ended(shop.submit("say('here')"))["slice"]
    change("POST /v1/slices/{id}/solve", "solves slice", "slice", another, {})
    change("POST /v1/slices/{id}/replace", "replaces slice", "slice", another)
    change("POST /v1/clean", "cleans", "clean", "snapshots", {"older_than_s": 86_400})
    change("POST /v1/maintenance", "control.edited", "control", "control", {"on": True})
    change("POST /v1/maintenance", "control.edited", "control", "control", {"on": False})
    auditor.read_lines()
    changing = {
        f"{route.method} {route.path}"
        for route in all_routes()
        if route.method != "GET" and route.role not in (None, Role.AGENT)
    }
    assert auditor.routes == changing - BYTES - ELSEWHERE, "every route that changes something was called"
    assert auditor.evidence.prove("S19")["S19"] == 25
