"""The real agent as a process, against a real HTTP server: what it must do when payloads, server or agent die.

Every payload is a real process tree. What the agent may promise is in `sim.agents` and `domain.custody`; here it is the
same promise with real signals, files and sockets.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from pathlib import Path

import pytest

from penstock.agent.processes import started_at
from penstock.domain.custody import Phase
from penstock.wire.api import CommandRequest, SnippetRequest
from tests.process.agent_desk import CREDENTIAL, DETACHED, Desk, Host, alive, python, shell, tell, under_keeper


def test_a_command_runs_and_everything_it_left_is_there_before_its_end_is_told(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        code = (
            "import os, sys, json\n"
            "print('out'); print('err', file=sys.stderr)\n"
            "o = os.environ['PENSTOCK_OUTPUT_DIR']\n"
            "os.makedirs(o + '/deep'); open(o + '/deep/model.bin', 'wb').write(bytes(range(256)))\n"
            "json.dump({'loss': 0.5}, open(o + '/result.json', 'w'))\n"
            "sys.exit(0)\n"
        )
        desk.launch("a1", python(code), outputs=("deep/model.bin",))
        end = await desk.ended("a1")
        assert end.exit is not None
        assert end.exit.well, end.exit
        assert end.outputs == ("deep/model.bin",)
        assert desk.artifacts["deep/model.bin"] == bytes(range(256))
        assert desk.results["a1"].result == {"loss": 0.5}
        assert (desk.log("a1"), desk.log("a1", "err")) == (b"out\n", b"err\n")
        assert desk.trace[-1] == "exited a1", desk.trace
        # What was over within a moment need not be told before its end.
        assert [phase for phase in desk.phases["a1"] if phase is not Phase.LAUNCHED] in (
            [Phase.RUNNING, Phase.EXITED],
            [Phase.EXITED],
        )
        await desk.until(lambda: not (host.state / "attempts" / "a1").exists())

    tell(tmp_path, story)


@pytest.mark.parametrize(
    ("payload", "code", "signal", "said"),
    [
        (shell("exit 7"), 7, None, None),
        (shell("kill -SEGV $$"), None, 11, None),
        (CommandRequest(("/no/such/program",)), 127, None, None),
        (CommandRequest(("/etc/passwd",)), 126, None, None),
    ],
)
def test_how_a_command_ends_is_told_as_it_was(
    tmp_path: Path, payload: CommandRequest, code: int | None, signal: int | None, said: str | None
) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        desk.launch("a1", payload)
        exit = (await desk.ended("a1")).exit
        assert exit is not None
        # Behind bubblewrap a signal shows as 128 + n, as it does behind every shell.
        assert (exit.code, exit.signal, exit.agent) in {(code, signal, said), ((signal or 0) + 128, None, said)}
        assert Phase.RUNNING in desk.phases["a1"], "a bad end alone does not say that it ran"
        error = desk.results["a1"].error
        assert error is not None
        assert error.message

    tell(tmp_path, story)


def test_the_environment_is_the_contract_and_nothing_of_the_agents(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        host.kill_agent()
        host.start(AWS_SECRET_ACCESS_KEY="canary", PENSTOCK_TOKEN="canary", JAX_FLAG="passed", XLA_FLAGS="--xla_x=1")
        code = "import os, json; print(json.dumps(dict(os.environ)))"
        desk.launch("a1", python(code), env={"MINE": "1"}, secrets={"KEY": "hunter2-hunter2"}, jax_devices=4, fence=3)
        assert (await desk.ended("a1")).exit.well  # type: ignore[union-attr]
        seen = json.loads(desk.log("a1"))
        assert "canary" not in str(seen), seen
        assert CREDENTIAL not in str(seen)
        assert (seen["MINE"], seen["KEY"], seen["JAX_FLAG"], seen["JAX_PLATFORMS"]) == (
            "1",
            "***",
            "passed",
            "cpu",
        )
        assert seen["XLA_FLAGS"] == "--xla_x=1 --xla_force_host_platform_device_count=4"
        assert (seen["PENSTOCK_JOB_ID"], seen["PENSTOCK_FENCE"], seen["PENSTOCK_RANK"]) == ("j1", "3", "0")
        assert seen["PENSTOCK_CHECKPOINT_DIR"] == str(desk.root / "jobs/j1/checkpoints/3")
        assert (desk.root / "jobs/j1/checkpoints/3").is_dir()
        assert "JAX_COORDINATOR_ADDRESS" not in seen

    tell(tmp_path, story)


def test_secrets_split_over_writes_are_hidden(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        code = "import os, time\nfor b in b'<top-secret-1>top-secre.': os.write(1, bytes([b]))"
        desk.launch("a1", python(code), secrets={"KEY": "top-secret-1"})
        await desk.ended("a1")
        assert desk.log("a1") == b"<***>top-secre."

    tell(tmp_path, story)


def test_an_agent_killed_while_its_payload_runs_is_followed_by_one_that_tells_the_exit_code(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        code = (
            "import os, sys, time\n"
            "print('before', flush=True)\n"
            "while not os.path.exists('go'): time.sleep(0.02)\n"
            "print('after', flush=True); sys.exit(5)\n"
        )
        desk.launch("a1", python(code))
        await desk.until(lambda: desk.log("a1") == b"before\n")
        host.kill_agent()
        host.start()
        await desk.until(lambda: len(desk.joins) == 1 and desk.phases["a1"][-1:] == [Phase.RUNNING])
        (host.state / "attempts/a1/work/go").touch()
        exit = (await desk.ended("a1")).exit
        assert exit is not None
        assert (exit.code, exit.agent) == (5, None)
        assert desk.log("a1") == b"before\nafter\n"
        assert len({request.incarnation for request in desk.requests}) == 1

    tell(tmp_path, story)


def test_a_payload_that_ends_while_no_agent_lives_keeps_its_exit_code(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        desk.launch("a1", shell("echo one; while [ ! -e go ]; do sleep 0.02; done; echo two; exit 9"))
        await desk.until(lambda: desk.log("a1") == b"one\n")
        host.kill_agent()
        (host.state / "attempts/a1/work/go").touch()
        await desk.until((host.state / "attempts/a1/exit.json").exists)
        host.start()
        exit = (await desk.ended("a1")).exit
        assert exit is not None
        assert (exit.code, exit.agent) == (9, None)
        assert desk.log("a1") == b"one\ntwo\n"

    tell(tmp_path, story)


def test_the_next_attempt_finds_the_newest_checkpoint(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        (desk.root / "jobs/j1/checkpoints/1").mkdir(parents=True)
        (desk.root / "jobs/j1/checkpoints/1/step-5").mkdir()
        (desk.root / "jobs/j1/checkpoints/2").mkdir(parents=True)
        desk.launch("a3", shell("echo $PENSTOCK_RESTORE_DIR"), fence=3, restore=(("j1", 2), ("j1", 1)))
        await desk.ended("a3")
        assert desk.log("a3").decode().strip() == str(desk.root / "jobs/j1/checkpoints/1")

    tell(tmp_path, story)


@pytest.mark.long
def test_a_higher_fence_in_the_bucket_stops_the_payload_while_the_server_is_away(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        desk.launch("a1", python(DETACHED + "time.sleep(600)\n"), fence=4)
        await desk.until(lambda: desk.log("a1") == b"up\n")
        fence = desk.root / "jobs/j1/fence/0"
        fence.parent.mkdir(parents=True, exist_ok=True)
        fence.write_text("4")
        await desk.close()
        await asyncio.sleep(0.5)
        main = json.loads((host.state / "attempts/a1/shim.json").read_text())["main"]
        assert alive(main), "its own fence is no reason to stop"
        new = fence.with_name("new")
        new.write_text("5")
        new.rename(fence)  # at once, as a bucket does it
        await desk.until(lambda: not alive(main) and not under_keeper(host))
        await desk.open()
        exit = (await desk.ended("a1")).exit
        assert exit is not None
        assert exit.agent == "process_lost"

    tell(tmp_path, story)


def test_the_log_is_exact_though_the_server_dies_again_and_again(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        desk.durable_every = 3 << 20
        code = (
            "import os, random, time\n"
            "r = random.Random(7)\n"
            "for n in range(64):\n"
            "    data = r.randbytes(1 << 20)\n"
            "    while data: data = data[os.write(1, data):]\n"
            "    time.sleep(0.02)\n"
        )
        desk.launch("a1", python(code))
        for _ in range(4):
            before = len(desk.log("a1"))
            await desk.until(lambda before=before: len(desk.log("a1")) >= min(before + (8 << 20), 60 << 20))  # type: ignore[misc]
            await desk.close()
            await asyncio.sleep(0.1)
            await desk.open()
        await desk.ended("a1")
        chance = random.Random(7)
        wanted = b"".join(chance.randbytes(1 << 20) for _ in range(64))
        await desk.until(lambda: len(desk.log("a1")) == len(wanted))
        assert hashlib.sha256(desk.log("a1")).digest() == hashlib.sha256(wanted).digest()

    tell(tmp_path, story)


def test_an_end_is_told_when_its_log_is_durable_and_not_before(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        desk.durable_every, desk.settles = 1 << 30, False
        desk.launch("a1", shell("echo precious"))
        await desk.until(lambda: desk.log("a1") == b"precious\n")
        await desk.close()
        assert "a1" not in desk.ends
        assert desk.log("a1") == b""
        host.kill_agent()
        desk.settles = True
        await desk.open()
        host.start()
        await desk.ended("a1")
        assert desk.log("a1") == b"precious\n"
        await desk.until(lambda: not (host.state / "attempts/a1").exists())

    tell(tmp_path, story)


def test_an_unwelcome_host_ends_everything_and_itself(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        desk.launch("a1", python(DETACHED + "time.sleep(600)\n"))
        await desk.until(lambda: desk.log("a1") == b"up\n")
        main = json.loads((host.state / "attempts/a1/shim.json").read_text())["main"]
        desk.welcome = False
        desk.ring()
        assert host.process is not None
        assert await asyncio.to_thread(host.process.wait, 60) == 0
        await desk.until(lambda: not alive(main))
        keeper = json.loads((host.state / "keeper.json").read_text())
        await desk.until(lambda: started_at(keeper["pid"]) != keeper["started"])

    tell(tmp_path, story)


def test_progress_is_told_while_it_runs(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        code = (
            "import time\nfrom penstock import payload\n"
            "payload.progress(3, 10, loss=0.25)\nprint('up', flush=True)\ntime.sleep(600)\n"
        )
        desk.launch("a1", python(code), env={"PYTHONPATH": str(Path(__file__).parents[2] / "src")})
        await desk.until(lambda: "a1" in desk.progress)
        said = desk.progress["a1"]
        assert (said.done, said.total, said.metrics) == (3.0, 10.0, {"loss": 0.25})
        desk.kill.add("a1")
        desk.ring()
        exit = (await desk.ended("a1")).exit
        assert exit is not None
        assert not exit.well

    tell(tmp_path, story)


def test_an_order_repeated_after_its_end_starts_nothing(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        runs = folder / "root" / "runs"
        desk.launch("a1", shell("echo run"))
        await desk.ended("a1")
        await desk.until(lambda: not (host.state / "attempts/a1").exists())
        del desk.ends["a1"]  # the server forgot: it orders again, and hears nothing new
        asked = len(desk.requests)
        desk.ring()
        await desk.until(lambda: len(desk.requests) > asked + 3)
        assert not (host.state / "attempts/a1").exists()
        assert not runs.exists()

    tell(tmp_path, story)


def test_a_snippet_gives_its_result_and_outlives_the_agent(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        desk.launch("a1", SnippetRequest("print('hi'); result = {'x': x * 2}", {"x": 21}))
        assert (await desk.ended("a1")).exit.well  # type: ignore[union-attr]
        assert desk.results["a1"].result == {"x": 42}
        assert desk.log("a1") == b"hi\n"
        code = "import os, time\nprint('up')\nwhile not os.path.exists('go'): time.sleep(0.02)\nresult = 5"
        desk.launch("a2", SnippetRequest(code), fence=2)
        await desk.until(lambda: desk.log("a2") == b"up\n")
        assert host.process is not None
        host.process.terminate()  # the kind way must harm no more than kill -9 does
        assert await asyncio.to_thread(host.process.wait, 20) == 0
        (host.state / "attempts/a2/work/go").touch()
        host.start()
        exit = (await desk.ended("a2")).exit
        assert exit is not None
        assert (exit.code, exit.agent) == (0, None)
        assert desk.results["a2"].result == 5

    tell(tmp_path, story)


BIG = """
import os, random
chance = random.Random(11)
def write(fd, data):
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]
for line in range(10):
    block = chance.randbytes(1 << 20).replace(b"\\n", b"\\xff")
    for _ in range(100):
        write(1, block)
    write(1, b"\\x1b[31m\\n")
"""


@pytest.mark.slow
def test_a_gigabyte_in_lines_of_100_megabytes_passes_byte_for_byte(tmp_path: Path) -> None:
    """Ten lines, not UTF-8, while the server dies ten times; the spool gives its disk back on the way."""

    async def story(desk: Desk, host: Host, folder: Path) -> None:
        desk.durable_every = 2 << 20
        desk.launch("a1", python(BIG))
        for kill in range(10):
            await desk.until(lambda kill=kill: len(desk.logs["a1", "out"]) >= (kill + 1) * (60 << 20))  # type: ignore[misc]
            await desk.close()
            await desk.open()
        exit = (await desk.ended("a1")).exit
        assert exit is not None
        assert exit.well
        chance = random.Random(11)
        wanted = hashlib.sha256()
        size = 0
        for _ in range(10):
            block = chance.randbytes(1 << 20).replace(b"\n", b"\xff")
            for _ in range(100):
                wanted.update(block)
            wanted.update(b"\x1b[31m\n")
            size += 100 * len(block) + 6
        await desk.until(lambda: len(desk.logs["a1", "out"]) == size)
        assert hashlib.sha256(desk.logs["a1", "out"]).digest() == wanted.digest()

    tell(tmp_path, story)
