"""From an order to running processes: fetch what to run, make its directories, set its environment up, start it.

`course` calls `prepare` and then `start`; between the two it may still be stopped without a trace. Only here do secrets
pass through the agent: from the launch specification into the payload's environment and the keeper's list of what to
hide, never to a file. It must not decide what the end of a payload means.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.agent import cgroups, homes, restoring
from penstock.agent.hiding import forms
from penstock.agent.host import Host
from penstock.agent.layout import STREAMS, Layout, environment, lay_out
from penstock.agent.link import BYTES_S, Refused, Silent
from penstock.agent.tree import Ended, Handle, Limits, StartError, Tree, memory_for, stream_order
from penstock.wire.agent import LaunchSpec
from penstock.wire.api import ErrorView, SnippetRequest

if TYPE_CHECKING:
    from penstock.agent import environment as environments
    from penstock.agent.sandbox import Walls

logger = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_MAX_S = 0.1, 5.0


class Running(Protocol):
    """A payload's processes: a `Tree`, or what `warm` gives for a snippet."""

    exit: Ended | None

    @property
    def pid(self) -> int: ...
    @property
    def started(self) -> int | None: ...
    @property
    def handle(self) -> Handle | None: ...
    def terminate(self) -> bool: ...
    def dump(self) -> list[int]: ...
    async def kill(self) -> bool: ...
    async def wait(self) -> Ended: ...
    def close(self) -> None: ...


