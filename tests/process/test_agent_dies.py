"""An agent killed as a snippet starts: its successor must not start it again (S11). And one that was forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Literal

import pytest

from penstock.domain.custody import Phase
from penstock.wire.api import CommandRequest, SnippetRequest
from tests.process.agent_desk import a_host

#: An agent that ends by SIGKILL where it gives a snippet the word to go: just before, or just after.
DIES = """
import os, signal, socket, sys
from penstock.agent.__main__ import main
send = socket.send_fds
def send_and_die(to, said, *rest):
    if said == [b"go"]:
        if sys.argv[1] == "after":
            send(to, said, *rest)
        os.kill(os.getpid(), signal.SIGKILL)
    return send(to, said, *rest)
socket.send_fds = send_and_die
main(sys.argv[2:])
"""


@pytest.mark.parametrize("isolation", ["fork", "inline"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_snippet_whose_agent_dies_as_it_starts_is_never_started_again(
    tmp_path: Path, when: str, isolation: Literal["fork", "inline"]
) -> None:
    """Nothing but the agent's own journal can tell the next one that there was a snippet."""

    async def story() -> None:
        async with a_host(tmp_path) as (desk, host):
            host.kill_agent()
            host.start(program=("-c", DIES, when))
            desk.launch("a1", SnippetRequest("print('ran')", isolation=isolation))
            assert host.process is not None
            assert await asyncio.to_thread(host.process.wait, 60) == -signal.SIGKILL
            host.start()
            end = await desk.ended("a1")
            assert end.exit is not None
            if when == "before":
                assert (end.exit.agent, desk.log("a1")) == ("process_lost", b"")
            else:
                assert (end.exit.code, desk.log("a1")) == (0, b"ran\n")

    asyncio.run(story())


def opened(pid: int) -> list[Path]:
    """The files that a process has open."""
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            found.append(each.readlink())
    return found


def test_a_second_agent_waits_for_the_first_to_end_and_takes_over(tmp_path: Path) -> None:
    """As when what restarts agents was killed, forgot the one that lives and started another."""

    async def story() -> None:
        async with a_host(tmp_path) as (desk, host):
            wait = "while [ ! -e go ]; do sleep 0.02; done; exit 5"
            desk.launch("a1", CommandRequest(("/bin/sh", "-c", wait)))
            await desk.until(lambda: Phase.RUNNING in desk.phases["a1"])
            first = host.process
            host.start()
            second = host.process
            assert first is not None
            assert second is not None
            try:
                lock = host.state / "agent.lock"
                await desk.until(lambda: lock in opened(second.pid), "the second one stands before the lock")
                (host.state / "attempts/a1/work/go").touch()
                exit = (await desk.ended("a1")).exit
                assert exit is not None
                assert exit.code == 5
                sockets = [each for each in opened(second.pid) if each.name.startswith("socket:")]
                assert not sockets, "it talks to nobody"
            finally:
                first.kill()
                first.wait()
            desk.launch("a2", CommandRequest(("/bin/sh", "-c", "exit 6")), fence=2)
            exit = (await desk.ended("a2")).exit
            assert exit is not None
            assert exit.code == 6
            assert second.poll() is None
            assert len(desk.joins) == 1

    asyncio.run(story())
