"""The course of one attempt on one host: launched, running, exited; stopped or killed on the way; then forgotten.

`loop` makes one per launch order and one per attempt it finds in its record. It behaves as `sim.processes.Process`
does: that model is the specification. What the payload leaves is with the server before the end is reported. It decides
how to stop and what to report, never whether to stop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path

from penstock.agent import homes, uploads
from penstock.agent.cgroups import remove_noted
from penstock.agent.checkpoints import Carried
from penstock.agent.host import Host
from penstock.agent.launch import NotStarted, Prepared, Running, fetch, group_of, prepare, start
from penstock.agent.layout import STREAMS, Layout, attempt_home, own_checkpoints, own_jax_cache, shared_checkpoints
from penstock.agent.link import Refused, Silent
from penstock.agent.record import Kept
from penstock.agent.spool import Spool
from penstock.agent.tree import Ended, Handle, Limits, Tree, memory_for
from penstock.agent.watch import Watch
from penstock.domain import limits
from penstock.domain.custody import Held, Phase
from penstock.domain.endings import STOPPED
from penstock.domain.nouns import Exit
from penstock.wire.agent import FenceWay, LaunchSpec
from penstock.wire.api import ErrorView, ProgressView

logger = logging.getLogger(__name__)

RUNNING_TOLD_S = 0.1  #: nobody sees the difference, and a short snippet costs the server one report less
WAY_FIRST_S, WAY_AGAIN_S = 2.0, 24 * 3600.0  #: short payloads end before it is asked for; long ones outlive an address
SIGKILLED = 137  #: what a shell says of a program that SIGKILL ended
TELL_AGAIN_S = 0.05  #: walls go up in tens of milliseconds; a look for a program costs one or two
GATE_S = 60.0  #: how long a payload waits for the accelerators; libtpu needs seconds to let go


class Course:
    """One attempt. `on_change` is called whenever there is something new to report."""

    def __init__(self, host: Host, kept: Kept, on_change: Callable[[], None], spec: LaunchSpec | None = None) -> None:
        self.kept = kept
        self._spec = spec  #: came with the order; otherwise it is asked for
        self._host = host
        self._on_change = on_change
        launch = kept.launch
        home = attempt_home(host.state, launch.attempt)
        self._layout = Layout(home=home, checkpoint=str(home), restore=None, jax_cache=str(home))
        files = {name: self._layout.stream(name) for name in STREAMS}
        self._spool = Spool(host.link, launch.attempt, launch.rank, files, kept.durable)
        folders = own_checkpoints(home, launch.fence), Path(own_jax_cache(host.state, launch.job))
        self._carried = Carried(host.link, launch, *folders, self._layout.pins, self._say_or_complain)
        self._lost = False  #: with the machine's reboot
        self._watch = Watch(self._layout.progress, host.since_boot)
        self._running: Running | None = None
        self._preparing: asyncio.Task[Prepared] | None = None
        self._leaving: asyncio.Task[object] | None = None
        self._killed = self._delivered = False
        self._timers: list[asyncio.TimerHandle] = []
        self._tasks: set[asyncio.Task[object]] = set()
        self._error: ErrorView | None = None
        self._passage = AsyncExitStack()  #: through the gate of the accelerators
        self.cleared = False  #: nothing of it is left here

    # --- what others see ---
    @property
    def alive(self) -> bool:
        """It occupies the chips."""
        return self._running is not None and self._running.exit is None

    @property
    def progress(self) -> ProgressView | None:
        return self._watch.said

    @property
    def saved_ago_s(self) -> float | None:
        return self._watch.saved_ago_s

    def report(self) -> Held:
        kept = self.kept
        return Held(
            attempt=kept.launch.attempt,
            fence=kept.launch.fence,
            phase=kept.phase,
            exit=kept.exit,
            outputs=kept.outputs,
            open_units=self._watch.open_units,
            holding=self._watch.holding,
        )

    # --- its own course ---
    def begin(self) -> None:
        self._spawn(self._live())

    async def _live(self) -> None:
        """From wherever the record says it is to its end, then until its logs are safe."""
        if self.kept.phase is not Phase.EXITED:
            try:
                await self._live_and_end()
            except Exception as error:
                # A fault of ours must neither leave a payload unattended nor keep its end from being told.
                logger.exception("attempt %s", self.kept.launch.attempt)
                if self._running is not None:
                    await self._running.kill()
                self.kept.said = self.kept.said or "launch_failed"
                self._error = ErrorView(type="AgentFault", message=f"{type(error).__name__}: {error}")
                self._end(self._exit(Ended(lost=True)), ())
        await self._spool.deliver()
        self._delivered = True
        if self.kept.forgotten:
            await self.clear_away()

    async def _live_and_end(self) -> None:
        try:
            self._running = self._adopt() or await self._launch()
        except NotStarted as failed:
            await self._passage.aclose()
            await self._not_started(failed)
        else:
            if self._watch.hidden is None:
                self._spawn(self._secrets())
            await self._run(self._running)

    def _adopt(self) -> Running | None:
        """What an agent before this one started; None: nothing was."""
        kept, launch = self.kept, self.kept.launch
        if self._lost:
            raise NotStarted(_lost("the machine was rebooted under it"), agent="process_lost")
        if kept.handle is not None:
            found = _adopted(kept)
            if found is None:
                raise NotStarted(_lost("its processes are gone and nobody saw them end"), agent="process_lost")
            return found
        if not (self._layout.home / "shim.json").exists():
            return None
        group = group_of(self._host, launch.attempt, Limits(memory_bytes=memory_for(None)))
        return Tree.found(self._layout.home, group, launch.attempt)

    async def _launch(self) -> Running:
        """Nothing is started before it is written down for good that it will be (S11)."""
        if self.kept.phase is Phase.RUNNING:
            raise NotStarted(_lost("the agent before this one left no trace of its processes"), agent="process_lost")
        if self._killed or self.kept.stopping:
            raise NotStarted(_lost("it was stopped before it started"))
        self._preparing = asyncio.create_task(self._prepare())
        try:
            ready, _ = await asyncio.gather(self._preparing, self._host.save_first(self.kept))
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                self._preparing.cancel()
                raise
            raise NotStarted(_lost("it was stopped before it started")) from None
        finally:
            self._preparing = None
        self.kept.wanted, self.kept.grace_s = ready.spec.outputs, ready.spec.stop_grace_s
        self.kept.warm = not ready.argv
        self._watch.hidden = tuple(ready.spec.secrets.values())
        if not self.kept.warm:
            self._host.save(self.kept)  # a command is found by its shim, whatever this agent still writes
        return await start(self._host, ready, self._begun)

    def _begun(self, handle: Handle | None) -> None:
        """Its processes are there. A snippet still waits for the word then, so no later agent starts it again (S11)."""
        kept = self.kept
        kept.phase, kept.handle, kept.began = Phase.RUNNING, handle, self._host.since_boot()
        self._host.save(kept)

    async def _prepare(self) -> Prepared:
        """Up to the gate of the accelerators, and through it: who was there before has let go of them."""
        given, self._spec = self._spec, None
        ready = await prepare(self._host, self.kept.launch.attempt, given, self._complain)
        if not ready.shared:
            from penstock.agent.devices import Busy

            try:
                await self._passage.enter_async_context(self._host.gate.passage(GATE_S))
            except Busy as busy:
                told = ErrorView(type="device_busy", message=str(busy))
                raise NotStarted(told, agent="device_busy") from busy
        return ready

    async def _run(self, running: Running) -> None:
        kept = self.kept
        if kept.phase is Phase.LAUNCHED:
            self._begun(running.handle)
        # What ends well within a moment is told once: its end says that it ran.
        self._later(RUNNING_TOLD_S, self._on_change)
        self._time(running)
        self._watch.checkpoints = shared_checkpoints(self._host.root, kept.launch.job, kept.launch.fence)
        following = [
            self._task(self._spool.follow()),
            self._task(self._watch.follow(running, self._say, self._on_change)),
        ]
        if self._host.root is None:
            following += [self._task(each) for each in self._carried.follow()]
            for task in following[-2:]:
                task.add_done_callback(self._done)
            following.append(self._task(self._learn_fence_way()))
        try:
            ended = await running.wait()
        finally:
            for task in following:
                task.cancel()
            self._cancel_timers()
            await self._passage.aclose()
        await self._host.keeping.drained(kept.launch.attempt)
        if ended.signal is None and ended.code != SIGKILLED:
            self._watch.look_for_saves(settle_s=0.0)  # nobody writes any more
        await self._finish(running, ended)

    def _time(self, running: Running) -> None:
        """The real timeout, and what is left of a stop that an earlier agent began or that came during the start."""
        kept = self.kept
        assert kept.began is not None
        left_s = kept.launch.timeout_s - (self._host.since_boot() - kept.began)
        self._later(max(0.0, left_s), lambda: self.stop(agent="timeout"))
        if self._killed:
            self._spawn(running.kill())
        elif kept.stopping:
            self._ask_to_stop(running)

    async def _finish(self, running: Running, ended: Ended) -> None:
        """Everything the payload left goes to the server, then the end is told."""
        exit = self._exit(ended)
        outputs: tuple[str, ...] = ()
        if not exit.well:
            self._on_change()  # a bad end does not say that it ran: that is told while its files are on their way
        if not self._killed:
            by_itself = ended.signal is None and ended.code != SIGKILLED
            self._leaving = leaving = asyncio.create_task(self._send_all(exit, by_itself=by_itself))
            try:
                outputs = await leaving
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    self._leaving.cancel()
                    raise
        running.close()
        self._end(exit, outputs)

    async def _send_all(self, exit: Exit, *, by_itself: bool | None = None) -> tuple[str, ...]:
        """Everything. `by_itself`: whether the payload left on its own; None: it never ran, and saved nothing."""
        launch = self.kept.launch
        left = uploads.Left(
            attempt=launch.attempt,
            rank=launch.rank,
            outputs=self.kept.wanted,
            folder=self._layout.output,
            report=self._layout.result,
            error=self._error if self._error is not None else uploads.error_of(exit),
            hidden=() if by_itself is None else await self._secrets(),
        )
        if self._host.root is None and by_itself is not None:
            await self._carried.finish(by_itself=by_itself)
        outputs, _ = await asyncio.gather(uploads.send(self._host.link, left, self._complain), self._spool.flush())
        await self._spool.deliver()  # also what the upload complained of
        return outputs

    async def _secrets(self) -> tuple[str, ...]:
        """Values that must not leave this host. No file has them, so an agent that took a payload over asks again."""
        if self._watch.hidden is None:
            try:
                spec = await fetch(self._host, self.kept.launch.attempt)
            except NotStarted:  # such as a secret that was removed since: its value is not known any more
                self._watch.hidden = ()
            else:
                self._watch.hidden = tuple(spec.secrets.values())
        return self._watch.hidden

    async def _not_started(self, failed: NotStarted) -> None:
        self._error = failed.error
        if self._killed or self.kept.stopping:
            facts = Ended(signal=9 if self._killed else 15)
        else:
            self.kept.said = self.kept.said or failed.agent
            facts = Ended(code=failed.code)
            self._complain(failed.error.message)
        exit = self._exit(facts)
        leaving: Coroutine[object, object, object] | None = None
        if failed.agent == "process_lost":
            if self._host.root is None and not self._killed:
                leaving = self._carried.finish(by_itself=False)  # nobody saw it end, but what it saved is there
        elif not self._killed and not self.kept.stopping:
            leaving = self._send_all(exit)
        if leaving is not None:
            self._leaving = asyncio.create_task(leaving)
            await asyncio.wait((self._leaving,))
        self._end(exit, ())

    def _exit(self, ended: Ended) -> Exit:
        kept = self.kept
        well = ended.code == 0 and ended.signal is None
        killed = (ended.signal == 9 or ended.code == SIGKILLED or ended.lost) and not ended.oom_killed
        said = kept.said
        ours = kept.stopping and not kept.notice and (kept.heard or killed or self._running is None)
        if said is None and ours and not well:
            said = STOPPED  # who left before it could hear is not: in a gang that may be why the others are stopped
        elif said is None and ended.lost:
            said = "process_lost"
        elif said is None and ended.refused == "prepare":
            said = "launch_failed"
        tail = "" if well and said is None else f"{self._spool.tail()}\n{uploads.own_error(self._layout.result)}"
        if self._error is not None:
            tail = f"{tail}\n{self._error.message}\n{self._error.traceback}"
        return Exit(
            host=kept.launch.rank,
            code=ended.code,
            signal=ended.signal,
            oom_killed=ended.oom_killed,
            agent=said,
            notice=kept.notice,
            log_tail=tail,
        )

    def _end(self, exit: Exit, outputs: tuple[str, ...]) -> None:
        kept = self.kept
        kept.phase, kept.exit, kept.outputs, kept.durable = Phase.EXITED, exit, outputs, self._spool.durable
        self._watch.look()  # its last words go with the report of its end
        self._cancel_timers()
        self._host.save(kept)
        self._on_change()

    # --- what is done to it ---
    def stop(self, *, notice: bool = False, agent: str | None = None, grace_s: float | None = None) -> None:
        """SIGTERM, and SIGKILL after the grace."""
        kept = self.kept
        if kept.phase is Phase.EXITED or kept.stopping:
            return
        kept.stopping, kept.said, kept.notice = True, agent, notice
        kept.grace_s = kept.grace_s if grace_s is None else min(grace_s, kept.grace_s)
        self._write_down()
        if self._preparing is not None:
            self._preparing.cancel()
        elif self.alive and self._running is not None:
            self._ask_to_stop(self._running)

    def _ask_to_stop(self, running: Running) -> None:
        self._later(self.kept.grace_s, lambda: self._spawn(running.kill()))
        self._tell_to_stop(running)

    def _tell_to_stop(self, running: Running) -> None:
        """Nobody hears behind walls that still go up, or who has just left by itself: then again in a moment."""
        if self.kept.heard or running.terminate():
            self.kept.heard = True
            self._write_down()
            try:  # after the signal, which would kill a program that saw the file and is at its very end
                self._layout.tell_to_stop(self.kept.grace_s)
            except OSError as error:
                self._complain(f"the stop file cannot be made: {error}")
        elif self.alive:
            self._later(TELL_AGAIN_S, lambda: self._tell_to_stop(running))

    def _write_down(self) -> None:
        """For the next agent. A disk that is full must not keep a payload from being stopped."""
        try:
            self._host.save(self.kept)
        except OSError as error:
            logger.warning("attempt %s: that it stops cannot be written: %s", self.kept.launch.attempt, error)

    def kill(self, *, agent: str | None = None) -> None:
        """SIGKILL: it ends here and now, and leaves nothing but its log."""
        kept = self.kept
        if kept.phase is Phase.EXITED or self._killed:
            return
        self._killed = kept.stopping = kept.heard = True
        kept.said = kept.said or agent
        if self._preparing is not None:
            self._preparing.cancel()
        elif self._leaving is not None:
            self._leaving.cancel()
        elif self._running is not None:
            self._spawn(self._running.kill())

    def lose(self) -> None:
        """The machine was rebooted under it: nobody saw it end, unless its exit was written before."""
        if self.kept.phase is not Phase.EXITED and not (self._layout.home / "exit.json").exists():
            self.kept.said = self.kept.said or "process_lost"
            self._lost = self._carried.anything  # then that goes first
            if not self._lost:
                self._end(self._exit(Ended(lost=True)), ())

    def refuse(self, agent: str) -> None:
        """It will not run here; the server is told why."""
        self.kept.said = agent
        self._end(self._exit(Ended(signal=9)), ())

    async def gone(self) -> None:
        """Until no process of it is left."""
        if self._running is not None:
            await self._running.wait()

    async def clear_away(self) -> None:
        """Its end is with the server and so are its logs: nothing of it need stay on this disk."""
        self._host.drop(self.kept.launch.attempt)
        note = self._layout.home / "group.json"
        kept = self.kept.warm and self._host.warm.take_back(note)
        if not kept and note.exists() and not await asyncio.to_thread(remove_noted, note, limits.KILL_S):
            logger.warning("attempt %s: its control group is still busy", self.kept.launch.attempt)
        # Only of a snippet it is certain that none of its processes can hold on to anything there.
        if not (self.kept.warm and homes.give_back(self._layout, self._host.spares)):
            await asyncio.to_thread(self._layout.remove)
        self.cleared = True

    def forget(self) -> None:
        """The server has its end. Logs that are not durable yet stay until they are."""
        self.kept.forgotten = True
        if self._tasks and not self._delivered:
            self._host.save(self.kept)
        else:
            self._spawn(self.clear_away())

    def close(self) -> None:
        """The agent ends; processes go on and are adopted by the next one."""
        self._cancel_timers()
        for task in self._tasks:
            task.cancel()

    async def _learn_fence_way(self) -> None:
        """Ask where this attempt's fence can be read when the server is away; an address lasts for some days."""
        rest_s = WAY_FIRST_S
        while True:
            await asyncio.sleep(rest_s)
            try:
                path = f"/v1/agent/attempts/{self.kept.launch.attempt}/fence"
                way = await self._host.link.ask("GET", path, None, FenceWay)
            except (Silent, Refused):
                rest_s = limits.SYNC_S
                continue
            self.kept.fence_url, rest_s = way.url or "", WAY_AGAIN_S
            self._host.save(self.kept)

    # --- small things ---
    def _say_or_complain(self, text: str) -> None:
        self._say(text) if self.alive else self._complain(text)

    def _say(self, text: str) -> None:
        """A line of the agent's own in the payload's log; lost if nobody takes the log in."""
        try:
            fd = os.open(self._layout.home / "log.fifo", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        try:
            os.write(fd, f"penstock: {text}\n".encode("utf-8", "replace"))
        except BlockingIOError:
            return
        finally:
            os.close(fd)

    def _complain(self, text: str) -> None:
        """The same once the payload and its pipes are gone."""
        try:
            self._layout.spool.mkdir(parents=True, exist_ok=True)
            with self._layout.stream("log").open("ab") as file:
                file.write(f"penstock: {text}\n".encode("utf-8", "replace"))
        except OSError as error:
            logger.warning("attempt %s: %s (and its log: %s)", self.kept.launch.attempt, text, error)

    def _later(self, seconds: float, then: Callable[[], object]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, then))

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _spawn(self, coroutine: Coroutine[object, object, object]) -> None:
        self._task(coroutine).add_done_callback(self._done)

    def _task(self, coroutine: Coroutine[object, object, object]) -> asyncio.Task[object]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _done(self, task: asyncio.Task[object]) -> None:
        if not task.cancelled() and (fault := task.exception()) is not None:
            logger.error("attempt %s", self.kept.launch.attempt, exc_info=fault)


def _adopted(kept: Kept) -> Tree | None:
    """The processes of a record, if anybody can still know how they end."""
    assert kept.handle is not None
    if kept.warm:
        from penstock.agent.forks import adopt

        return adopt(kept.handle)
    return Tree.adopt(kept.handle)


def _lost(message: str) -> ErrorView:
    return ErrorView(type="process_lost", message=message)