class NotStarted(Exception):
    """The payload will not run: the agent's word for it (None: the payload's own fault), and what to tell people."""

    def __init__(self, error: ErrorView, *, agent: str | None = None, code: int | None = None) -> None:
        super().__init__(error.message)
        self.error, self.agent, self.code = error, agent, code


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Everything is there; one more step and the payload runs."""

    spec: LaunchSpec
    layout: Layout
    argv: tuple[str, ...]
    env: dict[str, str]
    bounds: Limits

    @property
    def shared(self) -> bool:
        """It runs in an interpreter that serves many, and holds the accelerators for all of them."""
        return isinstance(self.spec.payload, SnippetRequest) and self.spec.payload.isolation == "inline"


async def prepare(
    host: Host, attempt: str, given: LaunchSpec | None = None, say: Callable[[str], None] = logger.info
) -> Prepared:
    """All that can be done before the payload starts. May be cancelled, and repeated by the next agent.

    `say` takes lines for the payload's log.
    """
    spec = given if given is not None and given.attempt == attempt else await fetch(host, attempt)
    layout = lay_out(host.state, host.root, spec)
    try:
        layout.make(used=homes.take(layout, host.spares))
    except OSError as error:
        raise NotStarted(
            _told("HostFault", f"the directories of the attempt: {error}"), agent="launch_failed"
        ) from error
    if spec.restore and host.root is None:
        layout = msgspec.structs.replace(layout, restore=await _bring(host, spec, layout, say))
    if (spec.restore or spec.fence > 1) and host.root is None:
        await restoring.bring_compiled(host.link, spec.attempt, spec.rank, Path(layout.jax_cache))
    deadline = host.clock.now() + spec.timeout_s
    env = environment(spec, layout, host.env, devices=host.gate.real, deadline=deadline, cloud=bool(host.metadata))
    bounds = Limits(memory_bytes=memory_for(spec.memory_bytes))
    if isinstance(spec.payload, SnippetRequest):
        if spec.payload.setup.strip():
            env = await _set_up(host, spec, layout, env, bounds)
        return Prepared(spec=spec, layout=layout, argv=(), env=env, bounds=bounds)
    walls = await asyncio.to_thread(_probe)
    env = await _set_up(host, spec, layout, env, bounds)
    from penstock.agent import sandbox

    argv, env = sandbox.wrap(spec.payload.argv, env, layout, walls)
    if walls.bubblewrap is not None:
        # A shell tells a missing program (127) from one that cannot be run (126); bubblewrap says 1 to both.
        end = argv.index("--") + 1
        argv[end:end] = ["/bin/sh", "-c", 'exec "$0" "$@"']
    return Prepared(spec=spec, layout=layout, argv=tuple(argv), env=env, bounds=bounds)


async def start(host: Host, ready: Prepared, begun: Callable[[Handle], None]) -> Running:
    """Start it. Must not be cancelled: whoever wants it stopped stops what this gives back. Raises `NotStarted`.

    `begun` is told the processes of a snippet before they get the word to go; a command's are found by their shim.
    """
    spec, layout = ready.spec, ready.layout
    streams = {name: layout.stream(name) for name in STREAMS}
    hidden = forms(spec.secrets.values())
    try:
        if isinstance(spec.payload, SnippetRequest):
            order = stream_order(streams, hidden, ready.bounds)
            fds = await host.keeping.open_streams(spec.attempt, order)
            try:
                return await host.warm.run(spec, layout, *fds, env=ready.env, bounds=ready.bounds, begun=begun)
            finally:
                for fd in fds:
                    os.close(fd)
        group = group_of(host, spec.attempt, ready.bounds)
        return await Tree.start(
            host.keeping,
            ready.argv,
            env=ready.env,
            cwd=layout.work,
            folder=layout.home,
            streams=streams,
            hidden=hidden,
            bounds=ready.bounds,
            group=group,
        )
    except (StartError, OSError) as error:
        raise NotStarted(_told("HostFault", str(error)), agent="launch_failed") from error


def group_of(host: Host, attempt: str, bounds: Limits) -> cgroups.Group | None:
    """The control group of an attempt, and a note of it for whoever has to end this host."""
    group = cgroups.make(_probe().groups, f"{host.place.slice}-{host.place.host}-{attempt}-{host.mark}")
    if group is not None:
        group.limit(memory_bytes=bounds.memory_bytes, tasks=bounds.tasks)
        home = host.state / "attempts" / attempt
        home.mkdir(parents=True, exist_ok=True)
        (home / "group.json").write_text(json.dumps(group.folders))
    return group


async def fetch(host: Host, attempt: str) -> LaunchSpec:
    rest_s = RETRY_FIRST_S
    while True:
        try:
            return await host.link.ask("GET", f"/v1/agent/attempts/{attempt}/launch", None, LaunchSpec)
        except Refused as refused:
            if refused.problem.code == "conflict":  # such as a secret that nobody set
                told = "; ".join(filter(None, (refused.problem.detail, refused.problem.advice)))
                raise NotStarted(_told("LaunchRefused", told), code=1) from refused
            if refused.status != 401:  # the credential is being renewed
                raise NotStarted(_told("LaunchRefused", str(refused)), agent="launch_failed") from refused
        except Silent:
            rest_s = min(2 * rest_s, RETRY_MAX_S)
        await asyncio.sleep(rest_s)


async def _bring(host: Host, spec: LaunchSpec, layout: Layout, say: Callable[[str], None]) -> str | None:
    """The newest whole checkpoint of an earlier attempt, from the bucket to this disk."""
    try:
        brought = await restoring.restore(host.link, spec.attempt, spec.rank, layout.restored, say)
    except (restoring.Unreadable, Refused) as error:
        raise NotStarted(_told("HostFault", str(error)), agent="launch_failed") from error
    return None if brought is None else str(brought)


async def _download(host: Host, path: str) -> bytes:
    rest_s = RETRY_FIRST_S
    while True:
        try:
            return await host.link.call("GET", path, timeout_s=BYTES_S)
        except Silent:
            await asyncio.sleep(rest_s)
            rest_s = min(2 * rest_s, RETRY_MAX_S)


async def _set_up(host: Host, spec: LaunchSpec, layout: Layout, env: dict[str, str], bounds: Limits) -> dict[str, str]:
    """The working directory from its snapshot, and the environment the command wants; what it prints is in the log."""
    from penstock.agent.environment import HostFault, SetupFailed
    from penstock.agent.environment import prepare as set_up
    from penstock.objects.manifest import BadSnapshot

    key = f"{spec.attempt}/setup"
    order = stream_order({"log": layout.stream("log")}, forms(spec.secrets.values()), bounds)
    fds: list[int] = []

    def heard(data: bytes) -> None:
        """Set-ups without output open nothing."""
        if not fds:
            fds.extend(host.keeping.streams(key, order))
        os.write(fds[0], data)

    try:
        prepared = await set_up(
            spec,
            lambda id: _download(host, f"/v1/blobs/{id}"),
            lambda id: _download(host, f"/v1/snapshots/{id}"),
            layout,
            cache=host.cache,
            output=heard,
            run=_behind_walls(layout),
        )
    except SetupFailed as failed:
        raise NotStarted(
            ErrorView(type="SetupFailed", message=str(failed), traceback=failed.tail), code=failed.exit_code or 1
        ) from failed
    except BadSnapshot as error:
        raise NotStarted(_told("BadSnapshot", str(error)), code=1) from error
    except Refused as refused:
        if refused.status != 404:
            raise NotStarted(_told("HostFault", str(refused)), agent="launch_failed") from refused
        told = (
            f"its files are not on the server any more ({refused.problem.detail}); submit it again from its directory"
        )
        raise NotStarted(_told("SnapshotGone", told), code=1) from refused
    except HostFault as error:
        raise NotStarted(_told("HostFault", str(error)), agent="launch_failed") from error
    finally:
        for fd in fds:
            os.close(fd)
        if fds:
            await asyncio.shield(asyncio.to_thread(host.keeping.drain, key))
    return prepared.onto(env)


def _behind_walls(layout: Layout) -> environments.Run:
    """A set-up runs the user's code: it gets the walls of the payload, and may write its environment."""
    from penstock.agent import sandbox
    from penstock.agent.environment import run_step

    async def run(step: environments.Step, output: environments.Output) -> int:
        walls = _probe()
        if walls.bubblewrap is not None:
            for folder in step.writable:
                folder.mkdir(parents=True, exist_ok=True)
            hidden = sandbox.hidden_places(layout.home.parents[1])
            inside = sandbox.Inside(
                temporary=layout.temporary,
                hidden=hidden,
                readable=sandbox.needed(hidden, step.argv[0], step.env),
                writable=(*layout.writable, *step.writable),
            )
            argv = (*sandbox.enclose(walls.bubblewrap, inside), "--chdir", str(step.cwd), "--", *step.argv)
            step = msgspec.structs.replace(step, argv=argv)
        return await run_step(step, output)

    return run


def _probe() -> Walls:
    from penstock.agent import sandbox

    return sandbox.probe()


def _told(kind: str, message: str) -> ErrorView:
    return ErrorView(type=kind, message=message)
