"""Runs one snippet: checks the devices, gives it its names, keeps its result or its error.

Called by `nursery` in the payload's own process, which is already behind its walls and ends with the answer's exit
code. Standard library only, and the jax of the user's environment, which is not imported before somebody uses it. It
decides what is in scope and what counts as the snippet's own error; it must not know how the process came to be.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import linecache
import logging
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from penstock.agent import results
from penstock.agent.hiding import hide, hide_all

NAME = "<snippet>"
TRACEBACK_CHARACTERS_MAX = 64 * 1024
MESSAGE_CHARACTERS_MAX = 8 * 1024


class Order(TypedDict):
    """What `warm` asks for; it came from the agent, so its shape is not checked again."""

    code: str
    variables: dict[str, object]
    env: dict[str, str]
    hidden: list[str]  #: values of secrets, which no error may show
    work: str
    output: str
    result: str  #: where the report goes
    devices: int  #: how many jax must find here
    accelerator: bool  #: whether they are real ones: then they are tried before the user's code runs
    gang: bool  #: one of several processes: jax.distributed must begin before anything touches a device
    rlimits: dict[str, int]
    json_max: int
    array_max: int


class DeviceCheckFailed(Exception):
    """The host does not have what the job was promised; the user's code was not started."""


class Lazy(types.ModuleType):
    """Stands for a module until somebody asks it for anything that needs devices."""

    #: These are for settings that must be made before a backend starts.
    EARLY = frozenset({"config", "distributed", "__version__"})

    def __init__(self, name: str, check: Callable[[], None]) -> None:
        super().__init__(name)
        self.__dict__["_check"] = check

    def __getattr__(self, attribute: str) -> Any:  # type: ignore[explicit-override]  # no `override` on 3.11
        if attribute.startswith("__") and attribute not in self.EARLY:
            raise AttributeError(attribute)  # what `inspect`, `doctest` and others ask every value must cost nothing
        if attribute not in self.EARLY:
            self.__dict__["_check"]()
        value = getattr(importlib.import_module(self.__name__), attribute)
        self.__dict__[attribute] = value
        return value

    def __dir__(self) -> list[str]:  # type: ignore[explicit-override]
        return dir(importlib.import_module(self.__name__))


