"""From the server's order to look after a host to the report: runs the checks beside everything else, once per order.

`loop` hands orders over as they come with syncs, perhaps several times. Checks run on a thread of their own, so that
syncs and payloads go on meanwhile. A report is sent again until the server takes it, or nobody can want it any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec

from penstock.agent.link import Refused, Silent
from penstock.domain import limits
from penstock.wire.solving import SolveOrder, SolveReport

if TYPE_CHECKING:
    from penstock.agent.host import Host
    from penstock.agent.surroundings import Surroundings

logger = logging.getLogger(__name__)

TELL_EVERY_S: Final = 2.0


class Mending:
    """At most one order under way."""

    def __init__(self, host: Host, running: Callable[[], frozenset[str]]) -> None:
        """`running` says which attempts have processes here."""
        self._host = host
        self._running = running
        self._run = ""
        self._task: asyncio.Task[None] | None = None

    def take(self, order: SolveOrder) -> None:
        """Begin, unless this order is known or another one is not done: the server repeats it."""
        if order.run == self._run or (self._task is not None and not self._task.done()):
            return
        self._run = order.run
        self._task = asyncio.create_task(self._solve(order, self._host.clock.steady()))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _solve(self, order: SolveOrder, came_at: float) -> None:
        from penstock.agent.solving import solve  # few hosts are ever asked

        attempts = self._running()
        around = surroundings(self._host, order, came_at, attempts)
        findings = await asyncio.to_thread(solve, around, dry_run=order.dry_run, busy=bool(attempts))
        for finding in findings:
            if finding.verdict != "well":
                logger.warning(
                    "solve: %s is %s: %s (%s)", finding.check, finding.verdict, finding.evidence, finding.fix
                )
        await self._tell(SolveReport(run=order.run, findings=findings))

    async def _tell(self, report: SolveReport) -> None:
        clock, body = self._host.clock, msgspec.json.encode(report)
        until = clock.steady() + limits.SOLVE_ANSWER_S
        while clock.steady() < until:
            try:
                await self._host.link.call("POST", "/v1/agent/solved", body)
            except Silent as silent:
                logger.info("the report waits: %s", silent)
                await clock.sleep(TELL_EVERY_S)
            except Refused as refused:
                logger.warning("nobody wants the report any more: %s", refused)
                return
            else:
                return


def surroundings(host: Host, order: SolveOrder, came_at: float, attempts: frozenset[str]) -> Surroundings:
    """This host, as the checks see it."""
    import sys  # here, as few hosts are ever asked
    import sysconfig

    from penstock.agent.reinstalling import reinstaller
    from penstock.agent.surroundings import Surroundings

    clock = host.clock
    ours_alone = order.ours_alone and bool(host.metadata)
    asked = (host.link.host_name, urlsplit(host.metadata).hostname or "")
    return Surroundings(
        state=host.state,
        cache=host.cache,
        ours_alone=ours_alone,
        attempts=attempts,
        server_now=order.now,
        came_at=came_at,
        mounts=order.mounts,
        names=tuple(name for name in asked if name and not _is_address(name)),
        packages=(Path(sysconfig.get_paths()["purelib"]),),
        reinstall=reinstaller(host, Path(sys.executable)) if ours_alone else None,
        now=clock.now,
        steady=clock.steady,
    )


def _is_address(name: str) -> bool:
    import ipaddress

    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
