"""How long to wait before trying again, and how loudly to say so.

Whatever the bridge does is tried until it is done: a write that is given up would leave a document that never ends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Final

logger = logging.getLogger(__name__)

FIRST_S: Final = 0.1
MOST_S: Final = 5.0
LOUD_AFTER: Final = 3  #: tries; one lost call is no news


class Patience:
    """The pauses of one thing that is tried again and again: doubling, with chance, reset when it has worked."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self.tries = 0

    def renew(self) -> None:
        if self.tries > LOUD_AFTER:
            logger.info("%s works again", self._doing)
        self.tries = 0

    async def rest(self, why: object) -> None:
        self.tries += 1
        longest = min(MOST_S, FIRST_S * 2 ** min(self.tries - 1, 16))
        level = logging.WARNING if self.tries in (LOUD_AFTER, 10 * LOUD_AFTER) else logging.DEBUG
        logger.log(level, "%s failed %d times: %s", self._doing, self.tries, why)
        await asyncio.sleep(longest * (0.5 + secrets.randbelow(500) / 1000))
