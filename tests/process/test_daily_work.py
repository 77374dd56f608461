"""What people do beside running one job, with a real server and real jobs: arrays with a limit, queues that go, lists
that are narrowed, logs of gangs, a state directory among the files, and what the retention policy takes by itself.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.process.machine import until
from tests.process.shop import WORDS, Shop, soon

pytestmark = pytest.mark.slow


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with Shop(tmp_path / "home") as shop:
        yield shop


def lines(shop: Shop, *words: str) -> list[Any]:
    done = shop.command(*words, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def states(shop: Shop, ids: list[str]) -> list[str]:
    return [str(shop.view(id)["state"]) for id in ids]


def running(shop: Shop, ids: list[str]) -> list[str]:
    return [id for id, state in zip(ids, states(shop, ids), strict=True) if state == "running"]


def test_an_array_keeps_its_limit_without_the_command_and_through_a_killed_server(shop: Shop) -> None:
    (shop.desk / "member.py").write_text(WORDS + "say(os.environ['PENSTOCK_ARRAY_INDEX'])\ngate('go')\n")
    done = shop.command("run", "--on", "v5e-1", "--array", "0-4%2", "--detach", "member.py")
    assert done.returncode == 0, done.stderr
    ids = done.stdout.decode().split()
    assert len(ids) == 5

    soon(lambda: running(shop, ids) == ids[:2])
    why = shop.told("why", ids[4])
    assert (why["code"], why["numbers"]) == ("array_full", {"running": 2, "at_most": 2})
    assert re.match(r"Array \w+: 2 of 2 running; ", why["sentence"])

    shop.kill_server()
    shop.open()
    most = 0
    left = list(ids)
    while left:
        soon(lambda: len(running(shop, left)) == min(2, len(left)))
        most = max(most, len(running(shop, ids)))
        first = running(shop, left)[0]
        soon(lambda first=first: (shop.home.path / "root/jobs" / first / "checkpoints/1").is_dir())  # type: ignore[misc]
        shop.open_gate(first, "go")
        assert shop.ended(first)["state"] == "succeeded"
        left.remove(first)
    assert most == 2
    out = [shop.log(id) for id in ids]
    assert out == [b"0\n", b"1\n", b"2\n", b"3\n", b"4\n"]
    moments = sorted(
        (moment, step)
        for id in ids
        for moment, step in ((shop.view(id)["started_at"], 1), (shop.view(id)["finished_at"], -1))
    )
    flying = 0
    for _, step in moments:
        flying += step
        assert flying <= 2, "never more at once, as the server's own stamps have it"


def test_map_and_batches_have_the_same_limit(shop: Shop) -> None:
    shop.open()
    with shop.client() as client:
        assert list(client.map("result = item * item", range(6), on="v5e-1", at_most=1)) == [0, 1, 4, 9, 16, 25]
    views = sorted((shop.view(each["id"]) for each in shop.told("ps", "-a")), key=lambda view: view["started_at"])
    assert all(one["finished_at"] <= two["started_at"] for one, two in pairwise(views))
    snippet = {"type": "snippet", "code": "1"}
    bad = {"jobs": [{"payload": snippet, "at_most": 2}]}
    status, problem = shop.call("POST", "/v1/jobs/batch", bad)
    assert (status, problem["field"]) == (409, "at_most")
    status, problem = shop.call("POST", "/v1/jobs", {"payload": snippet, "array": "a/0", "at_most": 0})
    assert status == 400


def test_a_queue_goes_once_nothing_is_in_it(shop: Shop) -> None:
    shop.open()
    assert shop.command("queues", "set", "night").returncode == 0
    id = shop.submit("gate('never')", queue="night")
    done = shop.command("queues", "rm", "night")
    assert (done.returncode, done.stdout) == (6, b"")
    line = f"tpu: queue: 'night' is in use by {id}, which has not ended; wait for its jobs, or cancel them\n"
    assert done.stderr.decode() == line
    assert shop.command("kill", id).returncode == 0
    assert shop.command("queues", "rm", "night").returncode == 0
    assert [each["name"] for each in shop.told("queues")] == ["default"]
    assert shop.command("queues", "rm", "night").returncode == 5
    status, problem = shop.call("POST", "/v1/jobs", {"payload": {"type": "snippet", "code": "1"}, "queue": "night"})
    assert (status, problem["code"]) == (404, "not_found")
    assert shop.command("show", id).returncode == 0, "its jobs are remembered"
    assert shop.command("queues", "set", "night").returncode == 0


def test_lists_are_narrowed_by_what_they_have(shop: Shop) -> None:
    shop.open()
    well = shop.submit("say(1)", tags=["sweep"])
    shop.ended(well)
    ill = shop.submit("sys.exit(3)", tags=["other"])
    shop.ended(ill)
    live = shop.submit("say(2); gate('go')", tags=["sweep"])
    shop.says(live, b"2")
    user = str(shop.view(well)["user"])

    def jobs_of(*words: str) -> set[str]:
        """Which jobs a list of events speaks of."""
        return {event["id"] for event in lines(shop, "events", *words) if event["kind"].startswith("job.")}

    assert jobs_of() == {well, ill, live}
    assert jobs_of("--tag", "sweep") == {well, live}
    assert jobs_of("--state", "failed") == {ill}
    assert jobs_of("--state", "ended") == {well, ill}
    assert jobs_of("--user", user, "--tag", "other") == {ill}
    assert jobs_of("--user", "nobody") == set()
    assert jobs_of("--since", "1h") == {well, ill, live}
    last = lines(shop, "events")[-1]
    assert lines(shop, "events", "--since", "0s") == []
    assert [event["seq"] for event in lines(shop, "events", "--after", str(last["seq"] - 1))] == [last["seq"]]
    assert {event["kind"] for event in lines(shop, "events", well, "--since", "1h")} >= {"job.created", "job.succeeded"}
    done = shop.command("events", well, "--tag", "sweep")
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)

    (slice,) = {each["id"] for each in shop.told("slices", "--tag", "sweep", "--user", user)}
    assert [each["job"] for each in shop.told("slices", "--state", "ready", "--tag", "sweep")] == [live]
    assert shop.told("slices", "--user", "nobody") == []
    assert shop.told("slices", "--state", "gone,failed") == []
    assert slice in {each["id"] for each in shop.told("local", "ls", "--since", "1h")}
    for words in (("ps",), ("pools",), ("queues",), ("secret", "ls"), ("alias",), ("dir",), ("settings",)):
        assert isinstance(shop.told(*words), list | dict)
    shop.open_gate(live, "go")


def test_hosts_of_a_gang_are_told_apart_while_it_runs_and_after(shop: Shop) -> None:
    (shop.desk / "gang.py").write_text("import os\nos.write(1, f\"I am {os.environ['PENSTOCK_RANK']}\\n\".encode())\n")
    done = shop.command("run", "--on", "v5e-16", "gang.py")
    assert done.returncode == 0, done.stderr
    hosts = len(done.stdout.splitlines())
    assert hosts > 1
    wanted = sorted(f"[host {rank}] I am {rank}" for rank in range(hosts))
    assert sorted(done.stdout.decode().splitlines()) == wanted
    job = re.findall(r"job (j\w+)", done.stderr.decode())[0]
    assert sorted(shop.command("logs", job).stdout.decode().splitlines()) == wanted
    assert sorted(shop.command("logs", "-f", job).stdout.decode().splitlines()) == wanted
    assert shop.command("logs", job, "--host", "1").stdout == b"I am 1\n"


def test_a_state_directory_among_the_files_stays_out(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "state")
    shop.desk = tmp_path  # so that its home lies among the files
    try:
        shop.open()
        (shop.desk / "look.py").write_text("import os\nprint(sorted(os.listdir()))\n")
        (shop.desk / "desk").rmdir()
        done = shop.command("run", "--on", "v5e-1", "look.py")
        assert (done.returncode, done.stdout) == (0, b"['look.py']\n"), done.stderr
        assert b"state: left out, the state directory of Penstock itself" in done.stderr
        inside = subprocess.run(
            [sys.executable, "-c", "from penstock.cli.main import main; main()", "run", "--", "true"],
            env=shop.environment, cwd=shop.home.path, capture_output=True, check=False, timeout=60,
        )  # fmt: skip
        assert inside.returncode == 2
        assert b"is the state directory of Penstock itself; go to your project first" in inside.stderr
    finally:
        shop.end()


#: A server whose stamps are some days ahead; the clock that it waits by is the same.
LATER = """
import sys
from penstock.wiring import serve
class Later(serve.SystemClock):
    def now(self): return super().now() + float(sys.argv[1]) * 86400
