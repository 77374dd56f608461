"""What the API says about chip-seconds and money: `GET /v1/cost`, and the same of one job.

`server.cost` makes these, `client` and `tpu cost` read them. Times are chip-seconds: one chip for one second. Money is
null as soon as a part of it has no known price; `usd_known` is the rest. It must not compute anything.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class CostRow(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of one job, user, queue or zone. The five parts add up to `chip_s`; waiting is not among them."""

    key: str
    #: "nobody": slices that nobody held; "forgotten": jobs that were cleaned away; "others": rows beyond the limit.
    kind: Literal["one", "nobody", "forgotten", "others", "total"] = "one"
    chip_s: float = 0.0
    useful_chip_s: float = 0.0
    lost_chip_s: float = 0.0  #: since the last checkpoint
    unknown_chip_s: float = 0.0  #: still running and not saved, or nobody knows whether it was saved
    setup_chip_s: float = 0.0
    idle_chip_s: float = 0.0
    waited_chip_s: float = 0.0  #: in the queue; nobody held these chips
    usd: float | None = 0.0
    usd_known: float = 0.0
    unpriced_chip_s: float = 0.0
    goodput: float | None = None  #: useful by all; what is unknown may be useful as well
    attempts: int = 0
    losses: int = 0  #: attempts whose capacity was taken away


class CostPage(msgspec.Struct, frozen=True, kw_only=True):
    by: str
    since: float
    until: float
    rows: tuple[CostRow, ...]
    total: CostRow


class JobCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one job used since it began, and how often it should save."""

    id: str
    row: CostRow
    saves: int = 0  #: checkpoints the server has seen
    losses: int = 0
    save_s: float | None = None  #: what one save costs; null: the payload does not say (`payload.saving`)
    between_losses_s: float | None = None
    save_every_s: float | None = None  #: null: not enough is known
    advice: str = ""
    attempts: tuple[CostRow, ...] = ()  #: each by its id, and they add up to `row`; a job's own view leaves them out
