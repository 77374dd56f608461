"""Which of many things are due, at the cost of those that are: a heap that tolerates what has changed since.

The snapshot keeps one for the timeouts of live attempts. The clock may jump either way, so nothing is taken out when it
becomes due; it is taken out when it is dropped. It knows no attempts and no limits.
"""

from __future__ import annotations

from heapq import heapify, heappush

from typing_extensions import override

_SLACK = 64  #: stale entries that are always put up with


class Deadlines:
    """Times by id."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  #: with entries of dropped and moved ids among the true ones

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Deadlines) and self._at == other._at

    __hash__ = None  # type: ignore[assignment]

    def put(self, id: str, at: float) -> None:
        if self._at.get(id) == at:
            return
        self._at[id] = at
        heappush(self._heap, (at, id))
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            self._heap = [(at, id) for id, at in self._at.items()]
            heapify(self._heap)

    def drop(self, id: str) -> None:
        self._at.pop(id, None)

    def before(self, time: float) -> set[str]:
        """Ids whose time came before then."""
        found: set[str] = set()
        look = [0]
        while look:
            position = look.pop()
            if position >= len(self._heap) or self._heap[position][0] >= time:
                continue  # nothing below it in the heap is earlier
            at, id = self._heap[position]
            if self._at.get(id) == at:
                found.add(id)
            look += (2 * position + 1, 2 * position + 2)
        return found
