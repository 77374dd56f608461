"""Ways to this server for hosts that have none: an ssh to each host, with a port there that leads back here.

`wiring.cloud` runs it when `[tpu_vm] tunnel` names an ssh command. The startup script of a host, and its agent, then
talk to a port of the host itself. The system's ssh is used, as people use it (ADR 0031): it knows keys, jump hosts and
proxies, and costs no dependency. Which slices there are, and where their hosts are, is asked again and again; a way
that breaks is made anew, at growing distances. It must not decide anything about slices, nor start anything on hosts
but the watch that ends with the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import subprocess
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Slice
from penstock.ports.capacity import READY, Address, CapacityError
from penstock.ports.clock import Clock

logger = logging.getLogger(__name__)

PORT: Final = 7353  #: of each host, on its loopback alone
AT_ONCE: Final = 32  #: hosts that are being connected to: a key exchange costs a core some milliseconds
_LOOK_S: Final = 1.0
_AGAIN_FIRST_S, _AGAIN_MAX_S = 1.0, 10.0  #: a host asks for its bundle for half a minute before it gives up
_STOOD_S: Final = 60.0  #: a way that stood for so long was a good one
_ASK_S: Final = 10.0  #: addresses may be so old: hosts that were stopped and started have others
_ENDS_S: Final = 5.0
_SILENT_S: Final = 60  #: a host ends a way over which it has heard nothing for so long
_BEATS: Final = 6  #: in that time
_SAID_BYTES_MAX: Final = 4096
_UP_S: Final = 60.0  #: a host that is connected to says within this time that the way stands
_WITH_HOSTS: Final = (SliceState.CREATING, SliceState.READY, SliceState.DRAINING)
_UP: Final = b"\nup\n"
#: What runs on a host while its way stands. sshd keeps the port of a peer that vanished without a word for up to a
#: quarter of an hour, and the next way could not have it; so the host ends a way over which it hears nothing. A server
#: that was killed ends it at once, because its end of the pipe is closed by the kernel.
_WATCH: Final = 'echo; echo up; while [ "$(timeout %d head -c 1)" = . ]; do :; done; kill "$PPID"'

Addresses = Callable[[str, str], Awaitable[Sequence[Address]]]


class Tunnels:
    """One ssh per host of every slice that there is."""

    def __init__(
        self,
        command: str,
        server: str,
        *,
        clock: Clock,
        directory: Path,
        slices: Callable[[], Iterable[Slice]],
        addresses: Addresses,
        noted: Callable[[str, int, str], None] | None = None,
        shared_loopback: bool = False,
        silent_s: int = _SILENT_S,
    ) -> None:
        """`command` is ssh with its options; `server` is this server's address on its own machine.

        `directory` keeps the keys that hosts showed first; `noted` is told why a host of a slice is not reached. Hosts
        with a `shared_loopback`, as emulated ones have, are led here from their own addresses.
        """
        parts = urlsplit(server)
        self._ssh = shlex.split(command)
        self._server = f"{_bracketed(parts.hostname or '')}:{parts.port or 80}"
        self._clock = clock
        self._directory = directory
        self._slices = slices
        self._addresses = addresses
        self._noted = noted
        self._shared = shared_loopback
        self._silent_s = silent_s
        self._ways: dict[str, asyncio.Task[None]] = {}
        self._connecting = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Until cancelled: a task for each slice whose machine exists, and none for others."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            while True:
                wanted = {each.id: each for each in self._slices() if _has_hosts(each)}
                over = [id for id, way in self._ways.items() if id not in wanted or way.done()]
                if over:
                    await self._end([self._ways.pop(id) for id in over])
                    self._forget_keys()
                for id, slice in wanted.items():
                    if id not in self._ways:
                        self._ways[id] = asyncio.create_task(self._serve(slice))
                await self._clock.sleep(_LOOK_S)
        finally:
            await self._end(list(self._ways.values()))

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                logger.error("tunnels of a slice failed; they are made anew", exc_info=ended)

    async def _serve(self, slice: Slice) -> None:
        """The ways of one slice, for as long as it has hosts."""
        where = _Whereabouts(slice, self._addresses, self._clock)
        async with asyncio.TaskGroup() as hosts:
            for index in range(slice.hosts):
                hosts.create_task(self._keep(slice, index, where))

    async def _keep(self, slice: Slice, index: int, where: _Whereabouts) -> None:
        """The way of one host, again and again."""
        again_s, told = _AGAIN_FIRST_S, ""
        while True:
            at = await where.of(index)
            if at is not None:
                began = self._clock.steady()
                said = await self._stand(slice, index, at)
                if self._clock.steady() - began >= _STOOD_S:
                    again_s = _AGAIN_FIRST_S
                if said != told:  # one line for each reason, however often it is tried
                    logger.warning("tunnel to host %d of %s at %s: %s", index, slice.id, at.outside or at.inside, said)
                told = said
            await self._clock.sleep(again_s)
            again_s = min(2 * again_s, _AGAIN_MAX_S)

    async def _stand(self, slice: Slice, index: int, at: Address) -> str:
        """One ssh, until it ends; why it did."""
        words = self._words(slice, index, at)
        async with contextlib.AsyncExitStack() as stack:
            await self._connecting.acquire()
            connecting = stack.enter_context(contextlib.ExitStack())
            connecting.callback(self._connecting.release)
            try:
                process = await asyncio.create_subprocess_exec(
                    *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            except OSError as error:
                return f"{self._ssh[0]} cannot be run: {error}"
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            up: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            hearing = asyncio.create_task(_hear(process.stdout, up))
            stack.callback(hearing.cancel)
            stack.push_async_callback(_reap, process)
            saying = asyncio.create_task(_last_words(process.stderr))
            beating = asyncio.create_task(self._beat(process.stdin))
            stack.callback(saying.cancel)
            stack.callback(beating.cancel)
            await asyncio.wait((up,), timeout=_UP_S)
            if up.done():
                if up.result():
                    logger.info("tunnel to host %d of %s stands", index, slice.id)
                    connecting.close()
                code, said = await process.wait(), await saying
                why = plainly(said, code)
            else:
                why = _BUSY
        if self._noted is not None:
            self._noted(slice.id, index, f"not reached by ssh: {why}")
        return why

    def _words(self, slice: Slice, index: int, at: Address) -> list[str]:
        """ssh's command line. What the user's own command says comes first, and the first word counts."""
        settings = (
            "BatchMode=yes",
            "ExitOnForwardFailure=yes",
            "ServerAliveInterval=10",
            "ServerAliveCountMax=3",
            "ConnectTimeout=20",
            # A connection that others share would outlive this one, and an agent lets a host use the user's keys.
            "ControlPath=none",
            "ForwardAgent=no",
            "ForwardX11=no",
            # The key belongs to the slice, whose name is never used twice, not to an address that others had before.
            f"HostKeyAlias=penstock-{slice.id}-{index}",
            f'UserKnownHostsFile="{self._keys(slice, index)}"',
            "CheckHostIP=no",
            "StrictHostKeyChecking=accept-new",
        )
        options = [word for pair in settings for word in ("-o", pair)]
        back = f"{at.inside if self._shared else '127.0.0.1'}:{PORT}:{self._server}"
        return [*self._ssh, *options, "-T", "-R", back, at.outside or at.inside, "--", self._watch()]

    def _watch(self) -> str:
        """`exec` is for whatever shell the user has there: sshd must be the parent of the one that watches."""
        return f"exec sh -c {shlex.quote(_WATCH % self._silent_s)}"

    def _forget_keys(self) -> None:
        """Of hosts that nobody will enter again; also those that a server before this one left."""
        needed = {each.id for each in self._slices() if each.state in _WITH_HOSTS}
        for path in self._directory.iterdir():
            if path.name.rpartition("-")[0] not in needed:
                path.unlink(missing_ok=True)

    def _keys(self, slice: Slice, index: int) -> Path:
        return self._directory / f"{slice.id}-{index}"

    async def _beat(self, pipe: asyncio.StreamWriter) -> None:
        """Tell the watch on the host that this server lives."""
        with contextlib.suppress(ConnectionError):  # ssh has ended, and says why itself
            while True:
                pipe.write(b".")
                await pipe.drain()
                await self._clock.sleep(self._silent_s / _BEATS)


class _Whereabouts:
    """Addresses of one slice's hosts: asked again when they are old, once for all of its hosts."""

    def __init__(self, slice: Slice, ask: Addresses, clock: Clock) -> None:
        self._slice = slice
        self._ask = ask
        self._clock = clock
        self._known: Sequence[Address] = ()
        self._asked_at: float | None = None
        self._lock = asyncio.Lock()

    async def of(self, index: int) -> Address | None:
        """None while the service does not know."""
        async with self._lock:
            now = self._clock.steady()
            if not self._known or self._asked_at is None or now - self._asked_at >= _ASK_S:
                self._asked_at = now
                try:
                    # An answer without hosts says nothing: a service may be stale, and ssh finds out what is true.
                    self._known = await self._ask(self._slice.id, self._slice.zone) or self._known
                except CapacityError as error:
                    logger.info("addresses of %s: %s; asking again", self._slice.id, error)
        return self._known[index] if index < len(self._known) else None


