"""Holds tests, servers and agents still at random moments, as a busy machine does.

`make test-stalled` puts this folder on PYTHONPATH; payloads and what keeps them do not inherit it. A thread holds the
interpreter's lock for up to half a second, so that all other threads stop wherever they are and the rest of the machine
goes on: what depends on who is faster fails here within minutes, and otherwise once in a hundred runs of CI. It must
change nothing but time.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time

BETWEEN_S, HELD_S = (0.05, 0.6), (0.02, 0.5)
_hold = ctypes.PyDLL(None).usleep  #: called through `PyDLL` it keeps the lock


def _stall() -> None:
    chance = random.Random()
    while True:
        time.sleep(chance.uniform(*BETWEEN_S))
        _hold(int(chance.uniform(*HELD_S) * 1e6))


def _begin() -> None:
    threading.Thread(target=_stall, name="stall", daemon=True).start()


_begin()
os.register_at_fork(after_in_child=_begin)
