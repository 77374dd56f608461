"""What the API says about reservations: who holds a slice or a pool, since when, until when, and why.

As in `wire.api`: one shape for `server`, which answers it, and `client`, which reads it. Structs alone, no rules.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.domain.budgets import LIMIT_MAX, Unit, Window


class ReservationView(msgspec.Struct, frozen=True, kw_only=True):
    """Meanwhile only this user's jobs start there. `of` says what was reserved: the slice itself, or its pool."""

    of: str
    user: str
    since: float
    until: float
    note: str = ""


class ReserveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Reserve for oneself; administrators may reserve for another, and take a reservation over."""

    for_s: Annotated[float, Meta(gt=0, le=2_592_000)] = 43_200.0  #: it ends by itself after this
    note: str = ""
    user: str | None = None


class BudgetRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a queue may spend in a calendar day, week or month (UTC)."""

    limit: Annotated[float, Meta(ge=0, le=LIMIT_MAX)]
    unit: Unit = Unit.USD
    window: Window = Window.MONTH


class BudgetView(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's budget, and what of it is spent in the current day, week or month."""

    limit: float
    unit: str  #: usd or chip_hours
    window: str
    spent: float
    unpriced_chip_s: float = 0.0  #: time that has no known price, and so is not in a sum of dollars
    since: float = 0.0
