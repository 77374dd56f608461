"""The timer that applies the retention policy: what `tpu clean` does when asked, done by the server now and then.

`wiring.serve` runs `keep` beside the controller. Only the leader cleans, a bounded number of parts per pass, and the
next pass goes on where the last one stopped; between two parts a `tpu clean` may have its turn. What may go is decided
by `server.cleaning`. Trouble with store or bucket ends a pass, never the server.
"""

from __future__ import annotations

import logging
from collections import Counter

from penstock.domain import limits
from penstock.ports.objects import ObjectsError
from penstock.ports.store import StoreError
from penstock.server.cleaning import Cleaner, wanted_by
from penstock.server.service import Service

logger = logging.getLogger(__name__)


async def keep(service: Service) -> None:
    """Clean for ever, at the policy's pace; the first time soon, because embedded servers do not live long."""
    policy = service.settings.retention
    cursor: str | None = None
    wait_s = min(limits.RETENTION_FIRST_S, policy.every_s)
    while True:
        await service.clock.sleep(wait_s)
        wait_s = policy.every_s
        cursor = await one_pass(service, cursor) if service.controller.leading else None


async def one_pass(service: Service, cursor: str | None) -> str | None:
    """A bounded part of the work; where the next pass goes on, None at the beginning."""
    cleaner = Cleaner(service, service.controller.commands, team=None)
    wanted = wanted_by(service.settings.retention, service.clock.now())
    counts: Counter[str] = Counter()
    size = 0
    try:
        for _ in range(limits.RETENTION_PARTS):
            part = await cleaner.part(wanted, cursor)
            for view in part.removed:
                counts[view.kind] += view.count
                size += view.bytes
            cursor = part.next
            if cursor is None:
                break
    except (StoreError, ObjectsError) as error:
        logger.warning("retention: this pass ends early: %s", error)
        cursor = None
    if counts:
        what = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        logger.info("retention: removed %s (%d bytes)", what, size)
    return cursor
