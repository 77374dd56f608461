"""A worker as a replica of a Penstock job: what it is called, how it says how much is open, and when it should stop.

`wiring.extraction` uses it for every worker; outside of Penstock each answer is the harmless one. The control plane
only supplies workers and shows how they get on: nothing here may matter for what ends up in the bucket.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator, Mapping
from types import FrameType

from penstock import payload
from penstock.extract.worker import Standing
from penstock.payload import STOPPED, should_stop

__all__ = ["STOPPED", "listening", "replica_name", "should_stop", "tell"]

_OTHER = re.compile(r"[^A-Za-z0-9.]+")


def replica_name(environment: Mapping[str, str], host: str, chance: str) -> str:
    """Unlike any other's through `chance`; people recognise the attempt of the job, or the host."""
    known = environment.get("PENSTOCK_ATTEMPT") or host or "worker"
    return f"{_OTHER.sub('.', known)[:80]}.{environment.get('PENSTOCK_RANK', '0')}.{chance}"


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """On the main thread: SIGTERM and Ctrl-C are noted, and `should_stop` tells. A second Ctrl-C does not wait."""
    should_stop()  # from the first question on it notes SIGTERM
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _as_term)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _as_term(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGTERM)


def tell(standing: Standing) -> None:
    """There are never more replicas than open units, and none is stopped for that while it has a unit in hand."""
    payload.progress(
        standing.units - standing.open,
        standing.units,
        open_units=standing.open,
        holding=standing.holding,
        tokens=standing.tokens,
        rows=standing.documents,
    )
