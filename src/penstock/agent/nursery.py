"""The warm parent of snippets: has imported jax, has started no backend, and forks once per snippet.

Run inside the sandbox by `warm`, on the Python of the user's environment, with the standard library alone. Two
processes: the *doorman*, small, takes orders from the agent, opens rooms, and forks for snippets that do not mention
jax; the *parent*, which has imported jax, forks for the others. Who forked waits for the snippet and writes down how it
ended. The fork of the big process is most of the cost of a snippet, so there is only one of it, and only where it is of
use. Without the right to make rooms the parent forks without them, one at a time, and kills what is left itself.
`inline` is another way: one interpreter for all snippets, without any fork. It must never start a jax backend in the
parent: a forked backend hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import itertools
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import cast

from penstock.agent import processes, rooms, snippet

LEFTOVERS_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36
_FDS = 4  #: at most, with one message
_END_BYTES = 1024  #: always as many, so that one is written over another
_KEEP_AT_EXIT = frozenset({"concurrent", "logging", "multiprocessing", "tempfile", "threading", "weakref"})
_inherited = dict(os.environ)
_at_end: list[tuple[Callable[..., object], tuple[object, ...], dict[str, object]]] = []


def main() -> None:
    """`… MODE CONTROL`: `rooms`, `plain` (forks without rooms) or `inline`; the number of the socket to the agent."""
    mode, control = sys.argv[-2:]
    if mode == "inline":
        inline(int(control))
    _Doorman(socket.socket(fileno=int(control)), walled=mode == "rooms").serve()


class _Post:
    """A process that takes orders from a socket, forks, and waits for its children."""

    def __init__(self, orders: socket.socket, *, walled: bool) -> None:
        rooms.set_option(_PR_SET_CHILD_SUBREAPER, 1)
        self.wanted = True
        self.walled = walled
        #: Process -> the pipe in which it names the file for its end, and what to let go of then: the first process of
        #: its room, or the socket to the agent.
        self.running: dict[int, tuple[int, int]] = {}
        self._orders = orders
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if walled else -1
        self._awake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.mine = [fd for fd in (orders.fileno(), self._own_pids, self._awake, wake) if fd >= 0]
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self, take: Callable[[bytes, list[int]], None], other: Callable[[int], None]) -> None:
        """Until there are no more orders and no more snippets. `other` is told of children that are no snippets."""
        poll = select.poll()
        poll.register(self._awake, select.POLLIN)
        while self.wanted or self.running:
            # Without rooms what a snippet left is found by kinship: then the next one waits.
            if self.wanted and (self.walled or not self.running):
                poll.register(self._orders, select.POLLIN)
            for fd, _ in poll.poll():
                if fd == self._awake:
                    os.read(fd, 4096)
                    continue
                poll.unregister(fd)
                said, fds = _next(self._orders)
                if fds:
                    take(said, fds)
                else:
                    self.wanted = False
            for pid, status in processes.reap().items():
                if pid in self.running:
                    self._ended(pid, status)
                else:
                    other(pid)

    def fork(self, fds: list[int]) -> None:
        """A process that waits to become a snippet. `fds`: to the agent, and the first process of its room."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        kept = -1
        try:
            if self.walled:
                rooms.enter(fds[1], rooms.NEW_PIDS)
            try:
                pid = os.fork()
                if pid == 0:
                    os.close(reader)
                    self._become_snippet(fds, writer)
            finally:
                if self.walled:
                    rooms.enter(self._own_pids, rooms.NEW_PIDS)
            kept = fds[-1]
            self.running[pid] = (reader, kept)
        except OSError as error:  # no memory, no process numbers, or the room is gone already
            os.write(fds[0], f"!the warm parent cannot fork: {error}".encode())
            os.close(reader)
        for fd in (*fds, writer):
            if fd != kept:
                os.close(fd)

    def _ended(self, pid: int, status: int) -> None:
        """Write down how it ended, and let nothing of it remain."""
        reader, kept = self.running.pop(pid)
        path = os.read(reader, 4096)
        clean = self.walled or processes.kill_all(os.getpid(), [], LEFTOVERS_S, parent=True)
        if path:  # else nothing of the user's has run
            write_end(os.fsdecode(path), status, clean=clean)  # if it cannot, the agent finds that nobody saw the end
        if self.walled:
            _signal(kept, rooms.CLEAR)
        os.close(reader)
        os.close(kept)

    def _become_snippet(self, fds: list[int], named: int) -> None:
        """In the fork: go behind the walls, tell the agent, wait for its word, run. Never returns."""
        hello = socket.socket(fileno=fds[0])
        code = 70
        try:
            rooms.call_it("snippet")
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (*self.mine, *itertools.chain.from_iterable(self.running.values())):
                os.close(fd)
            os.setsid()
            if self.walled:
                rooms.enter(fds[1], rooms.NEW_MOUNTS | rooms.NEW_IPC)
                os.close(fds[1])
                rooms.give_up_rights()
            hello.send(b"snippet")
            snippet.rehearse()
            code = _obey(hello, named)
        except BaseException as error:  # noqa: BLE001 (the fork must never return into the parent's loop)
            if hello.fileno() >= 0:
                hello.send(f"!{type(error).__name__}: {error}".encode()[:4096])
        os._exit(code)