def adjust(env: dict[str, str], inherited: dict[str, str]) -> None:
    """Make the process's environment the payload's, and tell a jax that was imported earlier.

    `inherited` is what this process itself was started with: of that nothing stays, but what importing jax added does.
    """
    for name in inherited.keys() - env.keys():
        os.environ.pop(name, None)
    os.environ.update(env)
    if hasattr(time, "tzset"):
        time.tzset()
    for folder in reversed(env.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
    if "jax" in sys.modules:
        _configure(env, inherited)


def _configure(env: dict[str, str], inherited: dict[str, str]) -> None:
    """jax reads JAX_* variables when it is imported; those that are different now are set by hand."""
    config = sys.modules["jax"].config
    values = config.values
    for name, value in env.items():
        option = name.lower()
        if not name.startswith("JAX_") or inherited.get(name) == value or option not in values:
            continue
        now = values[option]
        if isinstance(now, bool):
            config.update(option, value.lower() in ("1", "true", "yes", "on", "y", "t"))
        elif isinstance(now, int):
            config.update(option, int(value))
        elif isinstance(now, float):
            config.update(option, float(value))
        else:
            config.update(option, value)


def check_devices(wanted: int, *, accelerator: bool) -> None:
    """Whether jax finds what the job was promised. Starts the backend, so it takes as long as that takes."""
    try:
        jax = importlib.import_module("jax")
    except ImportError as error:
        raise DeviceCheckFailed(f"jax cannot be imported in this environment: {error}; add it to the set-up") from error
    try:
        found = jax.local_devices()
    except RuntimeError as error:
        raise DeviceCheckFailed(f"jax cannot start its backend: {error}") from error
    kinds = sorted({str(device.platform) for device in found})
    if accelerator and kinds == ["cpu"]:
        raise DeviceCheckFailed(
            "jax sees only CPUs, though this host has accelerators: does the set-up install jax for them?"
        )
    chosen = not accelerator and jax.config.values.get("jax_num_cpu_devices", -1) > 0
    if len(found) < wanted and not chosen:
        raise DeviceCheckFailed(
            f"jax sees {len(found)} devices ({', '.join(kinds)}) on this host, the job needs {wanted}"
        )
    if accelerator:
        total = float(jax.numpy.arange(8.0).sum())
        if total != 28.0:
            raise DeviceCheckFailed(f"the accelerator adds 0 to 7 to {total}: it is broken")


def run(order: Order, log_fd: int) -> int:
    """Run it and write its report; answers the exit code. Signals, `os._exit` and crashes need no help from here."""
    scope = types.ModuleType("__main__")
    checked = [False]

    def check_once() -> None:
        if not checked[0] and not order["gang"]:
            checked[0] = True
            check_devices(order["devices"], accelerator=order["accelerator"])

    logger = _logger(log_fd)
    scope.__dict__.update(
        {"jax": Lazy("jax", check_once), "jnp": Lazy("jax.numpy", check_once), "logger": logger, **order["variables"]}
    )
    sys.modules["__main__"] = scope
    sys.argv = [NAME]
    sys.path.insert(0, order["work"])
    lines = order["code"].splitlines(keepends=True)
    linecache.cache[NAME] = (len(order["code"]), None, lines, NAME)
    report: dict[str, object] = {}
    if order["gang"]:
        _enter_gang()
    try:
        if order["accelerator"]:
            check_once()
        exec(compile(order["code"], NAME, "exec", dont_inherit=True), scope.__dict__)  # noqa: S102 (this is the job)
    except SystemExit as leaving:
        code = _exit_code(leaving)
        if code:
            said = hide(f"the snippet called sys.exit({leaving.code!r})", order["hidden"])
            report["error"] = {"type": "SystemExit", "message": said}
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is the snippet's)
        code = 1
        report["error"] = describe(error, order["hidden"])
    else:
        code = 0
    if not code and "result" in scope.__dict__:
        _keep_result(report, scope.__dict__["result"], order)
    if report or os.path.exists(os.path.join(order["output"], "result.json")):  # noqa: PTH110, PTH118 (no pathlib)
        _write(order["result"], report)  # else nothing is said: no file says that too, unless one stands in for it
    for handler in logger.handlers:
        handler.flush()
    return code


def _enter_gang() -> None:
    """What a command of a gang gets on its PYTHONPATH."""
    with contextlib.suppress(ImportError):  # the environment's own Penstock may be older; then JAX does as it likes
        from penstock.payload.entrance.sitecustomize import watch

        watch()


def leave_gang(code: int) -> None:
    """The last thing that a snippet of a gang does."""
    with contextlib.suppress(ImportError):
        from penstock.payload.entrance.sitecustomize import take_leave

        take_leave(code)


def _keep_result(report: dict[str, object], value: object, order: Order) -> None:
    told = results.tell(value, order["output"], json_max=order["json_max"], array_max=order["array_max"])
    result = hide_all(json.loads(told.json), order["hidden"])
    report |= {"result": result, "note": hide(told.note, order["hidden"]), "artifacts": told.artifacts}


def _exit_code(leaving: SystemExit) -> int:
    """As the interpreter itself understands `sys.exit`: nothing is 0, a number its low byte, other things are said."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    print(leaving.code, file=sys.stderr)  # noqa: T201 (what Python does)
    return 1


def describe(error: BaseException, hidden: Sequence[str] = ()) -> dict[str, str]:
    """Type, message and traceback, the latter from the snippet's first line on; without the values in `hidden`."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    error = error.with_traceback(frames)
    text = hide("".join(traceback.TracebackException.from_exception(error, compact=True).format()), hidden)
    if len(text) > TRACEBACK_CHARACTERS_MAX:
        half = TRACEBACK_CHARACTERS_MAX // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"
    kind = type(error)
    name = (
        kind.__qualname__
        if kind.__module__ in ("builtins", "__main__", __name__)
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        message = hide(str(error), hidden)
    except Exception as second:  # noqa: BLE001 (a __str__ of the user's)
        message = f"(its __str__ raised {type(second).__name__})"
    return {"type": name, "message": message[:MESSAGE_CHARACTERS_MAX], "traceback": text}


def _logger(fd: int) -> logging.Logger:
    """`logger` writes to a stream of its own, a line at a time, with the time in UTC."""
    stream = os.fdopen(os.dup(fd), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    handler = logging.StreamHandler(stream)
    form = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    form.converter = time.gmtime
    handler.setFormatter(form)
    logger = logging.Logger("snippet", logging.DEBUG)  # noqa: LOG001 (one per snippet, inline ones too)
    logger.addHandler(handler)
    return logger


def _write(path: str, report: dict[str, object]) -> None:
    """Whole or not at all. `surrogatepass` is not needed: half characters were escaped by json."""
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:  # noqa: PTH123 (no pathlib: forks stay small)
        json.dump(report, file)
    os.replace(temporary, path)  # noqa: PTH105


def rehearse() -> None:
    """In a fork, before there is an order: what every snippet needs, and what it will touch first.

    The first write to a page that parent and fork share costs a copy; made now, it is not made while somebody waits.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # Python reseeds `random` in a fork; numpy would draw the same numbers in all of them
    on_crash()
    scope = types.ModuleType("rehearsal")
    exec(compile("import json\njson.loads(json.dumps({'a': 1.5}))", NAME, "exec", dont_inherit=True), scope.__dict__)  # noqa: S102
    if "jax" in sys.modules:
        config, option = sys.modules["jax"].config, "jax_compilation_cache_dir"
        config.update(option, config.values.get(option))


def on_crash() -> None:
    """Stacks on standard error when the process crashes, and when it is asked for them by SIGUSR1."""
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
