"""Tells Penstock how far the job is: `tpu ps`, `tpu watch` and the API show it live.

User code calls `progress` as often as it likes, from any thread. The last word counts: it is written to a file that the
agent reads with each sync, whole or not at all, so a reader never sees half of it. It must never break the program it
reports on: a file that cannot be written is not an error of the training run.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
_last: dict[str, Any] = {}  #: what was said last; each word repeats the others


def progress(
    done: float,
    total: float | None = None,
    *,
    open_units: float | None = None,
    holding: float | None = None,
    **metrics: float,
) -> None:
    """Say that `done` of `total` steps (or epochs, or examples) are done, with any numbers worth watching.

    A job with replicas that share one list of work says how much of it is open: there are never more replicas than
    `open_units`, and of those that are too many only such are stopped as are not `holding` a unit (or never said so).
    Outside of Penstock it does nothing. Numbers may be of any type that `float` takes, such as a JAX or
    numpy scalar; those that are not finite are left out, because JSON has none.
    """
    path = os.environ.get("PENSTOCK_PROGRESS_FILE")
    if not path:
        return
    said = {
        "done": float(done),
        "total": None if total is None else float(total),
        "metrics": {name: number for name, value in metrics.items() if math.isfinite(number := float(value))},
        "at": time.time(),  # noqa: TID251 (the user's program has no clock port)
    }
    if open_units is not None:
        said["open_units"] = int(open_units)
    if holding is not None:
        said["holding"] = bool(holding)
    with _lock:
        _last.update(said)
        _replace(path, json.dumps(_last))


@contextmanager
def saving() -> Iterator[None]:
    """Put what saves a checkpoint into `with saving():`; Penstock then knows what a save costs, and how often is best.

    Counted is the time it holds the program up: of a save that goes on in the background, only its beginning. It is
    told with the next `progress`, and with each save after that.
    """
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    path = os.environ.get("PENSTOCK_PROGRESS_FILE")
    if not path:
        return
    with _lock:
        known = _last.get("save_s")
        # The first save is often the slowest, and sizes change: newer ones weigh more.
        _last["save_s"] = took if known is None else (known + took) / 2
        if "done" in _last:
            _replace(path, json.dumps(_last))


def _replace(path: str, text: str) -> None:
    partial = f"{path}.{os.getpid()}.part"
    try:
        with open(partial, "w", encoding="utf-8") as file:  # noqa: PTH123 (pathlib costs ten times this call)
            file.write(text)
        os.replace(partial, path)  # noqa: PTH105
    except OSError as error:
        _complain_once(error)


_complained = threading.Event()


def _complain_once(error: OSError) -> None:
    """One warning: a full disk must not fill the log as well."""
    if not _complained.is_set():
        _complained.set()
        import warnings

        warnings.warn(f"progress is not reported: {error}", RuntimeWarning, stacklevel=4)
