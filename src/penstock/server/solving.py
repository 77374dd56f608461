"""`tpu solve` on the server: passes the order to every host of a slice, collects what they find, and gives up on some.

Hosts have no open port, so the order goes along with their syncs (`server.agents` asks here) and the answer comes as a
call of theirs. What no agent can tell, that it is dead, is seen here. A run is memory: when the server restarts, one
asks again. So is the count of runs that failed, which only delays what follows: a slice that cannot be mended is
drained, and the planner replaces it. It must not know what any check does.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Final

from penstock.controller.agents import NotLeading
from penstock.controller.jobs import NotFound
from penstock.controller.verbs import Outdated
from penstock.domain import limits
from penstock.domain.lifecycle import SliceState
from penstock.domain.mounts import as_attached
from penstock.domain.nouns import Principal, Role, Slice
from penstock.ports.capacity import CapacityError
from penstock.ports.store import StoreError
from penstock.server.fleets import SLICE_ID, find_slice
from penstock.server.routing import ID_PATTERN, Call, Parameter, Refusal, Route
from penstock.server.service import Service
from penstock.wire.solving import GOOD, Finding, HostFindings, SolveOrder, SolveReport, SolveRequest, SolveView

logger = logging.getLogger(__name__)
audit = logging.getLogger("penstock.audit")

AGENT: Final = "agent"  #: the check that is made here
REPEAT_S: Final = 10.0  #: an order whose answer does not come is given again: the reply may have been lost
WAIT_S_MAX: Final = 20.0
STOP_LOOK_S: Final = 1.0  #: whoever waits looks so often whether the server stops
_RUNS_KEPT: Final = 1_000
_FAILURES_KEPT: Final = 10_000
_SERVING: Final = (SliceState.READY, SliceState.DRAINING)


class _HostState:
    """One host in one run."""

    def __init__(self) -> None:
        self.given_at: float | None = None
        self.heard = False  #: since the order was given
        self.restarted = ""  #: what was done because it was silent
        self.answered = False
        self.findings: tuple[Finding, ...] = ()
        self.agent: Finding | None = None


class _Run:
    def __init__(self, id: str, slice: Slice, dry_run: bool, user: Principal) -> None:
        self.id = id
        self.slice = slice
        self.dry_run = dry_run
        self.user = user
        self.hosts = [_HostState() for _ in range(slice.hosts)]
        self.done = False
        self.failures = 0
        self.quarantined = ""
        self._waiting: set[asyncio.Event] = set()

    def stir(self) -> None:
        """Something changed: whoever waits looks again."""
        for each in self._waiting:
            each.set()

    async def until(self, true: Callable[[], bool], within_s: float) -> None:
        """Wait until something is true, at most so long."""
        stirred = asyncio.Event()
        self._waiting.add(stirred)
        try:
            async with asyncio.timeout(within_s):
                while not true():
                    await stirred.wait()
                    stirred.clear()
        except TimeoutError:
            return
        finally:
            self._waiting.discard(stirred)

    def view(self) -> SolveView:
        findings = [(*((host.agent,) if host.agent else ()), *host.findings) for host in self.hosts]
        return SolveView(
            run=self.id,
            slice=self.slice.id,
            dry_run=self.dry_run,
            done=self.done,
            well=self.done and all(each.verdict in GOOD for found in findings for each in found),
            hosts=tuple(HostFindings(host=index, findings=found) for index, found in enumerate(findings)),
            failures=self.failures,
            quarantined=self.quarantined,
        )


class Solvers:
    """All runs of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._runs: dict[str, _Run] = {}
        self._live: dict[str, _Run] = {}  #: by slice
        self._failures: dict[str, int] = {}  #: slice -> runs in a row that could not mend it
        self._tasks: set[asyncio.Task[None]] = set()
        self.ring: Callable[[str], None] | None = None  #: wakes the syncs that wait for orders of a slice

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # --- people ---
    def begin(self, slice: Slice, dry_run: bool, user: Principal) -> _Run:
        """A run of this slice: a new one, or the one that is under way if it is of the same kind."""
        live = self._live.get(slice.id)
        if live is not None:
            if live.dry_run != dry_run:
                raise Refusal(
                    "conflict", f"slice {slice.id} is being looked at already", advice="try again in a minute"
                )
            return live
        run = _Run(secrets.token_hex(8), slice, dry_run, user)
        self._runs[run.id] = self._live[slice.id] = run
        if len(self._runs) > _RUNS_KEPT:
            del self._runs[next(iter(self._runs))]
        task = asyncio.create_task(self._drive(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.ring is not None:
            self.ring(slice.id)
        return run

    def find(self, id: str) -> _Run | None:
        return self._runs.get(id)

    # --- hosts ---
    def due(self, slice: str, host: int) -> bool:
        """Whether an order waits for this host."""
        run = self._live.get(slice)
        if run is None or host >= len(run.hosts) or run.hosts[host].answered:
            return False
        given_at = run.hosts[host].given_at
        return given_at is None or self._service.clock.steady() - given_at >= REPEAT_S

    def take(self, slice: str, host: int) -> SolveOrder | None:
        """The order, to be sent now."""
        if not self.due(slice, host):
            return None
        run, clock = self._live[slice], self._service.clock
        run.hosts[host].given_at = clock.steady()
        pool = self._service.controller.snapshot.pools.get(run.slice.pool)
        made = run.slice.cloud
        # As the pool says now: it may have been changed since the slice was made. Disks are as they were attached then.
        wish = pool.cloud if pool is not None and not pool.deleted else made
        return SolveOrder(
            run=run.id,
            dry_run=run.dry_run,
            now=clock.now(),
            mounts=as_attached(wish.mounts, made.disks if made is not None else ()) if wish is not None else (),
            ours_alone=run.slice.provider != "local" and pool is not None and not pool.adopted,
        )

    def heard(self, slice: str, host: int) -> None:
        """A host syncs: if it was given an order before, it lives."""
        run = self._live.get(slice)
        if run is not None and host < len(run.hosts) and run.hosts[host].given_at is not None:
            run.hosts[host].heard = True
            run.stir()

    def report(self, slice: str, host: int, report: SolveReport) -> None:
        run = self._live.get(slice)
        if run is None or run.id != report.run or host >= len(run.hosts):
            raise Refusal("conflict", f"run {report.run}: is over, or not of slice {slice}")
        run.hosts[host].findings = report.findings
        run.hosts[host].answered = run.hosts[host].heard = True
        run.stir()

    # --- a run ---
    async def _drive(self, run: _Run) -> None:
        try:
            await run.until(lambda: all(host.heard for host in run.hosts), limits.SOLVE_HEARD_S)
            if not run.dry_run:
                await self._restart_silent(run)
            await run.until(lambda: all(host.answered or not host.heard for host in run.hosts), limits.SOLVE_ANSWER_S)
            for index, host in enumerate(run.hosts):
                host.agent = _agent_finding(host, index, run.dry_run)
            await self._judge(run)
        except Exception:
            logger.exception("solving slice %s failed", run.slice.id)
            raise
        finally:
            run.done = True
            self._live.pop(run.slice.id, None)
            run.stir()

    async def _restart_silent(self, run: _Run) -> None:
        silent = [(index, host) for index, host in enumerate(run.hosts) if not host.heard]
        if not silent:
            return
        restart = self._service.restart_agent
        for index, host in silent:
            try:
                if restart is None:
                    raise CapacityError("this server cannot restart agents of its provider")
                await restart(run.slice, index)
                host.restarted = "its agent was restarted"
                host.given_at = None  # the next one does not know of the order
            except (CapacityError, OSError) as error:
                host.restarted = str(error)
        await run.until(lambda: all(host.heard for _, host in silent), limits.SOLVE_RESTART_S)

    async def _judge(self, run: _Run) -> None:
        """Count failures, and give a slice up that cannot be mended."""
        if run.dry_run:
            return
        found = [(index, each) for index, host in enumerate(run.hosts) for each in (host.agent, *host.findings) if each]
        failed = [(index, each) for index, each in found if each.verdict in ("unfixed", "unknown")]
        if not failed:
            self._failures.pop(run.slice.id, None)
            return
        run.failures = self._failures[run.slice.id] = self._failures.get(run.slice.id, 0) + 1
        if len(self._failures) > _FAILURES_KEPT:
            del self._failures[next(iter(self._failures))]
        if run.failures < limits.SOLVE_FAILURES_MAX:
            return
        index, worst = failed[0]
        why = f"`tpu solve` failed {run.failures} times: host {index}, {worst.check}: {worst.evidence}"
        await self._quarantine(run, why)

    async def _quarantine(self, run: _Run, why: str) -> None:
        """Nothing more is placed there; what runs there ends first, then it is released and replaced."""
        try:
            await self._service.commands(run.user).replace_slice(run.slice.id, why, now=False)
        except (Outdated, StoreError) as error:
            logger.warning("slice %s cannot be given up now: %s", run.slice.id, error)
            return
        run.quarantined = why
        self._failures.pop(run.slice.id, None)
        audit.info("%s/%s gives slice %s up: %s", run.user.team, run.user.name, run.slice.id, why)


def _agent_finding(host: _HostState, index: int, dry_run: bool) -> Finding:
    if host.answered:
        if not host.restarted:
            return Finding(check=AGENT, verdict="well")
        return Finding(check=AGENT, verdict="fixed", evidence="it was silent", fix=host.restarted)
    if host.heard:
        said = f"the agent of host {index} lives and did not answer within {limits.SOLVE_ANSWER_S:.0f} s"
        return Finding(check=AGENT, verdict="unfixed", evidence=said, fix="see its log on the host")
    said = f"the agent of host {index} does not answer"
    if dry_run:
        return Finding(check=AGENT, verdict="found", evidence=said, fix="restart it")
    return Finding(check=AGENT, verdict="unfixed", evidence=said, fix=host.restarted)


def solvers(service: Service) -> Solvers:
    return service.part(Solvers)


# --- routes ---
async def solve(service: Service, call: Call) -> SolveView:
    """Look at every host of a slice, and mend what is wrong. Answers at once; ask again for what was found."""
    wanted = call.given(SolveRequest)
    if not service.controller.leading:
        raise NotLeading
    slice = await find_slice(service, call)
    if slice.state not in _SERVING:
        raise Refusal("conflict", f"id: slice {slice.id} is {slice.state.value}", field="id", advice="see `tpu slices`")
    kind = " (a dry run)" if wanted.dry_run else ""
    audit.info("%s/%s solves slice %s%s", call.user.team, call.user.name, slice.id, kind)
    return solvers(service).begin(slice, wanted.dry_run, call.user).view()


async def solved(service: Service, call: Call) -> SolveView:
    """How far a run is; with `wait`, when it is done or that time is over."""
    run = solvers(service).find(call.query["run"])
    if run is None or run.slice.id != call.params["id"] or call.walls not in (None, run.slice.team):
        raise NotFound("run", call.query["run"])
    until = service.clock.steady() + float(call.query.get("wait", "0"))
    while not (run.done or service.stopping.is_set()) and (rest := until - service.clock.steady()) > 0:
        await run.until(lambda: run.done, min(rest, STOP_LOOK_S))
    return run.view()


async def report(service: Service, call: Call) -> None:
    """What a host found, and what it mended."""
    solvers(service).report(call.agent.slice, call.agent.host, call.given(SolveReport))


ROUTES: Final = (
    Route(
        "POST",
        "/v1/slices/{id}/solve",
        solve,
        takes=SolveRequest,
        gives=SolveView,
        role=Role.ADMIN,
        body_optional=True,
        path_rules=SLICE_ID,
    ),
    Route(
        "GET",
        "/v1/slices/{id}/solve",
        solved,
        gives=SolveView,
        role=Role.ADMIN,
        path_rules=SLICE_ID,
        query=(
            Parameter("run", "The run that was answered.", required=True, pattern=ID_PATTERN),
            Parameter("wait", "Seconds to wait until it is done.", "number", least=0, most=WAIT_S_MAX),
        ),
    ),
    Route("POST", "/v1/agent/solved", report, takes=SolveReport, role=Role.AGENT, status=204),
)