class _Doorman:
    """Opens rooms, forks into them for snippets without jax, and passes the others on to the parent."""

    def __init__(self, control: socket.socket, *, walled: bool) -> None:
        control.set_inheritable(False)
        forget_penstock()
        _freeze()
        self._inner, outer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._parent = os.fork()
        if self._parent == 0:
            self._inner.close()
            _be_parent(outer, control, walled=walled)
        outer.close()
        rooms.call_it("doorman")
        self._post = _Post(control, walled=walled)
        self._post.mine.append(self._inner.fileno())

    def serve(self) -> None:
        self._post.serve(self._take, self._other)
        self._inner.close()  # the parent goes when its last snippet has ended
        os.waitpid(self._parent, 0)
        self._end()

    def _take(self, said: bytes, fds: list[int]) -> None:
        """Fork, or let the parent fork, while the room is still being made."""
        hello, *door = fds
        passed = [hello]
        try:
            if door:
                passed.append(self._open_room(*door))
            if said == b"light" and self._post.walled:
                self._post.fork(passed)
                return
            socket.send_fds(self._inner, [b"fork"], passed)
        except OSError as error:
            os.write(hello, f"!no room for the snippet: {error}".encode())
        finally:
            for fd in door:
                os.close(fd)
        for fd in passed:
            os.close(fd)

    @staticmethod
    def _open_room(door: int) -> int:
        """What it takes to fork into it: its first process."""
        pid = rooms.clone()
        if pid == 0:
            rooms.hold(door)
        return os.pidfd_open(pid)

    def _other(self, pid: int) -> None:
        """First processes of rooms that were cleared come here; and the parent, when it died."""
        if pid == self._parent:
            self._end()

    @staticmethod
    def _end() -> None:
        """Without the parent nobody would see how its snippets end, and bubblewrap stays while anybody is there."""
        processes.kill_all(os.getpid(), [], LEFTOVERS_S, parent=True)
        os._exit(0)


def _be_parent(orders: socket.socket, control: socket.socket, *, walled: bool) -> None:
    """In the doorman's first fork: import jax, then fork for whoever needs it. Never returns."""
    rooms.call_it("warm parent")
    warm_up(control.fileno())
    control.close()
    post = _Post(orders, walled=walled)
    post.serve(lambda _, fds: post.fork(fds), lambda _: None)
    os._exit(0)


def _obey(hello: socket.socket, named: int) -> int:
    """Wait for the agent's word; then the last steps before the user's code, the code itself, and a proper end."""
    _, fds = _next(hello)
    if not fds:
        return 70  # the agent is gone or changed its mind: nothing of the user's has run
    hello.close()
    end, order = read_order(fds[0])
    os.write(named, end)
    streams(fds[1], fds[2])
    for fd in (named, *fds[:3]):
        os.close(fd)
    os.umask(0o022)
    os.chdir(order["work"])
    for name, most in order["rlimits"].items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (allowed, allowed))
    snippet.adjust(order["env"], _inherited)
    gc.enable()
    code = snippet.run(order, fds[3])
    if code and order["gang"]:
        _at_end.clear()  # jax would wait for hosts that wait for this one
    left = _leave(code)
    if order["gang"]:
        snippet.leave_gang(left)
    return left


def _leave(code: int) -> int:
    """End as an interpreter ends: threads, exit functions, buffers. The report is written already."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 (no other name for "wait for all threads")
        atexit._run_exitfuncs()  # noqa: SLF001
        if _backend_started():
            for function, given, named in reversed(_at_end):
                function(*given, **named)
    except BaseException as error:  # noqa: BLE001 (a user's exit function; Python prints it and goes on)
        sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            code = code or 120  # what Python exits with when its output could not be written
    return code


# --- one interpreter for all ---


def inline(control_fd: int) -> None:
    """Run snippets one after another in this process, until the agent is gone.

    What a snippet leaves in the interpreter is the next one's, for that is what was chosen; the processes it started
    end with it, however they detached.
    """
    rooms.set_option(_PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    warm_up(control_fd)
    forget_penstock()
    gc.enable()
    snippet.on_crash()
    kept = dict(os.environ)
    while order := _next(control)[1]:
        with socket.socket(fileno=order[0]) as hello:
            hello.send(b"snippet")
            if fds := _next(hello)[1]:
                _run_inline(fds, kept)
    os._exit(0)


def _run_inline(fds: list[int], kept: dict[str, str]) -> None:
    end, order = read_order(fds[0])
    path = list(sys.path)
    streams(fds[1], fds[2])
    os.chdir(order["work"])
    snippet.adjust(order["env"], kept)
    code = snippet.run(order, fds[3])
    clean = _end_children()
    for name in os.environ.keys() - kept.keys():
        del os.environ[name]
    os.environ.update(kept)
    sys.path[:] = path
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    streams(null, null)  # flushed first; and the last writer lets go, so that the streams end
    for fd in (*fds, null):
        os.close(fd)
    if not write_end(os.fsdecode(end), code << 8, clean=clean):
        os.kill(os.getpid(), signal.SIGKILL)  # the agent would wait for ever, and take any exit code for the snippet's


def _end_children() -> bool:
    """Kill what a snippet started; whether nothing is left. Without children that costs one call to the kernel."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return processes.kill_all(os.getpid(), [], LEFTOVERS_S, parent=True)


