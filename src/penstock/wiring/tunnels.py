"""Ways to this server for hosts that have none: an ssh to each host, with a port there that leads back here.

`wiring.cloud` runs it when `[tpu_vm] tunnel` names an ssh command. The startup script of a host, and its agent, then
talk to a port of the host itself. The system's ssh is used, as people use it: it knows keys, jump hosts and proxies,
and costs no dependency. Which slices there are is asked again and again; a way that breaks is made anew, at growing
distances. It must not decide anything about slices, nor start anything on hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final
from urllib.parse import urlsplit

from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Slice
from penstock.ports.capacity import READY, Address, CapacityError
from penstock.ports.clock import Clock

logger = logging.getLogger(__name__)

PORT: Final = 7353  #: of each host, on its loopback alone
_LOOK_S: Final = 1.0
_AGAIN_FIRST_S, _AGAIN_MAX_S = 1.0, 10.0  #: a host asks for its bundle for half a minute before it gives up
_STOOD_S: Final = 60.0  #: a way that stood for so long was a good one
_ENDS_S: Final = 5.0
_WITH_HOSTS: Final = (SliceState.CREATING, SliceState.READY, SliceState.DRAINING)


class Tunnels:
    """One ssh per host of every slice that there is."""

    def __init__(
        self,
        command: str,
        server: str,
        *,
        clock: Clock,
        slices: Callable[[], Iterable[Slice]],
        addresses: Callable[[str, str], Awaitable[Sequence[Address]]],
    ) -> None:
        """`command` is ssh with its options; `server` is this server's address on its own machine."""
        parts = urlsplit(server)
        # With a server that is killed its tunnels must end too: its successor needs their ports.
        mortal = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        self._ssh = [*mortal, *shlex.split(command)]
        self._back = f"127.0.0.1:{PORT}:{_bracketed(parts.hostname or '')}:{parts.port or 80}"
        self._clock = clock
        self._slices = slices
        self._addresses = addresses
        self._ways: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled: a task for each slice whose machine exists, and none for others."""
        try:
            while True:
                wanted = {each.id: each for each in self._slices() if _has_hosts(each)}
                for id in [id for id in self._ways if id not in wanted]:
                    await self._end([self._ways.pop(id)])
                for id, slice in wanted.items():
                    if id not in self._ways:
                        self._ways[id] = asyncio.create_task(self._serve(slice))
                await self._clock.sleep(_LOOK_S)
        finally:
            await self._end(list(self._ways.values()))

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, slice: Slice) -> None:
        """The ways of one slice, once its hosts have addresses."""
        again_s = _AGAIN_FIRST_S
        while True:
            try:
                found = await self._addresses(slice.id, slice.zone)
            except CapacityError as error:
                logger.info("tunnels to %s: %s; asking again", slice.id, error)
                found = ()
            if found:
                break
            await self._clock.sleep(again_s)
            again_s = min(2 * again_s, _AGAIN_MAX_S)
        async with asyncio.TaskGroup() as hosts:
            for index, at in enumerate(found):
                hosts.create_task(self._keep(f"{slice.id}-{index}", at.outside or at.inside))

    async def _keep(self, name: str, address: str) -> None:
        again_s = _AGAIN_FIRST_S
        while True:
            began = self._clock.steady()
            said = await self._stand(name, address)
            if self._clock.steady() - began >= _STOOD_S:
                again_s = _AGAIN_FIRST_S
            logger.info("tunnel to %s at %s ended: %s; again in %.0f s", name, address, said, again_s)
            await self._clock.sleep(again_s)
            again_s = min(2 * again_s, _AGAIN_MAX_S)

    async def _stand(self, name: str, address: str) -> str:
        """One ssh, until it ends; what it said last."""
        settings = (
            "BatchMode=yes",
            "ExitOnForwardFailure=yes",
            "ServerAliveInterval=10",
            "ServerAliveCountMax=3",
            "ConnectTimeout=20",
            # The key belongs to the slice, whose name is never used twice, not to an address that others had before.
            f"HostKeyAlias=penstock-{name}",
            "CheckHostIP=no",
            "StrictHostKeyChecking=accept-new",
        )
        words = [*self._ssh, *(word for pair in settings for word in ("-o", pair)), "-N", "-R", self._back, address]
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        except OSError as error:
            return f"{self._ssh[0]} cannot be run: {error}"
        try:
            _, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.terminate()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ENDS_S):
                        await process.wait()
                if process.returncode is None:
                    process.kill()
        lines = err.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {process.returncode}"


def _has_hosts(slice: Slice) -> bool:
    return slice.provider_state == READY and slice.state in _WITH_HOSTS and slice.provider == "tpu_vm"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
