"""In every Python process of a gang, before the user's program: lets it leave, and be stopped, without the others.

The agent puts this folder on PYTHONPATH for commands that run on several hosts, and the interpreter imports the module
by its name. Two things of `jax.distributed` would keep a broken gang for minutes. At exit it waits for all hosts, which
wait for this one in a collective: that wait is left out when the program failed (an exception, `sys.exit` with a code
other than 0), and the process ends with its own code. One that was asked to stop and leaves with 143 has saved, but
others may still be saving, and would be torn down with JAX's coordinator: its host goes last. And JAX takes SIGTERM for
itself: until the program asks it about preemption, the signal keeps its usual effect. Standard library only; programs
without `jax.distributed` never notice.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import ctypes
    from importlib.machinery import ModuleSpec

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (every process of the job pays for an import)
_ACTION_BYTES = 512  #: more than `struct sigaction` has anywhere
_STOPPED = 143  #: `payload.STOPPED`
_FILE_S = 1.0  #: the stop file comes right behind the signal
#: With a grace as short as this (`limits.GANG_GRACE_S`) the gang is broken, or time too short to wait for anybody.
_ALONE_S = 3.0
_SHARE = 1 / 3  #: of the grace, in which the coordinator's host waits for those who left without a word


class _Finder(Protocol):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None: ...


class _Course:
    """What is known of this process."""

    def __init__(self) -> None:
        self.joined = False  #: jax.distributed has begun
        self.code = 0  #: what the interpreter leaves with, as far as `sys.exit` told it
        self.taken: ctypes.Array[ctypes.c_char] | None = None  #: what JAX wants done at SIGTERM

    def failed(self) -> int:
        """The exit code of a program that failed; 0 while nothing says so."""
        error = getattr(sys, "last_value", None)
        if error is not None:  # of an exception that nobody caught; of Ctrl-C the interpreter makes a signal
            return 0 if isinstance(error, KeyboardInterrupt) else 1
        return self.code


_course = _Course()


# --- leaving ---
def _noted(code: int) -> None:
    """Called when a status given to `sys.exit` is let go: by the interpreter itself, with no frame left, or by a
    program that caught the exception and goes on."""
    try:
        sys._getframe(2)  # noqa: SLF001 (the only way to tell the two apart)
    except ValueError:
        if threading.get_ident() == threading.main_thread().ident:
            _course.code = code & 0xFF


class _Number(int):
    def __del__(self) -> None:
        _noted(int(self))


class _Text(str):
    __slots__ = ()

    def __del__(self) -> None:
        _noted(1)


_exit = sys.exit


def _leave(status: Any = None, /) -> None:
    """`sys.exit`, with a status that tells when it is used."""
    if type(status) in (int, _Number):
        status = _Number(status)
    elif type(status) in (str, _Text):
        status = _Text(status)
    _exit(status)


_register = atexit.register


def _register_at_exit(function: Callable[..., Any], /, *given: Any, **named: Any) -> Callable[..., Any]:
    """`atexit.register`; what JAX wants done at the end is left out after a failure in a gang."""
    if str(getattr(function, "__module__", "")).partition(".")[0] != "jax":
        return _register(function, *given, **named)

    def unless_failed() -> None:
        if not (_course.joined and _course.failed()):
            function(*given, **named)

    _register(unless_failed)
    return function


def _end() -> None:
    """The very last function at exit: a backend with a collective under way would wait for it even now."""
    code = _course.failed() if _course.joined else 0
    if code:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):  # closed, broken or none: as the interpreter, go on
                continue
        take_leave(code)
        os._exit(code)


def take_leave(code: int) -> None:
    """The last act of a program that was asked to stop and has saved: the coordinator's host waits for the others."""
    world = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if code != _STOPPED or getattr(world, "client", None) is None:
        return
    try:
        assert world is not None
        if world.service is None:
            world.client.key_value_set(f"penstock/left/{world.process_id}", "")
            return
        until = time.monotonic() + _patience_s()
        for other in range(1, world.num_processes):
            left_ms = int(1000 * (until - time.monotonic()))
            if left_ms > 0:
                world.client.blocking_key_value_get(f"penstock/left/{other}", left_ms)
    except Exception:  # noqa: BLE001 (somebody never said it, the coordinator is gone, another JAX: leave as ever)
        return


def _patience_s() -> float:
    """None without an order; whoever hears of it by JAX may be ahead of the file."""
    until = time.monotonic() + _FILE_S
    while (grace_s := _grace_s()) is None and time.monotonic() < until:
        time.sleep(0.01)
    return 0.0 if grace_s is None or grace_s <= _ALONE_S else _SHARE * grace_s


def _grace_s() -> float | None:
    """What the stop file says; None while there is none."""
    try:
        with open(os.environ["PENSTOCK_STOP_FILE"]) as file:  # noqa: PTH123 (as above: no import)
            return float(file.read())
    except (KeyError, OSError, ValueError):
        return None


# --- being stopped ---
def _action(new: ctypes.Array[ctypes.c_char] | None = None) -> ctypes.Array[ctypes.c_char]:
    """What the kernel does at SIGTERM, as C knows it; then it does `new`."""
    import ctypes

    old = ctypes.create_string_buffer(_ACTION_BYTES)
    ctypes.CDLL(None).sigaction(int(signal.SIGTERM), new, old)
    return old


def _watch_joining(module: ModuleType) -> None:
    initialize = module.initialize

    def joined(*given: Any, **named: Any) -> Any:
        before = _action()
        try:
            return initialize(*given, **named)
        finally:
            _course.joined = True
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # the program has no handler of its own
                after = _action(before)
                _course.taken = after if after.raw != before.raw else None

    joined.__doc__, joined.__wrapped__ = initialize.__doc__, initialize  # type: ignore[attr-defined]
    module.initialize = joined  # type: ignore[attr-defined]


def _watch_asking(module: ModuleType) -> None:
    reached = module.reached_preemption_sync_point

    def asked(step_id: int) -> bool:
        taken, _course.taken = _course.taken, None
        if taken is not None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            _action(taken)  # from now on it hears of SIGTERM here, and has its grace
        return cast("bool", reached(step_id))

    asked.__doc__, asked.__wrapped__ = reached.__doc__, reached  # type: ignore[attr-defined]
    module.reached_preemption_sync_point = asked  # type: ignore[attr-defined]


_WATCHED = {"jax.distributed": _watch_joining, "jax.experimental.multihost_utils": _watch_asking}


class _Watcher:
    """Finds the modules above where they are, and changes them once they are loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _WATCHED:
            return None
        others = (cast("_Finder", each) for each in sys.meta_path if each is not self)
        spec = next((found for each in others if (found := each.find_spec(name, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            _WATCHED[name](module)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def watch() -> None:
    """Change the modules of JAX that are loaded already, and the others when they are."""
    for name, change in _WATCHED.items():
        if name in sys.modules:
            change(sys.modules[name])
    sys.meta_path.insert(0, _Watcher())


def _give_way() -> None:
    """This module hides another of its name, of the system or the user's: that one is run, too."""
    folders = [each for each in sys.path if os.path.abspath(each or ".") != _HERE]  # noqa: PTH100
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", folders)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":  # by its long name it changes nothing by itself
    _register(_end)  # the first to be registered comes last
    sys.exit = _leave  # type: ignore[assignment]
    atexit.register = _register_at_exit
    watch()
    _give_way()