# --- shared ---


def warm_up(report_fd: int) -> None:
    """Import jax, once for all snippets, and say how that went. A missing jax is only missed by who uses it."""
    began = time.monotonic()
    try:
        said = f"jax {_import_jax()}"
    except ImportError as error:
        said = f"no jax: {error}"
    except Exception as error:  # noqa: BLE001 (a broken jax must not keep snippets without jax from running)
        said = f"no jax: importing it raised {type(error).__name__}: {error}"
    _freeze()
    os.write(report_fd, json.dumps({"warm": said, "seconds": round(time.monotonic() - began, 3)}).encode())


def _next(orders: socket.socket) -> tuple[bytes, list[int]]:
    """The next message and its descriptors; nothing when the other side is gone."""
    try:
        said, fds, _, _ = socket.recv_fds(orders, rooms.MESSAGE_BYTES, _FDS)
    except ConnectionResetError:
        return b"", []
    return said, fds


def _signal(pidfd: int, number: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return  # the agent was faster


def _freeze() -> None:
    """What is here now is garbage for nobody: no collection in a fork need touch it."""
    gc.disable()
    gc.collect()
    gc.freeze()


def _import_jax() -> str:
    """Its version. What it wants done at the exit is done only in processes that started a backend: it takes 10 ms."""
    register = atexit.register

    def keep(function: Callable[..., object], /, *given: object, **named: object) -> Callable[..., object]:
        if str(function.__module__).partition(".")[0] in _KEEP_AT_EXIT:
            return register(function, *given, **named)
        _at_end.append((function, given, named))
        return function

    atexit.register = keep  # type: ignore[assignment]
    try:
        importlib.import_module("jax.numpy")
        return str(importlib.import_module("jax").__version__)
    finally:
        atexit.register = register


def _backend_started() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")
    asked = getattr(bridge, "backends_are_initialized", None)
    return bridge is not None and (asked is None or bool(asked()))


def read_order(fd: int) -> tuple[bytes, snippet.Order]:
    """Where the end is written (the first line), and what to run."""
    data = b""
    while piece := os.pread(fd, 1 << 20, len(data)):
        data += piece
    end, _, order = data.partition(b"\n")
    return end, cast("snippet.Order", json.loads(order))


def streams(out: int, err: int) -> None:
    """Let standard output and error go there, line by line, whatever bytes are printed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        if stream.errors != "backslashreplace":
            # Once, before the first change: a stream that began as a file asks for its place in it; a pipe has none.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    null = os.open(os.devnull, os.O_RDONLY)
    for target, fd in ((0, null), (1, out), (2, err)):
        os.dup2(fd, target, inheritable=True)
    os.close(null)


def write_end(path: str, status: int, *, clean: bool) -> bool:
    """How a snippet ended, in the form of `keeper`'s shims; whether the disk took it."""
    code = os.waitstatus_to_exitcode(status)
    ended: dict[str, object] = {"code": code, "signal": None, "clean": clean, "refused": ""}
    if code < 0:
        ended |= {"code": None, "signal": -code}
    temporary = f"{path}.part"  # it may be there: `homes` put an old one aside
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, json.dumps(ended).encode().ljust(_END_BYTES))
        finally:
            os.close(fd)
        os.replace(temporary, path)  # noqa: PTH105
    except OSError as error:
        with contextlib.suppress(OSError):  # the log is on the same disk
            os.write(2, f"{path}: the end of a snippet cannot be written: {error}\n".encode())
        return False
    return True


class _Ours:
    """Finds Penstock's own package last of all, so that `penstock.payload` is there in environments without it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name != "penstock":
            return None
        initial = os.path.join(self._folder, "__init__.py")  # noqa: PTH118
        return importlib.util.spec_from_file_location(name, initial, submodule_search_locations=[self._folder])


def forget_penstock() -> None:
    """User code that imports penstock gets its environment's, not the stub this process began with."""
    stub = sys.modules.pop("penstock", None)
    for name in [name for name in sys.modules if name.startswith("penstock.")]:
        del sys.modules[name]
    if stub is not None and stub.__path__:
        sys.meta_path.append(_Ours(next(iter(stub.__path__))))
