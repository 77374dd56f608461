"""Queues and jobs as one admission round walks over them.

`planner.admission` makes a `Line` for every queue that has something waiting and takes one `Unit` after another from
it. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final, NamedTuple

from penstock.domain import limits
from penstock.domain.nouns import Job, Queue
from penstock.planner.snapshot import QueueView

NOBODY: Final = (limits.PRIORITY_MAX + 1, "")  #: comes after every job


class Outcome(Enum):
    STARTED = "started"
    WAITS = "waits"
    PASSED_OVER = "passed over"  #: cannot start and holds nobody up: infeasible, or in back-off
    BORROWS = "borrows"  #: its turn comes in the second pass


class Unit(NamedTuple):
    """One replica of a job that should start. `due` is False for a gang in back-off, which only keeps slices."""

    order: tuple[int, str, int]
    job: Job
    replica: int
    due: bool


class Line:
    """One queue during a round."""

    def __init__(self, view: QueueView, units: Iterator[Unit], in_backoff: tuple[int, str]) -> None:
        self.view = view
        self.queue: Queue = view.queue
        self._units = units
        self.unit: Unit | None = next(units, None)
        self.waiting: list[Callable[[], float]] = []  #: shadow starts of jobs that wait, computed when asked for
        self.overtakes = False  #: an earlier job of the queue has not started
        self.in_backoff = in_backoff  #: the first job of the queue that may not start yet
        self.may_reclaim = True  #: so far every job that waits has what it needs on its way

    def advance(self) -> None:
        self.unit = next(self._units, None)
