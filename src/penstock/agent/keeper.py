"""Holds payloads while the agent may die: starts them, takes their output into files, writes down how they ended.

One small process per host with the standard library alone, so that it starts in 30 ms and needs 10 MB.
`agent.tree` and `agent.spool` speak to it over a socket in the agent's state directory. For each command it forks a
*shim*: subreaper of the payload and all its children, however they detach; it kills what is left when the first process
ends and then writes `exit.json`. For snippets, whose parent is a warm interpreter, it only keeps the pipes. It decides
nothing about jobs and must never block on a payload: past the cap, or without disk, bytes are dropped and marked.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Mapping

from penstock.agent.processes import kill_all, reap, started_at
from penstock.agent.pump import DRAIN_S, Pump, pump_of

FDS_MAX = 1 << 20
REQUEST_S = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


# --- one payload ---


def write_json(path: str, content: Mapping[str, object], *, exclusive: bool = False, sync: bool = False) -> None:
    """Whole or not at all; `exclusive` refuses to replace, `sync` holds through a power cut too."""
    temporary = f"{path}.{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, json.dumps(content).encode())
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
    if exclusive:
        try:
            os.link(temporary, path)
        finally:
            os.unlink(temporary)  # noqa: PTH108 (a shim has no pathlib)
    else:
        os.replace(temporary, path)  # noqa: PTH105


def _become_payload(order: dict[str, object], fds: list[int], failed: int) -> None:
    """In the forked child: never returns."""
    argv, env = order["argv"], order["env"]
    stage, code = "prepare", 127
    try:
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for file in order["groups"]:  # type: ignore[attr-defined]
            with open(file, "w") as procs:  # noqa: PTH123
                procs.write("0")
        for name, value in order["limits"].items():  # type: ignore[attr-defined]
            which = getattr(resource, name)
            most = resource.getrlimit(which)[1]
            wanted = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(which, (wanted, wanted))
        _prefer_to_kill(500)
        for number in range(1, signal.NSIG):
            if signal.getsignal(number) not in (signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
        os.umask(0o022)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, fd in enumerate([null, *fds[:2]]):
            os.dup2(fd, target)
        os.chdir(order["cwd"])  # type: ignore[arg-type]
        os.closerange(3, failed)
        os.closerange(failed + 1, FDS_MAX)
        stage = "exec"
        os.execvpe(argv[0], argv, env)  # type: ignore[index,arg-type]
    except OSError as error:
        code = 126 if error.errno in (errno.EACCES, errno.ENOEXEC) else 127
        os.write(failed, json.dumps([stage, error.strerror, os.fsdecode(error.filename or "")]).encode())
    finally:
        os._exit(code)


def _prefer_to_kill(score: int) -> None:
    """When memory runs out, payloads go first and keepers last. Without the right to say so, the kernel decides."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
            file.write(str(score))
    except OSError:
        return


class Shim:
    """Parent of one payload: forked by the keeper, outlives the agent, ends with the payload."""

    def __init__(self, order: dict[str, object], answer: socket.socket) -> None:
        self._order = order
        self._answer = answer
        self._folder = str(order["folder"])
        self._groups: list[str] = order["groups"]  # type: ignore[assignment]
        self._pumps: dict[str, Pump] = {}
        self._status: int | None = None

    def run(self) -> None:
        os.setsid()
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        own, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        me = {"pid": os.getpid(), "started": started_at(os.getpid())}
        claim = f"{self._folder}/shim.json"
        write_json(claim, me, exclusive=True)  # a second start of the same attempt ends here
        main, refused = self._start()  # `refused`: "exec" for a program that cannot be run, "prepare" for our part
        me |= {"main": main, "main_started": started_at(main)}
        write_json(claim, me)
        with contextlib.suppress(OSError):  # the agent that asked may be dead by now: the next one reads the file
            send(self._answer, me)
        self._answer.close()
        self._serve(own, main)
        clean = kill_all(os.getpid(), self._groups, DRAIN_S, parent=True)
        for pump in self._pumps.values():
            pump.drain()
        assert self._status is not None
        code: int | None = os.waitstatus_to_exitcode(self._status)
        ended: dict[str, object] = {"code": code, "signal": None, "clean": clean, "refused": refused}
        if code is not None and code < 0:
            ended |= {"code": None, "signal": -code}
        write_json(f"{self._folder}/exit.json", ended, sync=True)

    def _start(self) -> tuple[int, str]:
        """Fork and exec. When the program cannot be run, say so in its own error stream, as a shell does."""
        ends: dict[str, int] = {}
        for name, path in self._order["streams"].items():  # type: ignore[attr-defined]
            if name == "log":  # a named pipe: the agent's own words reach it, whichever agent it is
                fifo = f"{self._folder}/log.fifo"
                os.mkfifo(fifo, 0o600)
                reader = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)
            else:
                reader, ends[name] = os.pipe2(os.O_CLOEXEC)
            self._pumps[name] = pump_of(reader, path, self._order)
        told, failed = os.pipe2(os.O_CLOEXEC)
        main = os.fork()
        if main == 0:
            _become_payload(self._order, [ends["out"], ends["err"]], failed)
        os.close(failed)
        said = b""
        while piece := os.read(told, 4096):
            said += piece
        os.close(told)
        refused = ""
        if said:
            refused, text, file = json.loads(said)
            line = f"penstock: cannot start {self._order['argv'][0]!r}: {text} ({file})\n"  # type: ignore[index]
            os.write(ends["err"], line.encode("utf-8", "replace"))
        for end in ends.values():
            os.close(end)
        return main, refused

    def _serve(self, own: int, main: int) -> None:
        """Move bytes until the first process ends."""
        selector = selectors.DefaultSelector()
        selector.register(own, selectors.EVENT_READ)
        for pump in self._pumps.values():
            selector.register(pump.fd, selectors.EVENT_READ, pump)
        while self._status is None:
            for key, _ in selector.select():
                if key.data is None:
                    os.read(own, 4096)
                elif not key.data.pump():
                    selector.unregister(key.fd)  # the payload closed it; there may be an end still to come
            self._status = reap().get(main)
        selector.close()


