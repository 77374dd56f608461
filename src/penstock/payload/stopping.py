"""Whether the job was asked to stop, and how much time it has.

User code asks between steps (`if payload.should_stop(): save and leave`). The wish comes as a file the agent makes
(preemption notice, cancel, timeout) or as SIGTERM. The signal's own effect is kept until the program first asks: from
then on it is only noted, because a program that asks wants to finish its step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

#: What a program that saved and left early exits with, so that it is resumed and not taken for finished.
STOPPED = 143


class _Wish:
    """Whether SIGTERM has come. One per process: signals are."""

    def __init__(self) -> None:
        self.came = False
        self.listening = False

    def listen(self) -> None:
        """From now on SIGTERM is noted. Only a main thread may say so, and a handler of the program's own stays."""
        if self.listening or threading.current_thread() is not threading.main_thread():
            return
        self.listening = True
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.came = True


_wish = _Wish()


def should_stop() -> bool:
    """True once the job was asked to stop.

    Save a checkpoint and leave with `sys.exit(payload.STOPPED)` within the grace (30 s by default): exit code 0 would
    say that the work is done.
    """
    _wish.listen()
    if _wish.came:
        return True
    file = os.environ.get("PENSTOCK_STOP_FILE")
    return file is not None and os.access(file, os.F_OK)


def deadline() -> float | None:
    """When this attempt is stopped at the latest, in seconds since the epoch; None outside of Penstock."""
    told = os.environ.get("PENSTOCK_DEADLINE")
    return float(told) if told else None


def seconds_left() -> float | None:
    """How long until the deadline; None without one."""
    ends = deadline()
    # The user's program has no clock port, and the deadline is one of this machine's clock.
    return None if ends is None else max(0.0, ends - time.time())  # noqa: TID251
