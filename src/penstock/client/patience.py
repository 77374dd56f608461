"""How long a call goes on trying, and how long it rests between tries.

Both transports ask it after each failure; it is pure arithmetic over a given clock, so that both behave alike. It
decides when to try again, never what: whether a call may be repeated at all is said by the call (`client.calls`).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Final

from penstock.client.errors import ApiError
from penstock.domain import limits

RETRIED_STATUSES: Final = frozenset({429, 502, 503, 504})  #: refused for now, by the server or a proxy before it


class Patience:
    """One call's budget: `total_s` for everything; from its first failure on `refused_s` to get an answer."""

    def __init__(
        self,
        refused_s: float,
        total_s: float = math.inf,
        *,
        clock: Callable[[], float] = time.monotonic,
        dice: random.Random | None = None,
    ) -> None:
        self._refused_s = refused_s
        self._total_s = total_s
        self._clock = clock
        self._dice = dice or random.Random()
        self._ends = clock() + total_s
        self._refused_ends: float | None = None
        self._rest_s = limits.CLIENT_REST_FIRST_S

    @property
    def attempt_s(self) -> float:
        """How long one try may last: half of the call, so that one dead connection leaves time for a live one."""
        return max(0.0, min(self._ends - self._clock(), self._total_s / 2))

    def rest(self, retry_after_s: float | None = None) -> float | None:
        """How long to rest before the next try; None: give up now.

        Rests double and are spread at random over their upper half, so that clients of one dead server do not come back
        in step. A server that says when to come back is obeyed.
        """
        now = self._clock()
        if self._refused_ends is None:
            self._refused_ends = now + self._refused_s
        rest = self._rest_s * self._dice.uniform(0.5, 1.0)
        self._rest_s = min(limits.CLIENT_REST_MAX_S, 2 * self._rest_s)
        if retry_after_s is not None:
            rest = max(rest, retry_after_s)
        return rest if now + rest < min(self._ends, self._refused_ends) else None

    def renew(self) -> None:
        """A stream made progress: the next break starts from fresh patience."""
        self._refused_ends = None
        self._rest_s = limits.CLIENT_REST_FIRST_S


def may_retry(error: ApiError) -> bool:
    """Whether the same request may be answered better later."""
    return error.status in RETRIED_STATUSES
