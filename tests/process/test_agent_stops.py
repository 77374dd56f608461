"""The real agent as a process: payloads that are told to stop, in time or too late, and what is said of their ends.

Told so are those whom somebody could tell; who had left by itself says how, whatever order was on its way. `test_agent`
has the rest of what an agent promises.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from penstock.agent.processes import descendants, stat_of
from penstock.domain import limits
from penstock.wire.api import CommandRequest, SnippetRequest
from tests.process.agent_desk import DETACHED, Desk, Host, python, shell, tell, under_keeper


def order_stop(desk: Desk) -> None:
    desk.stop.add("a1")
    desk.ring()


def test_daemonised_children_end_with_the_payload(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        desk.launch("a1", python(DETACHED + "while open(out).read().count('\\n') < 2: time.sleep(0.02)\n"))
        end = await desk.ended("a1")
        assert end.exit is not None
        assert end.exit.well
        kept = desk.artifacts["pids"].decode().split()
        assert len(kept) == 2
        await desk.until(lambda: not under_keeper(host), "nothing of it is left")

    tell(tmp_path, story)


def test_a_stop_order_ends_the_whole_tree_and_the_grace_is_kept(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        stubborn = f"import signal; signal.signal(15, signal.SIG_IGN)\n{DETACHED}time.sleep(600)\n"
        desk.launch("a1", python(stubborn), stop_grace_s=1.0)
        await desk.until(lambda: desk.log("a1") == b"up\n")
        began = asyncio.get_running_loop().time()
        order_stop(desk)
        exit = (await desk.ended("a1")).exit
        took = asyncio.get_running_loop().time() - began
        assert exit is not None
        assert exit.agent == "stopped"
        assert 9 in (exit.signal, (exit.code or 0) - 128)
        assert 1.0 <= took < limits.GRACE_S  # the one it was given, not the usual one
        assert not under_keeper(host)

    tell(tmp_path, story)


def test_a_payload_that_saves_when_asked_may_end_well(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        code = (
            "import os, sys, time, signal\n"
            "signal.signal(signal.SIGTERM, lambda *_: None)\n"
            "print('up', flush=True)\n"
            "while not os.path.exists(os.environ['PENSTOCK_STOP_FILE']): time.sleep(0.02)\n"
            "open(os.environ['PENSTOCK_CHECKPOINT_DIR'] + '/saved', 'w').close()\n"
        )
        desk.launch("a1", python(code))
        await desk.until(lambda: desk.log("a1") == b"up\n")
        order_stop(desk)
        exit = (await desk.ended("a1")).exit
        assert exit is not None
        assert exit.well
        assert (desk.root / "jobs/j1/checkpoints/1/saved").exists()

    tell(tmp_path, story)


WAITS = "import os, sys, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)\nsys.exit(3)"


@pytest.mark.parametrize("payload", [python(WAITS), SnippetRequest(WAITS)], ids=["command", "snippet"])
def test_who_left_before_it_was_told_to_stop_is_not_said_to_have_been_stopped(
    tmp_path: Path, payload: CommandRequest | SnippetRequest
) -> None:
    """In a gang the others fail at once with errors about their peer: were its end called ours, theirs would count."""

    async def story(desk: Desk, host: Host, folder: Path) -> None:
        desk.launch("a1", payload)
        await desk.until(lambda: desk.log("a1") == b"up\n")
        assert host.process is not None
        host.process.send_signal(signal.SIGSTOP)  # a busy host: the order is there as soon as the news
        (host.state / "attempts/a1/work/go").touch()
        await desk.until((host.state / "attempts/a1/exit.json").exists)
        order_stop(desk)
        await asyncio.sleep(0.1)  # in which the answer goes out
        host.process.send_signal(signal.SIGCONT)
        exit = (await desk.ended("a1")).exit
        assert exit is not None
        assert (exit.code, exit.agent) == (3, None)

    tell(tmp_path, story)


def test_nor_is_one_whose_walls_were_still_coming_down(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        desk.launch("a1", python(f"import subprocess; subprocess.Popen(['sleep', '600'])\n{WAITS}"))
        await desk.until(lambda: desk.log("a1") == b"up\n")
        home = host.state / "attempts/a1"
        shim = json.loads((home / "shim.json").read_bytes())

        def names() -> list[str]:
            return [stat[0] for pid in descendants(shim["pid"]) if (stat := stat_of(pid)) is not None]

        outermost = shim["main"] if "bwrap" in names() else shim["pid"]
        os.kill(outermost, signal.SIGSTOP)
        try:
            (home / "work/go").touch()
            await desk.until(lambda: not any(name.startswith("python") for name in names()), "the program's end")
            assert "sleep" in names()
            asked = len(desk.requests)
            order_stop(desk)
            await desk.until(lambda: len(desk.requests) > asked + 1, "it has the order, and asks again")
        finally:
            os.kill(outermost, signal.SIGCONT)
        exit = (await desk.ended("a1")).exit
        assert exit is not None
        assert (exit.code, exit.agent) == (3, None)

    tell(tmp_path, story)


#: Ends without Python's own end: no child, no import, nothing that needs a parent.
ALONE = "print('up', flush=True)\nwhile True:\n    try:\n        open('go').close(); break\n    except OSError: pass\n"


def test_a_snippet_whose_end_cannot_be_written_ends_and_is_said_to_be_lost(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        desk.launch("a1", SnippetRequest(ALONE))
        await desk.until(lambda: desk.log("a1") == b"up\n")
        (host.state / "attempts/a1/exit.json.part").mkdir()  # as a full disk would refuse it
        (host.state / "attempts/a1/work/go").touch()
        assert (await desk.ended("a1")).exit.agent == "process_lost"  # type: ignore[union-attr]
        desk.launch("a2", SnippetRequest("result = 2"), fence=2)
        assert (await desk.ended("a2")).exit.well, "its parent forks others"  # type: ignore[union-attr]

    tell(tmp_path, story)


def test_a_stop_ends_also_what_nobody_can_see_the_end_of(tmp_path: Path) -> None:
    """The parent of a snippet is killed and the snippet ends: its room stays, and nobody clears it but the order."""

    async def story(desk: Desk, host: Host, folder: Path) -> None:
        desk.launch("a1", SnippetRequest(ALONE), stop_grace_s=1.0)
        await desk.until(lambda: desk.log("a1") == b"up\n")
        assert host.process is not None
        found = {pid: stat[0] for pid in descendants(host.process.pid) if (stat := stat_of(pid)) is not None}
        doormen = [pid for pid, name in found.items() if name == "doorman"]
        assert doormen or shutil.which("bwrap") is None
        for pid in doormen:
            os.kill(pid, signal.SIGKILL)
        (host.state / "attempts/a1/work/go").touch()
        await asyncio.sleep(0.3)  # in which it ends
        order_stop(desk)
        await desk.ended("a1")

    tell(tmp_path, story)


def test_an_inline_snippet_that_was_adopted_is_stopped(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        code = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
        desk.launch("a1", SnippetRequest(code, isolation="inline"))
        await desk.until(lambda: desk.log("a1") == b"up\n")
        host.kill_agent()
        host.start()
        asked = len(desk.requests)
        await desk.until(lambda: len(desk.requests) > asked)
        order_stop(desk)
        assert (await desk.ended("a1")).exit.agent == "stopped"  # type: ignore[union-attr]
        assert host.process is not None
        assert host.process.poll() is None, "the agent goes on"

    tell(tmp_path, story)


def test_the_timeout_is_real(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        desk.launch("a1", shell("trap '' TERM; while :; do sleep 0.1; done"), timeout_s=1.0, stop_grace_s=0.5)
        exit = (await desk.ended("a1")).exit
        assert exit is not None
        assert exit.agent == "timeout"
        assert not exit.well

    tell(tmp_path, story)


def test_a_notice_stops_payloads_and_is_told(tmp_path: Path) -> None:
    async def story(desk: Desk, host: Host, folder: Path) -> None:
        desk.launch("a1", shell("trap 'echo saved; exit 143' TERM; echo up; while :; do sleep 0.05; done"))
        await desk.until(lambda: desk.log("a1") == b"up\n")
        (host.state / "notice").write_text("30")
        await desk.until(lambda: desk.requests[-1].notice)
        exit = (await desk.ended("a1")).exit
        assert exit is not None
        assert (exit.code, exit.notice, exit.agent) == (143, True, None)
        assert desk.log("a1") == b"up\nsaved\n"

    tell(tmp_path, story)
