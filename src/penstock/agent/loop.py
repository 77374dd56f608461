"""The agent's own loop: join, sync, obey, keep custody while the server is silent, pass a notice on, leave.

`__main__` runs one per host. It does what `sim.agents.Agent` does, with real processes: that model is the specification
and is tested against the whole control plane. One sync waits on the server for orders; news of this host goes beside it
at once. Custody is decided from this host's own steady clock and the fence objects alone. It must not know how payloads
are run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from pathlib import Path

import msgspec

from penstock.agent import record
from penstock.agent.course import Course
from penstock.agent.host import Host
from penstock.agent.link import Refused, Silent
from penstock.agent.mending import Mending
from penstock.agent.processes import started_at
from penstock.agent.record import Kept
from penstock.domain import limits
from penstock.domain.custody import Keep, Launch, Phase, SyncReply, SyncRequest, custody, fence_path
from penstock.ports.objects import ObjectsError
from penstock.wire.agent import AgentSync, Join, Joined, LaunchSpec, Orders

logger = logging.getLogger(__name__)

ANSWER_S = 10.0  #: beyond the time a sync may wait: then the server is silent
RETRY_FIRST_S = 0.1
NOTICE_POLL_S = 0.2
#: After an order to launch, for a short payload to end: then one sync tells of its start and its end, and brings the
#: next order. Orders to stop it wait no longer than this.
LINGER_S = 0.1


class Unjoined(Exception):
    """The server will not have this host, and the host holds nothing: there is nothing left to do."""


class Agent:
    """One host's agent."""

    def __init__(self, host: Host, token: str) -> None:
        self._host = host
        self._token = token
        self._courses: dict[str, Course] = {}
        self._leaving: set[Course] = set()  #: forgotten, with logs on their way
        self._notice = False
        self._mending = Mending(host, self._running)
        self._ended = asyncio.Event()
        self._news = asyncio.Event()
        self._waiting = asyncio.Event()  #: a sync waits on the server
        self._server_at = self._bucket_at = host.clock.steady()
        self._fences_at = float("-inf")

    async def run(self) -> None:
        """Until unwelcome, or cancelled: then payloads go on without it."""
        self._announce()
        self._find_record()
        self._load_credential()
        parts = [self._sync_for_ever(), self._tell(), self._watch_notice(), self._until_unwelcome()]
        if self._host.metadata:
            parts.append(self._watch_metadata())
        tasks = [asyncio.create_task(each) for each in parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._leave()

    async def _until_unwelcome(self) -> None:
        await self._ended.wait()

    async def _leave(self) -> None:
        self._mending.close()
        for course in (*self._courses.values(), *self._leaving):
            course.close()
        if self._ended.is_set():  # otherwise keeper and warm parents serve the next agent's adoption, as after a crash
            await self._host.close()
            await asyncio.to_thread(self._host.keeping.quit)
        self._host.link.close()

    def _running(self) -> frozenset[str]:
        return frozenset(attempt for attempt, course in self._courses.items() if course.alive)

    def poke(self) -> None:
        """There is news here: sync now."""
        self._news.set()

    # --- beginning ---
    def _announce(self) -> None:
        me = {"pid": os.getpid(), "started": started_at(os.getpid()), "incarnation": self._host.record.incarnation}
        record.save(self._host.state / "agent.json", json.dumps(me).encode(), sync=False)

    def _find_record(self) -> None:
        """Take over what an earlier agent held. After a reboot its processes are lost."""
        kept = self._host.record
        self._host.journal.replay(kept)
        boot = record.boot_id()
        rebooted, kept.boot = kept.boot not in ("", boot), boot
        for attempt, each in list(kept.held.items()):
            course = Course(self._host, each, self.poke)
            if rebooted:
                course.lose()
            if each.forgotten:
                self._leaving.add(course)
            else:
                self._courses[attempt] = course
            course.begin()
        self._host.save_for_good()

    @property
    def _credential_file(self) -> Path:
        return self._host.state / "credential.json"

    def _load_credential(self) -> None:
        with contextlib.suppress(OSError, msgspec.DecodeError):  # none yet, or a torn one: then we join again
            self._take(msgspec.json.decode(self._credential_file.read_bytes(), type=Joined))

    def _take(self, joined: Joined) -> None:
        self._host.link.credential, self._host.root = joined.credential, joined.root
        if self._host.token_file is not None:
            # It is spent, or about to be, and payloads have no business with it.
            self._host.token_file.unlink(missing_ok=True)

    async def _join(self) -> None:
        place = self._host.place
        wanted = Join(
            slice=place.slice,
            host=place.host,
            provider_id=place.provider_id,
            incarnation=self._host.record.incarnation,
            token=self._token,
        )
        joined = await self._host.link.ask("POST", "/v1/agent/join", wanted, Joined)
        # For good: the token serves once, so that after a power cut there would be no other way back.
        record.save(self._credential_file, msgspec.json.encode(joined), sync=True)
        self._take(joined)

    # --- syncing ---
    async def _sync_for_ever(self) -> None:
        """One sync after another, each waiting on the server for orders."""
        rest_s = RETRY_FIRST_S
        refused_since: float | None = None
        while True:
            try:
                if not self._host.link.credential:
                    await self._join()
                self._news.clear()
                self._waiting.set()
                launched = await self._sync(limits.SYNC_S)
                self._waiting.clear()
                rest_s, refused_since = RETRY_FIRST_S, None
                if launched:
                    await self._linger()
                continue
            except Silent as silent:
                logger.info("the server is silent: %s", silent)
            except Refused as refused:
                logger.warning("the server refuses: %s", refused)
                if self._host.link.credential:
                    self._host.link.credential = ""  # perhaps it was never this server's: then joining helps
                else:
                    self._load_credential()  # the token serves once: what it got us is all there is
                now = self._host.clock.steady()
                refused_since = now if refused_since is None else refused_since
                if not self._courses and now - refused_since >= limits.JOIN_TIMEOUT_S:
                    raise Unjoined(str(refused)) from refused
            self._waiting.clear()
            await self._keep_custody()
            await self._rest(rest_s)
            rest_s = min(2 * rest_s, limits.SYNC_S)

    async def _tell(self) -> None:
        """News goes at once, beside the sync that waits. When none waits, the next one carries it."""
        while True:
            await self._waiting.wait()
            await self._news.wait()
            if self._waiting.is_set():
                self._news.clear()
                with contextlib.suppress(Silent, Refused):  # the waiting sync meets the same, and deals with it
                    await self._sync(0.0)

    async def _linger(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._news.wait()

    async def _sync(self, wait_s: float) -> bool:
        """Tell and obey; whether that began anything."""
        progress = {name: said for name, course in self._courses.items() if (said := course.progress) is not None}
        saved = {name: ago_s for name, course in self._courses.items() if (ago_s := course.saved_ago_s) is not None}
        sent = AgentSync(
            request=self._request(), wait_s=wait_s, progress=progress, saved=saved, address=self._host.address
        )
        reply = await self._host.link.ask("POST", "/v1/agent/sync", sent, Orders, timeout_s=wait_s + ANSWER_S)
        self._server_at = self._bucket_at = self._host.clock.steady()
        await self._obey(reply, reply.spec)
        if reply.solve is not None and reply.welcome:
            self._mending.take(reply.solve)
        return reply.launch is not None

    def _request(self) -> SyncRequest:
        place = self._host.place
        return SyncRequest(
            slice=place.slice,
            provider_id=place.provider_id,
            host=place.host,
            incarnation=self._host.record.incarnation,
            held=tuple(course.report() for course in self._courses.values()),
            notice=self._notice,
        )

    async def _rest(self, seconds: float) -> None:
        await self._host.clock.sleep(seconds)

    # --- obeying ---
    async def _obey(self, reply: SyncReply, spec: LaunchSpec | None = None) -> None:
        if not reply.welcome:
            logger.warning("not welcome any more: %s", reply.why)
            await self._kill_everything()
            self._ended.set()
            return
        for attempt in reply.forget:
            if attempt in self._courses and self._courses[attempt].kept.phase is Phase.EXITED:
                course = self._courses.pop(attempt)
                self._leaving.add(course)
                course.forget()
        for attempt in reply.stop:
            if attempt in self._courses:
                self._courses[attempt].stop(grace_s=limits.GANG_GRACE_S if attempt in reply.broken else None)
        for attempt in reply.kill:
            if attempt in self._courses:
                self._courses[attempt].kill()
        self._leaving = {course for course in self._leaving if not course.cleared}
        if reply.launch is not None:
            self._launch(reply.launch, spec)

    def _launch(self, order: Launch, spec: LaunchSpec | None = None) -> None:
        kept = self._host.record
        if order.attempt in kept.held or order.fence <= kept.fence(order.job, order.replica):
            return
        kept.raise_fence(order.job, order.replica, order.fence)
        busy = any(course.alive for course in self._courses.values())
        held = kept.held[order.attempt] = Kept(launch=order)
        course = self._courses[order.attempt] = Course(self._host, held, self.poke, spec)
        if busy:
            course.refuse("device_busy")
        elif self._notice:
            course.stop(notice=True)
        course.begin()

    async def _kill_everything(self) -> None:
        courses = [*self._courses.values()]
        for course in courses:
            course.kill()
        if courses:
            await asyncio.wait([asyncio.create_task(course.gone()) for course in courses], timeout=limits.KILL_S)

    # --- on its own ---
    async def _keep_custody(self) -> None:
        """The server is silent: go on only while the bucket says that the fence is still this attempt's."""
        clock = self._host.clock
        alive = [course for course in self._courses.values() if course.kept.phase is not Phase.EXITED]
        if not alive or clock.steady() - self._fences_at < limits.FENCE_POLL_S:
            return
        self._fences_at = clock.steady()
        for course in alive:
            launch = course.kept.launch
            seen = None
            try:
                path = fence_path(launch.job, launch.replica)
                stored = await self._host.fence_object(path, course.kept.fence_url)
            except ObjectsError as error:
                logger.info("the bucket is silent: %s", error)
            else:
                self._bucket_at = clock.steady()
                seen = int(stored) if stored is not None else None
            now = clock.steady()
            if custody(launch.fence, seen, now - self._server_at, now - self._bucket_at) is Keep.STOP:
                logger.warning("attempt %s: custody is lost (fence seen: %s)", launch.attempt, seen)
                course.kill(agent="process_lost")

    async def _watch_notice(self) -> None:
        """The platform's notice is a file in the state directory with a number of seconds in it."""
        path = self._host.state / "notice"
        while not await asyncio.to_thread(path.exists):
            await self._host.clock.sleep(NOTICE_POLL_S)
        try:
            seconds = float(path.read_text().strip() or limits.GRACE_S)
        except ValueError:
            seconds = limits.GRACE_S
        self._take_notice("a notice", seconds)
        await asyncio.Event().wait()

    async def _watch_metadata(self) -> None:
        """The same on a cloud's machine: its metadata server tells."""
        from penstock.agent.metadata import address, watch

        async def find_address() -> None:
            self._host.address = await address(self._host.metadata, self._host.clock)
            self.poke()

        await asyncio.gather(find_address(), watch(self._host.metadata, self._host.clock, self._take_notice))

    def _take_notice(self, said: str, seconds: float) -> None:
        logger.warning("%s: the platform takes this host away in %g s", said, seconds)
        self._notice = True
        for course in self._courses.values():
            # A fifth of the time is kept, so that the end and the logs of whoever saves to the last are still told.
            course.stop(notice=True, grace_s=max(1.0, 0.8 * seconds))
        self.poke()
