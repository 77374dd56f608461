"""One snippet's processes as the agent sees them: a fork that waits, the tree it becomes, and the parent that forks.

`warm` makes and uses these; `course` sees only the tree, which has the same methods as a command's. Processes tell
their numbers over sockets on which the kernel itself says who wrote, so that numbers are right across namespaces.
Nothing here decides what a snippet may do or when it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, cast

from typing_extensions import override

from penstock.agent import cgroups, processes
from penstock.agent.tree import Ended, Handle, StartError, Tree, gone
from penstock.domain import limits

START_S = 120.0  #: importing jax from a cold disk on a busy machine
END_S = 10.0
WRITE_S = 2.0  #: after a snippet's last process is gone, for the parent to say how it ended
EXIT_POLL_S = 0.005
_BY_SIGNAL = 128  #: what bubblewrap and shells add to the number of the signal that ended a process
Mode = Literal["rooms", "plain", "inline"]
Weight = Literal["light", "heavy"]  #: without jax, or from a process that has imported it


class ParentGone(Exception):
    """The warm parent ended before the snippet began; another one may do."""


class WarmTree(Tree):
    """A snippet's processes. With a room, `shim` is the room's first process, and its end is everybody's end.

    Without one, `shim` is the snippet's own process, or the interpreter that runs all of them. `over` is a socket whose
    other end is let go when nobody of the snippet is left; an agent's successor has none.
    """

    def __init__(
        self, handle: Handle, over: socket.socket | None = None, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        super().__init__(handle)
        self._over = over
        self._process = process
        self._killed = False
        self.then: Callable[[], None] | None = None  #: called once, at the end

    @property
    def _room(self) -> bool:
        return self.handle.shim != self.handle.main

    @override
    async def wait(self) -> Ended:
        if self.exit is None:
            if self._over is not None:
                while await heard_from(self._over) is not None:
                    continue
            if self._room and (self._over is None or self._killed):
                await gone(self.handle.shim, self.handle.shim_started)
            written = await self._written()
            # A file of a few bytes that was just written is read faster than a thread is found to read it.
            self.exit = self._read_exit() if written else await asyncio.to_thread(self._unwritten)
            if self.then is not None:
                self.then()
        return self.exit

    async def _written(self) -> bool:
        """Whether the end is in its file. It may come a moment later; when nobody is left, it will not come."""
        patience_s = 0.0 if self._process is not None else WRITE_S
        gone_at: float | None = None
        while not self._has_ended():
            if gone_at is None and not self._there():
                gone_at = time.monotonic()
            if gone_at is not None and time.monotonic() - gone_at >= patience_s:
                return False
            await asyncio.sleep(EXIT_POLL_S)
        return True

    def _has_ended(self) -> bool:
        return (Path(self.handle.folder) / "exit.json").exists()

    def _unwritten(self) -> Ended:
        """An inline interpreter that ended with the snippet: its status is the snippet's."""
        if self._process is None:
            return self._read_exit()
        status = self._process.wait(END_S)
        if status < 0:
            return Ended(signal=-status)
        return Ended(code=status) if status <= _BY_SIGNAL else Ended(signal=status - _BY_SIGNAL)

    def _there(self) -> bool:
        return processes.started_at(self.handle.shim) == self.handle.shim_started

    @override
    def terminate(self) -> bool:
        """SIGTERM to everybody in the room (its first process passes it on), or to the snippet's process group."""
        main = processes.stat_of(self.handle.main)
        if main is None or main[4] != self.handle.main_started or not processes.hears(main) or self._has_ended():
            return False
        leads = main[3] == self.handle.main  # an inline interpreter may be in somebody else's group
        try:
            if self._room or self._process is not None or not leads:
                os.kill(self.handle.shim, signal.SIGTERM)
            else:
                os.killpg(self.handle.main, signal.SIGTERM)
        except ProcessLookupError:
            return False
        return True

    @override
    def dump(self) -> list[int]:
        if not self._there():
            return []
        os.kill(self.handle.main, signal.SIGUSR1)  # `snippet.on_crash` handles it
        return [self.handle.main]

    @override
    def kill_now(self) -> bool:
        self._killed = True
        if self._there():
            if not self._room:  # below it are its children, if they did not detach; its parent kills those that did
                processes.kill_all(self.handle.main, [], limits.KILL_S)
            os.kill(self.handle.shim, signal.SIGKILL)
        return self._group is None or processes.kill_all(1, self._group.everyone(), limits.KILL_S)

    @override
    def close(self) -> None:
        """Its group goes with its home: the kernel takes its time with it, and nobody waits then."""
        if self._over is not None:
            self._over.close()


