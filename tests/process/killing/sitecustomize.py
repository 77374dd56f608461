"""Kills a server or an agent at one named point of its work: for `test_kill`, which puts this folder on PYTHONPATH.

Python imports it when a process starts. In a server or an agent it wraps the few functions where the points lie; the
process that reaches the point named in the file `$KILL_POINT` takes the file away and ends by SIGKILL, so each order is
carried out once. It changes nothing else, and nothing at all in any other process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

SERVER: Final = (
    "server: submit not committed",
    "server: submit committed, not answered",
    "server: assignment not committed",
    "server: assignment committed, not answered",
    "server: start not committed",
    "server: start committed, not answered",
    "server: exit not committed",
    "server: exit committed, not answered",
)
AGENT: Final = (
    "agent: launch saved, payload not started",
    "agent: payload started",
    "agent: payload ended, nothing sent",
    "agent: everything sent, end not saved",
    "agent: end saved, not reported",
    "agent: end reported, answer not heeded",
)


def reach(point: str) -> None:
    """End here if this is the point that was ordered."""
    order = Path(os.environ["KILL_POINT"])
    try:
        if order.read_text() != point:
            return
        order.rename(order.with_suffix(".done"))
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _what(verb: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """What a transaction is about, in the words of the points."""
    name = getattr(verb, "__name__", "")
    if name == "submit":
        return "submit"
    if name == "carry_out" and any(type(step).__name__ == "Placement" for step in args[0]):
        return "assignment"
    phases = {held.phase.value for held in args[0].held} if name == "hear" else set()
    return "exit" if "exited" in phases else "start" if "running" in phases else ""


def _in_server() -> None:
    from penstock.store.threads import ThreadedStore
    from penstock.store.turns import Turns

    run, transact = Turns.run, ThreadedStore.transact

    def run_and_die(self: Any, actor: str, epoch: int, grouped: bool, verb: Any, args: Any, kwargs: Any) -> Any:
        result = run(self, actor, epoch, grouped, verb, args, kwargs)
        if what := _what(verb, args):
            reach(f"server: {what} not committed")
        return result

    async def transact_and_die(self: Any, verb: Any, /, *args: Any, **kwargs: Any) -> Any:
        result = await transact(self, verb, *args, **kwargs)
        if what := _what(verb, args):
            reach(f"server: {what} committed, not answered")
        return result

    Turns.run = run_and_die  # type: ignore[method-assign]
    ThreadedStore.transact = transact_and_die  # type: ignore[method-assign]


def _in_agent() -> None:
    from penstock.agent import course, launch, loop

    start, finish, end = launch.start, course.Course._finish, course.Course._end
    obey = loop.Agent._obey

    async def start_and_die(*args: Any) -> Any:
        reach(AGENT[0])
        started = await start(*args)
        reach(AGENT[1])
        return started

    def finish_and_die(self: Any, *args: Any) -> Awaitable[None]:
        reach(AGENT[2])
        return finish(self, *args)

    def end_and_die(self: Any, *args: Any) -> None:
        reach(AGENT[3])
        end(self, *args)
        reach(AGENT[4])

    async def obey_and_die(self: Any, *args: Any) -> None:
        if any(each.kept.phase.value == "exited" for each in self._courses.values()):
            reach(AGENT[5])
        await obey(self, *args)

    for owner, name, wrapped in (
        (course, "start", start_and_die),
        (course.Course, "_finish", finish_and_die),
        (course.Course, "_end", end_and_die),
        (loop.Agent, "_obey", obey_and_die),
    ):
        setattr(owner, name, wrapped)


if "KILL_POINT" in os.environ:
    if "penstock.wiring" in sys.orig_argv:
        _in_server()
    elif "penstock.agent" in sys.orig_argv:
        _in_agent()
