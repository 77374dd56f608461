"""kill -9 of server, agent and payload at every point of a job's life that is named here; one table.

Server and agent are killed by themselves, in the very line (`killing/sitecustomize.py`); payloads kill themselves. Then
whoever watches over them starts them again, and the job must have run as its policy says, no more and no less often:
its log, result and attempts are compared, and all rules that events can show are applied.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from penstock.capacity.local import QUICK_S
from penstock.capacity.slice_files import SliceFiles
from penstock.client import Client
from penstock.domain.invariants.history import History
from penstock.domain.invariants.rules import check
from penstock.wire.api import Accepted, CommandRequest, JobRequest, SnippetRequest
from tests.process.evidence import events_of
from tests.process.killing.sitecustomize import AGENT, SERVER
from tests.process.shop import RUN_S, WORDS, Shop, soon

pytestmark = pytest.mark.slow
RULES = ("S2", "S3", "S4", "S5", "S13", "S15", "S16")


class Range(Shop):
    """A machine whose server and agents end where they are told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.order = path.parent / "point"
        folder = Path(__file__).parent / "killing"
        self.environment |= {"PYTHONPATH": str(folder), "KILL_POINT": str(self.order), "PENSTOCK_LOCAL_SLICES": "1"}

    def aim(self, point: str) -> None:
        self.order.with_suffix(".done").unlink(missing_ok=True)
        draft = self.order.with_suffix(".draft")
        draft.write_text(point)
        draft.rename(self.order)

    @property
    def steady(self) -> bool:
        """No agent is so young that its end would be taken for a fault of its own."""
        files = SliceFiles(self.home.slices)
        slices = [each["id"] for each in self.call("GET", "/v1/slices")[1]["slices"]]
        agents = [agent.process for id in slices for agent in files.agents(id)]
        return all(agent.alive and agent.age_s > QUICK_S for agent in agents)

    @property
    def hit(self) -> bool:
        return self.order.with_suffix(".done").exists()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Range]:
    shop = Range(tmp_path_factory.mktemp("kills") / "home")
    try:
        shop.open()
        yield shop
    finally:
        shop.end()


CODE = """
import json
say("ran", os.environ["PENSTOCK_FENCE"])
time.sleep(1.0)  # so that it is told that it runs, before it is told that it ended
json.dump({"fence": os.environ["PENSTOCK_FENCE"]}, open(os.environ["PENSTOCK_OUTPUT_DIR"] + "/result.json", "w"))
"""
SNIPPET = """
import os, time
print("ran", os.environ["PENSTOCK_FENCE"])
time.sleep(1.0)
result = {"fence": os.environ["PENSTOCK_FENCE"]}
"""
PAYLOADS: dict[str, CommandRequest | SnippetRequest] = {
    "command": CommandRequest(("python3", "-c", WORDS + CODE)),
    "snippet": SnippetRequest(SNIPPET),
}


class Submit(threading.Thread):
    """A submit that is repeated while the server is away, as the SDK does."""

    def __init__(self, shop: Shop, kind: str) -> None:
        super().__init__(daemon=True)
        self._url, self._token = shop.server.url, (shop.home.path / "token").read_text().strip()
        self.name_given = f"{kind}-{secrets.token_hex(6)}"
        self._request = JobRequest(payload=PAYLOADS[kind], on=("v5e-1",), name=self.name_given)
        self.accepted: Accepted | None = None

    @override
    def run(self) -> None:
        with Client(self._url, self._token) as client:
            self.accepted = client.submit(self._request)


def judge(shop: Shop, submit: Submit, attempts: int) -> None:
    """One job came of it; it ran once per attempt; the last attempt's result counts; and the events are lawful."""
    submit.join(RUN_S)
    assert submit.accepted is not None
    job = submit.accepted.id
    view = shop.ended(job)
    assert (view["state"], len(view["attempts"])) == ("succeeded", attempts), view
    with shop.client() as client:
        assert [each.id for each in client.jobs() if each.name == submit.name_given] == [job]
    assert shop.result(job)["result"] == {"fence": str(attempts)}
    # Also what a killed server had only in memory: it comes again from the host before the end is told.
    assert shop.log(job) == b"".join(b"ran %d\n" % fence for fence in range(1, attempts + 1))
    report = check(History(events=events_of(shop.home.path / "penstock.db")), rules=RULES)
    assert report.violations == []