class Fork:
    """A process that waits to become a snippet, in a room of its own where there are rooms."""

    def __init__(self, hello: socket.socket, door: socket.socket | None, pids: Mapping[str, int], name: str) -> None:
        self.hello, self.door, self.name = hello, door, name
        self.main = pids["snippet"]
        self.shim = pids.get("room", self.main)
        self.group: cgroups.Group | None = None

    def close(self) -> None:
        """Not needed: it ends, because nobody can order it any more."""
        self.hello.close()
        if self.door is not None:
            self.door.close()


class Parent:
    """One warm parent, or one inline interpreter, and the socket to it."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, mode: Mode) -> None:
        self.process, self.control, self.mode = process, control, mode
        self.spares: dict[Weight, asyncio.Task[Fork]] = {}
        self.running = 0

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    async def fork(self, name: str, weight: Weight) -> Fork:
        """Have it fork, and learn the numbers of the new processes. Raises `ParentGone` and `StartError`."""
        sockets = [pair() for _ in range(2 if self.mode == "rooms" else 1)]
        ours = [own for own, _ in sockets]
        pids: dict[str, int] = {}
        try:
            try:
                socket.send_fds(self.control, [weight.encode()], [theirs.fileno() for _, theirs in sockets])
            finally:
                for _, theirs in sockets:
                    theirs.close()
            for each in ours:
                pids.update([await asyncio.wait_for(introduced(each), START_S)])
        except TimeoutError as error:
            raise StartError(f"the warm parent did not fork within {START_S:.0f} s") from error
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ParentGone(str(error)) from error
        finally:
            if len(pids) < len(ours):
                for each in ours:
                    each.close()
        return Fork(ours[0], ours[1] if len(ours) > 1 else None, pids, name)

    async def close(self) -> None:
        """Let it go: it ends at once, or when its last snippet has ended, with or without this agent."""
        self.control.close()
        for spare in self.spares.values():
            await self._let_go(spare)
        if self.running:
            return
        try:
            await asyncio.to_thread(self.process.wait, END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)

    @staticmethod
    async def _let_go(spare: asyncio.Task[Fork]) -> None:
        try:
            (await spare).close()
        except (ParentGone, StartError):
            return


def pair() -> tuple[socket.socket, socket.socket]:
    """A socket whose messages say which process sent them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return ours, theirs


async def introduced(hello: socket.socket) -> tuple[str, int]:
    """A process's first word, and its number as this process sees it: the kernel itself says who wrote."""
    heard = await heard_from(hello)
    if heard is None:
        raise ParentGone("it ended before the snippet began")
    if heard[0].startswith("!"):
        raise StartError(heard[0][1:])
    return heard


async def heard_from(hello: socket.socket) -> tuple[str, int] | None:
    """The next message and the process it came from; None at the end."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            said, ancillary, _, _ = hello.recvmsg(8192, socket.CMSG_SPACE(struct.calcsize("3i")))
        except BlockingIOError:
            ready: asyncio.Future[None] = loop.create_future()
            loop.add_reader(hello, ready.cancel)
            try:
                await asyncio.wait((ready,))
            finally:
                loop.remove_reader(hello)
            continue
        except ConnectionResetError:
            return None
        if not said:
            return None
        pids = [
            cast("int", struct.unpack("3i", data[:12])[0])
            for _, kind, data in ancillary
            if kind == socket.SCM_CREDENTIALS
        ]
        return said.decode("utf-8", "replace"), pids[0] if pids else 0


def adopt(handle: Handle) -> WarmTree | None:
    """The snippet of a record if it runs, or ran and left its end; None when nobody can know."""
    there = processes.started_at(handle.shim) == handle.shim_started
    return WarmTree(handle) if there or (Path(handle.folder) / "exit.json").exists() else None
