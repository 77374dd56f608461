"""Watches whether a payload gets on: reads what it says of itself, and notices when it has stopped to say anything.

`course` runs one per attempt. A payload that never reports is never suspected; one that does is held against its own
usual pace. What a stall means is not decided here: the stacks go to the log, so that somebody can see where it hangs.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from penstock.agent.checkpoint_looks import TEMPORARY
from penstock.agent.hiding import hide
from penstock.agent.launch import Running
from penstock.agent.layout import read_progress
from penstock.domain import limits
from penstock.wire.api import ProgressView

LOOK_S = 0.5
STEPS_KEPT = 32
STEPS_LEAST = 5  #: fewer are no habit: the first ones compile
STALL_FACTOR = 20.0
STALL_LEAST_S = 120.0


class Watch:
    """What one payload said, and when."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self.said: ProgressView | None = None
        self.open_units: int | None = None
        self.holding: bool | None = None
        self._moved_at: float | None = None
        self._paces: deque[float] = deque(maxlen=STEPS_KEPT)
        self._dumped = False
        self._seen = (0, 0)
        self.hidden: tuple[str, ...] | None = None  #: values of secrets; while they are unknown no names are told
        self.checkpoints: Path | None = None  #: where it saves, if that is the root itself and nobody copies it
        self._saved_at: float | None = None  #: by the clock of files

    async def follow(self, running: Running, say: Callable[[str], None], poke: Callable[[], None]) -> None:
        """Look twice a second, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look_for_saves()
            if self.look():
                poke()
            stalled_s = self.stalled_s()
            if stalled_s is not None and not self._dumped:
                self._dumped = True
                told = await asyncio.to_thread(running.dump)
                stacks = "stacks follow" if told else "no process prints its stacks on SIGUSR1"
                say(f"no progress for {stalled_s:.0f} s, usually {self.usual_s():.1f} s; {stacks}")

    @property
    def saved_ago_s(self) -> float | None:
        """How long ago its newest checkpoint was finished, as far as one can see."""
        return None if self._saved_at is None else max(0.0, _file_clock() - self._saved_at)

    def look_for_saves(self, settle_s: float = limits.CHECKPOINT_SETTLE_S) -> None:
        """What rests under a name that is not temporary is finished; only the directory itself is read."""
        if self.checkpoints is None:
            return
        try:
            with os.scandir(self.checkpoints) as found:
                times = [each.stat(follow_symlinks=False).st_mtime for each in found if not TEMPORARY.search(each.name)]
        except OSError:
            return  # not there yet, or just replaced
        rested = [at for at in times if at <= _file_clock() - settle_s]
        self._saved_at = max((at for at in (self._saved_at, *rested) if at is not None), default=None)

    def look(self) -> bool:
        """Read what it says; whether that is new."""
        try:
            found = self._path.stat()
        except OSError:
            return False
        if (found.st_mtime_ns, found.st_size) == self._seen:
            return False
        self._seen = (found.st_mtime_ns, found.st_size)
        said = read_progress(self._path)
        done = _number(said.get("done")) if said is not None else None
        if said is None or done is None:
            return False
        if self.said is None or done != self.said.done:
            self._moved()
        metrics = said.get("metrics")
        known = metrics if isinstance(metrics, dict) and self.hidden is not None else {}
        named = {hide(str(name), self.hidden or ()): _number(value) for name, value in known.items()}
        numbers = {name: number for name, number in named.items() if number is not None}
        save_s = _number(said.get("save_s"))
        self.said = ProgressView(
            done=done,
            total=_number(said.get("total")),
            metrics=numbers,
            save_s=save_s if save_s is not None and save_s >= 0 else None,
        )
        units = said.get("open_units")
        self.open_units = units if isinstance(units, int) and units >= 0 else self.open_units
        holding = said.get("holding")
        self.holding = holding if isinstance(holding, bool) else self.holding
        return True

    def stalled_s(self) -> float | None:
        """For how long nothing moved, if that is far beyond the usual."""
        if self._moved_at is None or len(self._paces) < STEPS_LEAST:
            return None
        still_s = self._clock() - self._moved_at
        return still_s if still_s > max(STALL_LEAST_S, STALL_FACTOR * self.usual_s()) else None

    def usual_s(self) -> float:
        return sorted(self._paces)[len(self._paces) // 2]

    def _moved(self) -> None:
        now = self._clock()
        if self._moved_at is not None:
            self._paces.append(now - self._moved_at)
        self._moved_at = now
        self._dumped = False


def _file_clock() -> float:
    return time.time()  # noqa: TID251 (files carry the time of this machine)


def _number(value: object) -> float | None:
    """A finite number, whatever the payload wrote."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