@pytest.mark.parametrize("kind", PAYLOADS)
@pytest.mark.parametrize("point", SERVER)
def test_a_server_killed(shop: Range, point: str, kind: str) -> None:
    shop.aim(point)
    submit, server = Submit(shop, kind), shop.server.process
    submit.start()
    soon(lambda: shop.hit)
    soon(lambda: not server.alive)
    shop.open()
    judge(shop, submit, attempts=1)


@pytest.mark.parametrize("kind", PAYLOADS)
@pytest.mark.parametrize("point", AGENT)
def test_an_agent_killed(shop: Range, point: str, kind: str) -> None:
    soon(lambda: shop.steady)
    shop.aim(point)
    submit = Submit(shop, kind)
    submit.start()
    soon(lambda: shop.hit)
    judge(shop, submit, attempts=1)


#: Where a payload dies, of its first attempt only.
PAYLOAD = {
    "starting": "die()\n{ran}",
    "running": "{ran}\ndie()",
    "writing its result": "{ran}\nout.write('{{\"fence\": ')\nout.flush()\ndie()",
    "its result written": '{ran}\nout.write(\'{{"fence": "1"}}\')\nout.flush()\ndie()',
}
DIES = """
import signal
fence = os.environ["PENSTOCK_FENCE"]
out = open(os.environ["PENSTOCK_OUTPUT_DIR"] + "/result.json", "w")
def die():
    if fence == "1": os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("point", PAYLOAD)
def test_a_payload_killed(shop: Range, point: str) -> None:
    code = DIES + PAYLOAD[point].format(ran="say('ran', fence)")
    code += "\nout.seek(0)\nout.truncate()\nout.write('{\"fence\": \"' + fence + '\"}')\n"
    once, twice = (shop.submit(code, rule=rule) for rule in ("pass", "rerun"))
    said = b"" if point == "starting" else b"ran 1\n"
    view = shop.ended(once)
    assert (view["state"], view["exit_code"], len(view["attempts"])) == ("failed", 137, 1), view
    assert view["cause"] == "infra", "nobody has asked for this kill"
    assert shop.log(once) == said
    assert shop.result(once)["result"] is None, "what a killed payload left is no result"
    view = shop.ended(twice)
    assert (view["state"], len(view["attempts"])) == ("succeeded", 2), view
    assert shop.log(twice) == said + b"ran 2\n"
    assert shop.result(twice)["result"] == {"fence": "2"}


# --- a server that is away ---
COUNTS = """
number = 0
while not os.path.exists(os.environ["PENSTOCK_CHECKPOINT_DIR"] + "/enough"):
    number += 1
    say("line", number)
    time.sleep(0.1)
say("last", number)
"""


@pytest.mark.parametrize("away_s", [5.0, pytest.param(300.0, marks=pytest.mark.long)])
def test_a_server_that_is_away_is_not_missed(shop: Range, away_s: float) -> None:
    """The job goes on, writes all the time, and is the same attempt when the server is back."""
    job = shop.submit(COUNTS)
    shop.says(job, b"line 3\n")
    shop.kill_server()
    threading.Event().wait(away_s)
    shop.open()
    shop.open_gate(job, "enough")
    view = shop.ended(job)
    assert (view["state"], len(view["attempts"])) == ("succeeded", 1), view
    lines = shop.log(job).decode().splitlines()
    last = int(lines.pop().removeprefix("last "))
    assert lines == [f"line {number}" for number in range(1, last + 1)]
    assert last >= away_s * 5, "it wrote all the time"
