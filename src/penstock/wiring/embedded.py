"""The server of one machine in the background: found, started if none answers, stopped.

`tpu run` and `exec` call `ensure_server` before they talk, `tpu down` calls `stop_server`. Whoever starts holds a lock,
so two commands at once start one server; a `server.json` whose process is gone is put right. It must not stop what it
cannot prove to be our own server.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from select import select
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from penstock.capacity import processes
from penstock.capacity.slice_files import SliceFiles, last_line
from penstock.client.settings import home as home_of
from penstock.wiring.home import Home, ServerFile, Unusable, locked
from penstock.wiring.settings import load

#: A start takes a third of a second; a slow disk and a migration are allowed for.
START_S: Final = 30.0
#: A server that lives but does not answer is starting, draining or stuck: so long it gets.
SILENT_S: Final = 40.0
STOP_S: Final = 35.0  #: a drain takes 30 s at most
ASK_S: Final = 5.0
LOOK_EVERY_S: Final = 0.05
LOG_BYTES_MAX: Final = 16 << 20


def ensure_server(environment: Mapping[str, str] = os.environ) -> str:
    """The address of this machine's server, started if it does not run."""
    home = Home(home_of(environment).absolute())
    running = home.server()
    if running is not None and answers(running.url):
        return running.url
    load(environment)  # settings that are wrong are told here, not in a log
    home.prepare()
    with locked(home.path / "start.lock", wait=True):
        running = home.server()
        if running is not None and _comes_to_answer(home, running):
            return running.url
        home.withdraw()
        return _start(home, environment)


def answers(url: str) -> bool:
    """Whether a server says that it is well there; asked without a token."""
    address = urlsplit(url)
    if address.hostname is None:
        return False
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=ASK_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _comes_to_answer(home: Home, running: ServerFile) -> bool:
    """A server that lives is given time to answer; whether it did, or ended instead."""
    deadline = time.monotonic() + SILENT_S
    while not answers(running.url):
        if not running.process.alive:
            return False
        if time.monotonic() > deadline:
            raise Unusable(
                f"the server at {running.url} (pid {running.pid}) runs but does not answer; see {home.log},"
                " or end it with `tpu down --force`"
            )
        time.sleep(LOOK_EVERY_S)
    return True


def _start(home: Home, environment: Mapping[str, str]) -> str:
    if home.log.exists() and home.log.stat().st_size > LOG_BYTES_MAX:
        home.log.replace(home.log.with_suffix(".log.1"))
    reader, writer = os.pipe()
    log = os.open(home.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        # -P: the working directory of whoever starts it must not be searched for modules.
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "penstock.wiring", str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home.path,
            env={**environment, "PENSTOCK_HOME": str(home.path)},
            pass_fds=(writer,),
            start_new_session=True,
        )
    finally:
        os.close(writer)
        os.close(log)
    try:
        url = _read_line(reader, START_S)
    finally:
        os.close(reader)
    if url is None:
        # It ended, or it hangs: either way nobody may find half a server.
        child.kill()
        child.wait()
        other = home.server()  # `tpu serve` may have been quicker
        if other is not None and _comes_to_answer(home, other):
            return other.url
        raise Unusable(f"the server did not start: {last_line(home.log)}")
    # It is meant to outlive this process, which is no reason for a warning.
    child.returncode = 0
    return url


def _read_line(reader: int, within_s: float) -> str | None:
    deadline = time.monotonic() + within_s
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select([reader], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(reader, 4096) if ready else b""
        if not piece:
            return None
        line += piece
    return line.decode().strip()


class Stopped(NamedTuple):
    """What `tpu down` did: whether a server ran, and which slices keep running without it."""

    url: str | None
    running: tuple[str, ...] = ()
    ended: int = 0


def stop_server(environment: Mapping[str, str] = os.environ, *, force: bool = False, slices: bool = False) -> Stopped:
    """Stop this machine's server. Idle local slices end with it; ones in use only when `slices` is said.

    `force` kills a server that does not end in time: what it had acknowledged is in its store all the same.
    """
    home = Home(home_of(environment).absolute())
    running = home.server()
    busy = _busy_slices(home, running) if running is not None else None
    if running is not None:
        _end(running, force=force)
    home.withdraw()
    files = SliceFiles(home.slices)
    ended = 0
    kept = []
    for name in files.names():
        agents = [agent.process for agent in files.agents(name)]
        if not processes.belonging(agents, files.of(name)):
            continue
        # Without an answer nobody knows what is in use, and nothing that may be is ended.
        if slices or (busy is not None and name not in busy):
            processes.end(agents, files.of(name), STOP_S)
            ended += 1
        else:
            kept.append(name)
    return Stopped(running.url if running is not None else None, tuple(kept), ended)


def _end(running: ServerFile, *, force: bool) -> None:
    processes.send(running.process, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while running.process.alive:
        if time.monotonic() > deadline:
            if not force:
                raise Unusable(f"the server (pid {running.pid}) does not end; kill it with `tpu down --force`")
            processes.kill(running.process, STOP_S)
            return
        processes.collect((running.pid,))
        time.sleep(LOOK_EVERY_S)


class _SliceRow(msgspec.Struct):
    id: str
    attempt: str | None = None


class _SliceRows(msgspec.Struct):
    slices: list[_SliceRow]


def _busy_slices(home: Home, running: ServerFile) -> frozenset[str] | None:
    """The slices that run something; None when the server does not say."""
    address = urlsplit(running.url)
    if address.hostname is None:
        return None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=ASK_S)
    try:
        token = (home.path / "token").read_text("utf-8").strip()
        connection.request("GET", "/v1/slices", headers={"authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        if answer.status != 200:
            return None
        rows = msgspec.json.decode(answer.read(), type=_SliceRows).slices
    except (OSError, http.client.HTTPException, msgspec.MsgspecError):
        return None
    finally:
        connection.close()
    return frozenset(row.id for row in rows if row.attempt is not None)