# --- the keeper itself ---


def send(connection: socket.socket, content: Mapping[str, object], fds: list[int] | None = None) -> None:
    data = json.dumps(content).encode()
    message = struct.pack("!I", len(data)) + data
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    if (sent := connection.sendmsg([message], ancillary)) < len(message):
        connection.sendall(message[sent:])


def receive(connection: socket.socket) -> tuple[dict[str, object], list[int]]:
    """One message and the file descriptors that came with it."""
    fds: list[int] = []
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack("!I", data[:4])[0]:
        piece, ancillary, _, _ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(4 * 8))
        for _, _, packed in ancillary:
            fds.extend(array.array("i", packed[: len(packed) // 4 * 4]))
        if not piece:
            raise ConnectionError("the other side of the keeper's socket closed it")
        data += piece
    return json.loads(data[4:]), fds


class Keeper:
    """The loop of the long-lived process."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._streams: dict[str, list[Pump]] = {}
        self._quit = False

    def run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        while not self._quit:
            # Orders come last: one to drain closes pipes that may be among these.
            for key, _ in sorted(self._selector.select(), key=lambda event: event[0].data is None):
                if key.data is None:
                    self._answer()
                elif not key.data.pump():
                    self._selector.unregister(key.fd)

    def _answer(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(REQUEST_S)
            try:
                order, _ = receive(connection)
                self._obey(order, connection)
            except (OSError, ValueError, KeyError) as error:
                sys.stderr.write(f"keeper: {type(error).__name__}: {error}\n")
                sys.stderr.flush()

    def _obey(self, order: dict[str, object], connection: socket.socket) -> None:
        match order["op"]:
            case "start":
                self._start(order, connection)
            case "streams":
                ends = [self._open(str(order["key"]), path, order) for path in order["streams"].values()]  # type: ignore[attr-defined]
                send(connection, {"ok": True}, ends)
                for end in ends:
                    os.close(end)
            case "drain":
                for pump in self._streams.pop(str(order["key"]), []):
                    if pump.fd in self._selector.get_map():
                        self._selector.unregister(pump.fd)
                    pump.drain()
                send(connection, {"ok": True})
            case "quit":
                self._quit = True
                send(connection, {"ok": True})
            case unknown:
                send(connection, {"error": f"unknown order {unknown!r}"})

    def _open(self, key: str, path: str, order: dict[str, object]) -> int:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        pump = pump_of(reader, path, order)
        self._streams.setdefault(key, []).append(pump)
        self._selector.register(reader, selectors.EVENT_READ, pump)
        return writer

    def _start(self, order: dict[str, object], connection: socket.socket) -> None:
        if os.fork():
            return  # the shim answers; the kernel reaps it
        try:
            kept = connection.fileno()
            os.closerange(3, kept)
            os.closerange(kept + 1, FDS_MAX)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            Shim(order, connection).run()
        except BaseException as error:  # noqa: BLE001 (whatever it is must be told, and the fork must never return)
            said = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"shim: {said}\n")
            sys.stderr.flush()
            if connection.fileno() >= 0:
                send(connection, {"error": said})
        finally:
            os._exit(0)


def main(state: str) -> None:
    """Listen on `keeper.sock` in the state directory until told to quit."""
    _prefer_to_kill(-900)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir(state)  # socket addresses are short, state directories need not be
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    temporary = f"keeper.{os.getpid()}"
    listener.bind(temporary)
    os.chmod(temporary, 0o600)  # noqa: PTH101
    listener.listen(16)
    # Whoever finds the file may call at once, so the socket comes first.
    os.replace(temporary, "keeper.sock")  # noqa: PTH105
    write_json("keeper.json", {"pid": os.getpid(), "started": started_at(os.getpid())})
    Keeper(listener).run()
