"""The three histories the checker reads, and nothing else: what clients saw, what was committed, what truly happened.

The simulator and the process tests append with a `Recorder`; the rules only read. `seq` is the store's commit order
at the moment of recording and the only order between sources; `t` is a time for deadlines, never for ordering.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.domain.nouns import Event


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the clients' or the world's history. `seq`: events committed before it was recorded."""

    order: int
    seq: int
    t: float
    kind: str
    subject: str
    body: dict[str, object] = {}


class History(msgspec.Struct, kw_only=True):
    """Everything a rule may look at."""

    events: list[Event] = []
    clients: list[Record] = []
    world: list[Record] = []


class Recorder:
    """Appends to a history, stamping order, commit seq and time."""

    def __init__(self, history: History, seq: Callable[[], int], t: Callable[[], float]) -> None:
        self.history = history
        self._seq = seq
        self._t = t
        self._order = 0

    def client(self, kind: str, subject: str, **body: object) -> None:
        self.history.clients.append(self._record(kind, subject, body))

    def world(self, kind: str, subject: str, **body: object) -> None:
        self.history.world.append(self._record(kind, subject, body))

    def _record(self, kind: str, subject: str, body: dict[str, object]) -> Record:
        self._order += 1
        return Record(order=self._order, seq=self._seq(), t=self._t(), kind=kind, subject=subject, body=body)
