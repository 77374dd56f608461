"""Capacity `local`: a slice is a directory and one agent process per host, on this machine.

The controller calls it through `ports.capacity`; `tpu local` and the preempt route take slices away with it. All truth
is on disk and in /proc, so that a restarted server finds every slice again: the directory appears whole, with its
intent, before any agent starts; a deletion or preemption is written down before anything is killed. Agents run in
sessions of their own and outlive the server. `run` keeps them running as a service manager would, and ends what an
earlier server left half done. How many devices a host has is the agent's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from penstock.capacity import processes
from penstock.capacity.slice_files import STOPPING, Agent, Record, SliceFiles, is_name, last_line, remove
from penstock.domain.nouns import Slice
from penstock.ports.capacity import (
    DELETING,
    FAILED,
    PREEMPTED,
    READY,
    CapacityError,
    Listing,
    NameTaken,
    PermissionDenied,
    QuotaExceeded,
    Seen,
    Stockout,
    Transient,
)
from penstock.ports.clock import Clock

ZONE: Final = "local"
AGENT: Final = (sys.executable, "-P", "-m", "penstock.agent")
#: Hosts on one machine unless the operator says otherwise: 30 MB each before any payload.
HOSTS_MAX: Final = 16
#: Everything of a slice is gone this soon after SIGKILL, or something holds it in the kernel.
KILL_S: Final = 20.0
#: An agent that ends sooner than this did not really start.
QUICK_S: Final = 5.0
#: So many starts in a row that came to nothing: the slice is broken, not unlucky.
QUICK_ENDS_MAX: Final = 8
RESTART_FIRST_S: Final = 0.1
RESTART_MAX_S: Final = 5.0
#: After a slice could not be brought to what its record says (a full disk, say).
MEND_AGAIN_S: Final = 5.0

_PASSED: Final = frozenset({"PENSTOCK_HOME", "PENSTOCK_TRACEBACK"})

logger = logging.getLogger(__name__)
T = TypeVar("T")


class LocalCapacity:
    """Implements `ports.capacity.Capacity` under one directory; one server at a time may use it."""

    def __init__(
        self,
        slices: Path,
        *,
        label: str,
        clock: Clock,
        server: Callable[[], str],
        join_token: Callable[[str], str],
        changed: Callable[[], None] | None = None,
        command: Sequence[str] = AGENT,
        environment: Mapping[str, str] | None = None,
        hosts_max: int = HOSTS_MAX,
    ) -> None:
        """`server` says where agents find it; `changed` is called on the loop when a listing would look different."""
        self._files = SliceFiles(slices)
        self._label = label
        self._clock = clock
        self._server = server
        self._join_token = join_token
        self._changed = changed
        self._command = tuple(command)
        self._environment = agent_environment(os.environ if environment is None else environment)
        self._hosts_max = hosts_max
        self._making = threading.Lock()
        self._turns: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self._pauses: dict[tuple[str, int], _Pause] = {}  #: of hosts whose agent ended
        self._preempt_at: dict[str, float] = {}  #: steady time when a slice under notice is taken away
        self._watched: dict[int, int] = {}  #: pid of an agent -> handle that becomes readable when it ends
        self._stirred = asyncio.Event()

    @property
    def name(self) -> str:
        return "local"

    # --- the port ---
    async def create(self, wanted: Slice) -> Seen:
        seen = await asyncio.to_thread(self._create, wanted)
        self._stirred.set()
        return seen

    async def list(self, zone: str) -> Listing:
        if zone != ZONE:
            return Listing(zone=zone, slices=())
        return Listing(zone=zone, slices=tuple(await asyncio.to_thread(self._list)))

    async def get(self, name: str, zone: str) -> Seen | None:
        if zone != ZONE or not is_name(name):
            return None
        return await asyncio.to_thread(self._look, name)

    async def delete(self, name: str, zone: str) -> None:
        if zone == ZONE and is_name(name):
            await asyncio.to_thread(self._delete, name)
            self._tell()

    # --- what only this provider can do ---
    async def preempt(self, name: str, notice_s: float = 0.0) -> None:
        """Take a slice away as a cloud would: at once and without a word, or after a notice of so many seconds."""
        if await self.get(name, ZONE) is None:
            raise CapacityError(f"there is no local slice {name}")
        if notice_s > 0:
            await asyncio.to_thread(self._give_notice, name, notice_s)
            self._stirred.set()
            return
        await asyncio.to_thread(self._preempt, name)
        self._tell()

    async def restart_agent(self, name: str, host: int) -> None:
        """End the agent of a host, which may hang; `run` starts the next, which takes the payloads over."""
        await asyncio.to_thread(self._kill_agent, name, host)
        self._stirred.set()

    async def while_empty(self, work: Callable[[], T]) -> T | None:
        """Do something quick on a thread while there is no slice and none can be made; None when there are some."""

        def alone() -> T | None:
            with self._making:
                return None if self._files.names() else work()

        return await asyncio.to_thread(alone)

    async def run(self) -> None:
        """Until cancelled: start agents that ended, take away what is under notice, finish what was begun."""
        await asyncio.to_thread(self._files.remove_scraps)
        try:
            while True:
                self._stirred.clear()
                changed, wait_s = await asyncio.to_thread(self._mend_all)
                if changed:
                    self._tell()
                new, missed = await asyncio.to_thread(self._open_handles)
                for pid, handle in new:
                    self._watched[pid] = handle
                    asyncio.get_running_loop().add_reader(handle, self._ended, pid, handle)
                if missed:
                    self._stirred.set()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stirred.wait(), wait_s)
        finally:
            for handle in self._watched.values():
                asyncio.get_running_loop().remove_reader(handle)
                os.close(handle)
            self._watched.clear()

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed()

    def _ended(self, pid: int, handle: int) -> None:
        """An agent's handle became readable: it ended."""
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)
        del self._watched[pid]
        processes.collect((pid,))
        self._stirred.set()

    # --- on threads: looking ---
    def _list(self) -> Sequence[Seen]:
        return [seen for name in self._files.names() if (seen := self._look(name)) is not None]

    def _look(self, name: str) -> Seen | None:
        if not self._files.of(name).is_dir():
            return None
        record = self._files.record(name)
        if isinstance(record, str):
            # Whatever lies in our own directory is ours; what cannot be read can only be thrown away.
            return Seen(name=name, zone=ZONE, provider_id="unreadable", state=FAILED, label=self._label, detail=record)
        return Seen(
            name=name,
            zone=ZONE,
            provider_id=record.provider_id,
            state=READY if record.state == STOPPING else record.state,
            label=record.label,
            detail=record.detail,
        )

    # --- on threads: making ---
    def _create(self, wanted: Slice) -> Seen:
        if not is_name(wanted.id) or wanted.zone != ZONE or wanted.hosts < 1:
            raise PermissionDenied(f"slice {wanted.id!r} in zone {wanted.zone!r}: local slices are in zone {ZONE!r}")
        with self._making:
            if self._files.of(wanted.id).exists():
                raise NameTaken(wanted.id)
            self._check_room(wanted)
            record = Record(
                name=wanted.id,
                provider_id=f"local-{secrets.token_hex(6)}",
                label=self._label,
                team=wanted.team,
                accelerator=wanted.accelerator,
                hosts=wanted.hosts,
                created_at=self._clock.now(),
            )
            with _in_doubt(wanted.id):
                self._files.make(record, self._join_token(wanted.id))
        with self._turns[wanted.id], _in_doubt(wanted.id):
            # The keeper's loop, or a delete, may have come first.
            now = self._files.record(wanted.id)
            if isinstance(now, Record) and now.state == READY:
                self._mend(now)
        seen = self._look(wanted.id)
        if seen is None:
            raise Transient(f"slice {wanted.id} was deleted while it was made")
        return seen

    def _check_room(self, wanted: Slice) -> None:
        if wanted.hosts > self._hosts_max:
            raise QuotaExceeded(
                f"{wanted.accelerator} has {wanted.hosts} hosts; this machine may run {self._hosts_max} local hosts"
                " (raise local_hosts)"
            )
        used = sum(record.hosts for record in self._files.records() if record.state in (READY, STOPPING))
        if used + wanted.hosts > self._hosts_max:
            raise Stockout(
                f"this machine runs {used} local hosts of at most {self._hosts_max}; {wanted.hosts} more are needed"
                " (raise local_hosts)"
            )

    # --- on threads: keeping ---
    def _mend_all(self) -> tuple[bool, float | None]:
        """Bring every slice to what its record says: whether anything looks different, and when to come again."""
        changed = False
        waits: set[float] = set()
        for name in self._files.names():
            try:
                with self._turns[name]:
                    before = self._files.record(name)
                    if isinstance(before, Record):
                        waits |= self._bring(before)
                        changed = changed or self._files.record(name) != before
            except (CapacityError, OSError) as error:
                logger.warning("local slice %s: %s; trying again", name, error)
                waits.add(MEND_AGAIN_S)
        return changed, min(waits, default=None)

    def _bring(self, record: Record) -> set[float]:
        """One slice; answers after how many seconds it wants to be looked at again."""
        if record.state == STOPPING or self._notice_is_over(record):
            self._preempt(record.name)
            return set()
        if record.state != READY:
            return set()
        waits = {wait_s} if (wait_s := self._mend(record)) is not None else set()
        if record.name in self._preempt_at:
            waits.add(max(0.0, self._preempt_at[record.name] - self._clock.steady()))
        return waits

    def _notice_is_over(self, record: Record) -> bool:
        if record.state != READY or record.preempt_at is None:
            return False
        if record.name not in self._preempt_at:  # the notice was given by an earlier server
            left_s = max(0.0, record.preempt_at - self._clock.now())
            self._preempt_at[record.name] = self._clock.steady() + left_s
        return self._clock.steady() >= self._preempt_at[record.name]

    def _mend(self, record: Record) -> float | None:
        """Have an agent run on every host; how long to wait before the next try of one that will not stay."""
        waits = [wait_s for host in range(record.hosts) if (wait_s := self._mend_host(record, host)) is not None]
        return min(waits, default=None)

    def _mend_host(self, record: Record, host: int) -> float | None:
        key = (record.name, host)
        agent = self._files.agent(record.name, host)
        url = self._server()
        if agent is not None and agent.process.alive:
            if agent.server == url:
                return None
            # It talks to a server that is no more. The next agent takes its payloads over, as after a crash.
            processes.kill(agent.process, KILL_S)
            self._start(record, host, url, 0)
            return None
        if key not in self._pauses:
            self._pauses[key] = self._pause(agent)
        pause = self._pauses[key]
        if pause.quick_ends >= QUICK_ENDS_MAX:
            said = last_line(self._files.log(record.name, host))
            detail = f"the agent of host {host} ended at once {pause.quick_ends} times: {said}"
            self._files.save(msgspec.structs.replace(record, state=FAILED, detail=detail))
            return None
        wait_s = pause.until - self._clock.steady()
        if wait_s > 0:
            return wait_s
        del self._pauses[key]
        self._start(record, host, url, pause.quick_ends)
        return None

    def _pause(self, ended: Agent | None) -> _Pause:
        """How long to wait before the next start: not at all, unless the last one ended at once."""
        now = self._clock.steady()
        if ended is None or ended.process.boot != processes.boot() or ended.process.age_s >= QUICK_S:
            return _Pause(now, 0)
        wait_s = min(RESTART_MAX_S, RESTART_FIRST_S * 2.0**ended.quick_ends)
        return _Pause(now + wait_s, ended.quick_ends + 1)

    def _start(self, record: Record, host: int, url: str, quick_ends: int) -> None:
        state = self._files.host(record.name, host)
        # A server that died between a start and its record left an agent that no file names.
        for stray in processes.with_arguments("--state", str(state)):
            processes.kill(stray, KILL_S)
        argv = (
            *self._command,
            "--server", url, "--slice", record.name, "--host", str(host), "--provider-id", record.provider_id,
            "--state", str(state), "--token-file", str(self._files.token(record.name)),
        )  # fmt: skip
        try:
            state.mkdir(mode=0o700, exist_ok=True)
            started = processes.spawn(argv, self._files.log(record.name, host), self._environment)
        except OSError as error:
            detail = f"cannot start an agent: {error.strerror}"
            self._files.save(msgspec.structs.replace(record, state=FAILED, detail=detail))
            return
        self._files.save_agent(record.name, host, Agent(process=started, server=url, quick_ends=quick_ends))

    def _open_handles(self) -> tuple[Sequence[tuple[int, int]], bool]:
        """Handles of agents that nobody watches yet, by pid; and whether one ended before it could be watched."""
        new = []
        missed = False
        for record in self._files.records():
            for host in range(record.hosts if record.state == READY else 0):
                agent = self._files.agent(record.name, host)
                if agent is None or agent.process.pid in self._watched or (record.name, host) in self._pauses:
                    continue
                handle = processes.watch(agent.process)
                if handle is None:
                    missed = True
                else:
                    new.append((agent.process.pid, handle))
        return new, missed

    def _kill_agent(self, name: str, host: int) -> None:
        with self._turns[name], _in_doubt(name):
            agent = self._files.agent(name, host) if self._files.of(name).is_dir() else None
            if agent is not None and not processes.kill(agent.process, KILL_S):
                raise Transient(f"slice {name}: the agent of host {host} does not end after SIGKILL")

    # --- on threads: taking away ---
    def _give_notice(self, name: str, notice_s: float) -> None:
        with self._turns[name], _in_doubt(name):
            record = self._files.record(name)
            if isinstance(record, str) or record.state != READY:
                raise CapacityError(f"slice {name} is not running any more")
            self._preempt_at[name] = self._clock.steady() + notice_s
            self._files.save(msgspec.structs.replace(record, preempt_at=self._clock.now() + notice_s))
            self._files.write_notice(record, notice_s)

    def _preempt(self, name: str) -> None:
        with self._turns[name], _in_doubt(name):
            record = self._files.record(name)
            if isinstance(record, str):
                raise CapacityError(f"slice {name} is broken: {record}")
            if record.state not in (READY, STOPPING):
                return
            # Only when nothing runs any more may it be shown as taken: its successor starts at once.
            self._files.save(msgspec.structs.replace(record, state=STOPPING))
            self._end_all(name)
            detail = "taken away by `tpu local preempt`"
            self._files.save(msgspec.structs.replace(record, state=PREEMPTED, detail=detail))
            self._forget(name)

    def _delete(self, name: str) -> None:
        with self._turns[name], _in_doubt(name):
            if not self._files.of(name).is_dir():
                return
            record = self._files.record(name)
            if isinstance(record, Record):
                self._files.save(msgspec.structs.replace(record, state=DELETING))
            self._end_all(name)
            scrap = self._files.drop(name)
            self._forget(name)
        remove(scrap)
        self._turns.pop(name, None)

    def _end_all(self, name: str) -> None:
        roots = [agent.process for agent in self._files.agents(name)]
        left = processes.end(roots, self._files.of(name), KILL_S)
        if left:
            pids = ", ".join(str(process.pid) for process in left[:5])
            raise Transient(f"slice {name}: {len(left)} processes do not end after SIGKILL: {pids}")

    def _forget(self, name: str) -> None:
        self._preempt_at.pop(name, None)
        for key in [key for key in self._pauses if key[0] == name]:
            del self._pauses[key]


class _Pause(msgspec.Struct, frozen=True):
    """Until when, by the steady clock, a host is left without an agent, and how many ended at once so far."""

    until: float
    quick_ends: int


def agent_environment(own: Mapping[str, str]) -> dict[str, str]:
    """What agents inherit: not the server's own settings, which may hold a token or a database password."""
    return {name: value for name, value in own.items() if not name.startswith("PENSTOCK_") or name in _PASSED}


@contextlib.contextmanager
def _in_doubt(name: str) -> Iterator[None]:
    """What the disk refuses, in the port's words: whether it took effect is unknown, so the caller asks again."""
    try:
        yield
    except OSError as error:
        raise Transient(f"slice {name}: {error.filename or 'the disk'}: {error.strerror}") from error