_REPLACED: Final = "it was replaced, or somebody is in between; nothing is sent to it"
_UNKNOWN: Final = "drop StrictHostKeyChecking=yes, and the first key that a new host shows is kept"
_REFUSED: Final = 'name user and key in tpu_vm.tunnel, such as "ssh -l USER -i KEY", and let the project know the key'
_BUSY: Final = f"the host ran no command within {_UP_S:g} s: look at its load and its shell's startup files (.bashrc)"
_TAKEN: Final = "another way holds it for a minute at most, or its sshd forbids it (AllowTcpForwarding)"
#: What ssh says, and what it means for whoever can mend it; `{}` is the line itself. The first that fits counts.
_MEANINGS: Final = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", f"the host shows another key than at first: {_REPLACED}"),
    (
        "and you have requested strict checking",
        f"the host's key is not known, and ssh is told to demand that: {_UNKNOWN}",
    ),
    ("Permission denied", f"the host refuses the key ({{}}): {_REFUSED}"),
    ("remote port forwarding failed", f"port {PORT} of the host cannot be had: {_TAKEN}"),
)


def plainly(said: str, code: int) -> str:
    """What ssh said at its end, as one line for whoever can mend it."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for mark, meaning in _MEANINGS:
        found = next((line for line in lines if mark in line), None)
        if found is not None:
            return meaning.format(found)
    return lines[-1] if lines else f"ssh ended with exit code {code}"


async def _hear(pipe: asyncio.StreamReader, up: asyncio.Future[bool]) -> None:
    """Tell whether the watch began; what startup files of a shell say before it is passed over.

    It is read to its end: a process whose output nobody takes does not end for asyncio.
    """
    said = b"\n"
    while piece := await pipe.read(_SAID_BYTES_MAX):
        said = said[-len(_UP) :] + piece
        if _UP in said and not up.done():
            up.set_result(True)
    if not up.done():
        up.set_result(False)


async def _last_words(pipe: asyncio.StreamReader) -> str:
    said = b""
    while piece := await pipe.read(_SAID_BYTES_MAX):
        said = (said + piece)[-_SAID_BYTES_MAX:]
    return said.decode("utf-8", "replace")


async def _reap(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ENDS_S):
            await process.wait()
    if process.returncode is None:
        process.kill()


def _has_hosts(slice: Slice) -> bool:
    return slice.provider_state == READY and slice.state in _WITH_HOSTS and slice.provider == "tpu_vm"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
