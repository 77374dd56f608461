"""An agent that is killed in the very moment in which a snippet starts: its successor must not start it again (S11)."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Literal

import pytest

from penstock.wire.api import SnippetRequest
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
