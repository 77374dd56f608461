"""Ids that sort by time: a letter for the kind, ten characters of milliseconds, six that tell twins apart.

The controller's commands and the simulator make ids here. Clock and entropy are arguments: an `IdMaker` only
guarantees that ids made by it in one process rise strictly, even within one millisecond or after a clock step back.
"""

from __future__ import annotations

from collections.abc import Callable

#: No i, l, o, u: an id survives being read aloud or copied by hand.
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_TWIN_BITS = 30
_TIME_CHARACTERS = 10
_TWIN_CHARACTERS = 6

KINDS = {"job": "j", "attempt": "a", "slice": "s", "race": "r"}


def encode(number: int, characters: int) -> str:
    """`number` in the alphabet above, most significant first, padded to `characters`."""
    digits = []
    for _ in range(characters):
        digits.append(ALPHABET[number & 31])
        number >>= 5
    return "".join(reversed(digits))


class IdMaker:
    """Strictly rising ids for one process."""

    def __init__(self, entropy: Callable[[], int]) -> None:
        self._entropy = entropy
        self._last_ms = -1
        self._twin = 0

    def make(self, kind: str, now_s: float) -> str:
        """A new id of `kind` ("job", "attempt", "slice", "race") at `now_s` seconds since the epoch."""
        now_ms = int(now_s * 1000)
        if now_ms > self._last_ms:
            self._last_ms = now_ms
            # The top bit stays free so that a burst inside one millisecond has room to count up.
            self._twin = self._entropy() & ((1 << (_TWIN_BITS - 1)) - 1)
        else:
            self._twin += 1
        return KINDS[kind] + encode(self._last_ms, _TIME_CHARACTERS) + encode(self._twin, _TWIN_CHARACTERS)