serve.SystemClock = Later
from penstock.cli.main import run
sys.exit(run(["serve"]))
"""


@pytest.mark.long
def test_the_policy_is_obeyed_by_itself_and_no_live_job_suffers(shop: Shop) -> None:
    shop.open()
    (shop.desk / "kept.py").write_text(
        WORDS + "say(1)\nopen(os.environ['PENSTOCK_OUTPUT_DIR'] + '/f', 'w').write('x')\n"
    )
    assert shop.command("run", "--on", "v5e-1", "-n", "old", "kept.py").returncode == 0
    (old,) = [each["id"] for each in shop.told("ps", "-a")]
    live = shop.submit("say('still here'); gate('go'); say('and done')", timeout_s=29 * 86400)
    shop.says(live, b"still here")
    root = shop.home.path / "root"
    until(lambda: list(root.glob(f"jobs/{live}/log/**/*.zst")))
    assert list(root.glob(f"jobs/{old}/log/**/*.zst"))
    assert list(root.glob("snapshots/**/*.json"))
    shop.kill_server()

    (shop.home.path / "penstock.toml").write_text('[retention]\nlogs = "1d"\nresults = "never"\nevery = "1s"\n')
    shown = {each["name"]: (each["value"], each["from"]) for each in shop.told("config", "show")}
    file = str(shop.home.path / "penstock.toml")
    assert (shown["retention.every"], shown["retention.results"]) == ((1.0, file), ("never", file))
    assert shown["retention.checkpoints"] == (30 * 86400.0, "default")
    serving(shop, 2, lambda: not (root / "jobs" / old / "log").exists())
    assert list(root.glob(f"jobs/{old}/staging/**/*")), "for ever"
    assert list(root.glob(f"jobs/{live}/log/**/*.zst")), "not of a job that lives"
    assert list(root.glob("snapshots/**/*.json")), "a job that is remembered names it"
    shop.open()
    shop.open_gate(live, "go")
    assert shop.ended(live)["state"] == "succeeded"
    assert shop.log(live) == b"still here\nand done\n"
    assert shop.command("show", old).returncode == 0
    shop.kill_server()

    (shop.home.path / "penstock.toml").write_text('[retention]\nevery = "1s"\n')
    gone = [root / "jobs" / id for id in (old, live)]
    serving(shop, 40, lambda: not any(each.exists() for each in gone) and not list(root.glob("snapshots/**/*.json")))
    shop.open()
    assert shop.told("ps", "-a") == []


def serving(shop: Shop, days: int, until_it: Callable[[], object]) -> None:
    """A server of some days later, until something has come about."""
    log = shop.home.path.parent / "later.log"
    with log.open("ab") as out:
        argv = [sys.executable, "-c", LATER, str(days)]
        server = subprocess.Popen(argv, env=shop.environment, cwd=shop.desk, stdout=out, stderr=out)
    try:
        until(until_it, 60)
    except AssertionError:
        raise AssertionError(log.read_text()) from None
    finally:
        server.terminate()
        server.wait(60)
    assert "retention: removed" in log.read_text()
